# SPDX-License-Identifier: Apache-2.0
"""What the readers know of sub-agents when they are spawned."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_lifetime.traces.recorded import RECORDING_FORMAT
from vllm_lifetime.traces.source import TraceError
from vllm_lifetime.traces.spawn_schema import SpawnSample, SpawnSignal
from vllm_lifetime.traces.spawns import SPAWNS_FORMAT, read_spawns


def lines(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def call(block_id: str, chars: int, t1: float = 10.0) -> dict[str, Any]:
    block = {"type": "tool_use", "tool": "Task", "id": block_id, "chars": chars, "subagent_type": "Explore"}
    return {"kind": "llm", "t0": 1.0, "t1": t1, "model": "m", "blocks": [{"type": "text", "chars": 9}, block], "usage": {}}


def test_claude_code_sub_agents(tmp_path: Path) -> None:
    usage = {"input_tokens": 5, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 20, "output_tokens": 7}
    stopped = {"kind": "llm", "t0": 30.0, "t1": 41.0, "model": "m", "blocks": [], "usage": usage}
    session = {
        "sid": "s",
        "events": [
            {"kind": "user", "t": 0.0},
            call("u1", 300),
            call("u2", 400, t1=20.0),
            {"kind": "tool_result", "t": 70.0, "id": "u1", "tool": "Task", "totalDurationMs": 52_500, "totalTokens": 900},
            call("u3", 500, t1=80.0),
            {"kind": "tool_result", "t": 80.1, "id": "u3", "tool": "Task", "status": "async_launched"},
        ],
        "subagents": {"x": {"parent_tool": "u2", "t0": 21.0, "t1": 43.5, "ev": [{"kind": "user", "t": 21.0}, stopped]}},
    }
    first, second = read_spawns(lines(tmp_path / "c.jsonl", session), "claude-code")
    assert first == SpawnSample("s", SpawnSignal(instruction_chars=300, agent="Explore", position=0), 10.0, 52.5, 900)
    # No result came: what its own events say. The third, of which nothing is known, is left out.
    assert second == SpawnSample("s", SpawnSignal(instruction_chars=400, agent="Explore", position=1), 20.0, 22.5, 132)
    with pytest.raises(TraceError, match=r"blocks\[1\]: field 'chars'"):
        read_spawns(lines(tmp_path / "c.jsonl", {"sid": "s", "events": [call("u1", -1)]}), "claude-code")


def test_kv_cache_tester_sub_agents(tmp_path: Path) -> None:
    def agent(name: str, t: float, duration_ms: int, tokens_in: int) -> dict[str, Any]:
        requests = [{"t": 0.0, "type": "n", "model": "m", "in": tokens_in, "out": 3, "hash_ids": [1, 2]}]
        own = {"tool_tokens": 100, "system_tokens": 20, "models": ["m"], "requests": requests, "total_tokens": 500}
        return {"type": "subagent", "agent_id": name, "subagent_type": "Plan", "t": t, "duration_ms": duration_ms, **own}

    document = {"id": "k", "block_size": 64, "requests": [agent("late", 90.0, 30_000, 200), agent("early", 95.0, 60_000, 110)]}
    (tmp_path / "k.json").write_text(json.dumps(document))
    early, late = read_spawns(tmp_path / "k.json", "kv-cache-tester")
    # `t` is when it returned; it is told 4 characters a token beyond tools and system prompt.
    assert early == SpawnSample("k", SpawnSignal(instruction_chars=0, agent="Plan", model="m", position=0), 35.0, 60.0, 500)
    assert late == SpawnSample("k", SpawnSignal(instruction_chars=320, agent="Plan", model="m", position=1), 60.0, 30.0, 500)


HEADER = {"format": RECORDING_FORMAT, "version": 1, "block_size_tokens": 16}


def boundary(event: str, at_s: float, agent_id: str | None = None, **more: Any) -> dict[str, Any]:
    row = {"kind": "boundary", "at_s": at_s, "event": event, "session_id": "s", **more}
    return row if agent_id is None else row | {"agent": "coder", "agent_id": agent_id}


def request(request_id: str, agent_id: str, tokens: int) -> list[dict[str, Any]]:
    names = {"session_id": "s", "agent": "coder", "agent_id": agent_id}
    start = {"kind": "start", "at_s": 2.0, "request_id": request_id, "blocks": [], "input_tokens": tokens, **names}
    return [start, {"kind": "finish", "at_s": 3.0, "request_id": request_id, "output_tokens": 10}]


def test_a_recording_knows_role_position_lifetime_and_size(tmp_path: Path) -> None:
    spawn = {"instruction_chars": 77, "tools": ["bash"], "model": "m"}
    path = lines(
        tmp_path / "r.jsonl",
        HEADER,
        boundary("subagent_spawn", 1.0, "a", spawn=spawn),
        boundary("subagent_spawn", 1.5, "b"),
        boundary("subagent_spawn", 1.6, "never returns"),
        *request("r1", "a", 100),
        *request("r2", "a", 300),
        *request("r3", "lead", 999),
        boundary("subagent_return", 9.0, "b"),
        boundary("turn_end", 9.1),
        boundary("subagent_return", 11.0, "a"),
        boundary("subagent_return", 12.0, "a"),
        boundary("session_end", 13.0),
        boundary("subagent_return", 14.0, "never returns"),
        boundary("subagent_spawn", 15.0, "c"),
        boundary("subagent_return", 17.0, "c"),
        boundary("subagent_spawn", 20.0, "a"),
        request("killed", "a", 500)[0],
        '{"kind": "boun',
        HEADER,
        boundary("subagent_return", 21.0, "a"),
        boundary("subagent_spawn", 30.0, "a"),
        request("killed", "a", 500)[1],
        boundary("subagent_return", 31.0, "a"),
    )
    told = SpawnSignal(instruction_chars=77, tools=("bash",), agent="coder", model="m", position=0)
    assert read_spawns(path, "jsonl") == [
        SpawnSample("s", told, 1.0, 10.0, 310),
        SpawnSample("s", SpawnSignal(agent="coder", position=1), 1.5, 7.5, 0),
        SpawnSample("s", SpawnSignal(agent="coder", position=0), 15.0, 2.0, 0),
        SpawnSample("s#1", SpawnSignal(agent="coder", position=0), 30.0, 1.0, 0),
    ]


def test_our_own_format(tmp_path: Path) -> None:
    header = {"format": SPAWNS_FORMAT, "version": 1}
    row = {"session_id": "s", "instruction": "find it", "tools": ["grep"], "agent": "a", "position": 2, "lifetime_s": 4.5}
    assert read_spawns(lines(tmp_path / "s.jsonl", header, row), "jsonl") == [
        SpawnSample("s", SpawnSignal("find it", tools=("grep",), agent="a", position=2), 0.0, 4.5, 0)
    ]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "empty file"),
        ([{"format": "?"}], "field 'format'"),
        ([{"format": SPAWNS_FORMAT, "version": 2}], "field 'version'"),
        ([{"format": SPAWNS_FORMAT, "version": 1}], "holds no sub-agent"),
        ([{"format": SPAWNS_FORMAT, "version": 1}, {"session_id": "s"}], "s.jsonl:2: field 'lifetime_s'"),
        ([{"format": SPAWNS_FORMAT, "version": 1}, {"session_id": "s", "lifetime_s": 1, "tools": [1]}], "field 'tools'"),
        ([{"format": SPAWNS_FORMAT, "version": 1}, {"session_id": "s", "lifetime_s": 1, "context": 1}], "field 'context'"),
        ([{"format": SPAWNS_FORMAT, "version": 1}, {"session_id": "s", "lifetime_s": 1, "position": -1}], "field 'position'"),
        (["{"], "expected JSON"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read_spawns(lines(tmp_path / "s.jsonl", *rows), "jsonl")


def test_unknown_formats_are_named() -> None:
    with pytest.raises(TraceError, match=r"unknown format 'csv'; known are claude-code, kv-cache-tester, jsonl"):
        read_spawns("x", "csv")


@pytest.mark.skipif("VLLM_LIFETIME_TRACES" not in os.environ, reason="VLLM_LIFETIME_TRACES names no folder of traces")
@pytest.mark.parametrize(
    ("format", "path", "num_sessions", "num_spawns"),
    [
        ("kv-cache-tester", "kv-cache-tester/traces.tar.xz", 11, 45),
        ("claude-code", "claude-code-sessions/claude_code_struct.jsonl.xz", 53, 96),
    ],
)
def test_real_traces_are_whole(format: str, path: str, num_sessions: int, num_spawns: int) -> None:
    samples = read_spawns(Path(os.environ["VLLM_LIFETIME_TRACES"]) / path, format)
    assert len(samples) == num_spawns and len({sample.session_id for sample in samples}) == num_sessions
    assert all(sample.lifetime_s > 0 and sample.written_tokens >= 0 and sample.signal.agent for sample in samples)
