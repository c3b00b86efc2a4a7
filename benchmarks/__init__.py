# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that run a real vLLM server, and what they share."""
