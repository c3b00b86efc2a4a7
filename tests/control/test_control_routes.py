# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from control_fakes import API, TURN_END, FakeEngines, build_app, send, session_view

from vllm_lifetime.boundaries import MAX_BATCH
from vllm_lifetime.control import ControlSettings
from vllm_lifetime.control.routes import MAX_BODY_BYTES, MAX_ERRORS, MAX_PAGE
from vllm_lifetime.hints import MAX_ACTIONS

pytestmark = pytest.mark.usefixtures("way")

BOUNDARIES = f"{API}/boundaries"
HINTS = f"{API}/hints"
SESSIONS = f"{API}/sessions"
TIERS = f"{API}/tiers"
EVENTS = f"{API}/events"
HEALTH = f"{API}/health"
RETAIN = {"action_id": "a1", "action_type": "kv.retain", "action_version": "1.0", "payload": {"session_id": "s1", "ttl_s": 60}}


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
    assert state["tiers"] == {
        "hbm": {"capacity_blocks": 30, "used_blocks": 3},
        "flash": {"capacity_blocks": 150, "bytes_written": 300, "oldest_io_s": 1.0},
    }
    assert state["classes"] == {"hbm": {"lead": 3, "worker": 3}}
    assert state["counters"] == {
        "prompt_tokens": 21,
        "hit_tokens": {"hbm": 6, "host": 3, "flash": 3},
        "requests": 3,
        "evictions": {"retired": 0, "demoted": 0, "lost": 0},
    }
    assert [engine["tiers"]["hbm"]["used_blocks"] for engine in state["engines"]] == [0, 1, 2]
    assert state["engines"][0]["tiers"]["hbm"]["path"] == "x"


# ---------------------------------------------------------------------- content type


@pytest.mark.parametrize(
    "given", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "json"]
)
@pytest.mark.parametrize("path", [BOUNDARIES, HINTS])
def test_a_body_that_a_form_of_a_foreign_page_could_send_is_415(path: str, given: str) -> None:
    engines = FakeEngines()
    response = send(build_app(engines), "POST", path, content=json.dumps(TURN_END), headers={"content-type": given})
    assert response.status_code == 415
    assert "application/json" in response.json()["detail"]
    assert engines.calls == []


def test_the_content_type_may_have_parameters_and_any_case() -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert send(build_app(FakeEngines()), "POST", BOUNDARIES, content=json.dumps(TURN_END), headers=headers).status_code == 202


# ---------------------------------------------------------------------- hints


def envelope(*actions: dict[str, Any]) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "e1", "actions": list(actions)}


def test_actions_keep_their_order_whatever_becomes_of_them() -> None:
    engines = FakeEngines(count=2)
    ended = {"kind": "session_end", "session_id": "s1"}
    actions = [
        RETAIN,
        RETAIN | {"action_id": "a2", "action_type": "kv.fetch"},
        RETAIN | {"action_id": "a3", "action_type": "lifetime.boundary", "payload": ended},
        RETAIN | {"action_id": "a4", "payload": {"session_id": "s1"}},
        RETAIN | {"action_id": "a5", "action_type": "kv.release", "payload": {"workflow_id": "w1"}},
        RETAIN,
    ]
    response = send(build_app(engines), "POST", HINTS, json=envelope(*actions))
    assert response.status_code == 200
    answer = response.json()
    assert answer["message_id"] == "e1"
    assert [(outcome["action_id"], outcome["status"]) for outcome in answer["outcomes"]] == [
        ("a1", "accepted"),
        ("a2", "rejected"),
        ("a3", "accepted"),
        ("a4", "rejected"),
        ("a5", "accepted"),
        ("a1", "duplicate"),
    ]
    assert "kv.fetch" in answer["outcomes"][1]["reason"]
    assert "payload.ttl_s" in answer["outcomes"][3]["reason"]
    assert [method for method, _ in engines.calls] == ["hints", "boundaries", "hints"]
    (first, events, last) = [payload for _, payload in engines.calls]
    assert first == {"message_id": "e1", "actions": [RETAIN | {"payload": {"session_id": "s1", "ttl_s": 60.0, "priority": 35}}]}
    assert events == {"events": [ended | {"message_id": "e1/a3"}]}
    assert last["actions"][0]["payload"] == {"workflow_id": "w1"}


def test_what_one_engine_does_is_not_hidden_by_others_that_miss_it() -> None:
    (outcome,) = send(build_app(FakeEngines(count=3)), "POST", HINTS, json=envelope(RETAIN)).json()["outcomes"]
    assert outcome == {"action_id": "a1", "status": "accepted", "blocks": 3, "bytes": 300}


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        (envelope() | {"protocol_version": "0.2"}, ["body", "protocol_version"]),
        (envelope() | {"message_id": 5}, ["body", "message_id"]),
        (envelope(RETAIN | {"payload": []}), ["body", "actions", 0, "payload"]),
        (envelope(*[RETAIN] * (MAX_ACTIONS + 1)), ["body", "actions"]),
        ([], ["body"]),
    ],
)
def test_a_malformed_envelope_is_422_and_nothing_is_forwarded(body: Any, loc: list[str | int]) -> None:
    engines = FakeEngines()
    response = send(build_app(engines), "POST", HINTS, json=body)
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == loc
    assert engines.calls == []


def test_an_envelope_without_work_asks_no_engine() -> None:
    engines = FakeEngines(error=RuntimeError("gone"))
    assert send(build_app(engines), "POST", HINTS, json=envelope()).json() == {"message_id": "e1", "outcomes": []}
    assert engines.calls == []


# ---------------------------------------------------------------------- sessions


@pytest.mark.parametrize(
    "session_id",
    [
        "s1",
        "a/b",
        "/",
        "a b?c#d%2Fe",
        "…/日本",
        "line\nbreak",
        "ends with\n",
        "\x00",
        "openapi.json",
        "a/../b",
        "x" * 256,
        "😀" * 256,
    ],
)
def test_a_session_is_found_whatever_its_id_is_made_of(session_id: str) -> None:
    engines = FakeEngines()
    engines.sessions[0][session_id] = session_view(session_id)
    path = f"{SESSIONS}/{quote(session_id, safe='')}"
    response = send(build_app(engines), "GET", path)
    assert response.status_code == 200
    assert response.json() == session_view(session_id)
    released = send(build_app(engines), "DELETE", path)
    assert released.status_code == 200
    (payload,) = [payload for method, payload in engines.calls if method == "release"]
    assert payload["session_id"] == session_id
    assert released.json()["outcome"] == {"message_id": payload["message_id"], "status": "accepted", "blocks": 0, "bytes": 0}


@pytest.mark.parametrize("session_id", ["", "x" * 257])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_id_that_no_session_can_have_is_422(method: str, session_id: str) -> None:
    engines = FakeEngines()
    response = send(build_app(engines), method, f"{SESSIONS}/{session_id}")
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["path", "session_id"]
    assert engines.calls == []


def test_an_unknown_session_is_404() -> None:
    response = send(build_app(FakeEngines(count=2)), "GET", f"{SESSIONS}/s1")
    assert response.status_code == 404
    assert response.json() == {"detail": "No engine knows the session 's1'."}


def test_two_releases_are_two_messages() -> None:
    engines = FakeEngines()
    app = build_app(engines)
    for _ in range(2):
        send(app, "DELETE", f"{SESSIONS}/s1")
    assert len({payload["message_id"] for _, payload in engines.calls}) == 2


def test_pages_of_sessions_show_each_once_though_several_engines_know_it() -> None:
    engines = FakeEngines(count=2)
    for number in range(10):
        engines.sessions[number % 2][f"s{number}"] = session_view(f"s{number}")
    engines.sessions[0]["s1"] = session_view("s1", idle_s=0.5, running_requests=3)
    app = build_app(engines)
    shown: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = send(app, "GET", SESSIONS, params={"limit": 3, **after}).json()
        shown += page["sessions"]
        assert len(page["sessions"]) == 3 or page["next"] is None
        if page["next"] is None:
            break
        after = {"after": page["next"]}
    assert [view["session_id"] for view in shown] == [f"s{number}" for number in range(10)]
    assert shown[1]["running_requests"] == 4
    assert shown[1]["idle_s"] == 0.5
    assert shown[1]["held"]["hbm"]["private_bytes"] == 400
    assert "agents" not in shown[0]


def test_segments_are_shown_when_asked_for() -> None:
    engines = FakeEngines()
    engines.sessions[0]["s1"] = session_view("s1")
    (view,) = send(build_app(engines), "GET", SESSIONS, params={"segments": "true"}).json()["sessions"]
    assert view["agents"][0]["segments"][0]["class"] == "lead"
    assert engines.calls == [("sessions", {"limit": 101, "after": None, "segments": True})]


@pytest.mark.parametrize("query", ["limit=0", f"limit={MAX_PAGE + 1}", "limit=x", "segments=perhaps", "after=" + "x" * 257])
def test_a_query_out_of_bounds_is_422(query: str) -> None:
    engines = FakeEngines()
    response = send(build_app(engines), "GET", f"{SESSIONS}?{query}")
    assert response.status_code == 422
    assert response.json()["detail"][0]["loc"] == ["query", query.partition("=")[0]]
    assert engines.calls == []


# ---------------------------------------------------------------------- events


def test_events_are_shown_with_their_outcomes_and_read_on_from_where_one_was() -> None:
    app = build_app(FakeEngines())
    assert send(app, "GET", EVENTS).json() == {"events": [], "next": 0}
    for number in range(5):
        send(app, "POST", BOUNDARIES, json=TURN_END | {"message_id": f"m{number}"})
    latest = send(app, "GET", EVENTS, params={"limit": 2}).json()
    assert [record["sequence"] for record in latest["events"]] == [4, 5]
    assert latest["events"][1]["event"] == TURN_END | {"message_id": "m4"}
    assert latest["events"][1]["outcome"] == {"message_id": "m4", "status": "accepted", "blocks": 0, "bytes": 0}
    assert latest["events"][1]["received_at_s"] == pytest.approx(time.time(), abs=60)
    assert send(app, "GET", EVENTS, params={"after": latest["next"]}).json() == {"events": [], "next": 5}
    first = send(app, "GET", EVENTS, params={"after": 0, "limit": 3}).json()
    assert [record["event"]["message_id"] for record in first["events"]] == ["m0", "m1", "m2"]
    assert first["next"] == 3


def test_an_event_that_no_engine_took_is_not_shown() -> None:
    app = build_app(FakeEngines(error=RuntimeError("gone")))
    assert send(app, "POST", BOUNDARIES, json=TURN_END).status_code == 503
    assert send(app, "GET", EVENTS).json()["events"] == []


def test_boundaries_of_hints_are_shown_too() -> None:
    app = build_app(FakeEngines())
    action = RETAIN | {"action_type": "lifetime.boundary", "payload": {"kind": "turn_end", "session_id": "s1"}}
    send(app, "POST", HINTS, json=envelope(action))
    assert send(app, "GET", EVENTS).json()["events"][0]["event"]["message_id"] == "e1/a1"


# ---------------------------------------------------------------------- health


def test_health_is_ok_while_transfers_come_to_an_end() -> None:
    response = send(build_app(FakeEngines(count=2)), "GET", HEALTH)
    assert response.status_code == 200
    health = response.json()
    assert (health["status"], health["oldest_io_s"], health["deadline_s"], health["flash_faults"]) == ("ok", 0, 2, 1)


def test_a_transfer_older_than_the_deadline_is_503() -> None:
    engines = FakeEngines(count=2)
    engines.oldest_io_s = 2.5
    response = send(build_app(engines), "GET", HEALTH)
    assert response.status_code == 503
    assert response.json()["status"] == "stalled"
    assert response.json()["detail"] == "A transfer has taken 2.5 s, longer than 2 s."


def test_an_engine_that_is_slow_to_answer_is_stalled() -> None:
    response = send(build_app(FakeEngines(delay_s=5.0), health_timeout_s=0.01), "GET", HEALTH)
    assert response.status_code == 503
    assert response.json() == {"status": "stalled", "detail": "An engine did not answer within 0.01 seconds.", "engines": []}


@pytest.mark.parametrize("engines", [FakeEngines(error=RuntimeError("gone")), FakeEngines(count=0)])
def test_an_engine_that_is_gone_is_dead(engines: FakeEngines) -> None:
    response = send(build_app(engines), "GET", HEALTH)
    assert response.status_code == 503
    assert response.json()["status"] == "dead"


# ---------------------------------------------------------------------- limits


def test_more_events_than_the_limit_are_429_and_say_when_to_come_back() -> None:
    engines = FakeEngines()
    app = build_app(engines, settings=ControlSettings(events_per_s=2, events_burst=10))
    assert send(app, "POST", BOUNDARIES, json=[TURN_END] * 10).status_code == 202
    response = send(app, "POST", BOUNDARIES, json=[TURN_END] * 8)
    assert response.status_code == 429
    assert 1 <= int(response.headers["retry-after"]) <= 4
    assert "2 events per second" in response.json()["detail"]
    assert send(app, "POST", HINTS, json=envelope(RETAIN)).status_code == 429
    assert send(app, "DELETE", f"{SESSIONS}/s1").status_code == 429
    assert len(engines.calls) == 1
    # Who only looks is served.
    assert send(app, "GET", EVENTS).status_code == 200


@pytest.mark.parametrize("depth", [190, 1_000, 100_000])
@pytest.mark.parametrize("path", [BOUNDARIES, HINTS])
@pytest.mark.parametrize("is_closed", [True, False])
def test_json_nested_deep_is_422(path: str, depth: int, is_closed: bool) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        body = opening * depth + ("1" + closing * depth if is_closed else "")
        assert send(build_app(FakeEngines()), "POST", path, content=body).status_code == 422


def test_a_payload_nested_deep_is_only_refused_itself() -> None:
    payload: dict[str, Any] = {"session_id": "s1", "ttl_s": 1}
    for _ in range(150):
        payload = {"session_id": "s1", "x": payload}
    response = send(
        build_app(FakeEngines()), "POST", HINTS, json=envelope(RETAIN | {"payload": payload}, RETAIN | {"action_id": "a2"})
    )
    assert [outcome["status"] for outcome in response.json()["outcomes"]] == ["rejected", "accepted"]


@pytest.mark.parametrize("number", ["1" * 5000, "1e999", "-1", "1" * 400, "true", '"1"'])
def test_numbers_out_of_all_bounds_are_422(number: str) -> None:
    body = json.dumps(TURN_END)[:-1] + f', "expected_return_s": {number}}}'
    assert send(build_app(FakeEngines()), "POST", BOUNDARIES, content=body).status_code == 422


# ---------------------------------------------------------------------- on vLLM's app


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
    assert send(app, "GET", f"{SESSIONS}?limit=x").status_code == 422
    assert send(app, "GET", TIERS).json() == {"detail": "An engine is not available: gone"}
