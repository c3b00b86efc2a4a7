# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime bench`: files, table, exit codes, and sentences for what cannot be."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from bench_testing import chain, make_trace
from scripted_server import ScriptedServer

from vllm_lifetime.cli import bench
from vllm_lifetime.traces.jsonl import write_jsonl


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    write_jsonl(make_trace(chain("one", 0), chain("two", 0, length=5)), path)
    return path


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as running:
        yield running


def run(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    bench.add_to(app)
    result = CliRunner().invoke(app, [*arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def test_files_and_table(trace_file: Path, server: ScriptedServer, tmp_path: Path) -> None:
    report_file, plot_file = tmp_path / "report.json", tmp_path / "plot.png"
    arguments = ["--base-url", f"{server.url}/v1", "--concurrency", "1", "--seed", "3"]
    code, output = run(str(trace_file), "--format", "jsonl", *arguments, "--json", str(report_file), "--plot", str(plot_file))
    assert code == 0, output
    report = json.loads(report_file.read_text())
    assert report["summary"]["requests_served"] == 8
    assert f"{report['summary']['hit_rate']:.2%}" in output and "8 of 8 sent, 0 failed" in output
    assert report["settings"]["seed"] == 3 and report["settings"]["concurrency"] == 1
    assert report["server"]["vllm"] == "0.32.0" and report["server"]["boundaries_sent"] == 2
    assert report["versions"]["vllm-lifetime"] and report["machine"]["cpus"]
    assert [(row["session_id"], row["index"]) for row in report["requests"]] == [
        *(("one", n) for n in range(3)),
        *(("two", n) for n in range(5)),
    ]
    for row in report["requests"]:
        assert len(row["chunk_s"]) == row["output_tokens"] == 3
        assert row["sent_s"] <= row["chunk_s"][0] <= row["chunk_s"][-1] <= row["ended_s"]
    assert report["server_counters"]["hit_rate"] == pytest.approx(report["summary"]["hit_rate"], abs=1e-6)
    assert report["stopped"] is None
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def test_a_failure_leaves_what_was_measured(trace_file: Path, server: ScriptedServer, tmp_path: Path) -> None:
    """Exit code 1, one sentence, and the report."""
    server.script = lambda n: "die" if n == 4 else "ok"
    report_file = tmp_path / "report.json"
    arguments = ["--base-url", server.url, "--concurrency", "1", "--json", str(report_file)]
    code, output = run(str(trace_file), "--format", "jsonl", *arguments)
    assert code == 1
    assert "Error: the run was stopped after" in output and "does not answer any more" in output
    report = json.loads(report_file.read_text())
    assert "does not answer any more" in report["stopped"]
    assert [row["error"] is None for row in report["requests"]] == [True] * 4 + [False]


def test_one_failed_request_is_an_error(trace_file: Path, server: ScriptedServer) -> None:
    server.script = lambda n: "500" if n == 1 else "ok"
    code, output = run(str(trace_file), "--format", "jsonl", "--base-url", server.url, "--concurrency", "1")
    assert code == 1
    assert (
        "Error: 1 of 7 requests failed, each with the rest of its session; the first, request 1 of session 'one', with: 500"
        in output
    )


def test_nothing_is_served_at_all(trace_file: Path, server: ScriptedServer, tmp_path: Path) -> None:
    """Figures of which nothing was measured are dashes and nulls, and the plot is empty."""
    server.script = lambda _: "500"
    report_file = tmp_path / "report.json"
    code, output = run(
        *(str(trace_file), "--format", "jsonl", "--base-url", server.url),
        *("--json", str(report_file), "--plot", str(tmp_path / "plot.png")),
    )
    assert code == 1
    assert "0 of 2 sent, 2 failed" in output
    summary = json.loads(report_file.read_text())["summary"]
    assert summary["ttft_p99_s"] is None and summary["hit_rate"] is None and summary["sessions_failed"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_loses_the_results(trace_file: Path, tmp_path: Path, number: signal.Signals) -> None:
    report_file = tmp_path / "report.json"
    program = "import typer; from vllm_lifetime.cli import bench; app = typer.Typer(); bench.add_to(app); app()"
    with ScriptedServer(lambda n: "hang" if n >= 4 else "ok") as server:
        arguments = [str(trace_file), "--format", "jsonl", "--base-url", server.url, "--json", str(report_file)]
        arguments += ["--concurrency", "1"]  # the fifth request is sent when the four before it have been served
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        deadline_s = time.monotonic() + 30
        while len(server.calls) < 5:
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "it was interrupted" in errors and "Traceback" not in errors
    assert sum(row["ended_s"] is not None for row in json.loads(report_file.read_text())["requests"]) == 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such-file", "--format", "mooncake"], "no-such-file"),
        (["{trace}", "--format", "no-such-format"], "unknown format 'no-such-format'"),
        (["{trace}", "--format", "jsonl", "--base-url", "ftp://host"], "not a URL of a server"),
        (
            ["{trace}", "--format", "jsonl", "--base-url", "http://127.0.0.1:1"],
            "http://127.0.0.1:1 does not answer: ConnectError",
        ),
        (["{trace}", "--format", "jsonl", "--vocabulary-size", "17"], "leave fewer than two token ids"),
        (["{trace}", "--format", "jsonl", "--tokens-per-block", "1000", "--base-url", "{url}"], "Try --tokens-per-block 160"),
        (["{trace}", "--format", "jsonl", "--model", "other", "--base-url", "{url}"], "does not serve 'other'; it serves model"),
        (["{trace}", "--format", "jsonl", "--json", "no-such-folder/report.json"], "there is no folder 'no-such-folder'"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(
    arguments: list[str], sentence: str, trace_file: Path, server: ScriptedServer
) -> None:
    code, output = run(*(argument.format(trace=trace_file, url=server.url) for argument in arguments))
    assert code == 2
    assert sentence in output and output.startswith("Error: ") and output.count("\n") == 1
    assert not server.calls, "something was sent"


def test_a_table_that_cannot_be_printed_took_the_report_along(
    trace_file: Path, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard output is full; then the report cannot be written, and the plot is drawn all the same."""

    def full(width: int | None = None) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench, "results_console", full)
    arguments = [str(trace_file), "--format", "jsonl", "--base-url", server.url]
    code, output = run(*arguments, "--json", str(tmp_path / "a.json"), "--time-limit-s", "inf")
    assert code == 1 and "the table could not be printed" in output and "No space left" in output

    def refuse(text: str) -> None:
        raise ValueError(text)

    report = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    assert report["summary"]["requests_served"] == 8 and report["settings"]["time_limit_s"] is None
    plot_file = tmp_path / "b.png"
    code, output = run(*arguments, "--json", "/dev/full", "--plot", str(plot_file))
    assert code == 1 and "the report could not be written to '/dev/full'" in output
    assert plot_file.stat().st_size > 5000


@pytest.mark.parametrize("name", ["report", "report.xyz", "report.json"])
def test_a_plot_of_another_name_was_lost(trace_file: Path, server: ScriptedServer, tmp_path: Path, name: str) -> None:
    code, output = run(str(trace_file), "--format", "jsonl", "--base-url", server.url, "--plot", str(tmp_path / name))
    assert code == 2 and ".png" in output and not server.calls
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.jsonl"]


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [("--tokens-per-block", "100000000000", "no more than"), ("--vocabulary-size", "1" + "0" * 24, "there can be")],
)
def test_a_scale_beyond_all_memory_was_a_traceback(
    trace_file: Path, server: ScriptedServer, option: str, value: str, told: str
) -> None:
    server.max_model_len = None
    code, output = run(str(trace_file), "--format", "jsonl", "--base-url", server.url, option, value)
    assert code == 2 and told in " ".join(output.split()) and not server.calls
