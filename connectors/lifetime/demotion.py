# SPDX-License-Identifier: Apache-2.0
"""Copies down, ahead of time: which blocks near their eviction go to host memory or flash in this step.

EngineCore process, scheduler thread. Nothing here waits: orders go to the workers with the step.
"""

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.connectors.lifetime.flash_writes import FlashWrites
from vllm_lifetime.connectors.lifetime.jobs import TransferJobs
from vllm_lifetime.connectors.lifetime.metadata import LifetimeMetadata
from vllm_lifetime.policy.backoff import Backoff
from vllm_lifetime.policy.demotion import next_to_demote
from vllm_lifetime.pool.runs import Rank, Run
from vllm_lifetime.pool.tiers import Slot, SlotTier

__all__ = ["Demotion"]

HOST_RESERVE = 8
"""One slot in so many of the host tier is kept reclaimable by moving the coldest blocks to flash."""

LOAD_SHARE = 8
"""While loads are in flight, copies down are this many times smaller."""


class Demotion:
    """Decides on copies down.

    Args:
        writes: what may be written to flash, and how much.
        ahead: how many blocks from the next eviction the copying begins.
        batch_blocks: most blocks copied down at a time.
        staging_blocks: most blocks on their way between HBM and flash at a time.

    """

    def __init__(
        self,
        pool: LifetimeBlockPool,
        host: SlotTier,
        flash: SlotTier,
        jobs: TransferJobs,
        writes: FlashWrites,
        *,
        ahead: int,
        batch_blocks: int,
        staging_blocks: int,
    ) -> None:
        self._pool = pool
        self._host = host
        self._flash = flash
        self._jobs = jobs
        self._writes = writes
        self._ahead = ahead
        self._batch_blocks = batch_blocks
        self._staging_blocks = staging_blocks
        self._num_moved = ahead
        self._num_handed_out = 0
        self._copied: dict[bytes, int] = {}
        """Content copied down from HBM of late -> `_num_handed_out` at that time, oldest first."""
        self._refused: dict[bytes, int] = {}
        """Content not admitted to flash, likewise: so that a block counts once, not at every look."""
        self._flash_backoff = Backoff()

    def note_moved(self, num_blocks: int) -> None:
        """Blocks have been handed out: others are nearer to their eviction now."""
        self._num_moved += num_blocks
        self._num_handed_out += num_blocks

    def look_again(self) -> None:
        """Something has changed that may make room, or bring blocks to the front."""
        self._num_moved = self._ahead

    def note_flash_store(self, *, is_well: bool, now: float) -> None:
        """Blocks have been written to flash, or could not be."""
        self._flash_backoff.note(is_well, now)

    def give_orders(self, meta: LifetimeMetadata, now: float) -> None:
        """Add this step's copies down to the workers' orders."""
        self._writes.begin(now)
        # Loads go first, somebody waits for them: meanwhile only little is copied down at a time.
        limit = self._batch_blocks if not self._jobs.num_loads else max(1, self._batch_blocks // LOAD_SHARE)
        self._demote_hbm(meta, limit, now)
        self._demote_host(meta, limit, now)

    def is_due(self, now: float) -> bool:
        """Whether enough blocks have moved since the last look to make another worth its while, and the tier takes blocks."""
        if self._num_moved < max(1, self._ahead // 8):
            return False
        return bool(self._host.slots) or (bool(self._flash.slots) and self._may_write_flash(now))

    def _may_write_flash(self, now: float) -> bool:
        """Whether flash takes a block: its latest write went well, or long enough has passed, and the budget is not used up."""
        return self._flash_backoff.may_try(now) and self._writes.available_blocks(now) != 0

    @property
    def _is_flash_out(self) -> bool:
        """Whether blocks go down as if there were no flash: it fails, or the budget is used up."""
        return self._flash_backoff.is_failing or self._writes.is_throttled

    def _within_budget(self, limit: int, now: float) -> int:
        available = self._writes.available_blocks(now)
        return limit if available is None else min(limit, available)

    def _demote_hbm(self, meta: LifetimeMetadata, limit: int, now: float) -> None:
        """Start the next copy down, if any block is near enough to its eviction."""
        target = self._host if self._host.slots else self._flash
        if self._jobs.num_stores or not self.is_due(now):
            return
        if target is self._flash:
            if self._jobs.loading_bytes["flash"]:
                return  # the staging slots are the load's
            limit = self._within_budget(min(limit, self._staging_blocks), now)
        if target is self._host and self._flash.slots and not self._is_flash_out:
            # Nothing live leaves the host tier for this: it goes to flash first, see `_demote_host`.
            limit = min(limit, self._host.num_reclaimable)
        self._forget_old(self._copied)
        self._forget_old(self._refused)
        floor = self._lowest_rank(self._flash) if target is self._flash else None
        run_of, rank_of = self._pool.free_list.run_of, self._flash.free_list.rank_of

        def needs_copy(block: KVCacheBlock) -> bool:
            if not self._needs_copy(block):
                return False
            if target is self._host:
                return True
            run = run_of[block.block_id]
            return self._admits(block.block_hash, run) and (floor is None or rank_of(run) >= floor)

        blocks = next_to_demote(self._pool.free_list, self._reach, limit, needs_copy)
        job = self._jobs.start_store(target, blocks, self._pool.free_list, now)
        if job is not None:
            self._copied.update(dict.fromkeys(job.keys, self._num_handed_out))
            if target is self._flash:
                self._writes.spend(len(job.keys))
            meta.stores.append(job.store_order())
        # If all that was near is under way, or there is no room for it, look again when something has moved.
        if job is None or len(blocks) < limit:
            self._num_moved = 0

    @property
    def _reach(self) -> int:
        """How far ahead of its eviction a block is copied down.

        The copies of the blocks ahead must all fit below, or each would push out another's in turn, for ever.
        """
        is_flash_out = self._is_flash_out and bool(self._host.slots)
        room = len(self._host.slots) + (0 if is_flash_out else len(self._flash.slots))
        return min(self._ahead, room // 2)

    def _needs_copy(self, block: KVCacheBlock) -> bool:
        key = block.block_hash
        if key is None or key in self._host or key in self._flash or key in self._jobs.storing_keys:
            return False
        # What is worth least in HBM is worth least below, too: its copy may have been the first to go there. Once is enough.
        return key not in self._copied

    def _admits(self, key: bytes | None, run: Run | None) -> bool:
        """Whether an HBM block may be written to flash; the first refusal counts."""
        if self._writes.admits(run):
            return True
        if key is not None and key not in self._refused:
            self._refused[key] = self._num_handed_out
            self._writes.count_refused([run], "placement")
        return False

    def _forget_old(self, content: dict[bytes, int]) -> None:
        """What was noted before as many blocks were handed out as are copied ahead may be copied, or counted, again."""
        limit = self._num_handed_out - self._ahead
        while content:
            key = next(iter(content))
            if content[key] > limit:
                break
            del content[key]

    @staticmethod
    def _lowest_rank(tier: SlotTier) -> Rank | None:
        """The rank of what the tier gives up next, if that is anything live. O(b log b) in its ranks."""
        if tier.num_reclaimable:
            return None
        slot = next(tier.free_list.iter_cached_blocks(), None)
        return None if slot is None else tier.free_list.rank_of(tier.run_of(slot))

    def _demote_host(self, meta: LifetimeMetadata, limit: int, now: float) -> None:
        """Move the coldest host blocks to flash, so that the host tier has room for what HBM gives up next."""
        if not self._host.slots or not self._flash.slots or self._jobs.num_demotions or self._jobs.loading_bytes["flash"]:
            return
        if not self._may_write_flash(now):
            return
        reserve = max(1, len(self._host.slots) // HOST_RESERVE)
        wanted = min(reserve - self._host.num_reclaimable, limit)
        if wanted <= 0:
            return
        floor = self._lowest_rank(self._flash)
        slots = next_to_demote(self._host.free_list, len(self._host.slots), wanted, self._needs_flash_copy)
        slots = self._give_up(slots, [slot for slot in slots if not self._writes.admits(self._host.run_of(slot))], "placement")
        if floor is not None:
            # All that flash holds is worth more: a write would only wear it.
            rank_of = self._flash.free_list.rank_of
            slots = self._give_up(slots, [slot for slot in slots if rank_of(self._host.run_of(slot)) < floor], "rank")
        job = self._jobs.start_demotion(slots[: self._within_budget(limit, now)], now)
        if job is not None:
            self._writes.spend(len(job.keys))
            meta.demotions.append(job.demotion_order())

    def _give_up(self, slots: list[Slot], refused: list[Slot], reason: str) -> list[Slot]:
        """Drop the coldest host slots that may not go to flash, as if there were no flash. Returns the others."""
        self._writes.count_refused([self._host.run_of(slot) for slot in refused], reason)
        self._host.forget(refused)
        return [slot for slot in slots if slot.block_hash is not None] if refused else slots

    def _needs_flash_copy(self, slot: Slot) -> bool:
        return slot.block_hash is not None and slot.block_hash not in self._flash
