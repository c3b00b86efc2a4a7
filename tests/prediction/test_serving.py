# SPDX-License-Identifier: Apache-2.0
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_lifetime.prediction.forecast import TransitionPredictor
from vllm_lifetime.prediction.predictor_file import FORMAT_VERSION, read_predictor_file, write_predictor_file
from vllm_lifetime.prediction.serving import GraphSagePredictor, PredictorFileError, load_predictor
from vllm_lifetime.traces.workflows import AgentWorkflow

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("sklearn")

from vllm_lifetime.prediction.export import export_predictor  # noqa: E402
from vllm_lifetime.prediction.models.graphsage import GraphSageModel  # noqa: E402
from vllm_lifetime.prediction.models.registry import MODELS, TrainingData, train_predictor  # noqa: E402
from vllm_lifetime.prediction.training import TorchPredictor, TrainingOptions  # noqa: E402

Maker = Callable[..., list[AgentWorkflow]]

SERVING = [name for name, spec in MODELS.items() if spec.serves]


def train(name: str, workflows: list[AgentWorkflow], hidden_size: int = 0) -> TransitionPredictor:
    rng = np.random.default_rng(0)
    hidden = [rng.normal(size=(len(w.agents), hidden_size)).astype(np.float32) for w in workflows] if hidden_size else None
    half = len(workflows) // 2
    parts = (None, None) if hidden is None else (hidden[:half], hidden[half:])
    return train_predictor(
        name, TrainingData.of(workflows[:half], workflows[half:], 3, 0, *parts, TrainingOptions(max_epochs=20))
    )


@pytest.mark.parametrize("hidden_size", [0, 16])
@pytest.mark.parametrize("name", SERVING)
def test_what_serves_says_what_was_trained(tmp_path: Path, make_workflows: Maker, name: str, hidden_size: int) -> None:
    predictor = train(name, make_workflows(40), hidden_size)
    export_predictor(predictor, tmp_path / "p.npz")
    served = load_predictor(tmp_path / "p.npz")
    rng = random.Random(0)
    agents = ["planner", "coder", "tester", "analyzer", "writer", "nobody"]
    for length in [0, 1, 2, 3, 7, 32, 64, 90]:
        history = rng.choices(agents, k=length)
        for hidden in (None, np.random.default_rng(length).normal(size=hidden_size).astype(np.float32)):
            expected, found = predictor.predict(history, hidden), served.predict(history, hidden)
            assert found.agents == expected.agents
            np.testing.assert_allclose(found.probabilities, expected.probabilities, atol=1e-5)
            np.testing.assert_allclose(found.probabilities.sum(axis=1), 1.0)


def test_a_server_of_another_user_can_read_the_file(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_predictor_file(tmp_path / "p.npz", {}, {})
    finally:
        os.umask(before)
    assert (tmp_path / "p.npz").stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["p.npz"]


def test_only_what_serves_is_exported(tmp_path: Path, make_workflows: Maker) -> None:
    for name in ("knn-5", "mlp-tiny"):
        with pytest.raises(ValueError, match="cannot be exported"):
            export_predictor(train(name, make_workflows(10)), tmp_path / "p.npz")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GraphSAGE predictor with hidden states of size 8."""
    path = tmp_path_factory.mktemp("predictor") / "p.npz"
    workflows = [AgentWorkflow(str(i), ("planner", "coder", "tester") * (1 + i % 2)) for i in range(10)]
    export_predictor(train("graphsage", workflows, 8), path)
    return path.read_bytes()


@pytest.fixture
def file(tmp_path: Path, exported: bytes) -> Path:
    (tmp_path / "p.npz").write_bytes(exported)
    return tmp_path / "p.npz"


def test_a_hidden_state_of_another_size_is_ignored_with_one_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = load_predictor(file)
    assert isinstance(served, GraphSagePredictor) and not served.hidden_state_ignored
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            forecast = served.predict(["planner"], np.ones(9, dtype=np.float32))
    assert len(caplog.records) == 1 and "size 8, but gets (9,)" in caplog.text
    assert served.hidden_state_ignored
    np.testing.assert_array_equal(forecast.probabilities, served.predict(["planner"]).probabilities)


def test_a_hidden_state_with_nan_gives_a_distribution(file: Path) -> None:
    for value in (np.nan, np.inf, -np.inf, 3e38):
        with np.errstate(all="ignore"):
            forecast = load_predictor(file).predict(["planner", "coder"], np.full(8, value, dtype=np.float32))
        np.testing.assert_allclose(forecast.probabilities.sum(axis=1), 1.0)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(PredictorFileError, match=r"absent.npz cannot be read: No such file"):
        load_predictor(tmp_path / "absent.npz")
    with pytest.raises(PredictorFileError, match=r"cannot be read"):
        load_predictor(tmp_path)


def test_a_file_cut_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for length in [0, 1, 2, 10, 100, 1000, len(content) // 2, len(content) - 50, len(content) - 1]:
        file.write_bytes(content[:length])
        with pytest.raises(PredictorFileError):
            load_predictor(file)


def test_a_flipped_bit_is_refused_or_harmless(file: Path) -> None:
    content = file.read_bytes()
    good = load_predictor(file).predict(["planner"]).probabilities
    rng = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            found = load_predictor(file).predict(["planner"]).probabilities
        except PredictorFileError:
            continue
        np.testing.assert_array_equal(found, good)  # it hit a field of the archive that nobody reads


def test_what_is_no_predictor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello")
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    np.savez(tmp_path / "pickle.npz", header=np.array([{}], dtype=object))
    with pytest.raises(PredictorFileError, match=r"is no \.npz"):
        load_predictor(tmp_path / "text.npz")
    with pytest.raises(PredictorFileError, match="of something else"):
        load_predictor(tmp_path / "other.npz")
    with pytest.raises(PredictorFileError, match="damaged or truncated"):
        load_predictor(tmp_path / "pickle.npz")


def test_another_version_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = read_predictor_file(file)
    monkeypatch.setattr("vllm_lifetime.prediction.predictor_file.FORMAT_VERSION", FORMAT_VERSION + 1)
    write_predictor_file(file, *content)
    monkeypatch.undo()
    with pytest.raises(PredictorFileError, match=f"has format version {FORMAT_VERSION + 1}, and this package reads version"):
        load_predictor(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"agents": []}, "agents are not a list"),
        ({"agents": ["a", "a"]}, "name twice"),
        ({"agents": ["a", "b"]}, "has shape"),
        ({"horizon": 0}, "horizon is 0"),
        ({"horizon": 2}, "has shape"),
        ({"hidden_size": 9}, "'text' has shape"),
        ({"hidden_size": "8"}, "hidden size is '8'"),
        ({"model": "gpt"}, "model is 'gpt'"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(file: Path, changes: dict[str, Any], message: str) -> None:
    header, arrays = read_predictor_file(file)
    write_predictor_file(file, {**header, **changes}, arrays)
    with pytest.raises(PredictorFileError, match=message):
        load_predictor(file)


def test_missing_or_undefined_arrays_are_refused(file: Path) -> None:
    header, arrays = read_predictor_file(file)
    write_predictor_file(file, header, {name: array for name, array in arrays.items() if name != "query"})
    with pytest.raises(PredictorFileError, match="'query' is missing"):
        load_predictor(file)
    write_predictor_file(file, header, {**arrays, "query": np.full_like(arrays["query"], np.nan)})
    with pytest.raises(PredictorFileError, match="not finite"):
        load_predictor(file)


def test_serving_imports_no_torch(file: Path) -> None:
    code = (
        "import sys; from vllm_lifetime.prediction.serving import load_predictor\n"
        "from vllm_lifetime.prediction.online import OnlineMarkov, SwitchingPredictor\n"
        f"SwitchingPredictor(OnlineMarkov(), load_predictor({str(file)!r})).predict(['planner'])\n"
        "assert not {'torch', 'sklearn', 'vllm'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_prediction_for_32_agents_after_32_invocations_takes_less_than_the_papers(tmp_path: Path) -> None:
    agents = [f"agent {i}" for i in range(32)]
    model = GraphSageModel(torch.full((32, 32), 1 / 32), horizon=3, hidden_size=5120)
    export_predictor(TorchPredictor(model, agents, np.full((3, 33), 1 / 33)), tmp_path / "p.npz")
    served = load_predictor(tmp_path / "p.npz")
    hidden = np.random.default_rng(0).normal(size=5120).astype(np.float32)
    for state in (None, hidden):
        times = []
        for _ in range(300):
            begin = time.thread_time()
            served.predict(agents, state)
            times.append(time.thread_time() - begin)
        assert sorted(times)[297] < 1.2e-3, sorted(times)[-5:]
