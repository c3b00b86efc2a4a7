# SPDX-License-Identifier: Apache-2.0
"""When each request of a plan is sent by a tool that does not wait for answers."""

from dataclasses import dataclass

from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.plan import Plan, PlannedRequest, PlannedSession

__all__ = ["TimedRequest", "arrivals"]


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One request, and when it is sent, in seconds from the first one."""

    session: PlannedSession
    request: PlannedRequest
    at_s: float


def arrivals(plan: Plan, pace: Pace, sessions_per_s: float) -> list[TimedRequest]:
    """All requests in the order in which they are sent. O(requests * log requests).

    A session begins at its arrival in the trace, those without one `1 / sessions_per_s` after one another. Each request is sent
    as if the one that it waits for had run as long as in the trace: `service_s`, then the pause `gap_s`, which is cut to
    `pace.idle_cap_s`. Times of the trace are multiplied by `pace.time_scale`.
    """
    timed: list[TimedRequest] = []
    num_closed = 0
    for session in plan.sessions:
        begin_s = session.trace.arrival_s
        if begin_s is None:
            begin_s, num_closed = num_closed / sessions_per_s, num_closed + 1
        else:
            begin_s *= pace.time_scale
        ends_s: list[float] = []
        for request in session.requests:
            after = request.trace.after
            at_s = (ends_s[after] if after >= 0 else begin_s) + pace.gap_s(request.trace.gap_s)
            ends_s.append(at_s + request.trace.service_s * pace.time_scale)
            timed.append(TimedRequest(session, request, at_s))
    timed.sort(key=lambda each: each.at_s)
    first_s = timed[0].at_s
    return [TimedRequest(each.session, each.request, each.at_s - first_s) for each in timed]
