# SPDX-License-Identifier: Apache-2.0
"""Without metadata, without boundaries and without lower tiers: is vLLM with the connector as fast as stock vLLM?

Both servers run at once, one idle while the other works, and take turns on the demo's workload: stock, lifetime, stock,
lifetime, ... with the prefix cache reset in between. The spread of stock against itself is the noise that the difference has to
be read against.

    python -m benchmarks.no_hints
"""

from __future__ import annotations

import asyncio
import json
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.agent_workload import WorkloadConfig, generate
from benchmarks.demo import Driver, Settings, lanes
from benchmarks.report import RunRecord
from benchmarks.server import ServerError, VllmServer

console = Console()
RUNS = ("vllm", "lifetime")
MEASURES = ("hit_rate", "ttft_s", "workflow_latency_s", "wall_s")


def main(
    repeats: Annotated[int, typer.Option(help="Runs of each server.", min=2)] = 5,
    workflows: Annotated[int, typer.Option(help="Workflows per run.", min=2)] = 34,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("build"),
) -> None:
    """Compare stock vLLM with the connector that is told nothing."""
    from scripts.make_test_model import make_test_model

    settings = Settings()
    workload = generate(WorkloadConfig(block_size=settings.block_size, lanes=lanes(workflows, None)))
    model = make_test_model(out / "demo-model", layers=settings.model_layers, hidden=settings.model_hidden)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    with ExitStack() as stack:
        servers = {}
        for name in RUNS:
            servers[name] = VllmServer(
                model,
                log_path=out / f"no-hints-{name}.log",
                args=settings.server_args(),
                env=settings.server_env() | {"VLLM_SERVER_DEV_MODE": "1"},
                connector={} if name == "lifetime" else None,
            )
            stack.callback(servers[name].stop)
            servers[name].start()
        for turn in range(-1, repeats):  # the first turn only warms up
            for name in RUNS if turn % 2 else reversed(RUNS):
                response = httpx.post(f"{servers[name].base_url}/reset_prefix_cache", timeout=30)
                if response.status_code != 200:
                    raise ServerError(f"{name}: POST /reset_prefix_cache: {response.status_code} {response.text}")
                run = RunRecord(name)
                asyncio.run(Driver(workload, servers[name], run, with_hints=False).drive())
                if turn >= 0:
                    results[name].append(measures(run))
    report = compare(results)
    (out / "no_hints.json").write_text(json.dumps(report | {"runs": results}, indent=1) + "\n")
    table = Table(title=f"Told nothing: {repeats} runs each, interleaved; medians")
    for column in ("measure", "vllm", "lifetime", "lifetime / vllm", "vllm's own spread"):
        table.add_column(column, justify="left" if column == "measure" else "right")
    for name in MEASURES:
        row = report[name]
        spread = f"{row['spread_low']:.3f} - {row['spread_high']:.3f}"
        table.add_row(name, f"{row['vllm']:.4f}", f"{row['lifetime']:.4f}", f"{row['ratio']:.3f}", spread)
    console.print(table)


def measures(run: RunRecord) -> dict[str, float]:
    """One run's figures."""
    return {
        "hit_rate": run.hit_rate,
        "ttft_s": statistics.mean(request.ttft_s for request in run.requests),
        "workflow_latency_s": statistics.mean(run.workflow_latency_s),
        "wall_s": run.wall_s,
    }


def compare(results: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Per measure: the medians, the ratio of the medians, and stock's extremes over its own median."""
    report = {}
    for name in MEASURES:
        stock = [run[name] for run in results["vllm"]]
        ours = [run[name] for run in results["lifetime"]]
        median = statistics.median(stock)
        report[name] = {
            "vllm": median,
            "lifetime": statistics.median(ours),
            "ratio": statistics.median(ours) / median,
            "spread_low": min(stock) / median,
            "spread_high": max(stock) / median,
        }
    return report


if __name__ == "__main__":
    typer.run(main)
