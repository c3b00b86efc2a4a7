# SPDX-License-Identifier: Apache-2.0
"""The world in which decisions are timed is one in which there is something to decide."""

import argparse
import random

from benchmarks.decision_costs import World, measure, row
from vllm_lifetime.policy.prefetch import PrefetchBudget

BLOCKS = 2000
WORKFLOWS = 4


def test_there_is_nothing_to_prefetch_after_some_decisions() -> None:
    """As much goes down as comes up: the last decision timed has as much to choose from as the first, and pays for it."""
    world, rng = World(BLOCKS, WORKFLOWS), random.Random(0)
    while len(world.host) + 16 <= len(world.host.slots):
        world.put_below(rng)
    world.fill_up(rng)
    num_below = len(world.host)
    for _ in range(30):
        while world.hbm.num_empty_blocks < 32:
            world.put_below(rng)
        chosen = world.planner.choose(PrefetchBudget(32, 1.0))
        assert len(chosen) == 32
        world.bring_up([slot for _, slot in chosen])
    assert abs(len(world.host) - num_below) <= 48


def test_every_decision_is_timed() -> None:
    """A small world gives a row for each decision, with a mean and a nearest-rank 99th percentile."""
    arguments = argparse.Namespace(workflows=WORKFLOWS, step_blocks=16, repeats=20)
    rows = measure(BLOCKS, arguments)
    decisions = ["evict", "score update, per run", "invocation", "place run", "prefetch", "prefetch, nothing"]
    assert [each["decision"] for each in rows] == decisions
    assert all(each["count"] >= 2 and each["mean_us"] > 0 and each["p99_us"] > 0 for each in rows)
    assert row("prefetch", 1, [float(i) for i in range(1, 201)])["p99_us"] == 0.198
