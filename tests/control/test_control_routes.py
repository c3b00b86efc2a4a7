# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from vllm_lifetime.boundaries import MAX_BATCH
from vllm_lifetime.control import ControlService, build_router
from vllm_lifetime.control.routes import MAX_BODY_BYTES, MAX_ERRORS

BOUNDARIES = "/lifetime/v1/boundaries"
TIERS = "/lifetime/v1/tiers"
TURN_END = {"message_id": "m1", "kind": "turn_end", "session_id": "s1"}


class FakeEngines:
    """An `EnginePort` that records calls and answers for each of `count` engines."""

    def __init__(self, count: int = 1, error: Exception | None = None, delay_s: float = 0.0) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.count = count
        self.error = error
        self.delay_s = delay_s
        self.answers: list[Any] | None = None

    async def call(self, method: str, *args: Any) -> list[Any]:
        assert method == "lifetime_call"
        self.calls.append((args[0], args[1]))
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        if self.answers is not None:
            return self.answers
        return [self.answer(args[0], args[1], rank) for rank in range(self.count)]

    def answer(self, method: str, payload: dict[str, Any], rank: int) -> dict[str, Any]:
        if method == "tiers":
            return {"tiers": {"hbm": {"capacity_blocks": 10, "used_blocks": rank, "path": "x", "on": True}}}
        return {
            "outcomes": [
                {"message_id": event["message_id"], "status": "accepted" if rank == 0 else "ignored", "blocks": rank}
                for event in payload["events"]
            ]
        }


def build_app(engines: FakeEngines, timeout_s: float = 5.0) -> FastAPI:
    app = FastAPI()
    service = ControlService(engines, timeout_s)
    app.include_router(build_router(lambda: service))
    return app


def send(app: FastAPI, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(request())


def test_one_event_is_forwarded_and_answered() -> None:
    engines = FakeEngines()
    response = send(build_app(engines), "POST", BOUNDARIES, json=TURN_END)
    assert response.status_code == 202
    assert response.json() == {"outcomes": [{"message_id": "m1", "status": "accepted", "blocks": 0, "bytes": 0}]}
    assert engines.calls == [("boundaries", {"events": [TURN_END]})]


def test_a_batch_is_one_call_and_keeps_its_order() -> None:
    engines = FakeEngines(count=3)
    batch = [TURN_END | {"message_id": f"m{i}"} for i in range(5)]
    response = send(build_app(engines), "POST", BOUNDARIES, json=batch)
    assert response.status_code == 202
    outcomes = response.json()["outcomes"]
    assert [outcome["message_id"] for outcome in outcomes] == ["m0", "m1", "m2", "m3", "m4"]
    assert {(outcome["status"], outcome["blocks"]) for outcome in outcomes} == {("accepted", 0 + 1 + 2)}
    assert len(engines.calls) == 1


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({"message_id": "m1", "kind": "turn_end"}, ["body", "session_id"]),
        (TURN_END | {"kind": "over"}, ["body", "kind"]),
        (TURN_END | {"spawn": {"tools": [1]}}, ["body", "spawn", "tools", 0]),
        ([TURN_END, TURN_END, TURN_END | {"session_id": 5}], ["body", 2, "session_id"]),
        ([TURN_END, 7], ["body", 1]),
        ("text", ["body"]),
        (None, ["body"]),
        ([], ["body"]),
    ],
)
def test_a_malformed_event_is_named_and_nothing_is_forwarded(body: Any, loc: list[str | int]) -> None:
    engines = FakeEngines()
    response = send(build_app(engines), "POST", BOUNDARIES, content=json.dumps(body))
    assert response.status_code == 422
    (error,) = response.json()["detail"]
    assert error["loc"] == loc
    assert set(error) == {"loc", "msg", "type"}
    assert engines.calls == []


def test_a_batch_has_a_limit() -> None:
    engines = FakeEngines()
    response = send(build_app(engines), "POST", BOUNDARIES, json=[TURN_END] * (MAX_BATCH + 1))
    assert response.status_code == 422
    assert response.json()["detail"][0]["type"] == "too_long"
    assert engines.calls == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"message_id": NaN}',
        rb'{"message_id": "\ud800", "kind": "turn_end", "session_id": "s"}',
    ],
)
def test_invalid_json_is_named(body: bytes) -> None:
    engines = FakeEngines()
    response = send(build_app(engines), "POST", BOUNDARIES, content=body)
    assert response.status_code == 422
    (error,) = response.json()["detail"]
    assert (error["loc"], error["type"]) == (["body"], "json_invalid")
    assert engines.calls == []


def test_one_answer_names_a_bounded_number_of_errors() -> None:
    body = TURN_END | {f"key{i}": i for i in range(MAX_ERRORS * 10)}
    response = send(build_app(FakeEngines()), "POST", BOUNDARIES, json=body)
    assert response.status_code == 422
    assert len(response.json()["detail"]) == MAX_ERRORS


def test_a_body_of_the_limit_is_read() -> None:
    body = json.dumps(TURN_END).encode().ljust(MAX_BODY_BYTES)
    assert send(build_app(FakeEngines()), "POST", BOUNDARIES, content=body).status_code == 202


def test_a_longer_body_is_refused_by_its_declared_length() -> None:
    engines = FakeEngines()
    body = json.dumps(TURN_END).encode().ljust(MAX_BODY_BYTES + 1)
    response = send(build_app(engines), "POST", BOUNDARIES, content=body)
    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in response.json()["detail"]
    assert engines.calls == []


@pytest.mark.parametrize("headers", [{}, {"content-length": "10"}])
def test_a_longer_body_is_refused_by_what_arrives(headers: dict[str, str]) -> None:
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(1000):
            sent += 1 << 16
            yield b" " * (1 << 16)

    engines = FakeEngines()
    response = send(build_app(engines), "POST", BOUNDARIES, content=chunks(), headers=headers)
    assert response.status_code == 413
    assert sent <= MAX_BODY_BYTES + (2 << 16)
    assert engines.calls == []


@pytest.mark.parametrize(("method", "path"), [("POST", BOUNDARIES), ("GET", TIERS)])
def test_a_dead_engine_is_503_with_a_sentence(method: str, path: str) -> None:
    engines = FakeEngines(error=RuntimeError("EngineCore encountered an issue"))
    response = send(build_app(engines), method, path, json=TURN_END)
    assert response.status_code == 503
    assert response.json()["detail"] == "An engine is not available: EngineCore encountered an issue"


def test_an_engine_that_does_not_answer_is_503() -> None:
    response = send(build_app(FakeEngines(delay_s=5.0), timeout_s=0.01), "GET", TIERS)
    assert response.status_code == 503
    assert response.json()["detail"] == "An engine did not answer within 0.01 seconds."


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [None],
        [{"error": "boom"}],
        [{}],
        [{"outcomes": []}],
        [{"outcomes": [{"message_id": "m1", "status": "perhaps"}]}],
        [{"outcomes": [{"message_id": "m1", "status": "accepted"}]}, {"error": "boom"}],
    ],
)
def test_an_invalid_answer_of_an_engine_is_503(answers: list[Any]) -> None:
    engines = FakeEngines()
    engines.answers = answers
    response = send(build_app(engines), "POST", BOUNDARIES, json=TURN_END)
    assert response.status_code == 503
    assert isinstance(response.json()["detail"], str)


def test_tiers_are_given_by_engine_and_added_up() -> None:
    response = send(build_app(FakeEngines(count=3)), "GET", TIERS)
    assert response.status_code == 200
    state = response.json()
    assert state["tiers"] == {"hbm": {"capacity_blocks": 30, "used_blocks": 3}}
    assert [engine["tiers"]["hbm"]["used_blocks"] for engine in state["engines"]] == [0, 1, 2]
    assert state["engines"][0]["tiers"]["hbm"]["path"] == "x"


def test_the_routes_are_described() -> None:
    paths = send(build_app(FakeEngines()), "GET", "/openapi.json").json()["paths"]
    assert "requestBody" in paths[BOUNDARIES]["post"]
    assert "get" in paths[TIERS]


def test_errors_keep_their_form_on_vllms_app() -> None:
    """vLLM answers validation errors of its own routes with an OpenAI-style 400."""
    register = pytest.importorskip("vllm.entrypoints.serve.exception_handling.register")
    app = build_app(FakeEngines(error=RuntimeError("gone")))
    app.state.args = SimpleNamespace(log_error_stack=False)
    register.init_exception_handler(app)
    response = send(app, "POST", BOUNDARIES, json=[TURN_END, TURN_END | {"kind": "over"}])
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["body", 1, "kind"]
    assert send(app, "POST", BOUNDARIES, content=b" " * (MAX_BODY_BYTES + 1)).status_code == 413
    assert send(app, "GET", TIERS).json() == {"detail": "An engine is not available: gone"}
