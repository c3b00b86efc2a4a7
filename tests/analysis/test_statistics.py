# SPDX-License-Identifier: Apache-2.0
"""Separability, overlap, spread and Kendall's tau."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.analysis.statistics import kendall_tau, median_ratio, overlap, separability, spread

values = st.lists(st.integers(0, 6).map(float), min_size=1, max_size=12)


@given(values, values)
def test_separability_is_the_share_of_pairs(long: list[float], short: list[float]) -> None:
    pairs = [(a > b) + (a == b) / 2 for a in long for b in short]
    exact = sum(pairs) / len(pairs)
    assert separability(long, short) == pytest.approx(exact)
    assert overlap(long, short) == pytest.approx(2 * min(exact, 1 - exact))


def test_separability_and_overlap_by_hand() -> None:
    assert separability([3, 4], [1, 3]) == (1 + 0.5 + 1 + 1) / 4
    assert overlap([3, 4], [1, 2]) == 0
    assert separability([], [1]) is None
    assert overlap([1], []) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_kendalls_tau_counts_pairs(points: list[tuple[int, int]]) -> None:
    signs = [((a > c) - (a < c), (b > d) - (b < d)) for (a, b), (c, d) in combinations(points, 2)]
    ties_x, ties_y = sum(x != 0 for x, _ in signs), sum(y != 0 for _, y in signs)
    tau = kendall_tau([a for a, _ in points], [b for _, b in points])
    if not ties_x or not ties_y:
        assert tau is None
    else:
        assert tau == pytest.approx(sum(x * y for x, y in signs) / (ties_x * ties_y) ** 0.5)


def test_spread_and_ratio() -> None:
    assert spread([float(value) for value in range(1, 12)]) == 10 / 2
    assert spread([0.0, 0.0]) is None
    assert spread([]) is None
    assert median_ratio([4, 6, 100], [3]) == 2
    assert median_ratio([1], [0]) is None
    assert median_ratio([], [1]) is None
