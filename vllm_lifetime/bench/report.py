# SPDX-License-Identifier: Apache-2.0
"""What a run came to: figures, JSON and a table."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_lifetime.bench.counters import ServerCounts
from vllm_lifetime.bench.records import RequestRecord, RunRecord
from vllm_lifetime.whole_file import write_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["HIT_RATE_TOLERANCE", "build_report", "find_problems", "latencies", "make_table", "summarize", "write_report"]

HIT_RATE_TOLERANCE = 0.01
"""By how much the client's hit rate and the server's may differ."""

LATE_S = 0.1
LATE_SHARE = 0.01
"""A request in a hundred sent so long after it was due, and all of them late by such a share of the time that requests take, say
that the client, not the server, is the bottleneck."""

_DECIMALS = 6
_TIERS = ("hbm", "host", "flash")


def latencies(record: RunRecord) -> dict[str, list[float]]:
    """Every measured TTFT, TPOT, ITL and workflow latency, in seconds, of what was served in full."""
    done = [request for request in record.requests if request.is_done]
    return {
        "ttft_s": [request.ttft_s for request in done if request.ttft_s is not None],
        "tpot_s": [request.tpot_s for request in done if request.tpot_s is not None],
        "itl_s": [pause_s for request in done for pause_s in request.itl_s],
        "workflow_latency_s": [session.latency_s for session in record.sessions if session.latency_s is not None],
    }


def summarize(record: RunRecord, counts: ServerCounts | None, num_sessions: int) -> dict[str, Any]:
    """The figures of a run of `num_sessions` planned sessions. A figure of which nothing was measured is None."""
    if counts is not None and counts.went_back:
        counts = None
    done = [request for request in record.requests if request.is_done]
    output_tokens = sum(request.output_tokens for request in done)
    wall_s = record.wall_s or float("nan")
    summary: dict[str, Any] = {
        "sessions": num_sessions,
        "sessions_served": sum(session.latency_s is not None for session in record.sessions),
        "sessions_failed": sum(session.has_failed for session in record.sessions),
        "requests_sent": len(record.requests),
        "requests_served": len(done),
        "requests_failed": record.num_errors,
        "requests_unfinished": sum(request.ended_s is None for request in record.requests),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens if says_cached(record) else None,
        "output_tokens": output_tokens,
        "hit_rate": round(record.hit_rate, _DECIMALS) if says_cached(record) else None,
        "hit_tokens_by_source": hits_by_source(counts),
        "flash_bytes_written": counts.flash_bytes_written if counts else None,
        "preemptions": counts.preemptions if counts else None,
        "wall_s": round(record.wall_s, _DECIMALS),
        "requests_per_s": _number(len(done) / wall_s),
        "prompt_tokens_per_s": _number(record.prompt_tokens / wall_s),
        "output_tokens_per_s": _number(output_tokens / wall_s),
        "late_p99_s": _number(_percentile([request.sent_s - request.due_s for request in record.requests], 99)),
        "boundaries": _count(boundary.kind for boundary in record.boundaries),
    }
    for name, values in latencies(record).items():
        stem = name.removesuffix("_s")
        summary[f"{stem}_mean_s"] = _number(float(np.mean(values)) if values else None)
        for percent in (50, 99):
            summary[f"{stem}_p{percent}_s"] = _number(_percentile(values, percent))
    return summary


def says_cached(record: RunRecord) -> bool:
    """Whether the server tells how many of a prompt's tokens were cached."""
    return any(request.cached_tokens is not None for request in record.requests)


def hits_by_source(counts: ServerCounts | None) -> dict[str, int] | None:
    """Prompt tokens hit, by where they were: the connector's tiers, else HBM and `external`. None: there are no counters."""
    if counts is None or counts.prefix_hit_tokens is None:
        return None
    if counts.hit_tokens_by_tier:
        tiers = sorted(counts.hit_tokens_by_tier, key=lambda tier: _TIERS.index(tier) if tier in _TIERS else len(_TIERS))
        return {tier: counts.hit_tokens_by_tier[tier] for tier in tiers}
    return {"hbm": counts.prefix_hit_tokens, "external": counts.external_hit_tokens or 0}


def find_problems(record: RunRecord, counts: ServerCounts | None) -> list[str]:
    """What makes the figures doubtful, a sentence each."""
    problems = []
    if record.num_errors == 0 and record.stopped is None:
        problems += _disagreements(record, counts)
    if record.requests and not says_cached(record):
        problems.append("The server does not say how much of a prompt was cached: start it with --enable-prompt-tokens-details.")
    waits_s = [request.sent_s - request.due_s for request in record.requests]
    served_s = sum(request.ended_s - request.sent_s for request in record.requests if request.ended_s is not None)
    late_s = _percentile(waits_s, 99)
    if late_s is not None and late_s > LATE_S and sum(waits_s) > LATE_SHARE * served_s:
        problems.append(
            f"The client was late: a request in a hundred was sent {late_s:.2f} s or more after it was due, and all lost "
            f"{sum(waits_s) / max(served_s, LATE_S):.1%} of the time that they took together. It needs a core of its own."
        )
    return problems


def _disagreements(record: RunRecord, counts: ServerCounts | None) -> list[str]:
    if counts is not None and counts.went_back:
        return ["The server's counters went back: was it started anew in between? What they say is left out."]
    if counts is None or counts.hit_rate is None:
        return ["The server has no counters of its prefix cache to compare with." if record.requests else "Nothing was sent."]
    problems = []
    queries = counts.prefix_queries_tokens or 0
    if abs(queries - record.prompt_tokens) > HIT_RATE_TOLERANCE * record.prompt_tokens:
        problems.append(
            f"The server has looked {queries:,} prompt tokens up, but {record.prompt_tokens:,} were sent: "
            "was somebody else using it?"
        )
    if says_cached(record) and abs(counts.hit_rate - record.hit_rate) > HIT_RATE_TOLERANCE:
        problems.append(
            f"The hit rate of the answers is {record.hit_rate:.2%}, that of the server's counters {counts.hit_rate:.2%}: "
            f"they differ by more than {HIT_RATE_TOLERANCE:.0%}."
        )
    return problems


def build_report(
    record: RunRecord,
    summary: Mapping[str, Any],
    problems: Sequence[str],
    counts: ServerCounts | None,
    settings: Mapping[str, Any],
    server: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything, for JSON. Times are in seconds from the run's start."""
    return {
        "summary": dict(summary),
        "stopped": record.stopped,
        "problems": list(problems),
        "settings": dict(settings),
        "server": dict(server),
        "versions": _versions(),
        "machine": {
            "cpus": os.cpu_count(),
            "processor": platform.machine(),
            "system": f"{platform.system()} {platform.release()}",
        },
        "server_counters": counts.as_json() if counts else None,
        "requests": [_request_row(request) for request in record.requests],
        "sessions": [asdict(session) for session in record.sessions],
        "boundaries": [asdict(boundary) for boundary in record.boundaries],
    }


def write_report(report: Mapping[str, Any], path: Path) -> None:
    """Write the report. Raises OSError."""
    write_text(path, json.dumps(report, separators=(",", ":")) + "\n")


def make_table(summary: Mapping[str, Any]) -> "Table":
    """The figures, for a terminal."""
    from rich.table import Table

    table = Table()
    for column in ("", "mean", "p50", "p99"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for title, stem in (("TTFT", "ttft"), ("TPOT", "tpot"), ("ITL", "itl"), ("workflow latency", "workflow_latency")):
        table.add_row(title, *(_seconds(summary[f"{stem}_{which}_s"]) for which in ("mean", "p50", "p99")))
    table.add_section()
    served, sent = summary["requests_served"], summary["requests_sent"]
    table.add_row("sessions served", f"{summary['sessions_served']:,} of {summary['sessions']:,}")
    table.add_row("requests served", f"{served:,} of {sent:,} sent, {summary['requests_failed']:,} failed")
    table.add_row("requests", f"{_or_dash(summary['requests_per_s'], '.2f')} /s")
    table.add_row("prompt tokens", f"{summary['prompt_tokens']:,}, {_or_dash(summary['prompt_tokens_per_s'], ',.0f')} /s")
    table.add_row("output tokens", f"{summary['output_tokens']:,}, {_or_dash(summary['output_tokens_per_s'], ',.0f')} /s")
    table.add_row("token hit rate", _or_dash(summary["hit_rate"], ".2%"))
    for source, tokens in (summary["hit_tokens_by_source"] or {}).items():
        table.add_row(f"  from {source}", f"{tokens:,} tokens")
    for title, key in (("written to flash", "flash_bytes_written"), ("preemptions", "preemptions")):
        if summary[key] is not None:
            table.add_row(title, f"{summary[key]:,}{' B' if key.startswith('flash') else ''}")
    if summary["boundaries"]:
        table.add_row("boundaries", ", ".join(f"{count:,} {kind}" for kind, count in summary["boundaries"].items()))
    return table


def _request_row(request: RequestRecord) -> dict[str, Any]:
    row = asdict(request)
    for name in ("due_s", "sent_s", "ended_s"):
        row[name] = _number(row[name])
    row["chunk_s"] = [_number(at_s) for at_s in request.chunk_s]
    return {**row, "ttft_s": _number(request.ttft_s), "tpot_s": _number(request.tpot_s)}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("vllm-lifetime", "httpx"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _count(kinds: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for kind in kinds:
        found[kind] = found.get(kind, 0) + 1
    return found


def _percentile(values: Sequence[float], percent: float) -> float | None:
    return float(np.percentile(values, percent)) if len(values) else None


def _number(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else round(value, _DECIMALS)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:,.1f} ms" if value < 1 else f"{value:,.2f} s"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
