# SPDX-License-Identifier: Apache-2.0
"""What a run measured, and how it is told: numbers, JSON, a table and a plot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.server import Metrics, metric_sum

#: Engine counters that a run reports as they are, to check what the client saw.
ENGINE_COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:num_preemptions_total",
)


@dataclass(frozen=True)
class RequestRecord:
    """One request as the client saw it."""

    workflow_id: str
    index: int
    agent: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    finished_s: float  # since the run began
    token_ids: tuple[int, ...]


@dataclass
class RunRecord:
    """All that one server did."""

    name: str
    requests: list[RequestRecord] = field(default_factory=list)
    workflow_latency_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    startup_s: float = 0.0
    engine: dict[str, float] = field(default_factory=dict)
    flash_bytes_written: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(r.prompt_tokens for r in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Those of them that were read from a cache."""
        return sum(r.cached_tokens for r in self.requests)

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens."""
        return self.cached_tokens / max(1, self.prompt_tokens)

    def summary(self) -> dict[str, Any]:
        """The run's entry in the report."""
        ttft = [r.ttft_s for r in self.requests]
        return {
            "name": self.name,
            "hit_rate": round(self.hit_rate, 4),
            "ttft_mean_s": round(mean(ttft), 4),
            "ttft_p99_s": round(percentile(ttft, 0.99), 4),
            "workflow_latency_mean_s": round(mean(self.workflow_latency_s), 4),
            "workflow_latency_p99_s": round(percentile(self.workflow_latency_s, 0.99), 4),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "flash_bytes_written": self.flash_bytes_written,
        }


def mean(values: Sequence[float]) -> float:
    """The mean of `values`, 0 if there are none."""
    return sum(values) / len(values) if values else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of `values`, 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(share * len(ordered))) - 1] if ordered else 0.0


def counters_since(before: Metrics, after: Metrics) -> dict[str, float]:
    """How far the engine's counters, and all of the lifetime connector's, moved between two scrapes."""
    moved = {name: metric_sum(after, name) - metric_sum(before, name) for name in ENGINE_COUNTERS}
    for (name, labels), value in sorted(after.items()):
        if name.startswith("vllm:lifetime") and name.endswith(("_total", "_sum", "_count")):
            shown = ",".join(f"{k}={v}" for k, v in labels if k not in ("engine", "model_name"))
            key = f"{name}{{{shown}}}" if shown else name
            moved[key] = moved.get(key, 0.0) + value - before.get((name, labels), 0.0)
    return moved


def flash_bytes_written(metrics: Metrics) -> int:
    """Bytes the lifetime connector wrote to flash; 0 where there is no such connector."""
    return int(
        sum(
            value
            for (name, labels), value in metrics.items()
            if name.startswith("vllm:lifetime")
            and "bytes_written" in name
            and not name.endswith("_created")
            and ("flash" in name or ("tier", "flash") in labels)
        )
    )


def first_difference(a: RunRecord, b: RunRecord) -> dict[str, Any] | None:
    """The earliest request (by `a`'s clock) whose generated tokens differ, or None."""
    other = {(r.workflow_id, r.index): r for r in b.requests}
    for mine in sorted(a.requests, key=lambda r: (r.finished_s, r.index)):
        theirs = other.pop((mine.workflow_id, mine.index), None)
        if theirs is None or theirs.token_ids != mine.token_ids:
            return {
                "workflow_id": mine.workflow_id,
                "index": mine.index,
                "agent": mine.agent,
                a.name: list(mine.token_ids),
                b.name: None if theirs is None else list(theirs.token_ids),
            }
    if other:
        workflow_id, index = min(other)
        return {"workflow_id": workflow_id, "index": index, a.name: None}
    return None


def differing_requests(a: RunRecord, b: RunRecord) -> int:
    """How many requests generated other tokens in `b` than in `a`, or are missing in one."""
    mine = {(r.workflow_id, r.index): r.token_ids for r in a.requests}
    theirs = {(r.workflow_id, r.index): r.token_ids for r in b.requests}
    return sum(mine.get(key) != theirs.get(key) for key in mine.keys() | theirs.keys())


def usage_disagrees(run: RunRecord) -> str | None:
    """What the client's usage and the engine's counters disagree about, if they do."""
    pairs = (
        ("prompt tokens", run.prompt_tokens, run.engine["vllm:prompt_tokens_total"]),
        ("cached tokens", run.cached_tokens, run.engine["vllm:prompt_tokens_cached_total"]),
    )
    wrong = [f"{what}: usage {mine}, engine {theirs:.0f}" for what, mine, theirs in pairs
             if mine != theirs]  # fmt: skip
    return f"{run.name}: {'; '.join(wrong)}" if wrong else None


def build_report(workload: dict[str, Any], runs: Sequence[RunRecord], extra: dict[str, Any]) -> dict[str, Any]:
    """The report; `extra` goes beside its own keys. With one run there is nothing to compare.

    `ratios` is how much better `lifetime` is than `vllm`, `ratios_over_lifecycle` than eviction by lifecycle alone;
    `tokens_identical` is about all runs.
    """
    summaries = {run.name: run.summary() for run in runs}
    report: dict[str, Any] = {
        "workload": workload,
        "runs": [run.summary() for run in runs],
        "tokens_identical": None,
        "ratios": None,
        "ratios_over_lifecycle": None,
    }
    if len(runs) > 1:
        stock, *others = runs
        differences = [difference for run in others if (difference := first_difference(stock, run)) is not None]
        report["tokens_identical"] = not differences
        extra = {
            **extra,
            "first_difference": differences[0] if differences else None,
            "differing_requests": sum(differing_requests(stock, run) for run in others),
        }
    if {"vllm", "lifetime"} <= summaries.keys():
        report["ratios"] = ratios(summaries["vllm"], summaries["lifetime"])
    if {"lifecycle", "lifetime"} <= summaries.keys():
        report["ratios_over_lifecycle"] = ratios(summaries["lifecycle"], summaries["lifetime"])
    extra = {
        **extra,
        "engine": {run.name: run.engine for run in runs},
        "wall_s": {run.name: round(run.wall_s, 3) for run in runs},
        "startup_s": {run.name: round(run.startup_s, 3) for run in runs},
    }
    return {**extra, **report}


def ratios(stock: dict[str, Any], ours: dict[str, Any]) -> dict[str, float | None]:
    """How much better `ours` is; above 1 is better for each of them."""
    return {
        "hit_rate": _ratio(ours["hit_rate"], stock["hit_rate"]),
        "ttft": _ratio(stock["ttft_mean_s"], ours["ttft_mean_s"]),
        "workflow_latency": _ratio(stock["workflow_latency_mean_s"], ours["workflow_latency_mean_s"]),
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return round(numerator / denominator, 4) if denominator else None


# -- for people ----------------------------------------------------------------------------------

_ROWS = (
    ("token hit rate", "hit_rate", "{:.1%}", True),
    ("TTFT, mean", "ttft_mean_s", "{:.3f} s", False),
    ("TTFT, p99", "ttft_p99_s", "{:.3f} s", False),
    ("workflow latency, mean", "workflow_latency_mean_s", "{:.2f} s", False),
    ("workflow latency, p99", "workflow_latency_p99_s", "{:.2f} s", False),
    ("prompt tokens", "prompt_tokens", "{:,}", None),
    ("of which cached", "cached_tokens", "{:,}", True),
    ("written to flash", "flash_bytes_written", "{:,} B", None),
)


def table(report: dict[str, Any]) -> Table:
    """The runs side by side, with how much better the last is than each of the others."""
    runs = report["runs"]
    result = Table(title="Same workload, same number of KV blocks")
    result.add_column("")
    for run in runs:
        result.add_column(run["name"], justify="right")
    for run in runs[:-1]:
        title = "better by" if len(runs) == 2 else f"{runs[-1]['name']} / {run['name']}"
        result.add_column(title, justify="right", style="bold")
    for title, key, form, higher_is_better in _ROWS:
        values = [run[key] for run in runs]
        result.add_row(title, *(form.format(value) for value in values), *_better_by(values, higher_is_better))
    wall = [report["wall_s"][run["name"]] for run in runs]
    result.add_row("whole run", *(f"{seconds:.1f} s" for seconds in wall), *_better_by(wall, False))
    return result


def _better_by(values: Sequence[float], higher_is_better: bool | None) -> list[str]:
    """How much better the last value is than each of the others."""
    *others, last = values
    if higher_is_better is None:
        return [""] * len(others)
    found = [_ratio(last, other) if higher_is_better else _ratio(other, last) for other in others]
    return ["" if ratio is None else f"{ratio:.2f}x" for ratio in found]


_COLORS = {"vllm": "#8a8f98", "lifecycle": "#9ecae1", "lifetime": "#1f77b4"}
_WINDOW = 30


def rolling_hit_rate(run: RunRecord, window: int = _WINDOW) -> tuple[list[float], list[float]]:
    """When requests finished, and the token hit rate over the last `window` of them."""
    done = sorted(run.requests, key=lambda r: r.finished_s)
    rates = []
    for i in range(len(done)):
        last = done[max(0, i + 1 - window) : i + 1]
        rates.append(sum(r.cached_tokens for r in last) / sum(r.prompt_tokens for r in last))
    return [r.finished_s for r in done], rates


def plot(report: dict[str, Any], runs: Sequence[RunRecord], path: Path) -> None:
    """Draw the runs to the PNG file `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure = plt.figure(figsize=(10, 6.4), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1, 1.15))
    bars = (
        ("Token hit rate", "hit_rate", "{:.1%}", "hit_rate"),
        ("Mean time to first token (s)", "ttft_mean_s", "{:.2f}", "ttft"),
        ("Mean workflow latency (s)", "workflow_latency_mean_s", "{:.1f}", "workflow_latency"),
    )
    for column, (title, key, form, ratio_key) in enumerate(bars):
        axes = figure.add_subplot(grid[0, column])
        values = [run[key] for run in report["runs"]]
        names = [run["name"] for run in report["runs"]]
        drawn = axes.bar(names, values, width=0.6, color=[_COLORS[n] for n in names])
        axes.bar_label(drawn, [form.format(v) for v in values], padding=3)
        axes.set_ylim(0, max([*values, 1e-9]) * 1.2)
        ratio = (report["ratios"] or {}).get(ratio_key)
        axes.set_title(title if ratio is None else f"{title}: {ratio:.2f}x better", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        if key == "hit_rate":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes = figure.add_subplot(grid[1, :])
    for run in runs:
        axes.plot(*rolling_hit_rate(run), label=run.name, color=_COLORS[run.name], linewidth=2)
    axes.set_title(f"Token hit rate over the last {_WINDOW} requests", fontsize=10)
    axes.set_xlabel("seconds since the run began")
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
