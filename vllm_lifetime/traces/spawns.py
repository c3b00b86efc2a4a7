# SPDX-License-Identifier: Apache-2.0
"""Reads what sub-agents were spawned with, and how long they lived: what the lifetime rank learns from. One reader per format.

What each format knows of a spawn, and what is left out, stands in docs/lifetime-rank.md.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from vllm_lifetime.traces.prompts import cut_out_ids
from vllm_lifetime.traces.recorded import RECORDING_FORMAT, RECORDING_VERSION
from vllm_lifetime.traces.source import Row, TraceError, json_documents, parse_json, text_lines
from vllm_lifetime.traces.spawn_schema import SpawnSample, SpawnSignal

__all__ = ["SPAWNS_FORMAT", "SPAWNS_VERSION", "SPAWN_FORMATS", "read_spawns"]

SPAWNS_FORMAT, SPAWNS_VERSION = "vllm-lifetime-spawns", 1

CHARS_PER_TOKEN = 4

_SPAWNING_TOOLS = ("Task", "Agent")
"""Names of Claude Code's tool that spawns a sub-agent; it was renamed."""


def read_spawns(path: str | Path, format: str) -> list[SpawnSample]:
    """The sub-agents of all sessions, a session's by the time of their spawn. Those that have not ended are left out.

    Raises TraceError: unknown format, unreadable file, a field that is not as it should be, or not one sub-agent.
    """
    reader = SPAWN_FORMATS.get(format)
    if reader is None:
        raise TraceError(str(path), f"unknown format {format!r}; known are {', '.join(SPAWN_FORMATS)}")
    samples = list(reader(Path(path)))
    if not samples:
        raise TraceError(str(path), "holds no sub-agent that was spawned and has returned")
    first = {sample.session_id: index for index, sample in reversed(list(enumerate(samples)))}
    return sorted(samples, key=lambda sample: (first[sample.session_id], sample.starts_s))


# ---------------------------------------------------------------------- Claude Code


def _read_claude_code(path: Path) -> Iterator[SpawnSample]:
    for where, line in text_lines(path):
        session = Row(parse_json(line, where), where)
        session_id = session.text("sid")
        events = session.rows("events")
        returned = {event.optional_text("id"): event for event in events if event.text("kind") == "tool_result"}
        agents: dict[str, Row] = {}
        for name, value in Row(session.value.get("subagents", {}), f"{where}, subagents").value.items():
            agent = Row(value, f"{where}, subagents[{name!r}]")
            agents[agent.optional_text("parent_tool") or ""] = agent
        position = 0
        for event in events:
            if event.text("kind") != "llm":
                continue
            for block in event.rows("blocks", []):
                call = block.optional_text("id")
                if call is None or block.optional_text("tool") not in _SPAWNING_TOOLS:
                    continue
                result, agent_row = returned.get(call), agents.get(call)
                signal = SpawnSignal(
                    instruction_chars=block.count("chars"),
                    agent=block.optional_text("subagent_type"),
                    position=position,
                )
                position += 1
                lifetime_s = _claude_lifetime_s(result, agent_row)
                if lifetime_s is not None:
                    yield SpawnSample(session_id, signal, event.seconds("t1"), lifetime_s, _claude_tokens(result, agent_row))


def _claude_lifetime_s(result: Row | None, agent: Row | None) -> float | None:
    """The harness's own measure; of a sub-agent that was stopped or ran in the background, the span of its events."""
    if result is not None and result.value.get("totalDurationMs") is not None:
        return result.seconds("totalDurationMs") / 1000
    return None if agent is None else max(0.0, agent.seconds("t1") - agent.seconds("t0"))


def _claude_tokens(result: Row | None, agent: Row | None) -> int:
    if result is not None and result.value.get("totalTokens") is not None:
        return result.count("totalTokens")
    sizes = [0]
    for event in agent.rows("ev") if agent is not None else []:
        if event.text("kind") == "llm":
            usage = event.child("usage")
            names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "output_tokens")
            sizes.append(sum(usage.count(name, 0) for name in names))
    return max(sizes)


# ---------------------------------------------------------------------- kv-cache-tester


def _read_kv_cache_tester(path: Path) -> Iterator[SpawnSample]:
    for where, document in json_documents(path):
        # Without the prompts' ids, which are nearly all of the text.
        session = Row(parse_json(cut_out_ids(document)[0], where), where)
        spawned = []
        for entry in session.rows("requests"):
            if entry.text("type") == "subagent":
                lifetime_s = entry.seconds("duration_ms") / 1000
                # `t` of a sub-agent is when it returned.
                spawned.append((max(0.0, entry.seconds("t") - lifetime_s), lifetime_s, entry))
        for position, (starts_s, lifetime_s, entry) in enumerate(sorted(spawned, key=lambda item: item[0])):
            requests, models = entry.rows("requests"), entry.items("models", [])
            told_tokens = None
            if requests:
                told_tokens = max(0, requests[0].count("in") - entry.count("tool_tokens") - entry.count("system_tokens"))
            signal = SpawnSignal(
                instruction_chars=None if told_tokens is None else CHARS_PER_TOKEN * told_tokens,
                agent=entry.optional_text("subagent_type"),
                model=models[0] if models and isinstance(models[0], str) else None,
                position=position,
            )
            yield SpawnSample(session.text("id"), signal, starts_s, lifetime_s, entry.count("total_tokens", 0))


# ---------------------------------------------------------------------- recordings, and our own format


def _read_jsonl(path: Path) -> Iterator[SpawnSample]:
    lines = text_lines(path)
    where, line = next(lines, (str(path), ""))
    if not line:
        raise TraceError(where, "expected a header line, found an empty file")
    header = Row(parse_json(line, where), where)
    known = {RECORDING_FORMAT: RECORDING_VERSION, SPAWNS_FORMAT: SPAWNS_VERSION}
    name = header.text("format")
    if name not in known:
        raise header.error("format", " or ".join(map(repr, known)))
    if header.value.get("version") != known[name]:
        raise header.error("version", f"{known[name]}, the only one that this program reads")
    if name == RECORDING_FORMAT:
        yield from _read_recording(lines)
        return
    for where, line in lines:
        row = Row(parse_json(line, where), where)
        starts_s, lifetime_s, tokens = row.seconds("starts_s", 0.0), row.seconds("lifetime_s"), row.count("written_tokens", 0)
        yield SpawnSample(row.text("session_id"), _signal(row, row.optional_text("agent"), None), starts_s, lifetime_s, tokens)


@dataclass(slots=True)
class _Spawned:
    signal: SpawnSignal
    starts_s: float
    tokens: int = 0


def _read_recording(lines: Iterator[tuple[str, str]]) -> Iterator[SpawnSample]:
    """Sub-agents of a live server: from their `subagent_spawn` to their `subagent_return`."""
    open_agents: dict[tuple[str, str], _Spawned] = {}
    positions: dict[str, int] = {}
    prompts: dict[str, tuple[tuple[str, str], int]] = {}
    run = 0
    for where, line in lines:
        try:
            row = Row(parse_json(line, where), where)
        except TraceError:
            continue  # a killed server left it unfinished
        if "format" in row.value:
            open_agents.clear()
            positions.clear()
            prompts.clear()
            run += 1
            continue
        kind = row.text("kind")
        session_id = row.optional_text("session_id") or row.optional_text("workflow_id") or ""
        key = (session_id, row.optional_text("agent_id") or row.optional_text("agent") or "")
        if kind == "start" and key in open_agents:
            prompts[row.text("request_id")] = key, row.count("input_tokens")
        elif kind == "finish":
            asked = prompts.pop(row.text("request_id"), None)
            if asked is not None and asked[0] in open_agents:
                agent = open_agents[asked[0]]
                agent.tokens = max(agent.tokens, asked[1] + row.count("output_tokens"))
        elif kind == "boundary":
            event = row.text("event")
            if event == "subagent_spawn":
                position = positions.get(session_id, 0)
                positions[session_id] = position + 1
                spawn = row.child("spawn") if row.value.get("spawn") is not None else Row({}, where)
                open_agents[key] = _Spawned(_signal(spawn, row.optional_text("agent"), position), row.seconds("at_s"))
            elif event == "session_end":
                positions.pop(session_id, None)
                open_agents = {key: agent for key, agent in open_agents.items() if key[0] != session_id}
            elif event == "subagent_return" and key in open_agents:
                agent = open_agents.pop(key)
                lifetime_s = max(0.0, row.seconds("at_s") - agent.starts_s)
                name = f"{session_id}#{run}" if run else session_id
                yield SpawnSample(name, agent.signal, agent.starts_s, lifetime_s, agent.tokens)


def _signal(row: Row, agent: str | None, position: int | None) -> SpawnSignal:
    """A spawn record in JSON; `position`: where it gives none."""
    tools = row.items("tools", [])
    if not all(isinstance(tool, str) for tool in tools):
        raise row.error("tools", "a list of names")
    counts = {
        name: None if row.value.get(name) is None else row.count(name)
        for name in ("instruction_chars", "context_chars", "position")
    }
    return SpawnSignal(
        instruction=_text(row, "instruction"),
        context=_text(row, "context"),
        instruction_chars=counts["instruction_chars"],
        context_chars=counts["context_chars"],
        tools=tuple(tools),
        agent=agent,
        model=row.optional_text("model"),
        position=position if counts["position"] is None else counts["position"],
    )


def _text(row: Row, name: str) -> str | None:
    """A text, which may be empty, or None."""
    value = row.value.get(name)
    if value is not None and not isinstance(value, str):
        raise row.error(name, "a string or null")
    return value


SPAWN_FORMATS: Mapping[str, Callable[[Path], Iterator[SpawnSample]]] = MappingProxyType(
    {"claude-code": _read_claude_code, "kv-cache-tester": _read_kv_cache_tester, "jsonl": _read_jsonl}
)
"""Format names, as the command line takes them, and their readers."""
