# SPDX-License-Identifier: Apache-2.0
"""When requests arrive and end in a closed loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.simulate.schedule import Event, EventKind, Schedule, make_schedule, mean_final_context_blocks, split_trace
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession


def request(after: int, gap_s: float, service_s: float = 1.0, num_blocks: int = 1) -> TraceRequest:
    return TraceRequest(np.arange(num_blocks), after, gap_s, service_s, 16 * num_blocks, 1)


def of_kind(schedule: Schedule, kind: EventKind) -> list[Event]:
    return [event for event in schedule.events if event.kind is kind]


def trace(*sessions: TraceSession) -> Trace:
    return Trace("made up", 16, sessions)


def test_an_endless_concurrency_takes_no_time() -> None:
    assert make_schedule(trace(), 10**400).events == []


def test_the_next_session_begins_when_one_has_ended_and_pauses_are_capped() -> None:
    long = TraceSession("long", (request(-1, 0.0), request(0, 100.0)))
    short = TraceSession("short", (request(-1, 2.0, 4.0),))
    schedule = make_schedule(trace(long, short, short), concurrency=2, idle_cap_s=10.0)
    starts = [(event.at_s, event.session) for event in of_kind(schedule, EventKind.START)]
    ends = [(event.at_s, event.session, event.ends_session) for event in of_kind(schedule, EventKind.END)]
    assert starts == [(0.0, 0), (2.0, 1), (8.0, 2), (11.0, 0)]
    assert ends == [(1.0, 0, False), (6.0, 1, True), (12.0, 2, True), (12.0, 0, True)] or ends[-2:] == ends[:-3:-1]
    assert [event.access for event in of_kind(schedule, EventKind.START)] == [0, 1, 2, 3]


def test_requests_that_wait_for_the_same_one_run_side_by_side() -> None:
    session = TraceSession("s", (request(-1, 0.0), request(0, 1.0, 5.0), request(0, 2.0, 1.0), request(2, 0.0)))
    schedule = make_schedule(trace(session), concurrency=1)
    events = [event for event in schedule.events if event.kind is not EventKind.ARRIVAL]
    assert [(event.at_s, event.kind is EventKind.END, event.request) for event in events] == [
        (0.0, False, 0),
        (1.0, True, 0),
        (2.0, False, 1),
        (3.0, False, 2),
        (4.0, True, 2),
        (4.0, False, 3),
        (5.0, True, 3),
        (7.0, True, 1),
    ]
    assert schedule.events[-1].ends_session


def test_sessions_with_an_arrival_come_then_whatever_else_runs() -> None:
    open_loop = TraceSession("open", (request(-1, 0.0),), arrival_s=5.0)
    closed = TraceSession("closed", (request(-1, 0.0, 2.0),))
    schedule = make_schedule(trace(open_loop, closed, closed, closed), concurrency=1)
    assert [(event.at_s, event.session) for event in of_kind(schedule, EventKind.START)] == [(0, 1), (2, 2), (4, 3), (5, 0)]


def private(number: int, *num_blocks: int, service_s: float = 1.0) -> TraceSession:
    """A session of one request after another, without pauses, whose prompts others share nothing of."""
    blocks = 1000 * (number + 1) + np.arange(max(num_blocks))
    requests = (TraceRequest(blocks[:num], i - 1, 0.0, service_s, 16 * num, 1) for i, num in enumerate(num_blocks))
    return TraceSession(f"s{number}", tuple(requests))


def test_a_request_waits_until_its_prompt_fits_and_holds_up_those_behind_it() -> None:
    """The third would fit beside the first, but the second came before it. What comes after shifts accordingly."""
    sessions = (private(0, 6, 7, service_s=5.0), private(1, 5), private(2, 1))
    schedule = make_schedule(trace(*sessions), 3, capacity_blocks=10)
    assert [(event.at_s, event.session) for event in of_kind(schedule, EventKind.ARRIVAL)] == [(0, 0), (0, 1), (0, 2), (5, 0)]
    assert [(event.at_s, event.session) for event in of_kind(schedule, EventKind.START)] == [(0, 0), (5, 1), (5, 2), (6, 0)]
    assert [(event.at_s, event.session) for event in of_kind(schedule, EventKind.END)] == [(5, 0), (6, 1), (6, 2), (11, 0)]


def test_blocks_that_running_requests_share_take_room_once() -> None:
    blocks = np.arange(6)
    fork = np.concatenate((blocks[:4], [9]))
    sessions = (TraceSession(str(i), (TraceRequest(path, -1, 0.0, 1.0, 96, 1),)) for i, path in enumerate((blocks, fork, fork)))
    schedule = make_schedule(trace(*sessions), 3, capacity_blocks=7)
    assert [event.at_s for event in of_kind(schedule, EventKind.START)] == [0.0, 0.0, 0.0]


def test_a_prompt_longer_than_the_cache_runs_alone() -> None:
    schedule = make_schedule(trace(private(0, 3), private(1, 20), private(2, 3)), 3, capacity_blocks=10)
    assert [event.at_s for event in of_kind(schedule, EventKind.START)] == [0.0, 1.0, 2.0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(1, 24),
)
def test_what_runs_never_holds_more_than_the_capacity(shapes: list[list[tuple[int, int]]], capacity: int) -> None:
    """Blocks counted one by one; requests start in the order in which they arrive, and none earlier."""
    sessions = []
    for number, shape in enumerate(shapes):
        requests = []
        for i, (shared, own) in enumerate(shape):
            path = np.concatenate((np.arange(shared), 100 * (number + 1) + 10 * shared + np.arange(own)))
            requests.append(TraceRequest(path, i - 1, float(own % 3), float(1 + shared % 2), 16, 1))
        sessions.append(TraceSession(str(number), tuple(requests)))
    schedule = make_schedule(trace(*sessions), 4, capacity_blocks=capacity)
    running: dict[int, set[int]] = {}
    for event in schedule.events:
        if event.kind is EventKind.START:
            running[event.access] = set(schedule.paths[event.access].tolist())
            held = len(set().union(*running.values()))
            assert held <= capacity or sum(map(bool, running.values())) == 1
        elif event.kind is EventKind.END:
            del running[event.access]
    arrivals, starts = of_kind(schedule, EventKind.ARRIVAL), of_kind(schedule, EventKind.START)
    assert [event[2:5] for event in arrivals] == [event[2:5] for event in starts]
    assert all(arrival.at_s <= start.at_s for arrival, start in zip(arrivals, starts, strict=True))
    assert len(starts) == sum(map(len, shapes))


@pytest.mark.parametrize(("concurrency", "idle_cap_s"), [(0, 1.0), (1, -1.0), (1, float("nan"))])
def test_bad_parameters_are_refused(concurrency: int, idle_cap_s: float) -> None:
    with pytest.raises(ValueError, match="must"):
        make_schedule(trace(), concurrency, idle_cap_s)


def test_a_cache_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        make_schedule(trace(), 1, capacity_blocks=0)


def test_a_request_that_waits_for_a_later_one_is_refused() -> None:
    with pytest.raises(ValueError, match="request 0 of session 's' waits for request 1"):
        make_schedule(trace(TraceSession("s", (request(1, 0.0), request(0, 0.0)))), 1)


def test_training_and_measured_sessions_are_disjoint_and_the_same_for_a_seed() -> None:
    whole = trace(*(TraceSession(str(i), (request(-1, 0.0, num_blocks=i + 1),)) for i in range(10)))
    first, rest = split_trace(whole, 0.3, seed=1)
    assert sorted(int(session.session_id) for part in (first, rest) for session in part.sessions) == list(range(10))
    assert len(first.sessions) == 3
    assert split_trace(whole, 0.3, seed=1) == (first, rest)
    assert mean_final_context_blocks(whole) == 5.5
