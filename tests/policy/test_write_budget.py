# SPDX-License-Identifier: Apache-2.0
"""A day's budget of bytes: never exceeded, never starved for good."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.policy.write_budget import DAY_S, WriteBudget

BUDGET = 80_000
BLOCK = 100


@given(st.lists(st.tuples(st.floats(0, DAY_S / 3), st.integers(0, 2 * BUDGET)), min_size=1, max_size=60))
def test_no_24_hours_see_more_than_the_budget(steps: list[tuple[float, int]]) -> None:
    """A writer that takes whatever it may, at any times."""
    budget = WriteBudget(BUDGET, BLOCK, 0.0)
    now, written = 0.0, []
    for wait, wanted in steps:
        now += wait
        length = min(wanted, budget.available(now)) // BLOCK * BLOCK
        if length:
            budget.spend(length)
            written.append((now, length))
    for end, _ in written:
        assert sum(length for at, length in written if end - DAY_S < at <= end) <= BUDGET


def test_a_greedy_writer_gets_the_whole_budget() -> None:
    """In the second day, all but what the last pause holds back."""
    budget = WriteBudget(BUDGET, BLOCK, 0.0)
    written = 0
    for minute in range(2 * 24 * 60):
        length = budget.available(60.0 * minute) // BLOCK * BLOCK
        budget.spend(length)
        written += length if minute >= 24 * 60 else 0
    assert 0.8 * BUDGET <= written <= BUDGET


def test_used_up_waits_for_more_than_one_block() -> None:
    budget = WriteBudget(BUDGET, BLOCK, 0.0)
    assert budget.available(0.0) == BUDGET // 8
    budget.spend(BUDGET // 8)
    assert budget.is_used_up and budget.available(0.0) == 0
    seconds_for_a_block = BLOCK / (BUDGET * 7 / 8 / DAY_S)
    assert budget.available(2 * seconds_for_a_block) == 0
    assert budget.available(26 * seconds_for_a_block) >= BUDGET // 8 // 4
    assert not budget.is_used_up


def test_failed_writes_are_given_back() -> None:
    budget = WriteBudget(BUDGET, BLOCK, 0.0)
    budget.spend(5000)
    budget.give_back(3000)
    assert budget.available(0.0) == BUDGET // 8 - 2000
    budget.give_back(10**9)
    assert budget.available(0.0) == BUDGET // 8


def test_a_restart_does_not_renew_the_budget() -> None:
    """What was written just before counts in full, what was written half a day ago has come in again."""
    budget = WriteBudget(BUDGET, BLOCK, 0.0)
    budget.replay([0] * 287 + [BUDGET // 8], 300)
    assert budget.is_used_up and budget.available(0.0) == 0
    budget.replay([0] * 100 + [BUDGET // 8] + [0] * 187, 300)
    assert budget.available(0.0) == BUDGET // 8


def test_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="too few to write one block of 100 bytes at a time: at least 800 are needed"):
        WriteBudget(799, BLOCK, 0.0)
    assert WriteBudget(800, BLOCK, 0.0).available(0.0) == BLOCK
