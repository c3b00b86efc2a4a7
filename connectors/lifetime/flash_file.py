# SPDX-License-Identifier: Apache-2.0
"""Opens this rank's flash file, with a header that says what its bytes mean in this engine."""

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import _NON_CRYPTO_HASH_FUNCTIONS, resolve_none_hash_seed

from vllm_lifetime.connectors.lifetime.layout import KVLayout
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions, OptionsError
from vllm_lifetime.flash import FlashDevice, FlashGeometry, WearOptions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["flash_file_path", "open_flash"]


def flash_file_path(path: Path, vllm_config: "VllmConfig") -> Path:
    """`path` itself for a first, single worker; otherwise with the data-parallel index and the rank appended.

    The index counts, not the size: vLLM tells the engines of a model without experts that their data-parallel size is 1.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size == 1 and parallel.data_parallel_size == 1 and parallel.data_parallel_index == 0:
        return path
    return path.with_name(f"{path.name}.dp{parallel.data_parallel_index}-rank{parallel.rank}")


def open_flash(
    vllm_config: "VllmConfig", kv_caches: dict[str, torch.Tensor], layout: KVLayout, options: LifetimeOptions
) -> FlashDevice:
    """Open or create the flash file of this worker, and its wear ledger beside it.

    Raises:
        FlashError: the file cannot be used; the text says what to change.
        OptionsError: blocks cannot be found again after a restart, but `flash_persist` asks for it.

    """
    assert options.flash_path is not None
    parallel = vllm_config.parallel_config
    model = vllm_config.model_config
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    hash_function = get_hash_fn_by_name(algorithm)
    if options.flash_persist and hash_function in _NON_CRYPTO_HASH_FUNCTIONS and os.getenv("PYTHONHASHSEED") is None:
        raise OptionsError(
            f"flash_persist = True cannot work with --prefix-caching-hash-algo {algorithm}: its seed is new in every process, so "
            "no block would be found after a restart. Use sha256, or set PYTHONHASHSEED."
        )
    seed = resolve_none_hash_seed(hash_function) if options.flash_persist else "not persisted"
    first = next(iter(kv_caches.values()))
    # Overrides of rotary embeddings, quantisation and the like change the KV of equal tokens, hence of equal hashes.
    config = hashlib.sha256(model.hf_config.to_json_string().encode()).hexdigest()[:16]
    cache_dtype = vllm_config.cache_config.cache_dtype
    geometry = FlashGeometry(
        model=f"{model.model}@{model.revision or 'default'}",
        dtype=f"{first.dtype}".removeprefix("torch."),
        block_size_tokens=layout.block_size_tokens,
        num_layers=len(kv_caches),
        slot_bytes=layout.worker_block_bytes,
        hash_algorithm=algorithm,
        hash_seed=seed,
        tp_size=parallel.tensor_parallel_size,
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        pp_size=1,
        pp_rank=0,
        extra=f"page {list(first.shape[1:])} stride {list(first.stride()[1:])} on {first.device.type}, model config {config}, "
        f"quantization {model.quantization}, cache dtype {cache_dtype}",
    )
    return FlashDevice.open(
        str(flash_file_path(options.flash_path, vllm_config)),
        geometry,
        size_bytes=options.flash_bytes // parallel.world_size,
        persist=options.flash_persist,
        wear=WearOptions(erase_block_bytes=options.flash_erase_block_bytes, endurance_cycles=options.flash_endurance_cycles),
    )
