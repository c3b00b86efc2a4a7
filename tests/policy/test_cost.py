# SPDX-License-Identifier: Apache-2.0
"""What is learned of transfers and prefills, and the decision that rests on it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.policy.cost import LinearCost, LoadPolicy

positive = st.floats(min_value=1e-6, max_value=1e3)


@given(fixed=positive, per_unit=positive, sizes=st.lists(st.integers(1, 10_000), min_size=2, max_size=50, unique=True))
def test_a_line_is_found(fixed: float, per_unit: float, sizes: list[int]) -> None:
    """Noise-free observations of any line are predicted exactly, between and beyond the sizes seen."""
    cost = LinearCost()
    for size in sizes:
        cost.observe(size, fixed + per_unit * size)
    for size in (min(sizes), max(sizes), 2 * max(sizes)):
        assert math.isclose(cost.predict(size), fixed + per_unit * size, rel_tol=1e-3, abs_tol=1e-6)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 100)), max_size=50), st.integers(0, 100_000))
def test_predictions_are_never_negative(observations: list[tuple[int, float]], size: int) -> None:
    """Whatever was observed."""
    cost = LinearCost()
    for observed, seconds in observations:
        cost.observe(observed, seconds)
    assert cost.predict(size) >= -1e-9


def test_equal_sizes_are_charged_per_unit() -> None:
    """With one size only, nothing tells a fixed cost from one per unit."""
    cost = LinearCost()
    for _ in range(10):
        cost.observe(100, 1.0)
    assert cost.predict(200) == pytest.approx(2.0)


def test_the_past_fades() -> None:
    """A device that has become ten times slower is believed after some observations."""
    cost = LinearCost()
    for _ in range(200):
        cost.observe(100, 1.0)
    for _ in range(150):
        cost.observe(100, 10.0)
    assert cost.predict(100) > 9


def measured(load_seconds: float, prefill_seconds: float) -> LoadPolicy:
    """A policy that has seen 1000 bytes loaded from flash and 100 tokens computed."""
    policy = LoadPolicy()
    policy.observe_load("flash", 1000, load_seconds)
    policy.observe_prefill(100, prefill_seconds)
    return policy


def test_the_faster_way_is_taken() -> None:
    """Load or recompute."""
    assert measured(0.1, 1.0).should_load(100, {"flash": 1000}, {})
    assert not measured(1.0, 0.1).should_load(100, {"flash": 1000}, {})


def test_queued_transfers_count() -> None:
    """A load behind a long queue is late."""
    policy = measured(0.1, 0.5)
    assert policy.should_load(100, {"flash": 1000}, {"flash": 1000})
    assert not policy.should_load(100, {"flash": 1000}, {"flash": 9000})


def test_nothing_known_is_tried() -> None:
    """The first load measures."""
    assert LoadPolicy().should_load(1, {"host": 10}, {})
    policy = LoadPolicy()
    policy.observe_prefill(100, 0.001)
    assert policy.should_load(100, {"host": 1 << 30}, {})


def test_a_refused_tier_is_tried_again_now_and_then() -> None:
    """Or it would be slow for ever."""
    policy = measured(1.0, 0.1)
    answers = [policy.should_load(100, {"flash": 1000}, {}) for _ in range(2 * LoadPolicy.RETRY_EVERY)]
    assert answers.count(True) == 2


def test_always_means_always() -> None:
    """For tests and for those who know better."""
    policy = LoadPolicy(always=True)
    policy.observe_load("flash", 1, 1e6)
    policy.observe_prefill(1000, 1e-6)
    assert policy.should_load(1, {"flash": 1000}, {})
