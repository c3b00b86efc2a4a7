# SPDX-License-Identifier: Apache-2.0
"""The horizon follows how fast the cache is replaced."""

import pytest

from vllm_lifetime.policy.turnover import HORIZON_SHARE, LEAST_CHANGE, LONGEST_S, SHORTEST_S, Turnover


def after(evicted_per_s: float, seconds: int) -> float:
    turnover = Turnover(1000, 300.0)
    for now in range(1, seconds + 1):
        turnover.observe(int(evicted_per_s * now), float(now))
    return turnover.horizon_s


def test_it_starts_where_it_is_told_and_tends_to_a_share_of_the_turnover() -> None:
    assert Turnover(1000, 300.0).horizon_s == pytest.approx(300.0)
    assert after(10.0, 30_000) == pytest.approx(HORIZON_SHARE * 100.0, rel=LEAST_CHANGE - 1)
    assert after(0.2, 30_000) == pytest.approx(HORIZON_SHARE * 5000.0, rel=LEAST_CHANGE - 1)


def test_it_stays_in_bounds_with_few_evictions_and_with_very_many() -> None:
    assert after(0.01, 30_000) == pytest.approx(LONGEST_S, rel=LEAST_CHANGE - 1)
    assert after(1e6, 3000) == SHORTEST_S


def test_a_busy_cache_is_known_within_a_minute_however_long_it_took_to_fill() -> None:
    turnover = Turnover(1000, 300.0)
    assert not any(turnover.observe(0, float(now)) for now in range(10_000))
    for now in range(10_000, 10_060):
        turnover.observe(50 * (now - 9_999), float(now))
    assert turnover.horizon_s < 2 * HORIZON_SHARE * 1000 / 50


def test_how_often_it_is_asked_changes_little() -> None:
    rare = Turnover(1000, 300.0)
    for now in range(50, 6001, 50):
        rare.observe(10 * now, float(now))
    assert rare.horizon_s == pytest.approx(after(10.0, 6000), rel=LEAST_CHANGE - 1)
    assert not rare.observe(70_000, 6000.0)


def test_a_night_without_work_does_not_make_the_horizon_useless_in_the_morning() -> None:
    turnover = Turnover(1000, 300.0)
    for now in range(1, 2000):
        turnover.observe(10 * now, float(now))
    before_s = turnover.horizon_s
    turnover.observe(20_000, 2000.0 + 9 * 3600)
    assert turnover.horizon_s < 2 * before_s


def test_small_changes_are_kept_back() -> None:
    """Each change costs a new rank for all that waits."""
    turnover = Turnover(1000, 300.0)
    evicted_per_s = HORIZON_SHARE * 1000 / 300.0
    assert not any(turnover.observe(int(1.2 * evicted_per_s * now), float(now)) for now in range(1, 20_000, 7))
    assert turnover.horizon_s == 300.0


@pytest.mark.parametrize(("capacity_blocks", "horizon_s"), [(0, 1.0), (1, 0.0)])
def test_bad_parameters_are_refused(capacity_blocks: int, horizon_s: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Turnover(capacity_blocks, horizon_s)
