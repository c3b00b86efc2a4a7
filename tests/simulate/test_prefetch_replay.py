# SPDX-License-Identifier: Apache-2.0
"""Prefetch in replays: what it may displace, how much it may copy, and what becomes of it."""

import pytest

from vllm_lifetime.policy.eviction import parse_policy
from vllm_lifetime.pool.runs import ACTIVE_RANK
from vllm_lifetime.simulate.engine import ReplayResult, replay
from vllm_lifetime.simulate.prefetch import PrefetchingPolicy, _Candidate
from vllm_lifetime.simulate.schedule import Schedule, make_schedule, mean_final_context_blocks
from vllm_lifetime.simulate.scored import Models
from vllm_lifetime.traces.generate import generate_workload

CONCURRENCY = 6


class Watched(PrefetchingPolicy):
    """Looks at the cache before and after each fetch."""

    num_fetched = 0
    num_displaced = 0
    num_unranked = 0

    def _prefetch(self, now: float) -> None:
        may_displace = max(0, int(self._rho * self._cache.capacity_blocks) - self._num_unread())
        before = self.num_displaced
        super()._prefetch(now)
        assert self.num_displaced - before <= may_displace

    def _num_active(self) -> int:
        return sum(run.end - run.start for run in self._cache.runs() if not run.is_retired)

    def _fetch(self, candidate: _Candidate, start: int, end: int) -> None:
        before = self._num_active()
        assert self._cache.count_hits(candidate.path) == start
        super()._fetch(candidate, start, end)
        assert self._cache.count_hits(candidate.path) == end
        self.num_fetched += end - start
        self.num_displaced += before + end - start - self._num_active()
        new = [run for run in candidate.reading.output.runs if run.end == end]
        self.num_unranked += sum(run.rank == ACTIVE_RANK for run in new)


@pytest.fixture(scope="module")
def capacity_blocks() -> int:
    return int(1.5 * CONCURRENCY * mean_final_context_blocks(generate_workload("swebench-autogen", 12, 1)))


@pytest.fixture(scope="module")
def schedule(capacity_blocks: int) -> Schedule:
    return make_schedule(generate_workload("swebench-autogen", 12, 1), CONCURRENCY, capacity_blocks=capacity_blocks)


@pytest.fixture(scope="module")
def aggressive(schedule: Schedule, capacity_blocks: int) -> tuple[Watched, ReplayResult]:
    return watch(schedule, capacity_blocks, 0.1)


def watch(schedule: Schedule, capacity_blocks: int, rho: float, blocks_per_s: float = 1000.0) -> tuple[Watched, ReplayResult]:
    policy = Watched(parse_policy("pbkv"), Models(), blocks_per_s, rho)
    return policy, replay(schedule, policy, capacity_blocks)


def test_conservative_prefetch_displaces_nothing_that_is_active(schedule: Schedule, capacity_blocks: int) -> None:
    policy, result = watch(schedule, capacity_blocks, 0.0)
    assert policy.num_fetched > 0
    assert policy.num_displaced == 0
    assert result.overcommitted_requests == 0


def test_aggressive_prefetch_displaces_at_most_its_share(aggressive: tuple[Watched, ReplayResult]) -> None:
    policy, result = aggressive
    assert policy.num_displaced > 0
    assert result.overcommitted_requests == 0


def test_what_was_prefetched_was_the_next_to_be_evicted(aggressive: tuple[Watched, ReplayResult]) -> None:
    """It came up as if nobody had scored it, below all else that is active."""
    policy, _ = aggressive
    assert policy.num_fetched > 0
    assert policy.num_unranked == 0


def test_a_slow_link_copies_no_more_than_it_can(
    schedule: Schedule, capacity_blocks: int, aggressive: tuple[Watched, ReplayResult]
) -> None:
    slow, _ = watch(schedule, capacity_blocks, 0.1, blocks_per_s=2.0)
    assert 0 < slow.num_fetched <= 2.0 * schedule.events[-1].at_s
    assert slow.num_fetched < aggressive[0].num_fetched
