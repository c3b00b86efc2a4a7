# SPDX-License-Identifier: Apache-2.0
"""Replays a schedule through one policy at one capacity and counts hits.

The server's own objects decide: `Lifecycle` on a simulated clock, the `Scorer`, the `Run`s and their ranks. What is simulated is
the cache (`cache.py`), the harness (boundaries as the trace has them) and time (`schedule.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import overload

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.agents import Reading
from vllm_lifetime.boundaries import Boundary, BoundaryKind, RequestMetadata
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.pool.runs import Reader
from vllm_lifetime.simulate.belady import BeladyCache
from vllm_lifetime.simulate.cache import RunCache
from vllm_lifetime.simulate.schedule import Event, EventKind, Schedule
from vllm_lifetime.traces.schema import TraceRequest, TraceSession

__all__ = ["Engine", "ReplayPolicy", "ReplayResult", "replay", "replay_belady"]

BYTES_PER_ID = 8


class BlockHashes(Sequence[bytes]):
    """A prompt's block ids as block hashes: 8 bytes each, made when they are looked at."""

    __slots__ = ("_raw",)

    def __init__(self, blocks: NDArray[np.int64]) -> None:
        self._raw = np.ascontiguousarray(blocks).view(f"V{BYTES_PER_ID}")

    def __len__(self) -> int:
        return len(self._raw)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        # Several times faster than block by block: the context of an agent that has lost its cache is taken up as a whole.
        chosen: bytes | list[bytes] = self._raw[index].tolist()
        return chosen

    def __iter__(self) -> Iterator[bytes]:
        return iter(self[:])


class ReplayPolicy:
    """What orders active runs, besides the boundaries. This one: recency alone.

    `reads_metadata`: whether requests say who they are; if not, all is as in vLLM without us. `acts_on_boundaries`: whether the
    end of a segment retires what only it reads. The methods are called by the engine in the order of the server: see there.
    """

    reads_metadata = True
    acts_on_boundaries = True

    def __init__(self, name: str) -> None:
        self.name = name

    def begin(self, engine: "Engine") -> None:
        """A replay begins, with an empty cache. Ranks are set with `engine.cache.set_rank(run, rank)`."""

    def start_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        """A request has arrived; nothing has been looked up or evicted for it yet, and it may have to wait for room.

        Its runs: `reading.prompt.runs`, ...
        """

    def finish_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        """A request is over; its blocks are given back next, in the order of their runs' ranks then."""

    def end_turn(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        """A `turn_end` boundary has been acted on; the blocks of its request have been given back."""

    def end_session(self, event: Event, session: TraceSession, reading: Reading) -> None:
        """The last request of a session is over; its `session_end` boundary is acted on next."""

    def before_eviction(self, now: float) -> None:
        """Blocks are about to be evicted: the last moment to bring ranks up to date."""


@dataclass(frozen=True)
class ReplayResult:
    """What a replay came to. A hit is a block of a prompt that was cached together with all before it."""

    policy: str
    capacity_blocks: int
    hit_blocks: int
    prompt_blocks: int
    sessions: int
    requests: int
    overcommitted_requests: int
    """Requests for which blocks beyond the capacity had to be made up: prompts longer than it, each of which ran alone."""
    evicted_blocks: int
    wall_s: float
    hits: NDArray[np.int64] = field(repr=False)
    """Blocks hit, by access."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' whole blocks that were hit; blocks are of one size, so it is token by token."""
        return self.hit_blocks / self.prompt_blocks if self.prompt_blocks else 0.0


class Engine:
    """One engine in simulated time: `now` is in seconds from the replay's start."""

    def __init__(self, schedule: Schedule, policy: ReplayPolicy, capacity_blocks: int) -> None:
        self.schedule = schedule
        self.policy = policy
        self.now = 0.0
        self.cache = RunCache(capacity_blocks, self._before_eviction)
        self.lifecycle = Lifecycle(
            self._end_reader, block_bytes=1, hash_tokens=schedule.trace.block_size_tokens, clock=lambda: self.now
        )
        self._metadata: dict[tuple[str, str, str | None, str | None], RequestMetadata] = {}
        self._readings: dict[int, Reading | None] = {}
        self._num_messages = 0

    def run(self) -> NDArray[np.int64]:
        """Go through all events. Returns the blocks hit, by access."""
        hits = np.zeros(self.schedule.num_accesses, np.int64)
        sessions = self.schedule.trace.sessions
        self.policy.begin(self)
        for event in self.schedule.events:
            self.now = event.at_s
            session = sessions[event.session]
            request = session.requests[event.request]
            if event.kind is EventKind.ARRIVAL:
                self._arrive(event, session, request)
            elif event.kind is EventKind.START:
                hits[event.access] = self._start(event, request)
            else:
                self._finish(event, session, request)
        return hits

    # ------------------------------------------------------------------ requests, in the order of the connector's calls

    def _arrive(self, event: Event, session: TraceSession, request: TraceRequest) -> None:
        self.lifecycle.expire()
        if request.compacts and session.names_session:
            self._tell(BoundaryKind.COMPACTION, session, request)
        reading = self._readings[event.access] = self._reading(session, request)
        if reading is not None:
            self.policy.start_request(event, request, reading)

    def _start(self, event: Event, request: TraceRequest) -> int:
        reading = self._readings[event.access]
        if reading is None:
            return self.cache.start(request.blocks, None)
        hit = self.cache.start(request.blocks, reading.prompt, reading.output, reading.boundary_blocks)
        self.lifecycle.has_read(reading)
        return hit

    def _finish(self, event: Event, session: TraceSession, request: TraceRequest) -> None:
        reading = self._readings.pop(event.access)
        if reading is None:
            self.cache.finish(request.blocks)
            return
        self.policy.finish_request(event, request, reading)
        self.lifecycle.finish_request(reading, BlockHashes(request.blocks))
        self.cache.finish(request.blocks)
        if session.names_session:
            if request.ends_turn:
                self._tell(BoundaryKind.TURN_END, session, request)
                self.policy.end_turn(event, request, reading)
            if request.ends_agent:
                self._tell(BoundaryKind.SUBAGENT_RETURN, session, request)
            if event.ends_session:
                self.policy.end_session(event, session, reading)
                self._tell(BoundaryKind.SESSION_END, session, request)

    def _reading(self, session: TraceSession, request: TraceRequest) -> Reading | None:
        if not session.names_session or not self.policy.reads_metadata:
            return None
        key = (session.session_id, request.agent, request.agent_id, request.parent_agent_id)
        metadata = self._metadata.get(key)
        if metadata is None:
            metadata = self._metadata[key] = RequestMetadata(
                agent=request.agent, agent_id=request.agent_id, parent_agent_id=request.parent_agent_id
            )
        return self.lifecycle.start_request(session.session_id, metadata, BlockHashes(request.blocks))

    def _tell(self, kind: BoundaryKind, session: TraceSession, request: TraceRequest) -> None:
        if not self.policy.reads_metadata:
            return
        self._num_messages += 1
        is_of_agent = kind is not BoundaryKind.SESSION_END
        self.lifecycle.apply(
            Boundary(
                message_id=str(self._num_messages),
                kind=kind,
                session_id=session.session_id,
                agent=request.agent if is_of_agent else None,
                agent_id=request.agent_id if is_of_agent else None,
            )
        )

    def _end_reader(self, reader: Reader) -> int:
        return self.cache.end_reader(reader) if self.policy.acts_on_boundaries else 0

    def _before_eviction(self) -> None:
        self.policy.before_eviction(self.now)


def replay(schedule: Schedule, policy: ReplayPolicy, capacity_blocks: int) -> ReplayResult:
    """Replay `schedule` with `policy` in a cache of `capacity_blocks`, empty at first."""
    began = perf_counter()
    engine = Engine(schedule, policy, capacity_blocks)
    return _result(schedule, policy.name, engine.cache, engine.run(), began)


def replay_belady(schedule: Schedule, capacity_blocks: int) -> ReplayResult:
    """The most that any policy without prefetch can hit of `schedule` in a cache of `capacity_blocks`."""
    began = perf_counter()
    cache = BeladyCache(capacity_blocks)
    hits = np.zeros(schedule.num_accesses, np.int64)
    paths, next_uses = schedule.paths, schedule.next_uses
    for event in schedule.events:
        if event.kind is EventKind.START:
            hits[event.access] = cache.start(paths[event.access], next_uses[event.access])
        elif event.kind is EventKind.END:
            cache.finish(paths[event.access])
    return _result(schedule, "belady", cache, hits, began)


def _result(schedule: Schedule, name: str, cache: RunCache | BeladyCache, hits: NDArray[np.int64], began: float) -> ReplayResult:
    return ReplayResult(
        policy=name,
        capacity_blocks=cache.capacity_blocks,
        hit_blocks=int(hits.sum()),
        prompt_blocks=sum(len(path) for path in schedule.paths),
        sessions=len({event.session for event in schedule.events}),
        requests=schedule.num_accesses,
        overcommitted_requests=cache.num_overcommitted,
        evicted_blocks=cache.num_evicted,
        wall_s=perf_counter() - began,
        hits=hits,
    )
