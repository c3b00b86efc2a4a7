# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the connector: what to load, what to copy down, what to retire.

EngineCore process, scheduler thread. Nothing here does IO or waits; bytes move in the workers (`worker.py`), and what became of
them comes back in `update_connector_output`.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import RequestStatus

from vllm_lifetime.agents import Reading
from vllm_lifetime.boundaries import MAX_ID_LENGTH, parse_request_metadata
from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.connectors.lifetime.control_calls import ControlCalls
from vllm_lifetime.connectors.lifetime.demotion import Demotion
from vllm_lifetime.connectors.lifetime.gauges import Gauges
from vllm_lifetime.connectors.lifetime.jobs import FLASH, HOST, LoadJob, StoreJob, TransferJobs
from vllm_lifetime.connectors.lifetime.layout import KVLayout
from vllm_lifetime.connectors.lifetime.metadata import (
    BYTES_READ,
    BYTES_WRITTEN,
    FlashReport,
    LifetimeMetadata,
    LifetimeWorkerMetadata,
)
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions, OptionsError
from vllm_lifetime.connectors.lifetime.request_state import RequestState
from vllm_lifetime.lifecycle import MIN_SHARED_TOKENS, Lifecycle
from vllm_lifetime.policy.cost import LoadPolicy
from vllm_lifetime.policy.retention import RetentionTable
from vllm_lifetime.pool.access import HBM_TIER, AccessTable
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Rank, Reader, Run
from vllm_lifetime.pool.tiers import Slot, SlotTier, TierUsage

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["LifetimeScheduler"]

logger = init_logger(__name__)

MAX_EVICTED_REMEMBERED = 1 << 16
"""Evicted hashes whose time of eviction is kept, to measure how soon they are wanted again."""

class LifetimeScheduler:
    """See the module. One per engine.

    Args:
        layout: what one block is, and whether blocks can be kept below HBM at all.

    """

    def __init__(self, vllm_config: "VllmConfig", layout: KVLayout, options: LifetimeOptions) -> None:
        self.options = options
        self.layout = layout
        self._block_size = self._hash_tokens = layout.block_size_tokens
        self._world_size: int = vllm_config.parallel_config.world_size
        self.pool: LifetimeBlockPool | None = None
        self._requests: dict[str, RequestState] = {}
        self.recorder = stats.Recorder()
        self._load_policy = LoadPolicy(always=options.load_policy == "always")
        num_host_slots = options.host_bytes // layout.block_bytes if layout.can_offload else 0
        if options.host_bytes and layout.can_offload and not num_host_slots:
            raise OptionsError(
                f"host_bytes = {options.host_bytes} is less than one KV block of this model, {layout.block_bytes} bytes. "
                "Raise it, or set it to 0 for no host tier."
            )
        self.host = SlotTier("host", HOST, num_host_slots, self._on_slot_evicted)
        self.flash = SlotTier("flash", FLASH, 0, self._on_slot_evicted)
        self.jobs = TransferJobs(self.host, self.flash, self._run_of_block, self._world_size)
        self.lifecycle = Lifecycle(
            self._end_reader,
            layout.block_bytes,
            options.lease_s,
            hash_tokens=layout.block_size_tokens,
            min_new_tokens=options.compaction_tokens,
            min_shared_tokens=min(MIN_SHARED_TOKENS, options.compaction_tokens),
        )
        self.retentions: RetentionTable | None = None
        self.calls = ControlCalls(self)
        self._access: AccessTable | None = None
        self._demotion: Demotion | None = None
        # Next step's orders.
        self._loads: list[LoadJob] = []
        self._flush: set[int] = set()
        self._clear_flash = False
        self._step_blocks = vllm_config.scheduler_config.max_num_batched_tokens // self._block_size
        self._evicted_at: dict[bytes, float] = {}
        # Step timing: step number -> (start, tokens); the worker echoes the number.
        self._step = 0
        self._steps: dict[int, tuple[float, int]] = {}
        self._last_step_end = 0.0
        self._wants_step = False
        self._gauges = Gauges(self.recorder)
        self._oldest_start: float | None = None

    # ------------------------------------------------------------------ binding

    def bind_pool(self, pool: LifetimeBlockPool) -> None:
        """The engine's block pool has been built."""
        self.pool = pool
        pool.listener = self
        self._hash_tokens = getattr(pool, "hash_block_size", None) or self._block_size
        self.lifecycle.set_hash_tokens(self._hash_tokens)
        self._bind_access()

    def bind_flash(self, reports: Sequence[FlashReport]) -> None:
        """The workers' flash devices are open: as many slots as all of them have, holding what survived on all of them (R9)."""
        num_slots = min(report.num_slots for report in reports)
        self.flash = SlotTier("flash", FLASH, num_slots, self._on_slot_evicted)
        self.jobs = TransferJobs(self.host, self.flash, self._run_of_block, self._world_size)
        survived = set(reports[0].recovered).intersection(*(report.recovered for report in reports[1:]))
        for index, key in sorted(survived):
            if index < num_slots and key not in self.flash:
                self.flash.adopt(index, key)
        if survived:
            logger.info("flash: %d of %d slots hold blocks from before the restart", len(self.flash), num_slots)
        self._bind_access()

    def _bind_access(self) -> None:
        if self.pool is None:
            return
        ahead = self.options.demote_ahead_blocks
        if ahead is None:
            ahead = min(max(16, 2 * self._step_blocks), self.pool.num_gpu_blocks // 2)
        self._demotion = Demotion(
            self.pool,
            self.host,
            self.flash,
            self.jobs,
            ahead=ahead,
            batch_blocks=max(1, self.options.demote_batch_bytes // self.layout.block_bytes),
            staging_blocks=max(1, self.options.flash_staging_bytes // self.layout.block_bytes),
        )
        free_lists: list[TierFreeList[Any]] = [self.pool.free_list, self.host.free_list, self.flash.free_list]
        self._access = AccessTable(free_lists, self._copies_of, self.pool.twin_of)
        capacity = self.pool.num_gpu_blocks + len(self.host.slots) + len(self.flash.slots)
        self.retentions = RetentionTable(self._access, capacity)

    def _copies_of(self, key: bytes) -> list[tuple[int, Slot]]:
        copies = []
        slot = self.host.get(key)
        if slot is not None:
            copies.append((HOST, slot))
        slot = self.flash.get(key)
        if slot is not None:
            copies.append((FLASH, slot))
        return copies

    def _run_of_block(self, block_id: int, key: bytes) -> Any:
        """The run of an HBM block if it still holds `key`."""
        if self.pool is None or self.pool.blocks[block_id].block_hash != key:
            return None
        return self.pool.free_list.run_of[block_id]

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: "Request") -> None:
        """Resolve who the request is. Bad metadata costs the hint, never the request."""
        metadata, problem = parse_request_metadata(request.kv_transfer_params)
        if problem is not None:
            self.recorder.count(stats.BAD_METADATA)
            # Not the request's id: that would make every line another one.
            logger.warning_once("a request's metadata: %s", problem)
        old = self._requests.get(request.request_id)
        if old is not None and old.reading is not None:
            self.note_retired(self.lifecycle.finish_request(old.reading, ()))
        session_id = request.session_id
        if session_id is not None and not 0 < len(session_id) <= MAX_ID_LENGTH:
            # No boundary could name it.
            session_id = None
            self.recorder.count(stats.BAD_METADATA)
        reading = self.lifecycle.start_request(session_id, metadata, request.block_hashes)
        boundary_tokens = request.num_prompt_tokens
        if reading is not None and reading.boundary_blocks is not None:
            boundary_tokens = min(boundary_tokens, reading.boundary_blocks * self._hash_tokens)
        self._requests[request.request_id] = RequestState(reading, boundary_tokens)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after vLLM's own hit to load from below. Called at every attempt to admit the request."""
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        # The request starts over: after a preemption or a failed load its blocks may be others.
        state.paths.clear()
        state.plan = []
        start = num_computed_tokens // self._block_size
        state.num_local_blocks = start
        state.loaded_end = start
        if not len(self.host) and not len(self.flash):
            return 0, False
        plan = self._look_up(request, start)
        if not plan:
            return 0, False
        refusal = self._reason_to_refuse(request, start, plan)
        if refusal is not None:
            if not state.was_refused:
                state.was_refused = True
                self.recorder.count(stats.LOADS, refusal)
            return 0, False
        state.plan = plan
        return len(plan) * self._block_size, True

    def _group_block_size(self, group_id: int) -> int:
        sizes = self.layout.group_block_sizes_tokens
        return sizes[group_id] if group_id < len(sizes) else self._block_size

    def _has_prompt(self, request: "Request", num_blocks: int) -> bool:
        """Whether `num_blocks` are all whole blocks of the prompt but the last, which is always computed."""
        return num_blocks >= request.num_prompt_tokens // self._block_size - 1

    def _look_up(self, request: "Request", start: int) -> list[Slot]:
        """Slots of the blocks that follow block `start`, up to the first that is nowhere. The last token is always computed."""
        plan: list[Slot] = []
        hashes = request.block_hashes
        for index in range(start, min((request.num_tokens - 1) // self._block_size, len(hashes))):
            key = make_block_hash_with_group_id(hashes[index], 0)
            slot = self.host.get(key) or self.flash.get(key)
            if slot is None:
                break
            plan.append(slot)
        return plan

    def _reason_to_refuse(self, request: "Request", start: int, plan: list[Slot]) -> str | None:
        """None if the load pays and the whole request fits (R1): a load holds its blocks and cannot be preempted."""
        pool = self.pool
        if pool is None:
            return "skipped_no_room"
        wanted = -(-request.num_tokens // self._block_size) - start
        spare = pool.get_num_free_blocks() - self.jobs.num_blocks_reserved
        # Of the local hit, what nobody else references is still counted as free.
        if wanted > spare - start:
            hashes = request.block_hashes
            for index in range(start):
                block = pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(hashes[index], 0))
                if block is not None and block.ref_cnt == 0:
                    spare -= 1
            if wanted > spare:
                return "skipped_no_room"
        num_bytes = self._bytes_by_tier(plan)
        if not self._load_policy.should_load(len(plan) * self._block_size, num_bytes, self.jobs.loading_bytes):
            return "skipped_slower"
        return None

    def _is_host(self, slot: Slot) -> bool:
        return slot.block_id < len(self.host.slots) and self.host.slots[slot.block_id] is slot

    def _bytes_by_tier(self, plan: Sequence[Slot]) -> dict[str, int]:
        num_host = sum(1 for slot in plan if self._is_host(slot))
        block_bytes = self.layout.block_bytes
        return {"host": num_host * block_bytes, "flash": (len(plan) - num_host) * block_bytes}

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        """The request has its blocks: note what it reads, and queue the load it was promised."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        plan, state.plan = state.plan, []
        if state.num_local_blocks is not None:
            start, state.num_local_blocks = state.num_local_blocks, None
            self.recorder.count(stats.REQUESTS)
            self.recorder.count(stats.PROMPT_TOKENS, by=request.num_tokens)
            self._note_hits("hbm", start)
            if self._access is not None and (state.reading is not None or self._access.has_runs):
                for group_id, group in enumerate(blocks.blocks):
                    block_size = self._group_block_size(group_id)
                    hit = min(start * self._block_size // block_size, len(group))
                    self._access.read(state.path(group_id, block_size), group, hit)
                # Nothing more to load or to find computed: the request has its whole prefix.
                if state.reading is not None and not num_external_tokens and self._has_prompt(request, start):
                    self.note_retired(self.lifecycle.has_read(state.reading))
            if num_external_tokens > 0:
                self._queue_load(request, state, blocks.blocks[0], start, plan[: num_external_tokens // self._block_size])

    def _queue_load(
        self, request: "Request", state: RequestState, blocks: Sequence[KVCacheBlock], start: int, plan: list[Slot]
    ) -> None:
        block_ids = [block.block_id for block in blocks[start : start + len(plan)]]
        host = [(slot, block_id) for slot, block_id in zip(plan, block_ids, strict=True) if self._is_host(slot)]
        flash = [(slot, block_id) for slot, block_id in zip(plan, block_ids, strict=True) if not self._is_host(slot)]
        self._note_hits("host", len(host))
        self._note_hits("flash", len(flash))
        num_blocks_left = -(-request.num_tokens // self._block_size) - start - len(plan)
        job = self.jobs.start_load(request.request_id, host, flash, max(0, num_blocks_left), self.layout.block_bytes)
        self._loads.append(job)
        state.loaded_end = start + len(plan)
        state.loading = (len(host), len(flash))

    def load_origins(self, request_id: str) -> tuple[int, int]:
        """Tokens of the request's latest load by origin: host, flash."""
        state = self._requests.get(request_id)
        host, flash = (0, 0) if state is None else state.loading
        return host * self._block_size, flash * self._block_size

    def _note_hits(self, tier: str, num_blocks: int) -> None:
        self.recorder.count(stats.HIT_BLOCKS, tier, by=num_blocks)
        self.recorder.count(stats.HIT_TOKENS, tier, by=num_blocks * self._block_size)

    def request_finished(self, request: "Request") -> None:
        """The request is over, however it ended; vLLM frees its blocks next. A load in flight goes on and reports itself."""
        state = self._requests.pop(request.request_id, None)
        if state is not None and state.reading is not None:
            self._retain(state.reading)
            is_aborted = request.status == RequestStatus.FINISHED_ABORTED
            self.note_retired(self.lifecycle.finish_request(state.reading, request.block_hashes, is_aborted=is_aborted))
        # What it gives back may be the next to be evicted.
        if self._demotion is not None:
            self._demotion.look_again()

    def _retain(self, reading: Reading) -> None:
        """Keep what the request has read for as long as it wished, or as its protocol asks."""
        retentions, agent, prompt = self.retentions, reading.agent, reading.prompt
        if retentions is None or not (reading.retain_s or reading.cache_ttl_s):
            return
        now = time.monotonic()
        runs = prompt.runs | reading.output.runs
        if reading.retain_s:
            agent.retention = retentions.renew(agent.retention, prompt.workflow_id, runs, reading.retain_s, now)
        # A boundary that has come meanwhile knows better than the protocol.
        if reading.cache_ttl_s and not prompt.is_closing:
            agent.wish = retentions.renew(agent.wish, prompt.workflow_id, runs, reading.cache_ttl_s, now)

    # ------------------------------------------------------------------ the pool's calls (hot path)

    def on_blocks_cached(
        self, request: "Request", group_id: int, blocks: Sequence[KVCacheBlock], num_cached: int, num_full: int
    ) -> None:
        """New blocks have hashes: put them into runs, and measure regret for those that were evicted before."""
        state = self._requests.get(request.request_id)
        if self._evicted_at:
            loaded_end = state.loaded_end if state is not None else 0
            for index in range(num_cached, num_full):
                key = blocks[index].block_hash
                evicted_at = None if key is None else self._evicted_at.pop(key, None)
                if evicted_at is not None:
                    outcome = "reloaded" if index < loaded_end else "recomputed"
                    self.recorder.observe(stats.REUSE_GAP, outcome, value=time.monotonic() - evicted_at)
        access = self._access
        if access is None or state is None or (state.reading is None and not access.has_runs):
            return
        path = state.path(group_id, self._group_block_size(group_id))
        access.read(path, blocks, num_cached)
        access.write(path, blocks, num_full)
        if state.reading is not None and state.reading.replaced and self._has_prompt(request, num_full + 1):
            self.note_retired(self.lifecycle.has_read(state.reading))

    def on_blocks_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks are handed out: those being copied down must be copied before they are overwritten; evictions are noted."""
        if self._demotion is not None:
            self._demotion.note_moved(len(blocks))
        storing = self.jobs.storing_blocks
        if storing:
            self._flush.update(storing[block.block_id] for block in blocks if block.block_id in storing)
        now = 0.0
        retired = demoted = lost = 0
        run_of = self.pool.free_list.run_of if self.pool is not None else ()
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
            elif key in self.host or key in self.flash:
                demoted += 1
            else:
                lost += 1
        if now:
            while len(evicted_at) > MAX_EVICTED_REMEMBERED:
                del evicted_at[next(iter(evicted_at))]
            self.recorder.count(stats.EVICTIONS, "hbm", "retired", by=retired)
            self.recorder.count(stats.EVICTIONS, "hbm", "demoted", by=demoted)
            self.recorder.count(stats.EVICTIONS, "hbm", "lost", by=lost)

    def on_prefix_cache_reset(self) -> None:
        """vLLM dropped its prefix cache: so do the tiers below, in memory and on the device (R25)."""
        self.host.clear()
        self.flash.clear()
        self.jobs.cancel_stores()
        self._evicted_at.clear()
        self._clear_flash = True
        self._wants_step = True

    def _on_slot_evicted(self, slot: Slot) -> None:
        tier = self.host if self._is_host(slot) else self.flash
        run = tier.run_of(slot)
        if run is not None and run.is_retired:
            reason = "retired"
        elif tier is self.host and slot.block_hash is not None and slot.block_hash in self.flash:
            reason = "demoted"
        else:
            reason = "lost"
        self.recorder.count(stats.EVICTIONS, tier.name, reason)

    # ------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> LifetimeMetadata:
        """This step's orders for the workers."""
        self._wants_step = False
        now = time.monotonic()
        self.expire()
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self._step += 1
        if num_tokens:
            self._steps[self._step] = (now, num_tokens)
        meta = LifetimeMetadata(step=self._step if num_tokens else 0)
        loads, self._loads = self._loads, []
        meta.loads.extend(job.order(self.options.load_deadline_s) for job in loads)
        if self._clear_flash:
            meta.clear_flash, self._clear_flash = True, False
        elif self._demotion is not None:
            self._demotion.give_orders(meta, now)
        meta.flush, self._flush = self._flush, set()
        return meta

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """What became of the workers' jobs."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, LifetimeWorkerMetadata):
            return
        now = time.monotonic()
        self._time_step(report.step, now)
        self._oldest_start = report.oldest_start
        for kind, count in report.flash.items():
            if kind == BYTES_READ:
                self.recorder.count(stats.BYTES_READ, "flash", by=count)
            elif kind == BYTES_WRITTEN:
                self.recorder.count(stats.BYTES_WRITTEN, "flash", by=count)
            else:
                self.recorder.count(stats.FLASH_FAULTS, kind, by=count)
        for job_id, result in report.results.items():
            job = self.jobs.report(job_id, result)
            if isinstance(job, LoadJob):
                self._load_done(job)
            elif isinstance(job, StoreJob):
                num_stored = self.jobs.finish_store(job)
                if job.target is self.host:
                    self.recorder.count(stats.BYTES_WRITTEN, "host", by=num_stored * self.layout.block_bytes)
                    continue
                if self._demotion is not None:
                    self._demotion.note_flash_store(is_well=num_stored > 0, now=now)
                    if job.sources and num_stored:
                        self._demotion.look_again()  # the host tier has room again

    def _time_step(self, step: int, now: float) -> None:
        started = self._steps.pop(step, None)
        if started is None:
            return
        for old in [number for number in self._steps if number < step]:
            del self._steps[old]
        start, num_tokens = started
        # With several steps in flight a step begins, for the device, when the one before it ended.
        seconds = now - max(start, self._last_step_end)
        self._last_step_end = now
        if num_tokens >= 2 * self._block_size:
            self._load_policy.observe_prefill(num_tokens, seconds)

    def _load_done(self, job: LoadJob) -> None:
        num_failed = self.jobs.finish_load(job)
        outcome = "late" if job.result.is_late else "failed" if num_failed else "done"
        self.recorder.count(stats.LOADS, outcome)
        self.recorder.count(stats.RECOMPUTED_BLOCKS, by=num_failed)
        block_bytes = self.layout.block_bytes
        num_host = sum(1 for i in range(len(job.host)) if i not in job.result.failed)
        self.recorder.count(stats.BYTES_READ, "host", by=num_host * block_bytes)
        seconds = job.result.seconds
        if job.result.is_late:
            # It took at least this long; how long, nobody waited to see.
            seconds = max(seconds, self.options.load_deadline_s)
        elif num_failed or (job.host and job.flash):
            return  # not a measurement of one tier
        tier = "flash" if job.flash else "host"
        self._load_policy.observe_load(tier, (len(job.host) + len(job.flash)) * block_bytes, seconds)

    def has_pending_push_work(self) -> bool:
        """Whether the engine should step although no request wants it: a fresh transfer or news for the metrics is pending.

        A transfer that hangs does not keep an idle engine spinning: it is picked up by the next request's step.
        """
        now = time.monotonic()
        if self._wants_step or self.jobs.has_fresh_work(now):
            return True
        # Idle time is the best time to copy down.
        return self._demotion is not None and self._demotion.is_due(now) and not len(self.jobs)

    # ------------------------------------------------------------------ boundaries and views

    def lifetime_call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The control API's way in; see `control_calls.py`. Runs between two steps. Raises `ValueError` for an unknown call."""
        return self.calls.call(method, payload)

    def want_step(self) -> None:
        """Let an idle engine step once, so that the metrics show what has changed."""
        self._wants_step = True

    def note_retired(self, num_blocks: int) -> None:
        """Blocks have been retired by a boundary, by what a request showed, or by time."""
        self.recorder.count(stats.RETIRED_BLOCKS, by=num_blocks)

    def expire(self) -> None:
        """End what has been kept, or waited for, long enough. O(1) if there is nothing."""
        self.note_retired(self.lifecycle.expire())
        if self.retentions is not None:
            self.note_retired(self.retentions.expire(time.monotonic()))

    def set_rank(self, run: Run, rank: Rank) -> None:
        """Rank a run in every tier."""
        if self._access is not None:
            self._access.set_rank(run, rank)

    def _end_reader(self, reader: Reader) -> int:
        return sum(self._access.end(reader)) if self._access is not None else 0

    @property
    def oldest_io_s(self) -> float:
        """Age of the oldest transfer in flight, in seconds; 0 if there is none."""
        return 0.0 if self._oldest_start is None else time.monotonic() - self._oldest_start

    def usage(self) -> dict[str, TierUsage]:
        """Blocks of each tier by state. O(1)."""
        by_tier = {"host": self.host.usage(), "flash": self.flash.usage()}
        if self.pool is not None:
            free_list = self.pool.free_list
            free = free_list.num_empty_blocks + free_list.num_retired_blocks
            # The null block is never anybody's.
            by_tier["hbm"] = TierUsage(self.pool.num_gpu_blocks - 1, free, free_list.num_retired_blocks)
        return by_tier

    def take_stats(self) -> stats.LifetimeStats | None:
        """What the metrics have to know since the last call; None if nothing has changed."""
        self._gauges.show(self)
        taken = self.recorder.take()
        return None if taken.is_empty() else taken


assert HBM_TIER == 0 and (HOST, FLASH) == (1, 2)
