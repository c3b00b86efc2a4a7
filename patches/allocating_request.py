# SPDX-License-Identifier: Apache-2.0
"""Tells for which request a KV cache manager is about to take new blocks.

What: `tell(manager, listener)` lets `listener.begin_request(request)` be called before, and `listener.end_request()` after,
everything that `manager.allocate_slots` does for one request. Other managers in the process are left alone.

Why: `BlockPool.get_new_blocks(n)` says how many blocks, not whose; a pool of two memories cannot place them without.

Seam (vLLM 0.31 to 0.33): `KVCacheManager.allocate_slots(request, ...)`, the scheduler's one way to blocks for a request, called
on the instance. EngineCore, scheduler thread.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Protocol

from vllm_lifetime.patches.versions import require

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

__all__ = ["Listener", "tell"]


class Listener(Protocol):
    """Who is told. On the hot path."""

    def begin_request(self, request: Request) -> None:
        """Blocks that are taken from now on are for `request`."""

    def end_request(self) -> None:
        """Blocks that are taken from now on are for nobody known."""


def tell(manager: KVCacheManager, listener: Listener) -> None:
    """Tell `listener`, see the module.

    Raises `UnsupportedVllmError` and changes nothing when vLLM does not look as expected.
    """
    original = getattr(manager, "allocate_slots", None)
    require(callable(original), "KVCacheManager has no allocate_slots")
    assert original is not None
    first = next(iter(inspect.signature(original).parameters), None)
    require(first == "request", "the first argument of KVCacheManager.allocate_slots is not the request")

    def allocate_slots(request: Request, *args: Any, **kwargs: Any) -> Any:
        listener.begin_request(request)
        try:
            return original(request, *args, **kwargs)
        finally:
            listener.end_request()

    manager.allocate_slots = allocate_slots  # type: ignore[method-assign]
