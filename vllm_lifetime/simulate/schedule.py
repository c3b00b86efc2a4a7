# SPDX-License-Identifier: Apache-2.0
"""When the requests of a trace arrive, start and end: a closed loop of so many sessions at a time, in a cache of so many blocks.

A request arrives `gap_s` after the end of the one that it waits for and runs for `service_s`, both as the trace has them. It
starts when its prompt fits beside what the running ones hold, in order of arrival, as in vLLM; who waits holds up those behind
it and the rest of its session. What runs holds its whole prompt, whatever was cached of it, so all this depends on the capacity
but not on the policy: every policy sees the same accesses in the same order, hit rates are comparable access by access, and the
offline optimum is well defined. What a policy would gain in time, and what that would change, is not simulated.
"""

import enum
import heapq
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.simulate.next_use_order import Steps, agreed_length, next_use_steps
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

__all__ = ["Event", "EventKind", "Schedule", "make_schedule", "mean_final_context_blocks", "split_trace"]


class EventKind(enum.Enum):
    """What happens to a request, in this order; it waits for room from its arrival to its start, if there is none."""

    ARRIVAL = enum.auto()
    START = enum.auto()
    END = enum.auto()


class Event(NamedTuple):
    """Something happens to a request. `session` and `request` are indices; `access` counts the starts of all sessions.

    Requests start in the order in which they arrive. `ends_session`: it is the last end of its session.
    """

    at_s: float
    kind: EventKind
    session: int
    request: int
    access: int
    ends_session: bool = False


@dataclass(frozen=True)
class Schedule:
    """The events of a replay, in order."""

    trace: Trace
    events: Sequence[Event]

    @cached_property
    def num_accesses(self) -> int:
        """Requests."""
        return len(self.events) // 3

    @cached_property
    def paths(self) -> list[NDArray[np.int64]]:
        """The prompt of each access, as block ids."""
        sessions = self.trace.sessions
        return [sessions[event.session].requests[event.request].blocks for event in self.events if event.kind is EventKind.START]

    @cached_property
    def next_uses(self) -> list[Steps]:
        """By access, when each part of its prompt is read next."""
        return next_use_steps(self.paths)


def make_schedule(
    trace: Trace,
    concurrency: int,
    idle_cap_s: float = float("inf"),
    seed: int | None = None,
    capacity_blocks: int | None = None,
) -> Schedule:
    """Let `concurrency` sessions run at a time, in the trace's order, or shuffled by `seed`; the next begins when one has ended.

    Pauses are at most `idle_cap_s` long. A session that has an arrival begins then, whatever else runs. What runs at once holds
    at most `capacity_blocks` (None: there is room for all); a prompt that is longer than that runs alone. O(n log n) in requests,
    and O(1) for each one that runs beside one.

    Raises:
        ValueError: `concurrency` or `capacity_blocks` is less than 1, `idle_cap_s` is negative, or a request waits for one that
            comes after it.

    """
    if concurrency < 1:
        raise ValueError(f"the concurrency must be at least 1, it is {concurrency}")
    if not idle_cap_s >= 0:
        raise ValueError(f"the longest pause must not be negative, it is {idle_cap_s} s")
    if capacity_blocks is not None and capacity_blocks < 1:
        raise ValueError(f"the capacity must be at least 1 block, it is {capacity_blocks}")
    closed = [index for index, session in enumerate(trace.sessions) if session.arrival_s is None and session.requests]
    if seed is not None:
        random.Random(seed).shuffle(closed)
    loop = _Loop(trace.sessions, closed, idle_cap_s, capacity_blocks)
    for index, session in enumerate(trace.sessions):
        if session.arrival_s is not None and session.requests:
            loop.begin(index, session.arrival_s)
    for _ in range(min(concurrency, len(closed))):
        loop.begin_next(0.0)
    return Schedule(trace, list(loop))


class _Room:
    """What the running requests hold of the cache: the blocks of their prompts, each once."""

    def __init__(self, capacity_blocks: int | None) -> None:
        self._capacity_blocks = capacity_blocks
        self._num_held = 0
        self._running: dict[int, list[NDArray[np.int64]]] = {}
        """Prompts by the id of their first block: others share none."""

    def has_room(self, path: NDArray[np.int64]) -> bool:
        """Whether `path` may be held beside what is."""
        capacity_blocks = self._capacity_blocks
        return capacity_blocks is None or not self._running or self._num_held + self._num_own(path) <= capacity_blocks

    def hold(self, path: NDArray[np.int64]) -> None:
        """A request with the prompt `path` starts."""
        if self._capacity_blocks is not None and len(path):
            self._num_held += self._num_own(path)
            self._running.setdefault(int(path[0]), []).append(path)

    def release(self, path: NDArray[np.int64]) -> None:
        """It ends."""
        if self._capacity_blocks is not None and len(path):
            first = int(path[0])
            others = self._running[first]
            del others[next(index for index, other in enumerate(others) if other is path)]
            if not others:
                del self._running[first]
            self._num_held -= self._num_own(path)

    def _num_own(self, path: NDArray[np.int64]) -> int:
        """How many blocks of `path` nobody holds. O(prompts with the same first block), mostly."""
        shared = 0
        for other in self._running.get(int(path[0]), ()) if len(path) else ():
            end = min(len(path), len(other))
            if shared < end and path[shared] == other[shared]:
                shared = agreed_length(path, other, shared, end)
        return len(path) - shared


class _Loop:
    """The events that are to come, by time; those at one time in the order in which they became known.

    `closed` are the sessions that begin when another of them has ended.
    """

    def __init__(
        self, sessions: Sequence[TraceSession], closed: Sequence[int], idle_cap_s: float, capacity_blocks: int | None
    ) -> None:
        self._sessions = sessions
        self._closed = iter(closed)
        self._idle_cap_s = idle_cap_s
        self._room = _Room(capacity_blocks)
        self._queue: list[tuple[float, int, EventKind, int, int, int]] = []
        self._num_queued = 0
        self._waiting: deque[Event] = deque()
        self._num_accesses = 0
        self._num_left: dict[int, int] = {}
        self._after: dict[int, dict[int, list[int]]] = {}

    def begin(self, session: int, at_s: float) -> None:
        """A session begins."""
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

    def begin_next(self, at_s: float) -> None:
        """The next of the closed sessions begins, if one is left."""
        session = next(self._closed, None)
        if session is not None:
            self.begin(session, at_s)

    def __iter__(self) -> Iterator[Event]:
        while self._queue:
            at_s, _, kind, session, index, access = heapq.heappop(self._queue)
            if kind is EventKind.ARRIVAL:
                arrival = Event(at_s, kind, session, index, self._num_accesses)
                self._num_accesses += 1
                yield arrival
                self._waiting.append(arrival)
            else:
                self._num_left[session] -= 1
                is_last = self._num_left[session] == 0
                yield Event(at_s, kind, session, index, access, is_last)
                self._room.release(self._sessions[session].requests[index].blocks)
                if not is_last:
                    self._release(session, index, at_s)
                else:
                    del self._num_left[session], self._after[session]
                    if self._sessions[session].arrival_s is None:
                        self.begin_next(at_s)
            yield from self._start_waiting(at_s)

    def _start_waiting(self, at_s: float) -> Iterator[Event]:
        while self._waiting:
            _, _, session, index, access, _ = self._waiting[0]
            request: TraceRequest = self._sessions[session].requests[index]
            if not self._room.has_room(request.blocks):
                return
            self._waiting.popleft()
            self._room.hold(request.blocks)
            self._push(at_s + request.service_s, EventKind.END, session, index, access)
            yield Event(at_s, EventKind.START, session, index, access)

    def _release(self, session: int, ended: int, at_s: float) -> None:
        requests = self._sessions[session].requests
        for index in self._after[session].get(ended, ()):
            self._push(at_s + min(requests[index].gap_s, self._idle_cap_s), EventKind.ARRIVAL, session, index, -1)

    def _push(self, at_s: float, kind: EventKind, session: int, request: int, access: int) -> None:
        heapq.heappush(self._queue, (at_s, self._num_queued, kind, session, request, access))
        self._num_queued += 1


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
