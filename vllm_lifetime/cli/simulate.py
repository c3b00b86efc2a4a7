# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime simulate`: devices that nobody has yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import fail
from vllm_lifetime.cli.outputs import check_outputs

if TYPE_CHECKING:
    from rich.console import Console

    from vllm_lifetime.simulate.hbf.own_trace import OwnTrace
    from vllm_lifetime.simulate.hbf.replay_trace import ReplayTrace
    from vllm_lifetime.simulate.hbf.sweep import Cell, ResultRow, Setup

__all__ = ["add_to", "hbf"]

PIPE_WIDTH = 180
"""Columns where there is no terminal to ask."""

DEFAULT_POLICIES = "hbm_first,lachesis_no_predictive,lachesis"
ADVISED_MODEL = "qwen3-235b-a22b"
"""The model of `--advise` unless told otherwise: its workload runs in some ten variants."""

RECORDED = "trace"
"""Pauses as the trace has them."""


def add_to(app: typer.Typer) -> None:
    """Register the command group on `app`."""
    group = typer.Typer(help="Simulate devices that nobody has yet.", no_args_is_help=True, rich_markup_mode=None)
    # One command alone would take the place of the group.
    group.callback()(lambda: None)
    group.command("hbf")(hbf)
    app.add_typer(group, name="simulate")


@dataclass(frozen=True)
class _Asked:
    """What the command line says, names still unchecked. `models` is empty if it says nothing."""

    out: Path
    configs: Sequence[str]
    models: Sequence[str]
    slos: Sequence[str]
    policies: Sequence[str]
    traces: Sequence[str]
    own_trace: Path | None
    format: str | None
    idle_cap_s: float
    pauses: Sequence[str]
    sweeps: Sequence[str]
    seeds: int
    processes: int


def hbf(
    out: Annotated[Path, typer.Option(help="Folder for the JSON files and the plots; made if absent.")],
    config: Annotated[str, typer.Option(help="Configurations of the device, with commas between them, or all.")] = "all",
    model: Annotated[
        str,
        typer.Option(help=f"Models by name or .toml file, with commas between them; default: all; --advise: {ADVISED_MODEL}."),
    ] = "",
    slo: Annotated[str, typer.Option(help="tight (60 ms), loose (100 ms), or milliseconds, with commas between them.")] = "tight",
    policy: Annotated[
        str, typer.Option(help="Placement policies with commas between them; see docs/hbf-simulator.md.")
    ] = DEFAULT_POLICIES,
    trace: Annotated[
        str,
        typer.Option(
            help="multi_agent, multi_agent_no_reviewer, tau3, bfcl, with commas between them; or, with --format, your own file."
        ),
    ] = "multi_agent",
    format: Annotated[str | None, typer.Option(help="Format of a trace of your own; see docs/traces.md.")] = None,
    idle_cap_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Longer pauses of a trace of your own are cut to this.")
    ] = 1800.0,
    pauses: Annotated[
        str,
        typer.Option(
            help="Pauses of a trace of your own, with commas between them: trace, none, fixed or paper; see docs/hbf-advice.md."
        ),
    ] = RECORDED,
    advise: Annotated[
        bool, typer.Option("--advise", help="Say which split lasts longest and which serves most, and what would change that.")
    ] = False,
    sweep: Annotated[
        str, typer.Option(help="Vary one thing instead, by name, with commas between them; see docs/hbf-simulator.md.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Traces made up for each cell; of a trace of your own, orders.")] = 1,
    device: Annotated[str, typer.Option(help="Device by name or .toml file.")] = "rubin_hbf",
    growth: Annotated[float, typer.Option(help="g: HBM that an admitted worker is counted with, in mean final sizes.")] = 2.0,
    reserve: Annotated[float, typer.Option(help="Most of HBM that is kept for reviewers; 0: none.")] = 0.9,
    own_admission: Annotated[
        bool, typer.Option("--own-admission", help="Each policy serves as many sessions as it can, not as many as hbm_first can.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes to use.")] = 1,
) -> None:
    """How long HBF lasts under each placement policy, on a decode node with HBM and HBF. Exit code 2: it cannot be said."""
    try:
        from vllm_lifetime.policy.placement import PlacementConfig
        from vllm_lifetime.simulate.hbf.sweep import Setup

        asked = _Asked(
            out=out,
            configs=_names(config),
            models=_names(model) if model else (),
            slos=_names(slo),
            policies=_names(policy),
            traces=() if format else _names(trace),
            own_trace=Path(trace) if format else None,
            format=format,
            idle_cap_s=idle_cap_s,
            pauses=_names(pauses),
            sweeps=_names(sweep) if sweep else (),
            seeds=seeds,
            processes=processes,
        )
        setup = Setup(
            device=device, placement=PlacementConfig(growth=growth, max_reserve_share=reserve), own_admission=own_admission
        )
        if asked.sweeps and (advise or asked.own_trace is not None):
            raise ValueError("--sweep varies a made-up trace: leave out --advise and --format")
        if advise:
            _advise(setup, asked)
        elif asked.sweeps:
            _sweep(setup, asked)
        elif asked.own_trace is not None:
            _run_own(setup, asked)
        else:
            _run_made_up(setup, asked)
    except (ValueError, OSError) as error:
        fail(str(error))
    except ImportError as error:
        fail(f"the simulator needs numba, and matplotlib for its plots ({error}). Try: pip install numba matplotlib")


def _run_made_up(setup: Setup, asked: _Asked) -> None:
    from vllm_lifetime.simulate.hbf.calibration import check_structural, check_temporal
    from vllm_lifetime.simulate.hbf.checks import run_checks
    from vllm_lifetime.simulate.hbf.hardware import load_device
    from vllm_lifetime.simulate.hbf.report import checks_table, findings_table, write_json
    from vllm_lifetime.simulate.hbf.sweep import make_sessions
    from vllm_lifetime.simulate.hbf.workload_files import load_structural, load_temporal

    if asked.pauses != [RECORDED]:
        raise ValueError("--pauses is for a trace of your own: give its file as --trace, and its --format")
    models, configs = _check(setup, asked)
    sessions = {name: make_sessions(setup, name, 0) for name in asked.traces}
    with _folder(asked.out):
        rows = _run_cells(setup, asked, models, configs, asked.traces, {})
        checks = run_checks(rows)
        tpot_s = load_device(setup.device).gpu.reference_tpot.value
        findings = []
        for name in asked.traces:
            if name == "multi_agent":
                findings += check_structural(load_structural(setup.structural), sessions[name], tpot_s)
            elif name != "multi_agent_no_reviewer":
                findings += check_temporal(load_temporal(setup.temporal), name, sessions[name], tpot_s)
        console = results_console(PIPE_WIDTH)
        _show_rows(asked.out, rows, console)
        write_json(asked.out / "checks.json", checks)
        write_json(asked.out / "calibration.json", findings)
        run = [check for check in checks if check.passes is not None]
        if run:
            passed = sum(check.passes is True for check in run)
            console.print(f"{passed} of {len(run)} checks pass; {len(checks) - len(run)} need more cells")
            console.print(checks_table(checks))
        else:
            console.print(f"None of the {len(checks)} checks against the paper can be made: they need more cells")
        console.print(f"{sum(finding.passes for finding in findings)} of {len(findings)} calibration targets are met")
        console.print(findings_table(finding for finding in findings if not finding.passes))


def _sweep(setup: Setup, asked: _Asked) -> None:
    from vllm_lifetime.simulate.hbf.sensitivity import check_sweep, plot_sweep, run_sweep, sweep_table, write_sweep

    models, configs = _check(setup, asked)
    for name in asked.sweeps:
        check_sweep(name, asked.traces)
    cells = _cells(asked, models, configs, asked.traces)
    with _folder(asked.out):
        for name in asked.sweeps:
            with _progress(f"{name}: {len(cells)} cells") as (start, advance):
                start(len(cells))
                rows = run_sweep(setup, name, cells, asked.processes, advance)
            write_sweep(asked.out / f"sweep-{name}.json", rows)
            results_console(PIPE_WIDTH).print(sweep_table(rows))
            plot_sweep(rows, asked.out / f"sweep-{name}.png")


def _run_own(setup: Setup, asked: _Asked) -> None:
    from vllm_lifetime.simulate.hbf.advise import fit_durations
    from vllm_lifetime.simulate.hbf.hardware import load_device
    from vllm_lifetime.simulate.hbf.replay_trace import build_trace
    from vllm_lifetime.simulate.hbf.sweep import parse_slo

    models, configs = _check(setup, asked)
    own = _read_own(asked)
    gpu = load_device(setup.device).gpu
    traces = {}
    for name in asked.pauses:
        sessions = own.sessions(pauses=name, ttft_s=gpu.time_to_first_token.value)
        label = own.name if name == RECORDED else f"{own.name}/{name}"
        traces[label] = build_trace([session.root for session in sessions], gpu.reference_tpot.value)
        setup = fit_durations(setup, sessions, max(parse_slo(slo) for slo in asked.slos))
    with _folder(asked.out, asked.own_trace):
        console = results_console(PIPE_WIDTH)
        console.print(own.describe(), soft_wrap=True, markup=False)
        rows = _run_cells(setup, asked, models, configs, list(traces), traces)
        _show_rows(asked.out, rows, console)


def _advise(setup: Setup, asked: _Asked) -> None:
    from vllm_lifetime.simulate.hbf.advice_report import advice_table, plot_advice, write_advice
    from vllm_lifetime.simulate.hbf.advise import advise
    from vllm_lifetime.simulate.hbf.hardware import load_device
    from vllm_lifetime.simulate.hbf.sweep import make_sessions

    if len(asked.slos) != 1 or len(asked.pauses) != 1 or len(asked.traces) > 1:
        raise ValueError("--advise takes one --trace, one --slo and one kind of --pauses; the other SLOs are among its variants")
    models, configs = _check(setup, asked, [ADVISED_MODEL])
    if asked.own_trace is not None:
        own = _read_own(asked)
        name, workload = own.name, own.describe()
        ttft_s = load_device(setup.device).gpu.time_to_first_token.value
        sessions = own.sessions(pauses=asked.pauses[0], ttft_s=ttft_s)
    else:
        name = workload = asked.traces[0]
        sessions = make_sessions(setup, name, 0)
    with _folder(asked.out, asked.own_trace):
        console = results_console(PIPE_WIDTH)
        console.print(workload, soft_wrap=True, markup=False)
        advices = []
        for model in models:
            with _progress(f"{model}, {', '.join(configs)}") as (start, advance):
                advices.append(
                    advise(
                        setup,
                        name,
                        sessions,
                        model,
                        configs,
                        asked.slos[0],
                        asked.policies,
                        seeds=asked.seeds,
                        processes=asked.processes,
                        on_start=start,
                        on_done=advance,
                    )
                )
        for advice in advices:
            console.print(advice_table(advice))
            console.print(advice.sentence, soft_wrap=True, markup=False)
        write_advice(asked.out / "advice.json", advices, workload)
        plot_advice(advices, asked.out / "advice.png")


def _check(setup: Setup, asked: _Asked, default_models: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """Models and configurations, and that each name is known and each cell can be made: before anything is run or written."""
    from vllm_lifetime.simulate.hbf.ablations import parse_policy
    from vllm_lifetime.simulate.hbf.hardware import load_device, load_model, model_names
    from vllm_lifetime.simulate.hbf.node import make_node
    from vllm_lifetime.simulate.hbf.sweep import parse_slo
    from vllm_lifetime.simulate.hbf.workloads import TRACES

    device = load_device(setup.device)
    configs = list(device.configurations) if list(asked.configs) == ["all"] else list(asked.configs)
    models = list(asked.models or default_models or ["all"])
    models = model_names() if models == ["all"] else models
    for name in asked.policies:
        parse_policy(name)
    for name in asked.slos:
        parse_slo(name)
    for name in asked.traces:
        if name not in TRACES:
            raise ValueError(
                f"unknown trace {name!r}; there are {', '.join(TRACES)}, or give a file of your own and its --format"
            )
    for model in models:
        for config in configs:
            make_node(device, config, load_model(model), asked.policies[0], setup.placement)
    return models, configs


def _read_own(asked: _Asked) -> OwnTrace:
    from rich.console import Console

    from vllm_lifetime.simulate.hbf.own_trace import PAUSES, read_own_trace

    for name in asked.pauses:
        if name not in PAUSES:
            raise ValueError(f"unknown pauses {name!r}; there are {', '.join(PAUSES)}")
    if asked.own_trace is None or asked.format is None:
        raise ValueError("give a file as --trace, and its --format")
    with Console(stderr=True).status(f"reading {asked.own_trace.name}"):
        return read_own_trace(asked.own_trace, asked.format, asked.idle_cap_s)


def _run_cells(
    setup: Setup,
    asked: _Asked,
    models: Sequence[str],
    configs: Sequence[str],
    names: Sequence[str],
    traces: Mapping[str, ReplayTrace],
) -> list[ResultRow]:
    """`traces`: those that are not made up, by name."""
    from vllm_lifetime.simulate.hbf.sweep import run_cells

    cells = _cells(asked, models, configs, names)
    with _progress(f"{len(cells)} cells, {len(asked.policies)} policies") as (start, advance):
        start(len(cells))
        return run_cells(setup, cells, asked.policies, asked.processes, advance, traces)


def _cells(asked: _Asked, models: Sequence[str], configs: Sequence[str], traces: Sequence[str]) -> list[Cell]:
    from vllm_lifetime.simulate.hbf.sweep import Cell

    seeds = range(asked.seeds)
    return [Cell(m, c, s, trace, seed) for trace in traces for m in models for s in asked.slos for c in configs for seed in seeds]


def _show_rows(out: Path, rows: Sequence[ResultRow], console: Console) -> None:
    """Print the table; write results.json and the plots."""
    from vllm_lifetime.simulate.hbf.report import plot_lifetimes, plot_writes, results_table, write_json

    write_json(out / "results.json", rows)
    console.print(results_table(rows))
    plot_lifetimes(rows, out / "lifetimes.png")
    for number, (m, s, t) in enumerate(dict.fromkeys((row.model, row.slo, row.trace) for row in rows)):
        chosen = [row for row in rows if (row.model, row.slo, row.trace) == (m, s, t)]
        plot_writes(chosen, out / f"writes-{number}.png", f"{m}, {t}, {s}")


@contextmanager
def _progress(title: str) -> Iterator[tuple[Callable[[int], None], Callable[[Cell], None]]]:
    """A bar on a terminal, else a line for each tenth; gives what to tell how many cells there are, and of each that ends."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        total = done = 0

        def start(cells: int) -> None:
            nonlocal total
            total = cells
            progress.update(task, total=cells)

        def advance(cell: Cell) -> None:
            nonlocal done
            done += 1
            progress.advance(task)
            if not errors.is_terminal and 10 * done // total > 10 * (done - 1) // total:
                typer.echo(f"{title}: {done} of {total} cells", err=True)

        yield start, advance


@contextmanager
def _folder(out: Path, source: Path | None = None) -> Iterator[None]:
    """The folder `out`, made if absent. If the work in it fails, those that were made and hold nothing are removed.

    Raises ValueError: it is a file, nothing can be written to it, or a result would be written over `source`.
    """
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    try:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"{str(out)!r} is a file, or lies in one; give a folder as --out") from None
        try:
            with TemporaryFile(dir=out):
                pass
        except OSError as error:
            raise ValueError(f"cannot write to {str(out)!r} ({error.strerror}); give another folder as --out") from None
        check_outputs((out / name for name in ("results.json", "advice.json")), [source])
        yield
    except BaseException:
        for folder in made:
            try:
                folder.rmdir()
            except OSError:
                break
        raise


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("an option that takes names got none")
    return list(dict.fromkeys(names))
