# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime rank`: train the lifetime rank on recorded spawns, and measure how well it orders them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import fail
from vllm_lifetime.cli.outputs import check_outputs

if TYPE_CHECKING:
    from rich.table import Table

    from vllm_lifetime.prediction.rank_evaluation import RankEvaluation, RankRow
    from vllm_lifetime.traces.generate_spawns import GeneratedSpawns
    from vllm_lifetime.traces.spawn_schema import SpawnSample

__all__ = ["add_to", "evaluate", "train"]

SHOWN_PERCENTS = (10, 25)
"""k in the table, in percent of the workers; the file and the plot have more."""

FormatOption = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="claude-code, kv-cache-tester, or jsonl: a recording, or spawns.")
]


def add_to(app: typer.Typer) -> None:
    """Register the commands on `app`."""
    rank = typer.Typer(
        help="Train the rank by which sub-agents are expected to return, or measure it.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    rank.command("train")(train)
    rank.command("evaluate")(evaluate)
    app.add_typer(rank, name="rank")


def train(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="Recorded sub-agents; see docs/lifetime-rank.md.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the rank (.npz).")],
    format: FormatOption = "jsonl",
    seed: Annotated[int, typer.Option(min=0, help="Decides the folds by which the penalty is chosen.")] = 0,
) -> None:
    """Train on all sub-agents of a trace, and write one file for the server."""
    from rich.console import Console

    _check([out], path)
    samples = _read(path, format)
    _need_scikit_learn()
    from vllm_lifetime.prediction.lifetime_rank import save_base
    from vllm_lifetime.prediction.rank_training import train_weights

    sessions = len({sample.session_id for sample in samples})
    try:
        with Console(stderr=True).status(f"training on {len(samples)} sub-agents"):
            weights = train_weights(samples, seed)
        save_base(out, weights, {"format": format, "sessions": sessions, "workers": len(samples)})
    except (OSError, ValueError) as error:
        fail(str(error))
    typer.echo(f"Wrote {out}: from {len(samples)} sub-agents of {sessions} sessions.")


def evaluate(
    path: Annotated[Path | None, typer.Argument(metavar="TRACE", help="Recorded sub-agents. Not with --generated.")] = None,
    format: FormatOption = "jsonl",
    generated: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="So many made-up sub-agents instead of a trace.")
    ] = None,
    tau: Annotated[
        float, typer.Option(min=0, max=1, help="With --generated: Kendall's tau of what they show with how long they live.")
    ] = 0.53,
    folds: Annotated[int, typer.Option(min=2, max=20, help="Of the cross-validation; sessions are kept whole.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Divisions into folds.")] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where to write the figures, too.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the ridge rank's selection into this .png; needs matplotlib.")
    ] = None,
) -> None:
    """Compare the rank with simpler orders: Kendall's tau with lifetimes, and what the k shortest-predicted hold."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    _check([json_file, plot], path)
    made_up = _generate(generated, tau) if path is None and generated is not None else None
    samples: Sequence[SpawnSample]
    if made_up is not None:
        samples, source = made_up.samples, f"generated, tau {tau:g}"
    elif path is not None and generated is None:
        samples, source = _read(path, format), path.name
    else:
        fail("give either a TRACE with its --format, or --generated N")
    _need_scikit_learn()
    from vllm_lifetime.prediction.rank_evaluation import RANKERS, evaluate_ranks, plot_ranks

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=len(RANKERS) * seeds)
            done = evaluate_ranks(
                samples,
                source,
                seeds,
                folds,
                None if made_up is None else made_up.scores,
                on_step=lambda name: progress.update(bar, advance=1, description=name),
            )
        console = results_console(130)
        console.print(
            f"{source}: {done.workers} sub-agents of {done.sessions} sessions; lifetimes p10 {done.p10_s:.0f} s, "
            f"median {done.median_s:.0f} s, p90 {done.p90_s:.0f} s\n"
            f"Kendall's tau with lifetimes ({folds} folds, mean of {seeds} seeds; 95 %: sessions drawn again); of the k "
            "shortest-predicted: among the k\nshortest-lived / the 2k shortest-lived / not among the k longest-lived",
            soft_wrap=True,
        )
        console.print(_table(done))
        if json_file is not None:
            done.write(json_file)
            typer.echo(f"Wrote {json_file}")
        if plot is not None:
            plot_ranks(done, plot)
            typer.echo(f"Wrote {plot}")
    except (OSError, ValueError) as error:
        fail(str(error))
    except ImportError as error:
        fail(f"--plot needs matplotlib, which is not installed ({error}). Try: pip install matplotlib")


def _check(outputs: Sequence[Path | None], source: Path | None) -> None:
    try:
        check_outputs(outputs, [source])
    except (OSError, ValueError) as error:
        fail(str(error))


def _read(path: Path, format: str) -> list[SpawnSample]:
    from vllm_lifetime.traces.source import TraceError
    from vllm_lifetime.traces.spawns import read_spawns

    try:
        return read_spawns(path, format)
    except TraceError as error:
        fail(str(error))


def _generate(number: int, tau: float) -> GeneratedSpawns:
    from vllm_lifetime.traces.generate_spawns import generate_spawns

    return generate_spawns(number, tau=tau)


def _need_scikit_learn() -> None:
    from importlib.util import find_spec

    if find_spec("sklearn") is None:
        fail("this needs scikit-learn: pip install 'vllm-lifetime[prediction]'")


def _table(done: RankEvaluation) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("Order by", no_wrap=True)
    for name in ("tau", "95 %", *(f"k = {percent} % of all" for percent in SHOWN_PERCENTS)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in done.rows:
        table.add_row(
            row.name,
            f"{row.tau:.2f}±{row.tau_deviation:.2f}",
            f"{row.tau_low:.2f} to {row.tau_high:.2f}",
            *(_shares(row, percent) for percent in SHOWN_PERCENTS),
        )
    return table


def _shares(row: RankRow, percent: int) -> str:
    shares = next(each for each in row.shares if each.percent == percent)
    return " / ".join(
        f"{100 * share:.0f} %" for share in (shares.among_shortest, shares.among_shortest_2k, shares.avoids_longest)
    )
