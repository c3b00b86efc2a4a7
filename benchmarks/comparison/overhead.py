# SPDX-License-Identifier: Apache-2.0
"""What the connector costs the scheduler: CPU time of a step with it and without it, at some numbers of workflows at a time."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from benchmarks.comparison.measure import REQUEST_TIMEOUT_S
from benchmarks.comparison.regimes import DYNAMIC
from benchmarks.comparison.settings import SCHEDULER_TIMES, Budget, ServerSettings
from benchmarks.comparison.systems import SYSTEMS, Site
from benchmarks.server import ServerError, kv_block_bytes
from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.plan import make_plan
from vllm_lifetime.bench.run import run_bench
from vllm_lifetime.bench.server import ServerError as BenchError
from vllm_lifetime.traces.generate import generate_workload

__all__ = ["Step", "overhead", "overhead_table", "read_steps", "summarize_steps"]

SYSTEMS_MEASURED = ("vllm", "lifecycle", "lifetime")
SCHEDULER = "benchmarks.comparison.timed_scheduler.TimedScheduler"
TIMES = Path("build/comparison/scheduler_times.txt")
TOKENS_PER_BLOCK = 4
REQUESTS_PER_WORKFLOW = 20
"""Of the workload, about."""
SETTLING_S = 1.0


class Step(NamedTuple):
    """One step of the engine. `at_s` since the epoch; `cpu_s` of schedule() and update_from_output() together."""

    at_s: float
    cpu_s: float
    tokens: int
    requests: int


def overhead(
    concurrency: Annotated[str, typer.Option(help="Workflows at a time, with commas between.")] = "1,16,72",
    requests: Annotated[int, typer.Option(min=20, help="Requests at each, about.")] = 400,
    seed: Annotated[int, typer.Option(help="Of the workload.")] = 0,
    json_path: Annotated[Path, typer.Option("--json", help="Write the figures to this file.")] = Path("build/overhead.json"),
) -> None:
    """Measure the scheduler's CPU time per step, stock and with the connector. Five minutes. Exit code 1: a server failed."""
    from scripts.make_test_model import make_test_model

    settings = ServerSettings(
        model_layers=2,
        model_hidden=128,
        max_num_seqs=128,
        more_arguments=("--scheduler-cls", SCHEDULER),
        more_environment=((SCHEDULER_TIMES, str(TIMES.absolute())), ("PYTHONPATH", os.getcwd())),
    )
    model = make_test_model(Path("build/overhead-model"), layers=settings.model_layers, hidden=settings.model_hidden)
    try:
        levels = [int(text) for text in concurrency.split(",")]
        if min(levels) < 1:
            raise ValueError
    except ValueError:
        typer.echo(f"Error: --concurrency is whole numbers above 0 with commas between them, not {concurrency!r}", err=True)
        raise typer.Exit(2) from None
    rows: list[dict[str, Any]] = []
    try:
        for name in SYSTEMS_MEASURED:
            rows += _measure(name, levels, requests, seed, settings, model)
    except (ServerError, BenchError, ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    json_path.parent.mkdir(parents=True, exist_ok=True)
    json_path.write_text(json.dumps(rows, indent=1) + "\n")
    sys.stdout.write(overhead_table(rows))


def _measure(
    name: str, levels: Sequence[int], requests: int, seed: int, settings: ServerSettings, model: Path
) -> list[dict[str, Any]]:
    """One server, and all levels on it, each with tokens of its own."""
    TIMES.parent.mkdir(parents=True, exist_ok=True)
    TIMES.write_text("")
    # HBM under pressure at the highest level, so that blocks are evicted, copied down and loaded in most steps.
    block_bytes = kv_block_bytes(model, settings.block_size_tokens, settings.dtype)
    budget = Budget(hbm_blocks=16 * max(levels) + 256, block_bytes=block_bytes, host_share=0.125, disk_share=0.125)
    site = Site(model, Path("build/comparison"), settings, budget, f"overhead-{name}")
    windows: list[tuple[int, int, float, float]] = []
    with SYSTEMS[name].start(site) as running:
        for level in levels:
            trace = generate_workload(DYNAMIC, max(level, requests // REQUESTS_PER_WORKFLOW), seed + level)
            each = -(-requests // len(trace.sessions))
            short = tuple(replace(session, requests=tuple(session.requests[:each])) for session in trace.sessions)
            plan = make_plan(replace(trace, sessions=short), tokens_per_block=TOKENS_PER_BLOCK, seed=seed + level)
            began_s = time.time()
            _, was_interrupted = run_bench(
                plan,
                running.server.base_url,
                Pace(concurrency=level, time_scale=0.0),
                model=None,
                names_requests=True,
                boundaries="auto",
                request_timeout_s=REQUEST_TIMEOUT_S,
            )
            if was_interrupted:
                raise KeyboardInterrupt
            windows.append((level, plan.num_requests, began_s, time.time()))
            time.sleep(SETTLING_S)
    steps = read_steps(TIMES)
    return [
        {"system": name, "concurrency": level}
        | summarize_steps([step for step in steps if began_s <= step.at_s <= ended_s], num_requests)
        for level, num_requests, began_s, ended_s in windows
    ]


def read_steps(path: Path) -> list[Step]:
    """The steps that a `TimedScheduler` has noted down and that computed something; a last line that is cut is left out."""
    steps = []
    for line in path.read_text().splitlines():
        fields = line.split()
        if len(fields) == len(Step._fields) and int(fields[2]) > 0:
            steps.append(Step(float(fields[0]), int(fields[1]) / 1e9, int(fields[2]), int(fields[3])))
    return steps


def summarize_steps(steps: Sequence[Step], num_requests: int) -> dict[str, Any]:
    """Figures of the steps that served `num_requests`: CPU time in milliseconds, requests in a step. Nothing without steps.

    How many requests share a step depends on how fast each system is; the sum over all steps per request does not.
    """
    if not steps:
        return {"steps": 0}
    cpu_ms = np.array([step.cpu_s for step in steps]) * 1000
    return {
        "steps": len(steps),
        "requests_mean": round(float(np.mean([step.requests for step in steps])), 2),
        "cpu_mean_ms": round(float(cpu_ms.mean()), 4),
        "cpu_p50_ms": round(float(np.percentile(cpu_ms, 50)), 4),
        "cpu_per_request_ms": round(float(cpu_ms.sum()) / num_requests, 4),
        "cpu_p99_ms": round(float(np.percentile(cpu_ms, 99)), 4),
    }


def overhead_table(rows: Sequence[dict[str, Any]]) -> str:
    """As markdown, with what each adds to stock at the same number of workflows."""
    lines = [
        "| workflows at a time | system | steps | requests in a step | CPU time of a step: mean | p50 | p99 | over vLLM "
        "| per request | over vLLM |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    stock = {row["concurrency"]: row for row in rows if row["system"] == "vllm"}
    for row in sorted(rows, key=lambda row: row["concurrency"]):
        if not row["steps"]:
            continue
        base = {} if row["system"] == "vllm" else stock.get(row["concurrency"], {})
        mean, median, tail, each = (row[f"cpu_{which}_ms"] for which in ("mean", "p50", "p99", "per_request"))
        cells = [f"{mean:.3f} ms", f"{median:.3f} ms", f"{tail:.3f} ms", _more(mean, base.get("cpu_mean_ms"))]
        cells += [f"{each:.3f} ms", _more(each, base.get("cpu_per_request_ms"))]
        title = SYSTEMS[row["system"]].title
        lines.append(f"| {row['concurrency']} | {title} | {row['steps']:,} | {row['requests_mean']:.1f} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _more(value: float, base: float | None) -> str:
    return "" if base is None else f"{value - base:+.3f} ms"
