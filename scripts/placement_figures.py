# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/placement.md, from the report of `python -m benchmarks.placement`."""

from __future__ import annotations

from typing import Any

from benchmarks.placement_report import BASELINE, CLASSES
from scripts.markdown import markdown_table

__all__ = ["placement_section"]


def placement_section(report: dict[str, Any]) -> str:
    """Two tables, and what was the same or counted in all runs, as Markdown."""
    return "\n\n".join((_writes(report), _classes(report), _conditions(report)))


def _cells(report: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each cell, with the text of its first column: HBM's size, once for all policies."""
    found = []
    before = None
    for cell in report["cells"]:
        blocks = report["hbm_blocks"][f"{cell['share']:g}"]
        found.append((f"{cell['share']:g} ({blocks} blocks)" if cell["share"] != before else "", cell))
        before = cell["share"]
    return found


def _writes(report: dict[str, Any]) -> str:
    def gain(cell: dict[str, Any]) -> str:
        if cell["gain"] is None or cell["policy"] == BASELINE:
            return ""
        return f"{cell['gain']:.2f} ({cell['gain_low']:.2f} to {cell['gain_high']:.2f})"

    def rise(cell: dict[str, Any]) -> str:
        return "" if cell["hbm_share_rise"] is None or cell["policy"] == BASELINE else f"{cell['hbm_share_rise']:.1f} times"

    return markdown_table(
        [
            "HBM",
            "policy",
            "written to flash, MB",
            "flash lives longer by",
            "HBM's share of the writes",
            "of `hbm_first`'s",
            "spilled",
        ],
        [
            [
                size,
                f"`{cell['policy']}`",
                f"{cell['flash_bytes_written'] / 1e6:.1f}",
                gain(cell),
                f"{cell['hbm_share_of_writes']:.1%}",
                rise(cell),
                f"{cell['spilled_blocks']:,}",
            ]
            for size, cell in _cells(report)
        ],
        text_columns=2,
    )


def _classes(report: dict[str, Any]) -> str:
    return markdown_table(
        ["HBM", "policy", *(f"of {name}s' writes in HBM" if name != "reasoning" else "of reasoning's" for name in CLASSES)],
        [
            [size, f"`{cell['policy']}`", *(f"{cell['hbm_share_of_class'][name]:.0%}" for name in CLASSES)]
            for size, cell in _cells(report)
        ],
        text_columns=2,
    )


def _conditions(report: dict[str, Any]) -> str:
    workload, settings, live, taus = (report[key] for key in ("workload", "settings", "live_blocks", "taus"))
    orders = report["orders"]
    seeds = sum(order["seeds"] for order in orders)
    total = sum(workload["requests"])
    if report["tokens_identical"]:
        tokens = f"the generated tokens of all {total:,} requests are the same on all {len(report['cells'])} servers"
    else:
        tokens = f"{report['differing_requests']} answers differ from the first server's"
    alive = ", ".join(f"{name} {blocks:.0f}" for name, blocks in live.items())
    return (
        f"Means over {workload['seeds']} seeds, in brackets the lowest and highest; spilled: blocks of all seeds that the wanted "
        f"tier had no room for. {workload['sessions']} sessions each, {workload['concurrency']} at a time. Blocks of "
        f"{settings['block_size']} tokens, {report['flash_blocks']:,} of them in flash; alive on average: {alive}. "
        f"`lachesis_no_predictive` writes less to flash than `hbm_first` in "
        f"{sum(order['no_predictive_below_hbm_first'] for order in orders)} of {seeds} runs, `lachesis` less than that in "
        f"{sum(order['lachesis_below_no_predictive'] for order in orders)}, with most of the reviewers' writes in HBM in "
        f"{sum(order['reviewers_mostly_in_hbm'] for order in orders)}. Preemptions: "
        f"{sum(cell['preemptions'] for cell in report['cells'])}; {tokens}. Kendall's tau with the lifetimes, by seed: of what "
        f"spawns show {_listed(taus['shown'])}, of the trained rank {_listed(taus['rank'])}. "
        f"{report['wall_s'] / 60:.0f} minutes on {report['machine']['cpus']} CPU cores."
    )


def _listed(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)
