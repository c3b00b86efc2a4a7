# SPDX-License-Identifier: Apache-2.0
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.analysis.analysis_testing import ask, delegating, stripping, trace_of
from vllm_lifetime.cli import simulate
from vllm_lifetime.simulate.hbf.sweep import Setup
from vllm_lifetime.traces.jsonl import write_jsonl
from vllm_lifetime.traces.schema import Trace, TraceSession

app = typer.Typer()
simulate.add_to(app)


@app.command()
def other() -> None:
    """Without a second command, typer would make the group the program."""


def run(*arguments: str):
    return CliRunner().invoke(app, ["simulate", "hbf", *arguments])


SMALL = {"value = 512": "value = 40", "value = 36,": "value = 6,"}
"""What makes the package's device so small that its pool is full soon."""


def write_device(path: Path, changes: Mapping[str, str]) -> Path:
    """The package's device with other texts in it."""
    text = (resources.files("vllm_lifetime.simulate.hbf") / "data" / "rubin_hbf.toml").read_text("utf-8")
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def large(session: TraceSession) -> TraceSession:
    """With blocks of 500 tokens, and ten times the output."""
    requests = [replace(r, input_tokens=500 * r.input_tokens, output_tokens=10 * r.output_tokens) for r in session.requests]
    return replace(session, requests=tuple(requests))


@pytest.fixture
def own(tmp_path: Path) -> tuple[str, ...]:
    """Options for a small trace of one's own, with sessions of some 10,000 tokens, on a small device."""
    trace = tmp_path / "mine.jsonl"
    sessions = [stripping(), stripping("t", 5000), *(delegating(f"d{n}", 1000 * n) for n in range(6, 12))]
    write_jsonl(Trace("made-up", 500, tuple(large(session) for session in sessions)), trace)
    device = write_device(tmp_path / "small.toml", SMALL)
    return "--trace", str(trace), "--format", "jsonl", "--device", str(device), "--model", "qwen3-235b-a22b", "--slo", "tight"


@pytest.fixture
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some minutes of the node's time, not hours."""
    shorter = partial(Setup, admission_warmup_s=20.0, admission_measure_s=60.0, warmup_s=50.0, measure_s=100.0)
    monkeypatch.setattr("vllm_lifetime.simulate.hbf.sweep.Setup", shorter)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--policy", "lifo"), "unknown placement 'lifo'"),
        (("--config", "9/9"), "has no configuration '9/9'"),
        (("--model", "gpt"), "unknown model 'gpt'"),
        (("--slo", "fast"), "an SLO is tight or loose, or a number of milliseconds above 0"),
        (("--trace", "webshop"), "unknown trace 'webshop'"),
        (("--trace", "mine.jsonl"), "or give a file of your own and its --format"),
        (("--trace", "none.jsonl", "--format", "jsonl"), "none.jsonl"),
        (("--trace", "none.jsonl", "--format", "pcap"), "unknown format 'pcap'"),
        (("--pauses", "none"), "--pauses is for a trace of your own"),
        (("--trace", "x", "--format", "jsonl", "--pauses", "long"), "unknown pauses 'long'; there are trace, none, fixed, paper"),
        (("--advise", "--slo", "tight,loose"), "--advise takes one --trace, one --slo"),
        (("--advise", "--trace", "tau3,bfcl"), "--advise takes one --trace, one --slo"),
        (("--sweep", "weather"), "unknown sweep 'weather'"),
        (("--sweep", "ranking", "--advise"), "--sweep varies a made-up trace"),
        (("--device", "none.toml"), "cannot read 'none.toml'"),
        (("--growth", "0"), "growth must be a number above 0"),
        (("--policy", ","), "got none"),
        (
            ("--slo", "1", "--config", "4/4", "--model", "qwen3-235b-a22b"),
            "not even one session keeps its 99th percentile of 1 ms",
        ),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_sentence_and_leaves_no_folder(tmp_path, arguments, sentence):
    result = run("--out", str(tmp_path / "deep" / "out"), *arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"value = 512,": "value = -512,"}, "hbf_stack.capacity.value: Input should be greater than or equal to 0"),
        ({"value = 36,": "value = 0,"}, "hbm_stack.capacity: the value must be above 0"),
        ({"value = 36,": "value = 1,"}, "leaves no room for KV in '1/7' of rubin-hbf; take more stacks"),
        ({"[gpu]": "[gpu]\nsockets = 2"}, "there is no field 'gpu.sockets'; remove it, or correct its name"),
    ],
)
def test_a_device_that_cannot_be_is_said_in_a_sentence_and_leaves_no_folder(tmp_path, changes, sentence):
    device = write_device(tmp_path / "wrong.toml", changes)
    result = run("--out", str(tmp_path / "out"), "--device", str(device))
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sessions", "sentence"),
    [
        ((), "the trace has no requests; record a trace with turn ends or sub-agents"),
        ((TraceSession("a", (ask([1], 1, -1),)), TraceSession("b", (ask([2], 1, -1),))), "the trace has no boundaries"),
    ],
)
@pytest.mark.parametrize("extra", [(), ("--advise",)])
def test_a_trace_that_says_nothing_is_refused_and_leaves_no_folder(tmp_path, sessions, sentence, extra):
    trace = tmp_path / "mine.jsonl"
    write_jsonl(trace_of(*sessions), trace)
    result = run("--out", str(tmp_path / "out"), "--trace", str(trace), "--format", "jsonl", *extra)
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert sentence in result.output
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_a_file_or_holds_the_trace_as_a_result_is_refused(tmp_path, own):
    (tmp_path / "file").write_text("mine")
    for out in ("file", "file/deeper"):
        result = run("--out", str(tmp_path / out), *own)
        assert (result.exit_code, "give a folder as --out" in result.output) == (2, True)
    trace = Path(own[1]).rename(tmp_path / "results.json")
    result = run("--out", str(tmp_path), "--trace", str(trace), *own[2:])
    assert (result.exit_code, "would be overwritten" in result.output) == (2, True)
    assert trace.read_text().startswith("{")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that nobody can write to")
def test_a_folder_that_cannot_be_written_to_is_found_out_before_the_work(own):
    result = run("--out", "/proc/self", *own)
    assert (result.exit_code, "cannot write to '/proc/self'" in result.output) == (2, True)
    assert "cells" not in result.output


def test_a_folder_that_was_there_stays(tmp_path):
    (tmp_path / "out").mkdir()
    assert run("--out", str(tmp_path / "out"), "--slo", "1", "--config", "4/4", "--model", "qwen3-235b-a22b").exit_code == 2
    assert (tmp_path / "out").is_dir()


@pytest.mark.usefixtures("short_runs")
def test_a_trace_of_ones_own_is_run_with_each_kind_of_pauses(tmp_path, own):
    out = tmp_path / "out"
    result = run(
        "--out", str(out), *own, "--config", "2/6", "--policy", "lachesis", "--pauses", "trace,none", "--idle-cap-s", "10"
    )
    assert result.exit_code == 0, result.output
    assert "mine: 8 sessions, " in result.output
    rows = json.loads((out / "results.json").read_text())
    assert [row["trace"] for row in rows] == ["mine", "mine/none"]
    # Who never pauses takes more of the node.
    assert rows[0]["sessions"] > rows[1]["sessions"]
    assert {path.name for path in out.iterdir()} == {"results.json", "lifetimes.png", "writes-0.png", "writes-1.png"}


@pytest.mark.usefixtures("short_runs")
def test_advice_for_a_trace_of_ones_own(tmp_path, own):
    out = tmp_path / "out"
    result = run("--out", str(out), *own, "--advise", "--config", "2/6", "--policy", "lachesis", "--idle-cap-s", "1")
    assert result.exit_code == 0, result.output
    advice = json.loads((out / "advice.json").read_text())
    assert advice["workload"] in result.output
    (entry,) = advice["advice"]
    assert entry["sentence"] in result.output
    assert {pick["variant"] for pick in entry["picks"]} >= {"as it is", "SLO loose", "outputs x2", "endurance x0.1"}
    assert {path.name for path in out.iterdir()} == {"advice.json", "advice.png"}
    assert "cells" in result.output


def test_one_cell_of_a_device_of_ones_own_gives_rows_checks_and_plots(tmp_path):
    """The package's device with small stacks, so that its pool is full soon."""
    device = write_device(tmp_path / "small.toml", SMALL)
    out = tmp_path / "new"
    chosen = {"config": "2/6", "model": "qwen3-235b-a22b", "trace": "bfcl", "policy": "hbm_first,lachesis", "slo": "15"}
    result = run(
        "--out", str(out), "--device", str(device), *(part for name, value in chosen.items() for part in (f"--{name}", value))
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "results.json").read_text())
    assert [row["policy"] for row in rows] == ["hbm_first", "lachesis"]
    first, lachesis = rows
    assert lachesis["lifetime_years"] > first["lifetime_years"] > 0
    assert first["sessions"] == lachesis["sessions"]
    assert all(row["tpot_p99_s"] < 0.02 and row["is_settled"] for row in rows)
    for row in rows:
        assert sum(share for tiers in row["write_share"].values() for share in tiers.values()) == pytest.approx(1.0)
    checks = json.loads((out / "checks.json").read_text())
    assert {"id", "what", "target", "value", "pass", "is_direction", "hinges_on"} == set(checks[0])
    assert json.loads((out / "calibration.json").read_text())
    assert {path.name for path in out.iterdir()} >= {"lifetimes.png", "writes-0.png"}
    assert "lachesis" in result.output
