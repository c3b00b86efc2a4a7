# SPDX-License-Identifier: Apache-2.0
"""Replays a plan on a server, closed loop: what an agent does next waits for what the server has answered.

A session is one workflow. Its requests are sent as the trace's dependencies allow, each `gap_s` after the end of the one that
it waits for, so that sub-agents run in parallel. A failed request ends its session: what waits for it is not sent.
One asyncio loop, one thread.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from vllm_lifetime.bench.boundaries import BoundaryPoster, name_request
from vllm_lifetime.bench.plan import Plan, PlannedRequest, PlannedSession
from vllm_lifetime.bench.records import RequestRecord, RunRecord, SessionRecord
from vllm_lifetime.bench.server import BenchServer
from vllm_lifetime.harness.client import AsyncLifetimeClient

__all__ = ["DEFAULT_CONCURRENCY", "MIN_FAILURES", "Driver", "Pace"]

DEFAULT_CONCURRENCY = 8
"""Sessions at a time that have no arrival in the trace."""

MIN_FAILURES = 5
"""Failures in a row, with no success in between, after which a run is given up at the earliest."""


@dataclass(frozen=True)
class Pace:
    """How fast a trace is replayed.

    `concurrency` sessions at a time; None: each session at its arrival, those without one `DEFAULT_CONCURRENCY` at a time. A
    pause of the trace is cut to `idle_cap_s`; pauses and arrivals are then multiplied by `time_scale`. `time_limit_s`: for the
    whole run, what the server is asked before it included.
    """

    concurrency: int | None = None
    time_scale: float = 1.0
    idle_cap_s: float = float("inf")
    time_limit_s: float = float("inf")

    def gap_s(self, gap_s: float) -> float:
        """How long a pause of the trace is here, in seconds."""
        return min(gap_s, self.idle_cap_s) * self.time_scale


class Driver:
    """One run. `record` fills while it goes on, whatever becomes of it; `on_change` is called at each request's end."""

    def __init__(
        self,
        plan: Plan,
        server: BenchServer,
        model: str,
        pace: Pace,
        *,
        client: AsyncLifetimeClient | None,
        names_requests: bool,
        on_change: Callable[[RunRecord], None] = lambda _: None,
    ) -> None:
        """Post boundaries through `client`, if there is one; name requests if `names_requests`."""
        self.record = RunRecord()
        self._plan = plan
        self._server = server
        self._model = model
        self._pace = pace
        self._names_requests = names_requests
        self._on_change = on_change
        self._poster = None if client is None else BoundaryPoster(client, self.record, self._clock)
        self._began_s = time.perf_counter()
        self._stopped = asyncio.Event()
        self._failures_in_row = 0
        self._in_flight = 0
        self._most_in_flight = 0
        self._probe: asyncio.Task[None] | None = None

    async def run(self, passed_s: float = 0.0) -> None:
        """Replay all sessions, or as many as the server and the time limit allow, of which `passed_s` have passed before."""
        self._began_s = time.perf_counter()
        work = asyncio.create_task(self._replay())
        stop = asyncio.create_task(self._stopped.wait())
        limit_s = self._pace.time_limit_s
        try:
            left_s = None if limit_s == float("inf") else max(0.0, limit_s - passed_s)
            await asyncio.wait({work, stop}, timeout=left_s, return_when="FIRST_COMPLETED")
            self.record.wall_s = self._clock()
            if work.done() and self._probe is not None:  # asked after the last failure; bounded by its own timeouts
                await self._probe
            elif not work.done() and self.record.stopped is None:
                self.record.stopped = f"the time limit of {limit_s:g} s was reached (--time-limit-s)"
        except asyncio.CancelledError:
            self.record.wall_s = self._clock()
            self.record.stopped = "it was interrupted"
            raise
        finally:
            tasks = [task for task in (work, stop, self._probe) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not work.cancelled():
            work.result()  # raises what only a mistake of ours can be

    def _clock(self) -> float:
        return time.perf_counter() - self._began_s

    # ------------------------------------------------------------------ sessions

    async def _replay(self) -> None:
        arriving: list[tuple[float, PlannedSession]] = []
        closed: list[PlannedSession] = []
        for session in self._plan.sessions:
            arrival_s = session.trace.arrival_s
            if arrival_s is None or self._pace.concurrency is not None:
                closed.append(session)
            else:
                arriving.append((arrival_s * self._pace.time_scale, session))
        pending = iter(closed)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(len(closed), self._pace.concurrency or DEFAULT_CONCURRENCY)):
                group.create_task(self._take_turns(pending))
            for arrival_s, session in sorted(arriving, key=lambda pair: pair[0]):
                await asyncio.sleep(max(0.0, arrival_s - self._clock()))
                group.create_task(self._session(session))

    async def _take_turns(self, pending: Iterator[PlannedSession]) -> None:
        for session in pending:
            await self._session(session)

    async def _session(self, session: PlannedSession) -> None:
        record = SessionRecord(session.trace.session_id, self._clock())
        self.record.sessions.append(record)
        try:
            async with asyncio.TaskGroup() as group:
                self._release(group, session, session.followers.get(-1, ()), record)
            record.ended_s = self._clock()
            self.record.num_sessions_ended += 1
        finally:  # also where the run is stopped: the server should not go on keeping what is over
            if self._poster is not None:
                self._poster.end(session)
            self._on_change(self.record)

    # ------------------------------------------------------------------ requests

    def _release(
        self, group: asyncio.TaskGroup, session: PlannedSession, requests: Iterable[PlannedRequest], of: SessionRecord
    ) -> None:
        now_s = self._clock()
        for request in requests:
            group.create_task(self._request(group, session, request, of, now_s + self._pace.gap_s(request.trace.gap_s)))

    async def _request(
        self, group: asyncio.TaskGroup, session: PlannedSession, request: PlannedRequest, of: SessionRecord, due_s: float
    ) -> None:
        headers: dict[str, str] = {}
        more: dict[str, object] = {}
        if self._names_requests and session.trace.names_session:
            headers, more = name_request(session, request)
        # Before the pause: for long prompts it takes milliseconds, which would make the request late.
        body = self._server.encode(self._model, self._plan.prompt(session, request), request.output_tokens, more)
        await asyncio.sleep(due_s - self._clock())
        if of.has_failed:
            return
        record = RequestRecord(session.trace.session_id, request.index, request.trace.agent, request.prompt_tokens, due_s)
        if self._poster is not None:
            self._poster.before(session, request)
        self.record.requests.append(record)
        self._in_flight += 1
        self._most_in_flight = max(self._most_in_flight, self._in_flight)
        try:
            lost = await self._server.complete(body, headers, record, self._clock)
        finally:
            self._in_flight -= 1
        if record.error is None and record.output_tokens != request.output_tokens:
            got = f"got {record.output_tokens}" if record.has_usage else "and the answer does not say how many it has (`usage`)"
            record.error = f"asked for {request.output_tokens} tokens, {got}"
        self.record.end_request(record)
        if record.error is not None:
            of.has_failed = True
            self._note_failure(record.error, is_lost=lost is not None)
        else:
            self._failures_in_row = 0
            if self._poster is not None:
                self._poster.after(session, request)
            if not of.has_failed:
                self._release(group, session, session.followers.get(request.index, ()), of)
        self._on_change(self.record)

    def _note_failure(self, error: str, *, is_lost: bool) -> None:
        """Give up where nothing is answered any more: as many failures in a row as ever ran together, or a dead server."""
        self._failures_in_row += 1
        if self._failures_in_row >= max(MIN_FAILURES, self._most_in_flight + 1):
            self._stop(f"{self._failures_in_row} requests in a row failed, the last with: {error}")
        elif is_lost and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._stop_if_dead())

    async def _stop_if_dead(self) -> None:
        reason = await self._server.why_dead()
        if reason is not None:
            self._stop(reason)

    def _stop(self, reason: str) -> None:
        if self.record.stopped is None:
            self.record.stopped = reason
        self._stopped.set()
