# SPDX-License-Identifier: Apache-2.0
"""Which split of HBM and HBF suits a workload: which lasts longest, which serves most, and what would change that."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.simulate.hbf.hardware import Device, load_device, load_model
from vllm_lifetime.simulate.hbf.node import ADMISSION_POLICY, SimulationError
from vllm_lifetime.simulate.hbf.replay_trace import NO_PROGRAM, Program, ReplayTrace, Request, all_programs, build_trace
from vllm_lifetime.simulate.hbf.sweep import SLOS_S, Cell, ResultRow, Setup, each_cell, parse_slo, run_cell
from vllm_lifetime.simulate.hbf.workloads import Session

__all__ = [
    "BASE",
    "Advice",
    "Outcome",
    "Scale",
    "Variant",
    "VariantAdvice",
    "advise",
    "fit_durations",
    "scaled",
    "sentence_of",
    "variants",
    "years_text",
]

BASE = "as it is"
WARRANTY_YEARS = 5.0
SAME = 0.03
"""Results that are nearer than this part of each other are equal here: few sessions run at a time, and some write very much."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Factors for what requests decode, what is new in their prompts, and how long their tools take."""

    outputs: float = 1.0
    observations: float = 1.0
    tools: float = 1.0


@dataclass(frozen=True, slots=True)
class Variant:
    """The workload and the device, with one thing changed. `endurance`: factor for the program/erase cycles."""

    name: str
    slo: str
    scale: Scale = Scale()
    endurance: float = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy came to on one configuration; means over the seeds."""

    variant: str
    config: str
    policy: str
    sessions: float
    lifetime_years: float
    write_gb_per_s: float
    hbm_write_share: float
    tpot_p99_s: float
    is_settled: bool


@dataclass(frozen=True, slots=True)
class VariantAdvice:
    """For one variant, the outcome that lasts longest, and of those that serve most sessions the one that does."""

    variant: str
    longest: Outcome
    most_sessions: Outcome


@dataclass(frozen=True, slots=True)
class Advice:
    """All of it for one model. `failed`: for each variant and configuration that could not be run, why."""

    trace: str
    model: str
    slo: str
    sentence: str
    outcomes: Sequence[Outcome]
    picks: Sequence[VariantAdvice]
    failed: Mapping[tuple[str, str], str]


@dataclass(frozen=True, slots=True)
class _Failed:
    variant: str
    config: str
    reason: str


def variants(slo: str) -> list[Variant]:
    """The workload as it is under `slo`, and with one thing changed at a time."""
    found = [Variant(BASE, slo)]
    found += [Variant(f"SLO {name}", name) for name in SLOS_S if parse_slo(name) != parse_slo(slo)]
    for factor in (0.5, 2.0):
        found.append(Variant(f"outputs x{factor:g}", slo, Scale(outputs=factor)))
    for factor in (0.5, 2.0):
        found.append(Variant(f"observations x{factor:g}", slo, Scale(observations=factor)))
    for factor in (0.25, 4.0):
        found.append(Variant(f"tool latency x{factor:g}", slo, Scale(tools=factor)))
    found += [Variant(f"endurance x{factor:g}", slo, endurance=factor) for factor in (0.3, 0.1)]
    return found


def scaled(sessions: Sequence[Session], scale: Scale) -> list[Session]:
    """Copies of the sessions with other sizes and pauses. A user's pauses and shared prefixes stay. O(requests)."""
    found = [Session(session.workload, _scaled(session.root, scale)) for session in sessions]
    before, after = (sum(_worker_tokens(session.root) for session in some) for some in (sessions, found))
    if before:
        for session in found:
            for program in all_programs(session.root):
                program.expected_tokens *= after / before
    return found


def _scaled(root: Program, scale: Scale) -> Program:
    copies: dict[int, Program] = {}
    for program in reversed(all_programs(root)):
        requests = [
            Request(
                _tokens(request.prefill_tokens * scale.observations),
                _tokens(request.decode_tokens * scale.outputs),
                wait_s=request.wait_s * (1.0 if request.answers_user else scale.tools),
                ttft_s=request.ttft_s,
                children=[copies[id(child)] for child in request.children],
                answers_user=request.answers_user,
            )
            for request in program.requests
        ]
        successor = None if program.successor is None else copies[id(program.successor)]
        copies[id(program)] = replace(program, requests=requests, successor=successor)
    return copies[id(root)]


def _tokens(value: float) -> int:
    return max(1, round(value)) if value else 0


def _worker_tokens(root: Program) -> int:
    return sum(program.tokens for program in all_programs(root) if program.segment_class is SegmentClass.WORKER)


def fit_durations(setup: Setup, sessions: Sequence[Session], slo_s: float) -> Setup:
    """`setup`, with runs of several mean sessions: what an SLO admits is known when long sessions have come to their end."""
    mean_s = _mean_session_s(build_trace([session.root for session in sessions], slo_s))
    return replace(
        setup,
        admission_warmup_s=max(setup.admission_warmup_s, 1.5 * mean_s),
        admission_measure_s=max(setup.admission_measure_s, 3 * mean_s),
        warmup_s=max(setup.warmup_s, 2 * mean_s),
        measure_s=max(setup.measure_s, 4 * mean_s),
    )


def _mean_session_s(trace: ReplayTrace) -> float:
    total_s = 0.0
    for first in trace.session_program:
        program = int(first)
        while program != NO_PROGRAM:
            total_s += float(trace.programs["lifetime_s"][program])
            program = int(trace.programs["successor"][program])
    return total_s / len(trace.session_program)


def advise(
    setup: Setup,
    name: str,
    sessions: Sequence[Session],
    model: str,
    configs: Sequence[str],
    slo: str,
    policies: Sequence[str],
    *,
    seeds: int = 1,
    processes: int = 1,
    on_start: Callable[[int], None] = lambda cells: None,
    on_done: Callable[[Cell], None] = lambda cell: None,
) -> Advice:
    """Run every variant of the workload on every configuration. Raises ValueError if none can be run with the workload as it is.

    `name`: of the workload, for the sentence; `on_start` hears how many cells there are, `on_done` of each.
    """
    load_model(model)
    device = load_device(setup.device)
    tpot_s = device.gpu.reference_tpot.value
    every = variants(slo)
    run = [variant for variant in every if variant.endurance == 1.0]
    plans = {}
    for variant in run:
        some = scaled(sessions, variant.scale)
        trace = build_trace([session.root for session in some], tpot_s)
        plans[variant.name] = fit_durations(setup, some, parse_slo(variant.slo)), trace
    cells = [
        Cell(model, config, variant.slo, variant.name, seed) for variant in run for config in configs for seed in range(seeds)
    ]
    on_start(len(cells))
    found = each_cell(partial(_run_one, plans, policies), cells, processes, on_done)
    failed = {(row.variant, row.config): row.reason for row in found if isinstance(row, _Failed)}
    rows = [row for row in found if isinstance(row, ResultRow) and (row.trace, row.config) not in failed]
    outcomes = _outcomes(every, configs, policies, rows)
    if not any(outcome.variant == BASE for outcome in outcomes):
        raise SimulationError(f"no configuration can run {name}: {next(iter(failed.values()))}")
    picks = [_pick(variant.name, outcomes) for variant in every if any(o.variant == variant.name for o in outcomes)]
    sentence = sentence_of(name, model, slo, device, outcomes)
    return Advice(name, model, slo, sentence, outcomes, picks, failed)


def _run_one(plans: Mapping[str, tuple[Setup, ReplayTrace]], policies: Sequence[str], cell: Cell) -> list[ResultRow | _Failed]:
    setup, trace = plans[cell.trace]
    try:
        return list(run_cell(setup, cell, policies, trace))
    except SimulationError as error:
        return [_Failed(cell.trace, cell.config, str(error))]


def _outcomes(
    every: Sequence[Variant], configs: Sequence[str], policies: Sequence[str], rows: Sequence[ResultRow]
) -> list[Outcome]:
    by_key: dict[tuple[str, str, str], list[ResultRow]] = {}
    for row in rows:
        by_key.setdefault((row.trace, row.config, row.policy), []).append(row)
    outcomes = []
    for variant in every:
        source = variant.name if variant.endurance == 1.0 else BASE
        for config in configs:
            for policy in policies:
                found = by_key.get((source, config, policy))
                if found:
                    outcomes.append(_outcome(variant, config, policy, found))
    return outcomes


def _outcome(variant: Variant, config: str, policy: str, rows: Sequence[ResultRow]) -> Outcome:
    return Outcome(
        variant=variant.name,
        config=config,
        policy=policy,
        sessions=statistics.fmean(row.sessions for row in rows),
        lifetime_years=variant.endurance * statistics.fmean(row.lifetime_years for row in rows),
        write_gb_per_s=statistics.fmean(row.write_gb_per_s for row in rows),
        hbm_write_share=statistics.fmean(row.hbm_write_share for row in rows),
        tpot_p99_s=statistics.fmean(row.tpot_p99_s for row in rows),
        is_settled=all(row.is_settled for row in rows),
    )


def _pick(variant: str, outcomes: Sequence[Outcome]) -> VariantAdvice:
    own = [outcome for outcome in outcomes if outcome.variant == variant]
    longest = max(own, key=lambda outcome: outcome.lifetime_years)
    most = max(outcome.sessions for outcome in own)
    serving = [outcome for outcome in own if outcome.sessions >= (1 - SAME) * most]
    return VariantAdvice(variant, longest, max(serving, key=lambda outcome: outcome.lifetime_years))


# ------------------------------------------------------------------------------------------------ in words


def sentence_of(name: str, model: str, slo: str, device: Device, outcomes: Sequence[Outcome]) -> str:
    """The advice in words, apart for each number of stacks: that more stacks last longer says nothing of how to split them."""
    totals: dict[int, list[str]] = {}
    for config in dict.fromkeys(outcome.config for outcome in outcomes):
        split = device.configuration(config)
        totals.setdefault(split.hbm_stacks + split.hbf_stacks, []).append(config)
    parts = [
        _about(stacks, [outcome for outcome in outcomes if outcome.config in configs])
        for stacks, configs in sorted(totals.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return f"For {name} on {model} at {1000 * parse_slo(slo):g} ms: {'; '.join(parts)}."


def years_text(outcome: Outcome) -> str:
    """Its lifetime in years, with as many digits as say something."""
    years = outcome.lifetime_years
    if math.isinf(years):
        return "endless"
    return f"{years:.1f}" if years >= 1 else f"{years:.2g}"


def _about(stacks: int, outcomes: Sequence[Outcome]) -> str:
    names = list(dict.fromkeys(outcome.variant for outcome in outcomes))
    if BASE not in names:
        return f"no split of {stacks} stacks can run it as it is"
    picks = {variant: _pick(variant, outcomes) for variant in names}
    base = picks[BASE]
    best, most = base.longest, base.most_sessions
    splits = len(dict.fromkeys(outcome.config for outcome in outcomes))
    text = f"with {stacks} stacks, {best.config} under {best.policy} lasts " + ("longest, " if splits > 1 else "")
    text += f"{years_text(best)} years"
    reference = [o for o in outcomes if (o.variant, o.config, o.policy) == (BASE, best.config, ADMISSION_POLICY)]
    if reference and best.policy != ADMISSION_POLICY and math.isfinite(best.lifetime_years):
        text += f" ({best.lifetime_years / reference[0].lifetime_years:.2f} times {ADMISSION_POLICY})"
    if best.lifetime_years < WARRANTY_YEARS:
        text += f", less than a warranty of {WARRANTY_YEARS:g} years"
    text += f", and serves {best.sessions:.0f} sessions"
    if splits == 1:
        return text
    if best.sessions >= (1 - SAME) * most.sessions:
        text += ", as many as any"
    else:
        text += f", while {most.config} serves most, {most.sessions:.0f}, and lasts {years_text(most)} years"
    others = [variant for variant in names if variant != BASE]
    changed = []
    for variant in others:
        here = max((o.lifetime_years for o in outcomes if (o.variant, o.config) == (variant, best.config)), default=0.0)
        if here < (1 - SAME) * picks[variant].longest.lifetime_years:
            changed.append(f"{variant} ({picks[variant].longest.config})")
    if not others:
        return text
    holds = f"all {len(others)}" if not changed else f"{len(others) - len(changed)} of {len(others)}"
    text += f"; {best.config} stays the longest-lived in {holds} variants"
    return text + (f", not with {', '.join(changed)}" if changed else "")
