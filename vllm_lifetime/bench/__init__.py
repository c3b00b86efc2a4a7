# SPDX-License-Identifier: Apache-2.0
"""Replays a trace of agents on a live OpenAI-compatible server and measures what its users would see. Imports no vLLM."""
