# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime bench`: a trace of agents, replayed on a live server."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import fail
from vllm_lifetime.cli.outputs import check_outputs
from vllm_lifetime.whole_file import finite

if TYPE_CHECKING:
    from vllm_lifetime.bench.run import Outcome

__all__ = ["add_to", "bench"]

REFUSED, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: nothing was sent; the run is not complete, or a request failed; Ctrl-C or SIGTERM."""

NO_MATPLOTLIB = "Error: --plot needs matplotlib, which is not installed ({}). Try: pip install matplotlib"


class Boundaries(StrEnum):
    """Whether boundaries are posted; auto: where the server takes them."""

    auto = "auto"
    on = "on"
    off = "off"


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    app.command("bench")(bench)


def bench(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="The trace.")],
    format: Annotated[str, typer.Option(help="Format of the trace; see docs/traces.md.")],
    base_url: Annotated[str, typer.Option(help="The server's root, as http://localhost:8000.")] = "http://localhost:8000",
    model: Annotated[str | None, typer.Option(help="Name of the model; default: the server's first.")] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions at a time; default: each at its arrival in the trace, 8 at a time where it has none."),
    ] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="Replay the first so many sessions only.")] = None,
    tokens_per_block: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that a block becomes, to scale prompts and outputs; default: as in the trace."),
    ] = None,
    time_scale: Annotated[float, typer.Option(min=0, help="Pauses and arrivals are multiplied by this.")] = 1.0,
    idle_cap_s: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Longer pauses of the trace are cut to this first.")
    ] = 1800.0,
    metadata: Annotated[bool, typer.Option(help="Whether requests say whose they are.")] = True,
    boundaries: Annotated[
        Boundaries, typer.Option(help="Whether ends are posted; auto: if the server answers GET /lifetime/v1/health.")
    ] = Boundaries.auto,
    first_token: Annotated[int, typer.Option(min=0, help="Lowest token id in prompts.")] = 16,
    vocabulary_size: Annotated[int, typer.Option(min=2, help="Token ids in prompts are below this.")] = 1000,
    seed: Annotated[int, typer.Option(help="For the tokens; a server whose cache is warm from a run needs another one.")] = 0,
    request_timeout_s: Annotated[float, typer.Option(metavar="SECONDS", min=0.001, help="For one request, to its end.")] = 600.0,
    time_limit_s: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.001, help="For all together, from the first question to the server.")
    ] = None,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Ask for the generated tokens' ids, and write them into --json; vLLM only.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write everything measured to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw hit rate and latencies into this .png; needs matplotlib.")] = None,
) -> None:
    """Replay a trace of agents on a live server and measure latency, throughput and hit rate.

    Exit code 1: some of it failed, and what was measured is written all the same; 2: something asked for cannot be.
    """
    settings: dict[str, Any] = {
        name: str(value) if isinstance(value, Path) else finite(value)
        for name, value in locals().items()
        if name not in ("json", "plot")
    }
    from rich.console import Console

    from vllm_lifetime.bench.driver import Pace
    from vllm_lifetime.bench.plan import make_plan
    from vllm_lifetime.bench.progress import RunProgress
    from vllm_lifetime.bench.run import run_bench
    from vllm_lifetime.bench.server import ServerError
    from vllm_lifetime.traces.read import read_trace

    try:
        check_outputs([json, plot], [path])
        if plot is not None:
            if plot.suffix.lower() != ".png":
                raise ValueError(f"--plot draws a .png; {plot.name!r} must end so")
            import matplotlib  # noqa: F401  found out before the run
        plan = make_plan(
            read_trace(path, format),
            tokens_per_block=tokens_per_block,
            num_sessions=sessions,
            first_token=first_token,
            vocabulary_size=vocabulary_size,
            seed=seed,
        )
        with RunProgress(Console(stderr=True), plan.num_requests) as progress:
            outcome, was_interrupted = run_bench(
                plan,
                base_url,
                Pace(concurrency, time_scale, idle_cap_s, float("inf") if time_limit_s is None else time_limit_s),
                model=model,
                names_requests=metadata,
                boundaries=boundaries.value,
                request_timeout_s=request_timeout_s,
                keeps_token_ids=token_ids,
                on_change=progress.update,
            )
    except (ServerError, ValueError, OSError) as error:
        fail(str(error), REFUSED)
    except ImportError as error:
        typer.echo(NO_MATPLOTLIB.format(error), err=True)
        raise typer.Exit(REFUSED) from None
    failures = _tell(outcome, plan.name, len(plan.sessions), settings, json, plot)
    failure = _failure(outcome, was_interrupted)
    if failure is not None:
        failures.append(failure)
    if failures:
        fail("; ".join(failures), INTERRUPTED if was_interrupted else FAILED)


def _tell(
    outcome: Outcome, name: str, num_sessions: int, settings: dict[str, Any], json: Path | None, plot: Path | None
) -> list[str]:
    """Write the report, draw, print: each of them whatever becomes of the others. Returns what failed, a sentence each."""
    from vllm_lifetime.bench.report import build_report, find_problems, make_table, summarize, write_report

    failures: list[str] = []
    summary = summarize(outcome.record, outcome.counts, num_sessions)
    problems = find_problems(outcome.record, outcome.counts)
    if outcome.boundaries_lost:
        problems.append(f"The server did not take {outcome.boundaries_lost:,} of the boundaries.")
    info = outcome.info
    if json is not None:
        server = {
            "model": info.model,
            "max_model_len": info.max_model_len,
            "vllm": info.version,
            "takes_boundaries": info.has_lifetime,
            "boundaries_sent": outcome.boundaries_sent,
            "boundaries_lost": outcome.boundaries_lost,
        }
        try:
            write_report(build_report(outcome.record, summary, problems, outcome.counts, settings, server), json)
        except (OSError, ValueError) as error:
            failures.append(f"the report could not be written to {str(json)!r}: {error}")
    if plot is not None:
        from vllm_lifetime.bench.plots import plot_run

        try:
            plot_run(outcome.record, plot, f"{name} on {info.model}")
        except (OSError, ValueError, ImportError) as error:
            failures.append(f"the plot could not be drawn into {str(plot)!r}: {error}")
    try:
        console = results_console()
        console.print(f"{name} on {info.model}, {outcome.record.wall_s:,.1f} s", soft_wrap=True, markup=False)
        console.print(make_table(summary))
        for problem in problems:
            console.print(f"Note: {problem}", soft_wrap=True, markup=False)
    except (OSError, ValueError) as error:
        failures.append(f"the table could not be printed: {error}")
    return failures


def _failure(outcome: Outcome, was_interrupted: bool) -> str | None:
    """Why the run is not what was asked for, in a sentence; None if it is."""
    record = outcome.record
    ended = sum(session.latency_s is not None for session in record.sessions)
    if record.stopped is not None:
        return f"the run was stopped after {record.wall_s:.0f} s, with {ended} sessions served: {record.stopped}"
    if record.num_errors:
        first = next(request for request in record.requests if request.error is not None)
        return (
            f"{record.num_errors} of {len(record.requests)} requests failed, each with the rest of its session; the first, "
            f"request {first.index} of session {first.session_id!r}, with: {first.error}"
        )
    if was_interrupted:
        return "interrupted after the last answer, before the server's counters had settled"
    return None
