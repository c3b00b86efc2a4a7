# SPDX-License-Identifier: Apache-2.0
"""The models, their training, and the table."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.prediction.forecast import END, TransitionPredictor
from vllm_lifetime.traces.workflows import AgentWorkflow

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")
pytest.importorskip("sklearn")

from vllm_lifetime.prediction.evaluation import evaluate, score_predictor  # noqa: E402
from vllm_lifetime.prediction.models.base import Batch  # noqa: E402
from vllm_lifetime.prediction.models.graphsage import GraphSageModel  # noqa: E402
from vllm_lifetime.prediction.models.registry import MODELS, TrainingData, train_predictor  # noqa: E402
from vllm_lifetime.prediction.samples import list_agents, make_samples, split_by_task  # noqa: E402
from vllm_lifetime.prediction.training import TrainingOptions, masked_loss  # noqa: E402

Maker = Callable[..., list[AgentWorkflow]]
SHORT = TrainingOptions(max_epochs=4, patience=4)


@pytest.fixture(scope="module")
def trained() -> dict[str, TransitionPredictor]:
    """Each predictor of the table, hardly trained, with hidden states of size 6."""
    rng = random.Random(0)
    workflows = [AgentWorkflow(str(i), tuple(rng.choices("abc", k=rng.randint(1, 6)))) for i in range(30)]
    hidden = [np.random.default_rng(i).normal(size=(len(w.agents), 6)).astype(np.float32) for i, w in enumerate(workflows)]
    data = TrainingData.of(workflows[:24], workflows[24:], 3, 0, hidden[:24], hidden[24:], SHORT)
    return {name: train_predictor(name, data) for name in MODELS}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", "nobody", END, ""]), max_size=90),
    st.sampled_from([None, (6,), (5,), (6, 1), (0,)]),
)
@pytest.mark.parametrize("name", list(MODELS))
def test_any_history_gives_distributions(
    trained: dict[str, TransitionPredictor], name: str, history: list[str], shape: tuple[int, ...] | None
) -> None:
    hidden = None if shape is None else np.ones(shape, dtype=np.float32)
    forecast = trained[name].predict(history, hidden)
    assert forecast.agents == ("a", "b", "c")
    assert forecast.probabilities.shape == (3, 4)
    assert (forecast.probabilities >= 0).all()
    np.testing.assert_allclose(forecast.probabilities.sum(axis=1), 1.0, rtol=1e-5)


def test_padding_after_the_end_has_no_part_in_the_loss_and_the_end_has() -> None:
    samples = make_samples([AgentWorkflow("t", ("a", "b"))], ["a", "b"], horizon=3)
    counts = torch.from_numpy(samples.counts)
    logits = torch.zeros(2, 3, 3, requires_grad=True)
    loss = masked_loss(logits, counts)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(np.log(3))  # uniform logits, whatever is masked
    told = logits.grad.abs().sum(dim=2) > 0
    # After (a): b, END, padding. After (a, b): END, padding, padding.
    assert told.tolist() == [[True, True, False], [True, False, False]]
    assert float(logits.grad[1, 0, 2]) < 0  # pulls END up
    # The mean is over the three targets: each weighs a third.
    assert float(logits.grad[1, 0, 2]) == pytest.approx((1 / 3 - 1) / 3)


def test_graphsage_is_equations_3_and_4() -> None:
    torch.manual_seed(0)
    matrix = torch.tensor([[0.0, 0.7, 0.3], [0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    model = GraphSageModel(matrix, horizon=2, hidden_size=5, width=4).eval()
    states = model.embedding
    for layer in model.layers:
        weight = torch.cat((layer.lin_root.weight, layer.lin_rel.weight), dim=1)  # W, (d, 2d)
        assert layer.lin_root.bias is None and layer.lin_rel.bias is None
        states = torch.relu(torch.cat((states, matrix @ states), dim=1) @ weight.T)
    torch.testing.assert_close(model.agent_states(), states)

    hidden = torch.randn(1, 5)
    prefix = [0, 1, 1, 2]
    query = model.query.weight @ states[2]
    weights = torch.softmax(torch.stack([query @ states[i] / 4**0.5 for i in prefix[:-1]]), dim=0)
    path = sum(weight * states[i] for weight, i in zip(weights, prefix[:-1], strict=True))
    text = torch.relu(model.text.project.weight @ hidden[0])
    expected = model.head(torch.cat((states[2], path, text))).view(2, 4)
    torch.testing.assert_close(model(Batch(torch.tensor([prefix]), hidden))[0], expected)
    # The same beside a longer one, after padding; and without a prefix, the path is zeros.
    padded = Batch(torch.tensor([[3, 3, *prefix], [3] * 5 + [1]]), hidden.repeat(2, 1))
    torch.testing.assert_close(model(padded)[0], expected)
    alone = model.head(torch.cat((states[1], torch.zeros(4), text))).view(2, 4)
    torch.testing.assert_close(model(padded)[1], alone)


def test_graphsage_has_about_350k_parameters_at_the_papers_hidden_size() -> None:
    model = GraphSageModel(torch.zeros(5, 5), horizon=3, hidden_size=5120)
    assert 340_000 < sum(parameter.numel() for parameter in model.parameters()) < 365_000


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("markov", "knn"))])
def test_padding_before_a_prefix_changes_nothing(trained: dict[str, TransitionPredictor], name: str) -> None:
    model = trained[name].model  # type: ignore[attr-defined]
    with torch.inference_mode():
        alone = model(Batch(torch.tensor([[0, 2, 1]]), None))
        padded = model(Batch(torch.tensor([[3, 3, 3, 3, 0, 2, 1], [0, 1, 2, 0, 1, 2, 0]]), None))
    torch.testing.assert_close(padded[:1], alone, atol=1e-5, rtol=1e-4)


def test_the_same_seed_gives_the_same_model(make_workflows: Maker) -> None:
    workflows = make_workflows(20)
    split = split_by_task(workflows, 0)
    sides = [[workflows[i] for i in side] for side in split]
    state = torch.get_rng_state()
    first, second = (
        train_predictor("graphsage", TrainingData.of(sides[0], sides[1], 3, 7, options=SHORT)).predict(["planner", "coder"])
        for _ in range(2)
    )
    np.testing.assert_array_equal(first.probabilities, second.probabilities)
    assert torch.equal(torch.get_rng_state(), state)


def test_training_learns_a_loop_that_only_the_order_of_the_prefix_tells(make_workflows: Maker) -> None:
    # Two agents in turn, then the end when each was there twice: what comes next hangs on the last agent alone but for the end.
    workflows = [AgentWorkflow(str(i), ("a", "b", "a", "b")) for i in range(12)]
    split = split_by_task(workflows, 0)
    sides = [[workflows[i] for i in side] for side in split]
    predictor = train_predictor("graphsage-ordered", TrainingData.of(sides[0], sides[1], 2, 0))
    accuracy, loss = score_predictor(predictor, make_samples(sides[2], list_agents(workflows), 2))
    assert accuracy.tolist() == [1.0, 1.0] and loss.max() < 0.2


def test_an_unknown_name_or_no_data_is_refused(make_workflows: Maker) -> None:
    data = TrainingData.of(make_workflows(4), make_workflows(2), 3, 0)
    with pytest.raises(ValueError, match="unknown predictor 'gpt'; known: graphsage"):
        train_predictor("gpt", data)
    with pytest.raises(ValueError, match="nothing to stop training by: none of the validation workflows"):
        train_predictor("graphsage", TrainingData.of(make_workflows(4), [], 3, 0))


def test_accuracy_and_loss_count_what_was_not_known(make_workflows: Maker) -> None:
    workflows = [AgentWorkflow("t", ("a", "b"))]
    data = TrainingData.of(workflows, workflows, 2, 0)
    predictor = train_predictor("markov-1", data)
    accuracy, loss = score_predictor(predictor, make_samples([AgentWorkflow("u", ("a", "new"))], ["a", "b", "new"], 2))
    # Step 1: "new" after a, END after "new", of which the predictor knows neither. Step 2: END after a.
    assert accuracy.tolist() == [0.0, 1.0]
    assert loss[0] > -np.log(1e-4) / 2


def test_the_table_has_every_seed(make_workflows: Maker) -> None:
    seen: list[int] = []
    rows = evaluate(["markov-1", "knn-5"], make_workflows(40), seeds=3, on_seed=lambda rows: seen.append(rows[0].seeds))
    assert seen == [1, 2, 3]
    assert [row.name for row in rows] == ["markov-1", "knn-5"]
    assert all(len(row.accuracy_mean) == 3 and 0.3 < row.accuracy_mean[0] <= 1.0 for row in rows)
    assert all(deviation >= 0 for row in rows for deviation in row.accuracy_deviation)


def branching_workflows(number: int, size: int, seed: int = 0) -> tuple[list[AgentWorkflow], list[np.ndarray]]:
    """Each worker is followed by a, b or the end, which only its hidden state says: one of three directions, and noise."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(3, size))
    workflows, hidden = [], []
    for i in range(number):
        path, rows = [], []
        while True:
            branch = int(rng.integers(3))
            path.append("worker")
            rows.append(directions[branch] + 0.3 * rng.normal(size=size))
            if branch == 2 or len(path) > 8:
                break
            path.append("ab"[branch])
            rows.append(rng.normal(size=size))
        workflows.append(AgentWorkflow(str(i), tuple(path)))
        hidden.append(np.array(rows, dtype=np.float32))
    return workflows, hidden


@pytest.mark.parametrize("name", ["graphsage", "linear-probe"])
def test_where_the_hidden_state_decides_the_semantic_stream_finds_out(name: str) -> None:
    workflows, hidden = branching_workflows(90, size=24)
    options = TrainingOptions(max_epochs=40, patience=10)
    (without,) = evaluate([name], workflows, seeds=1, options=options)
    (with_it,) = evaluate([name], workflows, seeds=1, hidden_states=hidden, options=options)
    assert without.accuracy_mean[0] < 0.8
    assert with_it.accuracy_mean[0] > 0.93
    assert with_it.accuracy_mean[0] > without.accuracy_mean[0] + 0.15
