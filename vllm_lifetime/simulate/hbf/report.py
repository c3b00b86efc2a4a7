# SPDX-License-Identifier: Apache-2.0
"""Results as JSON files, tables and plots (after Lachesis Figures 9 to 12)."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_lifetime.simulate.hbf.calibration import Finding
from vllm_lifetime.simulate.hbf.checks import Check
from vllm_lifetime.simulate.hbf.sweep import ResultRow
from vllm_lifetime.whole_file import finite, replacing, write_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["checks_table", "findings_table", "plot_lifetimes", "plot_writes", "results_table", "write_json"]

WARRANTY_YEARS = 5.0


def write_json(path: Path, rows: Iterable[ResultRow | Check | Finding]) -> None:
    """A JSON list of rows; a check's and a finding's verdict is the field `pass`. An endless lifetime is null. Raises OSError."""
    write_text(path, json.dumps([_plain(row) for row in rows], indent=1) + "\n")


def _plain(row: ResultRow | Check | Finding) -> dict[str, Any]:
    if isinstance(row, ResultRow):
        return asdict(row) | {"lifetime_years": finite(row.lifetime_years)}
    if isinstance(row, Check):
        plain = {"id": row.id, "what": row.what, "target": row.target, "value": row.value, "pass": row.passes}
        return plain | {"is_direction": row.is_direction, "hinges_on": row.hinges_on}
    return {"id": row.id, "what": row.what, "target": f"{row.low:g} to {row.high:g}", "value": row.value, "pass": row.passes}


def _mean(rows: Sequence[ResultRow]) -> tuple[float, float]:
    """Mean and deviation of the lifetimes; without end if one of them is."""
    years = [row.lifetime_years for row in rows]
    if math.inf in years:
        return math.inf, 0.0
    return statistics.fmean(years), statistics.stdev(years) if len(years) > 1 else 0.0


def _cells(rows: Iterable[ResultRow]) -> dict[tuple[str, str, str, str], dict[str, list[ResultRow]]]:
    """By (model, trace, slo, config), then by policy; all seeds."""
    cells: dict[tuple[str, str, str, str], dict[str, list[ResultRow]]] = {}
    for row in rows:
        cells.setdefault((row.model, row.trace, row.slo, row.config), {}).setdefault(row.policy, []).append(row)
    return cells


def results_table(rows: Sequence[ResultRow]) -> Table:
    """A line a cell: sessions, then for each policy lifetime in years (and gain over hbm_first), HBM's share of the writes."""
    from rich.table import Table

    policies = list(dict.fromkeys(row.policy for row in rows))
    table = Table("model", "trace", "SLO", "config", "sessions", "GB/s", *policies)
    for (model, trace, slo, config), found in _cells(rows).items():
        base = found.get("hbm_first")
        texts = []
        for policy in policies:
            years, deviation = _mean(found[policy])
            gain = f" x{years / _mean(base)[0]:.2f}" if base and policy != "hbm_first" else ""
            share = statistics.fmean(row.hbm_write_share for row in found[policy])
            spread = f"±{deviation:.2f}" if deviation else ""
            unsettled = "" if all(row.is_settled for row in found[policy]) else " (not settled)"
            texts.append(f"{years:.2f}{spread} y{gain}, {share:.1%} HBM{unsettled}")
        first = found[policies[0]]
        sessions = statistics.fmean(row.sessions for row in first)
        rate = statistics.fmean(row.write_gb_per_s for row in first)
        table.add_row(model, trace, slo, config, f"{sessions:.0f}", f"{rate:.2f}", *texts)
    return table


def checks_table(checks: Iterable[Check]) -> Table:
    """The paper's statements; those whose cells were not run are left out."""
    from rich.table import Table

    table = Table("check", "what", "target", "value", "pass", "hinges on")
    for check in checks:
        if check.value is not None:
            hinges_on = "" if check.passes else check.hinges_on or ""
            table.add_row(check.id, check.what, check.target, f"{check.value:.3g}", "yes" if check.passes else "NO", hinges_on)
    return table


def findings_table(findings: Iterable[Finding]) -> Table:
    """How the made-up sessions compare with the published ones."""
    from rich.table import Table

    table = Table("calibration", "what", "target", "value", "pass")
    for finding in findings:
        target = f"{finding.low:.4g} to {finding.high:.4g}"
        table.add_row(finding.id, finding.what, target, f"{finding.value:.4g}", "yes" if finding.passes else "NO")
    return table


def plot_lifetimes(rows: Sequence[ResultRow], path: Path) -> None:
    """Lifetime by configuration, a panel for each model, trace and SLO. Raises ImportError without matplotlib, OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys((row.model, row.trace, row.slo) for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows))
    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(max(5.0, 3.6 * columns), 3.0 * lines), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (model, trace, slo) in enumerate(panels):
        axes = figure.add_subplot(lines, columns, index + 1)
        here = [row for row in rows if (row.model, row.trace, row.slo) == (model, trace, slo)]
        configs = list(dict.fromkeys(row.config for row in here))
        width = 0.8 / len(policies)
        for number, policy in enumerate(policies):
            found = [[row for row in here if row.config == config and row.policy == policy] for config in configs]
            # What is never written has no bar.
            means = [_mean(cell) if all(math.isfinite(row.lifetime_years) for row in cell) else (0.0, 0.0) for cell in found]
            places = [i + (number - (len(policies) - 1) / 2) * width for i in range(len(configs))]
            axes.bar(places, [mean for mean, _ in means], width, yerr=[deviation for _, deviation in means], label=policy)
        splits = [row for row in here if "*" not in row.config] or here
        axes.set_ylim(0, 1.15 * max((row.lifetime_years for row in splits if math.isfinite(row.lifetime_years)), default=1.0))
        axes.axhline(WARRANTY_YEARS, linestyle="--", color="black", linewidth=0.8)
        axes.set_xticks(range(len(configs)), configs)
        axes.set_title(f"{model}\n{trace}, {slo}", fontsize="small")
        axes.set_ylabel("HBF lifetime (years)", fontsize="small")
    figure.get_axes()[0].legend(fontsize="x-small")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)


def plot_writes(rows: Sequence[ResultRow], path: Path, title: str) -> None:
    """Writes by class and tier, one bar a configuration, a panel a policy: what goes to HBM upwards, to flash downwards.

    `rows`: of one model, SLO and trace. Raises ImportError without matplotlib, OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    policies = list(dict.fromkeys(row.policy for row in rows))
    configs = list(dict.fromkeys(row.config for row in rows))
    classes = list(dict.fromkeys(name for row in rows for name in row.write_share))
    figure = Figure(figsize=(max(4.0, 2.8 * len(policies)), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for index, policy in enumerate(policies):
        axes = figure.add_subplot(1, len(policies), index + 1)
        ends = {"hbm": [0.0] * len(configs), "flash": [0.0] * len(configs)}
        for number, name in enumerate(classes):
            for tier, sign in (("hbm", 1), ("flash", -1)):
                shares = []
                for config in configs:
                    found = [row for row in rows if row.policy == policy and row.config == config]
                    shares.append(sign * 100 * statistics.fmean(row.write_share.get(name, {}).get(tier, 0.0) for row in found))
                label = name if tier == "hbm" else None
                axes.bar(range(len(configs)), shares, bottom=ends[tier], color=f"C{number}", label=label)
                ends[tier] = [end + share for end, share in zip(ends[tier], shares, strict=True)]
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set_ylim(-105, 105)
        axes.set_xticks(range(len(configs)), configs)
        axes.set_title(policy, fontsize="small")
    figure.get_axes()[0].set_ylabel("writes to HBM (up), flash (down), % of all", fontsize="small")
    figure.get_axes()[0].legend(fontsize="x-small")
    figure.suptitle(title, fontsize="small")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=100)
