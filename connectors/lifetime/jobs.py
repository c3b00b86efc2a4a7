# SPDX-License-Identifier: Apache-2.0
"""Transfers in flight, as the scheduler side sees them: which slots and blocks each holds, and what its end means.

EngineCore process, scheduler thread. A job ends when every worker has reported it; until then its slots are held.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.connectors.lifetime.metadata import Demotion, JobResult, Load, Store
from vllm_lifetime.pool.access import FLASH_TIER
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Run
from vllm_lifetime.pool.tiers import Slot, SlotTier
from vllm_lifetime.segments import class_of_run

__all__ = ["LoadJob", "StoreJob", "TransferJobs"]

FRESH_S = 2.0
"""A transfer younger than this keeps an idle engine stepping, so that its end is noticed."""


@dataclass(slots=True)
class StoreJob:
    """A copy down: from HBM blocks, or from host slots to flash."""

    job_id: int
    target: SlotTier
    slots: list[Slot]
    keys: list[bytes]
    num_tokens: list[int]
    block_ids: list[int] = field(default_factory=list)
    """Sources in HBM."""
    sources: list[Slot] = field(default_factory=list)
    """Sources in host memory, held."""
    classes: list[str] = field(default_factory=list)
    """Of each block, if the target is flash: its segment's."""
    is_cancelled: bool = False
    result: JobResult = field(default_factory=lambda: JobResult(num_reports=0))

    def store_order(self) -> Store:
        """The order for the workers, from HBM."""
        slots = [slot.block_id for slot in self.slots]
        if self.target.tier != FLASH_TIER:
            return Store(self.job_id, self.block_ids, slots)
        return Store(self.job_id, self.block_ids, slots, self.keys, self.classes)

    def demotion_order(self) -> Demotion:
        """The order for the workers, from host to flash."""
        return Demotion(
            self.job_id,
            [slot.block_id for slot in self.sources],
            [slot.block_id for slot in self.slots],
            self.keys,
            self.classes,
        )


@dataclass(slots=True)
class LoadJob:
    """A load, for a waiting request or ahead of one: (slot, HBM block id) pairs."""

    job_id: int
    request_id: str | None
    """None: nobody waits."""
    host: list[tuple[Slot, int]]
    flash: list[tuple[Slot, int]]
    flash_keys: list[bytes]
    num_blocks_left: int
    """Blocks that the request still needs after the load."""
    block_bytes: int
    is_cancelled: bool = False
    """Its blocks are no longer its own; what failed says nothing about the slots."""
    result: JobResult = field(default_factory=lambda: JobResult(num_reports=0))

    def order(self, deadline_s: float) -> Load:
        """The order for the workers."""
        return Load(
            job_id=self.job_id,
            request_id=self.request_id,
            host_slots=[slot.block_id for slot, _ in self.host],
            host_block_ids=[block_id for _, block_id in self.host],
            flash_slots=[slot.block_id for slot, _ in self.flash],
            flash_keys=self.flash_keys,
            flash_block_ids=[block_id for _, block_id in self.flash],
            deadline_s=deadline_s,
        )


class TransferJobs:
    """All jobs in flight.

    Args:
        run_of_block: the run of an HBM block if it still holds the given hash.
        num_workers: how many workers report each job.

    """

    def __init__(
        self,
        host: SlotTier,
        flash: SlotTier,
        run_of_block: Callable[[int, bytes], Run | None],
        num_workers: int,
    ) -> None:
        self._host = host
        self._flash = flash
        self._run_of_block = run_of_block
        self._num_workers = num_workers
        self._jobs: dict[int, StoreJob | LoadJob] = {}
        self._next_id = 1
        self._last_start = 0.0
        self.num_loads = 0
        """For requests that wait."""
        self.num_stores = 0
        """Copies from HBM down."""
        self.num_demotions = 0
        """Copies from host to flash."""
        self.storing_blocks: dict[int, int] = {}
        """HBM block id -> job that reads it."""
        self.storing_keys: set[bytes] = set()
        self.loading_bytes: dict[str, int] = {"host": 0, "flash": 0}
        self.num_blocks_reserved = 0
        """Blocks that requests with a load in flight will still need."""

    def __len__(self) -> int:
        return len(self._jobs)

    def has_fresh_work(self, now: float) -> bool:
        """Whether a job has been started so recently that its end is due."""
        return bool(self._jobs) and now - self._last_start < FRESH_S

    def _new_id(self) -> int:
        job_id, self._next_id = self._next_id, self._next_id + 1
        return job_id

    # ------------------------------------------------------------------ starting

    def start_load(
        self,
        request_id: str | None,
        host: list[tuple[Slot, int]],
        flash: list[tuple[Slot, int]],
        num_blocks_left: int,
        block_bytes: int,
    ) -> LoadJob:
        """Hold the slots of a load; `request_id` None if nobody waits for it."""
        keys = [slot.block_hash for slot, _ in flash if slot.block_hash is not None]
        job = LoadJob(self._new_id(), request_id, host, flash, keys, num_blocks_left, block_bytes)
        self._host.hold(slot for slot, _ in host)
        self._flash.hold(slot for slot, _ in flash)
        self.loading_bytes["host"] += len(host) * block_bytes
        self.loading_bytes["flash"] += len(flash) * block_bytes
        self.num_blocks_reserved += num_blocks_left
        self._jobs[job.job_id] = job
        self.num_loads += request_id is not None
        return job

    def note_start(self, now: float) -> None:
        """A job has been started of which an idle engine should notice the end."""
        self._last_start = now

    def start_store(
        self, target: SlotTier, blocks: Sequence[KVCacheBlock], hbm: TierFreeList[KVCacheBlock], now: float
    ) -> StoreJob | None:
        """Take slots for HBM blocks; as many as there is room for. The blocks stay free: see `LifetimeMetadata.flush`."""
        slots = target.allocate(len(blocks))
        if not slots:
            return None
        job = StoreJob(self._new_id(), target, slots, [], [])
        for slot, block in zip(slots, blocks, strict=False):
            assert block.block_hash is not None
            # A member from now on, so that the run outlives the HBM block.
            target.free_list.set_run(slot, hbm.run_of[block.block_id])
            job.keys.append(block.block_hash)
            job.num_tokens.append(block.block_hash_num_tokens or 0)
            job.block_ids.append(block.block_id)
            self.storing_blocks[block.block_id] = job.job_id
        if target.tier == FLASH_TIER:
            job.classes = _classes_of([hbm.run_of[block_id] for block_id in job.block_ids])
        self._started(job, now)
        return job

    def start_demotion(self, sources: Sequence[Slot], now: float) -> StoreJob | None:
        """Take flash slots for host slots; as many as there is room for. The host slots are held."""
        slots = self._flash.allocate(len(sources))
        if not slots:
            return None
        job = StoreJob(self._new_id(), self._flash, slots, [], [])
        for slot, source in zip(slots, sources, strict=False):
            assert source.block_hash is not None
            self._flash.free_list.set_run(slot, self._host.run_of(source))
            job.keys.append(source.block_hash)
            job.num_tokens.append(source.block_hash_num_tokens or 0)
            job.sources.append(source)
        job.classes = _classes_of([self._host.run_of(source) for source in job.sources])
        self._host.hold(job.sources)
        self._started(job, now)
        return job

    def _started(self, job: StoreJob, now: float) -> None:
        self.storing_keys.update(job.keys)
        self._jobs[job.job_id] = job
        self._last_start = now
        if job.sources:
            self.num_demotions += 1
        else:
            self.num_stores += 1

    # ------------------------------------------------------------------ ending

    def report(self, job_id: int, result: JobResult) -> StoreJob | LoadJob | None:
        """A worker has finished its part of a job. Returns the job once all of them have."""
        job = self._jobs.get(job_id)
        if job is None:
            return None
        job.result.merge(result)
        if job.result.num_reports < self._num_workers:
            return None
        del self._jobs[job_id]
        return job

    def finish_load(self, job: LoadJob) -> int:
        """Release a load's slots; those that failed are forgotten, so that nobody asks them again (R4). Returns how many."""
        self.num_loads -= job.request_id is not None
        num_host = len(job.host)
        failed = set() if job.is_cancelled else job.result.failed
        self._host.forget(slot for i, (slot, _) in enumerate(job.host) if i in failed)
        self._flash.forget(slot for i, (slot, _) in enumerate(job.flash, num_host) if i in failed)
        # Deepest block first, as vLLM frees.
        self._host.release([slot for slot, _ in reversed(job.host)])
        self._flash.release([slot for slot, _ in reversed(job.flash)])
        self.loading_bytes["host"] -= num_host * job.block_bytes
        self.loading_bytes["flash"] -= len(job.flash) * job.block_bytes
        self.num_blocks_reserved -= job.num_blocks_left
        return len(failed)

    def finish_store(self, job: StoreJob) -> int:
        """Make what was written readable, unless it failed or the cache was reset meanwhile. Returns how many were written."""
        if job.sources:
            self.num_demotions -= 1
        else:
            self.num_stores -= 1
        self.storing_keys.difference_update(job.keys)
        for block_id in job.block_ids:
            if self.storing_blocks.get(block_id) == job.job_id:
                del self.storing_blocks[block_id]
        # First freed, first evicted: the sources were in eviction order, so this keeps it.
        for i, (slot, key, num_tokens) in enumerate(zip(job.slots, job.keys, job.num_tokens, strict=True)):
            if job.is_cancelled or i in job.result.failed:
                job.target.discard(slot)
                continue
            run = job.target.run_of(slot)
            if job.block_ids:
                run = self._run_of_block(job.block_ids[i], key) or run
            elif job.sources[i].block_hash == key:
                run = self._host.run_of(job.sources[i])
            job.target.publish(slot, key, num_tokens, run)
        if job.sources:
            moved = [s for i, s in enumerate(job.sources) if i not in job.result.failed]
            # Flash has it now: the host slot is free for what HBM gives up next.
            self._host.forget(moved)
            self._host.release(job.sources)
        return len(job.slots) - len(job.result.failed)

    def cancel_stores(self) -> None:
        """The cache was reset: what is being written must not become readable."""
        for job in self._jobs.values():
            if isinstance(job, StoreJob):
                job.is_cancelled = True
        self.storing_keys.clear()


def _classes_of(runs: Sequence[Run | None]) -> list[str]:
    """The segment class of each run; O(readers) once for each different one."""
    known = {run: SegmentClass.UNKNOWN.value if run is None else class_of_run(run).value for run in set(runs)}
    return [known[run] for run in runs]
