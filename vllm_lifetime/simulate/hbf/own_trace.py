# SPDX-License-Identifier: Apache-2.0
"""A real trace as sessions of programs: segments, turns and sub-agents as `vllm-lifetime analyze` finds them, pauses as recorded.

An agent that nobody spawned is one program from one compaction to the next; what it writes and does not read after the turn,
though it goes on, is a `reasoning_laden` program that runs in between, and is freed when the agent reads on without it, which may
be before the turn's end. A sub-agent is one program. Whoever waits for a sub-agent in the trace waits for it here, and one that
runs beside its agent does so here. What several sessions share, and what a program finds there already, it reads only.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vllm_lifetime.agents import subagent_class
from vllm_lifetime.analysis.clock import Delays, reference_times
from vllm_lifetime.analysis.report import AnalysisError, analyze
from vllm_lifetime.analysis.segmentation import dies_with_turn, last_reader_of
from vllm_lifetime.analysis.structure import AgentRequests, Opens, SessionStructure, read_structure
from vllm_lifetime.analysis.writes import BlockTable, SessionWrites
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.simulate.hbf.replay_trace import Program, Request, all_programs
from vllm_lifetime.simulate.hbf.workloads import Session
from vllm_lifetime.traces.read import read_trace
from vllm_lifetime.traces.schema import Trace

__all__ = ["PAUSES", "OwnTrace", "own_trace", "read_own_trace"]

PAUSES = ("trace", "none", "fixed", "paper")
"""Where pauses come from: as recorded; none; always the trace's mean tool or user pause; drawn as Lachesis draws them."""

WHAT_TO_DO = "record a trace with turn ends or sub-agents (docs/boundaries.md), or take a made-up one by its name"


@dataclass(frozen=True, slots=True)
class _Written:
    """What one request writes that outlives its turn, and what does not, in tokens."""

    kept_prefill: int
    kept_decode: int
    laden_prefill: int
    laden_decode: int

    @property
    def prefill(self) -> int:
        return self.kept_prefill + self.laden_prefill


@dataclass(frozen=True, slots=True)
class _RealSession:
    structure: SessionStructure
    written: Sequence[_Written]
    """By request."""


@dataclass(frozen=True)
class OwnTrace:
    """A trace that is ready to be replayed with any pauses."""

    name: str
    idle_cap_s: float
    real_sessions: Sequence[_RealSession]
    scores: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Predicted lifetime of each worker by session and agent, from the other sessions; empty where there are too few."""
    predictor_tau: float | None = None
    """Kendall's tau of that prediction and the truth."""

    def sessions(self, *, pauses: str = "trace", seed: int = 0, ttft_s: float) -> list[Session]:
        """The sessions as programs. `pauses`: one of `PAUSES`; `seed`: for `paper`. Raises ValueError. O(requests)."""
        waits = self._waits(pauses, seed)
        sessions = [
            Session(self.name, _Builder(real, wait_s, ttft_s).root(self.scores))
            for real, wait_s in zip(self.real_sessions, waits, strict=True)
        ]
        workers = [program for session in sessions for program in all_programs(session.root) if _is_worker(program)]
        mean = float(np.mean([worker.tokens for worker in workers])) if workers else 0.0
        for worker in workers:
            worker.expected_tokens = mean
        return sessions

    def describe(self) -> str:
        """What the trace holds, in a sentence or two."""
        requests = sum(len(real.written) for real in self.real_sessions)
        tokens: Counter[str] = Counter()
        for session in self.sessions(ttft_s=0.0):
            for program in all_programs(session.root):
                tokens[program.segment_class.value] += program.tokens
        total = tokens.total()
        shares = ", ".join(f"{name} {count / total:.1%}" for name, count in tokens.most_common())
        text = f"{self.name}: {len(self.real_sessions):,} sessions, {requests:,} requests, {total:,} tokens written ({shares})."
        subagents = sum(not agent.is_root for real in self.real_sessions for agent in real.structure.agents)
        if subagents:
            tau = "too few to rank" if self.predictor_tau is None else f"ranked with Kendall's tau {self.predictor_tau:.2f}"
            text += f" {subagents:,} sub-agents, {tau}."
        means = self._mean_pauses()
        named = {"tool": Opens.OBSERVATION, "user": Opens.MESSAGE}
        return text + " Mean pauses: " + ", ".join(f"{name} {means.get(opens, 0.0):.1f} s" for name, opens in named.items()) + "."

    def _waits(self, pauses: str, seed: int) -> list[list[float]]:
        if pauses not in PAUSES:
            raise ValueError(f"unknown pauses {pauses!r}; there are {', '.join(PAUSES)}")
        if pauses == "fixed":
            means = self._mean_pauses()
            return [[means[opens] for opens in real.structure.opens] for real in self.real_sessions]
        delays = Delays(modelled=pauses == "paper", idle_cap_s=0.0 if pauses == "none" else self.idle_cap_s, seed=seed)
        random = np.random.default_rng(seed)
        return [_pauses_s(real.structure, delays, random) for real in self.real_sessions]

    def _mean_pauses(self) -> dict[Opens, float]:
        found: dict[Opens, list[float]] = {}
        for real, waits in zip(self.real_sessions, self._waits("trace", 0), strict=True):
            for opens, wait_s in zip(real.structure.opens, waits, strict=True):
                found.setdefault(opens, []).append(wait_s)
        return {opens: float(np.mean(waits)) for opens, waits in found.items()}


def read_own_trace(path: Path, format: str, idle_cap_s: float) -> OwnTrace:
    """Read a trace of any format of `TRACE_FORMATS`. As `own_trace`; raises TraceError (a ValueError) as well."""
    return own_trace(read_trace(path, format), path.name.partition(".")[0] or format, idle_cap_s)


def own_trace(trace: Trace, name: str, idle_cap_s: float) -> OwnTrace:
    """Make a trace ready. Pauses longer than `idle_cap_s` are cut to it.

    Raises ValueError: nothing in it, or no boundaries. Time and memory as `vllm-lifetime analyze` takes.
    """
    if not 0 <= idle_cap_s < float("inf"):
        raise ValueError(f"the idle cap must be a number of seconds of at least 0; this is {idle_cap_s:g}")
    try:
        analysis = analyze(trace, Delays(idle_cap_s=idle_cap_s))
    except AnalysisError as error:
        raise ValueError(f"{name}: {error}; {WHAT_TO_DO}") from None
    table = BlockTable(trace)
    real = []
    for number, session in enumerate(trace.sessions):
        if session.requests:
            structure = read_structure(session)
            real.append(_RealSession(structure, _split(structure, table.session_writes(number))))
    scores: dict[tuple[str, str], float] = {}
    rank = analysis.spawn_rank
    if rank is not None:
        # `rank` holds the workers in the order of their segments.
        workers = (segment for segment in analysis.segments if segment.segment_class is SegmentClass.WORKER)
        for worker, score in zip(workers, rank.predicted.tolist(), strict=True):
            scores[worker.session_id, worker.agent_id] = score
    return OwnTrace(name, idle_cap_s, real, scores, None if rank is None else rank.tau)


def _pauses_s(structure: SessionStructure, delays: Delays, random: np.random.Generator) -> list[float]:
    times = reference_times(structure, delays, random)
    before = [float(times.ends_s[request.after]) if request.after >= 0 else 0.0 for request in structure.session.requests]
    return [max(0.0, float(start_s) - end_s) for start_s, end_s in zip(times.starts_s, before, strict=True)]


def _is_worker(program: Program) -> bool:
    return program.segment_class is SegmentClass.WORKER


# ------------------------------------------------------------------------------------------------ what outlives its turn


def _split(structure: SessionStructure, written: SessionWrites) -> list[_Written]:
    """By request. A prompt is read from its front, so of what a request writes the first part is kept and the rest is not."""
    kept = [0.0] * len(structure.session.requests)
    total = [0.0] * len(structure.session.requests)
    places = {index: (agent, place) for agent in structure.agents for place, index in enumerate(agent.indices)}
    for write in written.writes:
        agent, place = places[write.writer]
        total[write.writer] += write.tokens
        if not (agent.is_root and dies_with_turn(agent, place, last_reader_of(agent, place, write))):
            kept[write.writer] += write.tokens
    parts = []
    for index, prefill in enumerate(written.prefill_tokens):
        kept_prefill = min(kept[index], prefill)
        kept_decode = kept[index] - kept_prefill
        laden_prefill = max(0.0, prefill - kept_prefill)
        laden_decode = max(0.0, total[index] - prefill - kept_decode)
        parts.append(_Written(round(kept_prefill), round(kept_decode), round(laden_prefill), round(laden_decode)))
    return parts


# ------------------------------------------------------------------------------------------------ programs


class _Writer:
    """Appends requests to a segment's program; to another one of its class once something runs beside it."""

    def __init__(self, segment_class: SegmentClass, parent_tokens: int | None = None) -> None:
        self.program = Program(segment_class, reads_parent=parent_tokens is not None)
        self.tokens = 0
        """Of the segment, whichever program holds them."""
        self._parent_tokens = parent_tokens or 0
        self._splits_at: Request | None = None

    @property
    def last(self) -> Request | None:
        return self.program.requests[-1] if self.program.requests else None

    def add(self, request: Request, context_tokens: int) -> Request:
        """`context_tokens`: what stands before what the request writes, its own segment included."""
        if self._splits_at is not None:
            program = Program(self.program.segment_class, reads_parent=True, score=self.program.score)
            self._splits_at.children.append(program)
            self.program, self._parent_tokens, self._splits_at = program, self.tokens, None
        if not self.program.requests:
            self.program.shared_tokens = max(0, context_tokens - self._parent_tokens)
        self.program.requests.append(request)
        self.tokens += request.prefill_tokens + request.decode_tokens
        return request

    def go_on_beside(self, request: Request) -> None:
        """What `request` started runs beside the requests that follow."""
        self._splits_at = request


class _Builder:
    """Makes the programs of one session. `waits_s`: pause before each request."""

    def __init__(self, real: _RealSession, waits_s: Sequence[float], ttft_s: float) -> None:
        self._real, self._waits_s, self._ttft_s = real, waits_s, ttft_s
        self._agents = {agent.agent_id: agent for agent in real.structure.agents}
        self._started: dict[int, list[AgentRequests]] = {}
        self._followers: dict[str, AgentRequests] = {}
        self._last_index = {name: agent.indices[-1] for name, agent in self._agents.items()}
        self._programs: dict[str, Program] = {}

    def root(self, scores: Mapping[tuple[str, str], float]) -> Program:
        first, *others = self._real.structure.agents
        owners = {index: agent for agent in self._real.structure.agents for index in agent.indices}
        for agent in others:
            self._attach(agent, owners)
        session_id = self._real.structure.session.session_id
        # Whoever starts or follows another began later.
        for agent in reversed(self._real.structure.agents):
            follower = self._followers.get(agent.agent_id)
            if follower is not None:
                self._last_index[agent.agent_id] = max(self._last_index[agent.agent_id], self._last_index[follower.agent_id])
            self._programs[agent.agent_id] = self._program(agent, scores.get((session_id, agent.agent_id), float("nan")))
        return self._programs[first.agent_id]

    def _attach(self, agent: AgentRequests, owners: Mapping[int, AgentRequests]) -> None:
        """Find the request that starts `agent`, or the sub-agent that it follows."""
        begins = agent.indices[0]
        after = self._real.structure.session.requests[begins].after
        parent = self._agents.get(agent.parent_agent_id or "") if agent.parent_agent_id != agent.agent_id else None
        if after >= 0 and (parent is None or owners[after] is parent):
            self._started.setdefault(after, []).append(agent)
            return
        if after >= 0:
            before = owners[after]
            is_sibling = not before.is_root and before.parent_agent_id == agent.parent_agent_id
            if is_sibling and after == before.indices[-1] and before.agent_id not in self._followers:
                self._followers[before.agent_id] = agent
                return
        place = bisect_right(parent.indices, begins) - 1 if parent is not None else -1
        host = parent.indices[place] if parent is not None and place >= 0 else 0
        self._started.setdefault(host, []).append(agent)

    def _program(self, agent: AgentRequests, score: float) -> Program:
        structure = self._real.structure
        if not agent.is_root:
            segment_class = subagent_class(agent.role)
        else:
            segment_class = SegmentClass.LEAD if agent.has_children else SegmentClass.REASONING_STRIPPED
        kept = _Writer(segment_class)
        kept.program.score = score
        first = epoch = kept.program
        laden: _Writer | None = None
        for place, index in enumerate(agent.indices):
            written = self._real.written[index]
            if place and agent.is_root and agent.epochs[place] != agent.epochs[place - 1]:
                kept, laden = _Writer(segment_class), None
                epoch.successor = kept.program
                epoch = kept.program
            if place and agent.turns[place] != agent.turns[place - 1]:
                laden = None
            context = max(0, structure.session.requests[index].input_tokens - written.prefill)
            wait_s, ttft_s, answers_user = self._waits_s[index], self._ttft_s, structure.opens[index] is Opens.MESSAGE
            last: Request | None = None
            has_laden = written.laden_prefill or written.laden_decode
            if written.kept_prefill or written.kept_decode or not has_laden:
                request = Request(written.kept_prefill, written.kept_decode, wait_s, ttft_s, answers_user=answers_user)
                last, laden = kept.add(request, context), None
                wait_s = ttft_s = 0.0
            if has_laden:
                if laden is None:
                    holder = kept.last
                    if holder is None or holder.children:
                        holder = kept.add(Request(0, 0), context)
                    laden = _Writer(SegmentClass.REASONING_LADEN, kept.tokens)
                    holder.children.append(laden.program)
                request = Request(written.laden_prefill, written.laden_decode, wait_s, ttft_s, answers_user=answers_user)
                last = laden.add(request, context + written.kept_prefill + written.kept_decode)
            started = self._started.get(index)
            if started and last is not None:
                last.children += [self._programs[child.agent_id] for child in started]
                goes_on = agent.indices[place + 1] if place + 1 < len(agent.indices) else None
                if goes_on is not None and any(self._last_index[child.agent_id] > goes_on for child in started):
                    (laden or kept).go_on_beside(last)
        follower = self._followers.get(agent.agent_id)
        if follower is not None:
            epoch.successor = self._programs[follower.agent_id]
        return first
