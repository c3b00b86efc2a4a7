# SPDX-License-Identifier: Apache-2.0
"""When the requests of a trace arrive and end: a closed loop of so many sessions at a time.

A request arrives `gap_s` after the end of the one that it waits for and runs for `service_s`, both as the trace has them. They do
not depend on how much of its prompt was cached, so every policy sees the same accesses in the same order: hit rates are
comparable access by access, and the offline optimum is well defined. What a policy would gain in time, and what that would
change, is not simulated.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.simulate.next_use_order import Steps, next_use_steps
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

__all__ = ["Event", "Schedule", "make_schedule", "mean_final_context_blocks", "split_trace"]


class Event(NamedTuple):
    """A request arrives or ends. `session` and `request` are indices; `access` counts the arrivals of all sessions.

    `ends_session`: it is the last end of its session.
    """

    at_s: float
    is_end: bool
    session: int
    request: int
    access: int
    ends_session: bool


@dataclass(frozen=True)
class Schedule:
    """The events of a replay, in order."""

    trace: Trace
    events: Sequence[Event]

    @cached_property
    def num_accesses(self) -> int:
        """Requests."""
        return len(self.events) // 2

    @cached_property
    def paths(self) -> list[NDArray[np.int64]]:
        """The prompt of each access, as block ids."""
        sessions = self.trace.sessions
        return [sessions[event.session].requests[event.request].blocks for event in self.events if not event.is_end]

    @cached_property
    def next_uses(self) -> list[Steps]:
        """By access, when each part of its prompt is read next."""
        return next_use_steps(self.paths)


def make_schedule(trace: Trace, concurrency: int, idle_cap_s: float = float("inf"), seed: int | None = None) -> Schedule:
    """Let `concurrency` sessions run at a time, in the trace's order, or shuffled by `seed`; the next begins when one has ended.

    Pauses are at most `idle_cap_s` long. A session that has an arrival begins then, whatever else runs. O(n log n) in requests.

    Raises:
        ValueError: `concurrency` is less than 1, `idle_cap_s` is negative, or a request waits for one that comes after it.

    """
    if concurrency < 1:
        raise ValueError(f"the concurrency must be at least 1, it is {concurrency}")
    if not idle_cap_s >= 0:
        raise ValueError(f"the longest pause must not be negative, it is {idle_cap_s} s")
    loop = _Loop(trace.sessions, idle_cap_s)
    closed = [index for index, session in enumerate(trace.sessions) if session.arrival_s is None and session.requests]
    if seed is not None:
        random.Random(seed).shuffle(closed)
    for index, session in enumerate(trace.sessions):
        if session.arrival_s is not None and session.requests:
            loop.begin(index, session.arrival_s)
    waiting = iter(closed)
    for _ in range(concurrency):
        index = next(waiting, -1)
        if index >= 0:
            loop.begin(index, 0.0)
    events: list[Event] = []
    for event in loop:
        events.append(event)
        if event.ends_session and trace.sessions[event.session].arrival_s is None:
            index = next(waiting, -1)
            if index >= 0:
                loop.begin(index, event.at_s)
    return Schedule(trace, events)


class _Loop:
    """The events that are to come, by time; those at one time in the order in which they became known."""

    def __init__(self, sessions: Sequence[TraceSession], idle_cap_s: float) -> None:
        self._sessions = sessions
        self._idle_cap_s = idle_cap_s
        self._queue: list[tuple[float, int, bool, int, int, int]] = []
        self._num_queued = 0
        self._num_accesses = 0
        self._num_left: dict[int, int] = {}
        self._after: dict[int, dict[int, list[int]]] = {}

    def begin(self, session: int, at_s: float) -> None:
        requests = self._sessions[session].requests
        after: dict[int, list[int]] = {}
        for index, request in enumerate(requests):
            if not -1 <= request.after < index:
                name = self._sessions[session].session_id
                raise ValueError(f"request {index} of session {name!r} waits for request {request.after}, which is not before it")
            after.setdefault(request.after, []).append(index)
        self._after[session] = after
        self._num_left[session] = len(requests)
        self._release(session, -1, at_s)

    def _release(self, session: int, ended: int, at_s: float) -> None:
        requests = self._sessions[session].requests
        for index in self._after[session].get(ended, ()):
            self._push(at_s + min(requests[index].gap_s, self._idle_cap_s), False, session, index, -1)

    def _push(self, at_s: float, is_end: bool, session: int, request: int, access: int) -> None:
        heapq.heappush(self._queue, (at_s, self._num_queued, is_end, session, request, access))
        self._num_queued += 1

    def __iter__(self) -> "_Loop":
        return self

    def __next__(self) -> Event:
        if not self._queue:
            raise StopIteration
        at_s, _, is_end, session, index, access = heapq.heappop(self._queue)
        if not is_end:
            access = self._num_accesses
            self._num_accesses += 1
            request: TraceRequest = self._sessions[session].requests[index]
            self._push(at_s + request.service_s, True, session, index, access)
            return Event(at_s, False, session, index, access, False)
        self._num_left[session] -= 1
        is_last = self._num_left[session] == 0
        if is_last:
            del self._num_left[session], self._after[session]
        else:
            self._release(session, index, at_s)
        return Event(at_s, True, session, index, access, is_last)


def mean_final_context_blocks(trace: Trace) -> float:
    """The mean over sessions of their longest prompt, in blocks: what a session holds when it is about to end."""
    longest = [max(len(request.blocks) for request in session.requests) for session in trace.sessions if session.requests]
    return float(np.mean(longest)) if longest else 0.0


def split_trace(trace: Trace, train_share: float, seed: int) -> tuple[Trace, Trace]:
    """Shuffle the sessions by `seed` and cut off the first `train_share` of them: (to train with, to measure with)."""
    sessions = list(trace.sessions)
    random.Random(seed).shuffle(sessions)
    cut = round(len(sessions) * train_share)
    parts = (sessions[:cut], sessions[cut:])
    train, rest = (Trace(trace.name, trace.block_size_tokens, tuple(part)) for part in parts)
    return train, rest
