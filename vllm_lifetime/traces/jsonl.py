# SPDX-License-Identifier: Apache-2.0
"""Our own trace format: JSON Lines, a header and one request a line (docs/traces.md). Written and read without loss."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.prefixes import check_prefixes
from vllm_lifetime.traces.recorded import RECORDING_FORMAT, read_recording
from vllm_lifetime.traces.run_lengths import expand, run_lengths
from vllm_lifetime.traces.schema import DEFAULT_AGENT, Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import Row, TraceError, json_lines
from vllm_lifetime.whole_file import replacing

__all__ = ["TRACE_FORMAT", "TRACE_VERSION", "read_jsonl", "write_jsonl"]

TRACE_FORMAT = "vllm-lifetime-trace"
TRACE_VERSION = 1

_OPTIONAL_TEXTS = ("agent_id", "parent_agent_id", "finish_reason", "tool")
_FLAGS = ("ends_turn", "ends_agent", "compacts")


@dataclass(slots=True)
class _Session:
    names_session: bool
    arrival_s: float | None
    requests: list[TraceRequest] = field(default_factory=list)


def read_jsonl(path: Path) -> Trace:
    """Read a trace of this format, or a recording of a live server. Raises TraceError."""
    lines = json_lines(path)
    header = next(lines, None)
    if header is None:
        raise TraceError(str(path), "expected a header line, found an empty file")
    if header.value.get("format") == RECORDING_FORMAT:
        return read_recording(path)
    if header.value.get("format") != TRACE_FORMAT:
        raise header.error("format", f"{TRACE_FORMAT!r} or {RECORDING_FORMAT!r}")
    if header.value.get("version") != TRACE_VERSION:
        raise header.error("version", f"{TRACE_VERSION}, the only one that this program reads")
    block_size = header.count("block_size_tokens")
    if not block_size:
        raise header.error("block_size_tokens", "at least 1")
    sessions: dict[str, _Session] = {}
    prompts: list[tuple[str, NDArray[np.int64]]] = []
    for row in lines:
        session_id = row.text("session_id")
        if "blocks" not in row.value:
            if session_id in sessions:
                raise TraceError(row.where, f"expected each session once, found {session_id!r} again")
            arrival_s = None if row.value.get("arrival_s") is None else row.seconds("arrival_s")
            sessions[session_id] = _Session(row.flag("names_session", True), arrival_s)
            continue
        session = sessions.get(session_id)
        if session is None:
            raise row.error("session_id", "a session that a line before names")
        session.requests.append(_read_request(row, len(session.requests)))
        prompts.append((row.where, session.requests[-1].blocks))
    check_prefixes(prompts, "blocks")
    return Trace(
        header.text("name"),
        block_size,
        tuple(TraceSession(name, tuple(s.requests), s.names_session, s.arrival_s) for name, s in sessions.items()),
    )


def write_jsonl(trace: Trace, path: Path) -> None:
    """Write `trace`, or nothing. Runs of consecutive block ids take one pair each. Raises OSError."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")

        write(
            {"format": TRACE_FORMAT, "version": TRACE_VERSION, "name": trace.name, "block_size_tokens": trace.block_size_tokens}
        )
        for session in trace.sessions:
            line: dict[str, Any] = {"session_id": session.session_id}
            if not session.names_session:
                line["names_session"] = False
            if session.arrival_s is not None:
                line["arrival_s"] = session.arrival_s
            write(line)
            for request in session.requests:
                write({"session_id": session.session_id, **_request_row(request)})


def _request_row(request: TraceRequest) -> dict[str, Any]:
    row: dict[str, Any] = {
        "blocks": run_lengths(request.blocks),
        "after": request.after,
        "gap_s": request.gap_s,
        "service_s": request.service_s,
        "input_tokens": request.input_tokens,
        "output_tokens": request.output_tokens,
        "agent": request.agent,
    }
    row |= {name: getattr(request, name) for name in _OPTIONAL_TEXTS if getattr(request, name) is not None}
    return row | {name: True for name in _FLAGS if getattr(request, name)}


def _read_request(row: Row, index: int) -> TraceRequest:
    after = row.value.get("after")
    if type(after) is not int or not -1 <= after < index:
        raise row.error("after", f"-1, or the index of an earlier request of the session (there are {index} so far)")
    return TraceRequest(
        blocks=expand(row, "blocks"),
        after=after,
        gap_s=row.seconds("gap_s"),
        service_s=row.seconds("service_s"),
        input_tokens=row.count("input_tokens"),
        output_tokens=row.count("output_tokens"),
        agent=row.text("agent", DEFAULT_AGENT),
        agent_id=row.optional_text("agent_id"),
        parent_agent_id=row.optional_text("parent_agent_id"),
        finish_reason=row.optional_text("finish_reason"),
        tool=row.optional_text("tool"),
        ends_turn=row.flag("ends_turn", False),
        ends_agent=row.flag("ends_agent", False),
        compacts=row.flag("compacts", False),
    )
