# SPDX-License-Identifier: Apache-2.0
"""One event for several servers: real HTTP on both sides, with servers that die, are slow or refuse."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from fanout_fakes import PREFIX, FakeEngine, FanoutServer, ServerThread, await_true
from kept_port import KeptPort
from pydantic import SecretStr

from vllm_lifetime.control import ControlSettings
from vllm_lifetime.control.body import MAX_BODY_BYTES
from vllm_lifetime.control.fanout_engine import EngineUrlError, FanoutOptions, normalize_engine_url

BOUNDARIES = f"{PREFIX}/boundaries"
PATIENT = FanoutOptions(answer_timeout_s=20.0)
"""For servers that answer or are down: the machine may be slow."""

QUICK = FanoutOptions(answer_timeout_s=0.8, request_timeout_s=60.0)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test started, the latest first."""
    with ExitStack() as running:
        yield running


def start(stack: ExitStack, engines: list[FakeEngine], options: FanoutOptions = PATIENT, **more: Any) -> httpx.Client:
    """Start the fan-out in front of `engines` (those that listen and those that do not); return a client for it."""
    server = stack.enter_context(FanoutServer([engine.url for engine in engines], options=options, **more))
    return stack.enter_context(httpx.Client(base_url=server.url, timeout=30))


def start_engines(stack: ExitStack, count: int) -> list[FakeEngine]:
    return [stack.enter_context(FakeEngine()) for _ in range(count)]


def event(number: int = 0, kind: str = "turn_end", session_id: str = "s1", **more: Any) -> dict[str, Any]:
    return {"message_id": f"m{number}", "kind": kind, "session_id": session_id, **more}


def post(client: httpx.Client, body: Any, status: int = 202) -> list[dict[str, Any]]:
    response = client.post(BOUNDARIES, json=body)
    assert response.status_code == status, response.text
    return list(response.json()["outcomes"])


def server_health(client: httpx.Client, engine: FakeEngine) -> dict[str, Any]:
    (found,) = [server for server in client.get(f"{PREFIX}/health").json()["servers"] if server["url"] == engine.url]
    return dict(found)


def test_one_event_reaches_every_server_and_the_outcomes_add_up(stack: ExitStack) -> None:
    engines = start_engines(stack, 3)
    engines[0].sessions["s1"] = 3
    engines[2].sessions["s1"] = 4
    client = start(stack, engines)
    sent = event(kind="session_end", agent="planner")
    assert post(client, sent) == [{"message_id": "m0", "status": "accepted", "blocks": 7, "bytes": 70}]
    assert [engine.events for engine in engines] == [[sent]] * 3


def test_a_batch_keeps_its_order_on_every_server(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    client = start(stack, engines)
    outcomes = post(client, [event(number) for number in range(50)])
    ids = [f"m{number}" for number in range(50)]
    assert [outcome["message_id"] for outcome in outcomes] == ids
    assert [[e["message_id"] for e in engine.events] for engine in engines] == [ids, ids]


def test_a_dead_server_gets_every_event_when_it_is_back(stack: ExitStack) -> None:
    engines = start_engines(stack, 3)
    client = start(stack, engines)
    post(client, event(0))
    engines[1].kill()
    for number in range(1, 40):
        (outcome,) = post(client, event(number))
        assert (outcome["status"], outcome["reason"]) == ("accepted", f"queued for {engines[1].url}")
    assert server_health(client, engines[1])["queued"] == 39
    engines[1].start()
    await_true(lambda: len(engines[1].message_ids) == 40, "the events arrived")
    await_true(lambda: server_health(client, engines[1])["queued"] == 0, "the queue is empty")
    for engine in engines:
        assert [e["message_id"] for e in engine.events] == [f"m{number}" for number in range(40)]
    assert server_health(client, engines[1])["delivered"] == 40


def test_a_server_that_dies_over_and_over_misses_nothing(stack: ExitStack) -> None:
    """Answers get lost, so it may see an event twice; by message id it sees all of them once, in order."""
    engines = start_engines(stack, 2)
    client = start(stack, engines)
    for number in range(60):
        if number % 20 == 5:
            engines[0].kill()
        if number % 20 == 12:
            engines[0].forget_answers = 1
            engines[0].start()
        post(client, event(number))
    expected = [f"m{number}" for number in range(60)]
    await_true(lambda: len(engines[0].message_ids) == 60, "the events arrived")
    assert engines[0].message_ids == engines[1].message_ids == expected


def test_a_lost_answer_does_not_count_twice(stack: ExitStack) -> None:
    engines = start_engines(stack, 1)
    engines[0].sessions["s1"] = 5
    engines[0].forget_answers = 1
    client = start(stack, engines)
    (outcome,) = post(client, event(kind="session_end"))
    assert (outcome["status"], outcome["blocks"], outcome["reason"]) == ("accepted", 0, f"queued for {engines[0].url}")
    await_true(lambda: server_health(client, engines[0])["queued"] == 0, "it is delivered")
    assert [e["message_id"] for e in engines[0].events] == ["m0", "m0"]
    assert server_health(client, engines[0])["delivered"] == 1
    (outcome,) = post(client, event(kind="session_end"))
    assert outcome["status"] == "duplicate"


def test_who_does_not_wait_is_answered_at_once_and_the_servers_are_still_waited_for(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    engines[1].is_open.clear()
    client = start(stack, engines)
    for number in range(5):
        response = client.post(BOUNDARIES, json=event(number), headers={"prefer": "respond-async"})
        assert (response.status_code, response.headers["preference-applied"]) == (202, "respond-async")
        assert response.json()["outcomes"][0]["status"] == "queued"
    engines[1].is_open.set()
    await_true(lambda: len(client.get(f"{PREFIX}/events").json()["events"]) == 5, "the outcomes are known")
    for engine in engines:
        assert engine.message_ids == [f"m{number}" for number in range(5)]
        assert engine.preferences == {None}
    shown = client.get(f"{PREFIX}/events").json()["events"]
    assert {record["outcome"]["status"] for record in shown} == {"ignored"}


def test_what_was_queued_is_delivered_before_a_shutdown(stack: ExitStack) -> None:
    (engine,) = start_engines(stack, 1)
    engine.delay_s = 0.5
    server = stack.enter_context(FanoutServer([engine.url], options=PATIENT, drain_s=15.0))
    with httpx.Client(base_url=server.url, timeout=30, headers={"prefer": "respond-async"}) as client:
        for number in range(20):
            assert client.post(BOUNDARIES, json=event(number)).status_code == 202
    server.stop()
    assert engine.message_ids == [f"m{number}" for number in range(20)]


def timed_post(client: httpx.Client, body: Any) -> tuple[float, dict[str, Any]]:
    """Post one event; returns the seconds it took, and the outcome."""
    began = time.monotonic()
    (outcome,) = post(client, body)
    return time.monotonic() - began, outcome


def test_a_slow_server_does_not_slow_the_answers(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    engines[1].is_open.clear()
    client = start(stack, engines, QUICK)
    timed = [timed_post(client, event(number)) for number in range(10)]
    # Only the first is waited for at all, and not for long.
    assert timed[0][0] < QUICK.request_timeout_s
    assert sum(took for took, _ in timed[1:]) < (len(timed) - 1) / 2 * QUICK.answer_timeout_s
    assert all(outcome["reason"].endswith(f"queued for {engines[1].url}") for _, outcome in timed)
    engines[1].is_open.set()
    await_true(lambda: len(engines[1].events) == 10, "the slow one got them, too")
    # Slow is not dead: nothing was sent twice, and what had gathered went together.
    assert [e["message_id"] for e in engines[1].events] == [f"m{number}" for number in range(10)]
    assert len(engines[1].requests) == 2


def test_a_server_that_was_slow_just_now_is_not_waited_for(stack: ExitStack) -> None:
    engines = start_engines(stack, 1)
    engines[0].is_open.clear()
    options = FanoutOptions(answer_timeout_s=2.0, request_timeout_s=60.0)
    client = start(stack, engines, options)
    timed_post(client, event(0))
    engines[0].is_open.set()
    await_true(lambda: server_health(client, engines[0])["delivered"] == 1, "it is delivered")
    engines[0].is_open.clear()
    took, outcome = timed_post(client, event(1))
    assert took < options.answer_timeout_s and outcome["reason"] == f"queued for {engines[0].url}"


def test_a_server_that_hangs_is_asked_again(stack: ExitStack) -> None:
    engines = start_engines(stack, 1)
    engines[0].delay_s = 60.0
    client = start(stack, engines, FanoutOptions(answer_timeout_s=0.2, request_timeout_s=0.5))
    post(client, event(0))
    await_true(lambda: server_health(client, engines[0])["retries"] >= 1, "it was given up on")
    engines[0].delay_s = 0.0
    await_true(lambda: engines[0].message_ids == ["m0"], "it arrived")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_asks_for_patience_is_tried_again(stack: ExitStack, status: int) -> None:
    engines = start_engines(stack, 1)
    engines[0].status = status
    client = start(stack, engines)
    (outcome,) = post(client, event(0))
    assert (outcome["status"], outcome["reason"]) == ("accepted", f"queued for {engines[0].url}")
    await_true(lambda: len(engines[0].requests) >= 3, "it was tried again")
    state = server_health(client, engines[0])
    assert state["last_error"] == f"{engines[0].url} answered {status}: unwell" and state["retries"] >= 2
    engines[0].status = None
    await_true(lambda: engines[0].message_ids == ["m0"], "it arrived")


def test_retry_after_is_heeded(stack: ExitStack) -> None:
    engines = start_engines(stack, 1)
    engines[0].status, engines[0].retry_after = 429, "2"
    client = start(stack, engines)
    began = time.monotonic()
    post(client, event(0))
    engines[0].status = None
    await_true(lambda: bool(engines[0].events), "it arrived")
    assert time.monotonic() - began >= 1.9
    assert len(engines[0].requests) == 2


def test_a_refusal_is_final_and_told_with_its_text(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    engines[0].sessions["s1"] = 2
    engines[1].status = 403
    client = start(stack, engines)
    (outcome,) = post(client, event(0))
    assert (outcome["status"], outcome["blocks"]) == ("accepted", 2)
    assert outcome["reason"] == f"{engines[1].url} answered 403: unwell"
    engines[0].status = 403
    (outcome,) = post(client, event(1))
    assert outcome["status"] == "rejected" and engines[0].url in outcome["reason"] and engines[1].url in outcome["reason"]
    time.sleep(0.5)
    assert len(engines[1].requests) == 2
    state = server_health(client, engines[1])
    assert (state["queued"], state["rejected"], state["delivered"]) == (0, 2, 0)


def test_one_refused_event_takes_no_other_with_it(stack: ExitStack) -> None:
    engines = start_engines(stack, 1)
    engines[0].spoilt = {"m3"}
    client = start(stack, engines)
    outcomes = post(client, [event(number) for number in range(8)])
    assert engines[0].message_ids == [f"m{number}" for number in range(8) if number != 3]
    assert [outcome["status"] for outcome in outcomes] == ["ignored"] * 3 + ["rejected"] + ["ignored"] * 4
    assert outcomes[3]["reason"].endswith("answered 422: body.0.kind: unknown kind")


def test_what_has_gathered_is_not_sent_in_one_body_that_a_server_would_refuse(stack: ExitStack) -> None:
    engine = FakeEngine()
    stack.callback(engine.kill)
    client = start(stack, [engine])
    spawn = {"instruction": "x" * 60_000, "context": "é" * 60_000}
    for number in range(30):
        post(client, event(number, kind="subagent_spawn", spawn=spawn))
    engine.start()
    await_true(lambda: len(engine.message_ids) == 30, "they arrived")
    assert 4 < len(engine.requests) < 30
    assert all(len(json.dumps(body, ensure_ascii=False).encode()) <= MAX_BODY_BYTES for _, _, body in engine.requests if body)


def test_a_full_queue_loses_the_oldest_and_counts_them(stack: ExitStack) -> None:
    engine = FakeEngine()
    stack.callback(engine.kill)
    client = start(stack, [engine], FanoutOptions(queue_size=10))
    for number in range(25):
        post(client, event(number))
    state = server_health(client, engine)
    assert state["queued"] + state["dropped"] == 25
    assert state["queued"] in (10, 11)  # one more may be on its way
    engine.start()
    await_true(lambda: server_health(client, engine)["queued"] == 0, "the rest arrived")
    assert engine.message_ids == [f"m{number}" for number in range(25)][-len(engine.message_ids) :]
    assert len(engine.message_ids) + server_health(client, engine)["dropped"] == 25


def test_an_event_that_does_not_fit_says_so(stack: ExitStack) -> None:
    engine = FakeEngine()
    client = start(stack, [engine], FanoutOptions(queue_size=3))
    outcomes = post(client, [event(number) for number in range(5)])
    assert [outcome["status"] for outcome in outcomes] == ["rejected"] * 2 + ["accepted"] * 3
    assert outcomes[0]["reason"] == f"dropped: the queue for {engine.url} is full"


def test_what_waits_too_long_is_dropped_and_counted(stack: ExitStack) -> None:
    engine = FakeEngine()
    stack.callback(engine.kill)
    client = start(stack, [engine], FanoutOptions(answer_timeout_s=0.2, max_age_s=1.0))
    post(client, [event(0), event(1)])
    time.sleep(1.3)
    post(client, event(2))
    await_true(lambda: server_health(client, engine)["expired"] == 2, "the old ones are gone")
    engine.start()
    # The new one may have become too old meanwhile; the old ones never come.
    await_true(lambda: server_health(client, engine)["queued"] == 0, "the queue is empty")
    assert set(engine.message_ids) <= {"m2"}


def test_the_engines_get_their_own_token(stack: ExitStack) -> None:
    engine = stack.enter_context(FakeEngine(token="theirs"))
    settings = ControlSettings(tokens=(SecretStr("ours"),))
    client = start(stack, [engine], settings=settings, engine_token="theirs")
    assert client.post(BOUNDARIES, json=event()).status_code == 401
    client.headers["authorization"] = "Bearer theirs"
    assert client.post(BOUNDARIES, json=event()).status_code == 401
    client.headers["authorization"] = "Bearer ours"
    (outcome,) = post(client, event())
    assert outcome["status"] == "ignored" and engine.message_ids == ["m0"]
    assert client.get(f"{PREFIX}/tiers").status_code == 200


def test_a_wrong_token_is_told_by_outcome_and_health(stack: ExitStack) -> None:
    engine = stack.enter_context(FakeEngine(token="theirs"))
    client = start(stack, [engine], engine_token="wrong")
    (outcome,) = post(client, event())
    assert outcome["status"] == "rejected"
    assert outcome["reason"] == f"{engine.url} answered 401: The token is not valid here."
    response = client.get(f"{PREFIX}/health")
    assert response.status_code == 503
    assert "The token is not valid here." in response.json()["servers"][0]["detail"]
    response = client.get(f"{PREFIX}/tiers")
    assert response.status_code == 503 and "401" in response.json()["detail"]


def test_hints_reach_every_server(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    down = FakeEngine()
    stack.callback(down.kill)
    client = start(stack, [*engines, down])
    retain = {
        "action_id": "a1",
        "action_type": "kv.retain",
        "action_version": "1.0",
        "payload": {"session_id": "s1", "ttl_s": 60.0},
    }
    boundary = {
        "action_id": "a2",
        "action_type": "lifetime.boundary",
        "action_version": "1.0",
        "payload": {"kind": "turn_end", "session_id": "s1"},
    }
    response = client.post(f"{PREFIX}/hints", json={"protocol_version": "0.1", "message_id": "h1", "actions": [retain, boundary]})
    assert response.status_code == 200, response.text
    first, second = response.json()["outcomes"]
    assert first == {"action_id": "a1", "status": "accepted", "reason": f"queued for {down.url}", "blocks": 4, "bytes": 40}
    assert second["action_id"] == "a2"
    down.start()
    await_true(lambda: bool(down.events), "the one that was down got them")
    for engine in [*engines, down]:
        (envelope,) = engine.hints
        assert (envelope["protocol_version"], envelope["message_id"]) == ("0.1", "h1")
        (action,) = envelope["actions"]
        assert action["payload"] == {"session_id": "s1", "ttl_s": 60.0, "priority": 35}
        assert engine.message_ids == ["h1/a2"]


def test_a_hint_for_servers_that_are_all_down_is_deferred(stack: ExitStack) -> None:
    down = FakeEngine()
    client = start(stack, [down])
    action = {"action_id": "a", "action_type": "kv.release", "action_version": "1.0", "payload": {"session_id": "s"}}
    response = client.post(f"{PREFIX}/hints", json={"protocol_version": "0.1", "message_id": "h", "actions": [action]})
    (outcome,) = response.json()["outcomes"]
    assert (outcome["status"], outcome["reason"]) == ("deferred", f"queued for {down.url}")


@pytest.mark.parametrize("session_id", ["s1", "a/b c?d#e%2F"])
def test_a_release_reaches_every_server(stack: ExitStack, session_id: str) -> None:
    engines = start_engines(stack, 2)
    for engine in engines:
        engine.sessions = {session_id: 4}
    client = start(stack, engines)
    response = client.delete(f"{PREFIX}/sessions/{quote(session_id, safe='')}")
    assert response.status_code == 200, response.text
    assert (response.json()["outcome"]["status"], response.json()["outcome"]["blocks"]) == ("accepted", 8)
    assert [engine.sessions for engine in engines] == [{}, {}]


def test_tiers_and_sessions_of_all_servers_are_merged(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    engines[0].sessions = {"a": 1, "both": 2}
    engines[1].sessions = {"both": 3, "z": 4}
    down = FakeEngine()
    client = start(stack, [*engines, down])
    tiers = client.get(f"{PREFIX}/tiers").json()
    assert tiers["tiers"]["hbm"] == {"capacity_blocks": 200, "used_blocks": 10}
    assert [(e["server"], "missing" in e) for e in tiers["engines"]] == [
        (engines[0].url, False), (engines[1].url, False), (down.url, True)
    ]  # fmt: skip
    page = client.get(f"{PREFIX}/sessions", params={"limit": 2, "segments": "true"}).json()
    assert [(view["session_id"], view["held"]["hbm"]["blocks"]) for view in page["sessions"]] == [("a", 1), ("both", 5)]
    rest = client.get(f"{PREFIX}/sessions", params={"after": page["next"]}).json()
    assert [view["session_id"] for view in rest["sessions"]] == ["z"]
    assert client.get(f"{PREFIX}/sessions", params={"limit": 500}).status_code == 200
    assert client.get(f"{PREFIX}/sessions/both").json()["held"]["hbm"]["blocks"] == 5


def test_an_unknown_session_is_404_only_if_every_server_says_so(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    client = start(stack, engines)
    assert client.get(f"{PREFIX}/sessions/nobody").status_code == 404
    engines[1].kill()
    response = client.get(f"{PREFIX}/sessions/nobody")
    assert response.status_code == 503
    assert engines[1].url in response.json()["detail"]


def test_a_look_does_not_wait_for_a_slow_server(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    engines[0].sessions = {"a": 1}
    engines[1].is_open.clear()
    client = start(stack, engines, QUICK)
    for path in ("tiers", "sessions", "sessions/a", "health"):
        began = time.monotonic()
        assert client.get(f"{PREFIX}/{path}").status_code == 200
        assert time.monotonic() - began < QUICK.request_timeout_s / 2
    assert server_health(client, engines[1])["status"] == "stalled"


def test_health_is_503_only_when_no_server_is_left(stack: ExitStack) -> None:
    engines = start_engines(stack, 2)
    client = start(stack, engines)
    assert client.get(f"{PREFIX}/health").json()["status"] == "ok"
    engines[0].kill()
    response = client.get(f"{PREFIX}/health")
    assert response.status_code == 200
    health = response.json()
    assert health["detail"].startswith(f"1 of 2 servers: {engines[0].url}: cannot be reached: ")
    assert [server["status"] for server in health["servers"]] == ["dead", "ok"]
    engines[1].kill()
    response = client.get(f"{PREFIX}/health")
    assert (response.status_code, response.json()["status"]) == (503, "dead")


def test_health_passes_on_what_a_server_says(stack: ExitStack) -> None:
    engines = start_engines(stack, 1)
    engines[0].health_status = "stalled"
    client = start(stack, engines)
    response = client.get(f"{PREFIX}/health")
    assert (response.status_code, response.json()["status"]) == (503, "stalled")


def test_a_url_of_something_else_is_told(stack: ExitStack) -> None:
    class Other(ServerThread):
        def build_app(self) -> Any:
            from fastapi import FastAPI

            app = FastAPI()
            app.post(BOUNDARIES)(lambda: "hello")
            return app

    other = stack.enter_context(Other())
    server = stack.enter_context(FanoutServer([other.url], options=PATIENT))
    client = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
    (outcome,) = post(client, event())
    assert outcome["status"] == "rejected" and "gave no valid answer" in outcome["reason"]
    assert client.get(f"{PREFIX}/health").status_code == 503


def test_a_shutdown_delivers_what_waits(stack: ExitStack) -> None:
    engine = FakeEngine()
    stack.callback(engine.kill)
    server = FanoutServer([engine.url], options=PATIENT, drain_s=15.0)
    stack.callback(server.kill)
    server.start()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        post(client, [event(number) for number in range(5)])
    engine.start()
    server.stop()
    assert engine.message_ids == [f"m{number}" for number in range(5)]


def test_a_shutdown_tries_at_once_a_server_that_was_long_away(stack: ExitStack) -> None:
    engine = FakeEngine()
    stack.callback(engine.kill)
    server = FanoutServer([engine.url], options=PATIENT, drain_s=1.5)
    stack.callback(server.kill)
    server.start()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        post(client, event(0))
        await_true(lambda: server_health(client, engine)["retries"] >= 7, "the pauses have become long")
    engine.start()
    server.stop()
    assert engine.message_ids == ["m0"]


def test_a_shutdown_is_bounded_and_says_what_is_lost(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    server = FanoutServer([engine.url], options=PATIENT, drain_s=0.5)
    stack.callback(server.kill)
    server.start()
    with httpx.Client(base_url=server.url, timeout=30) as client:
        post(client, [event(number) for number in range(5)])
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < PATIENT.answer_timeout_s
    assert f"not delivered to {engine.url}: 5 event(s)" in caplog.text


def test_an_environments_proxy_is_not_asked(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = KeptPort()
    stack.callback(nobody.close)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{nobody.number}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    engines = start_engines(stack, 1)
    server = stack.enter_context(FanoutServer([engines[0].url], options=PATIENT))
    with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
        (outcome,) = post(client, event())
    assert outcome["status"] == "ignored"


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://localhost:8000/", "http://localhost:8000"),
        ("https://host/v1/", "https://host"),
        ("https://host/models/a/v1", "https://host/models/a"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_engines_url_is_its_root(given: str, root: str) -> None:
    assert normalize_engine_url(given) == root


@pytest.mark.parametrize("given", ["localhost:8000", "ftp://host", "http://", "http://user:secret@host", "http://host?a=b", "http://host:x"])
def test_a_url_that_is_none_is_refused_without_its_password(given: str) -> None:
    with pytest.raises(EngineUrlError) as caught:
        normalize_engine_url(given)
    assert "secret" not in str(caught.value)
