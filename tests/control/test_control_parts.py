# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from control_fakes import session_view

from vllm_lifetime.boundaries import Boundary, Outcome
from vllm_lifetime.control.errors import RateLimited
from vllm_lifetime.control.event_log import MAX_TEXT_LENGTH, MAX_TOOLS, EventLog
from vllm_lifetime.control.merging import merge_sessions, page_sessions
from vllm_lifetime.control.rate_limit import TokenBucket
from vllm_lifetime.control.views import SessionsPage, SessionView


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# ---------------------------------------------------------------------- rate limit


def test_a_bucket_lets_pass_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(10, 50, clock)
    bucket.take(50)
    with pytest.raises(RateLimited) as error:
        bucket.take(1)
    assert error.value.retry_after_s == pytest.approx(0.1)
    assert error.value.headers == {"Retry-After": "1"}
    clock.now_s += 1
    bucket.take(10)
    with pytest.raises(RateLimited) as error:
        bucket.take(25)
    assert error.value.headers == {"Retry-After": "3"}
    clock.now_s += 1000
    bucket.take(50)
    with pytest.raises(RateLimited):
        bucket.take(1)


def test_more_than_a_bucket_holds_passes_when_it_is_full_and_is_paid_off() -> None:
    clock = Clock()
    bucket = TokenBucket(10, 50, clock)
    bucket.take(100)
    clock.now_s += 4.9
    with pytest.raises(RateLimited):
        bucket.take(1)
    clock.now_s += 0.3
    bucket.take(1)


# ---------------------------------------------------------------------- events


def fill(log: EventLog, first: int, last: int, **fields: Any) -> None:
    for number in range(first, last + 1):
        event = Boundary(message_id=f"m{number}", kind="turn_end", session_id="s", **fields)
        log.add([(float(number), event)], [Outcome(message_id=event.message_id, status="accepted")])


def numbers(log: EventLog, after: int | None, limit: int = 100) -> list[int]:
    page = log.read(after, limit)
    for record in page.events:
        assert record.event.message_id == f"m{record.sequence}" and record.received_at_s == record.sequence
    assert page.next == (page.events[-1].sequence if page.events else log.read(None, 1).next)
    return [record.sequence for record in page.events]


def test_the_ring_forgets_the_oldest_and_keeps_its_numbers() -> None:
    log = EventLog(5)
    fill(log, 1, 8)
    assert numbers(log, None) == [4, 5, 6, 7, 8]
    assert numbers(log, None, 2) == [7, 8]
    assert numbers(log, 0) == [4, 5, 6, 7, 8]
    assert numbers(log, 5, 2) == [6, 7]
    assert numbers(log, 8) == []


def test_a_reader_of_a_server_that_restarted_begins_anew() -> None:
    log = EventLog(5)
    fill(log, 1, 3)
    assert numbers(log, 700) == [1, 2, 3]


def test_long_spawn_records_are_not_kept_whole() -> None:
    log = EventLog(5)
    fill(log, 1, 1, spawn={"instruction": "x" * 60_000, "context": "short", "tools": [f"t{n}" for n in range(200)]})
    spawn = log.read(None, 1).events[0].event.spawn
    assert spawn is not None and spawn.instruction is not None
    assert len(spawn.instruction) == MAX_TEXT_LENGTH and spawn.instruction.endswith("…")
    assert (spawn.context, len(spawn.tools)) == ("short", MAX_TOOLS)


# ---------------------------------------------------------------------- sessions of several engines


def view(session_id: str | None, **changes: Any) -> SessionView:
    return SessionView.model_validate(session_view(session_id, **changes))


def test_a_session_on_two_engines_is_one() -> None:
    there = view(
        "s1",
        workflow_ids=["w2", "w1"],
        state="ended",
        generation=3,
        idle_s=9.0,
        last_boundary={"kind": "turn_end", "age_s": 9.0},
        held={"flash": {"blocks": 1, "private_blocks": 1, "bytes": 1, "private_bytes": 1}},
    )
    here = view("s1", workflow_ids=["w1"], last_boundary={"kind": "session_start", "age_s": 2.0})
    merged = merge_sessions([there, here])
    assert (merged.state, merged.generation, merged.idle_s, merged.running_requests) == ("active", 3, 1.5, 2)
    assert merged.workflow_ids == ["w1", "w2"]
    assert merged.last_boundary is not None and merged.last_boundary.kind == "session_start"
    assert {tier: held.blocks for tier, held in merged.held.items()} == {"flash": 1, "hbm": 4}
    assert merged.agents is not None
    (agent,) = merged.agents
    assert (agent.agent, agent.running_requests, len(agent.segments)) == ("planner", 2, 2)


def test_agents_are_told_apart_by_instance() -> None:
    (agent,) = session_view("s1")["agents"]
    one, two = (view("s1", agents=[agent | {"agent_id": agent_id, "turn": 4}]) for agent_id in ("a", "b"))
    gone = view("s1", agents=[agent | {"agent_id": "a", "state": "returned", "turn": 7}])
    merged = merge_sessions([one, two, gone])
    assert merged.agents is not None
    assert [(agent.agent_id, agent.state, agent.turn) for agent in merged.agents] == [("a", "active", 7), ("b", "active", 4)]


def test_sessions_without_a_name_stand_last() -> None:
    pages = [
        SessionsPage(sessions=[view("s2"), view(None, workflow_ids=["w1"])], total=2),
        SessionsPage(sessions=[view("s1"), view(None, workflow_ids=["w1"]), view(None, workflow_ids=["w0"])], total=3),
    ]
    page = page_sessions(pages, 10)
    assert [(shown.session_id, shown.workflow_ids) for shown in page.sessions] == [
        ("s1", ["s1"]),
        ("s2", ["s2"]),
        (None, ["w0"]),
        (None, ["w1"]),
    ]
    assert (page.total, page.next) == (4, None)
    assert page_sessions(pages, 1).next == "s1"


def test_there_is_more_if_a_server_that_is_asked_says_so() -> None:
    assert page_sessions([SessionsPage(sessions=[view("s1")], total=9, next="s1")], 1).next == "s1"
