# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from vllm_lifetime.cli import predict
from vllm_lifetime.prediction.model_names import MODEL_NAMES, SERVING_MODELS
from vllm_lifetime.prediction.serving import load_predictor
from vllm_lifetime.traces.workflows import AgentWorkflow, write_workflows

pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("sklearn")

from vllm_lifetime.prediction.models.registry import MODELS


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
        (
            ("evaluate", "{one}", "--models", "markov-1"),
            "1 different task(s) are too few to split into training, validation",
        ),
        (("evaluate", "{one}", "--models", "markov-1"), "at least 3 are needed"),
        (("train", "{one}", "--out", "{dir}/p.npz"), "split into training and validation: at least 2 are needed"),
        (
            ("train", "{strangers}", "--out", "{dir}/p.npz"),
            "none of the validation workflows' agents is one of the 1",
        ),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, workflows: Path, arguments: tuple[str, ...], message: str) -> None:
    write_workflows(tmp_path / "one.jsonl", [AgentWorkflow("t", ("a",))])
    write_workflows(tmp_path / "strangers.jsonl", [AgentWorkflow("t", ("a",)), AgentWorkflow("u", ("b",))])
    places = {"{w}": str(workflows), "{dir}": str(tmp_path)}
    places |= {f"{{{name}}}": str(tmp_path / f"{name}.jsonl") for name in ("one", "strangers")}

    def fill(argument: str) -> str:
        for name, value in places.items():
            argument = argument.replace(name, value)
        return argument

    result = run(*map(fill, arguments))
    assert result.exit_code == 2
    # Typer breaks long messages into lines, in a frame.
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_step_that_no_workflow_comes_to_has_no_figure(tmp_path: Path) -> None:
    write_workflows(tmp_path / "short.jsonl", [AgentWorkflow(f"task {i}", ("a", "b")) for i in range(10)])
    result = run("evaluate", tmp_path / "short.jsonl", "--models", "markov-1", "--seeds", "1", "--json", tmp_path / "t.json")
    assert result.exit_code == 0, result.output
    assert "1.000±0.000  1.000±0.000  -" in " ".join(result.stdout.split()).replace(" ", "  ")
    (markov,) = json.loads((tmp_path / "t.json").read_text())["measurements"]
    assert markov["accuracy_mean"] == [1.0, 1.0, None] and markov["log_loss_deviation"][2] is None
    result = run("train", tmp_path / "short.jsonl", "--model", "markov-1", "--out", tmp_path / "p.npz")
    assert "s1 1.000, s2 1.000, s3 -" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "{w}", "--out", "p.npz", "--model", "gpt"),
        ("train", "{w}", "--out", "no-such-folder/p.npz"),
        ("train", "{one}", "--out", "p.npz"),
        ("evaluate", "{w}", "--models", "gpt"),
        ("evaluate", "{one}"),
        ("evaluate", "{w}", "--json", "no-such-folder/t.json"),
    ],
)
def test_what_cannot_be_is_said_before_torch_is_loaded(tmp_path: Path, workflows: Path, arguments: tuple[str, ...]) -> None:
    write_workflows(tmp_path / "one.jsonl", [AgentWorkflow("t", ("a",))])
    places = {"{w}": str(workflows), "{one}": str(tmp_path / "one.jsonl")}
    code = (
        "import sys\nfrom vllm_lifetime.cli import app\ntry:\n    app()\nfinally:\n"
        "    print('loaded' if 'torch' in sys.modules else 'not loaded')"
    )
    command = [sys.executable, "-c", code, "predict", *(places.get(argument, argument) for argument in arguments)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.split("\n")[-2]) == (2, "not loaded"), result.stderr


def test_the_names_that_are_known_without_torch_are_those_of_the_registry() -> None:
    assert list(MODELS) == list(MODEL_NAMES)
    assert {name for name, spec in MODELS.items() if spec.serves} == set(SERVING_MODELS)
