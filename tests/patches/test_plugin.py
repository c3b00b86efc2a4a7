# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

factory: Any = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory")

from vllm_lifetime.connectors.lifetime import plugin  # noqa: E402
from vllm_lifetime.patches import api_routes, engine_core, kv_connector_option  # noqa: E402
from vllm_lifetime.patches.versions import UnsupportedVllmError  # noqa: E402


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record which patches are installed instead of installing them."""
    calls: list[str] = []
    for patch in (kv_connector_option, engine_core, api_routes):
        monkeypatch.setattr(patch, "install", lambda *_, patch=patch: calls.append(patch.__name__.rsplit(".")[-1]))
    monkeypatch.setattr(plugin, "_unsupported", None)
    monkeypatch.setitem(factory.KVConnectorFactory._registry, "lifetime", None)
    monkeypatch.delitem(factory.KVConnectorFactory._registry, "lifetime")
    yield calls


def test_it_registers_the_connector_and_the_patches(installed: list[str]) -> None:
    plugin.register()
    plugin.register()
    assert "lifetime" in factory.KVConnectorFactory._registry
    assert installed == ["kv_connector_option", "engine_core", "api_routes"] * 2
    plugin.ensure_supported()


@pytest.mark.parametrize(
    "error", [UnsupportedVllmError("it has no seam"), ImportError("it has no seam"), TypeError("it has no seam")]
)
def test_a_missing_seam_is_a_warning_until_the_connector_is_used(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(engine_core, "install", refuse)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    plugin.register()
    # By identity: after other tests the capturing handler may stand at two loggers of the chain, and see one record twice.
    records = {id(record): record for record in caplog.records if "it has no seam" in record.message}.values()
    assert [record.levelname for record in records] == ["WARNING"]
    with pytest.raises(UnsupportedVllmError, match="it has no seam"):
        plugin.ensure_supported()


def test_nothing_is_installed_where_a_model_is_inspected(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SimpleNamespace(name="vllm.model_executor.models.registry")
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=spec))
    plugin.register()
    assert installed == []
    assert "lifetime" not in factory.KVConnectorFactory._registry
