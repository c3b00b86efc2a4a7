# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime analyze`: how long the context of a trace's agents lives, and which boundaries pay (docs/analyze.md)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import fail
from vllm_lifetime.cli.outputs import check_outputs

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console
    from rich.table import Table

    from vllm_lifetime.analysis.report import Analysis, Comparison

__all__ = ["add_to", "analyze"]

CHARS_REMARK = (
    "Generated tokens are estimated from characters (4 a token) where the logged count is less: this format's `output_tokens` is "
    "often the value at the stream's start. Shares of reasoning are by characters."
)


PAPER_STRUCTURAL = {"worker": ("4.0-6.1x", "0.25-0.60"), "reviewer": ("4.7-38.3x", "-")}
"""The paper's ratio of median lifetimes, and its overlap in reads per write, of a lead and this class (section 3.4)."""


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    app.command("analyze")(analyze)


def analyze(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace: a file, or what its format allows.")],
    format: Annotated[str, typer.Option(help="Format of the trace; see docs/analyze.md.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for plots and segments.jsonl; made if absent. Needs matplotlib.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all figures of the tables to this file.")] = None,
    delays: Annotated[
        str, typer.Option(help="Tool latency and user delay: `trace`, its own pauses, or `paper`, drawn as Lachesis does.")
    ] = "trace",
    idle_cap_s: Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Longer pauses are cut to this.")] = 1800.0,
    seed: Annotated[int, typer.Option(min=0, help="For --delays paper.")] = 0,
) -> None:
    """Measure lifetime, volume and reads of context segments, on each axis. Exit code 2: something asked for cannot be."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_lifetime.analysis.clock import Delays
    from vllm_lifetime.analysis.export import write_report, write_segments
    from vllm_lifetime.analysis.reasoning import read_reasoning
    from vllm_lifetime.analysis.report import AnalysisError
    from vllm_lifetime.analysis.report import analyze as analyze_trace
    from vllm_lifetime.traces.read import TraceError, read_trace

    try:
        if delays not in ("trace", "paper"):
            raise ValueError(f"--delays is `trace` or `paper`; this is {delays!r}")
        check_outputs([json], [path])
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        errors = Console(stderr=True)
        with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
            bar = progress.add_task(f"reading {path.name}", total=None)
            trace = read_trace(path, format)
            outputs = read_reasoning(path, format)
            progress.update(bar, description="analysing sessions", total=sum(bool(s.requests) for s in trace.sessions))
            analysis = analyze_trace(
                trace,
                Delays(modelled=delays == "paper", idle_cap_s=idle_cap_s, seed=seed),
                outputs,
                on_session=lambda: progress.advance(bar),
            )
        console = results_console()
        remarks = [*analysis.remarks, *([CHARS_REMARK] if format == "claude-code" else [])]
        _show(analysis, remarks, console)
        if json is not None:
            write_report(analysis, remarks, json)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            write_segments(analysis, out / "segments.jsonl")
            from vllm_lifetime.analysis.figures import draw_figures

            files = [out / "segments.jsonl", *draw_figures(analysis, out)]
            console.print(f"Wrote {', '.join(str(file) for file in files)}", soft_wrap=True, markup=False)
    except AnalysisError as error:
        fail(f"{path}: {error}")
    except (TraceError, ValueError, OSError) as error:
        fail(str(error))
    except ImportError as error:
        fail(f"--out draws plots and needs matplotlib, which is not installed ({error}). Try: pip install matplotlib")


def _show(analysis: Analysis, remarks: Iterable[str], console: Console) -> None:
    title = f"{analysis.name}: {analysis.requests:,} requests of {analysis.sessions:,} sessions"
    console.print(title, soft_wrap=True, markup=False)
    console.print(_class_table(analysis))
    console.print(_axis_table(analysis))
    if analysis.temporal is not None and analysis.temporal.stripping is not None:
        what_if = analysis.temporal.stripping
        console.print(
            f"If reasoning, {what_if.reasoning_share:.1%} of what a turn writes, were stripped at the end of the "
            f"{what_if.turns:,} turns at whose end nothing was dropped: {what_if.laden_share:.1%} of "
            f"what turns write would be reasoning-laden, what is kept would live {_times(what_if.lifetime_ratio)} as long "
            f"(separability {_plain(what_if.separability)}), {what_if.long_lived_saved:.1%} less would be written that outlives "
            f"its turn, and {what_if.written_more:.1%} more in all.",
            soft_wrap=True,
        )
    console.print(analysis.verdict, soft_wrap=True)
    for remark in remarks:
        console.print(remark, soft_wrap=True, markup=False)


def _class_table(analysis: Analysis) -> Table:
    from rich.table import Table

    table = Table("segment", title="What is written, how long it lives (normalised seconds), and how often it is read")
    columns = ("segments", "tokens", "share", "median tokens", "mean tokens", "lifetime p10", "median", "p90", "reads per write")
    for name in columns:
        table.add_column(name, justify="right")
    for row in analysis.classes:
        lifetimes = (row.p10_lifetime_s, row.median_lifetime_s, row.p90_lifetime_s)
        table.add_row(
            row.segment_class.value,
            f"{row.segments:,}",
            f"{row.written_tokens:,}",
            f"{row.written_share:.1%}",
            f"{row.median_tokens:,.0f}",
            f"{row.mean_tokens:,.0f}",
            *("-" if value is None else f"{value:,.0f}" for value in lifetimes),
            "-" if row.median_reads_per_write is None else f"{row.median_reads_per_write:,.0f}",
        )
    return table


def _axis_table(analysis: Analysis) -> Table:
    from rich.table import Table

    table = Table("axis", "measure", title="The axes of Lachesis section 3")
    table.add_column("here", justify="right")
    table.add_column("paper", justify="right")
    temporal, structural, workers = analysis.temporal, analysis.structural, analysis.inter_worker
    if temporal is not None:
        shrunk, dropped = (f"{n:,} of {temporal.turn_ends:,}" for n in (temporal.shrunk_turn_ends, temporal.dropped_turn_ends))
        table.add_row("temporal", "turn ends that shrank the context", shrunk, "-")
        table.add_row("", "turn ends that dropped a tenth of it or more", dropped, "all")
        table.add_row("", "reasoning in what a turn generates, median", _share(temporal.median_reasoning_share), "-")
        table.add_row("", "reasoning-laden, of what turns write", _share(temporal.turn_share), "66-83 %")
        table.add_row("", "reasoning-laden, of all that is written", _share(temporal.written_share), "-")
        table.add_row("", "of that, dropped before its turn's end", _share(temporal.within_turn_share), "-")
        _comparison(table, temporal.comparison, "7.6-17.2x", "0.96-0.99", "-")
        table.add_section()
    if structural is not None:
        table.add_row("structural", "sub-agents, of all that is written", _share(structural.written_share), "most")
        of_sessions = f"the same in the {structural.sessions:,} sessions with them"
        table.add_row("", of_sessions, _share(structural.written_share_in_sessions), "most")
        for comparison in structural.comparisons:
            ratio, overlap = PAPER_STRUCTURAL[comparison.short.value]
            _comparison(table, comparison, ratio, "0.90-1.00", overlap)
        table.add_row("", "lead waits for sub-agents, median", _share(structural.waiting_share), "71-88 %")
        table.add_row("", "the same without the user's pauses", _share(structural.waiting_share_without_user), "71-88 %")
        table.add_section()
    if workers is not None:
        table.add_row("inter-worker", "workers", f"{workers.workers:,}", "-")
        table.add_row("", "lifetime, p90 / p10", _times(workers.lifetime_spread), "3.7-23.6x")
        table.add_row("", "written tokens, p90 / p10", _times(workers.volume_spread), "2.8-22.5x")
        table.add_row("", "Kendall's tau of the two", _plain(workers.lifetime_volume_tau), "0.51-0.72")
        table.add_row("", "Kendall's tau of lifetime and its rank at spawn", _plain(workers.predicted_tau), "0.53")
    return table


def _comparison(table: Table, row: Comparison, ratio: str, separability: str, overlap: str) -> None:
    names = f"{row.long.value} / {row.short.value}"
    table.add_row("", f"{names}: median lifetimes", _times(row.lifetime_ratio), ratio)
    table.add_row("", f"{names}: separability", _plain(row.separability), separability)
    table.add_row("", f"{names}: overlap in reads per write", _plain(row.reads_per_write_overlap), overlap)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}x"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
