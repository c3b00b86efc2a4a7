# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from vllm_lifetime.patches import api_routes
from vllm_lifetime.patches.versions import UnsupportedVllmError

plugins: Any = pytest.importorskip("vllm.plugins")
interface: Any = pytest.importorskip("vllm.plugins.endpoint_plugins.interface")


class Core032:
    """The part of vLLM's engine client that 0.32 and later have."""

    async def call_utility_all_async(self, method: str, *args: Any) -> list[Any]:
        return [(method, args, engine) for engine in range(2)]


class Core031:
    """The part of vLLM's engine client that 0.31 has."""

    core_engines = (b"e0", b"e1")

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        return method, args, engine


def mount(app: FastAPI, engines: api_routes.EngineUtilities) -> None:
    @app.get("/ours")
    async def ours() -> list[Any]:
        return await engines.call("lifetime_call", "tiers")


def serve(connector: str | None, has_engine: bool = True) -> FastAPI:
    """Build an app in vLLM's two phases; return it."""
    app = FastAPI()
    config = None if connector is None else SimpleNamespace(kv_connector=connector)
    client = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=config), engine_core=Core032())
    interface.attach_endpoint_plugins(app, ("generate",))
    asyncio.run(interface.init_endpoint_plugins_state(client if has_engine else None, app.state, SimpleNamespace()))
    return app


def paths(app: FastAPI) -> set[str]:
    return set(app.openapi()["paths"])


@pytest.fixture(autouse=True)
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    load = plugins.load_endpoint_plugins
    monkeypatch.setattr(plugins, "load_endpoint_plugins", getattr(load, "__wrapped__", load))
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)


def test_routes_are_mounted_for_our_connector_only() -> None:
    api_routes.install("lifetime", mount)
    assert paths(serve("lifetime")) == {"/ours"}
    assert paths(serve("ExampleConnector")) == set()
    assert paths(serve(None)) == set()


def test_a_server_without_an_engine_gets_no_routes() -> None:
    api_routes.install("lifetime", mount)
    assert paths(serve("lifetime", has_engine=False)) == set()


def test_installing_twice_mounts_once() -> None:
    api_routes.install("lifetime", mount)
    api_routes.install("lifetime", mount)
    assert len(serve("lifetime").state.endpoint_plugins) == 1


def test_it_follows_vllms_contract() -> None:
    api_routes.install("lifetime", mount)
    (plugin,) = plugins.load_endpoint_plugins(("generate",))
    assert isinstance(plugin, interface.EndpointPlugin)


@pytest.mark.parametrize(("core", "engines"), [(Core032(), [0, 1]), (Core031(), [b"e0", b"e1"])])
def test_every_engine_is_called(core: object, engines: list[Any]) -> None:
    utilities = api_routes.EngineUtilities(SimpleNamespace(engine_core=core))
    results = asyncio.run(utilities.call("lifetime_call", "tiers", {}))
    assert results == [("lifetime_call", ("tiers", {}), engine) for engine in engines]


def test_how_many_api_servers_share_the_engines() -> None:
    from vllm.config import ParallelConfig

    parallel = ParallelConfig(_api_process_count=3, _api_process_rank=1)
    client = SimpleNamespace(engine_core=Core032(), vllm_config=SimpleNamespace(parallel_config=parallel))
    assert api_routes.EngineUtilities(client).num_api_servers == 3
    assert api_routes.EngineUtilities(SimpleNamespace(engine_core=Core032())).num_api_servers == 1


def test_vllms_engine_client_offers_one_of_the_ways() -> None:
    from vllm.v1.engine.core_client import AsyncMPClient

    assert hasattr(AsyncMPClient, "call_utility_all_async") or hasattr(AsyncMPClient, "_call_utility_async")


@pytest.mark.parametrize("client", [SimpleNamespace(), SimpleNamespace(engine_core=object())])
def test_a_client_without_a_way_to_all_engines_is_refused(client: object) -> None:
    with pytest.raises(UnsupportedVllmError, match="all engines"):
        api_routes.EngineUtilities(client)


def test_a_missing_loader_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(plugins, "load_endpoint_plugins")
    with pytest.raises(UnsupportedVllmError, match="load_endpoint_plugins"):
        api_routes.install("lifetime", mount)
    assert not hasattr(plugins, "load_endpoint_plugins")


def test_an_app_builder_that_loads_no_plugins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    load = plugins.load_endpoint_plugins
    monkeypatch.setattr(interface, "attach_endpoint_plugins", lambda app, tasks: None)
    with pytest.raises(UnsupportedVllmError, match="attach_endpoint_plugins"):
        api_routes.install("lifetime", mount)
    assert plugins.load_endpoint_plugins is load
