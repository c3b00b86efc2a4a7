# SPDX-License-Identifier: Apache-2.0
"""A change that makes a hot path much dearer is told.

No limit is in seconds: each cost is divided by that of a reference measured in the same run, so that neither a slow nor a busy
machine matters much. Where it can be, the reference is what the path replaces: stock vLLM's pool, `memcpy`, plain file IO. For
decisions it is a fixed piece of Python. The figures themselves are in docs/costs.md and docs/scorer.md.
"""

import argparse
import heapq
import json
import statistics
import time

import pytest

from benchmarks import decision_costs, flash_device, host_copies, rank_cost
from benchmarks.block_pool import measure_calls
from benchmarks.boundary_load_generator import make_events
from benchmarks.timing import QuietGc
from vllm_lifetime.boundaries import Boundary
from vllm_lifetime.lifecycle import Lifecycle

KIB, MIB = 1 << 10, 1 << 20

POOL_LIMITS = {0: 2.0, 100: 2.0}
"""By runs that the blocks are spread over (0: no metadata): at most so many times what stock vLLM's pool costs."""

DECISION_LIMITS = {
    "evict": 4.0,
    "score update, per run": 0.2,
    "invocation": 22.0,
    "place run": 1.0,
    "prefetch": 26.0,
    "predict, online": 3.5,
    "score, usual": 4.0,
}
"""By decision: at most so many times the reference, about three times what was measured when the limit was set."""

EVENT_LIMIT = 13.0
"""An event, validated and acted on: at most so many times reading it as JSON."""

COPY_LIMIT = 0.5
"""Store and load of 64 KiB pages: at least so much of `memcpy`'s bandwidth."""

FLASH_LIMIT = 0.3
"""Write and read of 2 MiB slots, page cache warm: plain file IO takes at least so much of their CPU time."""


def reference_us() -> float:
    """CPU time of 64 tuples that go through a heap and a dictionary."""
    times = []
    with QuietGc():
        for _ in range(300):
            start = time.thread_time_ns()
            heap: list[tuple[float, int]] = []
            for number in range(64):
                heapq.heappush(heap, (number * 0.618 % 1.0, number))
            found = {}
            while heap:
                value, number = heapq.heappop(heap)
                found[number] = value
            times.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(times)


@pytest.fixture(scope="module")
def decisions() -> dict[str, float]:
    """Mean cost by decision, in references: 20,000 blocks of 72 workflows."""
    before_us = reference_us()
    rows = decision_costs.measure(20_000, argparse.Namespace(workflows=72, step_blocks=64, repeats=300))
    rows += decision_costs.measure_predictions("predict, online", decision_costs.learned_model(), 300)
    costs_us = {row["decision"]: row["mean_us"] for row in rows}
    costs_us |= {row["call"]: row["mean_us"] for row in rank_cost.measure(100)}
    each_us = (before_us + reference_us()) / 2
    return {name: us / each_us for name, us in costs_us.items()}


@pytest.fixture(scope="module")
def copies() -> dict[str, float]:
    """Bandwidth by operation, in that of `memcpy`.

    The best of some tries: the engine copies on a thread of its own, which a busy machine may keep waiting.
    """
    best: dict[str, float] = {}
    for _ in range(8):
        for row in host_copies.measure(64 * KIB, layers=4, working_set=64 * MIB, copy_bytes=8 * MIB, repeats=5):
            best[row["operation"]] = max(row["ratio"], best.get(row["operation"], 0.0))
        if min(best.values()) > COPY_LIMIT:
            break
    return best


@pytest.fixture(scope="module")
def flash_file(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """CPU time of plain file IO by operation, in that of the flash file."""
    folder = tmp_path_factory.mktemp("flash")
    rows = flash_device.measure(folder, 2 * MIB, 4, 1, working_set=32 * MIB, repeats=5, is_cold=False)
    return {row["operation"]: row["device_cpu_ratio"] for row in rows}


@pytest.mark.parametrize("num_runs", POOL_LIMITS)
def test_the_pool_costs_much_more_than_stock(num_runs: int) -> None:
    """A block handed out, hit once and given back."""
    [cycle] = [row["ratio"] for row in measure_calls(4000, num_runs, [16], 9) if row["operation"] == "cycle"]
    assert 0.1 < cycle < POOL_LIMITS[num_runs]


@pytest.mark.parametrize("decision", DECISION_LIMITS)
def test_a_decision_has_become_much_dearer(decisions: dict[str, float], decision: str) -> None:
    print(f"{decision}: {decisions[decision]:.3f} references")
    assert 0 < decisions[decision] < DECISION_LIMITS[decision]


def test_an_event_has_become_much_dearer() -> None:
    lifecycle = Lifecycle(lambda reader: 0, block_bytes=1)
    texts = [json.dumps(event) for event in make_events(2000, [f"s-{number}" for number in range(50)], "guard")]
    ours_us, plain_us = [], []
    with QuietGc():
        for text in texts:
            start = time.thread_time_ns()
            json.loads(text)
            middle = time.thread_time_ns()
            lifecycle.apply(Boundary.model_validate_json(text))
            plain_us.append((middle - start) / 1e3)
            ours_us.append((time.thread_time_ns() - middle) / 1e3)
    ratio = statistics.median(ours_us) / statistics.median(plain_us)
    print(f"an event: {ratio:.2f} times its JSON")
    assert 0 < ratio < EVENT_LIMIT


@pytest.mark.parametrize("operation", ["store", "load"])
def test_copies_have_become_much_slower(copies: dict[str, float], operation: str) -> None:
    print(f"{operation}: {copies[operation]:.2f} of memcpy")
    assert copies[operation] > COPY_LIMIT


@pytest.mark.parametrize("operation", ["write", "read"])
def test_the_flash_file_has_become_much_slower(flash_file: dict[str, float], operation: str) -> None:
    print(f"{operation}: plain file IO takes {flash_file[operation]:.2f} of its CPU time")
    assert flash_file[operation] > FLASH_LIMIT
