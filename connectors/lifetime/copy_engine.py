# SPDX-License-Identifier: Apache-2.0
"""Copies between the KV tensor and host memory, behind vLLM's `OffloadingWorker` interface.

On CUDA and XPU the engine is vLLM's own `CPUOffloadingWorker`. On the CPU platform, where vLLM has none, it is `PageCopyWorker`:
page copies on a thread of its own, off the worker's main thread.

Worker process. `CopyQueue` and the submit calls belong to the main thread.
"""

import ctypes
import functools
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["CopyQueue", "PageCopyWorker", "canonical_kv_caches", "make_copy_queue"]

logger = init_logger(__name__)


class _Canonicalizer(OffloadingConnectorWorker):
    """Borrows vLLM's translation of per-layer KV tensors into (num_blocks, page bytes) views."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> None:
        # vLLM's constructor wants an OffloadingSpec, which only its transfers need.
        self.vllm_config = vllm_config
        self.kv_cache_config = kv_cache_config
        self.kv_caches: CanonicalKVCaches | None = None

    def _init_worker(self, kv_caches: CanonicalKVCaches) -> None:
        self.kv_caches = kv_caches


def canonical_kv_caches(
    vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", kv_caches: dict[str, torch.Tensor]
) -> CanonicalKVCaches:
    """The KV tensors as int8 views of shape (num_blocks, page bytes), one per distinct tensor."""
    canonicalizer = _Canonicalizer(vllm_config, kv_cache_config)
    canonicalizer.register_kv_caches(kv_caches)
    assert canonicalizer.kv_caches is not None
    return canonicalizer.kv_caches


@functools.cache
def _compile_copy_rows() -> Callable[..., None]:
    """libc's memcpy row by row, compiled now, running without the GIL.

    `copy(source address, source stride, source rows, target address, target stride, target rows, row bytes)`
    """
    import numba

    memcpy = ctypes.CDLL(None).memcpy
    # Addresses as integers: that is what tensors and arrays give.
    memcpy.argtypes = [ctypes.c_size_t] * 3
    memcpy.restype = ctypes.c_size_t

    def copy_rows(
        source: int, source_stride: int, source_rows: Any, target: int, target_stride: int, target_rows: Any, row_bytes: int
    ) -> None:
        for i in range(source_rows.shape[0]):
            memcpy(target + target_rows[i] * target_stride, source + source_rows[i] * source_stride, row_bytes)

    word, rows = numba.int64, numba.int64[::1]
    compiled: Callable[..., None] = numba.njit((word, word, rows, word, word, rows, word), nogil=True)(copy_rows)
    return compiled


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of equal length in memory: a KV tensor's pages, or one tensor's share of the host slots."""

    address: int
    stride_bytes: int
    row_bytes: int


class PageCopyWorker(OffloadingWorker):
    """`OffloadingWorker` of the CPU platform: whole pages, in submission order, on one thread of its own.

    A host slot is one contiguous row that holds the block's page of every tensor, one after the other.

    Args:
        kv_caches: the KV tensors. They must outlive this object, which keeps their addresses.
        num_slots: host slots to allocate, committed now rather than at their first use.

    """

    def __init__(self, kv_caches: CanonicalKVCaches, num_slots: int) -> None:
        self._copy_rows = _compile_copy_rows()
        self._kv_caches = kv_caches
        self._pages = [
            _Rows(t.tensor.data_ptr(), t.tensor.stride(0) * t.tensor.element_size(), t.page_size_bytes) for t in kv_caches.tensors
        ]
        slot_bytes = sum(page.row_bytes for page in self._pages)
        self.slots = np.empty((num_slots, slot_bytes), dtype=np.uint8)
        self.slots.fill(0)
        offsets = itertools.accumulate((page.row_bytes for page in self._pages), initial=0)
        self._columns = [
            _Rows(self.slots.ctypes.data + offset, slot_bytes, page.row_bytes)
            for page, offset in zip(self._pages, offsets, strict=False)
        ]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lifetime-copy")
        self._running: dict[int, Future[float]] = {}

    def host_pages(self, slot: int) -> list[memoryview]:
        """The bytes of a host slot, for positioned reads and writes."""
        return [self.slots[slot].data]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        self._submit(job_id, self._pages, src_spec.block_ids, self._columns, dst_spec.chunk_ids)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        self._submit(job_id, self._columns, src_spec.chunk_ids, self._pages, dst_spec.block_ids)
        return True

    def _submit(
        self, job_id: int, source: list[_Rows], source_rows: np.ndarray, target: list[_Rows], target_rows: np.ndarray
    ) -> None:
        arguments = (source, source_rows.astype(np.int64), target, target_rows.astype(np.int64))
        self._running[job_id] = self._thread.submit(self._copy, time.monotonic(), *arguments)

    def _copy(
        self, submitted: float, source: list[_Rows], source_rows: np.ndarray, target: list[_Rows], target_rows: np.ndarray
    ) -> float:
        """Copy; returns the seconds since the submission."""
        for from_, to in zip(source, target, strict=True):
            self._copy_rows(
                from_.address, from_.stride_bytes, source_rows, to.address, to.stride_bytes, target_rows, to.row_bytes
            )
        return time.monotonic() - submitted

    def load_now(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy host slots to HBM blocks on the calling thread, any thread: no step of the engine in between."""
        rows = np.array(slots, dtype=np.int64), np.array(block_ids, dtype=np.int64)
        self._copy(0.0, self._columns, rows[0], self._pages, rows[1])

    def get_finished(self) -> list[TransferResult]:
        finished = [(job_id, future) for job_id, future in self._running.items() if future.done()]
        results = []
        for job_id, future in finished:
            del self._running[job_id]
            error = future.exception()
            if error is not None:
                logger.error("a KV page copy failed: %r", error)
            results.append(TransferResult(job_id, error is None, transfer_time=None if error is not None else future.result()))
        return results

    def wait(self, job_ids: set[int]) -> None:
        for job_id in job_ids:
            future = self._running.get(job_id)
            if future is not None:
                future.exception()

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True)


Done = Callable[[bool, float], None]
"""`done(success, seconds)`"""


class CopyQueue:
    """Numbers the copies of one `OffloadingWorker` and calls back when each ends. Main thread only.

    Args:
        engine: the worker that copies.
        host_pages: a host slot's bytes as buffers, in the order of the KV tensors.
        load_now: copies host slots to HBM blocks on the calling thread, where the platform can do that; None elsewhere.

    """

    def __init__(
        self,
        engine: OffloadingWorker,
        host_pages: Callable[[int], list[memoryview]],
        load_now: Callable[[Sequence[int], Sequence[int]], None] | None = None,
    ) -> None:
        self._engine = engine
        self.host_pages = host_pages
        self.load_now = load_now
        self._next_id = 0
        self._callbacks: dict[int, Done] = {}

    def store(self, block_ids: Sequence[int], slots: Sequence[int], done: Done) -> int:
        """Copy HBM blocks to host slots; `done` is called by a later `poll`. Returns the copy's number."""
        number = self._new_number(done)
        spec = GPULoadStoreSpec(list(block_ids), group_sizes=[len(block_ids)], block_indices=[0])
        self._submit(number, lambda: self._engine.submit_store(number, spec, CPULoadStoreSpec(list(slots))))
        return number

    def load(self, slots: Sequence[int], block_ids: Sequence[int], done: Done) -> int:
        """Copy host slots to HBM blocks; see `store`."""
        number = self._new_number(done)
        spec = GPULoadStoreSpec(list(block_ids), group_sizes=[len(block_ids)], block_indices=[0])
        self._submit(number, lambda: self._engine.submit_load(number, CPULoadStoreSpec(list(slots)), spec))
        return number

    def _new_number(self, done: Done) -> int:
        self._next_id += 1
        self._callbacks[self._next_id] = done
        return self._next_id

    def _submit(self, number: int, submit: Callable[[], bool]) -> None:
        try:
            accepted = submit()
        except Exception:
            logger.exception("a KV copy could not be started")
            accepted = False
        if not accepted:
            self._callbacks.pop(number)(False, 0.0)

    def poll(self) -> None:
        """Call back for every copy that has ended."""
        for result in self._engine.get_finished():
            done = self._callbacks.pop(result.job_id, None)
            if done is not None:
                done(result.success, result.transfer_time or 0.0)

    def wait(self, numbers: set[int]) -> None:
        """Wait until these copies have ended; their callbacks come with the next `poll`."""
        self._engine.wait(numbers)

    def shutdown(self) -> None:
        """Wait for what runs, and stop."""
        self._engine.shutdown()


def make_copy_queue(kv_caches: CanonicalKVCaches, num_slots: int) -> CopyQueue:
    """The platform's copy engine with `num_slots` host slots.

    Raises:
        ValueError: a platform without an engine.

    """
    if current_platform.is_cpu():
        engine = PageCopyWorker(kv_caches, num_slots)
        return CopyQueue(engine, engine.host_pages, engine.load_now)
    if current_platform.is_cuda_alike() or current_platform.is_xpu():
        from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

        worker = CPUOffloadingWorker(kv_caches, blocks_per_chunk=1, num_cpu_chunks=num_slots)
        # The pinned host tensors, one per KV tensor, each of shape (num_slots, page bytes).
        tensors = [tensor.numpy() for tensor in worker._load_handler.src_tensors]

        def host_pages(slot: int) -> list[memoryview]:
            return [tensor[slot].view(np.uint8).data for tensor in tensors]

        return CopyQueue(worker, host_pages)
    raise ValueError(f"the lifetime connector cannot copy KV blocks on {current_platform.device_name}")
