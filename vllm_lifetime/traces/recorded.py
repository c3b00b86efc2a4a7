# SPDX-License-Identifier: Apache-2.0
"""Reads what a live server has recorded (connectors/lifetime/recording.py writes it) as a trace.

A recording is a log: requests with the times at which they began and ended, and boundaries as they came. What waited for what is
inferred from the times (`linking.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.linking import Timed, link_requests
from vllm_lifetime.traces.prefixes import find_misnamed, number_prefixes
from vllm_lifetime.traces.run_lengths import expand
from vllm_lifetime.traces.schema import DEFAULT_AGENT, Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import Row, TraceError, parse_json, text_lines

__all__ = ["RECORDING_FORMAT", "RECORDING_VERSION", "read_recording"]

RECORDING_FORMAT = "vllm-lifetime-recording"
RECORDING_VERSION = 1


@dataclass(slots=True)
class _Request:
    row: Row
    blocks: NDArray[np.int64]
    starts_s: float
    ends_s: float = -1.0
    output_tokens: int = 0
    finish_reason: str | None = None
    tool: str | None = None
    flags: dict[str, bool] = field(default_factory=dict)

    @property
    def agent(self) -> str | None:
        return self.row.optional_text("agent_id") or self.row.optional_text("agent")


@dataclass(slots=True)
class _Session:
    session_id: str
    names_session: bool
    requests: list[_Request] = field(default_factory=list)
    compacted: set[str | None] = field(default_factory=set)
    """Agents whose `compaction` has come and whose next request has not."""


def read_recording(path: Path) -> Trace:
    """Read a recording. Requests that had not ended are left out. Raises TraceError.

    Each header begins a run of the server: nothing is shared with the runs before it, since its cache was empty.
    """
    reader = _Reader()
    for row in _whole_lines(path):
        kind = row.value.get("format") if "format" in row.value else row.text("kind")
        if kind == RECORDING_FORMAT:
            reader.begin_run(row)
        elif not reader.block_size_tokens:
            raise row.error("format", f"{RECORDING_FORMAT!r} in the first line")
        elif kind == "start":
            reader.start(row)
        elif kind == "finish":
            reader.finish(row)
        elif kind == "boundary":
            reader.boundary(row)
        elif kind != "note":
            raise row.error("kind", "start, finish, boundary or note")
    if not reader.block_size_tokens:
        raise TraceError(str(path), "expected a header line, found none")
    sessions = [(s, sorted((r for r in s.requests if r.ends_s >= 0), key=lambda r: r.starts_s)) for s in reader.sessions]
    ended = [request for _, requests in sessions for request in requests]
    if find_misnamed(request.blocks for request in ended) is not None:
        # The recorder forgot a block and not those after it: they are new with it.
        for request, blocks in zip(ended, number_prefixes(request.blocks for request in ended), strict=True):
            request.blocks = blocks
    begins_s = min((requests[0].starts_s for _, requests in sessions if requests), default=0.0)
    kept = sorted(((s, requests) for s, requests in sessions if requests), key=lambda item: item[1][0].starts_s)
    traced = (
        TraceSession(s.session_id, tuple(_trace(requests)), s.names_session, requests[0].starts_s - begins_s)
        for s, requests in kept
    )
    return Trace("recording", reader.block_size_tokens, tuple(traced))


class _Reader:
    def __init__(self) -> None:
        self.block_size_tokens = 0
        self.sessions: list[_Session] = []
        self._open: dict[str, _Session] = {}
        self._running: dict[str, _Request] = {}
        self._names: dict[str, int] = {}
        self._first_block = self._next_block = 0

    def begin_run(self, row: Row) -> None:
        if row.value.get("version") != RECORDING_VERSION:
            raise row.error("version", f"{RECORDING_VERSION}, the only one that this program reads")
        block_size = row.count("block_size_tokens")
        if not block_size or self.block_size_tokens not in (0, block_size):
            raise row.error("block_size_tokens", f"{self.block_size_tokens or 'at least 1'}")
        self.block_size_tokens = block_size
        self._open.clear()
        self._running.clear()
        self._first_block = self._next_block

    def start(self, row: Row) -> None:
        blocks = expand(row, "blocks") + self._first_block
        if len(blocks):
            self._next_block = max(self._next_block, int(blocks.max()) + 1)
        name = row.optional_text("session_id") or row.optional_text("workflow_id")
        session = self._session(name or row.text("request_id"), names_session=name is not None)
        request = _Request(row, blocks, row.seconds("at_s"))
        if request.agent in session.compacted:
            session.compacted.discard(request.agent)
            request.flags["compacts"] = True
        session.requests.append(request)
        self._running[row.text("request_id")] = request

    def finish(self, row: Row) -> None:
        request = self._running.pop(row.text("request_id"), None)
        if request is not None:
            request.ends_s = max(request.starts_s, row.seconds("at_s"))
            request.output_tokens = row.count("output_tokens")
            request.finish_reason, request.tool = row.optional_text("finish_reason"), row.optional_text("tool")

    def boundary(self, row: Row) -> None:
        name = row.optional_text("session_id") or row.optional_text("workflow_id") or ""
        event = row.text("event")
        session = self._open.get(name)
        if session is None:
            return
        agent = row.optional_text("agent_id") or row.optional_text("agent")
        own = [request for request in session.requests if agent is None or request.agent == agent]
        if event == "session_end":
            del self._open[name]
        elif event == "compaction":
            session.compacted.add(agent if agent is not None or not own else own[-1].agent)
        elif event in ("turn_end", "subagent_return") and own:
            own[-1].flags["ends_turn" if event == "turn_end" else "ends_agent"] = True

    def _session(self, name: str, *, names_session: bool) -> _Session:
        session = self._open.get(name)
        if session is None:
            number = self._names[name] = self._names.get(name, 0) + 1
            session = _Session(name if number == 1 else f"{name}#{number}", names_session)
            self._open[name] = session
            self.sessions.append(session)
        return session


def _trace(requests: list[_Request]) -> Iterator[TraceRequest]:
    timed = [Timed(r.starts_s, r.ends_s, r.agent, r.row.optional_text("parent_agent_id")) for r in requests]
    for request, after in zip(requests, link_requests(timed), strict=True):
        flags: dict[str, Any] = request.flags
        yield TraceRequest(
            blocks=request.blocks,
            after=after,
            gap_s=request.starts_s - (requests[after].ends_s if after >= 0 else requests[0].starts_s),
            service_s=request.ends_s - request.starts_s,
            input_tokens=request.row.count("input_tokens"),
            output_tokens=request.output_tokens,
            agent=request.row.optional_text("agent") or DEFAULT_AGENT,
            agent_id=request.row.optional_text("agent_id"),
            parent_agent_id=request.row.optional_text("parent_agent_id"),
            finish_reason=request.finish_reason,
            tool=request.tool,
            **flags,
        )


def _whole_lines(path: Path) -> Iterator[Row]:
    """The lines of a recording. A line that a killed server left unfinished is dropped: the last one, or one before a header."""
    torn: TraceError | None = None
    for where, line in text_lines(path):
        try:
            row = Row(parse_json(line, where), where)
        except TraceError as error:
            if torn is not None:
                raise torn from error
            torn = error
            continue
        if torn is not None and row.value.get("format") != RECORDING_FORMAT:
            raise torn
        torn = None
        yield row
