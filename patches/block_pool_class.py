# SPDX-License-Identifier: Apache-2.0
"""Lets a connector choose the class of its engine's block pool.

What: `use_for_next_pool(cls)` makes vLLM's KV cache coordinator build `cls` instead of `BlockPool`,
once. The scheduler creates its connector first and its KV cache manager, hence the pool, right after
in the same method; so the connector's constructor calls this, and the pool that is built next is its
engine's. By then the seam is vLLM's again: an engine without our connector in the same process gets
the stock pool, and without our connector nothing is ever replaced.

Why: vLLM has no hook for the order of eviction (vllm-project/vllm#40270 asks for one).

If the engine fails to start between the two, its pool class stays chosen; `disarm()` takes it back.
A connector calls it when its cache manager is bound, so that it holds even if no pool was built.

Seam (vLLM 0.31 to 0.33): the global name `BlockPool` in `vllm.v1.core.kv_cache_coordinator`, read once,
in `KVCacheCoordinator.__init__`. Runs in the EngineCore, on the thread that builds the scheduler.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from vllm_lifetime.patches.versions import require

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

__all__ = ["POOL_ARGUMENTS", "disarm", "use_for_next_pool"]

POOL_ARGUMENTS = (
    "num_gpu_blocks",
    "enable_caching",
    "hash_block_size",
    "enable_kv_cache_events",
    "metrics_collector",
)
"""Arguments the pool is built with, by name, in every supported version. There may be more."""


def use_for_next_pool(pool_class: type[BlockPool]) -> None:
    """Build `pool_class`, a subclass of vLLM's `BlockPool`, when vLLM builds its next block pool.

    Raises `UnsupportedVllmError` and changes nothing when vLLM does not look as expected.
    """
    from vllm.v1.core.block_pool import BlockPool

    disarm()
    coordinator = _import_coordinator()
    require(getattr(coordinator, "BlockPool", None) is BlockPool, "kv_cache_coordinator does not use BlockPool")
    constructor = coordinator.KVCacheCoordinator.__init__
    require("BlockPool" in constructor.__code__.co_names, "KVCacheCoordinator.__init__ builds no BlockPool")
    parameters = inspect.signature(BlockPool).parameters
    for name in POOL_ARGUMENTS:
        require(name in parameters, f"BlockPool has no argument {name}")
    if not issubclass(pool_class, BlockPool):
        raise TypeError(f"{pool_class.__name__} is no subclass of vLLM's BlockPool")

    def build_pool(*args: Any, **kwargs: Any) -> BlockPool:
        disarm()
        return pool_class(*args, **kwargs)

    coordinator.BlockPool = build_pool


def disarm() -> None:
    """Give vLLM its own pool class back. Does nothing when no other class is chosen."""
    from vllm.v1.core.block_pool import BlockPool

    coordinator = _import_coordinator()
    if getattr(getattr(coordinator, "BlockPool", None), "__module__", None) == __name__:
        coordinator.BlockPool = BlockPool


def _import_coordinator() -> Any:
    """Return the module whose global name is the seam."""
    from vllm.v1.core import kv_cache_coordinator

    return kv_cache_coordinator
