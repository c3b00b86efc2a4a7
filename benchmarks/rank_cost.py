# SPDX-License-Identifier: Apache-2.0
"""What the lifetime rank costs on the scheduler's thread: to score a spawn, and to learn from a return.

Spawns of three kinds: *role and length*, without text; *usual*, an instruction of 1,500 characters and twelve tools; *largest*,
instruction and context of 64 KiB each and 256 tools, as much as a boundary may carry. A return is learned from with the window
full, so that another one is forgotten for it.

Figures are CPU time of one thread.

    python -m benchmarks.rank_cost --json rank_cost.json
"""

import argparse
import itertools
import json
import random
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import mean, percentile
from benchmarks.timing import QuietGc
from vllm_lifetime.boundaries import MAX_SPAWN_TEXT_LENGTH, MAX_SPAWN_TOOLS
from vllm_lifetime.prediction.lifetime_rank import DEFAULT_WINDOW, LifetimeRank
from vllm_lifetime.traces.spawn_schema import SpawnSignal

NUM_WORDS = 20_000
NUM_SPAWNS = 50
USUAL_CHARS, USUAL_TOOLS = 1500, 12


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2000, help="calls measured")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    rows = measure(arguments.repeats)
    table = Table("call", "mean, us", "median, us", "p99, us")
    for row in rows:
        table.add_row(row["call"], *(f"{row[name]:.1f}" for name in ("mean_us", "median_us", "p99_us")))
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each call."""
    spawns = make_spawns(random.Random(0))
    rows = []
    for kind, signals in spawns.items():
        rank = LifetimeRank()
        rows.append(_time(f"score, {kind}", signals, rank.score, repeats))
    rank = LifetimeRank()
    for signal in itertools.islice(itertools.cycle(spawns["usual"]), DEFAULT_WINDOW):
        rank.observe(signal, 60.0)
    rows.append(_time("observe, usual", spawns["usual"], lambda signal: rank.observe(signal, 60.0), repeats))
    return rows


def make_spawns(rng: random.Random) -> dict[str, list[SpawnSignal]]:
    """Spawns by kind."""
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(NUM_WORDS)]

    def text(chars: int) -> str:
        return " ".join(rng.choices(words, k=chars // 3))[:chars]

    tools = tuple(f"tool_{number}" for number in range(MAX_SPAWN_TOOLS))
    long = [text(MAX_SPAWN_TEXT_LENGTH) for _ in range(NUM_SPAWNS)]
    return {
        "role and length": [SpawnSignal(instruction_chars=10 * i, agent="coder") for i in range(NUM_SPAWNS)],
        "usual": [
            SpawnSignal(instruction=text(USUAL_CHARS), tools=tools[:USUAL_TOOLS], agent="coder", model="m", position=i)
            for i in range(NUM_SPAWNS)
        ],
        "largest": [
            SpawnSignal(instruction=one, context=other, tools=tools, agent="coder", model="m", position=1)
            for one, other in zip(long, reversed(long), strict=True)
        ],
    }


def _time(call: str, signals: list[SpawnSignal], function: Callable[[SpawnSignal], object], repeats: int) -> dict[str, Any]:
    times_us = []
    with QuietGc():
        for signal in itertools.islice(itertools.cycle(signals), repeats):
            begin = time.thread_time_ns()
            function(signal)
            times_us.append((time.thread_time_ns() - begin) / 1e3)
    figures = {"mean_us": mean(times_us), "median_us": percentile(times_us, 0.5), "p99_us": percentile(times_us, 0.99)}
    return {"call": call, "count": repeats} | figures


if __name__ == "__main__":
    main()
