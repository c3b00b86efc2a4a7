# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime record`, as a user runs it."""

from pathlib import Path

import typer
from typer.testing import CliRunner

from vllm_lifetime.cli import record
from vllm_lifetime.traces.generate import generate_workload
from vllm_lifetime.traces.jsonl import write_jsonl
from vllm_lifetime.traces.read import read_trace

app = typer.Typer()
record.add_to(app)
app.command("other")(lambda: None)  # a second command, so that the first keeps its name


def test_convert_and_inspect(tmp_path: Path) -> None:
    write_jsonl(generate_workload("hover-langchain", 3), tmp_path / "a.jsonl")
    runner = CliRunner()
    result = runner.invoke(app, ["record", "convert", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    result = runner.invoke(app, ["record", "inspect", str(tmp_path / "b.jsonl")])
    assert result.exit_code == 0, result.output
    requests = sum(len(s.requests) for s in read_trace(tmp_path / "b.jsonl", "jsonl").sessions)
    assert f"hover-langchain: 3 sessions, {requests} requests, 64 tokens a block" in result.output
    assert "tools: search" in result.output


def test_bad_input_is_one_line_and_exit_status_2(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    result = CliRunner().invoke(app, ["record", "inspect", str(tmp_path / "a.jsonl")])
    assert result.exit_code == 2
    assert "field 'format'" in result.output
    assert "Traceback" not in result.output


def test_the_input_is_not_overwritten(tmp_path: Path) -> None:
    write_jsonl(generate_workload("hover-langchain", 1), tmp_path / "a.jsonl")
    result = CliRunner().invoke(app, ["record", "convert", str(tmp_path / "a.jsonl"), str(tmp_path / "a.jsonl")])
    assert result.exit_code == 2
    assert "is the file that is read" in result.output
