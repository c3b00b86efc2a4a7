# SPDX-License-Identifier: Apache-2.0
"""Reads kv-cache-tester traces: coding-agent sessions captured by a proxy, prompts as hash ids.

What the reader infers (times, shared prefixes, compactions) is said in docs/traces.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.linking import Timed, link_requests
from vllm_lifetime.traces.prompts import GlobalIds, PromptTexts, common_prefix, cut_out_ids, ids_text
from vllm_lifetime.traces.run_lengths import check_count
from vllm_lifetime.traces.schema import DEFAULT_AGENT, Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import Row, TraceError, json_documents, parse_json

__all__ = ["read_kv_cache_tester"]

MAIN_AGENT_ID = "main"
FIRST_TOKEN_S, OUTPUT_TOKENS_PER_S = 2.3, 60.0
"""How long a request ran that has no `api_time`: line through the medians of the requests that have one (docs/traces.md)."""
ROUNDING_S = 1.0
"""`t` of a request is in whole seconds."""
COMPACTED_SIZE = 0.75
"""A context that was compacted is at most so much of what it was, and shares at most half of it."""

_FINISH_REASONS = {"tool_use": "tool_calls", "end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length"}


class _Agent(NamedTuple):
    """An agent of a session: its entry, when it began from the session's start, and its prefix parts."""

    entry: Row
    starts_s: float
    role: str
    agent_id: str
    tool_tokens: int
    system_tokens: int


@dataclass(slots=True)
class _Request:
    row: Row
    agent: _Agent
    model: str
    prompt: int
    starts_s: float
    service_s: float
    think_s: float | None

    @property
    def ends_s(self) -> float:
        return self.starts_s + self.service_s


def read_kv_cache_tester(path: Path) -> Trace:
    """Read one session (.json), a folder of them, or a tar of them. Raises TraceError.

    Linear in the text; a prompt that goes on from the one before costs only what it adds.
    """
    numbering = GlobalIds()
    sessions: list[TraceSession] = []
    block_size = 0
    for where, document in json_documents(path):
        cut, texts = cut_out_ids(document)
        session = Row(parse_json(cut, where), where)
        size = session.count("block_size")
        if size == 0 or block_size not in (0, size):
            raise session.error("block_size", f"{block_size}, as in the sessions before" if block_size else "at least 1")
        block_size = size
        sessions.append(_read_session(session, texts, size, numbering))
    if not sessions:
        raise TraceError(str(path), "expected at least one session (a .json file), found none")
    return Trace("kv-cache-tester", block_size, tuple(sessions))


def _read_session(session: Row, texts: Sequence[bytes], block_size: int, numbering: GlobalIds) -> TraceSession:
    spaces: dict[str, PromptTexts] = {}
    main = _Agent(session, 0.0, DEFAULT_AGENT, MAIN_AGENT_ID, session.count("tool_tokens"), session.count("system_tokens"))
    requests: list[_Request] = []
    entries = session.rows("requests")
    for entry in entries:
        if entry.text("type") != "subagent":
            requests.append(_read_request(entry, main, texts, spaces))
    for entry in entries:
        if entry.text("type") == "subagent":
            # `t` of a sub-agent is when it returned.
            starts_s = max(0.0, entry.seconds("t") - entry.seconds("duration_ms") / 1000)
            role, name = entry.text("subagent_type", DEFAULT_AGENT), entry.text("agent_id")
            agent = _Agent(entry, starts_s, role, name, entry.count("tool_tokens"), entry.count("system_tokens"))
            requests += [_read_request(row, agent, texts, spaces) for row in entry.rows("requests")]
    blocks = _number(requests, spaces, block_size, numbering, session)
    order = sorted(range(len(requests)), key=lambda index: requests[index].starts_s)
    return TraceSession(session.text("id"), tuple(_link([requests[i] for i in order], [blocks[i] for i in order])))


def _read_request(row: Row, agent: _Agent, texts: Sequence[bytes], spaces: dict[str, PromptTexts]) -> _Request:
    text, model = ids_text(row.value.get("hash_ids"), texts), row.text("model")
    if text is None:
        raise row.error("hash_ids", "a list of whole numbers")
    try:
        prompt = spaces.setdefault(model, PromptTexts()).add(text)
    except ValueError as error:
        raise TraceError(row.where, f"field 'hash_ids': {error}") from error
    service_s = row.seconds("api_time", -1.0)
    think_s = row.seconds("think_time", -1.0)
    if service_s < 0:
        service_s = FIRST_TOKEN_S + row.count("out") / OUTPUT_TOKENS_PER_S
        # The pause before the next one is then counted from a request further back.
    return _Request(row, agent, model, prompt, agent.starts_s + row.seconds("t"), service_s, None if think_s < 0 else think_s)


def _number(
    requests: Sequence[_Request], spaces: dict[str, PromptTexts], block_size: int, numbering: GlobalIds, session: Row
) -> list[NDArray[np.int64]]:
    """Each request's blocks. Two models share none; sessions share tools and system prompt where their sizes agree."""
    views: dict[str, list[NDArray[np.int64]]] = {}
    for model, prompts in spaces.items():
        prefixes: dict[tuple[int, int], tuple[int, NDArray[np.int64]]] = {}
        for request in requests:
            tools, system = request.agent.tool_tokens, request.agent.system_tokens
            if request.model == model and (tools, system) not in prefixes:
                tool_blocks, all_blocks = tools // block_size, (tools + system) // block_size
                try:
                    check_count(all_blocks)
                except ValueError as error:
                    raise TraceError(request.agent.entry.where, f"fields 'tool_tokens' and 'system_tokens': {error}") from error
                shared = np.concatenate(
                    [
                        numbering.shared((model, tools), tool_blocks),
                        numbering.shared((model, tools, system), all_blocks - tool_blocks),
                    ]
                )
                prefixes[tools, system] = (request.prompt, shared)
        try:
            views[model] = numbering.number(*prompts.local_ids(), list(prefixes.values()))
        except ValueError as error:
            raise TraceError(session.where, f"field 'hash_ids': {error}") from error
    return [views[request.model][request.prompt] for request in requests]


def _link(requests: Sequence[_Request], blocks: Sequence[NDArray[np.int64]]) -> list[TraceRequest]:
    """Requests by time, each after what it waits for, with the boundaries that the trace shows."""
    timed = [
        Timed(r.starts_s, r.ends_s, r.agent.agent_id, None if r.agent.agent_id == MAIN_AGENT_ID else MAIN_AGENT_ID)
        for r in requests
    ]
    linked: list[TraceRequest] = []
    last_of: dict[str, int] = {}
    for index, (request, after) in enumerate(zip(requests, link_requests(timed, ROUNDING_S), strict=True)):
        main = request.agent.agent_id == MAIN_AGENT_ID
        own = last_of.get(request.agent.agent_id, -1)
        gap_s = max(0.0, request.starts_s - requests[after].ends_s) if after >= 0 else 0.0
        if after == own >= 0 and request.think_s is not None and "api_time" in requests[own].row.value:
            gap_s = request.think_s
        stop = request.row.optional_text("stop")
        linked.append(
            TraceRequest(
                blocks=blocks[index],
                after=after,
                gap_s=gap_s,
                service_s=request.service_s,
                input_tokens=request.row.count("in"),
                output_tokens=request.row.count("out"),
                agent=request.agent.role,
                agent_id=request.agent.agent_id,
                parent_agent_id=None if main else MAIN_AGENT_ID,
                finish_reason=_FINISH_REASONS.get(stop) if stop else None,
                ends_turn=main and stop == "end_turn",
                compacts=own >= 0 and _is_compaction(requests, blocks, own, index),
            )
        )
        last_of[request.agent.agent_id] = index
    for agent_id, last in last_of.items():
        if agent_id != MAIN_AGENT_ID:
            linked[last] = replace(linked[last], ends_agent=True)
    return linked


def _is_compaction(requests: Sequence[_Request], blocks: Sequence[NDArray[np.int64]], last: int, index: int) -> bool:
    """Whether an agent's context shrank for good between its requests `last` and `index`: what was dropped never comes back."""
    old, new = blocks[last], blocks[index]
    if requests[last].model != requests[index].model or len(new) > COMPACTED_SIZE * len(old):
        return False
    kept = common_prefix(old, new)
    if kept > len(old) / 2:
        return False
    return not any(len(later) > kept and later[kept] == old[kept] for later in blocks[index + 1 :])
