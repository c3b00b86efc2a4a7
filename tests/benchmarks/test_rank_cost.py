# SPDX-License-Identifier: Apache-2.0
"""What is timed are spawns as large as their kind says."""

import random

from benchmarks.rank_cost import make_spawns, measure
from vllm_lifetime.boundaries import MAX_SPAWN_TEXT_LENGTH, Spawn


def test_every_call_is_timed() -> None:
    rows = measure(repeats=5)
    assert [row["call"] for row in rows] == ["score, role and length", "score, usual", "score, largest", "observe, usual"]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)


def test_the_largest_spawn_is_as_large_as_a_boundary_allows() -> None:
    largest = make_spawns(random.Random(0))["largest"][0]
    assert largest.instruction is not None and len(largest.instruction) == MAX_SPAWN_TEXT_LENGTH
    assert len(Spawn(instruction=largest.instruction, context=largest.context, tools=largest.tools).tools) == 256
