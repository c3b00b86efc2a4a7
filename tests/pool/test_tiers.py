# SPDX-License-Identifier: Apache-2.0
"""`SlotTier` against a dict: nothing is lost, nothing is readable twice, what can be evicted can be had."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from vllm_lifetime.pool.runs import ACTIVE_RANK, Rank, Run, retired_rank
from vllm_lifetime.pool.tiers import Slot, SlotTier

TIER = 1
NUM_TIERS = 3
NUM_HASHES = 8
SETTINGS = settings(max_examples=120, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
RANKS: list[Rank] = [ACTIVE_RANK, (1, 2.0, 0.0), retired_rank(1), retired_rank(3)]
HASHES = [bytes([number]) * 32 for number in range(NUM_HASHES)]


class TierMachine(RuleBasedStateMachine):
    """Transfers come, hold slots, and end in any order."""

    @initialize(num_slots=st.integers(0, 6), num_runs=st.integers(1, 3))
    def start(self, num_slots: int, num_runs: int) -> None:
        self.evicted: list[bytes] = []
        self.tier = SlotTier("host", TIER, num_slots, self.on_evict)
        self.capacity = num_slots
        self.runs = [Run(0, NUM_HASHES, NUM_TIERS) for _ in range(num_runs)]
        self.writing: list[Slot] = []
        self.reading: list[Slot] = []
        """Slots with a reader's hold, one entry per hold; may have been forgotten meanwhile."""
        self.readable: dict[bytes, int] = {}
        self.run_of: dict[int, Run | None] = {}

    def on_evict(self, slot: Slot) -> None:
        assert slot.block_hash is not None
        assert self.tier.get(slot.block_hash) is slot, "the hash is to be seen before it is forgotten"
        assert self.tier.run_of(slot) is self.run_of[slot.block_id]
        assert slot.ref_cnt == 0
        self.evicted.append(slot.block_hash)

    def model_forget(self, slot: Slot) -> None:
        if slot.block_hash is not None and self.readable.get(slot.block_hash) == slot.block_id:
            del self.readable[slot.block_hash]
            del self.run_of[slot.block_id]

    # ------------------------------------------------------------------ writing

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        order = self.tier.free_list.get_all_free_blocks()
        reclaimable = self.tier.num_reclaimable
        num_writing, num_reading = len(self.writing), len({slot.block_id for slot in self.reading})
        self.evicted.clear()
        slots = self.tier.allocate(count)
        # R14: whatever no transfer holds can be had, and at once.
        assert len(slots) == min(count, self.capacity - num_writing - num_reading)
        assert slots == order[:count]
        hashes = {slot_id: block_hash for block_hash, slot_id in self.readable.items()}
        assert self.evicted == [hashes[slot.block_id] for slot in slots if slot.block_id in hashes]
        # Nothing is evicted that an active workflow may read, as long as there is something else.
        live = [h for h in self.evicted if not self.is_retired(self.readable[h])]
        assert len(live) == max(0, len(slots) - reclaimable)
        for block_hash in self.evicted:
            del self.run_of[self.readable.pop(block_hash)]
        for slot in slots:
            assert (slot.block_hash, slot.block_hash_num_tokens, slot.ref_cnt) == (None, None, 1)
            assert self.tier.run_of(slot) is None
        self.writing += slots

    @precondition(lambda self: self.writing)
    @rule(number=st.integers(0, 99), index=st.integers(0, NUM_HASHES - 1), run=st.integers(-1, 2))
    def publish(self, number: int, index: int, run: int) -> None:
        slot = self.writing.pop(number % len(self.writing))
        owner = None if run < 0 else self.runs[run % len(self.runs)]
        is_first = HASHES[index] not in self.readable
        assert self.tier.publish(slot, HASHES[index], 16 * (index + 1), owner) == is_first
        if is_first:
            self.readable[HASHES[index]] = slot.block_id
            self.run_of[slot.block_id] = owner
        else:
            assert slot.block_hash is None
            assert self.tier.free_list.get_all_free_blocks()[0] is slot

    @precondition(lambda self: self.writing)
    @rule(number=st.integers(0, 99))
    def discard(self, number: int) -> None:
        slot = self.writing.pop(number % len(self.writing))
        self.tier.discard(slot)
        assert self.tier.free_list.get_all_free_blocks()[0] is slot

    @rule(index=st.integers(0, NUM_HASHES - 1), slot_id=st.integers(0, 5))
    def adopt(self, index: int, slot_id: int) -> None:
        """What a restart found in the file."""
        if slot_id >= self.capacity:
            return
        slot = self.tier.slots[slot_id]
        if slot.ref_cnt or slot.block_hash is not None:
            with pytest.raises(ValueError):
                self.tier.adopt(slot_id, HASHES[index])
            return
        self.tier.adopt(slot_id, HASHES[index])
        if HASHES[index] not in self.readable:
            self.readable[HASHES[index]] = slot_id
            self.run_of[slot_id] = None

    # ------------------------------------------------------------------ reading

    @precondition(lambda self: self.readable)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        hashes = data.draw(st.lists(st.sampled_from(sorted(self.readable)), max_size=4))
        slots = [self.tier.get(block_hash) for block_hash in hashes]
        held = [slot for slot in slots if slot is not None]
        assert len(held) == len(slots)
        self.tier.hold(iter(held))
        self.reading += held

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        numbers = data.draw(st.lists(st.integers(0, len(self.reading) - 1), unique=True, min_size=1))
        slots = [self.reading[number] for number in numbers]
        self.reading = [slot for number, slot in enumerate(self.reading) if number not in set(numbers)]
        self.tier.release(slots)

    # ------------------------------------------------------------------ forgetting and ranks

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        """Any slots: readable, held, empty, being written."""
        if not self.capacity:
            return
        slots = data.draw(st.lists(st.sampled_from(self.tier.slots), max_size=4))
        for slot in slots:
            self.model_forget(slot)
        self.tier.forget(slots)
        assert all(slot.block_hash is None for slot in slots)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.readable.clear()
        self.run_of.clear()
        assert len(self.tier) == 0
        assert self.tier.free_list.num_empty_blocks == self.tier.free_list.num_free_blocks

    @rule(number=st.integers(0, 2), rank=st.sampled_from(RANKS))
    def set_rank(self, number: int, rank: Rank) -> None:
        run = self.runs[number % len(self.runs)]
        run.rank = rank
        self.tier.free_list.set_rank(run)

    # ------------------------------------------------------------------ invariants

    def is_retired(self, slot_id: int) -> bool:
        run = self.run_of.get(slot_id)
        return run is not None and run.is_retired

    @invariant()
    def nothing_is_lost(self) -> None:
        free = self.tier.free_list.get_all_free_blocks()
        held = {slot.block_id for slot in (*self.writing, *self.reading)}
        assert len(held) + len(free) == self.capacity
        assert held.isdisjoint(slot.block_id for slot in free)
        for slot in self.tier.slots:
            holds = sum(other is slot for other in (*self.writing, *self.reading))
            assert slot.ref_cnt == holds
            assert (slot.next_free_block is None) == (holds > 0)

    @invariant()
    def readable_once(self) -> None:
        tier = self.tier
        assert len(tier) == len(self.readable)
        for block_hash in HASHES:
            slot = tier.get(block_hash)
            assert (block_hash in tier) == (slot is not None)
            assert (None if slot is None else slot.block_id) == self.readable.get(block_hash)
        hashes = [slot.block_hash for slot in tier.slots if slot.block_hash is not None]
        assert sorted(hashes) == sorted(self.readable)

    @invariant()
    def states_add_up(self) -> None:
        held = {slot.block_id for slot in (*self.writing, *self.reading)}
        readable = set(self.readable.values())
        empty = self.capacity - len(held | readable)
        retired = sum(self.is_retired(slot_id) for slot_id in readable - held)
        usage = self.tier.usage()
        assert usage.capacity == self.capacity
        assert usage.used + usage.free == usage.capacity
        assert usage.free == self.tier.num_reclaimable == empty + retired
        assert usage.retired == retired
        assert self.tier.free_list.num_empty_blocks == empty

    @invariant()
    def runs_count_their_slots(self) -> None:
        for slot in self.tier.slots:
            assert self.tier.run_of(slot) is self.run_of.get(slot.block_id)
        for run in self.runs:
            assert run.num_blocks == [0, sum(owner is run for owner in self.run_of.values()), 0]


def test_slots_are_conserved() -> None:
    run_state_machine_as_test(TierMachine, settings=SETTINGS)


def write(tier: SlotTier, index: int, run: Run | None = None) -> Slot:
    (slot,) = tier.allocate(1)
    assert tier.publish(slot, HASHES[index], 16 * (index + 1), run)
    return slot


def test_allocate_gives_what_there_is() -> None:
    tier = SlotTier("host", TIER, 3)
    reading = write(tier, 0)
    tier.hold([reading])
    assert len(tier.allocate(5)) == 2
    assert tier.allocate(1) == []
    tier.release([reading])
    assert tier.allocate(1) == [reading]


def test_a_tier_of_no_slots() -> None:
    tier = SlotTier("flash", TIER, 0)
    assert tier.allocate(3) == []
    assert tier.get(HASHES[0]) is None
    tier.clear()
    usage = tier.usage()
    assert (usage.capacity, usage.used, usage.free, usage.retired) == (0, 0, 0, 0)


def test_retired_slots_go_before_older_live_ones() -> None:
    evicted: list[bytes] = []
    tier = SlotTier("host", TIER, 4, lambda slot: evicted.append(slot.block_hash or b""))
    live, ended = Run(0, 2, NUM_TIERS), Run(0, 2, NUM_TIERS)
    for index in (1, 0):
        write(tier, index, live)
    for index in (3, 2):
        write(tier, index, ended)
    ended.rank = retired_rank(1)
    tier.free_list.set_rank(ended)
    assert tier.usage().free == tier.usage().retired == 2
    tier.allocate(3)
    assert evicted == [HASHES[3], HASHES[2], HASHES[1]]
    assert ended.num_blocks[TIER] == 0


def test_content_that_is_forgotten_while_it_is_read_is_empty_afterwards() -> None:
    tier = SlotTier("host", TIER, 2)
    run = Run(0, 1, NUM_TIERS)
    slot = write(tier, 0, run)
    tier.hold([slot])
    tier.forget([slot])
    assert HASHES[0] not in tier
    assert run.num_blocks[TIER] == 0
    # Meanwhile the same content may be written elsewhere.
    other = write(tier, 0)
    tier.release([slot])
    assert tier.get(HASHES[0]) is other
    assert tier.free_list.get_all_free_blocks() == [slot, other]
