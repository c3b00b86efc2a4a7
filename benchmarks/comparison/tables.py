# SPDX-License-Identifier: Apache-2.0
"""A comparison as markdown, from its JSON."""

from collections.abc import Mapping
from typing import Any

from benchmarks.comparison.figures import FIGURES, Figure

__all__ = ["markdown", "summary"]

_MIB = 1 << 20


def markdown(report: Mapping[str, Any]) -> str:
    """Everything that a reader needs: what was run on what, the figures, the checks and the targets. Ends with a newline."""
    work, budget = report["workload"], report["budget"]
    how = "taking turns" if report.get("in_turns") else "interleaved"
    lines = [
        f"### {report['title']}",
        "",
        f"{work['sessions']} workflows, {work['concurrency']} at a time, {work['requests']:,} requests with "
        f"{work['prompt_tokens']:,} prompt and {work['output_tokens']:,} generated tokens; HBM {_mib(budget['hbm_bytes'])} "
        f"({budget['hbm_blocks']:,} blocks), host {_mib(budget['host_bytes'])}, disk {_mib(budget['disk_bytes'])}. Runs of each "
        f"system: {report['repeats']}, {how}; mean ± half of the 95 % confidence interval.",
        "",
        "| system | " + " | ".join(figure.title for figure in FIGURES) + " |",
        "|---|" + "---:|" * len(FIGURES),
    ]
    for system, title in report["systems"].items():
        figures = report["figures"].get(system, {})
        if any(figures.values()):
            cells = [_cell(figure, figures.get(figure.key)) for figure in FIGURES]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
        else:
            why = report["missing"].get(system, "").replace("|", "\\|").replace("`", "'")
            told = f"does not run here: `{why}`" if why else "not measured"
            lines.append(f"| {title} | {told} |" + " |" * (len(FIGURES) - 1))
    lines += [
        "",
        f"Over {report['base_title']}, paired by repeat:",
        "",
        "| system | hit rate | mean workflow latency | mean TTFT | mean TPOT | throughput |",
    ]
    lines.append("|---|---:|---:|---:|---:|---:|")
    digits = 3 if report.get("in_turns") else 2  # many pairs, for small differences
    for system, ratios in report["ratios"].items():
        keys = ("hit_rate", "workflow_latency_mean_s", "ttft_mean_s", "tpot_mean_s", "prompt_tokens_per_s")
        cells = [_ratio(ratios.get(key), digits) for key in keys]
        lines.append(f"| {report['systems'][system]} | " + " | ".join(cells) + " |")
    lines += ["", "| target | measured | met |", "|---|---:|---|"]
    for target in report["targets"]:
        shown = _ratio(target["ratio"], digits) if "ratio" in target else _percent(target["value"])
        lines.append(f"| {target['target']} | {shown} | {_MET[target['met']]}{_doubt(target)} |")
    lines += ["", *_verdict(report["checks"])]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    machine = report["machine"]
    lines += ["", f"{machine['cpus']} CPUs, {machine['processor']}, {machine['system']}; {versions}; seed {report['seed']}."]
    return "\n".join(lines) + "\n"


def summary(report: Mapping[str, Any]) -> str:
    """One line per system that ran here, over stock vLLM. Ends with a newline."""
    lines = ["| | token hit rate | mean workflow latency | hit rate | latency |", "|---|---:|---:|---:|---:|"]
    shown = [figure for figure in FIGURES if figure.key in ("hit_rate", "workflow_latency_mean_s")]
    for system, title in report["systems"].items():
        figures = report["figures"].get(system, {})
        if any(figures.values()):
            ratios = report["ratios"].get(system, {})
            cells = [_cell(figure, figures.get(figure.key)) for figure in shown]
            cells += [_ratio(ratios[figure.key]) if figure.key in ratios else "" for figure in shown]
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


_MET = {True: "yes", False: "**no**", None: "not measured"}


def _doubt(target: Mapping[str, Any]) -> str:
    """Whether the interval reaches from one side of the target to the other."""
    ratio = target.get("ratio")
    if ratio is None or ratio["low"] is None or not ratio["low"] < target["least"] < ratio["high"]:
        return ""
    return ", within the noise"


def _verdict(checks: list[str]) -> list[str]:
    if not checks:
        return [
            "Checked: the same prompts and numbers of tokens for every system, the same generated tokens as stock, and hit rates "
            "that agree with each engine's own counters within 1 %."
        ]
    return ["What is doubtful:", "", *(f"- {problem}" for problem in checks)]


def _cell(figure: Figure, estimate: Mapping[str, Any] | None) -> str:
    if estimate is None:
        return "-"
    scale, digits = {"%": (100.0, 1), "ms": (1000.0, 1), "MiB": (1 / _MIB, 0), "s": (1.0, 2)}.get(figure.unit, (1.0, 0))
    unit = f" {figure.unit}" if figure.unit else ""
    text = f"{estimate['mean'] * scale:,.{digits}f}"
    if estimate["low"] is not None:
        text += f" ± {(estimate['high'] - estimate['mean']) * scale:,.{digits}f}"
    return text + unit


def _ratio(ratio: Mapping[str, Any] | None, digits: int = 2) -> str:
    if ratio is None:
        return "-"
    text = f"{ratio['mean']:.{digits}f} x"
    return text if ratio["low"] is None else f"{text} ({ratio['low']:.{digits}f} - {ratio['high']:.{digits}f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _mib(number: int) -> str:
    return f"{number / _MIB:,.0f} MiB"
