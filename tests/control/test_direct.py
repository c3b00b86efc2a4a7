# SPDX-License-Identifier: Apache-2.0
"""The short way of a POST of boundaries: what it leaves out, and that its answers are those of the route."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import control_fakes
import httpx
import pytest
import uvicorn
from control_fakes import API, TURN_END, FakeEngines, build_app, send, serve
from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_lifetime.control import ControlService, ControlSettings, build_router, direct
from vllm_lifetime.control.auth import Guard
from vllm_lifetime.control.routes import MAX_BODY_BYTES

BOUNDARIES = f"{API}/boundaries"
WITH_TOKEN = ControlSettings(tokens=("secret",))
FEW = ControlSettings(events_per_s=1, events_burst=1)

CASES: dict[str, dict[str, Any]] = {
    "202": {"json": TURN_END},
    "202 async": {"json": TURN_END, "headers": {"prefer": "respond-async"}},
    "202 list": {"json": [TURN_END, TURN_END | {"message_id": "é"}]},
    "401": {"json": TURN_END, "settings": WITH_TOKEN},
    "401 host": {"json": TURN_END, "headers": {"host": "attacker.example"}},
    "403": {"json": TURN_END, "headers": {"origin": "http://attacker.example"}},
    "413": {"content": b" " * (MAX_BODY_BYTES + 1)},
    "415": {"content": b"{}", "headers": {"content-type": "text/plain"}},
    "415 encoded": {"content": b"", "headers": {"content-type": "é".encode()}},
    "422": {"json": [TURN_END, TURN_END | {"kind": "over"}]},
    "422 json": {"content": b'{"message_id": NaN}'},
    "429": {"json": [TURN_END], "settings": FEW, "times": 2},
    "503": {"json": TURN_END, "error": RuntimeError("gone")},
}


@pytest.mark.parametrize("name", CASES)
def test_both_ways_give_the_same_answer_to_the_byte(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    answers = []
    for is_direct in (False, True):
        case = dict(CASES[name])
        monkeypatch.setattr(control_fakes, "is_direct", is_direct)
        app = build_app(FakeEngines(error=case.pop("error", None)), settings=case.pop("settings", None))
        for _ in range(case.pop("times", 1)):
            response = send(app, "POST", BOUNDARIES, **case)
        answers.append((response.status_code, response.headers.raw, response.content))
    assert answers[0][0] == int(name[:3])
    assert answers[0] == answers[1]


# ---------------------------------------------------------------------- which middlewares it passes by


class Outsider:
    """A middleware of somebody else, which refuses some callers."""

    def __init__(self, app: ASGIApp, secret: str) -> None:
        self.app = app
        self.secret = secret.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (b"x-secret", self.secret) not in scope["headers"]:
            await Response("who are you?", 418)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def mounted(engines: FakeEngines, prepare: Callable[[FastAPI], object], *, is_built: bool) -> FastAPI:
    """An app whose middlewares were there first, and may be built already, as vLLM's are."""
    app = FastAPI()
    prepare(app)
    if is_built:
        app.middleware_stack = app.build_middleware_stack()
    service = ControlService(engines)
    settings = ControlSettings()
    app.include_router(build_router(lambda: service, settings))
    direct.mount(app, direct.build_endpoint(lambda: service, Guard(settings)), BOUNDARIES, service.hurry)
    return app


@pytest.mark.parametrize("is_built", [True, False])
def test_a_middleware_of_somebody_else_still_stands_before_it(is_built: bool) -> None:
    engines = FakeEngines()
    app = mounted(engines, lambda app: app.add_middleware(Outsider, secret="s"), is_built=is_built)
    assert send(app, "POST", BOUNDARIES, json=TURN_END).status_code == 418
    assert engines.calls == []
    assert send(app, "POST", BOUNDARIES, json=TURN_END, headers={"x-secret": "s"}).status_code == 202


def test_a_function_as_middleware_still_stands_before_it() -> None:
    async def refuse(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        return Response(status_code=418)

    app = mounted(FakeEngines(), lambda app: app.middleware("http")(refuse), is_built=True)
    assert send(app, "POST", BOUNDARIES, json=TURN_END).status_code == 418


def test_what_does_nothing_for_it_is_passed_by() -> None:
    def prepare(app: FastAPI) -> None:
        app.add_middleware(CORSMiddleware, allow_origins=["*"])

    app = mounted(FakeEngines(), prepare, is_built=True)
    headers = {"origin": "http://localhost", "host": "localhost"}
    posted = send(app, "POST", BOUNDARIES, json=TURN_END, headers=headers)
    assert posted.status_code == 202 and "access-control-allow-origin" not in posted.headers
    assert "access-control-allow-origin" in send(app, "GET", f"{API}/tiers", headers=headers).headers


# ---------------------------------------------------------------------- what it leaves to the app


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_a_request_does_not_overtake_the_queued_event_that_its_client_sent_before(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(control_fakes, "is_direct", True)
    engines = FakeEngines()
    app = build_app(engines, spacing_s=60.0)
    told: list[int] = []

    async def complete() -> None:
        await asyncio.sleep(0)  # far less than what a completion does before it reaches the engine
        await asyncio.sleep(0)
        told.append(len(engines.calls))

    app.add_api_route("/v1/completions", complete, methods=[method])

    async def main() -> None:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for number in range(3):
                event = TURN_END | {"message_id": f"m{number}"}
                posted = await client.post(BOUNDARIES, json=event, headers={"prefer": "respond-async"})
                assert posted.status_code == 202
                await asyncio.sleep(0.01)
                assert len(engines.calls) == min(number + 1, 1 + (number > 1)), "the second and third are kept back"
                if number:
                    await client.request(method, "/v1/completions")

    asyncio.run(asyncio.wait_for(main(), 10))
    assert told == [2, 3]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", BOUNDARIES, 405), ("PUT", BOUNDARIES, 405), ("POST", BOUNDARIES + "/", 307), ("POST", "/x" + BOUNDARIES, 404)],
)
def test_everything_else_is_the_apps(monkeypatch: pytest.MonkeyPatch, method: str, path: str, status: int) -> None:
    monkeypatch.setattr(control_fakes, "is_direct", True)
    engines = FakeEngines()
    assert send(build_app(engines), method, path, json=TURN_END).status_code == status
    assert engines.calls == []


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        ("/kv", "/kv" + BOUNDARIES, 202),
        ("/kv", BOUNDARIES, 202),
        ("/kv", "/kw" + BOUNDARIES, 404),
        ("/lifetime", BOUNDARIES, 404),
    ],
)
def test_the_servers_root_path_is_left_out(
    monkeypatch: pytest.MonkeyPatch, is_direct: bool, root_path: str, path: str, status: int
) -> None:
    monkeypatch.setattr(control_fakes, "is_direct", is_direct)
    app = build_app(FakeEngines())
    app.root_path = root_path
    assert send(app, "POST", path, json=TURN_END).status_code == status


# ---------------------------------------------------------------------- the access log


@pytest.fixture
def access_lines() -> Iterator[list[str]]:
    """Lines of uvicorn's access log while `quiet_access_log` is on."""
    logger = logging.getLogger("uvicorn.access")
    direct.quiet_access_log(BOUNDARIES)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    try:
        # As vLLM does, after our routes are mounted: makes the handlers anew.
        uvicorn.Config(FastAPI(), log_level="info")
        logger.addHandler(handler)
        yield lines
    finally:
        logger.removeHandler(handler)
        del logger.info  # type: ignore[method-assign]


def test_only_posts_that_went_well_are_left_out_of_the_access_log(access_lines: list[str]) -> None:
    logging_as_it_is: dict[str, Any] = {"log_config": None, "log_level": None, "access_log": True}
    with serve(build_app(FakeEngines()), **logging_as_it_is) as url:
        assert httpx.post(url + BOUNDARIES, json=TURN_END).status_code == 202
        assert httpx.post(url + BOUNDARIES + "?source=x", json=TURN_END).status_code == 202
        assert httpx.post(url + BOUNDARIES, content=json.dumps(TURN_END)).status_code == 415
        assert httpx.get(url + f"{API}/tiers").status_code == 200
    assert [line.partition("- ")[2] for line in access_lines] == [
        f'"POST {BOUNDARIES} HTTP/1.1" 415',
        f'"GET {API}/tiers HTTP/1.1" 200',
    ]
