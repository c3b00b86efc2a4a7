# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import time
from typing import Any

import httpx
import pytest
from control_fakes import FakeEngines, serve
from fastapi import FastAPI

from vllm_lifetime.control import ControlService, claude_code
from vllm_lifetime.control.body import MAX_BODY_BYTES
from vllm_lifetime.control.settings import ControlSettings

PATH = "/lifetime/v1/hooks/claude-code"
STOP = {"session_id": "s", "hook_event_name": "Stop", "prompt_id": "p", "stop_hook_active": False, "background_tasks": []}


def build_app(engines: FakeEngines, timeout_s: float = 5.0) -> FastAPI:
    app = FastAPI()
    services: list[ControlService] = []

    def get_service() -> ControlService:
        if not services:  # on the event loop
            services.append(ControlService(engines, timeout_s))
        return services[0]

    app.include_router(claude_code.build_router(get_service), prefix="/lifetime/v1")
    return app


def wait_for_events(engines: FakeEngines, count: int) -> list[dict[str, Any]]:
    deadline_s = time.monotonic() + 60
    while len(engines.events()) < count:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    return engines.events()


def test_a_hook_is_answered_with_an_empty_object_and_reaches_the_engines() -> None:
    engines = FakeEngines(count=2)
    before_s = time.time()
    with serve(build_app(engines)) as url:
        answer = httpx.post(url + PATH, json=STOP)
        assert (answer.status_code, answer.json()) == (202, {})
        (event,) = wait_for_events(engines, 1)
    assert before_s <= event.pop("sent_at_s") <= time.time()
    assert event.pop("message_id").startswith("claude-code-")
    assert event == {"kind": "turn_end", "session_id": "s"}


def test_claude_code_does_not_wait_for_busy_engines_and_order_is_kept() -> None:
    engines = FakeEngines()
    engines.is_open.clear()
    with serve(build_app(engines)) as url, httpx.Client(base_url=url, timeout=60) as client:
        client.post(PATH, json=STOP)
        for number in range(20):
            start = {"session_id": "s", "hook_event_name": "SubagentStart", "agent_id": f"a{number}", "agent_type": "x"}
            assert client.post(PATH, json=start).status_code == 202
        assert client.post(PATH, json={"session_id": "s", "hook_event_name": "SessionEnd"}).status_code == 202
        engines.is_open.set()
        events = wait_for_events(engines, 22)
    assert [event.get("agent_id") for event in events] == [None, *(f"a{number}" for number in range(20)), None]
    assert events[-1]["kind"] == "session_end"


@pytest.mark.parametrize(
    "hook",
    [
        {"session_id": "s", "hook_event_name": "OfNextYear", "what": {"ever": [1]}},
        {"session_id": "s", "hook_event_name": "UserPromptSubmit", "prompt": "hello"},
        STOP | {"session_crons": [{"id": "c"}]},
    ],
)
def test_a_hook_that_says_nothing_is_answered_alike(hook: dict[str, Any]) -> None:
    engines = FakeEngines()
    with serve(build_app(engines)) as url:
        answer = httpx.post(url + PATH, json=hook)
        assert (answer.status_code, answer.json()) == (202, {})
    assert engines.calls == []


def test_dead_engines_are_logged_once_and_never_claude_codes_trouble(caplog: pytest.LogCaptureFixture) -> None:
    engines = FakeEngines(error=RuntimeError("gone"))
    caplog.set_level(logging.WARNING, "vllm_lifetime.control")
    with serve(build_app(engines)) as url:
        for prompt in range(3):
            answer = httpx.post(url + PATH, json=STOP | {"prompt_id": str(prompt)})
            assert (answer.status_code, answer.json()) == (202, {})
        wait_for_events(engines, 3)
        time.sleep(0.1)
    lost = [record for record in caplog.records if "queued boundaries are lost" in record.message]
    assert len(lost) == 1
    assert "gone" in lost[0].message


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422),
        (b"{", 422),
        (b"[]", 422),
        (b'"Stop"', 422),
        (b'{"hook_event_name": "Stop"}', 422),
        (b'{"session_id": "s"}', 422),
        (b'{"session_id": 5, "hook_event_name": "Stop"}', 422),
        (b" " * (MAX_BODY_BYTES + 1), 413),
    ],
)
def test_what_no_hook_sends_is_refused_and_named(content: bytes, status: int) -> None:
    engines = FakeEngines()
    with serve(build_app(engines)) as url:
        answer = httpx.post(url + PATH, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["detail"]
    assert engines.calls == []


def test_the_route_is_described() -> None:
    with serve(build_app(FakeEngines())) as url:
        operation = httpx.get(f"{url}/openapi.json").json()["paths"][PATH]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["required"]) == {"session_id", "hook_event_name"}


def test_a_hook_for_which_there_is_no_room_is_lost_and_shown() -> None:
    engines = FakeEngines()
    services: list[ControlService] = []

    def get_service() -> ControlService:
        if not services:
            services.append(ControlService(engines, settings=ControlSettings(events_per_s=1, events_burst=1)))
        return services[0]

    app = FastAPI()
    app.include_router(claude_code.build_router(get_service), prefix="/lifetime/v1")
    with serve(app) as url:
        answers = [httpx.post(url + PATH, json=STOP | {"prompt_id": str(prompt)}) for prompt in range(2)]
        wait_for_events(engines, 1)
    assert [answer.status_code for answer in answers] == [202, 202]
    statuses = sorted(record.outcome.status for record in services[0].read_events(None, 10).events)
    assert statuses == ["accepted", "rejected"]
