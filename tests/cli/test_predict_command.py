# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from vllm_lifetime.cli import predict
from vllm_lifetime.prediction.serving import load_predictor
from vllm_lifetime.traces.workflows import AgentWorkflow, write_workflows

pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("sklearn")


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    predict.add_to(app)
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


@pytest.fixture
def workflows(tmp_path: Path) -> Path:
    path = tmp_path / "w.jsonl"
    loop = ("coder", "tester")
    write_workflows(path, [AgentWorkflow(f"task {i}", ("planner", *loop * (1 + i % 3))) for i in range(30)])
    return path


def test_a_trained_predictor_is_written_and_loads(tmp_path: Path, workflows: Path) -> None:
    result = run("train", workflows, "--model", "markov-variable", "--out", tmp_path / "p.npz", "--seed", "1")
    assert result.exit_code == 0, result.output
    assert "markov-variable for 3 agents, from 27 workflows" in result.stdout
    assert "on the 3 workflows held out" in result.stdout
    forecast = load_predictor(tmp_path / "p.npz").predict(["planner"])
    assert forecast.agents[int(forecast.probabilities[0].argmax())] == "coder"


def test_graphsage_is_trained_with_hidden_states(tmp_path: Path, workflows: Path) -> None:
    rows = sum(len(json.loads(line)["agents"]) for line in workflows.read_text().splitlines())
    np.savez(tmp_path / "h.npz", hidden=np.random.default_rng(0).normal(size=(rows, 4)))
    result = run("train", workflows, "--out", tmp_path / "p.npz", "--hidden-states", tmp_path / "h.npz")
    assert result.exit_code == 0, result.output
    assert load_predictor(tmp_path / "p.npz").hidden_size == 4  # type: ignore[attr-defined]


def test_the_table_and_its_json(tmp_path: Path, workflows: Path) -> None:
    result = run("evaluate", workflows, "--models", "markov-1, mlp-tiny", "--seeds", "2", "--json", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    assert "Markov n=1" in result.stdout and "MLP tiny" in result.stdout and "2 seeds" in result.stdout
    report = json.loads((tmp_path / "t.json").read_text())
    assert (report["workflows"], report["tasks"], report["agents"]) == (30, 30, ["coder", "planner", "tester"])
    markov, mlp = report["measurements"]
    assert markov["seeds"] == 2 and markov["parameters"] is None and mlp["parameters"] > 0
    assert len(markov["accuracy_mean"]) == 3
    # The figures in the table are those of the file.
    assert f"{markov['accuracy_mean'][0]:.3f}±{markov['accuracy_deviation'][0]:.3f}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evaluate", "absent.jsonl"), "absent.jsonl: cannot be read"),
        (("train", "{w}", "--out", "{dir}/p.npz", "--format", "csv"), "unknown format 'csv'"),
        (("train", "{w}", "--out", "{dir}/p.npz", "--hidden-states", "{w}"), "cannot be read as .npz"),
        (("train", "{w}", "--out", "{dir}/absent/p.npz", "--model", "markov-1"), "there is no folder"),
        (("train", "{w}", "--out", "{dir}/p.npz", "--model", "knn-5"), "only for comparison"),
        (("train", "{w}", "--out", "{dir}/p.npz", "--model", "gpt"), "'gpt' is unknown"),
        (("evaluate", "{w}", "--models", "markov-1,gpt"), "unknown: gpt;"),
        (("evaluate", "{w}", "--models", ","), "unknown: ','"),
        (("evaluate", "{one}", "--models", "markov-1"), "too few"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, workflows: Path, arguments: tuple[str, ...], message: str) -> None:
    write_workflows(tmp_path / "one.jsonl", [AgentWorkflow("t", ("a",))])
    places = {"{w}": str(workflows), "{dir}": str(tmp_path), "{one}": str(tmp_path / "one.jsonl")}

    def fill(argument: str) -> str:
        for name, value in places.items():
            argument = argument.replace(name, value)
        return argument

    result = run(*map(fill, arguments))
    assert result.exit_code == 2
    # Typer breaks long messages into lines, in a frame.
    assert message in " ".join(result.output.replace("│", " ").split())
