# SPDX-License-Identifier: Apache-2.0
"""Loads for requests: what lies below HBM of a prompt, whether to load it, and what became of it.

EngineCore process, scheduler thread, on the admission path.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.jobs import LoadJob
from vllm_lifetime.connectors.lifetime.request_state import RequestState
from vllm_lifetime.pool.tiers import Slot

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_lifetime.connectors.lifetime.scheduler import LifetimeScheduler

__all__ = ["Loads"]


class Loads:
    """See the module. `block_size` is in tokens."""

    def __init__(self, scheduler: "LifetimeScheduler", block_size: int) -> None:
        self._scheduler = scheduler
        self._recorder = scheduler.recorder
        self._block_bytes = scheduler.layout.block_bytes
        self._block_size = block_size
        self._queued: list[LoadJob] = []

    def plan(self, request: "Request", state: RequestState, num_computed_tokens: int) -> int:
        """How many blocks after vLLM's own hit to load from below; `state.plan` has their slots. At every attempt to admit."""
        # The request starts over: after a preemption or a failed load its blocks may be others.
        state.paths.clear()
        state.plan = []
        start = num_computed_tokens // self._block_size
        state.num_local_blocks = start
        state.loaded_end = start
        if not len(self._scheduler.host) and not len(self._scheduler.flash):
            return 0
        plan = self._look_up(request, start)
        if not plan:
            return 0
        refusal = self._reason_to_refuse(request, start, plan)
        if refusal is not None:
            if not state.was_refused:
                state.was_refused = True
                self._recorder.count(stats.LOADS, refusal)
            return 0
        state.plan = plan
        return len(plan)

    def _look_up(self, request: "Request", start: int) -> list[Slot]:
        """Slots of the blocks that follow block `start`, up to the first that is nowhere. The last token is always computed."""
        plan: list[Slot] = []
        hashes = request.block_hashes
        host, flash = self._scheduler.host, self._scheduler.flash
        for index in range(start, min((request.num_tokens - 1) // self._block_size, len(hashes))):
            key = make_block_hash_with_group_id(hashes[index], 0)
            slot = host.get(key) or flash.get(key)
            if slot is None:
                break
            plan.append(slot)
        return plan

    def _reason_to_refuse(self, request: "Request", start: int, plan: list[Slot]) -> str | None:
        """None if the load pays and the whole request fits (R1): a load holds its blocks and cannot be preempted."""
        pool, jobs = self._scheduler.pool, self._scheduler.jobs
        if pool is None:
            return "skipped_no_room"
        wanted = -(-request.num_tokens // self._block_size) - start
        spare = pool.get_num_free_blocks() - jobs.num_blocks_reserved
        # Of the local hit, what nobody else references is still counted as free.
        if wanted > spare - start:
            hashes = request.block_hashes
            for index in range(start):
                block = pool.cached_block_hash_to_block.get_one_block(make_block_hash_with_group_id(hashes[index], 0))
                if block is not None and block.ref_cnt == 0:
                    spare -= 1
            if wanted > spare:
                return "skipped_no_room"
        num_host = sum(1 for slot in plan if self._scheduler.is_host(slot))
        num_bytes = {"host": num_host * self._block_bytes, "flash": (len(plan) - num_host) * self._block_bytes}
        if not self._scheduler.pace.load_policy.should_load(len(plan) * self._block_size, num_bytes, jobs.loading_bytes):
            return "skipped_slower"
        return None

    def queue(
        self, request: "Request", state: RequestState, blocks: Sequence[KVCacheBlock], start: int, plan: list[Slot]
    ) -> None:
        """The request has blocks for what `plan` holds: it goes to the workers with this step."""
        side = self._scheduler
        block_ids = [block.block_id for block in blocks[start : start + len(plan)]]
        host = [(slot, block_id) for slot, block_id in zip(plan, block_ids, strict=True) if side.is_host(slot)]
        flash = [(slot, block_id) for slot, block_id in zip(plan, block_ids, strict=True) if not side.is_host(slot)]
        side.note_hits("host", len(host))
        side.note_hits("flash", len(flash))
        num_blocks_left = -(-request.num_tokens // self._block_size) - start - len(plan)
        job = side.jobs.start_load(request.request_id, host, flash, max(0, num_blocks_left), self._block_bytes)
        self._queued.append(job)
        if flash and side.prefetch is not None:
            side.prefetch.make_way_for_flash()
        state.loaded_end = start + len(plan)
        state.loading = (len(host), len(flash))

    def take_queued(self) -> list[LoadJob]:
        """What has been queued since the last call."""
        queued, self._queued = self._queued, []
        return queued

    def finish(self, job: LoadJob) -> None:
        """Every worker has reported a load."""
        num_failed = self._scheduler.jobs.finish_load(job)
        outcome = "late" if job.result.is_late else "failed" if num_failed else "done"
        self._recorder.count(stats.LOADS, outcome)
        self._recorder.count(stats.RECOMPUTED_BLOCKS, by=num_failed)
