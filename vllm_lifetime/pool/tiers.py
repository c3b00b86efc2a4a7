# SPDX-License-Identifier: Apache-2.0
"""The slots of a tier below HBM: which block hash lies where, what is free, what goes first.

A slot holds one KV block. It is *held* while a transfer reads or writes it (`ref_cnt > 0`), otherwise it is in the tier's free
list: *empty*, or readable under its hash until somebody needs the space.

Scheduler process, one thread. No IO happens here: the workers hold the bytes.
"""

from collections.abc import Callable, Iterable, Sequence

from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Run

__all__ = ["Slot", "SlotTier", "TierUsage"]


class Slot:
    """Space for one KV block in host memory or flash; has what `TierFreeList` needs of a block."""

    __slots__ = (
        "block_hash",
        "block_hash_num_tokens",
        "block_id",
        "next_free_block",
        "prev_free_block",
        "ref_cnt",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: bytes | None = None
        self.block_hash_num_tokens: int | None = None
        self.prev_free_block: object = None
        self.next_free_block: object = None

    def __repr__(self) -> str:
        return f"Slot({self.block_id}, ref_cnt={self.ref_cnt}, hash={self.block_hash!r})"


class TierUsage:
    """Blocks of one tier by state. `used + free == capacity`; `retired` is the part of `free` that is still readable."""

    __slots__ = ("capacity", "free", "retired", "used")

    def __init__(self, capacity: int, free: int, retired: int) -> None:
        self.capacity = capacity
        self.free = free
        self.retired = retired
        self.used = capacity - free


class SlotTier:
    """One tier of slots.

    Args:
        name: `host` or `flash`.
        tier: its number, as in `Run.num_blocks`.
        num_slots: capacity in blocks; 0 makes a tier that never holds anything.
        on_evict: called with a slot whose content is about to be given up for space, before its hash is forgotten.

    """

    def __init__(self, name: str, tier: int, num_slots: int, on_evict: Callable[[Slot], None] | None = None) -> None:
        self.name = name
        self.tier = tier
        self.slots = [Slot(i) for i in range(num_slots)]
        self.free_list: TierFreeList[Slot] = TierFreeList(self.slots, tier)
        self._by_hash: dict[bytes, Slot] = {}
        self._on_evict = on_evict

    # ------------------------------------------------------------------ looking

    def __len__(self) -> int:
        """Blocks that can be read."""
        return len(self._by_hash)

    def get(self, block_hash: bytes) -> Slot | None:
        """The readable slot of `block_hash`. O(1)."""
        return self._by_hash.get(block_hash)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._by_hash

    def run_of(self, slot: Slot) -> Run | None:
        """The run that the slot's content belongs to; None if its request had no metadata."""
        return self.free_list.run_of[slot.block_id]

    @property
    def num_reclaimable(self) -> int:
        """Slots that can be had without giving up anything an active workflow may read."""
        return self.free_list.num_empty_blocks + self.free_list.num_retired_blocks

    def usage(self) -> TierUsage:
        """Blocks by state. O(1)."""
        return TierUsage(len(self.slots), self.num_reclaimable, self.free_list.num_retired_blocks)

    # ------------------------------------------------------------------ space

    def allocate(self, count: int) -> list[Slot]:
        """Take up to `count` slots to write to, evicting in the free list's order; never waits. They come back held and empty."""
        slots = self.free_list.popleft_n(min(count, self.free_list.num_free_blocks))
        for slot in slots:
            if slot.block_hash is not None:
                if self._on_evict is not None:
                    self._on_evict(slot)
                self._forget(slot)
            slot.ref_cnt = 1
        return slots

    def publish(self, slot: Slot, block_hash: bytes, num_tokens: int, run: Run | None) -> bool:
        """A held slot's content is complete: make it readable and release the writer's hold.

        Returns False, and empties the slot, if the hash became readable in another slot meanwhile.
        """
        if block_hash in self._by_hash:
            self.discard(slot)
            return False
        slot.block_hash = block_hash
        slot.block_hash_num_tokens = num_tokens
        self._by_hash[block_hash] = slot
        self.free_list.set_run(slot, run)
        self.release((slot,))
        return True

    def discard(self, slot: Slot) -> None:
        """A held slot was written for nothing (a failed write, a reset): release the writer's hold, empty."""
        self.free_list.set_run(slot, None)
        self.release((slot,))

    def adopt(self, index: int, block_hash: bytes) -> None:
        """Slot `index` holds `block_hash` from before a restart; whose it was is not known."""
        slot = self.slots[index]
        if slot.ref_cnt or slot.block_hash is not None:
            raise ValueError(f"slot {index} of the {self.name} tier is in use already")
        self.free_list.remove(slot)
        slot.ref_cnt = 1
        self.publish(slot, block_hash, 0, None)

    def hold(self, slots: Iterable[Slot]) -> None:
        """Keep slots from being handed out while a transfer reads them."""
        for slot in slots:
            if slot.ref_cnt == 0:
                self.free_list.remove(slot)
            slot.ref_cnt += 1

    def release(self, slots: Sequence[Slot]) -> None:
        """Give back holds; a slot nobody holds takes its place in the free list. Deepest block first, as vLLM frees."""
        for slot in slots:
            slot.ref_cnt -= 1
            if slot.ref_cnt == 0:
                if slot.block_hash is None:
                    self.free_list.prepend_n((slot,))
                else:
                    self.free_list.append_n((slot,))

    def forget(self, slots: Iterable[Slot]) -> None:
        """Slots are not readable any more (failed load, moved elsewhere); free ones become empty, held ones when released."""
        for slot in slots:
            if slot.block_hash is None:
                continue
            is_free = slot.ref_cnt == 0
            if is_free:
                self.free_list.remove(slot)
            self._forget(slot)
            if is_free:
                self.free_list.prepend_n((slot,))

    def clear(self) -> None:
        """Nothing is readable any more. Held slots become empty when their transfer ends. O(slots)."""
        self.forget([slot for slot in self.slots if slot.block_hash is not None])

    def _forget(self, slot: Slot) -> None:
        """Drop the hash of a slot that is not in the free list."""
        assert slot.block_hash is not None
        del self._by_hash[slot.block_hash]
        self.free_list.set_run(slot, None)
        slot.block_hash = None
        slot.block_hash_num_tokens = None
