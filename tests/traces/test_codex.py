# SPDX-License-Identifier: Apache-2.0
"""Codex sessions, known by structure only, on a small made-up sample."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_lifetime.analysis.reasoning import read_reasoning
from vllm_lifetime.traces.read import TraceError, read_trace
from vllm_lifetime.traces.schema import TraceRequest


def event(kind: str, t: float, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "t": t} | more


def llm(t: float, tokens: int, cached: int, out: int, reasoning: int = 0) -> dict[str, Any]:
    return event("llm", t, cached=cached, out=out, reasoning=reasoning) | {"in": tokens}


EVENTS = [
    event("task_started", 0.0),
    event("user", 1.0, chars=9),
    event("reasoning", 3.0, enc_chars=8),
    event("tool_call", 4.0, tool="exec", chars=40),
    event("tool_result", 9.0, tool="exec", lat=5.0, chars=400),
    llm(9.0, 640, 256, 50, 30),
    event("reasoning", 12.0, enc_chars=8),
    event("agent_message", 13.0, chars=80),
    llm(13.1, 1280, 640, 20, 5),
    event("task_complete", 13.2),
    event("task_started", 60.0),
    event("user", 63.0, chars=9),
    event("agent_message", 65.0, chars=80),
    llm(65.0, 1000, 640, 7),
    event("context_compacted", 66.0),
    event("agent_message", 67.0, chars=80),
    event("user", 68.0, chars=9),
    llm(70.0, 400, 200, 3),
]


def requests_of(tmp_path: Path, *events: dict[str, Any]) -> list[TraceRequest]:
    (session,) = read_trace(write(tmp_path, *events), "codex").sessions
    return list(session.requests)


def write(tmp_path: Path, *events: dict[str, Any]) -> Path:
    path = tmp_path / "codex.jsonl"
    path.write_text(json.dumps({"sid": "s", "cli": "1", "events": list(events)}) + "\n")
    return path


def test_a_call_runs_from_what_it_answers_to_the_last_that_it_writes(tmp_path: Path) -> None:
    first, second, third, fourth = requests_of(tmp_path, *EVENTS)
    assert (first.after, first.gap_s, first.service_s) == (-1, 0.0, 3.0)
    assert (second.after, second.gap_s, second.service_s) == (0, 5.0, 4.0)
    assert (third.gap_s, third.service_s) == (50.0, 2.0)
    assert (fourth.gap_s, fourth.service_s) == (0.0, 2.0)
    assert (first.tool, first.finish_reason, second.tool, second.finish_reason) == ("exec", "tool_calls", None, "stop")
    assert [r.output_tokens for r in (first, second, third, fourth)] == [50, 20, 7, 3]


def test_turns_end_when_the_task_does_or_a_message_comes(tmp_path: Path) -> None:
    assert [r.ends_turn for r in requests_of(tmp_path, *EVENTS)] == [False, True, False, True]
    assert [r.ends_turn for r in requests_of(tmp_path, *EVENTS[:9], *EVENTS[11:14])] == [False, True, False]
    assert [r.ends_turn for r in requests_of(tmp_path, *EVENTS[:9], event("turn_aborted", 14.0))] == [False, True]


def test_contexts_grow_shrink_and_are_compacted(tmp_path: Path) -> None:
    first, second, third, fourth = (r.blocks.tolist() for r in requests_of(tmp_path, *EVENTS))
    assert (len(first), len(second), len(third), len(fourth)) == (10, 20, 15, 6)
    assert second[:10] == first
    # It shrank, so what the provider had is kept: 640 tokens.
    assert third[:10] == second[:10]
    assert not set(third[10:]) & set(second)
    assert fourth[:3] == third[:3]
    assert not set(fourth[3:]) & set(third)
    assert [r.compacts for r in requests_of(tmp_path, *EVENTS)] == [False, False, False, True]


def test_a_compacted_context_is_another_one_even_if_it_is_longer(tmp_path: Path) -> None:
    longer = [*EVENTS[:-1], llm(70.0, 1920, 640, 3)]
    *_, third, fourth = (r.blocks.tolist() for r in requests_of(tmp_path, *longer))
    assert len(fourth) == 30
    assert fourth[:10] == third[:10]
    assert not set(fourth[10:]) & set(third)


def test_sessions_of_one_version_share_what_the_first_call_had_cached(tmp_path: Path) -> None:
    rows = [{"sid": name, "cli": cli, "events": EVENTS} for name, cli in (("a", "1"), ("b", "1"), ("c", "2"))]
    path = tmp_path / "codex.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    a, b, c = (session.requests[0].blocks.tolist() for session in read_trace(path, "codex").sessions)
    assert a[:4] == b[:4]
    assert a[4] != b[4]
    assert not set(a) & set(c)


def test_reasoning_is_counted_in_tokens_by_request(tmp_path: Path) -> None:
    assert read_reasoning(write(tmp_path, *EVENTS), "codex") == {"s": [(30, 50), (5, 20), (0, 7), (0, 3)]}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([event("user", -1.0)], r"events\[0\]: field 't': expected a number of at least 0"),
        ([event("dance", 1.0)], r"events\[0\]: field 'kind': expected one of llm, "),
        ([llm(1.0, 10, 20, 1)], r"field 'cached': expected at most `in`, which is 10, found 20"),
        ([llm(1.0, 10, 2, -1)], "field 'out'"),
        ([event("user", 1.0)], "expected at least one session with an llm event, found none"),
    ],
)
def test_an_error_names_line_and_field(tmp_path: Path, events: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(TraceError, match=says):
        requests_of(tmp_path, *events)


@pytest.mark.skipif("VLLM_LIFETIME_TRACES" not in os.environ, reason="VLLM_LIFETIME_TRACES names no folder of traces")
def test_real_sessions_are_whole() -> None:
    path = Path(os.environ["VLLM_LIFETIME_TRACES"]) / "claude-code-sessions/codex_struct.jsonl.xz"
    trace = read_trace(path, "codex")
    assert [len(trace.sessions), sum(len(session.requests) for session in trace.sessions)] == [11, 1035]
    outputs = read_reasoning(path, "codex")
    for session in trace.sessions:
        assert [total for _, total in outputs[session.session_id]] == [request.output_tokens for request in session.requests]
