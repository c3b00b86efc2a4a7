# SPDX-License-Identifier: Apache-2.0
"""Context segments recovered from a trace: tokens that share one lifetime (Lachesis 3.1 and 3.2).

No harness records segments. As in the paper they are recovered from which request read what for the last time:

- a sub-agent's context is one `worker` or `reviewer` segment, from its first request to its return;
- what an agent that nobody spawned writes in a turn and does not read after that turn, though it goes on, is `reasoning_laden`;
- what it reads again is `reasoning_stripped`, one segment for each turn that wrote some; of an agent with sub-agents it is
  `lead`, one segment from one compaction to the next;
- what several sessions read is `shared`: it outlives its session, so it has tokens but no lifetime.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm_lifetime.agents import subagent_class
from vllm_lifetime.analysis.clock import Times
from vllm_lifetime.analysis.structure import AgentRequests, SessionStructure
from vllm_lifetime.analysis.writes import SessionWrites, Write
from vllm_lifetime.boundaries import BoundaryKind, SegmentClass

__all__ = ["Segment", "dies_with_turn", "last_reader_of", "session_segments"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment. Times are seconds from its session's start; `opened_s` and `closed_s` are the trace's own clock.

    `lifetime_s` is T_norm of Eq. 1 and `read_tokens` the reads of Eq. 3; both are None for `shared`.
    """

    session_id: str
    segment_class: SegmentClass
    agent: str
    agent_id: str
    turn: int | None
    written_tokens: int
    read_tokens: int | None
    opened_s: float
    closed_s: float | None
    lifetime_s: float | None
    closed_by: BoundaryKind | None
    within_turn_tokens: int = 0
    """Of a `reasoning_laden` segment: tokens that were read for the last time before its turn's last request."""

    @property
    def reads_per_write(self) -> float | None:
        """rho_R/W of Eq. 3."""
        return self.read_tokens / self.written_tokens if self.read_tokens is not None and self.written_tokens else None


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    reads: float = 0.0
    within_turn: float = 0.0
    by_close: dict[tuple[int, BoundaryKind], float] = field(default_factory=dict)

    def add(self, write: Write, close: tuple[int, BoundaryKind] | None = None) -> None:
        self.tokens += write.tokens
        self.reads += write.reads
        if close is not None:
            self.by_close[close] = self.by_close.get(close, 0.0) + write.tokens


def session_segments(structure: SessionStructure, written: SessionWrites, reference: Times, traced: Times) -> list[Segment]:
    """The segments of one session, agent by agent. Every written token is in exactly one. O(writes x log requests)."""
    maker = _Maker(structure, reference, traced)
    by_request: dict[int, list[Write]] = {}
    for write in written.writes:
        by_request.setdefault(write.writer, []).append(write)
    segments: list[Segment] = []
    if written.shared_tokens:
        first = structure.agents[0]
        opened_s = float(traced.starts_s[first.indices[0]])
        segments.append(
            Segment(
                structure.session.session_id,
                SegmentClass.SHARED,
                first.role,
                first.agent_id,
                None,
                written.shared_tokens,
                None,
                opened_s,
                None,
                None,
                None,
            )
        )
    for agent in structure.agents:
        own = (write for index in agent.indices for write in by_request.get(index, ()))
        segments += maker.root(agent, own) if agent.is_root else maker.subagent(agent, own)
    return segments


def last_reader_of(agent: AgentRequests, writer: int, write: Write) -> int:
    """The place in `agent` of the last of its requests that keep open what its request at place `writer` wrote.

    What another agent's request reads last is open as long as its own agent's request before that one. O(log requests).
    """
    return max(writer, bisect_right(agent.indices, write.last_reader) - 1)


def dies_with_turn(agent: AgentRequests, writer: int, reader: int) -> bool:
    """Whether nobody reads it after the turn in which it was written, though the agent goes on: it is `reasoning_laden`.

    `writer`, `reader`: places in `agent`; it is a root.
    """
    goes_on = reader + 1 < len(agent.indices) and agent.epochs[reader + 1] == agent.epochs[reader]
    return goes_on and agent.turns[reader] == agent.turns[writer]


class _Maker:
    def __init__(self, structure: SessionStructure, reference: Times, traced: Times) -> None:
        self._session_id = structure.session.session_id
        self._reference, self._traced = reference, traced

    def subagent(self, agent: AgentRequests, writes: Iterable[Write]) -> list[Segment]:
        sums = _Sums()
        for write in writes:
            sums.add(write)
        last = len(agent.indices) - 1
        return self._segments(subagent_class(agent.role), agent, None, sums, 0, last, BoundaryKind.SUBAGENT_RETURN)

    def root(self, agent: AgentRequests, writes: Iterable[Write]) -> list[Segment]:
        laden: dict[tuple[int, int], _Sums] = {}
        kept: dict[tuple[int, int, int], _Sums] = {}
        place_of = {index: place for place, index in enumerate(agent.indices)}
        for write in writes:
            writer = place_of[write.writer]
            reader = last_reader_of(agent, writer, write)
            epoch, turn = agent.epochs[reader], agent.turns[reader]
            if dies_with_turn(agent, writer, reader):
                sums = laden.setdefault((epoch, turn), _Sums())
                sums.add(write)
                if agent.turns[reader + 1] == turn:
                    sums.within_turn += write.tokens
            else:
                key = (agent.epochs[writer], -1 if agent.has_children else agent.turns[writer], epoch)
                kept.setdefault(key, _Sums()).add(write, self._close(agent, reader))
        segments: list[Segment] = []
        for (epoch, turn), sums in laden.items():
            own = [p for p, of in enumerate(zip(agent.epochs, agent.turns, strict=True)) if of == (epoch, turn)]
            segments += self._segments(SegmentClass.REASONING_LADEN, agent, turn, sums, own[0], own[-1], BoundaryKind.TURN_END)
        for (epoch, turn, _), sums in kept.items():
            is_lead = turn < 0
            first = next(
                p
                for p, of in enumerate(zip(agent.epochs, agent.turns, strict=True))
                if of[0] == epoch and (is_lead or of[1] == turn)
            )
            kind = SegmentClass.LEAD if is_lead else SegmentClass.REASONING_STRIPPED
            # Where a turn's tokens do not all close together, the segment closes with most of them.
            last, boundary = max(sums.by_close, key=lambda close: (sums.by_close[close], close[0]))
            segments += self._segments(kind, agent, None if is_lead else turn, sums, first, last, boundary)
        return segments

    def _close(self, agent: AgentRequests, place: int) -> tuple[int, BoundaryKind]:
        """With which of the agent's requests that is over which was read last at `place`, and by which boundary."""
        end = bisect_right(agent.epochs, agent.epochs[place])
        if place + 1 < end:
            turn_end = bisect_right(agent.turns, agent.turns[place])
            return min(turn_end, end) - 1, BoundaryKind.TURN_END
        return end - 1, BoundaryKind.SESSION_END if end == len(agent.indices) else BoundaryKind.COMPACTION

    def _segments(
        self,
        segment_class: SegmentClass,
        agent: AgentRequests,
        turn: int | None,
        sums: _Sums,
        first: int,
        last: int,
        closed_by: BoundaryKind,
    ) -> list[Segment]:
        """A segment, or none where nothing whole was written. `first` and `last` are places among the agent's requests."""
        if round(sums.tokens) == 0:
            return []
        lifetimes = []
        for times in (self._reference, self._traced):
            opened_s = float(times.starts_s[agent.indices[first]])
            at_end = closed_by is BoundaryKind.SESSION_END
            lifetimes.append((opened_s, times.session_end_s if at_end else float(times.ends_s[agent.indices[last]])))
        (opened_ref_s, closed_ref_s), (opened_s, closed_s) = lifetimes
        return [
            Segment(
                self._session_id,
                segment_class,
                agent.role,
                agent.agent_id,
                turn,
                round(sums.tokens),
                round(sums.reads),
                opened_s,
                closed_s,
                closed_ref_s - opened_ref_s,
                closed_by,
                round(sums.within_turn),
            )
        ]
