# SPDX-License-Identifier: Apache-2.0
"""Flash in place: the KV tensor's block-id tail lies in the mapped flash file, and attention reads and writes it there.

`InPlacePlan` says which bytes of the tensor lie where; scheduler side and worker read it off the same configuration. The worker's
`InPlaceMemory` is the memory that vLLM allocates the tensor from, counts what each step does to flash, and delays the step as the
emulated device would. What goes where is `in_place_pool.py`'s matter. `docs/in-place.md` says what is real and what is not.
"""

import math
import mmap
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from vllm_lifetime.connectors.lifetime.flash_file import flash_file_path
from vllm_lifetime.connectors.lifetime.metadata import BYTES_READ, BYTES_WRITTEN, DELAY_US, PlacedInFlash
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions, OptionsError, refuse_other_platforms
from vllm_lifetime.flash import FlashError, FlashGeometry, WearOptions
from vllm_lifetime.flash.emulation import FlashEmulation
from vllm_lifetime.flash.mapped import MappedFlash, Span, mapped_file_bytes, mapped_slots
from vllm_lifetime.flash.mapped_wear import MappedWear
from vllm_lifetime.flash.wear import WearLedger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["InPlaceMemory", "InPlacePlan"]

logger = init_logger(__name__)

MIN_HBM_BLOCKS = 2
"""vLLM's null block, which nothing may be kept in, and one more."""


@dataclass(frozen=True, slots=True)
class InPlacePlan:
    """Which blocks lie in flash, and where.

    Attributes:
        num_blocks: KV blocks of the engine.
        num_hbm_blocks: those with the lower ids, in plain memory.
        num_layers: layers of the model that have a KV cache.
        page_bytes: one layer's part of a block.
        block_size_tokens: tokens of a block.
        total_bytes: the KV tensor.
        spans: its parts that lie in the file.

    """

    num_blocks: int
    num_hbm_blocks: int
    num_layers: int
    page_bytes: int
    block_size_tokens: int
    total_bytes: int
    spans: tuple[Span, ...]
    path: str
    geometry: FlashGeometry

    @property
    def num_flash_blocks(self) -> int:
        """Those with the higher ids."""
        return self.num_blocks - self.num_hbm_blocks

    @classmethod
    def of(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", options: LifetimeOptions) -> "InPlacePlan":
        """Read it off vLLM's configuration; the scheduler's and a worker's give the same answer.

        Raises:
            OptionsError: this model or engine cannot be served so; one sentence says what to do.
            FlashError: `flash_bytes` holds no block.

        """
        refuse_other_platforms()
        _refuse(_reason_against(vllm_config, kv_cache_config))
        assert options.flash_path is not None
        tensors = kv_cache_config.kv_cache_tensors
        spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
        model = vllm_config.model_config
        num_layers = sum(len(tensor.layers) for tensor in tensors)
        geometry = FlashGeometry(
            model=f"{model.model}@{model.revision or 'default'}",
            dtype=str(vllm_config.cache_config.cache_dtype),
            block_size_tokens=spec.block_size,
            num_layers=num_layers,
            slot_bytes=sum(tensor.block_stride * len(tensor.layers) for tensor in tensors),
            hash_algorithm="none",
            hash_seed="none",
            extra="in place: layer after layer",
        )
        num_blocks = kv_cache_config.num_blocks
        num_flash = mapped_slots(geometry, options.flash_bytes)
        num_hbm = num_blocks - num_flash
        if num_hbm < MIN_HBM_BLOCKS:
            raise OptionsError(
                f"flash_bytes = {options.flash_bytes} holds {num_flash} KV blocks and the engine has {num_blocks} in all, so HBM "
                f"would be left with none: lower flash_bytes to at most "
                f"{mapped_file_bytes(geometry, max(1, num_blocks - MIN_HBM_BLOCKS))}, or give the engine more blocks "
                "(--num-gpu-blocks-override, VLLM_CPU_KVCACHE_SPACE)."
            )
        spans = [
            Span(tensor.offset + layer * tensor.layer_stride + num_hbm * tensor.block_stride, num_flash * tensor.block_stride)
            for tensor in tensors
            for layer in range(len(tensor.layers))
        ]
        spans.sort(key=lambda span: span.start)
        if any(span.start % mmap.PAGESIZE or span.length % mmap.PAGESIZE for span in spans):
            factor = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, *(tensor.block_stride for tensor in tensors))
            _refuse(
                f"block {num_hbm}, the first in flash, does not begin on a page of {mmap.PAGESIZE} bytes in every layer; use "
                f"--block-size {factor * spec.block_size}"
            )
        return cls(
            num_blocks=num_blocks,
            num_hbm_blocks=num_hbm,
            num_layers=num_layers,
            page_bytes=geometry.slot_bytes // num_layers,
            block_size_tokens=spec.block_size,
            total_bytes=tensors[0].size,
            spans=tuple(spans),
            path=str(flash_file_path(options.flash_path, vllm_config)),
            geometry=geometry,
        )


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise OptionsError(f"flash_mode = 'in_place' cannot be used: {reason}, or flash_mode = 'staged'.")


def _reason_against(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    """Why blocks of this engine cannot lie in flash, and what else to do; None if they can."""
    parallel = vllm_config.parallel_config
    if parallel.world_size != 1:
        return f"the model is spread over {parallel.world_size} ranks and one is supported; set --tensor-parallel-size 1"
    if mmap.PAGESIZE != 4096:
        return f"this machine's memory pages have {mmap.PAGESIZE} bytes and 4096 are supported; use another machine"
    groups = kv_cache_config.kv_cache_groups
    tensors = kv_cache_config.kv_cache_tensors
    if len(groups) != 1 or not tensors:
        return f"the model has {len(groups)} KV cache groups and one is supported; use another model"
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    for one in specs:
        # Not isinstance: subclasses keep something else in their blocks.
        if type(one) is not FullAttentionSpec:
            return f"the model's KV cache is a {type(one).__name__} and full attention is supported; use another model"
    for tensor in tensors:
        if tensor.layer_stride < kv_cache_config.num_blocks * tensor.block_stride:
            return "its layers' blocks lie between one another; choose an attention backend that keeps each layer's together"
    return None


class InPlaceMemory:
    """The worker's side: see the module. One per worker; its main thread."""

    def __init__(self, plan: InPlacePlan, options: LifetimeOptions) -> None:
        self.plan = plan
        self.emulation = FlashEmulation(options.flash_emulation)
        self._wear_options = WearOptions(
            erase_block_bytes=options.flash_erase_block_bytes, endurance_cycles=options.flash_endurance_cycles
        )
        self._memory: MappedFlash | None = None
        self._counts: Counter[str] = Counter()
        self._blocks_per_block = 1
        """Blocks of the attention kernel in one of the scheduler's."""

    def allocation_context(self) -> AbstractContextManager[Any]:
        """In it, vLLM's one allocation of the KV tensor is served from the mapped memory."""
        return _Allocation(self)

    def allocate(self) -> torch.Tensor:
        """The memory of the KV tensor, zeroed. Raises `FlashError` if the file cannot be used."""
        plan = self.plan
        self._memory = MappedFlash(
            plan.path,
            plan.geometry,
            size_bytes=mapped_file_bytes(plan.geometry, plan.num_flash_blocks),
            total_bytes=plan.total_bytes,
            spans=plan.spans,
            wear=self._wear_options,
        )
        logger.info(
            "lifetime: KV blocks 0 to %d lie in memory, %d to %d in the flash file %s%s",
            plan.num_hbm_blocks - 1,
            plan.num_hbm_blocks,
            plan.num_blocks - 1,
            plan.path,
            f", with emulated delays: {self.emulation.timing}" if self.emulation.timing.is_on else "",
        )
        return torch.frombuffer(self._memory.buffer(), dtype=torch.int8)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """See that the KV tensor is ours. Raises `FlashError` if vLLM has taken it from elsewhere."""
        memory = self._memory
        for name, kv_cache in kv_caches.items():
            offset = -1 if memory is None else kv_cache.data_ptr() - memory.address
            if memory is None or not 0 <= offset < memory.total_bytes:
                raise FlashError(
                    f"The KV cache of {name} does not lie in the flash file, because this vLLM allocates it in another way. Use "
                    "flash_mode = 'staged'."
                )
            self._blocks_per_block = max(1, kv_cache.shape[0] // self.plan.num_blocks)

    @property
    def _wear(self) -> MappedWear | None:
        return None if self._memory is None else self._memory.wear

    @property
    def ledger(self) -> WearLedger | None:
        """Of the flash file; None before there is one."""
        return None if self._wear is None else self._wear.ledger

    def name_blocks(self, placed: Sequence[PlacedInFlash]) -> None:
        """The step that comes writes to these blocks for the first time; the ledger wants to know for whom."""
        wear = self._wear
        if wear is not None:
            for segment_class, block_ids in placed:
                wear.name_blocks(np.asarray(block_ids, np.int64) - self.plan.num_hbm_blocks, segment_class)

    def note_step(self, attn_metadata: Any) -> None:
        """A forward pass has read and written the blocks that `attn_metadata` names; wait as long as flash would have taken.

        O(blocks of the batch), in torch and numpy. Every request reads its whole context once per layer.
        """
        one = next(iter(attn_metadata.values()), None) if isinstance(attn_metadata, dict) else attn_metadata
        table = getattr(one, "block_table", None)
        if one is None or table is None:
            return
        plan = self.plan
        parts = self._blocks_per_block
        part_tokens = plan.block_size_tokens // parts
        num_parts = (one.seq_lens[: table.shape[0], None] + (part_tokens - 1)) // part_tokens
        is_read = torch.arange(table.shape[1]) < num_parts
        parts_read = int((is_read & (table >= plan.num_hbm_blocks * parts)).sum())
        first_flash_slot = plan.num_hbm_blocks * plan.block_size_tokens
        slots = one.slot_mapping[: one.num_actual_tokens]
        in_flash = slots[slots >= first_flash_slot] - first_flash_slot
        wear = self._wear
        bytes_written = len(in_flash) * (plan.geometry.slot_bytes // plan.block_size_tokens)
        if wear is not None:
            wear.note(in_flash.numpy())
        part_bytes = plan.page_bytes // parts
        self._counts[BYTES_READ] += parts_read * plan.num_layers * part_bytes
        self._counts[BYTES_WRITTEN] += bytes_written
        delay_s = self.emulation.step(parts_read * plan.num_layers, part_bytes, bytes_written)
        if delay_s > 0:
            self._counts[DELAY_US] += round(delay_s * 1e6)
            time.sleep(delay_s)

    def take_counts(self) -> Counter[str]:
        """Bytes read and written in flash, and the delay for it, since the last call."""
        taken, self._counts = self._counts, Counter()
        return taken

    def close(self) -> None:
        """Remove the file."""
        if self._memory is not None:
            self._memory.close()


class _Allocation(TorchFunctionMode):
    """Serves the one `torch.zeros` of vLLM's `allocate_kv_cache` that has the KV tensor's size."""

    def __init__(self, memory: InPlaceMemory) -> None:
        super().__init__()
        self._owner = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") is torch.int8 and args and args[0] == self._owner.plan.total_bytes:
            return self._owner.allocate()
        return func(*args, **kwargs)
