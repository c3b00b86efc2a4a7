# SPDX-License-Identifier: Apache-2.0
"""The order of workers' lifetimes, predicted at spawn."""

import numpy as np

from vllm_lifetime.analysis.spawn_rank import MIN_WORKERS, Spawn, rank_spawns
from vllm_lifetime.prediction.selection import Shares, selection_shares


def spawns(count: int, sessions: int) -> list[Spawn]:
    """Lifetimes grow with the first prompt."""
    rng = np.random.default_rng(1)
    sizes = rng.integers(100, 10_000, count)
    return [Spawn(f"s{i % sessions}", "w", int(size), 0, 0, float(size) ** 1.2) for i, size in enumerate(sizes)]


def test_an_order_that_the_prompt_tells_is_found() -> None:
    rank = rank_spawns(spawns(40, 8))
    assert rank is not None
    assert rank.tau is not None
    assert rank.tau > 0.98
    assert selection_shares(rank.predicted, rank.lifetimes_s, 10) == Shares(10, 1.0, 1.0, 1.0)


def test_noise_is_not_found_since_no_worker_is_scored_by_its_own_session() -> None:
    rng = np.random.default_rng(0)
    rows = [Spawn(f"s{i % 10}", f"role{i}", 100, 0, 0, float(rng.exponential(100))) for i in range(200)]
    rank = rank_spawns(rows)
    assert rank is not None
    assert rank.tau is not None
    assert abs(rank.tau) < 0.2


def test_too_few_workers_or_sessions_say_nothing() -> None:
    assert rank_spawns(spawns(MIN_WORKERS - 1, 8)) is None
    assert rank_spawns(spawns(40, 4)) is None
