# SPDX-License-Identifier: Apache-2.0
"""The time to the next use: laws of pauses, learned online."""

import itertools
import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.prediction.next_use import (
    BIN_EDGES_S,
    MAX_STATES,
    NEVER_S,
    NextUseError,
    NextUseModel,
    PauseState,
)
from vllm_lifetime.prediction.pace import Pace
from vllm_lifetime.prediction.time_to_live import TimeToLive

TOOL_CALL = PauseState("agent", "tool_calls", "Bash", False)
TURN_END = PauseState("agent", "stop", None, True)

names = st.sampled_from(["a", "b", "", "END", None])
states = st.builds(PauseState, names, names, names, st.sampled_from([True, False, None]))
times_s = st.floats(0.0, 1e7) | st.sampled_from(BIN_EDGES_S)
whats = st.sampled_from(["observe", "observe_end", "observe_waiting"])
observations = st.lists(st.tuples(whats, states, times_s), max_size=40)
horizons_s = st.floats(0.01, 1e6)


def model_of(seen: list[tuple[str, PauseState, float]]) -> NextUseModel:
    model = NextUseModel()
    for what, state, time_s in seen:
        getattr(model, what)(state, time_s)
    return model


@settings(max_examples=60)
@given(observations, states, st.lists(times_s, min_size=2, max_size=8))
def test_survival_falls_from_one(seen: list[Any], state: PauseState, waits_s: list[float]) -> None:
    model = model_of(seen)
    survivals = [model.survival(state, wait_s) for wait_s in sorted(waits_s)]
    assert model.survival(state, 0.0) == 1.0
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in itertools.pairwise(survivals))


@settings(max_examples=60)
@given(observations, states, times_s, horizons_s, st.floats(1 / 16, 16))
def test_any_state_has_an_estimate_within_bounds(
    seen: list[Any], state: PauseState, wait_s: float, horizon_s: float, pace: float
) -> None:
    model = model_of(seen)
    assert 0.0 <= model.expected_remaining_s(state, wait_s, pace) <= NEVER_S
    assert 0.0 <= model.reuse_discount(state, wait_s, horizon_s, pace) <= 1.0
    assert model.next_refresh_s(wait_s) > wait_s or wait_s >= BIN_EDGES_S[-1]
    assert 0.0 <= model.worthwhile_wait_s(state, horizon_s) <= BIN_EDGES_S[-1]
    assert 0.0 < model.median_s(state) <= BIN_EDGES_S[-1]


@settings(max_examples=60)
@given(observations, states, times_s, st.floats(0.01, 1e5))
def test_a_longer_horizon_discounts_less(seen: list[Any], state: PauseState, wait_s: float, horizon_s: float) -> None:
    model = model_of(seen)
    assert model.reuse_discount(state, wait_s, horizon_s) <= model.reuse_discount(state, wait_s, 4 * horizon_s) + 1e-12


@settings(max_examples=40)
@given(observations, states, st.floats(0.0, 2e4), st.floats(1.0, 2e3))
def test_the_expected_time_is_that_of_waiting_on(seen: list[Any], state: PauseState, wait_s: float, more_s: float) -> None:
    """E[T - w | T > w] <= d + P(T > w + d | T > w) E[T - w - d | ...] + P(it ends within d) NEVER_S; >= without that."""
    model = model_of(seen)
    stays = model.survival(state, wait_s + more_s) / model.survival(state, wait_s)
    later = stays * model.expected_remaining_s(state, wait_s + more_s)
    now = model.expected_remaining_s(state, wait_s)
    assert now <= more_s + later + (1.0 - stays) * NEVER_S + 1e-6
    assert now >= min(NEVER_S, later) - 1e-6


def test_expectation_and_discount_are_those_of_the_survival_it_states() -> None:
    generator = random.Random(1)
    model = NextUseModel()
    for _ in range(3000):
        model.observe(TOOL_CALL, generator.lognormvariate(2.0, 1.0))
    wait_s, step_s, horizon_s = 7.3, 0.05, 64.0
    survivals = [model.survival(TOOL_CALL, wait_s + index * step_s) for index in range(72_001)]
    mean_s = sum(survivals[:-1]) * step_s / survivals[0]
    leaves = [earlier - later for earlier, later in itertools.pairwise(survivals)]
    discount = sum(leave * math.exp(-(index + 0.5) * step_s / horizon_s) for index, leave in enumerate(leaves)) / survivals[0]
    assert model.expected_remaining_s(TOOL_CALL, wait_s) == pytest.approx(mean_s, rel=0.05)
    assert model.reuse_discount(TOOL_CALL, wait_s, horizon_s) == pytest.approx(discount, rel=0.02)


def test_it_learns_the_law_of_what_it_saw() -> None:
    generator = random.Random(2)
    model = NextUseModel()
    for _ in range(4000):
        model.observe(TOOL_CALL, generator.expovariate(1 / 30))
    assert model.median_s(TOOL_CALL) == pytest.approx(30 * math.log(2), rel=0.1)
    for wait_s in (0.0, 10.0, 40.0):
        assert model.expected_remaining_s(TOOL_CALL, wait_s) == pytest.approx(30, rel=0.2)
        assert model.reuse_discount(TOOL_CALL, wait_s, 30.0) == pytest.approx(0.5, rel=0.1)


def test_before_anything_was_seen_a_turn_end_takes_longer_than_a_tool_call() -> None:
    model = NextUseModel()
    assert model.median_s(TOOL_CALL) == pytest.approx(8, rel=0.1)
    assert model.median_s(TURN_END) == pytest.approx(188, rel=0.1)
    assert model.median_s(PauseState(finish_reason="stop")) == model.median_s(TURN_END)
    # A server says "stop" for a tool call, too, where it does not parse them.
    assert model.median_s(PauseState(finish_reason="stop", turn_is_over=False)) == model.median_s(TOOL_CALL)


def test_who_has_waited_long_is_expected_to_wait_longer() -> None:
    generator = random.Random(3)
    model = NextUseModel()
    for _ in range(3000):
        model.observe(TOOL_CALL, generator.expovariate(1 / 5) if generator.random() < 0.9 else generator.expovariate(1 / 500))
    assert model.expected_remaining_s(TOOL_CALL, 60.0) > 3 * model.expected_remaining_s(TOOL_CALL, 0.0)


def test_a_pause_that_ended_without_return_counts_as_never() -> None:
    model = NextUseModel()
    for _ in range(500):
        model.observe(TURN_END, 20.0)
        model.observe_end(TURN_END, 20.0)
    assert model.reuse_discount(TURN_END, 0.0, 1e6) == pytest.approx(0.5, abs=0.05)
    assert model.expected_remaining_s(TURN_END, 0.0) == pytest.approx(NEVER_S / 2 + 20, rel=0.1)


def test_a_pause_that_is_only_seen_to_last_makes_longer_ones_likelier() -> None:
    lasting, plain = NextUseModel(), NextUseModel()
    for index in range(200):
        plain.observe(TOOL_CALL, 5.0 if index % 2 else 100.0)
        lasting.observe(TOOL_CALL, 5.0 if index % 2 else 100.0)
        lasting.observe_waiting(TOOL_CALL, 50.0)
    assert lasting.survival(TOOL_CALL, 10.0) > plain.survival(TOOL_CALL, 10.0) + 0.1
    # Nobody who was lost sight of at 50 s says anything about what comes then.
    assert lasting.survival(TOOL_CALL, 200.0) / lasting.survival(TOOL_CALL, 60.0) == pytest.approx(
        plain.survival(TOOL_CALL, 200.0) / plain.survival(TOOL_CALL, 60.0), abs=0.05
    )


def test_a_rare_state_is_like_its_kind_and_a_frequent_one_is_itself() -> None:
    model = NextUseModel()
    for _ in range(300):
        model.observe(TOOL_CALL, 2.0)
    slow = TOOL_CALL._replace(tool="pytest")
    assert model.median_s(slow) == pytest.approx(2.0, rel=0.5)
    for _ in range(300):
        model.observe(slow, 200.0)
    assert model.median_s(slow) == pytest.approx(200.0, rel=0.3)
    assert model.median_s(TOOL_CALL) == pytest.approx(2.0, rel=0.5)


def test_what_was_long_ago_is_forgotten() -> None:
    model = NextUseModel()
    for _ in range(2000):
        model.observe(TOOL_CALL, 2.0)
    for _ in range(12_000):
        model.observe(TOOL_CALL, 50.0)
    assert model.survival(TOOL_CALL, 10.0) > 0.9


def test_memory_is_bounded_and_forgotten_states_still_have_an_estimate() -> None:
    model = NextUseModel()
    for index in range(MAX_STATES + 50):
        model.observe(PauseState(f"agent-{index}", "tool_calls", None, False), 3.0)
        if index % 100 == 0:
            model.expected_remaining_s(PauseState(f"agent-{index}"), 1.0)
    assert len(model) <= MAX_STATES
    assert model.median_s(PauseState("agent-0", "tool_calls", None, False)) == pytest.approx(3.0, rel=0.5)


@settings(max_examples=30)
@given(observations, states, times_s)
def test_a_stored_model_answers_as_before(seen: list[Any], state: PauseState, wait_s: float) -> None:
    model = model_of(seen)
    copy = NextUseModel.from_json(model.to_json())
    assert copy.expected_remaining_s(state, wait_s) == pytest.approx(model.expected_remaining_s(state, wait_s), rel=1e-9)
    assert (len(copy), copy.num_observed) == (len(model), model.num_observed)


def test_a_stored_model_remembers_as_long_as_it_would_have() -> None:
    model = model_of([("observe", TOOL_CALL, 2.0)] * 100)
    copy = NextUseModel.from_json(model.to_json())
    for each in (model, copy):
        for _ in range(50):
            each.observe(TOOL_CALL, 90.0)
    assert copy.median_s(TOOL_CALL) == pytest.approx(model.median_s(TOOL_CALL), rel=1e-6)


def changed(**fields: Any) -> str:
    stored = json.loads(model_of([("observe", TOOL_CALL, 2.0)]).to_json())
    return json.dumps({**stored, **fields})


ROW = {"state": [True], "returned": {}, "ended": {}, "seen": {}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be JSON"),
        (changed()[:-30], "must be JSON"),
        ("[" * 200_000, "must be JSON"),
        ("[]", "'format'"),
        ('{"format": "other"}', "'format'"),
        (changed(version=99), "version 99"),
        (changed(bins_s=[0, 1]), "'bins_s'"),
        (changed(states={}), "'states'"),
        (changed(num_observed=-1), "'num_observed'"),
        (changed(states=[3]), r"states\[0\]"),
        (changed(states=[{**ROW, "state": []}]), "'state'"),
        (changed(states=[{**ROW, "state": ["yes"]}]), "'state'"),
        (changed(states=[{**ROW, "state": [1]}]), "'state'"),
        (changed(states=[{**ROW, "state": [[]]}]), "'state'"),
        (changed(states=[{**ROW, "state": [True, 3]}]), "'state'"),
        (changed(states=[{"state": [True]}]), "'returned'"),
        (changed(states=[{**ROW, "ended": {"999": 1}}]), "'ended'"),
        (changed(states=[{**ROW, "ended": {"x": 1}}]), "'ended'"),
        (changed(states=[{**ROW, "seen": {"1": -1}}]), "'seen'"),
        (changed(states=[{**ROW, "seen": {"1": float("nan")}}]), "'seen'"),
        (changed(states=[{**ROW, "seen": {"1": "3"}}]), "'seen'"),
    ],
)
def test_what_is_no_stored_model_is_refused_with_a_reason(text: str, problem: str) -> None:
    with pytest.raises(NextUseError, match=problem):
        NextUseModel.from_json(text)


@pytest.mark.parametrize("horizon_s", [0.0, -1.0, float("nan")])
def test_a_horizon_must_be_positive(horizon_s: float) -> None:
    with pytest.raises(ValueError, match="horizon_s"):
        NextUseModel().reuse_discount(TOOL_CALL, 0.0, horizon_s)
    with pytest.raises(ValueError, match="pin_cost_s"):
        TimeToLive(horizon_s)


def test_a_slow_session_is_expected_later() -> None:
    model = NextUseModel()
    slow = Pace()
    for _ in range(20):
        slow.observe(TOOL_CALL, 4 * model.median_s(TOOL_CALL), model.median_s(TOOL_CALL))
    pace = slow.of(TOOL_CALL)
    assert 2.0 < pace < 4.0
    assert model.reuse_discount(TOOL_CALL, 1.0, 300.0, pace) < model.reuse_discount(TOOL_CALL, 1.0, 300.0)
    assert model.expected_remaining_s(TOOL_CALL, 1.0, pace) > model.expected_remaining_s(TOOL_CALL, 1.0)


def test_a_user_who_answers_at_once_is_gone_for_lunch_as_long_as_others() -> None:
    """The next turn of one who has been quick was given up after a minute, as if no one were to come back."""
    quick = Pace()
    for _ in range(20):
        quick.observe(TURN_END, 2.0, 188.0)
    assert quick.of(TURN_END) == 1.0
    assert quick.of(TOOL_CALL) == 1.0


@given(st.lists(st.tuples(states, times_s, st.floats(0.0, 1e6)), max_size=30), states)
def test_a_pace_stays_within_reason(seen: list[Any], state: PauseState) -> None:
    pace = Pace()
    for paused, gap_s, median_s in seen:
        pace.observe(paused, gap_s, median_s)
    assert 1 / 16 <= pace.of(state) <= 16


def test_a_tool_that_returns_soon_is_worth_a_pin_and_one_that_does_not_is_not() -> None:
    times = TimeToLive()
    assert 8.0 < times.time_to_live_s("unknown") < 600.0
    for _ in range(400):
        times.observe("quick", 3.0)
        times.observe("slow", 3000.0)
    assert 3.0 < times.time_to_live_s("quick") < 60.0
    assert times.time_to_live_s("slow") < 3000.0
