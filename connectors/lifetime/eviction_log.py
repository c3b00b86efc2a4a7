# SPDX-License-Identifier: Apache-2.0
"""What was evicted, why, and how soon it was wanted again (regret). EngineCore process, scheduler thread, on the hot path."""

import time
from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.tiers import Slot, SlotTier

__all__ = ["EvictionLog"]

MAX_EVICTED_REMEMBERED = 1 << 16
"""Evicted hashes whose time of eviction is kept, to measure how soon they are wanted again."""


class EvictionLog:
    """See the module."""

    def __init__(self, recorder: stats.Recorder) -> None:
        self._recorder = recorder
        self._evicted_at: dict[bytes, float] = {}
        self.num_evicted = 0
        """Blocks of the engine's pool, since the start."""

    def note_handed_out(
        self,
        blocks: Sequence[KVCacheBlock],
        free_list: TierFreeList[KVCacheBlock],
        host: SlotTier,
        flash: SlotTier,
        tier: str = "hbm",
    ) -> None:
        """The pool's blocks, which lie in `tier`, are handed out; those with a hash are evicted. O(1) per block."""
        now = 0.0
        retired = demoted = lost = 0
        run_of = free_list.run_of
        evicted_at = self._evicted_at
        for block in blocks:
            key = block.block_hash
            if key is None:
                continue
            now = now or time.monotonic()
            evicted_at[key] = now
            run = run_of[block.block_id]
            if run is not None and run.is_retired:
                retired += 1
            elif key in host or key in flash:
                demoted += 1
            else:
                lost += 1
        if now:
            self.num_evicted += retired + demoted + lost
            while len(evicted_at) > MAX_EVICTED_REMEMBERED:
                del evicted_at[next(iter(evicted_at))]
            self._recorder.count(stats.EVICTIONS, tier, "retired", by=retired)
            self._recorder.count(stats.EVICTIONS, tier, "demoted", by=demoted)
            self._recorder.count(stats.EVICTIONS, tier, "lost", by=lost)

    def note_slot(self, slot: Slot, tier: SlotTier, flash: SlotTier) -> None:
        """A slot's content is given up for space."""
        run = tier.run_of(slot)
        if run is not None and run.is_retired:
            reason = "retired"
        elif tier is not flash and slot.block_hash is not None and slot.block_hash in flash:
            reason = "demoted"
        else:
            reason = "lost"
        self._recorder.count(stats.EVICTIONS, tier.name, reason)

    def note_back(self, blocks: Sequence[KVCacheBlock], start: int, end: int, loaded_end: int) -> None:
        """Blocks `start <= i < end` of a request have got their hashes; those before `loaded_end` were loaded, not computed."""
        if not self._evicted_at:
            return
        for index in range(start, end):
            key = blocks[index].block_hash
            evicted_at = None if key is None else self._evicted_at.pop(key, None)
            if evicted_at is not None:
                outcome = "reloaded" if index < loaded_end else "recomputed"
                self._recorder.observe(stats.REUSE_GAP, outcome, value=time.monotonic() - evicted_at)

    def clear(self) -> None:
        """Everything is forgotten."""
        self._evicted_at.clear()
