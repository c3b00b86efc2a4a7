# SPDX-License-Identifier: Apache-2.0
"""When requests arrive and end in a closed loop."""

import numpy as np
import pytest

from vllm_lifetime.simulate.schedule import make_schedule, mean_final_context_blocks, split_trace
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession


def request(after: int, gap_s: float, service_s: float = 1.0, num_blocks: int = 1) -> TraceRequest:
    return TraceRequest(np.arange(num_blocks), after, gap_s, service_s, 16 * num_blocks, 1)


def trace(*sessions: TraceSession) -> Trace:
    return Trace("made up", 16, sessions)


def test_the_next_session_begins_when_one_has_ended_and_pauses_are_capped() -> None:
    long = TraceSession("long", (request(-1, 0.0), request(0, 100.0)))
    short = TraceSession("short", (request(-1, 2.0, 4.0),))
    schedule = make_schedule(trace(long, short, short), concurrency=2, idle_cap_s=10.0)
    starts = [(event.at_s, event.session) for event in schedule.events if not event.is_end]
    ends = [(event.at_s, event.session, event.ends_session) for event in schedule.events if event.is_end]
    assert starts == [(0.0, 0), (2.0, 1), (8.0, 2), (11.0, 0)]
    assert ends == [(1.0, 0, False), (6.0, 1, True), (12.0, 2, True), (12.0, 0, True)] or ends[-2:] == ends[:-3:-1]
    assert [event.access for event in schedule.events if not event.is_end] == [0, 1, 2, 3]


def test_requests_that_wait_for_the_same_one_run_side_by_side() -> None:
    session = TraceSession("s", (request(-1, 0.0), request(0, 1.0, 5.0), request(0, 2.0, 1.0), request(2, 0.0)))
    schedule = make_schedule(trace(session), concurrency=1)
    assert [(event.at_s, event.is_end, event.request) for event in schedule.events] == [
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
    assert [(event.at_s, event.session) for event in schedule.events if not event.is_end] == [(0, 1), (2, 2), (4, 3), (5, 0)]


@pytest.mark.parametrize(("concurrency", "idle_cap_s"), [(0, 1.0), (1, -1.0), (1, float("nan"))])
def test_bad_parameters_are_refused(concurrency: int, idle_cap_s: float) -> None:
    with pytest.raises(ValueError, match="must"):
        make_schedule(trace(), concurrency, idle_cap_s)


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
