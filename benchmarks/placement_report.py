# SPDX-License-Identifier: Apache-2.0
"""What `benchmarks.placement` has measured, as figures, a table and a plot after Lachesis Figures 9 and 10."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.server import Metrics, metric_sum

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

__all__ = ["BASELINE", "CLASSES", "POLICIES", "TIERS", "Run", "build_report", "num_differing", "plot", "read_run", "table"]

BASELINE = "hbm_first"
POLICIES = (BASELINE, "lachesis_no_predictive", "lachesis")
TIERS = ("hbm", "flash")

CLASSES: Mapping[str, tuple[str, ...]] = {
    "lead": ("lead", "reasoning_stripped"),
    "reasoning": ("reasoning_laden",),
    "worker": ("worker",),
    "reviewer": ("reviewer",),
}
"""As they are shown; of the metrics' classes. A lead is `reasoning_stripped` until it has spawned somebody."""

Answers = Mapping[tuple[str, int], tuple[int, ...]]
"""Generated tokens by agent and the number of its request."""


@dataclass(frozen=True)
class Run:
    """One seed's sessions under one policy: differences of the server's counters."""

    share: float
    """HBM blocks over the short-lived blocks that are alive on average."""

    seed: int
    policy: str
    block_bytes: int
    placed_blocks: dict[str, dict[str, int]]
    """By class and the tier that gave them."""

    spilled_blocks: dict[str, dict[str, int]]
    """By class and the tier that should have given them."""

    flash_bytes_written: int
    """By the engine's own count of what its steps wrote, partly filled blocks by the token."""

    preemptions: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    wall_s: float

    def bytes_in(self, tier: str) -> int:
        """Bytes of the blocks that `tier` gave."""
        return self.block_bytes * sum(blocks[tier] for blocks in self.placed_blocks.values())

    @property
    def hbm_share_of_writes(self) -> float:
        """HBM's part of all that was placed."""
        hbm, flash = (self.bytes_in(tier) for tier in TIERS)
        return hbm / max(1, hbm + flash)

    def hbm_share_of(self, name: str) -> float:
        """HBM's part of what a class wrote; 0 if it wrote nothing."""
        blocks = self.placed_blocks[name]
        return blocks["hbm"] / max(1, sum(blocks.values()))

    def figures(self) -> dict[str, Any]:
        """The run's entry in the report."""
        return asdict(self) | {
            "placed_bytes": {
                name: {tier: blocks[tier] * self.block_bytes for tier in TIERS} for name, blocks in self.placed_blocks.items()
            },
            "hbm_share_of_writes": round(self.hbm_share_of_writes, 4),
            "hbm_share_of_class": {name: round(self.hbm_share_of(name), 4) for name in self.placed_blocks},
        }


def read_run(before: Metrics, after: Metrics, *, share: float, seed: int, policy: str, **known: Any) -> Run:
    """A run from what `/metrics` said before and after it; `known`: what the client counted."""

    def moved(name: str, **labels: str) -> int:
        return round(metric_sum(after, name, **labels) - metric_sum(before, name, **labels))

    def blocks(name: str) -> dict[str, dict[str, int]]:
        return {
            shown: {
                tier: sum(moved(f"vllm:lifetime_{name}_total", tier=tier, **{"class": one}) for one in classes) for tier in TIERS
            }
            for shown, classes in CLASSES.items()
        }

    return Run(
        share=share,
        seed=seed,
        policy=policy,
        placed_blocks=blocks("placed_blocks"),
        spilled_blocks=blocks("spilled_blocks"),
        flash_bytes_written=moved("vllm:lifetime_bytes_written_total", tier="flash"),
        preemptions=moved("vllm:num_preemptions_total"),
        **known,
    )


def num_differing(one: Answers, other: Answers) -> int:
    """Requests whose generated tokens differ, or that only one of the two has."""
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())


def build_report(runs: Sequence[Run], differing_requests: int | None, extra: Mapping[str, Any]) -> dict[str, Any]:
    """All figures: `runs` one by one, `cells` over the seeds, and whether order and direction are the paper's.

    `differing_requests`: None if there was nothing to compare.
    """
    by_cell: dict[tuple[float, str], dict[int, Run]] = {}
    for run in runs:
        by_cell.setdefault((run.share, run.policy), {})[run.seed] = run
    cells = [_cell(found, by_cell.get((share, BASELINE), {})) for (share, _), found in by_cell.items()]
    return {
        **extra,
        "tokens_identical": None if differing_requests is None else not differing_requests,
        "differing_requests": differing_requests,
        "cells": cells,
        "orders": [_order(share, by_cell) for share in dict.fromkeys(run.share for run in runs)],
        "runs": [run.figures() for run in runs],
    }


def _cell(found: Mapping[int, Run], baseline: Mapping[int, Run]) -> dict[str, Any]:
    """One policy at one share. Gains and rises are over the baseline with the same seed."""
    first = next(iter(found.values()))
    with_baseline = [(run, baseline[seed]) for seed, run in found.items() if seed in baseline]
    gains = [base.flash_bytes_written / max(1, run.flash_bytes_written) for run, base in with_baseline]
    rises = [run.hbm_share_of_writes / max(1e-9, base.hbm_share_of_writes) for run, base in with_baseline]
    total = sum(sum(run.bytes_in(tier) for tier in TIERS) for run in found.values())

    def mean(values: Sequence[float]) -> float | None:
        return round(statistics.fmean(values), 4) if values else None

    return {
        "share": first.share,
        "policy": first.policy,
        "seeds": list(found),
        "flash_bytes_written": mean([run.flash_bytes_written for run in found.values()]),
        "hbm_bytes_placed": mean([run.bytes_in("hbm") for run in found.values()]),
        "gain": mean(gains),
        "gain_low": round(min(gains), 4) if gains else None,
        "gain_high": round(max(gains), 4) if gains else None,
        "hbm_share_of_writes": mean([run.hbm_share_of_writes for run in found.values()]),
        "hbm_share_rise": mean(rises),
        "hbm_share_of_class": {name: mean([run.hbm_share_of(name) for run in found.values()]) for name in CLASSES},
        "write_share": {
            name: {
                tier: round(sum(run.placed_blocks[name][tier] * run.block_bytes for run in found.values()) / max(1, total), 4)
                for tier in TIERS
            }
            for name in CLASSES
        },
        "spilled_blocks": sum(sum(sum(tiers.values()) for tiers in run.spilled_blocks.values()) for run in found.values()),
        "preemptions": sum(run.preemptions for run in found.values()),
    }


def _order(share: float, by_cell: Mapping[tuple[float, str], Mapping[int, Run]]) -> dict[str, Any]:
    """In how many seeds flash takes less under each policy than under the one before, and reviewers are mostly in HBM."""
    found = [by_cell.get((share, policy), {}) for policy in POLICIES]
    seeds = [seed for seed in found[0] if all(seed in runs for runs in found)]
    base, deterministic, both = found
    return {
        "share": share,
        "seeds": len(seeds),
        "no_predictive_below_hbm_first": sum(deterministic[s].flash_bytes_written < base[s].flash_bytes_written for s in seeds),
        "lachesis_below_no_predictive": sum(both[s].flash_bytes_written < deterministic[s].flash_bytes_written for s in seeds),
        "reviewers_mostly_in_hbm": sum(both[s].hbm_share_of("reviewer") > 0.5 for s in seeds),
    }


def table(report: Mapping[str, Any]) -> Table:
    """A line a share and policy; means over the seeds."""
    from rich.table import Table

    result = Table(
        "HBM", "policy", "to flash", "gain (low to high)", "HBM's share", "reviewers in HBM", "workers in HBM", "spilled"
    )
    result.columns[1].no_wrap = True
    for column in result.columns[2:]:
        column.justify = "right"
    for cell in report["cells"]:
        of_class = cell["hbm_share_of_class"]
        gain = "" if cell["gain"] is None else f"{cell['gain']:.2f} ({cell['gain_low']:.2f} to {cell['gain_high']:.2f})"
        rise = "" if cell["hbm_share_rise"] is None or cell["policy"] == BASELINE else f" (x{cell['hbm_share_rise']:.1f})"
        result.add_row(
            f"{cell['share']:g}",
            cell["policy"],
            f"{cell['flash_bytes_written'] / 1e6:.1f} MB",
            gain,
            f"{cell['hbm_share_of_writes']:.1%}{rise}",
            f"{of_class['reviewer']:.0%}",
            f"{of_class['worker']:.0%}",
            f"{cell['spilled_blocks']:,}",
        )
    return result


_COLORS = {"hbm_first": "#8a8f98", "lachesis_no_predictive": "#9ecae1", "lachesis": "#1f77b4"}
_CLASS_COLORS = {"lead": "#1f77b4", "reasoning": "#9ecae1", "worker": "#fdae6b", "reviewer": "#d94801"}


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Draw gain by HBM's size, and shares of the writes by class and tier, to the PNG file `path`. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = {(cell["share"], cell["policy"]): cell for cell in report["cells"]}
    shares = list(dict.fromkeys(share for share, _ in cells))
    policies = [policy for policy in POLICIES if any(key[1] == policy for key in cells)]
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1, 1.6)})
    width = 0.8 / max(1, len(policies))
    for number, policy in enumerate(policies):
        places = [i + (number - (len(policies) - 1) / 2) * width for i in range(len(shares))]
        found = [cells.get((share, policy), {}) for share in shares]
        gains = [cell.get("gain") or 0.0 for cell in found]
        ends = [
            [gain - (cell.get("gain_low") or gain) for gain, cell in zip(gains, found, strict=True)],
            [(cell.get("gain_high") or gain) - gain for gain, cell in zip(gains, found, strict=True)],
        ]
        bars = left.bar(places, gains, width, yerr=ends, label=policy, color=_COLORS[policy], capsize=2)
        left.bar_label(bars, [f"{gain:.2f}" for gain in gains], fontsize="x-small", padding=2)
    left.set_xticks(range(len(shares)), [f"{share:g}" for share in shares])
    left.set_title("Flash lifetime over hbm_first", fontsize=10)
    left.legend(fontsize="x-small", frameon=False, loc="upper left")
    _plot_writes(right, cells, shares, policies, width)
    for axes in (left, right):
        axes.set_xlabel("HBM blocks over the short-lived blocks alive on average", fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _plot_writes(
    axes: Axes, cells: Mapping[tuple[float, str], Any], shares: Sequence[float], policies: Sequence[str], width: float
) -> None:
    """What goes to HBM upwards, to flash downwards; one bar a policy, in their order."""
    for number, policy in enumerate(policies):
        for i, share in enumerate(shares):
            cell = cells.get((share, policy))
            if cell is None:
                continue
            place = i + (number - (len(policies) - 1) / 2) * width
            ends = dict.fromkeys(TIERS, 0.0)
            for name, parts in cell["write_share"].items():
                for tier, sign in (("hbm", 100), ("flash", -100)):
                    axes.bar(place, sign * parts[tier], 0.9 * width, bottom=ends[tier], color=_CLASS_COLORS[name])
                    ends[tier] += sign * parts[tier]
            short = {"hbm_first": "first", "lachesis_no_predictive": "no pred.", "lachesis": "lachesis"}[policy]
            axes.text(place, ends["hbm"] + 2, short, ha="center", va="bottom", fontsize="x-small", rotation=90)
    for name, color in _CLASS_COLORS.items():
        axes.bar(0, 0, color=color, label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shares)), [f"{share:g}" for share in shares])
    axes.set_ylim(-105, 105)
    axes.set_ylabel("% of the bytes written: flash below, HBM above", fontsize="small")
    axes.set_title("Writes by class and tier", fontsize=10)
    axes.legend(fontsize="x-small", frameon=False, loc="lower right")
