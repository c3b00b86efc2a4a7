# SPDX-License-Identifier: Apache-2.0
"""Prefetch, live: blocks come up to HBM ahead of their request (PBKV section 4.3).

EngineCore process, scheduler thread. Only in steps in which nothing but decoding happens, or nothing at all, and while no request
waits for a load; one transfer at a time, no larger than a decode step hides. The target blocks are *lent* by the pool
(`LifetimeBlockPool.lend`): out of the free list, so that nobody else is handed them by accident, but counted as free. An
allocation that needs them has them at once; the workers are told to end the transfer before the same step's forward pass, which
waits at most for the rest of one copy from host memory.

What has arrived is a prefix hit like any other. What has not is an empty block.
"""

import time
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.connectors.lifetime.jobs import LoadJob, TransferJobs
from vllm_lifetime.connectors.lifetime.metadata import LifetimeMetadata
from vllm_lifetime.policy.backoff import Backoff
from vllm_lifetime.policy.prefetch import PrefetchBudget, PrefetchPlanner, TransferRates
from vllm_lifetime.pool.access import FLASH_TIER, HOST_TIER
from vllm_lifetime.pool.runs import Run
from vllm_lifetime.pool.tiers import Slot, SlotTier
from vllm_lifetime.segments import SegmentTable

__all__ = ["Prefetch"]


class Prefetch:
    """See the module. One per engine that has tiers below HBM.

    Args:
        segments: the live ones; without any there is nothing to fetch.
        planner: ranks them.
        rates: measured averages, the planner's too.
        deadline_s: a transfer that has not ended after so long is given up.
        rho: share of HBM that may be displaced for what is prefetched (the aggressive variant); 0 is conservative.

    """

    def __init__(
        self,
        pool: LifetimeBlockPool,
        host: SlotTier,
        flash: SlotTier,
        jobs: TransferJobs,
        segments: SegmentTable,
        planner: PrefetchPlanner,
        rates: TransferRates,
        recorder: stats.Recorder,
        *,
        block_bytes: int,
        deadline_s: float,
        rho: float = 0.0,
    ) -> None:
        self._pool = pool
        self._host = host
        self._flash = flash
        self._jobs = jobs
        self._segments = segments
        self._planner = planner
        self._rates = rates
        self._recorder = recorder
        self._block_bytes = block_bytes
        self._deadline_s = deadline_s
        self._rho = rho
        self._job: LoadJob | None = None
        self._blocks: list[KVCacheBlock] = []
        """Lent for the transfer under way, in the order of the job's slots."""
        self._cancel: set[int] = set()
        self._unread: set[int] = set()
        """Prefetched blocks that nobody has read yet."""
        self._debt_s = 0.0
        self._may_find_something = True
        self._backoff = Backoff()

    # ------------------------------------------------------------------ deciding

    def look_again(self) -> None:
        """Something has changed that may bring another candidate, or room."""
        self._may_find_something = True

    def wish(self, runs: set[Run]) -> tuple[int, bool]:
        """Fetch these runs before anything else. Returns how many blocks, and whether all were taken."""
        self.look_again()
        return self._planner.wish(runs)

    def is_due(self, now: float) -> bool:
        """Whether an idle engine should take a step for it. Never for long: a decision that finds nothing is the last one."""
        if not self._may_find_something or self._job is not None or not len(self._segments):
            return False
        if not len(self._host) and not len(self._flash):
            return False
        return self._backoff.may_try(now) and not self._jobs.num_loads

    def give_orders(self, meta: LifetimeMetadata, num_running: int, now: float) -> None:
        """Start the next transfer, in a step in which `num_running` requests decode and nothing else happens."""
        if not self.is_due(now):
            return
        free_list = self._pool.free_list
        budget = PrefetchBudget.of(
            self._rates,
            num_empty=free_list.num_empty_blocks,
            num_retired=free_list.num_retired_blocks,
            num_reserved=num_running + self._jobs.num_blocks_reserved,
            capacity_blocks=self._pool.num_gpu_blocks,
            # An idle engine would go on for ever: what is displaced can be fetched again.
            rho=self._rho if num_running else 0.0,
            num_unread=len(self._unread),
            # Nobody else needs the link of an idle engine.
            debt_s=self._debt_s if num_running else 0.0,
        )
        budget.blocks = min(budget.blocks, free_list.num_free_blocks)
        is_broke = budget.seconds <= 0.0
        start = time.perf_counter()
        chosen = self._planner.choose(budget)
        self._recorder.observe(stats.SCORER_SECONDS, "prefetch", value=time.perf_counter() - start)
        self._debt_s = max(0.0, -budget.seconds)
        if chosen:
            meta.loads.append(self._start(chosen, now).order(self._deadline_s))
        elif not is_broke:
            self._may_find_something = False

    def _start(self, chosen: list[tuple[int, Slot]], now: float) -> LoadJob:
        host = [slot for tier, slot in chosen if tier == HOST_TIER]
        flash = [slot for tier, slot in chosen if tier == FLASH_TIER]
        # First: it may hand out blocks that are being copied down, whose slots are held already.
        self._blocks = self._pool.lend(len(chosen))
        ids = [block.block_id for block in self._blocks]
        self._job = self._jobs.start_load(
            None,
            list(zip(host, ids[: len(host)], strict=True)),
            list(zip(flash, ids[len(host) :], strict=True)),
            0,
            self._block_bytes,
        )
        self._jobs.note_start(now)
        self._recorder.count(stats.PREFETCHED_BLOCKS, "issued", by=len(chosen))
        return self._job

    # ------------------------------------------------------------------ ending

    def give_back(self) -> None:
        """The lent blocks are needed now: they come back empty, and the transfer is ended before anybody writes them."""
        job = self._job
        if job is None:
            return
        job.is_cancelled = True
        self._cancel.add(job.job_id)
        self._job = None
        self._take_back()
        self._recorder.count(stats.PREFETCHED_BLOCKS, "cancelled", by=len(job.host) + len(job.flash))

    def make_way_for_flash(self) -> None:
        """A request waits for flash: it gets the staging memory."""
        if self._job is not None and self._job.flash:
            self.give_back()

    def take_cancelled(self) -> set[int]:
        """Jobs that the workers have to end before this step's forward pass."""
        cancelled, self._cancel = self._cancel, set()
        return cancelled

    def finish(self, job: LoadJob) -> None:
        """Every worker has reported the transfer: what has arrived can be hit."""
        slots = [slot for slot, _ in (*job.host, *job.flash)]
        # Before the slots are let go: a reset may have emptied some meanwhile.
        contents = [(slot.block_hash, slot.block_hash_num_tokens or 0, self._run_of(slot, len(job.host), i))
                    for i, slot in enumerate(slots)]  # fmt: skip
        self._jobs.finish_load(job)
        if job is not self._job:
            return
        self._job = None
        failed = job.result.failed
        num_useless = 0
        for i, (block, (key, num_tokens, run)) in enumerate(zip(self._blocks, contents, strict=True)):
            if i in failed:
                continue
            if key is not None and run is not None and self._pool.adopt(block, BlockHashWithGroupId(key), num_tokens, run):
                self._unread.add(block.block_id)
            else:
                num_useless += 1
        self._take_back()
        self._backoff.note(not failed, time.monotonic())
        self._recorder.count(stats.PREFETCHED_BLOCKS, "failed", by=len(failed))
        self._recorder.count(stats.PREFETCHED_BLOCKS, "wasted", by=num_useless)

    def _run_of(self, slot: Slot, num_host: int, index: int) -> Run | None:
        return (self._host if index < num_host else self._flash).run_of(slot)

    def _take_back(self) -> None:
        blocks, self._blocks = self._blocks, []
        blocks.sort(key=_depth, reverse=True)
        self._pool.take_back(blocks)

    # ------------------------------------------------------------------ what became of it (hot path)

    def note_read(self, blocks: Any, count: int) -> None:
        """A request has hit the first `count` of `blocks`. O(count), nothing if no prefetched block is unread."""
        if self._unread:
            read = self._unread.intersection([block.block_id for block in blocks[:count]])
            self._unread -= read
            self._recorder.count(stats.PREFETCHED_BLOCKS, "used", by=len(read))

    def note_handed_out(self, blocks: Any) -> None:
        """Blocks are handed out for other content. O(blocks)."""
        run_of = self._pool.free_list.run_of
        runs = [run for block in blocks if (run := run_of[block.block_id]) is not None]
        if runs:
            self._planner.note_lost(runs)
        if self._unread:
            wasted = self._unread.intersection([block.block_id for block in blocks])
            self._unread -= wasted
            self._recorder.count(stats.PREFETCHED_BLOCKS, "wasted", by=len(wasted))

    def on_reset(self) -> None:
        """Nothing in any tier is valid any more."""
        self.give_back()
        self._recorder.count(stats.PREFETCHED_BLOCKS, "wasted", by=len(self._unread))
        self._unread.clear()


def _depth(block: KVCacheBlock) -> int:
    return block.block_hash_num_tokens or 0
