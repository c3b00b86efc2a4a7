# SPDX-License-Identifier: Apache-2.0
"""Policies side by side on one trace: the rows of `vllm-lifetime replay`, as JSON, a table and a plot."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_lifetime.simulate.images import image_format
from vllm_lifetime.simulate.policies import BELADY, replay_policy, train
from vllm_lifetime.simulate.schedule import make_schedule, mean_final_context_blocks, split_trace
from vllm_lifetime.simulate.scored import Models
from vllm_lifetime.traces.schema import Trace
from vllm_lifetime.whole_file import replacing, write_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "LRU",
    "WORKLOAD_CAPACITY",
    "ReplayRow",
    "compare",
    "count_capacity",
    "gap_closed",
    "make_table",
    "plot_rows",
    "write_rows",
]

LRU = "lru"

MAX_CAPACITY_BLOCKS = 1 << 53

SHOWN_GAP = 0.001
"""Where less than this can be gained over LRU, a table gives no share of it: it would be a share of next to nothing."""

WORKLOAD_CAPACITY = {"hover-langchain": 1.55, "swebench-autogen": 1.5, "financebench-crewai": 2.0}
"""The capacity, as a fraction, at which a made-up workload is in the paper's regime (docs/traces.md), at its own concurrency."""


@dataclass(frozen=True)
class ReplayRow:
    """One policy at one capacity.

    `hit_rate` is the share of the prompts' blocks that were hit, `gap` belady - lru, and `gap_closed` (policy - lru) / gap, None
    where there is none. `overcommitted_requests` are longer than the capacity; each ran alone.
    """

    policy: str
    capacity_fraction: float
    capacity_blocks: int
    hit_rate: float
    gap: float
    gap_closed: float | None
    sessions: int
    requests: int
    overcommitted_requests: int
    seed: int


def gap_closed(hit_rate: float, lru: float, belady: float) -> float | None:
    """How much of what could be gained over LRU a policy gains; None if nothing could."""
    return (hit_rate - lru) / (belady - lru) if belady > lru else None


def count_capacity(fraction: float, whole: float, blocks: float) -> int:
    """`blocks`, which are `fraction` of `whole`, as a whole number. Raises ValueError where they are none or endless."""
    if blocks < 1:
        raise ValueError(f"capacity {fraction:g} of {whole:.0f} blocks is less than one block")
    if not blocks < MAX_CAPACITY_BLOCKS:
        raise ValueError(f"capacity {fraction:g} is too large to be counted in blocks; give a smaller one, as in 0.35")
    return int(blocks)


def compare(
    trace: Trace,
    policies: Sequence[str],
    capacity_fractions: Sequence[float],
    concurrency: int,
    idle_cap_s: float = float("inf"),
    *,
    train_share: float = 0.0,
    seed: int = 0,
    models: Models | None = None,
    report: Callable[[ReplayRow], None] = lambda row: None,
) -> list[ReplayRow]:
    """Replay `trace` with each policy at each capacity, and with LRU and Belady, which the others are measured by.

    A capacity is a fraction of concurrency x the mean over the measured sessions of their longest prompt. With a `train_share`,
    the sessions are shuffled by `seed`, the first so many train the models, and the rest is measured; else all are, in their
    order. `report` gets each row of `policies` as it is ready.

    Raises:
        ValueError: unknown policy, nothing to measure, a capacity below one block, or as `make_schedule`.

    """
    models = Models() if models is None else models
    if train_share:
        training, trace = split_trace(trace, train_share, seed)
        models = train(make_schedule(training, concurrency, idle_cap_s), models)
    if not any(session.requests for session in trace.sessions):
        raise ValueError("no session is left to measure with")
    whole = concurrency * mean_final_context_blocks(trace)
    if not whole:
        raise ValueError(f"no prompt has a whole block of {trace.block_size_tokens} tokens, so there is nothing to cache")
    rows: list[ReplayRow] = []
    for fraction in capacity_fractions:
        capacity_blocks = count_capacity(fraction, whole, fraction * whole)
        # Who has to wait for room, and so the order of the accesses, depends on the capacity.
        schedule = make_schedule(trace, concurrency, idle_cap_s, capacity_blocks=capacity_blocks)
        bounds = {name: replay_policy(schedule, name, capacity_blocks) for name in (LRU, BELADY)}
        for name in policies:
            result = bounds[name] if name in bounds else replay_policy(schedule, name, capacity_blocks, models)
            row = ReplayRow(
                policy=name,
                capacity_fraction=fraction,
                capacity_blocks=capacity_blocks,
                hit_rate=result.hit_rate,
                gap=bounds[BELADY].hit_rate - bounds[LRU].hit_rate,
                gap_closed=gap_closed(result.hit_rate, bounds[LRU].hit_rate, bounds[BELADY].hit_rate),
                sessions=result.sessions,
                requests=result.requests,
                overcommitted_requests=result.overcommitted_requests,
                seed=seed,
            )
            report(row)
            rows.append(row)
    return rows


def write_rows(rows: Iterable[ReplayRow], path: Path) -> None:
    """Write the rows as a JSON list. Raises OSError."""
    write_text(path, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def make_table(rows: Sequence[ReplayRow]) -> "Table":
    """Hit rate, and share of the gap closed, of each policy (down) at each capacity (across), and what is too long for it."""
    from rich.table import Table

    table = Table()
    table.add_column("policy")
    capacities = sorted({(row.capacity_fraction, row.capacity_blocks) for row in rows})
    for fraction, blocks in capacities:
        table.add_column(f"{fraction:g}\n{blocks:,} blocks", justify="right", no_wrap=True)
    for policy in dict.fromkeys(row.policy for row in rows):
        cells = {row.capacity_fraction: _cell(row) for row in rows if row.policy == policy}
        table.add_row(policy, *(cells.get(fraction, "-") for fraction, _ in capacities))
    table.add_section()
    # As many for every policy.
    too_long = {row.capacity_fraction: row.overcommitted_requests for row in rows}
    table.add_row("overcommitted", *(f"{too_long[fraction]:,}" for fraction, _ in capacities))
    return table


def _cell(row: ReplayRow) -> str:
    share = "-" if row.gap_closed is None or row.gap < SHOWN_GAP else f"{row.gap_closed:.0%}"
    return f"{row.hit_rate:.2%} ({share})"


def plot_rows(rows: Sequence[ReplayRow], path: Path, title: str) -> None:
    """Draw hit rate over capacity, a line per policy, into an image file.

    Raises ImportError without matplotlib, OSError, ValueError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    format = image_format(path)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.policy for row in rows):
        line = sorted((row for row in rows if row.policy == policy), key=lambda row: row.capacity_fraction)
        style = "--" if policy in (LRU, BELADY) else "-"
        axes.plot([row.capacity_fraction for row in line], [100 * row.hit_rate for row in line], style, marker="o", label=policy)
    axes.set_xlabel("capacity (fraction of concurrency x mean final context)")
    axes.set_ylabel("hit rate (%)")
    axes.set_title(title, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format=format)
