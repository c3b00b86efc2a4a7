# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.prediction.forecast import END
from vllm_lifetime.prediction.markov import ContextTables, MarkovPredictor, chain_steps
from vllm_lifetime.traces.workflows import AgentWorkflow

LOOP = [AgentWorkflow("t", ("a", "b", "b", "a", "c"))]


def test_each_step_is_counted_directly() -> None:
    markov = MarkovPredictor.train(LOOP, ["a", "b", "c"], order=1, blend=False)
    # After b: b, a. Two after b: a, c. Three after b: c, END.
    np.testing.assert_allclose(markov.predict(["a", "b"]).probabilities, [[0.5, 0.5, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0.5, 0.5]])


def test_what_follows_the_end_is_not_counted() -> None:
    markov = MarkovPredictor.train([AgentWorkflow("t", ("a",)), AgentWorkflow("t", ("a", "a", "a"))], ["a"], 0, 3, blend=False)
    # Step 3 is known of the longer one alone: its third invocation, and its end.
    assert markov.predict(["a"]).probabilities[2].tolist() == [0.5, 0.5]


def test_the_start_is_told_from_the_middle() -> None:
    markov = MarkovPredictor.train([AgentWorkflow("t", ("a", "a", "b"))], ["a", "b"], order=2, blend=False)
    assert markov.predict(["a"]).probabilities[0].tolist() == [1, 0, 0]
    assert markov.predict(["a", "a"]).probabilities[0].tolist() == [0, 1, 0]
    assert markov.predict([]).probabilities[0].tolist() == [1, 0, 0]


def test_a_longer_context_is_trusted_by_what_it_has_seen() -> None:
    workflows = [AgentWorkflow("t", ("a", "b"))] + [AgentWorkflow("t", ("c", "c", "d"))] * 9
    one = MarkovPredictor.train(workflows, ["a", "b", "c", "d"], order=1)
    # Order 0: of 30 outcomes 1 a, 1 b, 18 c, 9 d... and 10 END; order 1 after a: b, once, so half.
    assert one.predict(["a"]).probabilities[0, 1] == pytest.approx(0.5, abs=0.03)
    assert one.predict(["c"]).probabilities[0, 3] == pytest.approx(0.5, abs=0.06)


def test_an_order_that_was_not_seen_backs_off() -> None:
    markov = MarkovPredictor.train(LOOP, ["a", "b", "c"], order=5, blend=False)
    np.testing.assert_array_equal(
        markov.predict(["c", "c", "c", "b", "a"]).probabilities,
        markov.predict(["b", "a"]).probabilities,
    )


def test_contexts_are_bounded() -> None:
    tables = ContextTables(horizon=2, max_order=3, max_agents=4, max_contexts=5)
    for i in range(200):
        tables.add([str(i % 4), str(i % 3), END][: 1 + i % 3])
    assert len(tables.tables) == 5


@pytest.mark.parametrize("wrong", [{"horizon": 0}, {"max_order": -1}, {"max_agents": 0}, {"max_contexts": 0}, {"keep": 0.0}])
def test_impossible_sizes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need horizon"):
        ContextTables(**{"horizon": 1, "max_order": 1, "max_agents": 1, "max_contexts": 1, **wrong})  # type: ignore[arg-type]


HISTORY = st.lists(st.sampled_from(["a", "b", "c", "nobody", END]), max_size=12)


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=8), min_size=1, max_size=6),
    HISTORY,
    st.integers(0, 5),
    st.integers(1, 4),
    st.booleans(),
)
def test_forecasts_are_distributions_for_any_history(
    paths: list[list[str]], history: list[str], order: int, horizon: int, blend: bool
) -> None:
    markov = MarkovPredictor.train([AgentWorkflow("t", tuple(path)) for path in paths], ["a", "b", "c"], order, horizon, blend)
    forecast = markov.predict(history)
    assert forecast.probabilities.shape == (horizon, 4)
    assert (forecast.probabilities >= 0).all()
    np.testing.assert_allclose(forecast.probabilities.sum(axis=1), 1.0)
    chained = chain_steps(markov, history, horizon)
    np.testing.assert_allclose(chained.sum(axis=1), 1.0)
    np.testing.assert_allclose(chained[0], forecast.probabilities[0])
