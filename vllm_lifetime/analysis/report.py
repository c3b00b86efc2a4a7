# SPDX-License-Identifier: Apache-2.0
"""Lachesis section 3 on one trace: what is written, how long it lives, and which axis tells short-lived from long-lived."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_lifetime.analysis.clock import Delays, reference_times, trace_times
from vllm_lifetime.analysis.reasoning import Output
from vllm_lifetime.analysis.segmentation import Segment, session_segments
from vllm_lifetime.analysis.spawn_rank import Spawn, SpawnRank, rank_spawns
from vllm_lifetime.analysis.statistics import kendall_tau, median_ratio, overlap, separability, spread
from vllm_lifetime.analysis.stripping import StrippedTurn, strip_session, turn_reasoning
from vllm_lifetime.analysis.structure import SessionStructure, read_structure
from vllm_lifetime.analysis.waiting import Waiting, lead_waiting
from vllm_lifetime.analysis.writes import BlockTable
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.traces.prompts import common_prefix
from vllm_lifetime.traces.schema import Trace

__all__ = [
    "Analysis",
    "AnalysisError",
    "ClassSummary",
    "Comparison",
    "InterWorkerAxis",
    "Stripping",
    "StructuralAxis",
    "TemporalAxis",
    "analyze",
]

KEPT_PART = 0.9
"""A turn's end drops context if the next turn begins with less than this part of the last prompt, in blocks."""
MIN_WRITTEN_SHARE, MIN_SEPARABILITY = 0.05, 0.7
"""An axis pays if its short-lived side holds at least this share of all written tokens and is told apart at least so well."""


class AnalysisError(ValueError):
    """The trace has nothing to analyse; the message is one sentence that says why."""


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """One segment class: tokens written, T_norm in seconds, and reads per written token. None where there is no lifetime."""

    segment_class: SegmentClass
    segments: int
    written_tokens: int
    written_share: float
    median_tokens: float
    mean_tokens: float
    median_lifetime_s: float | None
    p10_lifetime_s: float | None
    p90_lifetime_s: float | None
    median_reads_per_write: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A long-lived class beside a short-lived one. None where one of them has no segments."""

    long: SegmentClass
    short: SegmentClass
    lifetime_ratio: float | None
    """Median over median."""
    separability: float | None
    reads_per_write_overlap: float | None


@dataclass(frozen=True, slots=True)
class Stripping:
    """What stripping reasoning at each turn's end would do, over the turns at whose end nothing was dropped."""

    turns: int
    reasoning_share: float
    """Of the tokens that a turn writes into its context, answers and observations, those that are reasoning."""
    laden_share: float
    """Of what a turn would write into both classes (the paper's 66-83 %)."""
    lifetime_ratio: float | None
    separability: float | None
    long_lived_saved: float
    """Share of the tokens that outlive their turn now and would not be among those that did then."""
    written_more: float
    """How much more would be written in all, as a share of what is written now."""


@dataclass(frozen=True, slots=True)
class TemporalAxis:
    """Turn ends of agents that nobody spawned."""

    turn_ends: int
    """Those that another turn follows, without compactions."""
    shrunk_turn_ends: int
    """Those after which the next turn began with fewer tokens."""
    dropped_turn_ends: int
    """Those after which it read again less than nine tenths of the last prompt."""
    written_share: float
    """Of all written tokens, those that are `reasoning_laden`."""
    turn_share: float
    """The same, of what agents write that nobody spawned."""
    within_turn_share: float | None
    """Of those, what was dropped before its turn had ended."""
    comparison: Comparison
    median_reasoning_share: float | None
    """Of what an agent generates in a turn; None where the trace does not tell."""
    stripping: Stripping | None


@dataclass(frozen=True, slots=True)
class StructuralAxis:
    """Sub-agents and their leads. Waiting is a median over leads, as a share of the lead's lifetime."""

    sessions: int
    written_share: float
    """Of all written tokens, those of sub-agents."""
    written_share_in_sessions: float
    """The same, of what the sessions that have sub-agents write."""
    comparisons: Sequence[Comparison]
    waiting_share: float | None
    waiting_share_without_user: float | None
    """The same where the user's pauses are taken out of the lifetime."""


@dataclass(frozen=True, slots=True)
class InterWorkerAxis:
    """Workers beside each other: 90th over 10th percentile of lifetime and written tokens, and Kendall's tau of the two."""

    workers: int
    lifetime_spread: float | None
    volume_spread: float | None
    lifetime_volume_tau: float | None
    predicted_tau: float | None
    """Kendall's tau of the lifetimes and their prediction at spawn; None with too few workers."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """All of it. An axis that the trace cannot show is None, and `remarks` has a sentence for it."""

    name: str
    sessions: int
    requests: int
    delays: Delays
    classes: Sequence[ClassSummary]
    temporal: TemporalAxis | None
    structural: StructuralAxis | None
    inter_worker: InterWorkerAxis | None
    verdict: str
    remarks: Sequence[str]
    segments: Sequence[Segment]
    stripped_turns: Sequence[StrippedTurn]
    spawn_rank: SpawnRank | None


def analyze(
    trace: Trace,
    delays: Delays | None = None,
    outputs: Mapping[str, Sequence[Output]] | None = None,
    on_session: Callable[[], None] = lambda: None,
) -> Analysis:
    """Analyse a trace. `outputs` says how much of what main agents generated is reasoning (`reasoning.py`).

    Raises AnalysisError. O(blocks of all prompts + workers^2).
    """
    delays = delays or Delays()
    sessions = [(number, session) for number, session in enumerate(trace.sessions) if session.requests]
    if not sessions:
        raise AnalysisError("the trace has no requests")
    structures = [(number, read_structure(session)) for number, session in sessions]
    has_turns = any(agent.is_root and agent.turns[-1] for _, structure in structures for agent in structure.agents)
    has_subagents = any(not agent.is_root for _, structure in structures for agent in structure.agents)
    if not has_turns and not has_subagents:
        raise AnalysisError(
            "the trace has no boundaries to measure lifetimes by: no session goes on after a turn's end, and no agent is "
            "another's sub-agent"
        )
    if len(sessions) < 2:
        raise AnalysisError("the trace has one session; lifetimes are compared over at least two")
    table = BlockTable(trace)
    rng = np.random.default_rng(delays.seed)
    found = _Found()
    for number, structure in structures:
        written = table.session_writes(number)
        times = reference_times(structure, delays, rng)
        segments = session_segments(structure, written, times, trace_times(structure.session))
        found.segments += segments
        found.waiting += lead_waiting(structure, times)
        found.spawns += _spawns(structure, segments)
        found.count_turn_ends(structure)
        own = (outputs or {}).get(structure.session.session_id)
        if own is not None:
            found.reasoning_shares += turn_reasoning(structure, own)
            found.stripped_turns += strip_session(structure, written, times, own)
        on_session()
    return _analysis(trace, delays, found, has_turns, has_subagents)


class _Found:
    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.waiting: list[Waiting] = []
        self.spawns: list[Spawn] = []
        self.stripped_turns: list[StrippedTurn] = []
        self.reasoning_shares: list[float] = []
        self.turn_ends = self.shrunk = self.dropped = 0

    def count_turn_ends(self, structure: SessionStructure) -> None:
        requests = structure.session.requests
        for agent in structure.agents:
            if not agent.is_root:
                continue
            for place in range(1, len(agent.indices)):
                if agent.turns[place] == agent.turns[place - 1] or agent.epochs[place] != agent.epochs[place - 1]:
                    continue
                last, following = requests[agent.indices[place - 1]], requests[agent.indices[place]]
                self.turn_ends += 1
                self.shrunk += following.input_tokens < last.input_tokens
                self.dropped += common_prefix(last.blocks, following.blocks) < KEPT_PART * len(last.blocks)

    def of(self, *classes: SegmentClass) -> list[Segment]:
        return [segment for segment in self.segments if segment.segment_class in classes]


def _spawns(structure: SessionStructure, segments: Sequence[Segment]) -> list[Spawn]:
    lifetimes = {s.agent_id: s.lifetime_s for s in segments if s.segment_class is SegmentClass.WORKER}
    subagents = [agent for agent in structure.agents if not agent.is_root]
    spawns = []
    for position, agent in enumerate(subagents):
        lifetime_s = lifetimes.get(agent.agent_id)
        if lifetime_s is None:
            continue
        first = agent.indices[0]
        longest = max((request.input_tokens for request in structure.session.requests[:first]), default=0)
        prompt = structure.session.requests[first].input_tokens
        spawns.append(Spawn(structure.session.session_id, agent.role, prompt, position, longest, lifetime_s))
    return spawns


def _analysis(trace: Trace, delays: Delays, found: _Found, has_turns: bool, has_subagents: bool) -> Analysis:
    total = sum(segment.written_tokens for segment in found.segments)
    if not total:
        raise AnalysisError("the sessions write no tokens")
    remarks = []
    temporal = _temporal(found, total) if has_turns else None
    if temporal is None:
        remarks.append("No temporal axis: no session of this trace goes on after a turn's end.")
    elif not found.reasoning_shares:
        remarks.append("How much of a turn is reasoning is not in this trace, nor what stripping it would do.")
    structural = _structural(found, total) if has_subagents else None
    rank = rank_spawns(found.spawns)
    inter_worker = _inter_worker(found, rank) if has_subagents else None
    if structural is None:
        remarks.append("No structural and no inter-worker axis: this trace holds no requests of sub-agents.")
    elif rank is None:
        remarks.append("The order of workers' lifetimes is not predicted: 20 workers of 5 sessions are needed.")
    return Analysis(
        name=trace.name,
        sessions=sum(bool(session.requests) for session in trace.sessions),
        requests=sum(len(session.requests) for session in trace.sessions),
        delays=delays,
        classes=_classes(found, total),
        temporal=temporal,
        structural=structural,
        inter_worker=inter_worker,
        verdict=_verdict(temporal, structural),
        remarks=remarks,
        segments=found.segments,
        stripped_turns=found.stripped_turns,
        spawn_rank=rank,
    )


def _classes(found: _Found, total: int) -> list[ClassSummary]:
    rows = []
    for segment_class in SegmentClass:
        own = found.of(segment_class)
        if not own:
            continue
        tokens = [segment.written_tokens for segment in own]
        lifetimes = _lifetimes(own)
        p10, p50, p90 = np.percentile(lifetimes, [10, 50, 90]).tolist() if lifetimes else (None, None, None)
        ratios = _ratios(own)
        rows.append(
            ClassSummary(
                segment_class=segment_class,
                segments=len(own),
                written_tokens=sum(tokens),
                written_share=sum(tokens) / total,
                median_tokens=float(np.median(tokens)),
                mean_tokens=float(np.mean(tokens)),
                median_lifetime_s=p50,
                p10_lifetime_s=p10,
                p90_lifetime_s=p90,
                median_reads_per_write=float(np.median(ratios)) if ratios else None,
            )
        )
    return rows


def _temporal(found: _Found, total: int) -> TemporalAxis:
    laden = found.of(SegmentClass.REASONING_LADEN)
    written = sum(segment.written_tokens for segment in laden)
    within = sum(segment.within_turn_tokens for segment in laden)
    kept = sum(s.written_tokens for s in found.of(SegmentClass.REASONING_STRIPPED, SegmentClass.LEAD))
    shares = found.reasoning_shares
    return TemporalAxis(
        turn_ends=found.turn_ends,
        shrunk_turn_ends=found.shrunk,
        dropped_turn_ends=found.dropped,
        written_share=written / total,
        turn_share=written / (written + kept) if written else 0.0,
        within_turn_share=within / written if written else None,
        comparison=_compare(found, SegmentClass.REASONING_STRIPPED, SegmentClass.REASONING_LADEN),
        median_reasoning_share=float(np.median(shares)) if shares else None,
        stripping=_stripping(found.stripped_turns),
    )


def _stripping(turns: Sequence[StrippedTurn]) -> Stripping | None:
    laden = sum(turn.laden_tokens for turn in turns)
    stripped = sum(turn.stripped_tokens for turn in turns)
    now = laden + sum(turn.kept_tokens for turn in turns)
    if not now or not laden:
        return None
    # A turn without reasoning is not written again: it is long-lived already when it is written.
    reasoning_free = sum(turn.laden_tokens for turn in turns if not turn.reasoning_tokens)
    lives_on = stripped + reasoning_free
    short = [turn.laden_lifetime_s for turn in turns if turn.reasoning_tokens]
    long = [turn.stripped_lifetime_s for turn in turns if turn.reasoning_tokens]
    return Stripping(
        turns=len(turns),
        reasoning_share=sum(turn.reasoning_tokens for turn in turns) / laden,
        laden_share=(laden - reasoning_free) / (laden + stripped),
        lifetime_ratio=median_ratio(long, short),
        separability=separability(long, short),
        long_lived_saved=1 - lives_on / now,
        written_more=(laden + stripped) / now - 1,
    )


def _structural(found: _Found, total: int) -> StructuralAxis:
    subagents = found.of(SegmentClass.WORKER, SegmentClass.REVIEWER)
    written = sum(segment.written_tokens for segment in subagents)
    sessions = {segment.session_id for segment in subagents}
    in_sessions = sum(segment.written_tokens for segment in found.segments if segment.session_id in sessions)
    waiting = [w for w in found.waiting if w.lifetime_s > 0]
    without_user = [w.for_subagents_s / (w.lifetime_s - w.for_user_s) for w in waiting if w.lifetime_s > w.for_user_s]
    return StructuralAxis(
        sessions=len(sessions),
        written_share=written / total,
        written_share_in_sessions=written / in_sessions if in_sessions else 0.0,
        comparisons=[
            _compare(found, SegmentClass.LEAD, short) for short in (SegmentClass.WORKER, SegmentClass.REVIEWER) if found.of(short)
        ],
        waiting_share=float(np.median([w.for_subagents_s / w.lifetime_s for w in waiting])) if waiting else None,
        waiting_share_without_user=float(np.median(without_user)) if without_user else None,
    )


def _inter_worker(found: _Found, rank: SpawnRank | None) -> InterWorkerAxis:
    workers = found.of(SegmentClass.WORKER)
    lifetimes, tokens = _lifetimes(workers), [float(worker.written_tokens) for worker in workers]
    return InterWorkerAxis(
        workers=len(workers),
        lifetime_spread=spread(lifetimes),
        volume_spread=spread(tokens),
        lifetime_volume_tau=kendall_tau(lifetimes, tokens),
        predicted_tau=None if rank is None else rank.tau,
    )


def _compare(found: _Found, long: SegmentClass, short: SegmentClass) -> Comparison:
    longer, shorter = found.of(long), found.of(short)
    return Comparison(
        long=long,
        short=short,
        lifetime_ratio=median_ratio(_lifetimes(longer), _lifetimes(shorter)),
        separability=separability(_lifetimes(longer), _lifetimes(shorter)),
        reads_per_write_overlap=overlap(_ratios(longer), _ratios(shorter)),
    )


def _lifetimes(segments: Sequence[Segment]) -> list[float]:
    return [segment.lifetime_s for segment in segments if segment.lifetime_s is not None]


def _ratios(segments: Sequence[Segment]) -> list[float]:
    return [ratio for segment in segments if (ratio := segment.reads_per_write) is not None]


def _verdict(temporal: TemporalAxis | None, structural: StructuralAxis | None) -> str:
    """Which axis pays, in a sentence for each axis, the better one first."""
    axes: list[tuple[bool, float, str, str]] = []
    if temporal is not None:
        share, compared = temporal.written_share, temporal.comparison
        text = (
            f"{share:.1%} of all written tokens are dropped within their turn or at its end ({temporal.dropped_turn_ends:,} of "
            f"{temporal.turn_ends:,} turn ends dropped a tenth of the context or more)"
        )
        if compared.lifetime_ratio is not None and compared.separability is not None:
            text += f", and what is kept lives {compared.lifetime_ratio:.1f}x as long (separability {compared.separability:.2f})"
        axes.append((_pays(share, compared), share, "temporal", text))
    if structural is not None and structural.comparisons:
        share, compared = structural.written_share, structural.comparisons[0]
        text = f"sub-agents write {share:.1%} of all tokens"
        if compared.lifetime_ratio is not None and compared.separability is not None:
            text += (
                f", and their lead's context lives {compared.lifetime_ratio:.1f}x as long as a {compared.short.value}'s "
                f"(separability {compared.separability:.2f})"
            )
        axes.append((_pays(share, compared), share, "structural", text))
    axes.sort(reverse=True)
    lines = []
    for place, (pays, _, name, text) in enumerate(axes):
        what = ("pays most" if len(axes) > 1 and not place else "pays") if pays else "pays little"
        lines.append(f"The {name} axis {what}: {text}.")
    return " ".join(lines)


def _pays(share: float, compared: Comparison) -> bool:
    return share >= MIN_WRITTEN_SHARE and (compared.separability or 0.0) >= MIN_SEPARABILITY
