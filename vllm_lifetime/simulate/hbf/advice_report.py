# SPDX-License-Identifier: Apache-2.0
"""Advice as a JSON file, a table and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_lifetime.simulate.hbf.advise import BASE, WARRANTY_YEARS, Advice, Outcome, years_text
from vllm_lifetime.whole_file import replacing, write_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["advice_table", "plot_advice", "write_advice"]


def write_advice(path: Path, advices: Sequence[Advice], workload: str) -> None:
    """A JSON object: `workload`, in words, and `advice`, an entry a model. An endless lifetime is null. Raises OSError."""
    entries = []
    for advice in advices:
        entry = asdict(advice)
        entry["failed"] = [
            {"variant": variant, "config": config, "reason": reason} for (variant, config), reason in advice.failed.items()
        ]
        chosen = [pick[name] for pick in entry["picks"] for name in ("longest", "most_sessions")]
        for outcome in [*entry["outcomes"], *chosen]:
            if math.isinf(outcome["lifetime_years"]):
                outcome["lifetime_years"] = None
        entries.append(entry)
    text = json.dumps({"workload": workload, "advice": entries}, indent=1)
    write_text(path, text + "\n")


def _best(outcomes: Sequence[Outcome], variant: str, config: str) -> Outcome | None:
    """The policy that lasts longest."""
    own = [outcome for outcome in outcomes if (outcome.variant, outcome.config) == (variant, config)]
    return max(own, key=lambda outcome: outcome.lifetime_years, default=None)


def advice_table(advice: Advice) -> Table:
    """A line for each variant: for each configuration years under the policy that lasts longest, and sessions; then the picks."""
    from rich.table import Table

    configs = list(dict.fromkeys([outcome.config for outcome in advice.outcomes] + [config for _, config in advice.failed]))
    table = Table(advice.model, *(f"{config}: years, sessions" for config in configs), "lasts longest", "serves most")
    for pick in advice.picks:
        texts = []
        for config in configs:
            best = _best(advice.outcomes, pick.variant, config)
            if best is None:
                texts.append("cannot run")
                continue
            texts.append(f"{years_text(best)}, {best.sessions:.0f}" + ("" if best.is_settled else " (not settled)"))
        longest, most = pick.longest, pick.most_sessions
        table.add_row(pick.variant, *texts, f"{longest.config} {longest.policy}", most.config)
    return table


def plot_advice(advices: Sequence[Advice], path: Path) -> None:
    """For each model: lifetime by configuration and policy, with the sessions; and lifetime of each variant.

    Raises ImportError without matplotlib, OSError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2 * len(advices)), layout="constrained")
    FigureCanvasAgg(figure)
    for number, advice in enumerate(advices):
        configs = list(dict.fromkeys(outcome.config for outcome in advice.outcomes))
        base = [outcome for outcome in advice.outcomes if outcome.variant == BASE]
        policies = list(dict.fromkeys(outcome.policy for outcome in base))
        axes = figure.add_subplot(len(advices), 2, 2 * number + 1)
        width = 0.8 / len(policies)
        for place, policy in enumerate(policies):
            own = [outcome for outcome in base if outcome.policy == policy and math.isfinite(outcome.lifetime_years)]
            at = [configs.index(outcome.config) + (place - (len(policies) - 1) / 2) * width for outcome in own]
            axes.bar(at, [outcome.lifetime_years for outcome in own], width, label=policy)
        axes.axhline(WARRANTY_YEARS, linestyle="--", color="black", linewidth=0.8)
        axes.set_ylabel("HBF lifetime (years)")
        axes.set_xticks(range(len(configs)), configs)
        axes.set_title(f"{advice.trace}, {advice.model}, {advice.slo}", fontsize="small")
        sessions = axes.twinx()
        served = [(configs.index(config), best.sessions) for config in configs if (best := _best(base, BASE, config))]
        sessions.plot([at for at, _ in served], [count for _, count in served], "kx", label="sessions (right)")
        sessions.set_ylim(bottom=0)
        sessions.set_ylabel("sessions")
        handles = [axis.get_legend_handles_labels() for axis in (axes, sessions)]
        axes.legend(handles[0][0] + handles[1][0], handles[0][1] + handles[1][1], fontsize="x-small")
        lines = figure.add_subplot(len(advices), 2, 2 * number + 2)
        names = [pick.variant for pick in advice.picks]
        is_drawn = False
        for config in configs:
            bests = [(place, _best(advice.outcomes, name, config)) for place, name in enumerate(names)]
            found = [(place, best) for place, best in bests if best is not None and math.isfinite(best.lifetime_years)]
            lines.plot([best.lifetime_years for _, best in found], [place for place, _ in found], "o", label=config)
            is_drawn |= bool(found)
        lines.set_yticks(range(len(names)), names, fontsize="small")
        lines.invert_yaxis()
        if is_drawn:
            lines.set_xscale("log")
        lines.set_xlabel("HBF lifetime under the policy that lasts longest (years)")
        lines.grid(alpha=0.3)
        lines.legend(fontsize="x-small")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)
