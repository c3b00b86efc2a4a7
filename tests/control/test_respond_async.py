# SPDX-License-Identifier: Apache-2.0
"""`Prefer: respond-async` on a POST of boundaries: answered at once, and what becomes of it is still told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from control_fakes import API, TURN_END, FakeEngines, build_app, send, serve
from prometheus_client import REGISTRY

from vllm_lifetime.boundaries import MAX_BATCH
from vllm_lifetime.control import ControlSettings, EngineUnavailable
from vllm_lifetime.control.batcher import Batcher
from vllm_lifetime.control.preference import prefers_async
from vllm_lifetime.control.service import MAX_WAITING_EVENTS

BOUNDARIES = f"{API}/boundaries"
EVENTS = f"{API}/events"
ASYNC = {"prefer": "respond-async"}
MANY = ControlSettings(events_per_s=1e6, events_burst=10**6)


def event(number: int) -> dict[str, Any]:
    return TURN_END | {"message_id": f"m{number}"}


def await_true(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.005)


# ---------------------------------------------------------------------- the header


@pytest.mark.parametrize(
    ("values", "is_async"),
    [
        ([], False),
        ([""], False),
        (["respond-async"], True),
        (["Respond-ASYNC"], True),
        ([" respond-async "], True),
        (["wait=10, respond-async"], True),
        (["respond-async, wait=10"], True),
        (["return=minimal", "respond-async"], True),
        ([",, ,respond-async,"], True),
        (["respond-async;foo=bar"], True),
        (["respond-async ; foo"], True),
        (['respond-async=""'], True),
        (["respond-async="], True),
        (["respond-async=1"], False),
        (["respond-async=1, respond-async"], False),
        (["respond-async", "respond-async=1"], True),
        (["respond-async x"], False),
        (["respond-asynchronously"], False),
        (["x-respond-async"], False),
        (["handling=lenient; respond-async"], False),
        (['foo="a, respond-async"'], False),
        (['foo="a\\", respond-async"'], False),
        (['foo="a\\"b", respond-async'], True),
        (['"respond-async"'], False),
        (['foo="never closed, respond-async'], False),
        (["wait=10"], False),
    ],
)
def test_the_preference_is_read_as_rfc_7240_has_it(values: list[str], is_async: bool) -> None:
    headers = [(b"host", b"localhost"), *((b"prefer", value.encode()) for value in values), (b"x-prefer", b"respond-async")]
    assert prefers_async({"type": "http", "headers": headers}) is is_async


@pytest.mark.parametrize("value", [b'"\\' * 30_000, b"a," * 30_000, b'"' * 60_000, b" " * 60_000, b"respond-async =" * 4_000])
def test_a_header_made_to_be_slow_is_not(value: bytes) -> None:
    began_s = time.thread_time()
    prefers_async({"type": "http", "headers": [(b"prefer", value)]})
    assert time.thread_time() - began_s < 0.5


# ---------------------------------------------------------------------- the answer


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("body", [event(0), [event(0), event(1) | {"message_id": "é"}]])
def test_the_answer_says_queued_and_does_not_wait_for_the_engines(body: Any) -> None:
    began_s = time.monotonic()
    response = send(build_app(FakeEngines(delay_s=30.0)), "POST", BOUNDARIES, json=body, headers=ASYNC)
    assert time.monotonic() - began_s < 10.0
    assert (response.status_code, response.headers["preference-applied"]) == (202, "respond-async")
    ids = [item["message_id"] for item in (body if isinstance(body, list) else [body])]
    assert response.json() == {"outcomes": [{"message_id": name, "status": "queued", "blocks": 0, "bytes": 0} for name in ids]}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("headers", [{}, {"prefer": "return=minimal, wait=1"}])
def test_without_the_preference_the_answer_has_the_outcome(headers: dict[str, str]) -> None:
    response = send(build_app(FakeEngines()), "POST", BOUNDARIES, json=TURN_END, headers=headers)
    assert "preference-applied" not in response.headers
    assert response.json()["outcomes"][0]["status"] == "accepted"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("status", "kwargs", "settings"),
    [
        (401, {"json": TURN_END}, ControlSettings(tokens=("secret",))),
        (403, {"json": TURN_END, "headers": {"origin": "http://attacker.example"}}, MANY),
        (415, {"content": b"{}", "headers": {"content-type": "text/plain"}}, MANY),
        (422, {"json": [TURN_END, TURN_END | {"kind": "over"}]}, MANY),
        (429, {"json": [TURN_END] * 2}, ControlSettings(events_per_s=1e-3, events_burst=1)),
    ],
)
def test_what_is_refused_is_refused_at_once(status: int, kwargs: dict[str, Any], settings: ControlSettings) -> None:
    engines = FakeEngines()
    app = build_app(engines, settings=settings)
    if status == 429:
        assert send(app, "POST", BOUNDARIES, **kwargs).status_code == 202  # more than fit pass when the bucket is full
        engines.calls.clear()
    response = send(app, "POST", BOUNDARIES, **kwargs | {"headers": kwargs.get("headers", {}) | ASYNC})
    assert response.status_code == status and "preference-applied" not in response.headers
    assert engines.calls == []


@pytest.mark.usefixtures("way")
def test_a_full_queue_is_503_and_nobody_waits_for_it() -> None:
    engines = FakeEngines()
    engines.is_open.clear()
    app = build_app(engines, timeout_s=300.0, settings=MANY)
    with serve(app) as url, httpx.Client(base_url=url, headers=ASYNC, timeout=60) as client:
        # One list is on its way to the engines, and as many wait as may.
        for start in range(0, MAX_WAITING_EVENTS + MAX_BATCH, MAX_BATCH):
            batch = [event(number) for number in range(start, start + MAX_BATCH)]
            assert client.post(BOUNDARIES, json=batch).status_code == 202
        response = client.post(BOUNDARIES, json=event(0))
        assert response.status_code == 503 and "preference-applied" not in response.headers
        assert "do not keep up" in response.json()["detail"]
        engines.is_open.set()


# ---------------------------------------------------------------------- what becomes of it


@pytest.mark.usefixtures("way")
def test_queued_events_reach_the_engines_in_order_with_those_of_who_waits() -> None:
    engines = FakeEngines(count=2, delay_s=0.05)
    with serve(build_app(engines)) as url, httpx.Client(base_url=url) as client:
        for number in range(0, 30, 3):
            client.post(BOUNDARIES, json=event(number), headers=ASYNC)
            client.post(BOUNDARIES, json=[event(number + 1), event(number + 2)], headers=ASYNC)
            if number == 15:
                waited = client.post(BOUNDARIES, json=event(100)).json()["outcomes"]
                assert waited == [{"message_id": "m100", "status": "accepted", "blocks": 1, "bytes": 0}]
                assert [item["message_id"] for item in engines.events()] == [*(f"m{number}" for number in range(18)), "m100"]
        await_true(lambda: len(client.get(EVENTS).json()["events"]) == 31, "all events were taken")
        shown = client.get(EVENTS).json()["events"]
    assert engines.max_running == 1
    assert [record["event"]["message_id"] for record in shown] == [item["message_id"] for item in engines.events()]
    assert {record["outcome"]["status"] for record in shown} == {"accepted"}


@pytest.mark.usefixtures("way")
def test_a_hint_and_a_release_do_not_overtake_queued_events() -> None:
    engines = FakeEngines(delay_s=0.2)
    release = {"action_id": "a", "action_type": "kv.release", "action_version": "1.0", "payload": {"session_id": "s"}}
    envelope = {"protocol_version": "0.1", "message_id": "e", "actions": [release]}
    with serve(build_app(engines)) as url, httpx.Client(base_url=url) as client:
        for number in range(3):
            client.post(BOUNDARIES, json=event(number), headers=ASYNC)
        assert client.post(f"{API}/hints", json=envelope).status_code < 300
        for number in range(3, 6):
            client.post(BOUNDARIES, json=event(number), headers=ASYNC)
        assert client.delete(f"{API}/sessions/s").status_code < 300
    told: list[str] = []
    for method, payload in engines.calls:
        told += [item["message_id"] for item in payload["events"]] if method == "boundaries" else [method]
    assert told == ["m0", "m1", "m2", "hints", "m3", "m4", "m5", "release"]


def test_a_hint_is_carried_out_also_when_the_events_before_it_are_lost() -> None:
    async def test() -> None:
        sent: list[list[int]] = []

        async def send(items: list[int]) -> list[int]:
            sent.append(items)
            await asyncio.sleep(0)
            raise EngineUnavailable("gone")

        batcher: Batcher[int, int] = Batcher(send, max_batch=10, max_waiting=10, timeout_s=10)
        batcher.put([1])
        batcher.put([2])
        await batcher.settle()
        assert sent == [[1, 2]]
        await batcher.settle()  # with nothing to wait for
        assert sent == [[1, 2]]

    asyncio.run(test())


@pytest.mark.usefixtures("way")
def test_events_that_the_engines_never_got_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    engines = FakeEngines(error=RuntimeError("gone"))
    lost = "vllm:lifetime_lost_boundaries_total"
    with serve(build_app(engines)) as url, httpx.Client(base_url=url, headers=ASYNC, timeout=60) as client:

        def shown() -> list[tuple[str, str, str | None]]:
            records = client.get(EVENTS).json()["events"]
            outcomes = [record["outcome"] for record in records]
            return [(outcome["message_id"], outcome["status"], outcome.get("reason")) for outcome in outcomes]

        before = REGISTRY.get_sample_value(lost) or 0.0
        assert client.post(BOUNDARIES, json=[event(0), event(1)]).status_code == 202
        assert client.post(BOUNDARIES, json=event(2)).status_code == 202
        await_true(lambda: len(shown()) == 3, "all are told of")
        reason = "An engine is not available: gone"
        assert shown() == [(f"m{number}", "rejected", reason) for number in range(3)]
        assert REGISTRY.get_sample_value(lost) == before + 3
        engines.error = None
        client.post(BOUNDARIES, json=event(3))
        await_true(lambda: len(shown()) == 4, "the next is taken")
        assert shown()[3] == ("m3", "accepted", None)
        assert [record.levelno for record in caplog.records if "are lost" in record.message] == [logging.WARNING]
        engines.error = RuntimeError("again")
        client.post(BOUNDARIES, json=event(4))
        await_true(lambda: len(shown()) == 5, "one more is told of")
    # Once for each time that they failed, and nothing else.
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.rpartition(": ")[2] for text in warnings] == ["gone", "again"]
