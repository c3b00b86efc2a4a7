# SPDX-License-Identifier: Apache-2.0
import json
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.prediction.forecast import END, Forecast
from vllm_lifetime.prediction.markov import MarkovPredictor
from vllm_lifetime.prediction.online import OnlineMarkov, OnlineStateError, SwitchingPredictor
from vllm_lifetime.traces.workflows import AgentWorkflow


def serve(predictor: OnlineMarkov | SwitchingPredictor, path: Sequence[str]) -> None:
    for end in range(1, len(path) + 1):
        predictor.observe(path[:end])


def probability(predictor: Any, history: Sequence[str], outcome: str, step: int = 1) -> float:
    agents, probabilities = predictor.predict(history)
    return float(probabilities[step - 1, agents.index(outcome) if outcome != END else -1])


def test_it_learns_all_steps_from_single_observations() -> None:
    online = OnlineMarkov()
    for _ in range(30):
        serve(online, ["a", "b", "c", END])
    for step, outcome in enumerate(["b", "c", END], start=1):
        assert probability(online, ["a"], outcome, step) > 0.9
    assert probability(online, [], "a") > 0.9


def test_before_anything_was_observed_it_answers() -> None:
    forecast = OnlineMarkov(horizon=2).predict(["a"])
    assert forecast.agents == () and forecast.probabilities.tolist() == [[1.0], [1.0]]


def test_it_follows_a_change_of_behaviour() -> None:
    online = OnlineMarkov(memory=50)
    for _ in range(500):
        serve(online, ["a", "b", END])
    assert probability(online, ["a"], "b") > 0.9
    for _ in range(50):
        serve(online, ["a", "c", END])
    assert probability(online, ["a"], "c") > 0.6
    # The same counts without forgetting would give it a tenth.


def test_agents_and_contexts_are_bounded() -> None:
    online = OnlineMarkov(max_agents=8, max_contexts=100)
    rng = random.Random(1)
    for i in range(400):
        serve(online, [f"agent {rng.randrange(50)}" for _ in range(1 + i % 7)] + [END])
    assert len(online.agents) == 8
    assert online.num_contexts == 100


def test_an_agent_long_gone_makes_room_for_a_new_one() -> None:
    online = OnlineMarkov(max_agents=2, memory=5)
    serve(online, ["old", "kept", END])
    serve(online, ["new", END])
    assert online.agents == ("old", "kept")
    for _ in range(20):
        serve(online, ["kept", "kept", END])
    for _ in range(3):
        serve(online, ["new", "kept", END])
    assert online.agents == ("new", "kept")
    assert probability(online, ["new"], "kept") > 0.6
    assert probability(online, ["kept", "kept"], "new") < 0.1


def test_what_was_learned_survives_a_restart() -> None:
    online = OnlineMarkov()
    for i in range(40):
        serve(online, ["a", "b", "c" if i % 3 else "a", END])
    restored = OnlineMarkov.from_json(online.to_json())
    for history in ([], ["a"], ["a", "b"], ["a", "b", "c"], ["x"]):
        np.testing.assert_allclose(restored.predict(history).probabilities, online.predict(history).probabilities, atol=1e-4)
    serve(restored, ["a", "d", END])
    assert set(restored.agents) == {"a", "b", "c", "d"}


def test_a_state_is_cut_to_smaller_bounds() -> None:
    online = OnlineMarkov()
    for i in range(20):
        serve(online, [f"agent {i}", "a", END])
    restored = OnlineMarkov.from_json(online.to_json(), max_agents=4, max_contexts=10)
    assert len(restored.agents) == 4 and restored.num_contexts <= 10
    restored.predict(["agent 19", "a"])


def broken_states() -> list[str]:
    online = OnlineMarkov()
    serve(online, ["a", "b", END])
    good = json.loads(online.to_json())
    changes: list[dict[str, Any]] = [
        {"version": 9},
        {"horizon": 4},
        {"agents": ["a", "a"]},
        {"agents": [1]},
        {"agents": None},
        {"least_recent_first": ["x"]},
        {"contexts": [[[7] * 9, []]]},
        {"contexts": [[[0], [[[0, "1"]], [], []]]]},
        {"contexts": [[[0], [[[-1, 1.0]], [], []]]]},
        {"contexts": [[[0], [[[1, float("inf")]], [], []]]]},
        {"contexts": [5]},
    ]
    return ["", "[]", "null", "{}", *(json.dumps({**good, **change}) for change in changes)]


@pytest.mark.parametrize("text", broken_states())
def test_a_broken_state_is_refused(text: str) -> None:
    with pytest.raises(OnlineStateError, match="not a saved online predictor"):
        OnlineMarkov.from_json(text)


@given(st.lists(st.lists(st.sampled_from(["a", "b", "c", "d", END]), max_size=9), max_size=25))
def test_any_history_gives_distributions(histories: list[list[str]]) -> None:
    online = OnlineMarkov(max_agents=3, max_contexts=20, memory=4)
    trained = MarkovPredictor.train([AgentWorkflow("t", ("a", "b"))], ["a", "b"], order=2)
    for predictor in (online, SwitchingPredictor(OnlineMarkov(memory=2), trained, patience=1)):
        for history in histories:
            predictor.observe(history)
            forecast = predictor.predict(history)
            assert forecast.probabilities.shape == (3, len(forecast.agents) + 1)
            assert (forecast.probabilities >= 0).all()
            np.testing.assert_allclose(forecast.probabilities.sum(axis=1), 1.0)


def train(*path: str) -> MarkovPredictor:
    return MarkovPredictor.train([AgentWorkflow("t", path)] * 20, sorted(set(path)), order=2)


def test_a_cold_start_is_the_trained_ones_as_soon_as_it_is_better() -> None:
    switching = SwitchingPredictor(OnlineMarkov(), train("a", "b", "c"))
    assert not switching.uses_trained
    for _ in range(12):
        serve(switching, ["a", "b", "c", END])
    assert switching.uses_trained
    online_loss, trained_loss = switching.losses
    assert trained_loss < online_loss


def test_a_drift_goes_back_to_the_online_one() -> None:
    switching = SwitchingPredictor(OnlineMarkov(), train("a", "b", "c"))
    for _ in range(50):
        serve(switching, ["a", "b", "c", END])
    for _ in range(60):
        serve(switching, ["a", "c", "b", END])
    assert not switching.uses_trained
    assert probability(switching, ["a"], "c") > 0.5


def test_a_predictor_for_other_agents_is_never_used() -> None:
    switching = SwitchingPredictor(OnlineMarkov(), train("x", "y"))
    for _ in range(50):
        serve(switching, ["a", "b", END])
        assert not switching.uses_trained


def test_an_agent_that_the_trained_one_does_not_know_is_answered_online() -> None:
    switching = SwitchingPredictor(OnlineMarkov(), train("a", "b", "c"), patience=1)
    for _ in range(20):
        serve(switching, ["a", "b", "c", END])
    switching.online.observe(["new"])
    assert switching.uses_trained
    assert "new" in switching.predict(["a", "new"]).agents
    assert "new" not in switching.predict(["a"]).agents


def test_two_that_are_as_good_are_not_changed_all_the_time() -> None:
    switching = SwitchingPredictor(OnlineMarkov(memory=1000), train("a", "b"))
    rng = random.Random(0)
    changes, used = 0, False
    for _ in range(1000):
        serve(switching, ["a", rng.choice("ab"), END])
        changes += switching.uses_trained != used
        used = switching.uses_trained
    assert changes <= 4


def test_a_trained_one_that_raises_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def predict(self, history: Sequence[str], hidden_state: Any = None) -> Forecast:
            raise RuntimeError("no")

    switching = SwitchingPredictor(OnlineMarkov(), Broken())
    with caplog.at_level(logging.WARNING):
        serve(switching, ["a", "b", END])
        switching.predict(["a"])
    assert len(caplog.records) == 1 and "not used any more" in caplog.text


def test_a_prediction_and_an_observation_take_a_fraction_of_a_millisecond() -> None:
    online = OnlineMarkov()
    rng = random.Random(0)
    path = [f"agent {rng.randrange(32)}" for _ in range(33)]
    for _ in range(5):
        serve(online, [*path, END])
    begin = time.process_time()
    for _ in range(200):
        online.predict(path[:32])
    predicted = time.process_time()
    for _ in range(200):
        online.observe(path[:33])
    observed = time.process_time()
    assert (predicted - begin) / 200 < 0.6e-3
    assert (observed - predicted) / 200 < 1.2e-3
