# SPDX-License-Identifier: Apache-2.0
"""Public trace formats, on small made-up samples."""

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_lifetime.traces.read import TraceError, read_trace
from vllm_lifetime.traces.schema import Trace


def kv_request(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
    request = {"t": t, "type": "n", "model": "m", "in": len(ids) * 64 + 3, "out": 60, "hash_ids": ids, "stop": "tool_use"}
    return request | {"api_time": 2.0} | more


def kv_session(requests: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"id": "a", "block_size": 64, "tool_tokens": 130, "system_tokens": 70, "requests": requests} | more


def read_kv(path: Path, *sessions: dict[str, Any]) -> Trace:
    """As one archive, members in order."""
    file = path / "traces.tar.xz"
    with tarfile.open(file, "w:xz") as archive:
        for index, session in enumerate(sessions):
            data = json.dumps(session).encode()
            member = tarfile.TarInfo(f"{index}.json")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return read_trace(file, "kv-cache-tester")


def test_a_longer_prompt_shares_the_memory_of_the_one_before(tmp_path: Path) -> None:
    ids = list(range(1, 9))
    requests = (
        read_kv(tmp_path, kv_session([kv_request(0, ids[:5]), kv_request(9, ids), kv_request(20, ids[:3])])).sessions[0].requests
    )
    assert [len(r.blocks) for r in requests] == [5, 8, 3]
    assert requests[1].blocks[:5].tolist() == requests[0].blocks.tolist()
    assert all(np.shares_memory(requests[1].blocks, r.blocks) for r in requests)


def test_an_id_that_only_begins_with_the_digits_of_another_is_another(tmp_path: Path) -> None:
    first, second = read_kv(tmp_path, kv_session([kv_request(0, [7, 1]), kv_request(9, [7, 12])])).sessions[0].requests
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]


def test_sessions_share_tools_and_system_prompt_where_they_agree(tmp_path: Path) -> None:
    sessions = [
        kv_session([kv_request(0, [1, 2, 3, 4, 5])]),
        kv_session([kv_request(0, [9, 8, 7, 6])], id="b"),
        kv_session([kv_request(0, [1, 2, 3, 4])], id="c", system_tokens=140),
        kv_session([kv_request(0, [1, 2, 3, 4], model="n")], id="d"),
    ]
    a, b, c, d = (s.requests[0].blocks for s in read_kv(tmp_path, *sessions).sessions)
    assert a[:3].tolist() == b[:3].tolist()
    assert a[3] != b[3]
    assert c[:2].tolist() == a[:2].tolist()  # the tools: 130 tokens hold two whole blocks
    assert c[2] != a[2]
    assert not set(a.tolist()) & set(d.tolist())


def test_pauses_and_reasons(tmp_path: Path) -> None:
    requests = [
        kv_request(0, [1, 2, 3], think_time=0.0),
        kv_request(10, [1, 2, 3, 4], think_time=7.5, stop="end_turn"),
        kv_request(30, [1, 2, 3, 4], stop=""),
    ]
    del requests[2]["api_time"]
    first, second, third = read_kv(tmp_path, kv_session(requests)).sessions[0].requests
    assert (first.after, second.after, third.after) == (-1, 0, 1)
    assert (second.gap_s, third.gap_s) == (7.5, 18.0)
    assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("tool_calls", "stop", None)
    assert (first.ends_turn, second.ends_turn) == (False, True)
    assert third.service_s == pytest.approx(2.3 + 60 / 60)


def test_the_parent_waits_for_the_sub_agent_that_returned_last(tmp_path: Path) -> None:
    def sub(name: str, returns_s: float, seconds: float, ids: list[int]) -> dict[str, Any]:
        more = {
            "agent_id": name,
            "subagent_type": "Explore",
            "duration_ms": seconds * 1000,
            "tool_tokens": 64,
            "system_tokens": 0,
        }
        return {
            "type": "subagent",
            "t": returns_s,
            **more,
            "requests": [kv_request(0, ids), kv_request(seconds - 2, [*ids, ids[-1] + 1])],
        }

    session = kv_session([kv_request(0, [1, 2, 3]), sub("x", 12, 9, [50]), sub("y", 23, 20, [60]), kv_request(25, [1, 2, 3, 4])])
    requests = read_kv(tmp_path, session).sessions[0].requests
    by_agent = {name: [i for i, r in enumerate(requests) if r.agent_id == name] for name in ("main", "x", "y")}
    last = requests[by_agent["main"][1]]
    assert last.after == by_agent["y"][1]
    assert last.gap_s == pytest.approx(2.0)
    for name in ("x", "y"):
        first, second = (requests[i] for i in by_agent[name])
        assert (first.after, first.parent_agent_id, first.agent) == (0, "main", "Explore")
        assert first.gap_s == pytest.approx(1.0)
        assert (first.ends_agent, second.ends_agent) == (False, True)


@pytest.mark.parametrize(("comes_back", "is_compaction"), [(False, True), (True, False)])
def test_a_compaction_is_a_context_that_shrank_for_good(tmp_path: Path, comes_back: bool, is_compaction: bool) -> None:
    old, new = list(range(1, 21)), [1, 2, 3, 30, 31]
    requests = [kv_request(0, old), kv_request(10, new), kv_request(20, [*old, 21] if comes_back else [*new, 32])]
    assert [r.compacts for r in read_kv(tmp_path, kv_session(requests)).sessions[0].requests] == [False, is_compaction, False]


@pytest.mark.parametrize(
    ("session", "says"),
    [
        (kv_session([kv_request(0, [1]) | {"hash_ids": ["x"]}]), "requests[0]: field 'hash_ids'"),
        (kv_session([kv_request(0, [1]) | {"hash_ids": [-5]}]), "requests[0]: field 'hash_ids'"),
        (kv_session([kv_request(0, [1]) | {"hash_ids": 0}]), "requests[0]: field 'hash_ids'"),
        (kv_session([kv_request(0, [1, 2, 3]), kv_request(9, [2, 1])]), "different blocks"),
        (kv_session([kv_request(-1, [1])]), "field 't'"),
        (kv_session([], block_size=0), "field 'block_size'"),
        (kv_session([]) | {"requests": 3}, "field 'requests': expected a list, found 3"),
    ],
)
def test_an_error_names_member_and_field(tmp_path: Path, session: dict[str, Any], says: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_kv(tmp_path, session)
    assert says in str(caught.value)
    assert "traces.tar.xz:0.json" in str(caught.value)


def test_a_folder_of_sessions(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(kv_session([kv_request(0, [1])])))
    assert len(read_trace(tmp_path, "kv-cache-tester").sessions) == 1


def test_endless_token_counts_are_refused_and_take_no_memory(tmp_path: Path) -> None:
    says = "a prompt must have fewer than 16777216 blocks"
    with pytest.raises(TraceError, match=f"fields 'tool_tokens' and 'system_tokens': {says}"):
        read_kv(tmp_path, kv_session([kv_request(0, [1])], tool_tokens=10**12))
    row = {"sid": "s", "events": [llm(3.0, 4.0, 0, 1 << 52)]}
    with pytest.raises(TraceError, match=f"field 'usage': {says}"):
        read_trace(lines(tmp_path / "c.jsonl", row), "claude-code")
    row = {"sid": "s", "events": [{"kind": "llm", "t": 1.0, "in": 1 << 52, "out": 1}]}
    with pytest.raises(TraceError, match=f"field 'in': {says}"):
        read_trace(lines(tmp_path / "c.jsonl", row), "codex")
    row = {"task": "t", "seq": ["a", "b"], "prompt_tokens": [1 << 52], "completion_tokens": [4], "desc_chars": 4}
    with pytest.raises(TraceError, match=says):
        read_trace(lines(tmp_path / "m.jsonl", row), "mapcoder")


def test_a_file_that_is_no_archive_says_to_check_the_format(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"as kv-cache-tester has; check the file and its --format"):
        read_trace(lines(tmp_path / "m.jsonl", {"timestamp": 0}), "kv-cache-tester")


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_mooncake_requests_name_no_session(tmp_path: Path) -> None:
    row = {"timestamp": 1500, "input_length": 1030, "output_length": 30, "hash_ids": [4, 5, 6]}
    (session,) = read_trace(lines(tmp_path / "m.jsonl", row), "mooncake").sessions
    assert (session.names_session, session.arrival_s) == (False, 1.5)
    assert session.requests[0].blocks.tolist() == [4, 5]
    with pytest.raises(TraceError, match=r"m.jsonl:1: field 'hash_ids': expected one per 512 of 1030 tokens, found 1"):
        read_trace(lines(tmp_path / "m.jsonl", row | {"hash_ids": [4]}), "mooncake")


def test_mapcoder_prompts_add_up_to_the_logged_total(tmp_path: Path) -> None:
    row = {
        "task": "t",
        "seq": ["planner", "coder", "debugger", "debugger"],
        "prompt_tokens": [4000],
        "completion_tokens": [400],
        "desc_chars": 400,
    }
    first, second = read_trace(lines(tmp_path / "m.jsonl", row, row), "mapcoder").sessions
    assert sum(r.input_tokens for r in first.requests) == pytest.approx(4000, abs=6)
    assert [r.after for r in first.requests] == [-1, 0, 1, 2]
    planner, coder, debugger, again = (r.blocks.tolist() for r in first.requests)
    assert again[: len(debugger)] == debugger
    assert not set(planner) & set(coder)
    assert set(planner) & set(second.requests[0].blocks.tolist())  # the planner's prefix
    with pytest.raises(TraceError, match="'seq'"):
        read_trace(lines(tmp_path / "m.jsonl", row | {"seq": []}), "mapcoder")


def llm(t0: float, t1: float, cached: int, new: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    usage = {"input_tokens": new, "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0, "output_tokens": 1}
    return {"kind": "llm", "t0": t0, "t1": t1, "model": "m", "blocks": list(blocks), "usage": usage}


def test_claude_code_contexts_grow_and_are_compacted(tmp_path: Path) -> None:
    events = [
        {"kind": "user", "t": 0.0, "chars": 9},
        llm(3.0, 4.0, 640, 640, {"type": "tool_use", "chars": 400, "tool": "Task", "id": "u1", "subagent_type": "Explore"}),
        {"kind": "tool_result", "t": 20.0, "chars": 5},
        llm(22.0, 23.0, 1280, 640, {"type": "text", "chars": 80}),
        {"kind": "compact_boundary", "t": 30.0, "pre": 2000},
        {"kind": "user", "t": 31.0, "chars": 9},
        llm(32.0, 33.0, 640, 128, {"type": "text", "chars": 80}),
    ]
    agent = {"parent_tool": "u1", "t0": 5.0, "t1": 19.0, "ev": [{"kind": "user", "t": 5.0}, llm(6.0, 19.0, 0, 640)]}
    row = {"sid": "s", "cc": "2", "events": events, "subagents": {"x": agent}}
    first, sub, second, third = read_trace(lines(tmp_path / "c.jsonl", row), "claude-code").sessions[0].requests
    assert (sub.agent, sub.agent_id, sub.after, sub.ends_agent) == ("Explore", "x", 0, True)
    assert (first.tool, first.finish_reason, first.output_tokens) == ("Task", "tool_calls", 100)
    assert second.blocks[:20].tolist() == first.blocks.tolist()
    assert (second.after, second.gap_s, second.ends_turn) == (1, pytest.approx(1.0), True)
    assert third.compacts
    assert third.blocks[:10].tolist() == first.blocks[:10].tolist()
    assert not set(third.blocks[10:].tolist()) & set(second.blocks.tolist())
    with pytest.raises(TraceError, match=r"c.jsonl:1, events\[0\]: field 'kind'"):
        read_trace(lines(tmp_path / "c.jsonl", row | {"events": [{"kind": "?"}]}), "claude-code")


real = pytest.mark.skipif("VLLM_LIFETIME_TRACES" not in os.environ, reason="VLLM_LIFETIME_TRACES names no folder of traces")


@real
@pytest.mark.parametrize(
    ("format", "path", "num_sessions", "num_requests"),
    [
        ("kv-cache-tester", "kv-cache-tester/traces.tar.xz", 431, 28_725),
        ("claude-code", "claude-code-sessions/claude_code_struct.jsonl.xz", 166, 11_913),
        ("mooncake", "mooncake-fast25/conversation_trace.jsonl.xz", 6_015, 6_015),
        ("mapcoder", "mapcoder/mapcoder_workflows.jsonl.xz", 1_696, 24_263),
    ],
)
def test_real_traces_are_whole(format: str, path: str, num_sessions: int, num_requests: int) -> None:
    trace = read_trace(Path(os.environ["VLLM_LIFETIME_TRACES"]) / path, format)
    assert len(trace.sessions) == num_sessions
    assert sum(len(s.requests) for s in trace.sessions) == num_requests
    for session in trace.sessions:
        for index, request in enumerate(session.requests):
            assert -1 <= request.after < index
            assert request.gap_s >= 0
            assert request.service_s >= 0
            assert len(request.blocks) <= request.input_tokens // trace.block_size_tokens
