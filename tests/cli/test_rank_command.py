# SPDX-License-Identifier: Apache-2.0
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

pytest.importorskip("sklearn")

from vllm_lifetime.cli import rank
from vllm_lifetime.prediction import rank_evaluation
from vllm_lifetime.prediction.lifetime_rank import LifetimeRank, load_base
from vllm_lifetime.traces.generate_spawns import generate_spawns
from vllm_lifetime.traces.spawn_schema import SpawnSignal
from vllm_lifetime.traces.spawns import SPAWNS_FORMAT


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    rank.add_to(app)
    return CliRunner().invoke(app, ["rank", *map(str, arguments)])


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_evaluation, "RESAMPLES", 10)


@pytest.fixture
def spawns(tmp_path: Path) -> Path:
    rows = [{"format": SPAWNS_FORMAT, "version": 1}]
    for sample in generate_spawns(120).samples:
        row = asdict(sample)
        rows.append({**row.pop("signal"), **row})
    path = tmp_path / "s.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def test_a_trained_rank_is_written_and_loads(tmp_path: Path, spawns: Path) -> None:
    result = run("train", spawns, "--out", tmp_path / "r.npz")
    assert result.exit_code == 0, result.output
    assert "from 120 sub-agents of 16 sessions" in result.stdout
    trained = LifetimeRank(load_base(tmp_path / "r.npz"))
    long, short = SpawnSignal(instruction_chars=5000, agent="coder"), SpawnSignal(instruction_chars=200, agent="searcher")
    assert trained.score(long) > trained.score(short)


def test_the_table_its_json_and_its_plot(tmp_path: Path, spawns: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("evaluate", spawns, "--seeds", "1", "--json", tmp_path / "t.json", "--plot", tmp_path / "t.png")
    assert result.exit_code == 0, result.output
    assert "s.jsonl: 120 sub-agents of 16 sessions" in result.stdout
    report = json.loads((tmp_path / "t.json").read_text())
    assert (report["workers"], report["sessions"], report["seeds"], report["folds"]) == (120, 16, 1, 5)
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"
    # The figures in the table are those of the file.
    for row in report["rows"]:
        (line,) = [line for line in result.stdout.splitlines() if line.strip().startswith(f"{row['name']}  ")]
        assert f"{row['tau']:.2f}±" in line and f"{100 * row['shares'][1]['among_shortest']:.0f} % /" in line


def test_made_up_spawns_are_measured_without_a_trace() -> None:
    result = run("evaluate", "--generated", "60", "--tau", "1", "--seeds", "1")
    assert result.exit_code == 0, result.output
    assert "generated, tau 1: 60 sub-agents" in result.stdout
    (best,) = [line for line in result.stdout.splitlines() if "what the spawns show" in line]
    assert "1.00±0.00" in best and best.count("100 % / 100 % / 100 %") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate",), "give either a TRACE"),
        (("evaluate", "{s}", "--generated", "9"), "give either a TRACE"),
        (("evaluate", "absent.jsonl"), "cannot be read"),
        (("evaluate", "{s}", "--format", "csv"), "unknown format 'csv'"),
        (("evaluate", "{s}", "--folds", "18"), "16 session(s) with sub-agents are too few for 18 folds"),
        (("evaluate", "{s}", "--json", "{dir}/absent/t.json"), "there is no folder"),
        (("train", "{one}", "--out", "{dir}/r.npz"), "at least 2 are needed"),
        (("train", "{s}", "--out", "{dir}/absent/r.npz"), "there is no folder"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, spawns: Path, arguments: tuple[str, ...], message: str) -> None:
    (tmp_path / "one.jsonl").write_text("".join(spawns.read_text().splitlines(keepends=True)[:2]))
    places = {"{s}": str(spawns), "{dir}": str(tmp_path), "{one}": str(tmp_path / "one.jsonl")}

    def fill(argument: str) -> str:
        for name, value in places.items():
            argument = argument.replace(name, value)
        return argument

    result = run(*map(fill, arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
