# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime replay`: rows, table, plot, and sentences for what cannot be."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from vllm_lifetime.cli import replay
from vllm_lifetime.simulate.comparison import WORKLOAD_CAPACITY
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
