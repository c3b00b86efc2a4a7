# SPDX-License-Identifier: Apache-2.0
"""What a command takes at most, known without the simulator, which its help does not need."""

__all__ = ["MAX_CONCURRENCY"]

MAX_CONCURRENCY = 100_000
"""Sessions at a time."""
