# SPDX-License-Identifier: Apache-2.0
"""Adds the utility method `lifetime_call` to vLLM's EngineCore, which passes a call to the connector.

What: `EngineCore.lifetime_call(method, payload)` calls the method of that name on the scheduler side
of the engine's connector and returns its answer.

Why: vLLM's API server can call EngineCore methods by name, but none of them reaches the connector
(`collective_rpc` ends at the workers).

Seams (vLLM 0.31 to 0.33): `EngineCoreProc._handle_client_request` looks the method of a `UTILITY`
request up by name on the engine; `SchedulerInterface.get_kv_connector`. Runs in the EngineCore, on the
thread that schedules, between two steps; requests and calls of one API server keep their order.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol, runtime_checkable

from vllm_lifetime.patches.versions import require

__all__ = ["LifetimeCallable", "install"]

logger = logging.getLogger("vllm.lifetime")


@runtime_checkable
class LifetimeCallable(Protocol):
    """A connector that takes calls from the API server."""

    def lifetime_call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Carry out `method`; arguments and answer are what JSON can say."""
        ...


def install() -> None:
    """Add the method, once per process.

    Raises `UnsupportedVllmError` and changes nothing when vLLM does not look as expected.
    """
    from vllm.v1.core.sched.interface import SchedulerInterface
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    if getattr(EngineCore, "lifetime_call", None) is lifetime_call:
        return
    require(not hasattr(EngineCore, "lifetime_call"), "EngineCore has a method lifetime_call of its own")
    handler = getattr(EngineCoreProc, "_handle_client_request", None)
    require(
        handler is not None and "UTILITY" in handler.__code__.co_names,
        "EngineCoreProc._handle_client_request takes no UTILITY requests",
    )
    require(hasattr(SchedulerInterface, "get_kv_connector"), "SchedulerInterface has no method get_kv_connector")
    EngineCore.lifetime_call = lifetime_call  # type: ignore[attr-defined]


def lifetime_call(engine: Any, method: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Pass a call to the connector of `engine`. Never raises: a failure is `{"error": message}`."""
    import msgspec

    try:
        connector = engine.scheduler.get_kv_connector()
        if not isinstance(connector, LifetimeCallable):
            return {"error": "the KV connector of this engine takes no lifetime calls"}
        answer = connector.lifetime_call(method, payload)
        # What cannot be encoded fails here, where it is an error like any other; in vLLM's
        # output thread it would end the engine.
        return dict(msgspec.msgpack.decode(msgspec.msgpack.encode(answer)))
    except Exception as error:
        logger.exception("lifetime_call(%r) failed", method)
        return {"error": f"{type(error).__name__}: {error}"}
