# SPDX-License-Identifier: Apache-2.0
"""Worker side of the connector: carries out the scheduler side's orders.

One per rank, in the worker process. Called on its main thread, around the forward pass; bytes move on other threads.
"""

import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from vllm_lifetime.connectors.lifetime.copy_engine import CopyQueue, canonical_kv_caches, make_copy_queue
from vllm_lifetime.connectors.lifetime.flash_file import open_flash
from vllm_lifetime.connectors.lifetime.flash_transfers import FlashLoad, FlashTransfers
from vllm_lifetime.connectors.lifetime.hidden_states import HiddenStateTap
from vllm_lifetime.connectors.lifetime.in_place import InPlaceMemory, InPlacePlan
from vllm_lifetime.connectors.lifetime.layout import KVLayout
from vllm_lifetime.connectors.lifetime.metadata import (
    BYTES_READ,
    BYTES_WRITTEN,
    FlashReport,
    JobResult,
    LifetimeMetadata,
    LifetimeWorkerMetadata,
    Load,
    Store,
)
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions
from vllm_lifetime.flash import FlashDevice
from vllm_lifetime.flash.wear import WearLedger
from vllm_lifetime.flash.wear_counts import UNKNOWN_CLASS
from vllm_lifetime.flash.wear_figures import WearSnapshot

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["LifetimeWorker"]

logger = init_logger(__name__)


@dataclass(slots=True)
class _RunningLoad:
    """A load of which a part is still on its way."""

    order: Load
    parts_left: int
    failed: set[int]
    is_late: bool = False
    seconds: float = 0.0


class LifetimeWorker:
    """See the module."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        kv_cache_config: "KVCacheConfig",
        layout: KVLayout,
        options: LifetimeOptions,
    ) -> None:
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._layout = layout
        self._options = options
        self.hidden_states = HiddenStateTap() if options.hidden_states else None
        """Where the model runner leaves hidden states of prompts; None if nobody asks for them."""
        self.in_place: InPlaceMemory | None = None
        """The KV tensor's memory, if flash is a part of it."""
        if options.is_in_place:
            self.in_place = InPlaceMemory(InPlacePlan.of(vllm_config, kv_cache_config, options), options)
        self._copies: CopyQueue | None = None
        self._device: FlashDevice | None = None
        self._flash: FlashTransfers | None = None
        self._started_at: dict[int, float] = {}
        self._results: dict[int, JobResult] = {}
        self._store_copies: dict[int, int] = {}
        """Job -> the copy that reads its HBM blocks."""
        self._prefetches: dict[int, tuple[int | None, FlashLoad | None]] = {}
        """Job that nobody waits for -> its copy from host slots, and its flash load."""
        self._finished_loads: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._flash_seen: Counter[str] = Counter()
        self._wear_seen: WearSnapshot | None = None
        self._step = 0

    # ------------------------------------------------------------------ start

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The KV tensor exists: allocate the host tier and open the flash device.

        Raises:
            FlashError: the flash file cannot be used; the text says what to change.

        """
        if self.in_place is not None:
            self.in_place.register(kv_caches)
        if not self._layout.can_offload or not self._options.has_lower_tiers:
            return
        world_size = self._vllm_config.parallel_config.world_size
        num_host = self._options.host_bytes // self._layout.block_bytes
        num_staging = 0
        if self._options.flash_bytes:
            num_staging = max(1, self._options.flash_staging_bytes // world_size // self._layout.worker_block_bytes)
            # First: a file that cannot be used ends the start before memory is taken.
            self._device = open_flash(self._vllm_config, kv_caches, self._layout, self._options)
        canonical = canonical_kv_caches(self._vllm_config, self._kv_cache_config, kv_caches)
        self._copies = make_copy_queue(canonical, num_host + num_staging)
        if self._device is not None:
            staging = range(num_host, num_host + num_staging)
            self._flash = FlashTransfers(self._device, self._copies, staging, self._options.io_threads)
        logger.info(
            "lifetime: %d host slots, %d flash slots, %d staging slots of %d bytes on this rank",
            num_host,
            self._device.num_slots if self._device is not None else 0,
            num_staging,
            self._layout.worker_block_bytes,
        )

    def flash_report(self) -> FlashReport | None:
        """The flash file for the scheduler side; None without one."""
        ledger = self._ledger
        wear = None if ledger is None else ledger.snapshot
        if self._device is not None:
            return FlashReport(self._device.num_slots, self._device.recovered(), wear)
        return None if wear is None else FlashReport(0, [], wear)

    @property
    def _ledger(self) -> WearLedger | None:
        """The flash file's."""
        if self.in_place is not None:
            return self.in_place.ledger
        return None if self._device is None else self._device.wear

    # ------------------------------------------------------------------ each step

    def before_forward(self, orders: LifetimeMetadata) -> None:
        """Start the step's transfers, and end those copies down whose source blocks it is about to overwrite."""
        self._step = orders.step
        if self.in_place is not None:
            self.in_place.name_blocks(orders.placed)
        if self._copies is None:
            for order in orders.loads:
                self._fail_load(order)
            return
        if orders.clear_flash and self._flash is not None:
            self._flash.clear()
        if orders.flush:
            self._copies.wait({copy for job, copy in self._store_copies.items() if job in orders.flush})
        for job_id in orders.cancel:
            self._cancel(job_id)
        # Loads before copies down: somebody waits for them. Before the forward pass, so that they are there when it ends.
        for order in orders.loads:
            self._start_load(order)
        for store in orders.stores:
            self._start_store(store)
        for demotion in orders.demotions:
            job_id = demotion.job_id
            self._started_at[job_id] = time.monotonic()
            if self._flash is None:
                self._job_done(job_id, set(range(len(demotion.keys))))
                continue
            self._flash.demote(
                demotion.host_slots, demotion.flash_slots, demotion.keys, demotion.classes, partial(self._written, job_id)
            )

    def _written(self, job_id: int, failed: set[int], is_late: bool, seconds: float) -> None:
        self._job_done(job_id, failed)

    def _start_store(self, store: Store) -> None:
        assert self._copies is not None
        job_id = store.job_id
        self._started_at[job_id] = time.monotonic()
        everything = set(range(len(store.slots)))
        if store.keys is None:
            self._store_copies[job_id] = self._copies.store(
                store.block_ids, store.slots, lambda ok, seconds: self._job_done(job_id, set() if ok else everything)
            )
        elif self._flash is None:
            self._job_done(job_id, everything)
        else:
            classes = store.classes or [UNKNOWN_CLASS] * len(store.keys)
            copy = self._flash.store(store.block_ids, store.slots, store.keys, classes, partial(self._written, job_id))
            if copy is not None:
                self._store_copies[job_id] = copy

    def _start_load(self, order: Load) -> None:
        assert self._copies is not None
        now = time.monotonic()
        num_host = len(order.host_slots)
        if order.flash_slots and self._flash is None:
            self._fail_load(order)
            return
        self._started_at[order.job_id] = now
        running = _RunningLoad(order, parts_left=bool(num_host) + bool(order.flash_slots), failed=set())
        copy = flash_load = None
        if num_host:
            everything = set(range(num_host))
            copy = self._copies.load(
                order.host_slots,
                order.host_block_ids,
                lambda ok, seconds: self._load_part_done(running, set() if ok else everything, False, seconds),
            )
        if order.flash_slots and self._flash is not None:
            flash_load = self._flash.load(
                order.flash_slots,
                order.flash_keys,
                order.flash_block_ids,
                now + order.deadline_s,
                lambda failed, late, seconds: self._load_part_done(running, {num_host + i for i in failed}, late, seconds),
            )
        if order.request_id is None and running.parts_left:
            self._prefetches[order.job_id] = (copy, flash_load)

    def _cancel(self, job_id: int) -> None:
        """End a load that nobody waits for: from now on it writes no block."""
        copy, flash_load = self._prefetches.get(job_id, (None, None))
        if flash_load is not None and self._flash is not None:
            self._flash.cancel(flash_load)
        if copy is not None and self._copies is not None:
            self._copies.wait({copy})

    def _fail_load(self, order: Load) -> None:
        running = _RunningLoad(order, parts_left=1, failed=set())
        self._load_part_done(running, set(range(len(order.host_slots) + len(order.flash_slots))), False, 0.0)

    def _load_part_done(self, running: _RunningLoad, failed: set[int], is_late: bool, seconds: float) -> None:
        running.failed |= failed
        running.is_late |= is_late
        running.seconds = max(running.seconds, seconds)
        running.parts_left -= 1
        if running.parts_left:
            return
        order = running.order
        block_ids = [*order.host_block_ids, *order.flash_block_ids]
        if order.request_id is not None:
            self._failed_blocks.update(block_ids[i] for i in running.failed)
            self._finished_loads.add(order.request_id)
        self._prefetches.pop(order.job_id, None)
        self._job_done(order.job_id, running.failed, running.is_late, running.seconds)

    def _job_done(self, job_id: int, failed: set[int], is_late: bool = False, seconds: float = 0.0) -> None:
        self._started_at.pop(job_id, None)
        self._store_copies.pop(job_id, None)
        self._results[job_id] = JobResult(failed, is_late, seconds)

    def poll(self) -> None:
        """Notice what has ended."""
        if self._copies is not None:
            self._copies.poll()
        if self._flash is not None:
            self._flash.poll()

    def take_finished_loads(self) -> set[str]:
        """Requests whose load has ended, well or not, since the last call."""
        taken, self._finished_loads = self._finished_loads, set()
        return taken

    def take_failed_blocks(self) -> set[int]:
        """HBM blocks that a load left unfilled since the last call."""
        taken, self._failed_blocks = self._failed_blocks, set()
        return taken

    def report(self) -> LifetimeWorkerMetadata | None:
        """What the scheduler side has to know of this step; None if nothing."""
        flash = self._new_flash_counts()
        hidden_states = self.hidden_states.take() if self.hidden_states is not None else {}
        wear = self._new_wear()
        if not self._step and not self._results and not flash and not hidden_states and not wear:
            return None
        results, self._results = self._results, {}
        starts = list(self._started_at.values())
        if self._flash is not None and (hanging := self._flash.oldest_start()) is not None:
            starts.append(hanging)
        return LifetimeWorkerMetadata(
            step=self._step,
            results=results,
            flash=flash,
            oldest_start=min(starts, default=None),
            hidden_states=hidden_states,
            wear=wear,
        )

    def _new_wear(self) -> list[WearSnapshot]:
        """The flash file's ledger if it has changed since the last report: with the jobs that are done, and once a second."""
        ledger = self._ledger
        if ledger is None:
            return []
        snapshot = ledger.refresh() if self._results else ledger.snapshot
        if snapshot is self._wear_seen:
            return []
        self._wear_seen = snapshot
        return [snapshot]

    def _new_flash_counts(self) -> Counter[str]:
        if self.in_place is not None:
            return self.in_place.take_counts()
        if self._device is None:
            return Counter()
        values = self._device.counters.snapshot()
        now = Counter(
            {
                BYTES_READ: values.bytes_read,
                BYTES_WRITTEN: values.bytes_written,
                "short_read": values.short_reads,
                "checksum": values.checksum_failures,
                "key_mismatch": values.key_mismatches,
            }
        )
        for prefix, errors in (
            ("read", values.read_errors),
            ("write", values.write_errors),
            ("record", values.record_errors),
        ):
            now.update({f"{prefix}_{kind}": count for kind, count in errors.items()})
        new = now - self._flash_seen
        self._flash_seen = now
        return new

    def shutdown(self) -> None:
        """End the threads; the flash file is closed, and removed unless it persists."""
        if self.in_place is not None:
            self.in_place.close()
        if self._flash is not None:
            self._flash.shutdown()
            self._flash = None
        if self._copies is not None:
            self._copies.shutdown()
            self._copies = None
