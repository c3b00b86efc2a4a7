# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime replay`: rows, table, plot, and sentences for what cannot be."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from vllm_lifetime.cli import replay
from vllm_lifetime.simulate.comparison import WORKLOAD_CAPACITY, ReplayRow, make_table
from vllm_lifetime.simulate.limits import MAX_CONCURRENCY
from vllm_lifetime.traces.workload_spec import load_workload

SMALL = ["--workload", "swebench", "--workflows", "12", "--concurrency", "4", "--capacity", "0.5,0.9"]


def run(*arguments: str, command: str = "replay") -> tuple[int, str]:
    app = typer.Typer()
    replay.add_to(app)
    result = CliRunner().invoke(app, [command, *arguments])
    return result.exit_code, result.output


def test_rows_table_and_plot(tmp_path: Path) -> None:
    rows_file, plot_file = tmp_path / "rows.json", tmp_path / "plot.png"
    code, output = run(
        *SMALL, "--policies", "lru,lifetime,belady", "--train-share", "0.5", "--json", str(rows_file), "--plot", str(plot_file)
    )
    assert code == 0, output
    rows = json.loads(rows_file.read_text())
    assert [(row["policy"], row["capacity_fraction"]) for row in rows] == [
        (policy, fraction) for fraction in (0.5, 0.9) for policy in ("lru", "lifetime", "belady")
    ]
    for row in rows:
        assert row.keys() >= {"policy", "capacity_fraction", "capacity_blocks", "hit_rate", "gap_closed", "sessions", "requests"}
        assert row["sessions"] == 6
        assert f"{row['hit_rate']:.2%}" in output
        assert row["gap_closed"] == {"lru": 0.0, "belady": 1.0}.get(row["policy"], row["gap_closed"])
    assert plot_file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give a trace and its --format, or a --workload"),
        (["no-such-file", "--format", "mooncake"], "no-such-file"),
        (["no-such-file", "--format", "no-such-format"], "unknown format 'no-such-format'"),
        (["--workload", "no-such-workload"], "unknown workload 'no-such-workload'; there are hover"),
        (["x", "--format", "mooncake", "--workload", "hover"], "give either"),
        ([*SMALL, "--policies", "lru,best"], "unknown policy 'best'; the policies are lru, "),
        ([*SMALL, "--capacity", "0.1,-1"], "a capacity must be a number above 0, as in 0.35; this is '-1'"),
        ([*SMALL, "--capacity", "much"], "this is 'much'"),
        ([*SMALL, "--capacity", "0.000001"], "less than one block"),
        ([*SMALL, "--capacity", ""], "this is ''"),
        ([*SMALL, "--capacity", "1e308"], "capacity 1e+308 is too large to be counted in blocks"),
        ([*SMALL, "--concurrency", "9" * 400], "'--concurrency'"),
        ([*SMALL, "--seed=-1"], "'--seed'"),
        ([*SMALL, "--plot", "rows.xyz"], "a plot cannot be written as '.xyz'"),
        ([*SMALL, "--plot", "rows", "--json", "rows"], "is named for two outputs"),
        ([*SMALL, "--train-share", "0.99"], "no session is left"),
        ([*SMALL, "--json", "no-such-folder/rows.json"], "there is no folder 'no-such-folder'"),
        ([*SMALL, "--predictor", "no-such-predictor"], "no-such-predictor"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arguments: list[str], sentence: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert sentence in output
    assert "Traceback" not in output


@pytest.mark.parametrize(("workload", "defaults"), [("swebench", "24 at a time"), ("hover", "72 at a time")])
def test_a_made_up_workload_has_its_own_capacity_and_concurrency(workload: str, defaults: str, tmp_path: Path) -> None:
    code, output = run("--workload", workload, "--workflows", "2", "--policies", "lru", "--json", str(tmp_path / "rows.json"))
    assert code == 0, output
    assert defaults in output
    (row,) = json.loads((tmp_path / "rows.json").read_text())
    assert row["capacity_fraction"] == {"swebench": 1.5, "hover": 1.55}[workload]


def test_the_workloads_own_values_are_those_that_help_names() -> None:
    for name, capacity in WORKLOAD_CAPACITY.items():
        short = name.partition("-")[0]
        assert f"{short} {capacity} at {load_workload(name).concurrency}" in replay.WORKLOAD_DEFAULTS


def test_a_sweep_over_concurrency_keeps_the_capacity(tmp_path: Path) -> None:
    rows_file, plot_file = tmp_path / "rows.json", tmp_path / "plot.png"
    code, output = run(
        *("--workload", "swebench", "--workflows", "12", "--training-workflows", "0", "--concurrency", "4", "--seeds", "1"),
        *("--vary", "concurrency", "--values", "1,4,12", "--policies", "lru,lifecycle"),
        *("--json", str(rows_file), "--plot", str(plot_file)),
        command="replay-sweep",
    )
    assert code == 0, output
    lru = [row["hit_rate"] for row in json.loads(rows_file.read_text()) if row["policy"] == "lru"]
    assert lru[0] > lru[1] > lru[2]
    assert all(f"{rate:.2%}" in output for rate in lru)
    assert plot_file.read_bytes().startswith(b"\x89PNG")


def test_a_sweep_over_nothing_that_is_known_is_refused() -> None:
    code, output = run("--vary", "speed", "--values", "1", command="replay-sweep")
    assert (code, "unknown parameter 'speed'" in output) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--vary", "horizon", "--values", "3,17"), "the horizon K must be at most 16, it is 17"),
        (("--vary", "concurrency", "--values", "100001"), "the concurrency must be at most 100000, it is 100001"),
        (("--vary", "noise", "--values", "0", "--capacity", "1e308"), "too large to be counted in blocks"),
        (("--vary", "noise", "--values", "0", "--concurrency", "100001"), "'--concurrency'"),
        (("--vary", "noise", "--values", "0", "--plot", "rows.xyz"), "a plot cannot be written as '.xyz'"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_it_runs(arguments: tuple[str, ...], sentence: str) -> None:
    code, output = run(*arguments, "--workflows", "4", "--training-workflows", "0", "--seeds", "1", command="replay-sweep")
    assert (code, sentence in " ".join(output.split())) == (2, True), output


def own_trace(path: Path, name: str, blocks: list[int]) -> Path:
    request = {"after": -1, "gap_s": 0, "service_s": 1, "input_tokens": 64, "output_tokens": 1}
    rows: list[dict[str, object]] = [
        {"format": "vllm-lifetime-trace", "version": 1, "name": name, "block_size_tokens": 16},
        {"session_id": "s"},
        {"session_id": "s", "blocks": blocks} | request,
        {"session_id": "s", "blocks": blocks} | request | {"after": 0},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["[/red]foo", ":smile:", r"a$\frac$_{"])
def test_a_traces_name_is_printed_and_drawn_as_it_is(tmp_path: Path, name: str) -> None:
    trace = own_trace(tmp_path / "t.jsonl", name, [0, 1, 2])
    code, output = run(str(trace), "--format", "jsonl", "--policies", "lru", "--plot", str(tmp_path / "p.svg"))
    assert code == 0, output
    assert f"{name}: 2 requests" in output
    assert b"<svg" in (tmp_path / "p.svg").read_bytes()


def test_a_plot_without_a_suffix_is_a_png_and_nothing_else_is_left(tmp_path: Path) -> None:
    trace = own_trace(tmp_path / "t.jsonl", "t", [0, 1, 2])
    code, output = run(str(trace), "--format", "jsonl", "--policies", "lru", "--plot", str(tmp_path / "rows"))
    assert code == 0, output
    assert (tmp_path / "rows").read_bytes().startswith(b"\x89PNG")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows", "t.jsonl"]


def test_a_trace_without_a_whole_block_is_said_to_have_none(tmp_path: Path) -> None:
    code, output = run(str(own_trace(tmp_path / "t.jsonl", "t", [])), "--format", "jsonl")
    assert (code, "no prompt has a whole block of 16 tokens" in output) == (2, True)


def test_policies_and_capacities_named_twice_are_taken_once(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    code, output = run(*SMALL[:-1], "0.5,0.50", "--policies", "lru,belady,lru", "--json", str(file))
    assert code == 0, output
    assert [row["policy"] for row in json.loads(file.read_text())] == ["lru", "belady"]


def test_no_share_of_a_gap_that_is_next_to_nothing_is_shown(tmp_path: Path) -> None:
    row = ReplayRow("lifetime", 0.5, 10, 0.5, 0.0009, 0.5, 1, 1, 3, 0)
    file = tmp_path / "table.txt"
    with file.open("w") as out:
        Console(file=out, width=100).print(make_table([row, replace(row, capacity_fraction=0.9, gap=0.002)]))
    lines = [line.split() for line in file.read_text().replace("│", " ").splitlines()]
    assert ["lifetime", "50.00%", "(-)", "50.00%", "(50%)"] in lines
    assert ["overcommitted", "3", "3"] in lines


def test_the_bounds_that_help_names_are_those_of_the_sweep() -> None:
    assert replay.MAX_CONCURRENCY == MAX_CONCURRENCY
