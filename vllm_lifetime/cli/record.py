# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime record`: what a live server recorded, looked at and turned into a trace; other formats are read the same way.

The recording itself is done by the server (connector option `record_path`). Needs no vLLM.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_lifetime.cli.failure import fail

if TYPE_CHECKING:
    from vllm_lifetime.traces.schema import Trace

__all__ = ["add_to", "convert", "inspect", "summary"]

Format = Annotated[str, typer.Option(help="Format of PATH; `jsonl` is a recording, or our own trace format.")]


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    group = typer.Typer(
        help="Look at a recorded trace, or convert one to our own format.", no_args_is_help=True, rich_markup_mode=None
    )
    group.command("convert")(convert)
    group.command("inspect")(inspect)
    app.add_typer(group, name="record")


def convert(
    path: Annotated[Path, typer.Argument(help="A recording, or a trace of another format.")],
    out: Annotated[Path, typer.Argument(help="Where to write the trace, as JSON Lines.")],
    format: Format = "jsonl",
) -> None:
    """Write PATH as a trace in our own format, with what waited for what."""
    from vllm_lifetime.traces.jsonl import write_jsonl

    trace = _read(path, format)
    try:
        if out.exists() and out.samefile(path):
            fail(f"{out}: is the file that is read; name another one to write")
        write_jsonl(trace, out)
    except OSError as error:
        fail(f"{out}: cannot be written: {error}")
    typer.echo(f"wrote {out}: {len(trace.sessions)} sessions, {sum(len(s.requests) for s in trace.sessions)} requests")


def inspect(path: Annotated[Path, typer.Argument(help="A recording or a trace.")], format: Format = "jsonl") -> None:
    """Say what is in PATH."""
    for line in summary(_read(path, format)):
        typer.echo(line)


def summary(trace: Trace) -> list[str]:
    """A trace in a few lines. O(blocks)."""
    import numpy as np

    requests = [request for session in trace.sessions for request in session.requests]
    lines = [f"{trace.name}: {len(trace.sessions)} sessions, {len(requests)} requests, {trace.block_size_tokens} tokens a block"]
    if not requests:
        return lines
    # A session at a time: all references at once may be hundreds of megabytes.
    distinct = np.unique(
        np.concatenate([np.unique(np.concatenate([r.blocks for r in s.requests])) for s in trace.sessions if s.requests])
    )
    largest = max(request.input_tokens for request in requests)
    references = sum(len(request.blocks) for request in requests)
    lines.append(f"blocks: {references} references, {len(distinct)} distinct; largest prompt {largest} tokens")
    for title, values in (("pause", [r.gap_s for r in requests if r.after >= 0]), ("service", [r.service_s for r in requests])):
        if values:
            p50, p90, p99 = np.percentile(values, [50, 90, 99])
            lines.append(f"{title}: median {p50:.2f} s, p90 {p90:.2f} s, p99 {p99:.2f} s")
    for title, names in (
        ("agents", Counter(r.agent for r in requests)),
        ("finish reasons", Counter(r.finish_reason or "unknown" for r in requests)),
        ("tools", Counter(r.tool for r in requests if r.tool)),
    ):
        if names:
            lines.append(f"{title}: " + ", ".join(f"{name} {count}" for name, count in names.most_common(10)))
    turns, agents, compactions = (sum(getattr(r, name) for r in requests) for name in ("ends_turn", "ends_agent", "compacts"))
    lines.append(f"boundaries: {turns} turn_end, {agents} subagent_return, {compactions} compaction")
    return lines


def _read(path: Path, format: str) -> Trace:
    from vllm_lifetime.traces.read import TraceError, read_trace

    try:
        return read_trace(path, format)
    except TraceError as error:
        fail(str(error))
