# SPDX-License-Identifier: Apache-2.0
"""What lifetimes hinge on: one thing varied, all else as it is. None of this is in the paper.

A sweep has points; each says what is different from a plain run of the cell. Points that serve the same load share the number of
sessions (as `hbm_first` admits them) and the baseline's run.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_lifetime.simulate.hbf.hardware import Device, load_device, load_model
from vllm_lifetime.simulate.hbf.node import ADMISSION_POLICY, DEFAULT_LEASE_S, NodeRun, admit_sessions, make_node
from vllm_lifetime.simulate.hbf.quantities import with_values
from vllm_lifetime.simulate.hbf.replay_trace import ReplayTrace
from vllm_lifetime.simulate.hbf.sweep import (
    Cell,
    ResultRow,
    Setup,
    each_cell,
    make_sessions,
    measure_run,
    parse_slo,
    trace_of,
)
from vllm_lifetime.simulate.hbf.workloads import Session, score_workers
from vllm_lifetime.simulate.hbf.write_amplification import AMPLIFICATIONS
from vllm_lifetime.whole_file import finite, replacing, write_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["SWEEPS", "Point", "Sweep", "SweepRow", "check_sweep", "plot_sweep", "run_sweep", "sweep_table", "write_sweep"]

CLASSES_ONLY, LACHESIS, ORACLE = "lachesis_no_predictive", "lachesis", "oracle"
MULTI = ("multi_agent", "multi_agent_no_reviewer")
SINGLE = ("tau3", "bfcl")
LOSS_OF_LEASES = 0.1
"""Boundary loss at which leases are varied."""


@dataclass(frozen=True)
class Point:
    """One value of a sweep. None and empty: as in a plain run.

    `general`: changed quantities of the workload's file, in tokens, seconds, plain numbers. `write_bandwidth`: of a flash stack,
    in bytes per second. `placement`: changed settings of the policies. `rank_correlation`: Kendall's tau of the workers' scores
    and their true lifetimes. `amplification`: a name of `AMPLIFICATIONS`.
    """

    value: str
    policies: tuple[str, ...] = (CLASSES_ONLY, LACHESIS)
    general: Mapping[str, float] = field(default_factory=dict)
    write_bandwidth: float | None = None
    placement: Mapping[str, float] = field(default_factory=dict)
    rank_correlation: float | None = None
    boundary_loss: float = 0.0
    lease_s: float = DEFAULT_LEASE_S
    amplification: str = "data file"

    @property
    def load(self) -> tuple[object, ...]:
        """Points of which this is equal serve the same sessions."""
        return (*sorted(self.general.items()), self.write_bandwidth)


@dataclass(frozen=True)
class Sweep:
    """`what` is varied, and for which traces that means anything."""

    what: str
    points: tuple[Point, ...]
    traces: tuple[str, ...] = MULTI + SINGLE


SWEEPS: Mapping[str, Sweep] = {
    "ranking": Sweep(
        "Kendall's tau of predicted and true worker lifetime",
        (
            *(Point(f"{tau:g}", (LACHESIS,), rank_correlation=tau) for tau in (0.0, 0.25, 0.53, 0.75, 1.0)),
            Point("oracle", (ORACLE,)),
        ),
        MULTI,
    ),
    "boundary_loss": Sweep(
        f"boundaries that never arrive (lease {DEFAULT_LEASE_S:g} s)",
        tuple(Point(f"{loss:.0%}", boundary_loss=loss) for loss in (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)),
    ),
    "lease": Sweep(
        f"lease in seconds, {LOSS_OF_LEASES:.0%} of the boundaries lost",
        tuple(
            Point(f"{lease_s:g}", boundary_loss=LOSS_OF_LEASES, lease_s=lease_s)
            for lease_s in (60.0, 300.0, 600.0, 1800.0, 3600.0)
        ),
    ),
    "fan_out": Sweep(
        "workers that a lead runs at a time",
        tuple(Point(f"{workers:g}", general={"fan_out": workers}) for workers in (1.0, 2.0, 3.5, 5.0)),
        MULTI,
    ),
    "write_amplification": Sweep(
        "write amplification",
        tuple(Point(name, (ADMISSION_POLICY, CLASSES_ONLY, LACHESIS), amplification=name) for name in AMPLIFICATIONS),
    ),
    "growth": Sweep(
        "HBM that an admitted worker is counted with, in mean final sizes",
        tuple(Point(f"{growth:g}", (LACHESIS,), placement={"growth": growth}) for growth in (1.0, 1.5, 2.0, 3.0, 4.0)),
        MULTI,
    ),
    "reserve": Sweep(
        "most of HBM that is kept for reviewers",
        tuple(Point(f"{share:g}", (LACHESIS,), placement={"max_reserve_share": share}) for share in (0.0, 0.1, 0.9)),
        MULTI,
    ),
    "shared_prefix": Sweep(
        "prefix that sub-agents share, in tokens",
        tuple(Point(f"{tokens:g}", general={"shared_prefix": tokens}) for tokens in (5000.0, 14000.0, 23000.0, 35000.0)),
        MULTI,
    ),
    "tool_time": Sweep(
        "factor on the tool latencies of sub-agents",
        tuple(Point(f"{factor:g}", general={"tool_time_scale": factor}) for factor in (1.0, 2.0, 3.0, 4.0, 6.0)),
        MULTI,
    ),
    "output_share": Sweep(
        "part of a turn's reasoning-laden tokens that is decoded",
        tuple(Point(f"{share:g}", (LACHESIS,), general={"output_share": share}) for share in (0.3, 0.45, 0.6, 0.8)),
        SINGLE,
    ),
    "output_limit": Sweep(
        "longest turn, in medians, whose decoded part grows with it",
        tuple(Point(f"{medians:g}", (LACHESIS,), general={"output_limit": medians}) for medians in (0.5, 1.0, 2.0, 3.0, 6.0)),
        SINGLE,
    ),
    "write_bandwidth": Sweep(
        "write bandwidth of a flash stack, GB/s",
        tuple(Point(f"{gb:g}", write_bandwidth=gb * 1e9) for gb in (8.0, 16.0, 48.0)),
    ),
    "user_delay": Sweep(
        "median delay of the user's next message, s",
        tuple(
            Point(f"{delay_s:g}", (LACHESIS,), general={"user_delay_median": delay_s}) for delay_s in (30.0, 60.0, 120.0, 300.0)
        ),
        SINGLE,
    ),
}
"""By name."""


@dataclass(frozen=True)
class SweepRow:
    """One policy at one value. `lifetime_years` counts the sweep's write amplification, `row.lifetime_years` the device's own.

    `gain`: over `hbm_first` under the same load and write amplification. `oracle_share`: part of the years that the oracle gains
    over `hbm_first`. `ranking_share`: part of those that it gains over scores that say nothing. Both None but for `ranking`.
    """

    sweep: str
    value: str
    lifetime_years: float
    gain: float
    oracle_share: float | None
    ranking_share: float | None
    row: ResultRow


def check_sweep(name: str, traces: Iterable[str]) -> Sweep:
    """The sweep of that name. Raises ValueError: there is none, or it means nothing for one of the traces."""
    if name not in SWEEPS:
        raise ValueError(f"unknown sweep {name!r}; there are {', '.join(SWEEPS)}")
    for trace in traces:
        if trace not in SWEEPS[name].traces:
            raise ValueError(f"the sweep {name!r} means nothing for the trace {trace!r}; take {' or '.join(SWEEPS[name].traces)}")
    return SWEEPS[name]


def run_sweep(
    setup: Setup,
    name: str,
    cells: Sequence[Cell],
    processes: int = 1,
    on_done: Callable[[Cell], None] = lambda cell: None,
) -> list[SweepRow]:
    """All points of the sweep in each cell, cells in the order given. Raises ValueError as `check_sweep` and `run_cell` do.

    One to two seconds of a core for each policy of a point, and as much again for each load.
    """
    check_sweep(name, {cell.trace for cell in cells})
    return each_cell(partial(_run_cell, setup, name), cells, processes, on_done)


@dataclass(frozen=True)
class _Load:
    """What points with the same load share."""

    device: Device
    sessions: list[Session]
    trace: ReplayTrace
    admitted: int
    base: ResultRow


def _run_cell(setup: Setup, name: str, cell: Cell) -> list[SweepRow]:
    loads: dict[tuple[object, ...], _Load] = {}
    found: list[tuple[Point, _Load, ResultRow]] = []
    for point in SWEEPS[name].points:
        if point.load not in loads:
            loads[point.load] = _make_load(setup, cell, point)
        load = loads[point.load]
        found += [(point, load, _run_point(setup, cell, point, load, policy)) for policy in point.policies]
    years = {point.value: row.lifetime_years for point, _, row in found}
    rows = []
    for point, load, row in found:
        own, base = _years(load.device, point, row), _years(load.device, point, load.base)
        oracle_share = ranking_share = None
        if name == "ranking":
            oracle_share = _part(row.lifetime_years, base, years["oracle"])
            ranking_share = _part(row.lifetime_years, years["0"], years["oracle"])
        rows.append(SweepRow(name, point.value, own, own / base, oracle_share, ranking_share, row))
    return rows


def _part(value: float, low: float, high: float) -> float | None:
    return (value - low) / (high - low) if high > low else None


def _years(device: Device, point: Point, row: ResultRow) -> float:
    amplification = AMPLIFICATIONS[point.amplification]
    if amplification is None:
        return row.lifetime_years
    return row.lifetime_years * device.hbf_stack.write_amplification.value / amplification(row.flash_used_share)


def _make_load(setup: Setup, cell: Cell, point: Point) -> _Load:
    device = load_device(setup.device)
    if point.write_bandwidth is not None:
        stack = with_values(device.hbf_stack, {"write_bandwidth": point.write_bandwidth})
        device = device.model_copy(update={"hbf_stack": stack})
    sessions = make_sessions(setup, cell.trace, cell.seed, point.general)
    trace = trace_of(setup, sessions)
    model = load_model(cell.model)
    node = make_node(device, cell.config, model, ADMISSION_POLICY, setup.placement)
    admitted = admit_sessions(
        node,
        trace,
        parse_slo(cell.slo),
        cell.seed,
        setup.placement,
        warmup_s=setup.admission_warmup_s,
        measure_s=setup.admission_measure_s,
    )
    run = NodeRun(node, trace, admitted, cell.seed, setup.placement)
    return _Load(device, sessions, trace, admitted, measure_run(setup, device, model, cell, ADMISSION_POLICY, run))


def _run_point(setup: Setup, cell: Cell, point: Point, load: _Load, policy: str) -> ResultRow:
    if policy == ADMISSION_POLICY:
        return load.base
    changes: dict[str, Any] = dict(point.placement)
    placement = replace(setup.placement, **changes)
    trace = load.trace
    if point.rank_correlation is not None:
        # The same noise at each value: what differs is how much of it there is.
        random = np.random.default_rng([cell.seed, 5])
        score_workers(load.sessions, point.rank_correlation, load.device.gpu.reference_tpot.value, random)
        trace = trace_of(setup, load.sessions)
    model = load_model(cell.model)
    node = make_node(load.device, cell.config, model, policy, placement, lease_s=point.lease_s)
    run = NodeRun(node, trace, load.admitted, cell.seed, placement, boundary_loss=point.boundary_loss)
    return measure_run(setup, load.device, model, cell, policy, run)


# ------------------------------------------------------------------------------------------------ output


def write_sweep(path: Path, rows: Iterable[SweepRow]) -> None:
    """A JSON list of rows; the fields of `row` among the others. What is endless, or a part of it, is null. Raises OSError."""
    write_text(path, json.dumps([_plain(row) for row in rows], indent=1) + "\n")


def _plain(row: SweepRow) -> dict[str, Any]:
    plain = asdict(row)
    result: dict[str, Any] = plain.pop("row")
    return {key: finite(value) for key, value in (result | plain).items()}


def _curve(row: SweepRow) -> str:
    """The oracle ends the curve of `lachesis`."""
    return LACHESIS if row.row.policy == ORACLE else row.row.policy


def _curves(rows: Iterable[SweepRow]) -> dict[tuple[str, str, str, str, str], dict[str, list[SweepRow]]]:
    """By (model, trace, slo, config, curve), then by value; all seeds."""
    curves: dict[tuple[str, str, str, str, str], dict[str, list[SweepRow]]] = {}
    for row in rows:
        key = (row.row.model, row.row.trace, row.row.slo, row.row.config, _curve(row))
        curves.setdefault(key, {}).setdefault(row.value, []).append(row)
    return curves


def sweep_table(rows: Sequence[SweepRow]) -> Table:
    """A line a cell and policy, a column a value: years, gain over `hbm_first`, and of `ranking` the `oracle_share`."""
    from rich.table import Table

    values = list(dict.fromkeys(row.value for row in rows))
    table = Table("model", "trace", "SLO", "config", "policy", *values, title=SWEEPS[rows[0].sweep].what)
    for (model, trace, slo, config, curve), found in _curves(rows).items():
        table.add_row(model, trace, slo, config, curve, *(_text(found[value]) for value in values))
    return table


def _text(rows: Sequence[SweepRow]) -> str:
    text = f"{statistics.fmean(row.lifetime_years for row in rows):.2f} y x{statistics.fmean(row.gain for row in rows):.2f}"
    shares = [row.oracle_share for row in rows if row.oracle_share is not None]
    return f"{text}, {statistics.fmean(shares):.0%}" if shares else text


def plot_sweep(rows: Sequence[SweepRow], path: Path) -> None:
    """Lifetime by value, a panel for each model, trace and SLO, a line for each configuration and policy.

    Raises ImportError without matplotlib, OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = _curves(rows)
    panels = list(dict.fromkeys(key[:3] for key in curves))
    values = list(dict.fromkeys(row.value for row in rows))
    configs = list(dict.fromkeys(key[3] for key in curves))
    styles = dict(zip(dict.fromkeys(key[4] for key in curves), ("-", "--", ":"), strict=False))
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(4.6 * columns, 3.4 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        for (model, trace, slo, config, curve), found in curves.items():
            if (model, trace, slo) != panel:
                continue
            years = [statistics.fmean(row.lifetime_years for row in found[value]) for value in values]
            color = f"C{configs.index(config)}"
            axes.plot(range(len(values)), years, styles[curve], color=color, marker=".", label=f"{config} {curve}")
        axes.set_xticks(range(len(values)), values, fontsize="x-small")
        axes.set_ylim(bottom=0)
        axes.set_title(", ".join(panel), fontsize="small")
        axes.set_xlabel(SWEEPS[rows[0].sweep].what, fontsize="small")
        axes.set_ylabel("HBF lifetime (years)", fontsize="small")
    figure.get_axes()[0].legend(fontsize="xx-small")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)
