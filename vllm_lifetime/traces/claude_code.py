# SPDX-License-Identifier: Apache-2.0
"""Reads Claude Code sessions that are known by structure only: events with times, sizes and tools, no text (docs/traces.md).

Prompts are put together from the token usage of each answer: a context goes on from the agent's last one, and where it shrank, as
much of it is kept as the provider read from its cache.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.linking import Timed, link_requests
from vllm_lifetime.traces.prompts import IdSource
from vllm_lifetime.traces.schema import DEFAULT_AGENT, Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import Row, TraceError, is_text, json_lines

__all__ = ["read_claude_code"]

BLOCK_SIZE_TOKENS = 64
CHARS_PER_TOKEN = 4.0
MAIN_AGENT_ID = "main"

_TRIGGERS = ("user", "tool_result")
_OTHER_EVENTS = ("turn_duration", "microcompact_boundary", "api_error")


@dataclass(slots=True)
class _Call:
    row: Row
    role: str
    agent_id: str
    starts_s: float
    compacts: bool
    tools: list[str] = field(default_factory=list)
    output_tokens: int = 0

    @property
    def is_main(self) -> bool:
        return self.agent_id == MAIN_AGENT_ID


class _Contexts:
    """The contexts of one session's agents. Sessions share what `shared` holds: its first blocks, by version and model."""

    def __init__(self, ids: IdSource, shared: dict[tuple[str, str], NDArray[np.int64]], version: str) -> None:
        self._ids, self._shared, self._version = ids, shared, version
        self._last: dict[tuple[str, str], NDArray[np.int64]] = {}
        self._first: dict[tuple[str, str], NDArray[np.int64]] = {}

    def blocks(self, call: _Call, tokens: int, cached_tokens: int) -> NDArray[np.int64]:
        """The blocks of a call's prompt of `tokens`, of which the provider had `cached_tokens` in its cache."""
        model = call.row.text("model")
        count, cached = tokens // BLOCK_SIZE_TOKENS, cached_tokens // BLOCK_SIZE_TOKENS
        last = self._last.get((call.agent_id, model))
        if last is None:
            known = self._first.get((call.role, model))
            if known is None:
                known = self._system_prompt(model, min(cached, count)) if call.is_main else np.empty(0, np.int64)
            kept = known[: min(cached, count)]
        elif count >= len(last) and not call.compacts:
            kept = last
        else:
            kept = last[: min(cached, count)]
        blocks = np.concatenate([kept, self._ids.take(count - len(kept))])
        self._last[call.agent_id, model] = blocks
        self._first.setdefault((call.role, model), blocks)
        return blocks

    def _system_prompt(self, model: str, count: int) -> NDArray[np.int64]:
        ids = self._shared.get((self._version, model), np.empty(0, np.int64))
        if len(ids) < count:
            ids = self._shared[self._version, model] = np.concatenate([ids, self._ids.take(count - len(ids))])
        return ids[:count]


def read_claude_code(path: Path) -> Trace:
    """Read sessions (.jsonl, also packed), one a line. Raises TraceError."""
    ids = IdSource()
    shared: dict[tuple[str, str], NDArray[np.int64]] = {}
    sessions = []
    for row in json_lines(path):
        contexts = _Contexts(ids, shared, row.text("cc", "unknown"))
        requests = tuple(_requests(row, contexts))
        if requests:
            sessions.append(TraceSession(row.text("sid"), requests))
    if not sessions:
        raise TraceError(str(path), "expected at least one session with an llm event, found none")
    return Trace("claude-code", BLOCK_SIZE_TOKENS, tuple(sessions))


def _requests(session: Row, contexts: _Contexts) -> Iterator[TraceRequest]:
    roles: dict[str, str] = {}
    calls = list(_calls(session.rows("events"), DEFAULT_AGENT, MAIN_AGENT_ID, roles))
    for agent_id, value in Row(session.value.get("subagents", {}), f"{session.where}, subagents").value.items():
        agent = Row(value, f"{session.where}, subagents[{agent_id!r}]")
        if not is_text(agent_id):
            raise TraceError(agent.where, "expected a name that UTF-8 can hold")
        role = roles.get(agent.optional_text("parent_tool") or "", DEFAULT_AGENT)
        calls += _calls(agent.rows("ev"), role, agent_id, {})
    calls.sort(key=lambda call: call.starts_s)
    last_of = {call.agent_id: index for index, call in enumerate(calls)}
    timed = [Timed(c.starts_s, c.row.seconds("t1"), c.agent_id, None if c.is_main else MAIN_AGENT_ID) for c in calls]
    for index, (call, after) in enumerate(zip(calls, link_requests(timed), strict=True)):
        usage = call.row.child("usage")
        cached = usage.count("cache_read_input_tokens", 0)
        tokens = cached + usage.count("input_tokens") + usage.count("cache_creation_input_tokens", 0)
        yield TraceRequest(
            blocks=_blocks(contexts, call, tokens, cached),
            after=after,
            gap_s=max(0.0, call.starts_s - timed[after].ends_s) if after >= 0 else 0.0,
            service_s=timed[index].ends_s - call.starts_s,
            input_tokens=tokens,
            output_tokens=max(usage.count("output_tokens"), call.output_tokens),
            agent=call.role,
            agent_id=call.agent_id,
            parent_agent_id=None if call.is_main else MAIN_AGENT_ID,
            finish_reason="tool_calls" if call.tools else "stop",
            tool=call.tools[0] if call.tools else None,
            ends_turn=call.is_main and not call.tools,
            ends_agent=not call.is_main and last_of[call.agent_id] == index,
            compacts=call.compacts,
        )


def _blocks(contexts: _Contexts, call: _Call, tokens: int, cached_tokens: int) -> NDArray[np.int64]:
    try:
        return contexts.blocks(call, tokens, cached_tokens)
    except ValueError as error:
        raise TraceError(call.row.where, f"field 'usage': {error}") from error


def _calls(events: list[Row], role: str, agent_id: str, roles: dict[str, str]) -> Iterator[_Call]:
    """The calls of one agent. An event's time is when it was written down: a call began when what it answers was."""
    ready_s = 0.0
    compacts = has_called = False
    for event in events:
        kind = event.text("kind")
        if kind in _TRIGGERS:
            ready_s = max(ready_s, event.seconds("t"))
        elif kind == "compact_boundary":
            compacts = has_called
        elif kind == "llm":
            blocks = event.rows("blocks", [])
            for block in blocks:
                if block.optional_text("subagent_type") and block.optional_text("id"):
                    roles[block.text("id")] = block.text("subagent_type")
            ends_s = event.seconds("t1")
            usage = event.child("usage")
            if (
                usage.count("input_tokens")
                + usage.count("cache_read_input_tokens", 0)
                + usage.count("cache_creation_input_tokens", 0)
            ):
                tools = [block.text("tool", "unknown") for block in blocks if block.text("type") == "tool_use"]
                written = round(sum(block.count("chars", 0) for block in blocks) / CHARS_PER_TOKEN)
                yield _Call(event, role, agent_id, min(ready_s, ends_s), compacts, tools, written)
                compacts, has_called = False, True
            ready_s = max(ready_s, ends_s)
        elif kind not in _OTHER_EVENTS:
            raise event.error("kind", f"one of llm, compact_boundary, {', '.join(_TRIGGERS + _OTHER_EVENTS)}")
