# SPDX-License-Identifier: Apache-2.0
"""The free lists of a KV tensor whose block-id tail lies in flash: one per tier, behind the interface of one.

A block's tier is the range its id lies in, for ever: ids below `first_flash_id` are HBM's, the others flash's. `take(n, tier)`
draws from the wanted tier's list, and giving a block back returns it to the list it came from (Lachesis section 4: `alloc(tier)`
and `free(block ids)`). Within each list the order is `TierFreeList`'s.

What "no room" means: a tier has room while it has blocks that are empty or retired. Only when neither has any, what may still be
read is evicted, from the wanted tier first, so that nothing live is lost while the other tier has space.

Scheduler process, one thread.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

from vllm_lifetime.pool.access import FLASH_TIER, HBM_TIER
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.nodes import FreeBlock
from vllm_lifetime.pool.runs import Rank, RankGroup, Run

__all__ = ["CoveredTier", "TieredFreeList"]

Block = TypeVar("Block", bound=FreeBlock)


class _Part(TierFreeList[Block]):
    """One tier's list; all parts share `run_of`, which is indexed by block id, and the clock of `last_freed`."""

    def __init__(self, blocks: Sequence[Block], tier: int, run_of: list[Run | None]) -> None:
        super().__init__(blocks, tier)
        self.run_of = run_of

    def follow(self, other: "_Part[Block]") -> None:
        """What is given back next is more recent than all that `other` has got so far."""
        self._clock = max(self._clock, other._clock)


class CoveredTier(TierFreeList[Block]):
    """Stands for a tier in an `AccessTable` when the list of another one ranks its blocks, too."""

    def __init__(self, tier: int) -> None:
        super().__init__((), tier)

    def set_rank(self, run: Run) -> None:
        """Done by the covering list."""

    def set_group_rank(self, group: RankGroup) -> None:
        """Done by the covering list."""


class TieredFreeList(TierFreeList[Block]):
    """See the module. In an `AccessTable` it stands for HBM and, beside a `CoveredTier`, ranks flash's blocks as well.

    Args:
        blocks: all blocks of the tensor, indexed by `block_id`; all start empty.
        first_flash_id: from here on ids lie in flash; at least 1, less than all.

    """

    # It is a `TierFreeList` by its interface alone: every method that touches blocks is replaced, and `super().__init__` is not
    # called, so that one that was forgotten cannot work on lists that hold nothing.

    def __init__(self, blocks: Sequence[Block], first_flash_id: int) -> None:
        if not 0 < first_flash_id < len(blocks):
            raise ValueError(f"first_flash_id must be from 1 to {len(blocks) - 1}; it is {first_flash_id}")
        self.tier = HBM_TIER
        self.first_flash_id = first_flash_id
        self.run_of: list[Run | None] = [None] * len(blocks)
        self.hbm = _Part(blocks[:first_flash_id], HBM_TIER, self.run_of)
        self.flash = _Part(blocks[first_flash_id:], FLASH_TIER, self.run_of)
        self._flash_debt = 0.0

    def part_of(self, block: Block) -> TierFreeList[Block]:
        """The list that `block` belongs to."""
        return self.hbm if block.block_id < self.first_flash_id else self.flash

    # ------------------------------------------------------------------ counts

    @property
    def num_free_blocks(self) -> int:  # type: ignore[override]
        """In both tiers."""
        return self.hbm.num_free_blocks + self.flash.num_free_blocks

    @property
    def num_empty_blocks(self) -> int:  # type: ignore[override]
        """In both tiers."""
        return self.hbm.num_empty_blocks + self.flash.num_empty_blocks

    @property
    def num_retired_blocks(self) -> int:  # type: ignore[override]
        """In both tiers."""
        return self.hbm.num_retired_blocks + self.flash.num_retired_blocks

    # ------------------------------------------------------------------ taking blocks

    def take(self, count: int, tier: int | None, *, uses_retired: bool = True) -> list[Block]:
        """Take `count` blocks, as many as there is room for from `tier`, those that must be elsewhere last.

        Args:
            count: at most `num_free_blocks`.
            tier: `HBM_TIER` or `FLASH_TIER`. None: HBM while there is room anywhere; what is evicted then is evicted from both
                in proportion, so that the two age alike.
            uses_retired: whether retired blocks count as room. If not, they are evicted like the others, each tier's first.

        Raises:
            ValueError: fewer blocks are free; nothing is taken.

        """
        if not 0 <= count <= self.num_free_blocks:
            raise ValueError(f"{count} blocks were asked for, {self.num_free_blocks} are free")
        if not count:
            return []
        first, second = (self.flash, self.hbm) if tier == FLASH_TIER else (self.hbm, self.flash)
        taken: list[Block] = []
        for part in (first, second):
            room = part.num_empty_blocks + part.num_retired_blocks * uses_retired
            if room:
                taken += part.popleft_n(min(count - len(taken), room))
                if len(taken) == count:
                    return taken
        left = count - len(taken)
        if tier is None:
            num_hbm = left - self._flash_part(left)
            taken += self.hbm.popleft_n(num_hbm)
            return taken + self.flash.popleft_n(left - num_hbm)
        taken += first.popleft_n(min(left, first.num_free_blocks))
        return taken + second.popleft_n(count - len(taken))

    def _flash_part(self, count: int) -> int:
        """How many of `count` evictions fall to flash, by its part of what can be evicted; what is rounded off is carried on."""
        exact = count * self.flash.num_free_blocks / self.num_free_blocks + self._flash_debt
        part = min(max(round(exact), count - self.hbm.num_free_blocks, 0), count, self.flash.num_free_blocks)
        self._flash_debt = min(max(exact - part, -1.0), 1.0)
        return part

    def popleft(self) -> Block:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        return self.take(n, None)

    def remove(self, block: Block) -> None:
        self.part_of(block).remove(block)

    def remove_n(self, blocks: Sequence[Block]) -> None:
        in_hbm, in_flash = self._split(blocks)
        if in_hbm:
            self.hbm.remove_n(in_hbm)
        if in_flash:
            self.flash.remove_n(in_flash)

    # ------------------------------------------------------------------ giving blocks back

    def append_n(self, blocks: Sequence[Block]) -> None:
        in_hbm, in_flash = self._split(blocks)
        if in_hbm:
            self.hbm.follow(self.flash)
            self.hbm.append_n(in_hbm)
        if in_flash:
            self.flash.follow(self.hbm)
            self.flash.append_n(in_flash)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        in_hbm, in_flash = self._split(blocks)
        self.hbm.prepend_n(in_hbm)
        self.flash.prepend_n(in_flash)

    def _split(self, blocks: Sequence[Block]) -> tuple[Sequence[Block], Sequence[Block]]:
        """Those of each tier, in the order given."""
        first = self.first_flash_id
        if len(blocks) == 1:
            return (blocks, ()) if blocks[0].block_id < first else ((), blocks)
        return [b for b in blocks if b.block_id < first], [b for b in blocks if b.block_id >= first]

    # ------------------------------------------------------------------ runs

    def set_rank(self, run: Run) -> None:
        self.hbm.set_rank(run)
        self.flash.set_rank(run)

    def set_group_rank(self, group: RankGroup) -> None:
        self.hbm.set_group_rank(group)
        self.flash.set_group_rank(group)

    @property
    def common_rank(self) -> Rank:
        return self.hbm.common_rank

    def set_common_rank(self, rank: Rank) -> None:
        self.hbm.set_common_rank(rank)
        self.flash.set_common_rank(rank)

    def rank_of(self, run: Run | None) -> Rank:
        return self.hbm.rank_of(run)

    def last_freed(self, run: Run) -> int:
        return max(self.hbm.last_freed(run), self.flash.last_freed(run))

    def set_run(self, block: Block, run: Run | None) -> None:
        self.part_of(block).set_run(block, run)

    def keep_turn(self, block: Block) -> None:
        self.part_of(block).keep_turn(block)

    def forget_hash(self, block: Block) -> None:
        self.part_of(block).forget_hash(block)

    def forget_all_hashes(self) -> None:
        self.hbm.forget_all_hashes()
        self.flash.forget_all_hashes()

    # ------------------------------------------------------------------ looking

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        if cursor is None:
            return chain(self.hbm.iter_blocks_after(None), self.flash.iter_blocks_after(None))
        if cursor.block_id >= self.first_flash_id:
            return self.flash.iter_blocks_after(cursor)
        return chain(self.hbm.iter_blocks_after(cursor), self.flash.iter_blocks_after(None))

    def iter_cached_blocks(self) -> Iterator[Block]:
        return chain(self.hbm.iter_cached_blocks(), self.flash.iter_cached_blocks())

    def iter_common_blocks(self) -> Iterator[Block]:
        return chain(self.hbm.iter_common_blocks(), self.flash.iter_common_blocks())
