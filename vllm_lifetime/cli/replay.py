# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime replay`: the policies of the server on a trace, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import fail
from vllm_lifetime.cli.outputs import check_outputs
from vllm_lifetime.simulate.limits import MAX_CONCURRENCY

if TYPE_CHECKING:
    from vllm_lifetime.traces.schema import Trace

__all__ = ["add_to", "replay", "replay_sweep"]

WORKFLOWS_PER_SLOT = 4
"""Workflows of a made-up workload for each that runs at a time, unless told otherwise."""

DEFAULT_CAPACITY = "0.1,0.2,0.35,0.5,0.7"
DEFAULT_CONCURRENCY = 24
WORKLOAD_DEFAULTS = "hover 1.55 at 72, swebench 1.5 at 24, financebench 2.0 at 48"

NO_MATPLOTLIB = "Error: --plot needs matplotlib, which is not installed ({}). Try: pip install matplotlib"


def add_to(app: typer.Typer) -> None:
    """Register the commands on `app`."""
    app.command("replay")(replay)
    app.command("replay-sweep")(replay_sweep)


def replay(
    path: Annotated[Path | None, typer.Argument(help="The trace. Not with --workload.")] = None,
    format: Annotated[str | None, typer.Option(help="Format of the trace; see docs/traces.md.")] = None,
    workload: Annotated[str | None, typer.Option(help="A made-up workload instead: hover, swebench or financebench.")] = None,
    workflows: Annotated[int | None, typer.Option(min=1, help="How many workflows to make up; default: 4 x concurrency.")] = None,
    policies: Annotated[str, typer.Option(help="Names with commas between them; see docs/replay.md.")] = "lru,lifetime,belady",
    capacity: Annotated[
        str | None,
        typer.Option(
            help="Cache sizes, as fractions of concurrency x mean final context, with commas between them; "
            f"default: {DEFAULT_CAPACITY}, or the workload's own ({WORKLOAD_DEFAULTS})."
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_CONCURRENCY,
            help=f"Sessions at a time; default: {DEFAULT_CONCURRENCY}, or the workload's own, see --capacity.",
        ),
    ] = None,
    idle_cap_s: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Longer pauses are cut to this.")] = 1800.0,
    train_share: Annotated[
        float, typer.Option(min=0, max=0.99, help="Share of the sessions that the models learn from and that are not measured.")
    ] = 0.0,
    predictor: Annotated[Path | None, typer.Option(help="File of a trained predictor; by default one learns online.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="For the choice of sessions to train with, and for made-up workloads.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Image of hit rate over capacity; PNG without a suffix. Needs matplotlib.")
    ] = None,
) -> None:
    """Replay a trace through eviction policies and compare their hit rates. Exit code 2: something asked for cannot be."""

    from vllm_lifetime.prediction.predictor_file import PredictorFileError
    from vllm_lifetime.simulate.comparison import compare, make_table, plot_rows, write_rows
    from vllm_lifetime.simulate.images import image_format
    from vllm_lifetime.simulate.policies import POLICY_NAMES
    from vllm_lifetime.simulate.scored import Models
    from vllm_lifetime.traces.source import TraceError

    try:
        names = _policies(policies, POLICY_NAMES)
        own = None if workload is None else _own(workload)
        concurrency = concurrency or (own.concurrency if own else DEFAULT_CONCURRENCY)
        if capacity is None:
            capacity = str(own.capacity) if own else DEFAULT_CAPACITY
        fractions = list(dict.fromkeys(_fraction(text) for text in capacity.split(",")))
        check_outputs([json, plot], [path, predictor])
        if plot is not None:
            image_format(plot)
        trace = _trace(path, format, own and own.name, workflows or WORKFLOWS_PER_SLOT * concurrency, seed)
        models = Models()
        if predictor is not None:
            from vllm_lifetime.prediction.serving import load_predictor

            models.predictor = load_predictor(predictor)
        rows = compare(
            trace,
            names,
            fractions,
            concurrency,
            idle_cap_s,
            train_share=train_share,
            seed=seed,
            models=models,
        )
        title = (
            f"{trace.name}: {rows[0].requests:,} requests of {rows[0].sessions:,} sessions, {concurrency} at a time; "
            "hit rate (share of the gap from lru to belady)"
        )
        console = results_console()
        console.print(title, soft_wrap=True, markup=False, emoji=False)
        console.print(make_table(rows))
        if json is not None:
            write_rows(rows, json)
        if plot is not None:
            plot_rows(rows, plot, trace.name)
    except (TraceError, PredictorFileError, ValueError, OSError) as error:
        fail(str(error))
    except ImportError as error:
        typer.echo(NO_MATPLOTLIB.format(error), err=True)
        raise typer.Exit(2) from None


def replay_sweep(
    vary: Annotated[str, typer.Option(help="concurrency, horizon (K), gamma, predictor, noise (lambda) or rho.")],
    values: Annotated[str, typer.Option(help="Its values, with commas between them; predictors: markov1 .. markov5, or files.")],
    workload: Annotated[str, typer.Option(help="hover, swebench or financebench.")] = "hover",
    policies: Annotated[str, typer.Option(help="Names with commas between them.")] = "lru,lifecycle,hierarchical,pbkv,lifetime",
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_CONCURRENCY, help="Workflows at a time; default: the workload's own, see --capacity."),
    ] = None,
    capacity: Annotated[
        float | None,
        typer.Option(
            help="Cache size, as a fraction of concurrency x mean final context; "
            f"default: the workload's own ({WORKLOAD_DEFAULTS}). With --vary concurrency it stays that of --concurrency."
        ),
    ] = None,
    workflows: Annotated[int | None, typer.Option(min=1, help="Workflows measured; default: 4 x concurrency.")] = None,
    training_workflows: Annotated[int, typer.Option(min=0, help="Further workflows that the models learn from before.")] = 200,
    seeds: Annotated[int, typer.Option(min=1, help="Workloads made up for each value.")] = 3,
    rho: Annotated[float, typer.Option(min=0, max=1, help="Aggressive prefetch; 0: conservative.")] = 0.0,
    processes: Annotated[int, typer.Option(min=1, help="Processes to use.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image of the hit rates; PNG without a suffix. Needs matplotlib.")] = None,
) -> None:
    """Vary one parameter on a made-up workload, with a host tier for the policies that prefetch. Exit codes as `replay`."""
    from rich.markup import escape
    from rich.table import Table

    from vllm_lifetime.prediction.predictor_file import PredictorFileError
    from vllm_lifetime.simulate.images import image_format
    from vllm_lifetime.simulate.policies import POLICY_NAMES, Variant
    from vllm_lifetime.simulate.sweep import Sweep, plot_sweep, sweep, write_sweep

    try:
        own = _own(workload)
        concurrency = concurrency or own.concurrency
        what = Sweep(
            workload=own.name,
            parameter=vary,
            values=tuple(dict.fromkeys(value.strip() for value in values.split(","))),
            policies=_policies(policies, POLICY_NAMES),
            concurrency=concurrency,
            capacity=own.capacity if capacity is None else _fraction(str(capacity)),
            workflows=workflows or WORKFLOWS_PER_SLOT * concurrency,
            training_workflows=training_workflows,
            seeds=seeds,
            variant=Variant(has_host=True, rho=rho),
        )
        check_outputs([json, plot])
        if plot is not None:
            image_format(plot)
        rows = sweep(what, processes)
        table = Table("policy", *(escape(f"{vary} {value}") for value in what.values))
        for policy in what.policies:
            line = [row for row in rows if row.policy == policy]
            table.add_row(policy, *(f"{row.hit_rate:.2%} ±{100 * row.deviation:.2f}" for row in line))
        console = results_console()
        console.print(f"{what.workload}: hit rate, mean and deviation over {seeds} seeds", soft_wrap=True)
        console.print(table)
        if json is not None:
            write_sweep(rows, json)
        if plot is not None:
            plot_sweep(rows, plot)
    except (PredictorFileError, ValueError, OSError) as error:
        fail(str(error))
    except ImportError as error:
        typer.echo(NO_MATPLOTLIB.format(error), err=True)
        raise typer.Exit(2) from None


def _policies(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"unknown policy {name!r}; the policies are {', '.join(known)}")
    return names


class _Own(NamedTuple):
    """What a made-up workload is replayed with, unless told otherwise."""

    name: str
    concurrency: int
    capacity: float


def _own(workload: str) -> _Own:
    from vllm_lifetime.simulate.comparison import WORKLOAD_CAPACITY
    from vllm_lifetime.traces.workload_spec import WORKLOADS, load_workload

    for name in WORKLOADS:
        if workload in (name, name.partition("-")[0]):
            return _Own(name, load_workload(name).concurrency, WORKLOAD_CAPACITY[name])
    raise ValueError(f"unknown workload {workload!r}; there are {', '.join(WORKLOADS)}")


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise ValueError(f"a capacity must be a number above 0, as in 0.35; this is {text.strip()!r}")
    return value


def _trace(path: Path | None, format: str | None, workload: str | None, workflows: int, seed: int) -> Trace:
    """Read or make up what is to be replayed. Raises ValueError, TraceError."""
    if workload is not None:
        if path is not None or format is not None:
            raise ValueError("give either a trace with its --format, or a --workload")
        from vllm_lifetime.traces.generate import generate_workload

        return generate_workload(workload, workflows, seed)
    if path is None or format is None:
        raise ValueError("give a trace and its --format, or a --workload")
    from vllm_lifetime.traces.read import read_trace

    return read_trace(path, format)
