# SPDX-License-Identifier: Apache-2.0
"""Mounts routes on vLLM's own API server when its engines use our connector.

What: one endpoint plugin is added to those that vLLM loads. It follows vLLM's contract for endpoint
plugins, except that it mounts its routes when the engine is known, and only if the engine's connector
is the one named: otherwise the app has no route of ours.

Why: vLLM loads endpoint plugins only when they are named in `VLLM_PLUGINS`, and that variable is an
allowlist for all groups of plugins: to name us would turn every other plugin off. The allowlist keeps
routes from appearing unasked; here the user asks by choosing the connector.

`EngineUtilities` reaches every engine of this API server. vLLM 0.32 and later have
`call_utility_all_async`; for 0.31 the same is done engine by engine, as its data-parallel client does.
Each API server of `--api-server-count` serves the routes and reaches every data-parallel engine; with
external or hybrid load balancing it reaches the engines it balances, and the harness calls each server.

Seams (vLLM 0.31 to 0.33): `attach_endpoint_plugins` looks `vllm.plugins.load_endpoint_plugins` up at
each call; `EngineClient.engine_core`. Runs in the API server, on its event loop. vLLM's Rust frontend,
the render server and `run-batch` have no such app and get no routes.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm_lifetime.patches.versions import require

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.datastructures import State

__all__ = ["EngineUtilities", "install"]


def install(connector: str, mount: Callable[[FastAPI, EngineUtilities], None]) -> None:
    """Call `mount(app, engines)` for each API server whose engines use `connector`, once per process.

    Raises `UnsupportedVllmError` and changes nothing when vLLM does not look as expected.
    """
    from vllm import plugins

    load = getattr(plugins, "load_endpoint_plugins", None)
    if getattr(load, "_lifetime", False):
        return
    require(callable(load), "vllm.plugins has no function load_endpoint_plugins")
    assert load is not None
    # Loaded in every API server by now; elsewhere there is nothing to mount on.
    interface = sys.modules.get("vllm.plugins.endpoint_plugins.interface")
    if interface is not None:
        attach = getattr(interface, "attach_endpoint_plugins", None)
        require(
            attach is not None and "load_endpoint_plugins" in attach.__code__.co_names,
            "attach_endpoint_plugins does not load endpoint plugins",
        )

    @wraps(load)
    def load_with_ours(*args: Any, **kwargs: Any) -> list[Any]:
        return [*load(*args, **kwargs), _LifetimeEndpoints(connector, mount)]

    load_with_ours._lifetime = True  # type: ignore[attr-defined]
    plugins.load_endpoint_plugins = load_with_ours


class _LifetimeEndpoints:
    """vLLM's `EndpointPlugin` for one app."""

    name = "lifetime"
    required_tasks = None

    def __init__(self, connector: str, mount: Callable[[FastAPI, EngineUtilities], None]) -> None:
        self._connector = connector
        self._mount = mount
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Remember the app: which connector its engine has is not known yet."""
        self._app = app

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Mount the routes if the engine has our connector. `engine_client` may be None."""
        config = getattr(getattr(engine_client, "vllm_config", None), "kv_transfer_config", None)
        if self._app is not None and config is not None and config.kv_connector == self._connector:
            self._mount(self._app, EngineUtilities(engine_client))


class EngineUtilities:
    """Calls utility methods of every EngineCore that an API server's engine client reaches."""

    def __init__(self, engine_client: Any) -> None:
        """Raises `UnsupportedVllmError` when `engine_client` offers no way to call all engines."""
        core = getattr(engine_client, "engine_core", None)
        require(
            hasattr(core, "call_utility_all_async")
            or (hasattr(core, "core_engines") and hasattr(core, "_call_utility_async")),
            f"{type(core).__name__} cannot call a utility of all engines",
        )
        self._core: Any = core
        parallel = getattr(getattr(engine_client, "vllm_config", None), "parallel_config", None)
        self.num_api_servers: int = getattr(parallel, "_api_process_count", 1)
        """API servers that share the engines, this one included."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call `method` on every engine at once; return one result per engine.

        Raises what vLLM raises: `EngineDeadError`, or `Exception` for a method that failed.
        """
        core = self._core
        if hasattr(core, "call_utility_all_async"):
            return list(await core.call_utility_all_async(method, *args))
        calls = [core._call_utility_async(method, *args, engine=engine) for engine in core.core_engines]
        return list(await asyncio.gather(*calls))
