# SPDX-License-Identifier: Apache-2.0
"""When an open-loop tool sends the requests of a trace."""

import pytest
from bench_testing import chain, make_request, make_trace

from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.open_loop import arrivals
from vllm_lifetime.bench.plan import make_plan
from vllm_lifetime.traces.schema import Trace, TraceSession


def times(trace: Trace, pace: Pace | None = None, sessions_per_s: float = 1.0) -> list[tuple[str, int, float]]:
    """Session, index and time of each request."""
    timed = arrivals(make_plan(trace), pace or Pace(), sessions_per_s)
    return [(each.session.trace.session_id, each.request.index, pytest.approx(each.at_s)) for each in timed]


def test_a_request_is_sent_before_its_predecessor_would_have_ended() -> None:
    """A fork: two requests wait for the first, which runs 2 s; the third waits for the later of them."""
    requests = (
        make_request([1], service_s=2.0),
        make_request([1, 2], 0, gap_s=0.5, service_s=4.0),
        make_request([1, 3], 0, gap_s=1.0, service_s=1.0),
        make_request([1, 2, 4], 1, gap_s=100.0),
    )
    trace = make_trace(TraceSession("fork", requests))
    assert times(trace) == [("fork", 0, 0.0), ("fork", 1, 2.5), ("fork", 2, 3.0), ("fork", 3, 106.5)]
    capped = times(trace, Pace(idle_cap_s=10.0, time_scale=0.1))
    assert capped == [("fork", 0, 0.0), ("fork", 1, 0.25), ("fork", 2, 0.3), ("fork", 3, 1.65)]


def test_sessions_without_an_arrival_all_begin_at_once() -> None:
    trace = make_trace(chain("a", 1, 1), chain("b", 10, 1), chain("c", 20, 1))
    assert times(trace, sessions_per_s=4.0) == [("a", 0, 0.0), ("b", 0, 0.25), ("c", 0, 0.5)]


def test_the_first_arrival_is_waited_for() -> None:
    """A recording may begin an hour after its clock; what counts is the time between."""
    trace = make_trace(chain("late", 1, 1, arrival_s=3610.0), chain("early", 10, 1, arrival_s=3600.0))
    assert times(trace) == [("early", 0, 0.0), ("late", 0, 10.0)]
    assert times(trace, Pace(time_scale=0.5)) == [("early", 0, 0.0), ("late", 0, 5.0)]


def test_what_comes_at_the_same_time_loses_its_order() -> None:
    trace = make_trace(chain("a", 1, 3), chain("b", 10, 3))
    order = [(session, index) for session, index, _ in times(trace, Pace(time_scale=0.0), sessions_per_s=1e9)]
    assert [index for session, index in order if session == "a"] == [0, 1, 2]
    assert [index for session, index in order if session == "b"] == [0, 1, 2]
