# SPDX-License-Identifier: Apache-2.0
"""Reads Codex sessions that are known by structure only: events with times, sizes and tools, no text (docs/analyze.md).

Token counts are exact. Prompts are put together from them: a context goes on from the last one while it grows; where it shrank or
was compacted, as much of it is kept as the provider read from its cache. What sub-agents asked is not in these files.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.prompts import IdSource
from vllm_lifetime.traces.run_lengths import check_count
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import Row, TraceError, json_lines

__all__ = ["CodexCall", "codex_calls", "read_codex"]

BLOCK_SIZE_TOKENS = 64
MAIN_AGENT_ID = "main"

_OUTPUTS = ("reasoning", "agent_message", "tool_call")
_TRIGGERS = ("user", "tool_result")
_TURN_ENDS = ("user", "task_complete", "turn_aborted")
_OTHER_EVENTS = ("task_started", "sub_agent_activity")


@dataclass(slots=True)
class CodexCall:
    """One LLM call of a session. Times are from the session's start."""

    row: Row
    """Its `llm` event: token counts."""
    starts_s: float
    ends_s: float
    compacts: bool
    tools: list[str] = field(default_factory=list)
    ends_turn: bool = False

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning among the output tokens."""
        return self.row.count("reasoning", 0)

    @property
    def output_tokens(self) -> int:
        """All output tokens, reasoning included."""
        return self.row.count("out")


def read_codex(path: Path) -> Trace:
    """Read sessions (.jsonl, also packed), one a line. Raises TraceError."""
    ids = IdSource()
    shared: dict[str, NDArray[np.int64]] = {}
    sessions = []
    for row in json_lines(path):
        requests = tuple(_requests(list(codex_calls(row)), ids, shared, row.text("cli", "unknown")))
        if requests:
            sessions.append(TraceSession(row.text("sid"), requests))
    if not sessions:
        raise TraceError(str(path), "expected at least one session with an llm event, found none")
    return Trace("codex", BLOCK_SIZE_TOKENS, tuple(sessions))


def codex_calls(session: Row) -> Iterator[CodexCall]:
    """The calls of one session, in order. Raises TraceError.

    A call's `llm` event is written when its tools have run, so what it wrote stands before it. It began when the last call was
    answered, and ended with the last thing that it wrote.
    """
    last: CodexCall | None = None
    ready_s = next_ready_s = ends_s = 0.0
    tools: list[str] = []
    has_written = was_interrupted = compacts = False
    for event in session.rows("events"):
        kind, at_s = event.text("kind"), event.seconds("t")
        if kind in _OUTPUTS:
            has_written, ends_s = True, max(ends_s, at_s)
            if kind == "tool_call":
                tools.append(event.text("tool", "unknown"))
        elif kind == "llm":
            if last is not None:
                yield last
            ends_s = max(ready_s, ends_s if has_written else at_s)
            last = CodexCall(event, ready_s, ends_s, compacts, tools, was_interrupted)
            ready_s = next_ready_s = max(ends_s, next_ready_s)
            tools, has_written, was_interrupted, compacts = [], False, False, False
        elif kind == "context_compacted":
            compacts = last is not None
        elif kind not in _TRIGGERS + _TURN_ENDS + _OTHER_EVENTS:
            known = ("llm", *_OUTPUTS, *_TRIGGERS, *_TURN_ENDS[1:], *_OTHER_EVENTS, "context_compacted")
            raise event.error("kind", f"one of {', '.join(known)}")
        if kind in _TRIGGERS:
            next_ready_s = max(next_ready_s, at_s)
            if not has_written:
                ready_s = max(ready_s, at_s)
        if kind in _TURN_ENDS:
            if has_written:
                was_interrupted = True
            elif last is not None:
                last.ends_turn = True
    if last is not None:
        yield last


def _requests(
    calls: list[CodexCall], ids: IdSource, shared: dict[str, NDArray[np.int64]], version: str
) -> Iterator[TraceRequest]:
    last: NDArray[np.int64] | None = None
    for index, call in enumerate(calls):
        tokens, cached_tokens = call.row.count("in"), call.row.count("cached", 0)
        if cached_tokens > tokens:
            raise call.row.error("cached", f"at most `in`, which is {tokens}")
        count, cached = tokens // BLOCK_SIZE_TOKENS, cached_tokens // BLOCK_SIZE_TOKENS
        try:
            check_count(max(count, cached))
        except ValueError as error:
            raise TraceError(call.row.where, f"field 'in': {error}") from error
        if last is None:
            known = shared.get(version, np.empty(0, np.int64))
            if len(known) < cached:
                known = shared[version] = np.concatenate([known, ids.take(cached - len(known))])
            kept = known[:cached]
        else:
            kept = last if count >= len(last) and not call.compacts else last[: min(cached, count)]
        last = np.concatenate([kept, ids.take(count - len(kept))])
        yield TraceRequest(
            blocks=last,
            after=index - 1,
            gap_s=call.starts_s - calls[index - 1].ends_s if index else 0.0,
            service_s=call.ends_s - call.starts_s,
            input_tokens=tokens,
            output_tokens=call.output_tokens,
            agent_id=MAIN_AGENT_ID,
            finish_reason="tool_calls" if call.tools else "stop",
            tool=call.tools[0] if call.tools else None,
            ends_turn=call.ends_turn,
            compacts=call.compacts,
        )
