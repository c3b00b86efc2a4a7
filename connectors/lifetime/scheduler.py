# SPDX-License-Identifier: Apache-2.0
"""Scheduler side of the connector: what to load, what to copy down, what to retire.

EngineCore process, scheduler thread. Nothing here does IO or waits; bytes move in the workers (`worker.py`), and what became of
them comes back in `update_connector_output`.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import RequestStatus

from vllm_lifetime.agents import Reading
from vllm_lifetime.boundaries import MAX_ID_LENGTH, Boundary, Outcome, OutcomeStatus, parse_request_metadata
from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.connectors.lifetime.control_calls import ControlCalls
from vllm_lifetime.connectors.lifetime.demotion import Demotion
from vllm_lifetime.connectors.lifetime.engine_files import engine_file_path, open_recorder
from vllm_lifetime.connectors.lifetime.eviction_log import EvictionLog
from vllm_lifetime.connectors.lifetime.flash_writes import FlashWrites
from vllm_lifetime.connectors.lifetime.forecasting import Forecasting
from vllm_lifetime.connectors.lifetime.gauges import Gauges
from vllm_lifetime.connectors.lifetime.in_place import InPlacePlan
from vllm_lifetime.connectors.lifetime.in_place_pool import InPlacePool
from vllm_lifetime.connectors.lifetime.jobs import LoadJob, StoreJob, TransferJobs
from vllm_lifetime.connectors.lifetime.layout import KVLayout
from vllm_lifetime.connectors.lifetime.loads import Loads
from vllm_lifetime.connectors.lifetime.metadata import (
    BYTES_READ,
    BYTES_WRITTEN,
    DELAY_US,
    FlashReport,
    LifetimeMetadata,
    LifetimeWorkerMetadata,
)
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions, OptionsError
from vllm_lifetime.connectors.lifetime.pace import Pace
from vllm_lifetime.connectors.lifetime.prefetch import Prefetch
from vllm_lifetime.connectors.lifetime.request_state import RequestState
from vllm_lifetime.connectors.lifetime.spawn_ranks import SpawnRanks
from vllm_lifetime.connectors.lifetime.wear_state import WearState
from vllm_lifetime.conversations import MIN_SHARED_TOKENS
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.policy.placement.contract import PlacementConfig, Tier
from vllm_lifetime.policy.placement.lachesis import Lachesis
from vllm_lifetime.policy.placement.registry import parse_placement
from vllm_lifetime.policy.prefetch import PrefetchPlanner
from vllm_lifetime.policy.retention import RetentionTable
from vllm_lifetime.pool.access import FLASH_TIER, HOST_TIER, AccessTable
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Rank, Reader, Run
from vllm_lifetime.pool.tiered import CoveredTier
from vllm_lifetime.pool.tiers import Slot, SlotTier, TierUsage

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["LifetimeScheduler"]

logger = init_logger(__name__)


class LifetimeScheduler:
    """See the module. One per engine.

    Args:
        layout: what one block is, and whether blocks can be kept below HBM at all.
        in_place: which blocks of the pool lie in flash; None: none.

    """

    def __init__(
        self, vllm_config: "VllmConfig", layout: KVLayout, options: LifetimeOptions, in_place: InPlacePlan | None = None
    ) -> None:
        self.options = options
        self._in_place_plan = in_place
        self.in_place: InPlacePool | None = None
        """The two tiers of the block pool; None: it is all HBM."""
        self.layout = layout
        self._block_size = self._hash_tokens = layout.block_size_tokens
        self._world_size: int = vllm_config.parallel_config.world_size
        self.pool: LifetimeBlockPool | None = None
        self._requests: dict[str, RequestState] = {}
        self.recorder = stats.Recorder()
        self._evictions = EvictionLog(self.recorder)
        self._request_loads = Loads(self, self._block_size)
        always_load = options.load_policy == "always"
        self.pace = Pace(self._block_size, layout.block_bytes, options.load_deadline_s, always_load=always_load)
        num_host_slots = options.host_bytes // layout.block_bytes if layout.can_offload else 0
        if options.host_bytes and layout.can_offload and not num_host_slots:
            raise OptionsError(
                f"host_bytes = {options.host_bytes} is less than one KV block of this model, {layout.block_bytes} bytes. "
                "Raise it, or set it to 0 for no host tier."
            )
        self.host = SlotTier("host", HOST_TIER, num_host_slots, self._on_slot_evicted)
        self.flash = SlotTier("flash", FLASH_TIER, 0, self._on_slot_evicted)
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
        self.spawn_ranks: SpawnRanks | None = None
        """None: nothing is placed by the order in which sub-agents return."""
        if options.flash_bytes and options.placement == Lachesis.name:
            self.spawn_ranks = SpawnRanks(self.lifecycle, options.rank_path, engine_file_path(options.state_path, vllm_config))
        score_of = None if self.spawn_ranks is None else self.spawn_ranks.score_of
        try:
            self.flash_writes = FlashWrites(
                options, self.lifecycle.segments, self.recorder, layout.block_bytes, time.monotonic(), score_of=score_of
            )
        except ValueError as error:
            raise OptionsError(f"flash_write_bytes_per_day: {error}.") from None
        self.wear = WearState(self.recorder)
        self.calls = ControlCalls(self)
        self._access: AccessTable | None = None
        self._demotion: Demotion | None = None
        self._acts_on_boundaries = options.policy.acts_on_boundaries
        self._knows_readers = self._acts_on_boundaries or options.policy.needs_scorer
        self.forecasting: Forecasting | None = None
        """None: active blocks are ordered by recency alone."""
        if options.policy.needs_scorer:
            state_path = engine_file_path(options.state_path, vllm_config)
            self.forecasting = Forecasting(options, self.lifecycle, self.recorder, state_path)
        self._trace = open_recorder(engine_file_path(options.record_path, vllm_config), layout.block_size_tokens)
        self.prefetch: Prefetch | None = None
        """None: no tier below HBM, or it is off."""
        # Next step's orders.
        self._flush: set[int] = set()
        self._clear_flash = False
        self._step_blocks = vllm_config.scheduler_config.max_num_batched_tokens // self._block_size
        self._wants_step = False
        self._gauges = Gauges(self.recorder)
        self._oldest_start: float | None = None

    # ------------------------------------------------------------------ binding

    @property
    def has_in_place_flash(self) -> bool:
        """Whether blocks of the engine's pool lie in flash."""
        return self._in_place_plan is not None

    def bind_pool(self, pool: LifetimeBlockPool) -> None:
        """The engine's block pool has been built."""
        self.pool = pool
        plan = self._in_place_plan
        if plan is not None:
            placement = parse_placement(self.options.placement)
            config = PlacementConfig(unknown_tier=Tier[self.options.placement_unknown.upper()])
            self.in_place = InPlacePool(
                pool,
                plan.num_hbm_blocks,
                placement,
                config,
                plan.block_size_tokens,
                self._requests,
                self.recorder,
                score_of=None if self.spawn_ranks is None else self.spawn_ranks.score_of,
            )
        pool.listener = self
        self._hash_tokens = getattr(pool, "hash_block_size", None) or self._block_size
        self.lifecycle.set_hash_tokens(self._hash_tokens)
        self._bind_access()

    def bind_flash(self, reports: Sequence[FlashReport]) -> None:
        """The workers' flash devices are open: as many slots as all of them have, holding what survived on all of them (R9)."""
        self.wear.bind([report.wear for report in reports if report.wear is not None], self.flash_writes)
        if self.has_in_place_flash:
            return
        num_slots = min(report.num_slots for report in reports)
        self.flash = SlotTier("flash", FLASH_TIER, num_slots, self._on_slot_evicted)
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
            self.flash_writes,
            ahead=ahead,
            batch_blocks=max(1, self.options.demote_batch_bytes // self.layout.block_bytes),
            staging_blocks=max(1, self.options.flash_staging_bytes // self.layout.block_bytes),
        )
        flash_list = self.flash.free_list if self.in_place is None else CoveredTier[Any](FLASH_TIER)
        free_lists: list[TierFreeList[Any]] = [self.pool.free_list, self.host.free_list, flash_list]
        self._access = AccessTable(free_lists, self._copies_of, self.pool.twin_of)
        capacity = self.pool.num_gpu_blocks + len(self.host.slots) + len(self.flash.slots)
        self.retentions = RetentionTable(self._access, capacity)
        if self.forecasting is not None:
            self.forecasting.bind(self._access, self.pool.num_gpu_blocks)
        if self.options.prefetches and (self.host.slots or self.flash.slots):
            self.prefetch = self._make_prefetch(self.pool)

    def _make_prefetch(self, pool: LifetimeBlockPool) -> Prefetch:
        in_hbm = pool.cached_block_hash_to_block.get_one_block

        def is_in_hbm(slot: Slot) -> bool:
            return slot.block_hash is not None and in_hbm(BlockHashWithGroupId(slot.block_hash)) is not None

        planner = PrefetchPlanner(self._one_step_value, is_in_hbm, self._block_size, self.pace.rates)
        return Prefetch(
            pool,
            self.host,
            self.flash,
            self.jobs,
            self.lifecycle.segments,
            planner,
            self.pace.rates,
            self.recorder,
            block_bytes=self.layout.block_bytes,
            deadline_s=self.options.load_deadline_s,
            rho=self.options.prefetch_rho if self.options.prefetch == "aggressive" else 0.0,
        )

    def _one_step_value(self, run: Run) -> float:
        return 0.0 if self.forecasting is None else self.forecasting.one_step_value(run)

    def _copies_of(self, key: bytes) -> list[tuple[int, Slot]]:
        copies = []
        slot = self.host.get(key)
        if slot is not None:
            copies.append((HOST_TIER, slot))
        slot = self.flash.get(key)
        if slot is not None:
            copies.append((FLASH_TIER, slot))
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
            if self.forecasting is not None:
                self.forecasting.on_replaced(request.request_id, old.reading)
            self.note_retired(self.lifecycle.finish_request(old.reading, ()))
        session_id = request.session_id
        if session_id is not None and not 0 < len(session_id) <= MAX_ID_LENGTH:
            # No boundary could name it.
            session_id = None
            self.recorder.count(stats.BAD_METADATA)
        reading = None
        if self._knows_readers:
            reading = self.lifecycle.start_request(session_id, metadata, request.block_hashes)
        if self._trace is not None:
            self._trace.on_request_started(
                request.request_id,
                time.monotonic(),
                request.block_hashes,
                request.num_prompt_tokens,
                session_id=session_id,
                workflow_id=metadata.workflow_id,
                agent=metadata.agent,
                agent_id=metadata.agent_id,
                parent_agent_id=metadata.parent_agent_id,
            )
        if reading is not None and self.forecasting is not None:
            self.forecasting.on_start(request.request_id, reading)
            self._look_for_prefetch()
        boundary_tokens = request.num_prompt_tokens
        if reading is not None and reading.boundary_blocks is not None:
            boundary_tokens = min(boundary_tokens, reading.boundary_blocks * self._hash_tokens)
        self._requests[request.request_id] = RequestState(reading, boundary_tokens)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after vLLM's own hit to load from below. Called at every attempt to admit the request."""
        state = self._requests.get(request.request_id)
        num_blocks = 0 if state is None else self._request_loads.plan(request, state, num_computed_tokens)
        return num_blocks * self._block_size, num_blocks > 0

    def _group_block_size(self, group_id: int) -> int:
        sizes = self.layout.group_block_sizes_tokens
        return sizes[group_id] if group_id < len(sizes) else self._block_size

    def _has_prompt(self, request: "Request", num_blocks: int) -> bool:
        """Whether `num_blocks` are all whole blocks of the prompt but the last, which is always computed."""
        return num_blocks >= request.num_prompt_tokens // self._block_size - 1

    def is_host(self, slot: Slot) -> bool:
        """Whether a slot is of the host tier."""
        return slot.block_id < len(self.host.slots) and self.host.slots[slot.block_id] is slot

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
            in_flash = 0 if self.in_place is None else self.in_place.num_in_flash(blocks.blocks[0][:start])
            self.note_hits("hbm", start - in_flash)
            self.note_hits("flash", in_flash)
            self._note_use(request, request.num_tokens, starts_unnamed=state.reading is None)
            if self.prefetch is not None:
                self.prefetch.note_read(blocks.blocks[0], start)
            if self._access is not None and (state.reading is not None or self._access.has_runs):
                for group_id, group in enumerate(blocks.blocks):
                    block_size = self._group_block_size(group_id)
                    hit = min(start * self._block_size // block_size, len(group))
                    self._access.read(state.path(group_id, block_size), group, hit)
                # Nothing more to load or to find computed: the request has its whole prefix.
                if state.reading is not None and not num_external_tokens and self._has_prompt(request, start):
                    self.note_retired(self.lifecycle.has_read(state.reading))
            if num_external_tokens > 0:
                plan = plan[: num_external_tokens // self._block_size]
                self._request_loads.queue(request, state, blocks.blocks[0], start, plan)

    def _note_use(self, request: "Request", num_tokens: int, *, starts_unnamed: bool = False) -> None:
        """The request has got, or is about to give back, the blocks of its first `num_tokens` tokens."""
        if self.forecasting is None:
            return
        if starts_unnamed:
            self.forecasting.on_unnamed_start()
        if not self.forecasting.follows_use:
            return
        for group_id, block_size in enumerate(self.layout.group_block_sizes_tokens):
            step = max(1, block_size // self._hash_tokens)
            self.forecasting.on_use(request.block_hashes[step - 1 : num_tokens // self._hash_tokens : step], group_id)

    def load_origins(self, request_id: str) -> tuple[int, int]:
        """Tokens of the request's latest load by origin: host, flash."""
        state = self._requests.get(request_id)
        host, flash = (0, 0) if state is None else state.loading
        return host * self._block_size, flash * self._block_size

    def note_hits(self, tier: str, num_blocks: int) -> None:
        """Prompt blocks were found in a tier."""
        self.recorder.count(stats.HIT_BLOCKS, tier, by=num_blocks)
        self.recorder.count(stats.HIT_TOKENS, tier, by=num_blocks * self._block_size)

    def request_finished(self, request: "Request") -> None:
        """The request is over, however it ended; vLLM frees its blocks next. A load in flight goes on and reports itself."""
        state = self._requests.pop(request.request_id, None)
        if self._trace is not None:
            reason = request.get_finished_reason()
            reason_name = None if reason is None else str(reason)
            now = time.monotonic()
            self._trace.on_request_finished(request.request_id, now, request.num_output_tokens, finish_reason=reason_name)
        self._note_use(request, request.num_computed_tokens)
        if state is not None and state.reading is not None:
            self._retain(state.reading)
            if self.forecasting is not None:
                self.forecasting.on_finish(request, state.reading)
            is_aborted = request.status == RequestStatus.FINISHED_ABORTED
            self.note_retired(self.lifecycle.finish_request(state.reading, request.block_hashes, is_aborted=is_aborted))
        # What it gives back may be the next to be evicted.
        if self._demotion is not None:
            self._demotion.look_again()
        self._look_for_prefetch()

    def _look_for_prefetch(self) -> None:
        if self.prefetch is not None:
            self.prefetch.look_again()

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
        self._evictions.note_back(blocks, num_cached, num_full, state.loaded_end if state is not None else 0)
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
        if self.prefetch is not None:
            self.prefetch.note_handed_out(blocks)
        if self.in_place is not None:
            for tier, part in self.in_place.by_tier(blocks):
                self._evictions.note_handed_out(part, self.in_place.tiers, self.host, self.flash, tier)
        elif self.pool is not None:
            self._evictions.note_handed_out(blocks, self.pool.free_list, self.host, self.flash)

    def on_lent_blocks_needed(self) -> None:
        """An allocation needs what was lent for a prefetch."""
        if self.prefetch is not None:
            self.prefetch.give_back()

    def on_prefix_cache_reset(self) -> None:
        """vLLM dropped its prefix cache: so do the tiers below, in memory and on the device (R25)."""
        self.host.clear()
        self.flash.clear()
        self.jobs.cancel_stores()
        self._evictions.clear()
        if self.prefetch is not None:
            self.prefetch.on_reset()
        self._clear_flash = True
        self._wants_step = True

    def _on_slot_evicted(self, slot: Slot) -> None:
        self._evictions.note_slot(slot, self.host if self.is_host(slot) else self.flash, self.flash)

    # ------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> LifetimeMetadata:
        """This step's orders for the workers."""
        self._wants_step = False
        now = time.monotonic()
        self.expire()
        if self.forecasting is not None:
            self.forecasting.on_step(now, self._evictions.num_evicted)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        only_decodes = _only_decodes(scheduler_output)
        meta = LifetimeMetadata(step=self.pace.begin_step(num_tokens, only_decodes=only_decodes, now=now))
        meta.loads.extend(job.order(self.options.load_deadline_s) for job in self._request_loads.take_queued())
        if self._clear_flash:
            meta.clear_flash, self._clear_flash = True, False
        elif self._demotion is not None:
            self._demotion.give_orders(meta, now)
            # Not in one step: a block must not be handed out before the worker has begun to copy it down.
            if self.prefetch is not None and only_decodes and not meta.stores:
                self.prefetch.give_orders(meta, len(scheduler_output.num_scheduled_tokens), now)
        if self.prefetch is not None:
            meta.cancel = self.prefetch.take_cancelled()
        if self.in_place is not None:
            meta.placed = self.in_place.take_placed()
        meta.flush, self._flush = self._flush, set()
        return meta

    def update_connector_output(self, output: "KVConnectorOutput") -> None:
        """What became of the workers' jobs."""
        report = output.kv_connector_worker_meta
        if not isinstance(report, LifetimeWorkerMetadata):
            return
        now = time.monotonic()
        self.pace.end_step(report.step, now)
        self._oldest_start = report.oldest_start
        if self.forecasting is not None and report.hidden_states:
            self.forecasting.on_hidden_states(report.hidden_states)
        for kind, count in report.flash.items():
            if kind == BYTES_READ:
                self.recorder.count(stats.BYTES_READ, "flash", by=count)
            elif kind == BYTES_WRITTEN:
                self.recorder.count(stats.BYTES_WRITTEN, "flash", by=count)
            elif kind == DELAY_US:
                self.recorder.count(stats.EMULATED_DELAY, by=count)
            else:
                self.recorder.count(stats.FLASH_FAULTS, kind, by=count)
        if report.wear:
            self.wear.update(report.wear, now)
        for job_id, result in report.results.items():
            job = self.jobs.report(job_id, result)
            if isinstance(job, LoadJob):
                self._load_done(job)
            elif isinstance(job, StoreJob):
                num_stored = self.jobs.finish_store(job)
                if job.target is self.host:
                    self.recorder.count(stats.BYTES_WRITTEN, "host", by=num_stored * self.layout.block_bytes)
                    continue
                self.flash_writes.give_back(len(job.slots) - num_stored)
                if self._demotion is not None:
                    self._demotion.note_flash_store(is_well=num_stored > 0, now=now)
                    if job.sources and num_stored:
                        self._demotion.look_again()  # the host tier has room again

    def _load_done(self, job: LoadJob) -> None:
        self.pace.note_transfer(job)
        num_host = sum(1 for i in range(len(job.host)) if i not in job.result.failed)
        self.recorder.count(stats.BYTES_READ, "host", by=num_host * self.layout.block_bytes)
        if job.request_id is not None:
            self._request_loads.finish(job)
        elif self.prefetch is not None:
            self.prefetch.finish(job)

    def has_pending_push_work(self) -> bool:
        """Whether the engine should step although no request wants it: a fresh transfer or news for the metrics is pending.

        A transfer that hangs does not keep an idle engine spinning: it is picked up by the next request's step.
        """
        now = time.monotonic()
        if self._wants_step or self.jobs.has_fresh_work(now):
            return True
        # Idle time is the best time to copy down, and up.
        if len(self.jobs):
            return False
        if self._demotion is not None and self._demotion.is_due(now):
            return True
        return self.prefetch is not None and self.prefetch.is_due(now)

    # ------------------------------------------------------------------ boundaries and views

    def lifetime_call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The control API's way in; see `control_calls.py`. Runs between two steps. Raises `ValueError` for an unknown call."""
        return self.calls.call(method, payload)

    def apply_boundary(self, event: Boundary) -> Outcome:
        """Act on one event, if the policy does."""
        if self._trace is not None:
            self._trace.on_boundary(
                event.kind.value,
                time.monotonic(),
                session_id=event.session_id,
                workflow_id=event.workflow_id,
                agent=event.agent,
                agent_id=event.agent_id,
                parent_agent_id=event.parent_agent_id,
                spawn=event.spawn,
            )
        if not self._acts_on_boundaries:
            reason = f"the eviction policy {self.options.eviction_policy} does not act on boundaries"
            return Outcome(message_id=event.message_id, status=OutcomeStatus.IGNORED, reason=reason)
        act = self.lifecycle.apply if self.forecasting is None else self.forecasting.apply
        return act(event) if self.spawn_ranks is None else self.spawn_ranks.apply(event, act)

    def want_step(self) -> None:
        """Let an idle engine step once, so that the metrics show what has changed."""
        self._wants_step = True

    def note_retired(self, num_blocks: int) -> None:
        """Blocks have been retired by a boundary, by what a request showed, or by time."""
        self.recorder.count(stats.RETIRED_BLOCKS, by=num_blocks)
        if num_blocks:
            self._look_for_prefetch()

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
        if self.in_place is not None:
            self.in_place.close(reader)
        return sum(self._access.end(reader)) if self._access is not None and self._acts_on_boundaries else 0

    @property
    def oldest_io_s(self) -> float:
        """Age of the oldest transfer in flight, in seconds; 0 if there is none."""
        return 0.0 if self._oldest_start is None else time.monotonic() - self._oldest_start

    def usage(self) -> dict[str, TierUsage]:
        """Blocks of each tier by state. O(1)."""
        by_tier = {"host": self.host.usage(), "flash": self.flash.usage()}
        if self.in_place is not None:
            by_tier |= self.in_place.usage()
        elif self.pool is not None:
            free_list = self.pool.free_list
            free = free_list.num_empty_blocks + free_list.num_retired_blocks
            # The null block is never anybody's.
            by_tier["hbm"] = TierUsage(self.pool.num_gpu_blocks - 1, free, free_list.num_retired_blocks)
        return by_tier

    def take_stats(self) -> stats.LifetimeStats | None:
        """What the metrics have to know since the last call; None if nothing has changed."""
        if self.forecasting is not None:
            self.forecasting.show()
        self._gauges.show(self)
        taken = self.recorder.take()
        return None if taken.is_empty() else taken

    def shutdown(self) -> None:
        """Write what was learned and recorded."""
        if self._trace is not None:
            self._trace.close()
        if self.forecasting is not None:
            self.forecasting.shutdown()
        if self.spawn_ranks is not None:
            self.spawn_ranks.shutdown()


def _only_decodes(output: "SchedulerOutput") -> bool:
    """Whether the step computes no prompt; also true of a step that computes nothing."""
    num_drafted = sum(len(tokens) for tokens in output.scheduled_spec_decode_tokens.values())
    return (
        not output.scheduled_new_reqs
        and not output.scheduled_cached_reqs.resumed_req_ids
        and output.total_num_scheduled_tokens == len(output.num_scheduled_tokens) + num_drafted
    )
