# SPDX-License-Identifier: Apache-2.0
import json
import math
import re
from dataclasses import replace

import pytest

from vllm_lifetime.simulate.hbf import sensitivity
from vllm_lifetime.simulate.hbf.sensitivity import (
    SWEEPS,
    Point,
    _make_load,
    check_sweep,
    plot_sweep,
    run_sweep,
    sweep_table,
    write_sweep,
)
from vllm_lifetime.simulate.hbf.sweep import Cell, Setup
from vllm_lifetime.simulate.hbf.write_amplification import AMPLIFICATIONS, random_writes


@pytest.fixture(scope="module")
def setup() -> Setup:
    """Short runs."""
    return Setup(admission_warmup_s=100.0, admission_measure_s=200.0, warmup_s=200.0, measure_s=500.0, turnovers=0.1)


CELL = Cell("qwen3-235b-a22b", "4/4", "tight", "multi_agent", 0)


@pytest.fixture(scope="module")
def ranking(setup: Setup) -> list[sensitivity.SweepRow]:
    return run_sweep(setup, "ranking", [CELL])


def test_scores_that_are_never_wrong_decide_as_the_oracle(ranking):
    by_value = {row.value: row for row in ranking}
    assert by_value["1"].lifetime_years == by_value["oracle"].lifetime_years
    assert by_value["1"].oracle_share == by_value["1"].ranking_share == 1.0
    assert by_value["0"].ranking_share == 0.0
    assert len({row.lifetime_years for row in ranking}) >= 4
    assert len({row.row.sessions for row in ranking}) == 1


def test_results_come_as_table_plot_and_json(ranking, tmp_path):
    table = sweep_table(ranking)
    assert table.row_count == 1
    assert [column.header for column in table.columns][5:] == ["0", "0.25", "0.53", "0.75", "1", "oracle"]
    plot_sweep(ranking, tmp_path / "ranking.png")
    write_sweep(tmp_path / "ranking.json", ranking)
    assert (tmp_path / "ranking.png").stat().st_size > 5000
    rows = json.loads((tmp_path / "ranking.json").read_text())
    assert [(row["value"], row["policy"]) for row in rows][-2:] == [("1", "lachesis"), ("oracle", "oracle")]
    assert rows[0]["gain"] == ranking[0].gain


def test_an_endless_lifetime_was_not_json(ranking, tmp_path):
    """JSON has no Infinity: a flash that is never written to has null, as in results.json."""
    endless = replace(ranking[0], lifetime_years=math.inf, row=replace(ranking[0].row, lifetime_years=math.inf))
    write_sweep(tmp_path / "endless.json", [endless])

    def refuse(text: str) -> None:
        raise ValueError(text)

    [row] = json.loads((tmp_path / "endless.json").read_text(), parse_constant=refuse)
    assert row["lifetime_years"] is None and row["gain"] == ranking[0].gain


def test_more_lost_boundaries_leave_less_gain(setup):
    rows = [row for row in run_sweep(setup, "boundary_loss", [CELL]) if row.row.policy == "lachesis_no_predictive"]
    shares = [row.row.hbm_write_share for row in rows]
    assert shares[0] > shares[3] > shares[-1]
    assert len({row.row.sessions for row in rows}) == 1


def test_points_of_another_load_admit_anew(setup):
    admitted = []
    for tokens in (5000.0, 35000.0):
        point = Point(f"{tokens}", general={"shared_prefix": tokens})
        assert point.load != Point("plain").load
        admitted.append(_make_load(setup, CELL, point).admitted)
    assert admitted[0] > 1.5 * admitted[1]


@pytest.mark.parametrize(
    ("name", "traces", "sentence"),
    [
        ("weather", ["bfcl"], "unknown sweep 'weather'; there are ranking, boundary_loss"),
        ("ranking", ["multi_agent", "bfcl"], "means nothing for the trace 'bfcl'; take multi_agent or multi_agent_no_reviewer"),
        ("user_delay", ["multi_agent"], "means nothing for the trace 'multi_agent'; take tau3 or bfcl"),
    ],
)
def test_a_sweep_that_says_nothing_is_refused(name, traces, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_sweep(name, traces)


def test_every_point_of_a_sweep_has_a_value_of_its_own():
    for sweep in SWEEPS.values():
        assert len({point.value for point in sweep.points}) == len(sweep.points)


# ------------------------------------------------------------------------------------------------ write amplification


def test_random_writes_cost_what_is_published_for_a_full_device():
    """Desnoyers' equation: with utilization u = (v - 1) / ln v, 1 / (1 - v) is written for each byte."""
    assert random_writes(1.0, 0.28) == pytest.approx(2.48, abs=0.01)
    assert random_writes(1.0, 0.07) == pytest.approx(7.82, abs=0.01)
    assert random_writes(0.0, 0.07) == pytest.approx(1.0, abs=1e-6)
    with pytest.raises(ValueError, match="spare flash only"):
        random_writes(1.0, 0.0)


def test_less_in_use_costs_less():
    for name, amplification in AMPLIFICATIONS.items():
        if amplification is not None:
            values = [amplification(used / 10) for used in range(11)]
            assert values == sorted(values), name
            assert values[0] == pytest.approx(1.0, abs=1e-6)
