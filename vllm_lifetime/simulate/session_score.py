# SPDX-License-Identifier: Apache-2.0
"""A policy from one function: how much it is worth to keep what a session has read, by what is known of its present pause.

For estimates that are developed offline, and for oracles: how far would it go if one thing were known exactly?
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from vllm_lifetime.agents import Reading
from vllm_lifetime.pool.runs import Rank, Reader
from vllm_lifetime.simulate.engine import Engine, ReplayPolicy
from vllm_lifetime.simulate.schedule import Event
from vllm_lifetime.traces.schema import TraceRequest, TraceSession

__all__ = ["SessionScore", "SessionScorePolicy", "SessionState"]


@dataclass(slots=True)
class SessionState:
    """One session that has begun. `last` is the request that ended last, at `ended_at_s`; None before the first end."""

    index: int
    session: TraceSession
    num_running: int = 0
    last: TraceRequest | None = None
    last_index: int = -1
    ended_at_s: float = 0.0
    score: float = 0.0
    readers: dict[Reader, None] = field(default_factory=dict)


SessionScore = Callable[[SessionState, float], float]
"""(session, now) -> worth of keeping what it has read; what is worth least is evicted first."""


class SessionScorePolicy(ReplayPolicy):
    """Asks `score` for each waiting session when blocks are to be evicted, at most once per `refresh_s` of simulated time.

    A run is worth as much as the session that values it most; sessions with a running request are worth `running`.
    """

    def __init__(
        self, name: str, score: SessionScore, *, acts_on_boundaries: bool = True, running: float = 1e9, refresh_s: float = 0.0
    ) -> None:
        super().__init__(name)
        self.acts_on_boundaries = acts_on_boundaries
        self._score = score
        self._running = running
        self._refresh_s = refresh_s

    def begin(self, engine: Engine) -> None:
        self._engine = engine
        self._sessions: dict[int, SessionState] = {}
        self._by_reader: dict[Reader, SessionState] = {}
        self._refreshed_at = float("-inf")

    def start_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        state = self._sessions.get(event.session)
        if state is None:
            session = self._engine.schedule.trace.sessions[event.session]
            state = self._sessions[event.session] = SessionState(event.session, session)
        state.num_running += 1
        for reader in (reading.prompt, reading.output):
            state.readers[reader] = None
            self._by_reader[reader] = state

    def finish_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        state = self._sessions[event.session]
        state.num_running -= 1
        state.last, state.last_index, state.ended_at_s = request, event.request, event.at_s
        # What it gives back gets its rank before that, and its place among equals by it.
        self._refresh([state], event.at_s)

    def end_session(self, event: Event, session: TraceSession, reading: Reading) -> None:
        state = self._sessions.pop(event.session)
        if self.acts_on_boundaries:
            for reader in state.readers:
                self._by_reader.pop(reader, None)

    def before_eviction(self, now: float) -> None:
        if now - self._refreshed_at >= self._refresh_s:
            self._refreshed_at = now
            self._refresh(self._sessions.values(), now)

    def _refresh(self, states: Iterable[SessionState], now: float) -> None:
        changed: list[SessionState] = []
        for state in states:
            score = self._running if state.num_running else self._score(state, now)
            if score != state.score:
                state.score = score
                changed.append(state)
        cache, by_reader = self._engine.cache, self._by_reader
        for state in changed:
            for reader in [reader for reader in state.readers if not reader.is_live]:
                del state.readers[reader]
                by_reader.pop(reader, None)
            runs = {run: None for reader in state.readers for run in reader.runs if run.rank[0] != 0}
            for run in sorted(runs, key=lambda run: -run.start):
                score = max(by_reader[reader].score for reader in run.readers if reader in by_reader)
                rank: Rank = (1, score, 0.0)
                cache.set_rank(run, rank)
