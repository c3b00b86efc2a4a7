# SPDX-License-Identifier: Apache-2.0
"""Copies between the KV tensor and host memory, behind vLLM's `OffloadingWorker` interface.

On CUDA and XPU the engine is vLLM's own `CPUOffloadingWorker`. On the CPU platform, where vLLM has none, it is `PageCopyWorker`:
page copies on a thread of its own, off the worker's main thread.

Worker process. `CopyQueue` and the submit calls belong to the main thread.
"""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
    """`copy(source, source_rows, target, target_rows)` for 2-D int64 arrays, compiled now, running without the GIL."""
    import numba

    def copy_rows(source: Any, source_rows: Any, target: Any, target_rows: Any) -> None:
        for i in range(source_rows.shape[0]):
            target[target_rows[i]] = source[source_rows[i]]

    rows = numba.int64[::1]
    # "A": the KV tensor's rows may lie further apart than they are long.
    matrix = numba.types.Array(numba.int64, 2, "A")
    compiled: Callable[..., None] = numba.njit((matrix, rows, matrix, rows), nogil=True)(copy_rows)
    return compiled


class PageCopyWorker(OffloadingWorker):
    """`OffloadingWorker` of the CPU platform: whole pages, in submission order, on one thread of its own.

    A host slot is one contiguous row that holds the block's page of every tensor, one after the other.

    Args:
        kv_caches: the KV tensors; their pages are multiples of 8 bytes.
        num_slots: host slots to allocate, committed now rather than at their first use.

    """

    def __init__(self, kv_caches: CanonicalKVCaches, num_slots: int) -> None:
        self._copy_rows = _compile_copy_rows()
        self._pages = [self._as_words(tensor.tensor) for tensor in kv_caches.tensors]
        words = [pages.shape[1] for pages in self._pages]
        self.slots = np.empty((num_slots, sum(words)), dtype=np.int64)
        self.slots.fill(0)
        offsets = np.cumsum([0, *words])
        self._columns = [self.slots[:, start:end] for start, end in itertools.pairwise(offsets)]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lifetime-copy")
        self._running: dict[int, Future[float]] = {}

    @staticmethod
    def _as_words(tensor: torch.Tensor) -> np.ndarray:
        flat = tensor.view(torch.int8)
        if flat.shape[1] % 8:
            raise ValueError(f"a KV page of {flat.shape[1]} bytes is not a multiple of 8 bytes")
        return flat.view(torch.int64).numpy()

    def host_pages(self, slot: int) -> list[memoryview]:
        """The bytes of a host slot, for positioned reads and writes."""
        return [self.slots[slot].view(np.uint8).data]

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(dst_spec, CPULoadStoreSpec)
        self._submit(job_id, self._pages, src_spec.block_ids, self._columns, dst_spec.chunk_ids)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, CPULoadStoreSpec)
        self._submit(job_id, self._columns, src_spec.chunk_ids, self._pages, dst_spec.block_ids)
        return True

    def _submit(self, job_id: int, source: Any, source_rows: Any, target: Any, target_rows: Any) -> None:
        arguments = (source, source_rows.astype(np.int64), target, target_rows.astype(np.int64))
        self._running[job_id] = self._thread.submit(self._copy, time.monotonic(), *arguments)

    def _copy(self, submitted: float, source: Any, source_rows: Any, target: Any, target_rows: Any) -> float:
        """Copy; returns the seconds since the submission."""
        for source_pages, target_pages in zip(source, target, strict=True):
            self._copy_rows(source_pages, source_rows, target_pages, target_rows)
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

    def __len__(self) -> int:
        """Copies in flight."""
        return len(self._callbacks)

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
