# SPDX-License-Identifier: Apache-2.0
"""The helpers of this folder are imported by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def scripted_counters_settle_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted server's counters are up to date with its answers."""
    monkeypatch.setattr("vllm_lifetime.bench.server.SETTLING_S", 0.01)
