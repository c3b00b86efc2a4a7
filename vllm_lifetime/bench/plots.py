# SPDX-License-Identifier: Apache-2.0
"""Draws a run: hit rate over time with the events that matter to it, and how latencies are distributed."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_lifetime.bench.records import RunRecord
from vllm_lifetime.bench.report import latencies
from vllm_lifetime.whole_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_run", "rolling_hit_rate"]

WINDOW_REQUESTS = 30

_EVENT_COLORS = {
    "subagent_spawn": "#7f7f7f",
    "subagent_return": "#2ca02c",
    "turn_end": "#c7c7c7",
    "compaction": "#ff7f0e",
    "session_end": "#9467bd",
    "request failed": "#d62728",
}
_PANELS = (
    ("Time to first token (s)", "ttft_s"),
    ("Time per output token, inter-token latency (s)", "tpot_s"),
    ("Workflow latency (s)", "workflow_latency_s"),
)


def rolling_hit_rate(record: RunRecord, window: int = WINDOW_REQUESTS) -> tuple[list[float], list[float]]:
    """When requests ended, and the token hit rate of the last `window` of them. O(requests)."""
    done = sorted((request for request in record.requests if request.is_done), key=lambda request: request.ended_s or 0.0)
    prompt = np.cumsum([0, *(request.prompt_tokens for request in done)])
    cached = np.cumsum([0, *(request.cached_tokens or 0 for request in done)])
    ends = np.arange(1, len(done) + 1)
    starts = np.maximum(0, ends - window)
    rates = (cached[ends] - cached[starts]) / (prompt[ends] - prompt[starts])
    return [request.ended_s or 0.0 for request in done], [float(rate) for rate in rates]


def plot_run(record: RunRecord, path: Path, title: str) -> None:
    """Draw into an image file. Raises ImportError without matplotlib, OSError, ValueError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.2, 1))
    _draw_hit_rate(figure.add_subplot(grid[0, :]), record)
    measured = latencies(record)
    for column, (label, name) in enumerate(_PANELS):
        axes = figure.add_subplot(grid[1, column])
        for drawn in (name, "itl_s") if name == "tpot_s" else (name,):
            values = np.sort(measured[drawn])
            axes.step(values, np.arange(1, len(values) + 1) / max(1, len(values)), where="post", label=drawn[:-2].upper())
        if name == "tpot_s":
            axes.legend(frameon=False, fontsize=8)
        axes.set_xlabel(label, fontsize=9)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    figure.axes[1].set_ylabel("share at most")
    figure.suptitle(title.replace("$", r"\$"))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")


def _draw_hit_rate(axes: "Axes", record: RunRecord) -> None:
    ended_s, rates = rolling_hit_rate(record)
    axes.plot(ended_s, [100 * rate for rate in rates], color="#1f77b4", linewidth=2)
    events: dict[str, list[float]] = {}
    for boundary in record.boundaries:
        events.setdefault(boundary.kind, []).append(boundary.at_s)
    for request in record.requests:
        if request.error is not None:
            events.setdefault("request failed", []).append(request.ended_s or request.sent_s)
    for row, (kind, times_s) in enumerate(events.items()):
        # Below the line, a row for each kind.
        heights = np.full(len(times_s), -3.0 - 4.0 * row)
        axes.plot(times_s, heights, "|", color=_EVENT_COLORS.get(kind, "black"), label=kind, markersize=7)
    axes.set_ylim(-3.0 - 4.0 * len(events), 102)
    axes.set_xlim(0, 1.01 * max([record.wall_s, 1e-9, *(at_s for times_s in events.values() for at_s in times_s)]))
    axes.set_yticks(range(0, 101, 20))
    axes.set_xlabel("seconds since the run began")
    axes.set_ylabel(f"hit rate of the last {WINDOW_REQUESTS} requests (%)")
    axes.grid(alpha=0.3)
    if events:
        axes.legend(ncols=len(events), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False, fontsize=8)
