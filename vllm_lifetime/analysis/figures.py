# SPDX-License-Identifier: Apache-2.0
"""Plots like figures 4 to 7 of Lachesis, one image each. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_lifetime.analysis.report import Analysis
from vllm_lifetime.analysis.segmentation import Segment
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.prediction.selection import selection_shares
from vllm_lifetime.whole_file import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_figures"]

_COLORS = {
    SegmentClass.REASONING_LADEN: "tab:orange",
    SegmentClass.REASONING_STRIPPED: "tab:blue",
    SegmentClass.LEAD: "tab:blue",
    SegmentClass.WORKER: "tab:orange",
    SegmentClass.REVIEWER: "tab:green",
}
_SUBAGENTS = (SegmentClass.WORKER, SegmentClass.REVIEWER)


def draw_figures(analysis: Analysis, folder: Path) -> list[Path]:
    """Draw what the trace shows into `folder`; the files. Raises ImportError without matplotlib, OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paths = []
    drawn = {
        "temporal": (_temporal, analysis.temporal is not None),
        "structural": (_structural, analysis.structural is not None),
        "inter_worker": (_inter_worker, bool(_of(analysis, SegmentClass.WORKER))),
        "spawn_rank": (_spawn_rank, analysis.spawn_rank is not None),
    }
    for name, (draw, is_there) in drawn.items():
        if not is_there:
            continue
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2)
        draw(analysis, left, right)
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.suptitle(f"{analysis.name}: {name.replace('_', ' ')}")
        paths.append(folder / f"{name}.png")
        with replacing(paths[-1]) as temporary:
            figure.savefig(temporary, dpi=120)
    return paths


def _temporal(analysis: Analysis, lifetimes: Axes, tokens: Axes) -> None:
    """Figure 4. Dashed: as if reasoning were stripped at every turn's end."""
    boxes: list[tuple[str, Sequence[float], str]] = []
    for segment_class in (SegmentClass.REASONING_LADEN, SegmentClass.REASONING_STRIPPED):
        own = _of(analysis, segment_class)
        if own:
            label = segment_class.value.replace("_", "-")
            _cdf(lifetimes, [s.lifetime_s for s in own if s.lifetime_s is not None], label, _COLORS[segment_class])
            boxes.append((label.replace("-", "-\n"), [float(s.written_tokens) for s in own], _COLORS[segment_class]))
    stripped = [turn for turn in analysis.stripped_turns if turn.reasoning_tokens]
    if stripped:
        laden, after = _COLORS[SegmentClass.REASONING_LADEN], _COLORS[SegmentClass.REASONING_STRIPPED]
        _cdf(lifetimes, [turn.laden_lifetime_s for turn in stripped], "laden, if stripped", laden, "--")
        _cdf(lifetimes, [turn.stripped_lifetime_s for turn in stripped], "stripped, if stripped", after, "--")
        boxes.append(("laden,\nif stripped", [turn.laden_tokens for turn in stripped], laden))
        boxes.append(("stripped,\nif stripped", [turn.stripped_tokens for turn in stripped], after))
    _finish_cdf(lifetimes, "normalised lifetime (s)")
    _boxes(tokens, boxes, "KV tokens a turn writes")


def _structural(analysis: Analysis, lifetimes: Axes, ratios: Axes) -> None:
    """Figure 5."""
    for segment_class in (SegmentClass.LEAD, *_SUBAGENTS):
        own = _of(analysis, segment_class)
        label, color = segment_class.value, _COLORS[segment_class]
        _cdf(lifetimes, [s.lifetime_s for s in own if s.lifetime_s is not None], label, color)
        _cdf(ratios, [ratio for s in own if (ratio := s.reads_per_write) is not None], label, color)
    _finish_cdf(lifetimes, "normalised lifetime (s)")
    _finish_cdf(ratios, "token reads per token written")


def _inter_worker(analysis: Analysis, lifetimes: Axes, both: Axes) -> None:
    """Figure 6."""
    workers = _of(analysis, SegmentClass.WORKER)
    seconds = [s.lifetime_s or 0.0 for s in workers]
    _boxes(lifetimes, [("worker", seconds, _COLORS[SegmentClass.WORKER])], "normalised lifetime (s)")
    both.scatter(seconds, [s.written_tokens for s in workers], s=12, alpha=0.6, color=_COLORS[SegmentClass.WORKER])
    both.set_xscale("log")
    both.set_yscale("log")
    both.set_xlabel("normalised lifetime (s)")
    both.set_ylabel("KV tokens written")


def _spawn_rank(analysis: Analysis, lifetimes: Axes, selected: Axes) -> None:
    """Figure 7."""
    rank = analysis.spawn_rank
    if rank is None:
        return
    order = np.argsort(rank.predicted, kind="stable")
    for number, quarter in enumerate(np.array_split(rank.lifetimes_s[order], 4), start=1):
        _cdf(lifetimes, quarter.tolist(), f"Q{number} predicted", f"C{number - 1}")
    _finish_cdf(lifetimes, "normalised lifetime (s)")
    percents = range(5, 65, 5)
    shares = [selection_shares(rank.predicted, rank.lifetimes_s, percent) for percent in percents]
    for label, values in (
        ("among the shortest k", [s.among_shortest for s in shares]),
        ("among the shortest 2k", [s.among_shortest_2k for s in shares]),
        ("not among the longest k", [s.avoids_longest for s in shares]),
    ):
        selected.plot(percents, [100 * value for value in values], marker="o", markersize=3, label=label)
    selected.set_xlabel("k, % of workers")
    selected.set_ylabel("% of selected k")
    selected.set_ylim(0, 105)
    selected.legend()


def _of(analysis: Analysis, segment_class: SegmentClass) -> list[Segment]:
    return [segment for segment in analysis.segments if segment.segment_class is segment_class]


def _cdf(axes: Axes, values: Sequence[float], label: str, color: str, style: str = "-") -> None:
    if values:
        # What took no time cannot stand on a logarithmic axis.
        ordered = np.maximum(np.sort(values), 0.1)
        axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), style, where="post", color=color, label=label)


def _finish_cdf(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(label)
    axes.set_ylabel("CDF over segments")
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _boxes(axes: Axes, boxes: Sequence[tuple[str, Sequence[float], str]], label: str) -> None:
    for place, (_, values, color) in enumerate(boxes):
        axes.boxplot(
            [np.maximum(values, 0.1)],
            positions=[place],
            widths=0.6,
            whis=(10, 90),
            showfliers=False,
            medianprops={"color": color},
        )
    axes.set_xticks(range(len(boxes)), [name for name, _, _ in boxes])
    axes.set_yscale("log")
    axes.set_ylabel(label)
