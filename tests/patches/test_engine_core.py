# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lifetime.patches import engine_core
from vllm_lifetime.patches.versions import UnsupportedVllmError

core: Any = pytest.importorskip("vllm.v1.engine.core")


@pytest.fixture(autouse=True)
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.EngineCore, "lifetime_call", None, raising=False)
    monkeypatch.delattr(core.EngineCore, "lifetime_call")


class Connector:
    """A connector that answers with `answer`, or raises it."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def lifetime_call(self, method: str, payload: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return {"method": method, "payload": payload, "answer": self.answer}


def call(connector: object, method: str = "tiers") -> dict[str, Any]:
    scheduler = SimpleNamespace(get_kv_connector=lambda: connector)
    return engine_core.lifetime_call(SimpleNamespace(scheduler=scheduler), method, {"a": 1})


def test_the_engine_finds_the_method_by_name() -> None:
    engine_core.install()
    engine_core.install()
    engine = object.__new__(core.EngineCoreProc)
    engine.scheduler = SimpleNamespace(get_kv_connector=lambda: Connector(7))
    method = getattr(engine, "lifetime_call")  # noqa: B009 - as vLLM does
    arguments = engine._convert_msgspec_args(method, ("tiers", {"a": 1}))
    assert method(*arguments) == {"method": "tiers", "payload": {"a": 1}, "answer": 7}


@pytest.mark.parametrize("connector", [None, object()])
def test_an_engine_without_our_connector_says_so(connector: object) -> None:
    assert call(connector) == {"error": "the KV connector of this engine takes no lifetime calls"}


def test_a_failure_of_the_connector_is_an_answer() -> None:
    assert call(Connector(KeyError("s1"))) == {"error": "KeyError: 's1'"}


@pytest.mark.parametrize("answer", [object(), 2**70])
def test_an_answer_that_cannot_be_sent_is_an_error(answer: object) -> None:
    assert list(call(Connector(answer))) == ["error"]


def test_an_engine_without_a_scheduler_is_an_error() -> None:
    assert list(engine_core.lifetime_call(SimpleNamespace(), "tiers", {})) == ["error"]


def test_a_method_of_vllms_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.EngineCore, "lifetime_call", print, raising=False)
    with pytest.raises(UnsupportedVllmError, match="of its own"):
        engine_core.install()
    assert core.EngineCore.lifetime_call is print


@pytest.mark.parametrize("handler", [None, lambda self, request: None])
def test_an_engine_without_utility_requests_is_refused(handler: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core.EngineCoreProc, "_handle_client_request", handler)
    with pytest.raises(UnsupportedVllmError, match="UTILITY"):
        engine_core.install()
    assert not hasattr(core.EngineCore, "lifetime_call")
