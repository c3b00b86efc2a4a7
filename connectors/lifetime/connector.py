# SPDX-License-Identifier: Apache-2.0
"""`LifetimeConnector`: vLLM's connector interface, shared out between the scheduler side and the worker side."""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.logger import init_logger

from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.connectors.lifetime.in_place import InPlacePlan
from vllm_lifetime.connectors.lifetime.layout import KVLayout
from vllm_lifetime.connectors.lifetime.metadata import FlashReport, LifetimeMetadata
from vllm_lifetime.connectors.lifetime.options import OptionsError, parse_options
from vllm_lifetime.connectors.lifetime.plugin import ensure_supported, show_log
from vllm_lifetime.connectors.lifetime.scheduler import LifetimeScheduler
from vllm_lifetime.connectors.lifetime.stats import LifetimePromMetrics, LifetimeStats
from vllm_lifetime.connectors.lifetime.worker import LifetimeWorker
from vllm_lifetime.patches import allocating_request, block_pool_class, hidden_state

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
        PromMetric,
        PromMetricT,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["LifetimeConnector"]

logger = init_logger(__name__)


class LifetimeConnector(KVConnectorBase_V1, SupportsHMA):
    """One object per process and role: the scheduler's has `_scheduler`, a worker's has `_worker`.

    Raises:
        UnsupportedVllmError: this vLLM lacks a seam that we need.
        OptionsError: `kv_connector_extra_config` cannot be used.

    """

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        ensure_supported()
        show_log()
        is_scheduler = role == KVConnectorRole.SCHEDULER
        options = parse_options(self._kv_transfer_config.kv_connector_extra_config, check_machine=False)
        layout = KVLayout.of(vllm_config, kv_cache_config)
        self._scheduler: LifetimeScheduler | None = None
        self._worker: LifetimeWorker | None = None
        if is_scheduler:
            if options.has_lower_tiers and not layout.can_offload:
                logger.warning(
                    "lifetime: host and flash tiers are off: %s. Eviction by lifetime works.", layout.reason_against_offload
                )
            in_place = InPlacePlan.of(vllm_config, kv_cache_config, options) if options.is_in_place else None
            self._scheduler = LifetimeScheduler(vllm_config, layout, options, in_place)
            block_pool_class.use_for_next_pool(LifetimeBlockPool)
        else:
            self._worker = LifetimeWorker(vllm_config, kv_cache_config, layout, options)
            if self._worker.hidden_states is not None:
                hidden_state.attach_to_next_runner(self._worker.hidden_states)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that could not be kept is a later miss, never a lost request."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Not after the KV tensor has been remapped (vLLM 0.33 asks): the copy engine holds its addresses."""
        return False

    # ------------------------------------------------------------------ scheduler side

    @property
    def _scheduler_side(self) -> LifetimeScheduler:
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        in_place = self._scheduler_side.in_place
        if in_place is not None:
            in_place.bind(kv_cache_manager)
            allocating_request.tell(kv_cache_manager, in_place)

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        block_pool_class.disarm()
        if isinstance(gpu_block_pool, LifetimeBlockPool):
            self._scheduler_side.bind_pool(gpu_block_pool)
        elif self._scheduler_side.has_in_place_flash:
            raise OptionsError(
                f"flash_mode = 'in_place' cannot be used: this engine's block pool is a {type(gpu_block_pool).__name__}, which "
                "knows no tiers. Use flash_mode = 'staged'."
            )
        else:
            logger.warning(
                "lifetime: this engine's block pool is a %s, so nothing is evicted by lifetime or kept below HBM",
                type(gpu_block_pool).__name__,
            )

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        reports = [report for report in metadata.values() if isinstance(report, FlashReport)]
        if reports:
            self._scheduler_side.bind_flash(reports)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler_side.on_new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler_side.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler_side.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict[Any, int]:
        """For vLLM's own metrics (0.32 and later): how much of a load comes from host memory, how much from flash."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        host, flash = self._scheduler_side.load_origins(request.request_id)
        if host + flash != num_external_tokens:
            return super().get_external_cache_hit_sources(request, num_external_tokens)
        return {source: n for source, n in ((CacheHitSource.HOST, host), (CacheHitSource.DISK, flash)) if n}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        return self._scheduler_side.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler_side.update_connector_output(connector_output)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler_side.request_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler_side.has_pending_push_work()

    def reset_cache(self) -> bool:
        self._scheduler_side.on_prefix_cache_reset()
        return True

    def lifetime_call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """The control API's way in, through `EngineCore.lifetime_call`."""
        return self._scheduler_side.lifetime_call(method, payload)

    # ------------------------------------------------------------------ worker side

    @property
    def _worker_side(self) -> LifetimeWorker:
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker_side.register_kv_caches(kv_caches)

    def get_mem_pool_context(self) -> AbstractContextManager[Any] | None:
        """In it the KV tensor is allocated; None: as vLLM does."""
        in_place = self._worker_side.in_place
        return None if in_place is None else in_place.allocation_context()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._worker_side.flash_report()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(kv_connector_metadata, LifetimeMetadata)
        self._worker_side.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        """Loads have been started in `handle_preemptions`, before the forward pass, so that they overlap with it.

        vLLM calls this behind the forward pass, or before it; what it does to flash in place is the same.
        """
        in_place = self._worker_side.in_place
        if in_place is not None:
            in_place.note_step(forward_context.attn_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole blocks, between steps."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Stores are whole blocks, between steps."""

    def wait_for_save(self) -> None:
        """Stores read free blocks only; `handle_preemptions` ends those that are about to be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._worker_side.poll()
        return None, self._worker_side.take_finished_loads() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker_side.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker_side.report()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    # ------------------------------------------------------------------ metrics

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        return LifetimeStats(data=data) if data is not None else LifetimeStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: "dict[type[PromMetric], type[PromMetricT]]",
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> "KVConnectorPromMetrics | None":
        return LifetimePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
