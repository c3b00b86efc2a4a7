# SPDX-License-Identifier: Apache-2.0
"""Draws a comparison: a bar with its confidence interval for each system, and how workflow latencies are distributed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.comparison.measure import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

_BARS = (
    ("hit_rate", "token hit rate"),
    ("workflow_latency_mean_s", "mean workflow latency (s)"),
    ("ttft_mean_s", "mean time to first token (s)"),
)


def plot(report: Mapping[str, Any], results: Sequence[Result], path: Path) -> None:
    """Draw into an image file. Raises ImportError without matplotlib, OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    measured = [name for name in report["systems"] if any(report["figures"].get(name, {}).values())]
    for place, (key, label) in zip(axes.flat, _BARS, strict=False):
        _draw_bars(place, report, measured, key, label)
    for name in measured:
        values = np.sort([value for run in results if run.system == name for value in run.workflow_latency_s])
        axes.flat[3].step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=name)
    axes.flat[3].set_xlabel("workflow latency (s)")
    axes.flat[3].set_ylabel("share of workflows")
    if measured:
        axes.flat[3].legend()
    figure.suptitle(report["title"])
    figure.savefig(path, dpi=110)


def _draw_bars(axes: "Axes", report: Mapping[str, Any], systems: Sequence[str], key: str, label: str) -> None:
    for position, name in enumerate(systems):
        estimate = report["figures"][name].get(key)
        if estimate is None:
            continue
        error = None if estimate["low"] is None else [[estimate["mean"] - estimate["low"]], [estimate["high"] - estimate["mean"]]]
        axes.bar(position, estimate["mean"], yerr=error, capsize=4, color=f"C{position}")
    axes.set_xticks(range(len(systems)), systems, rotation=20)
    axes.set_ylabel(label)
