# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime analyze`: tables, files, and sentences for what cannot be."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.analysis.analysis_testing import delegating, made_up_trace, stripping, trace_of
from vllm_lifetime.cli import analyze
from vllm_lifetime.traces.jsonl import write_jsonl
from vllm_lifetime.traces.schema import Trace


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    analyze.add_to(app)
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def write(trace: Trace, tmp_path: Path) -> str:
    write_jsonl(trace, tmp_path / "trace.jsonl")
    return str(tmp_path / "trace.jsonl")


def test_tables_report_segments_and_plots(tmp_path: Path) -> None:
    report_file, out = tmp_path / "report.json", tmp_path / "made" / "out"
    code, output = run(write(made_up_trace(), tmp_path), "--format", "jsonl", "--json", str(report_file), "--out", str(out))
    assert code == 0, output
    report = json.loads(report_file.read_text())
    assert report["structural"]["written_share"] == pytest.approx(90 / 252)
    assert report["temporal"]["comparison"]["separability"] == 0.5
    assert report["verdict"] in output
    for expected in ("reasoning_laden", "35.7 %", "2 of 2", "66-83 %", "0.90-1.00"):
        assert expected in output
    segments = [json.loads(line) for line in (out / "segments.jsonl").read_text().splitlines()]
    assert len(segments) == 12
    laden = next(segment for segment in segments if segment["segment_class"] == "reasoning_laden")
    assert (laden["written_tokens"], laden["closed_by"], laden["closed_s"]) == (12, "turn_end", 7.0)
    assert laden["lifetime_s"] == pytest.approx(7.8)
    # Too few workers for a rank at spawn: three of the four figures.
    assert sorted(file.name for file in out.glob("*.png")) == ["inter_worker.png", "structural.png", "temporal.png"]
    for file in out.glob("*.png"):
        assert file.read_bytes().startswith(b"\x89PNG")


def test_a_rank_at_spawn_is_drawn_with_enough_workers(tmp_path: Path) -> None:
    sessions = [delegating(f"d{number}", 10_000 * (number + 1), rounds=1 + number % 5) for number in range(20)]
    code, output = run(write(trace_of(*sessions), tmp_path), "--format", "jsonl", "--out", str(tmp_path))
    assert code == 0, output
    assert (tmp_path / "spawn_rank.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "temporal.png").exists()
    assert "No temporal axis" in output


def test_delays_as_the_paper_draws_them(tmp_path: Path) -> None:
    arguments = (write(made_up_trace(), tmp_path), "--format", "jsonl", "--delays", "paper", "--json", str(tmp_path / "r.json"))
    lifetimes = []
    for seed in ("1", "1", "2"):
        assert run(*arguments, "--seed", seed)[0] == 0
        lifetimes.append(json.loads((tmp_path / "r.json").read_text())["classes"][1]["median_lifetime_s"])
    assert lifetimes[0] == lifetimes[1] != lifetimes[2]


def claude_code(tmp_path: Path) -> str:
    def llm(t: float, cached: int, new: int, *blocks: dict[str, Any]) -> dict[str, Any]:
        usage = {"input_tokens": new, "cache_read_input_tokens": cached, "output_tokens": 1}
        return {"kind": "llm", "t0": t, "t1": t + 1, "model": "m", "blocks": list(blocks), "usage": usage}

    def session(name: str) -> dict[str, Any]:
        events = [
            {"kind": "user", "t": 0.0, "chars": 9},
            llm(1.0, 0, 640, {"type": "thinking", "chars": 400}, {"type": "text", "chars": 400}),
            {"kind": "user", "t": 20.0, "chars": 9},
            llm(21.0, 640, 640, {"type": "text", "chars": 80}),
        ]
        return {"sid": name, "cc": name, "events": events}

    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(session(name)) + "\n" for name in "ab"))
    return str(path)


def test_a_trace_that_tells_reasoning_says_what_stripping_would_do(tmp_path: Path) -> None:
    code, output = run(claude_code(tmp_path), "--format", "claude-code")
    assert code == 0, output
    # A turn writes 200 tokens, 100 of them reasoning; the next begins with 640 - 200 of its own, and then with 100 more.
    assert f"{200 / (200 + 440 + 100):.1%} of what turns write would be reasoning-laden" in output
    assert f"{1 - 540 / 640:.1%} less would be written that outlives its turn, and {100 / 640:.1%} more in all" in output
    assert "estimated from characters" in output


def test_a_recording_of_a_live_server(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"format": "vllm-lifetime-recording", "version": 1, "block_size_tokens": 10}]

    def call(session: str, number: int, at_s: float, blocks: list[int], **agent: str) -> None:
        request: dict[str, Any] = {"request_id": f"{session}{number}"}
        start = {"kind": "start", "at_s": at_s, "session_id": session, "blocks": blocks, "input_tokens": 10 * len(blocks)}
        lines.append(request | start | agent)
        lines.append(request | {"kind": "finish", "at_s": at_s + 1, "output_tokens": 10, "finish_reason": "stop"})

    for base, session in ((0, "a"), (100, "b")):
        call(session, 0, base + 1.0, [base, base + 1], agent="lead", agent_id="l")
        call(session, 1, base + 3.0, [base + 50], agent="judge", agent_id="j", parent_agent_id="l")
        lines.append({"kind": "boundary", "event": "subagent_return", "session_id": session, "agent_id": "j", "at_s": base + 4.0})
        call(session, 2, base + 5.0, [base, base + 1, base + 2, base + 3], agent="lead", agent_id="l")
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, output = run(str(path), "--format", "jsonl", "--json", str(tmp_path / "r.json"))
    assert code == 0, output
    tokens = {row["segment_class"]: row["written_tokens"] for row in json.loads((tmp_path / "r.json").read_text())["classes"]}
    # A lead's prompt of 20, its answer, 10 more, its answer; a judge's prompt and its answer; twice.
    assert tokens == {"lead": 2 * (20 + 10 + 10 + 10), "reviewer": 2 * (10 + 10)}
    assert "No temporal axis" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such-file", "--format", "codex"], "no-such-file: cannot be read"),
        (["{trace}", "--format", "no-such-format"], "unknown format 'no-such-format'; known are kv-cache-tester"),
        (["{trace}", "--format", "jsonl", "--delays", "guess"], "--delays is `trace` or `paper`; this is 'guess'"),
        (["{trace}", "--format", "jsonl", "--json", "no-such-folder/r.json"], "there is no folder 'no-such-folder'"),
        (["{one}", "--format", "jsonl"], "the trace has one session; lifetimes are compared over at least two"),
        (["{header}", "--format", "jsonl"], "the trace has no requests"),
        (["{empty}", "--format", "jsonl"], "expected a header line, found an empty file"),
        (["{empty}", "--format", "codex"], "expected at least one session with an llm event, found none"),
        (["{negative}", "--format", "jsonl"], "field 'gap_s': expected a number of at least 0, found -5.0"),
        (["{mooncake}", "--format", "mooncake"], "the trace has no boundaries to measure lifetimes by"),
        (["{mapcoder}", "--format", "mapcoder"], "the trace has no boundaries to measure lifetimes by"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.jsonl" for name in ("trace", "one", "header", "empty", "negative", "mooncake", "mapcoder")}
    write_jsonl(made_up_trace(), files["trace"])
    write_jsonl(trace_of(stripping()), files["one"])
    write_jsonl(trace_of(), files["header"])
    files["empty"].write_text("")
    files["negative"].write_text(files["one"].read_text().replace('"gap_s":5.0', '"gap_s":-5.0'))
    call = {"timestamp": 1, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    files["mooncake"].write_text(2 * (json.dumps(call) + "\n"))
    workflow = {"seq": ["planner", "coder"], "prompt_tokens": [900], "completion_tokens": [90], "desc_chars": 40}
    files["mapcoder"].write_text(2 * (json.dumps(workflow) + "\n"))
    code, output = run(*(argument.format(**files) for argument in arguments))
    assert code == 2
    assert sentence in output
    assert len(output.strip().splitlines()) == 1, output
    assert output.startswith("Error: ")
