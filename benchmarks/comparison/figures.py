# SPDX-License-Identifier: Apache-2.0
"""What the runs of a comparison come to: means with confidence intervals, checks that the work was equal, and the targets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.comparison.measure import Result
from benchmarks.comparison.regimes import Regime

__all__ = ["FIGURES", "Estimate", "Figure", "check", "estimate", "figures_of", "ratio_to", "targets"]

CONFIDENCE = 0.95
STOCK_HIT_RATES = (0.27, 0.46)
"""PBKV Table 1: the hit rates of LRU on its workloads. Above, there is little to gain, below, nothing is reused."""


@dataclass(frozen=True)
class Figure:
    """One figure of a run: its key in the summary, its title and unit, and which direction is good (0: neither)."""

    key: str
    title: str
    unit: str
    better: int


FIGURES = (
    Figure("hit_rate", "token hit rate", "%", 1),
    Figure("workflow_latency_mean_s", "workflow latency, mean", "s", -1),
    Figure("workflow_latency_p50_s", "p50", "s", -1),
    Figure("workflow_latency_p99_s", "p99", "s", -1),
    Figure("ttft_mean_s", "TTFT, mean", "s", -1),
    Figure("ttft_p99_s", "p99", "s", -1),
    Figure("tpot_mean_s", "TPOT, mean", "ms", -1),
    Figure("prompt_tokens_per_s", "prompt tokens/s", "", 1),
    Figure("disk_bytes_written", "written to disk", "MiB", -1),
)


@dataclass(frozen=True)
class Estimate:
    """A mean over repeats with its confidence interval (None where one repeat tells nothing of the spread)."""

    mean: float
    low: float | None
    high: float | None
    repeats: int

    def as_json(self) -> dict[str, float | int | None]:
        """All of it."""
        return {"mean": self.mean, "low": self.low, "high": self.high, "repeats": self.repeats}


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and Student's t interval; None without values."""
    if not values:
        return None
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, None, None, len(values))
    from scipy.stats import t  # type: ignore[import-untyped]

    half = float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, mean - half, mean + half, len(values))


def figures_of(results: Sequence[Result]) -> dict[str, dict[str, Estimate | None]]:
    """By system and figure's key. Runs that failed are left out."""
    done: dict[str, list[Result]] = {}
    for result in results:
        done.setdefault(result.system, [])
        if result.error is None:
            done[result.system].append(result)
    return {
        system: {
            figure.key: estimate([value for run in runs if (value := run.summary.get(figure.key)) is not None])
            for figure in FIGURES
        }
        for system, runs in done.items()
    }


def ratio_to(results: Sequence[Result], system: str, base: str, key: str) -> Estimate | None:
    """How `system` compares with `base` in figure `key`: the ratio, geometric mean over the repeats that have both.

    Runs of a repeat follow one another, so that what a machine does meanwhile is the same for both. The interval is that of the
    logarithms. None: nothing to compare, or a zero.
    """
    by_run = {(run.system, run.repeat): run.summary.get(key) for run in results if run.error is None}
    repeats = sorted({repeat for _, repeat in by_run})
    pairs = [(by_run.get((system, repeat)), by_run.get((base, repeat))) for repeat in repeats]
    logarithms = [math.log(one / other) for one, other in pairs if one and other and one > 0 and other > 0]
    found = estimate(logarithms)
    if found is None:
        return None
    low, high = (None if bound is None else math.exp(bound) for bound in (found.low, found.high))
    return Estimate(math.exp(found.mean), low, high, found.repeats)


def check(results: Sequence[Result], base: str) -> list[str]:
    """Whether all systems did the same work, and say the truth about it: what is wrong, a sentence each."""
    wrong = [f"{run.system}, repeat {run.repeat + 1}: {run.error}" for run in results if run.error is not None]
    done = [run for run in results if run.error is None]
    if not done:
        wrong.append("nothing was measured")
    bases = {run.repeat: run for run in done if run.system == base}
    alone = sorted({run.repeat for run in done} - bases.keys())
    if alone:
        shown = ", ".join(str(repeat + 1) for repeat in alone)
        wrong.append(f"{base} has no figures of repeat {shown}: the others' prompts and tokens were not compared with it there")
    for run in done:
        name = f"{run.system}, repeat {run.repeat + 1}"
        wrong += [f"{name}: {problem}" for problem in run.problems]
        if run.system == base or run.repeat not in bases:
            continue
        mine, theirs = run.requests, bases[run.repeat].requests
        if mine.keys() != theirs.keys():
            wrong.append(f"{name}: {len(mine.keys() ^ theirs.keys())} requests were sent to one of it and {base} only")
            continue
        lengths = sum((mine[key][0], mine[key][2]) != (theirs[key][0], theirs[key][2]) for key in mine)
        if lengths:
            wrong.append(f"{name}: {lengths} requests have other numbers of tokens than with {base}")
        tokens = sum(mine[key][3] != theirs[key][3] for key in mine)
        if tokens:
            wrong.append(f"{name}: the generated tokens of {tokens} of {len(mine)} requests differ from those of {base}")
    return wrong


def targets(results: Sequence[Result], regime: Regime, base: str, ours: str) -> list[dict[str, Any]]:
    """What was asked of `ours`, what it came to, and whether it was met (None: not measured)."""
    figures = figures_of(results)
    stock = figures.get(base, {}).get("hit_rate")
    if regime.goal == "parity":
        return [
            _target(f"throughput at least 0.97 x {base}", 0.97, ratio_to(results, ours, base, "prompt_tokens_per_s")),
            _target(f"mean TTFT of {base} at least 0.97 x ours", 0.97, _inverse(ratio_to(results, ours, base, "ttft_mean_s"))),
        ]
    found = []
    if regime.goal == "gain":
        low, high = STOCK_HIT_RATES
        found = [
            {
                "target": f"hit rate of {base} between {low:.0%} and {high:.0%}",
                "value": stock.mean if stock else None,
                "met": None if stock is None else low <= stock.mean <= high,
            },
            _target(f"hit rate at least 1.5 x {base}", 1.5, ratio_to(results, ours, base, "hit_rate")),
            _target(f"mean workflow latency of {base} at least 1.3 x ours", 1.3, _inverse_of(results, ours, base)),
        ]
    return [
        *found,
        _target("hit rate above LMCache", 1.0, ratio_to(results, ours, "lmcache", "hit_rate")),
        _target("mean workflow latency of LMCache above ours", 1.0, _inverse_of(results, ours, "lmcache")),
    ]


def _inverse_of(results: Sequence[Result], ours: str, base: str) -> Estimate | None:
    return _inverse(ratio_to(results, ours, base, "workflow_latency_mean_s"))


def _inverse(ratio: Estimate | None) -> Estimate | None:
    if ratio is None:
        return None
    low, high = (None if bound is None else 1 / bound for bound in (ratio.high, ratio.low))
    return Estimate(1 / ratio.mean, low, high, ratio.repeats)


def _target(text: str, least: float, ratio: Estimate | None) -> dict[str, Any]:
    shown: Mapping[str, Any] | None = ratio.as_json() if ratio is not None else None
    return {"target": text, "least": least, "ratio": shown, "met": None if ratio is None else ratio.mean >= least}
