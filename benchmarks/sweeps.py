# SPDX-License-Identifier: Apache-2.0
"""The made-up workloads under each policy, and one of them with one parameter varied at a time (PBKV figures 5 and 10 to 12).

    python -m benchmarks.sweeps [--only policies,noise] [--seeds 3] [--processes 1]     # some 20 minutes on one quiet core
    python -m scripts.update_figures

Writes `build/sweeps.json`, after each sweep, and `build/sweeps.png`; what is not made anew stays as it is in the file.
docs/replay.md discusses it.
"""

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_lifetime.simulate.comparison import WORKLOAD_CAPACITY
from vllm_lifetime.simulate.policies import Variant
from vllm_lifetime.simulate.sweep import Sweep, SweepRow, plot_sweeps, sweep
from vllm_lifetime.traces.workload_spec import load_workload

__all__ = ["main"]

HOVER = "hover-langchain"
STATIC = "financebench-crewai"
LEARNED_FROM = 72
"""Workflows that the models have seen before."""

AGGRESSIVE_RHO = 0.2
"""The share of HBM that the paper's aggressive variant displaces where noise is swept (appendix E.3)."""


def base(workload: str, rounds: int, seeds: int) -> Sweep:
    """The workload as it is replayed by default, with `rounds` workflows for each that runs at a time."""
    concurrency = load_workload(workload).concurrency
    return Sweep(
        workload=workload,
        parameter="concurrency",
        values=(str(concurrency),),
        policies=(),
        concurrency=concurrency,
        capacity=WORKLOAD_CAPACITY[workload],
        workflows=rounds * concurrency,
        training_workflows=LEARNED_FROM,
        seeds=seeds,
    )


def sweeps(seeds: int) -> Iterator[tuple[str, str, Sweep]]:
    """(name, what to add to the policies' names, sweep); several of one name belong together."""
    for workload in WORKLOAD_CAPACITY:
        policies = ("lru", "lifecycle", *(("kvflow",) if workload == STATIC else ()), "hierarchical", "lifetime", "belady")
        yield "policies", "", replace(base(workload, 4, seeds), policies=policies)
    hover = base(HOVER, 2, seeds)
    two = ("hierarchical", "pbkv")
    yield (
        "concurrency",
        "",
        replace(hover, values=("48", "60", "72", "96"), policies=("lru", "lifecycle", "hierarchical", "lifetime")),
    )
    yield "horizon", "", replace(hover, parameter="horizon", values=("1", "2", "3", "5"), policies=two)
    yield "gamma", "", replace(hover, parameter="gamma", values=("0.1", "0.4", "0.7", "1"), policies=("hierarchical",))
    yield (
        "predictor",
        "",
        replace(
            hover,
            parameter="predictor",
            values=("markov1", "markov2", "markov3", "markov5"),
            policies=("lifecycle", "hierarchical"),
        ),
    )
    noise = replace(hover, parameter="noise", values=("0", "0.4", "0.8", "1"), policies=two)
    yield "noise", "", noise
    aggressive = Variant(has_host=True, rho=AGGRESSIVE_RHO)
    yield "noise", f", rho {AGGRESSIVE_RHO:g}", replace(noise, policies=("pbkv",), variant=aggressive)
    rho = replace(hover, parameter="rho", values=("0", "0.1", "0.2", "1"), policies=("pbkv",))
    yield "rho", "", rho
    yield "rho", ", noise 1", replace(rho, values=("0", "0.2", "1"), variant=Variant(has_host=True, noise=1.0))


def main() -> None:
    """Measure, write, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="names of sweeps, with commas between them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path, default=Path("build/sweeps.json"))
    options = parser.parse_args()
    only = None if options.only is None else options.only.split(",")
    found: dict[str, list[dict[str, Any]]] = json.loads(options.json.read_text()) if options.json.exists() else {}
    fresh: set[str] = set()
    for name, suffix, what in sweeps(options.seeds):
        if only is not None and name not in only:
            continue
        began = time.process_time()
        rows = [replace(row, policy=row.policy + suffix) for row in sweep(what, options.processes)]
        found[name] = [*(found[name] if name in fresh else ()), *(asdict(row) for row in rows)]
        fresh.add(name)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        for row in rows:
            print(f"{row.workload} {row.parameter} {row.value} {row.policy}: {row.hit_rate:.2%} ±{100 * row.deviation:.2f}")
        print(f"{name}: {time.process_time() - began:.0f} s of CPU", flush=True)
    plots = [[SweepRow(**row) for row in rows] for name, rows in found.items() if name != "policies"]
    if plots:
        plot_sweeps(plots, options.json.with_suffix(".png"), columns=3)


if __name__ == "__main__":
    main()
