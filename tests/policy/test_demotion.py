# SPDX-License-Identifier: Apache-2.0
"""What is copied down ahead of its eviction."""

from vllm_lifetime.policy.demotion import next_to_demote
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Run, retired_rank
from vllm_lifetime.pool.tiers import Slot


def cached(num_empty: int, num_retired: int, num_cached: int) -> tuple[TierFreeList[Slot], list[Slot]]:
    """A free list with so many blocks of each state; the cached ones are blocks 100, 101, ..., next victim first."""
    slots = [Slot(i) for i in range(300)]
    free_list: TierFreeList[Slot] = TierFreeList(slots, 0)
    taken = free_list.popleft_n(300)
    free_list.prepend_n(taken[:num_empty])
    run = Run(0, 1000, 1)
    run.rank = retired_rank(1)
    for i in range(num_retired):
        slot = slots[50 + i]
        slot.block_hash, slot.block_hash_num_tokens = bytes([i]), 16 * (1000 - i)
        free_list.set_run(slot, run)
        free_list.append_n((slot,))
    for i in range(num_cached):
        slot = slots[100 + i]
        slot.block_hash, slot.block_hash_num_tokens = bytes([100, i]), 16
        free_list.append_n((slot,))
    return free_list, slots


def ids(slots: list[Slot]) -> list[int]:
    """Their numbers."""
    return [slot.block_id for slot in slots]


def test_the_next_victims_come_first() -> None:
    """In eviction order, as many as asked for."""
    free_list, _ = cached(0, 0, 20)
    assert ids(next_to_demote(free_list, 10, 4, lambda slot: True)) == [100, 101, 102, 103]
    assert ids(next_to_demote(free_list, 3, 10, lambda slot: True)) == [100, 101, 102]


def test_empty_and_retired_blocks_shorten_the_way() -> None:
    """They are evicted first, and are never candidates themselves."""
    free_list, _ = cached(5, 3, 20)
    assert ids(next_to_demote(free_list, 10, 10, lambda slot: True)) == [100, 101]
    assert next_to_demote(free_list, 8, 10, lambda slot: True) == []


def test_copied_blocks_are_passed_over_but_count_as_way() -> None:
    """Only what is within reach is looked at."""
    free_list, _ = cached(0, 0, 20)
    assert ids(next_to_demote(free_list, 6, 10, lambda slot: slot.block_id % 2 == 1)) == [101, 103, 105]


def test_nothing_is_looked_at_without_need() -> None:
    """No reach or no room: the predicate is not even called."""
    free_list, _ = cached(50, 0, 20)

    def never(slot: Slot) -> bool:
        raise AssertionError("looked at")

    assert next_to_demote(free_list, 50, 10, never) == []
    assert next_to_demote(free_list, 100, 0, never) == []
