# SPDX-License-Identifier: Apache-2.0
"""What one KV block is in bytes, and whether blocks of this model can be kept below HBM."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["KVLayout"]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One engine's KV block.

    Attributes:
        block_size_tokens: tokens per block of the first KV cache group.
        group_block_sizes_tokens: tokens per block of each group.
        worker_block_bytes: bytes of one block on one worker, over its layers.
        block_bytes: the same over all workers.
        reason_against_offload: why blocks cannot be kept below HBM; None if they can.

    """

    block_size_tokens: int
    group_block_sizes_tokens: tuple[int, ...]
    worker_block_bytes: int
    block_bytes: int
    reason_against_offload: str | None

    @property
    def can_offload(self) -> bool:
        """Whether blocks can be kept below HBM."""
        return self.reason_against_offload is None

    @classmethod
    def of(cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> "KVLayout":
        """Read it off vLLM's configuration; the scheduler's and a worker's give the same answer."""
        groups = kv_cache_config.kv_cache_groups
        # A block of a decode-context-parallel group holds as many tokens on each of its ranks.
        context_parallel = getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) or 1
        sizes = [group.kv_cache_spec.block_size * context_parallel for group in groups]
        block_size = sizes[0] if sizes else vllm_config.cache_config.block_size
        worker_bytes = 0
        for group in groups:
            spec = group.kv_cache_spec
            # A worker's configuration may wrap the layers' specs, the scheduler's shows one of them.
            layers = 1 if isinstance(spec, UniformTypeKVCacheSpecs) else len(group.layer_names)
            worker_bytes += spec.page_size_bytes * layers
        worker_bytes = max(1, worker_bytes)
        return cls(
            block_size_tokens=block_size,
            group_block_sizes_tokens=tuple(sizes),
            worker_block_bytes=worker_bytes,
            block_bytes=worker_bytes * vllm_config.parallel_config.world_size,
            reason_against_offload=_reason_against_offload(vllm_config, kv_cache_config),
        )


def _reason_against_offload(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> str | None:
    groups = kv_cache_config.kv_cache_groups
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off (--no-enable-prefix-caching), so no block has a hash to be found by"
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups) or "none"
        return f"the model has {len(groups)} KV cache groups ({kinds}); one full-attention or MLA group is supported"
    spec = groups[0].kv_cache_spec
    specs = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    for one in specs:
        # Not isinstance: subclasses keep something else in their blocks (attention sinks, hidden states, windows).
        if type(one) not in (FullAttentionSpec, MLAAttentionSpec):
            return f"the model's KV cache is a {type(one).__name__}; full attention and MLA are supported"
    hash_block_size = getattr(vllm_config.cache_config, "hash_block_size", None)
    if hash_block_size not in (None, spec.block_size):
        return f"blocks of {spec.block_size} tokens are hashed by {hash_block_size} tokens"
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        return "its new KV blocks are zeroed before a step's copies have ended, so a copy down could read zeros"
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is {getattr(parallel, name)}; only tensor and data parallelism are supported"
    return None
