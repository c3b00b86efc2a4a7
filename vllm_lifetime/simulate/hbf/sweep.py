# SPDX-License-Identifier: Apache-2.0
"""Cells of the evaluation: a model, a configuration, an SLO and a trace, each with several policies and seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TypeVar

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement import PlacementConfig
from vllm_lifetime.policy.placement.lachesis_no_predictive import LachesisNoPredictive
from vllm_lifetime.simulate.hbf.ablations import POLICIES
from vllm_lifetime.simulate.hbf.hardware import Device, Model, load_device, load_model
from vllm_lifetime.simulate.hbf.node import ADMISSION_POLICY, Measurement, NodeRun, SimulationError, admit_sessions, make_node
from vllm_lifetime.simulate.hbf.quantities import with_values
from vllm_lifetime.simulate.hbf.replay_trace import CLASSES, ReplayTrace, build_trace
from vllm_lifetime.simulate.hbf.workload_files import load_structural, load_temporal
from vllm_lifetime.simulate.hbf.workloads import TRACES, Session, make_structural, make_temporal

__all__ = [
    "SLOS_S",
    "Cell",
    "ResultRow",
    "Setup",
    "each_cell",
    "make_sessions",
    "measure_run",
    "parse_slo",
    "run_cell",
    "run_cells",
    "trace_of",
]

SLOS_S = {"tight": 0.060, "loose": 0.100}
"""The paper's SLOs: 99th-percentile time per output token (section 5.2)."""

Row = TypeVar("Row")


@dataclass(frozen=True)
class Setup:
    """What all cells of a sweep share. Names of data files are the package's, or paths ending in .toml.

    `own_admission`: each policy serves as many sessions as it can itself, not as many as HBM-first can. `turnovers`: how often
    HBM-first's pool is written anew while it is measured; its share of HBM writes swings with each.
    """

    device: str = "rubin_hbf"
    structural: str = "structural"
    temporal: str = "temporal"
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    own_admission: bool = False
    admission_warmup_s: float = 600.0
    admission_measure_s: float = 1800.0
    warmup_s: float = 2000.0
    measure_s: float = 8000.0
    turnovers: float = 3.0


@dataclass(frozen=True)
class Cell:
    """One cell. `trace`: one of `TRACES`; `slo`: a name of `SLOS_S`, or milliseconds."""

    model: str
    config: str
    slo: str
    trace: str
    seed: int


@dataclass(frozen=True)
class ResultRow:
    """What one policy came to in a cell. `write_share`: of all KV written, by class and tier. `flash_share`: of what each class
    wrote, the part that went to flash. `flash_used_share`: part of flash's room for KV that holds KV, also dead KV that is kept.
    `is_settled`: HBM-first's pool was full before it was measured, and turned over."""

    model: str
    config: str
    slo: str
    trace: str
    policy: str
    seed: int
    sessions: int
    lifetime_years: float
    hbm_write_share: float
    write_share: dict[str, dict[str, float]]
    flash_share: dict[str, float]
    flash_write_gb_per_s: float
    write_gb_per_s: float
    live_gb: dict[str, float]
    flash_used_share: float
    tpot_p99_s: float
    tpot_mean_s: float
    measured_s: float
    is_settled: bool


def parse_slo(text: str) -> float:
    """Seconds of an SLO that is given by name or in milliseconds. Raises ValueError."""
    if text in SLOS_S:
        return SLOS_S[text]
    try:
        slo_ms = float(text)
    except ValueError:
        slo_ms = -1.0
    if not 0 < slo_ms < float("inf"):
        raise ValueError(f"an SLO is {' or '.join(SLOS_S)}, or a number of milliseconds above 0; this is {text!r}")
    return slo_ms / 1000


def make_sessions(setup: Setup, trace: str, seed: int, changes: Mapping[str, float] | None = None) -> list[Session]:
    """The sessions of a trace. `changes`: other values for quantities of the `general` part of its file.

    Raises ValueError: no such trace, or a data file cannot be used.
    """
    device = load_device(setup.device)
    ttft_s = device.gpu.time_to_first_token.value
    if trace not in TRACES:
        raise ValueError(f"unknown trace {trace!r}; there are {', '.join(TRACES)}")
    if trace.startswith("multi_agent"):
        tpot_s = device.gpu.reference_tpot.value
        file = load_structural(setup.structural)
        file = file.model_copy(update={"general": with_values(file.general, changes or {})})
        return make_structural(file, seed, has_reviewer=trace == "multi_agent", ttft_s=ttft_s, tpot_s=tpot_s)
    dialogues = load_temporal(setup.temporal)
    dialogues = dialogues.model_copy(update={"general": with_values(dialogues.general, changes or {})})
    return make_temporal(dialogues, trace, seed, ttft_s=ttft_s)


@cache
def _trace(setup: Setup, trace: str, seed: int) -> ReplayTrace:
    return trace_of(setup, make_sessions(setup, trace, seed))


def trace_of(setup: Setup, sessions: Sequence[Session]) -> ReplayTrace:
    """Sessions as the node replays them; true lifetimes by the device's reference clock."""
    return build_trace([session.root for session in sessions], load_device(setup.device).gpu.reference_tpot.value)


def run_cell(setup: Setup, cell: Cell, policies: Sequence[str], trace: ReplayTrace | None = None) -> list[ResultRow]:
    """Admit sessions, then run each policy with them. Raises ValueError, saying what to change.

    `trace`: replay this instead of making one up by the cell's name. Some seconds of one core for each policy.
    """
    device, model = load_device(setup.device), load_model(cell.model)
    slo_s = parse_slo(cell.slo)
    replayed = _trace(setup, cell.trace, cell.seed) if trace is None else trace

    def admit(policy: str) -> int:
        node = make_node(device, cell.config, model, policy, setup.placement)
        return admit_sessions(
            node,
            replayed,
            slo_s,
            cell.seed,
            setup.placement,
            warmup_s=setup.admission_warmup_s,
            measure_s=setup.admission_measure_s,
        )

    admitted = admit(ADMISSION_POLICY)
    has_workers = bool((replayed.programs["kind"] == CLASSES.index(SegmentClass.WORKER)).any())
    rows: list[ResultRow] = []
    for policy in policies:
        sessions = admit(policy) if setup.own_admission and policy != ADMISSION_POLICY else admitted
        # Where there is no worker to rank, all policies that rank decide alike: one run stands for them.
        alike = [row for row in rows if not has_workers and _places_by_class(row.policy) and _places_by_class(policy)]
        if alike and alike[0].sessions == sessions:
            rows.append(replace(alike[0], policy=policy))
            continue
        node = make_node(device, cell.config, model, policy, setup.placement)
        run = NodeRun(node, replayed, sessions, cell.seed, setup.placement)
        rows.append(measure_run(setup, device, model, cell, policy, run))
    return rows


def _places_by_class(policy: str) -> bool:
    return issubclass(POLICIES[policy], LachesisNoPredictive)


def measure_run(setup: Setup, device: Device, model: Model, cell: Cell, policy: str, run: NodeRun) -> ResultRow:
    """Warm a run up, measure it, and say what it came to. Raises SimulationError."""
    # Only a pool that keeps what is dead has to be filled, and turned over, before its shares mean anything.
    pool = 0 if run.node.frees_at_boundary else run.node.hbm_tokens + run.node.flash_tokens
    most_s = 20 * setup.measure_s
    run.run(setup.warmup_s, least_tokens=int(1.3 * pool), most_s=most_s)
    is_settled = int(run.state.places["written"].sum()) >= 1.3 * pool
    run.clear()
    run.run(setup.measure_s, least_tokens=int(setup.turnovers * pool), most_s=most_s)
    measured = run.measure()
    is_settled &= measured.total >= setup.turnovers * pool
    flash_used_share = float(measured.live[:, 1].sum()) / run.node.flash_tokens if run.node.frees_at_boundary else 1.0
    return _row(device, model, cell, policy, run.sessions, measured, flash_used_share, is_settled)


def _row(
    device: Device,
    model: Model,
    cell: Cell,
    policy: str,
    sessions: int,
    measured: Measurement,
    flash_used_share: float,
    is_settled: bool,
) -> ResultRow:
    kv_gb = model.kv_per_token.value / 1e9
    shares = measured.written / max(1, measured.total)
    by_class = measured.written.sum(axis=1)
    used = [i for i in range(len(CLASSES)) if by_class[i]]
    flash_gb_per_s = measured.flash_tokens_per_s * kv_gb
    return ResultRow(
        model=cell.model,
        config=cell.config,
        slo=cell.slo,
        trace=cell.trace,
        policy=policy,
        seed=cell.seed,
        sessions=sessions,
        lifetime_years=device.lifetime_years(device.configuration(cell.config), flash_gb_per_s * 1e9),
        hbm_write_share=measured.hbm_write_share,
        write_share={CLASSES[i].value: {"hbm": float(shares[i, 0]), "flash": float(shares[i, 1])} for i in used},
        flash_share={CLASSES[i].value: float(measured.written[i, 1] / by_class[i]) for i in used},
        flash_write_gb_per_s=flash_gb_per_s,
        write_gb_per_s=measured.total * kv_gb / measured.measured_s,
        live_gb={CLASSES[i].value: float(measured.live[i].sum() * kv_gb) for i in used},
        flash_used_share=flash_used_share,
        tpot_p99_s=measured.tpot_p99_s,
        tpot_mean_s=measured.tpot_mean_s,
        measured_s=measured.measured_s,
        is_settled=is_settled,
    )


def run_cells(
    setup: Setup,
    cells: Iterable[Cell],
    policies: Sequence[str],
    processes: int = 1,
    on_done: Callable[[Cell], None] = lambda cell: None,
    traces: Mapping[str, ReplayTrace] | None = None,
) -> list[ResultRow]:
    """All cells, in the order given, in so many processes. `on_done` hears of each cell in the order in which they end.

    `traces`: what a cell replays whose trace is in it. Raises ValueError as `run_cell` does: the first that fails ends the sweep.
    """
    return each_cell(partial(_run_one, setup, policies, traces or {}), cells, processes, on_done)


def _run_one(setup: Setup, policies: Sequence[str], traces: Mapping[str, ReplayTrace], cell: Cell) -> list[ResultRow]:
    return run_cell(setup, cell, policies, traces.get(cell.trace))


def each_cell(
    run: Callable[[Cell], list[Row]], cells: Iterable[Cell], processes: int, on_done: Callable[[Cell], None]
) -> list[Row]:
    """What `run`, which can be pickled, gives for each cell: its lists, one after the other, whichever ends first."""
    wanted = list(cells)
    found: dict[Cell, list[Row]] = {}
    for cell, rows in _results(run, wanted, processes):
        found[cell] = rows
        on_done(cell)
    return [row for cell in wanted for row in found[cell]]


def _results(run: Callable[[Cell], list[Row]], cells: Sequence[Cell], processes: int) -> Iterator[tuple[Cell, list[Row]]]:
    if processes == 1 or len(cells) == 1:
        for cell in cells:
            yield cell, run(cell)
        return
    # The first cell compiles for all: the others start from what it has compiled.
    yield cells[0], run(cells[0])
    with ProcessPoolExecutor(processes) as pool:
        futures = {pool.submit(run, cell): cell for cell in cells[1:]}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except SimulationError:
            pool.shutdown(cancel_futures=True)
            raise
