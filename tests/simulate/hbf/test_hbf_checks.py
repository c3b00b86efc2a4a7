# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from vllm_lifetime.simulate.hbf.checks import HINGES, hinge_of, run_checks
from vllm_lifetime.simulate.hbf.sweep import Cell, ResultRow

YEARS = {
    "hbm_first": {"1/7": 4.0, "2/6": 3.5, "3/5": 3.0, "4/4": 2.5, "8/8*": 4.9},
    "lachesis": {"1/7": 6.0, "2/6": 6.5, "3/5": 7.0, "4/4": 7.4, "8/8*": 49.0},
}


def row(cell: Cell, policy: str, years: float) -> ResultRow:
    return ResultRow(
        model=cell.model,
        config=cell.config,
        slo=cell.slo,
        trace=cell.trace,
        policy=policy,
        seed=cell.seed,
        sessions=40,
        lifetime_years=years,
        hbm_write_share=0.3,
        write_share={},
        flash_share={},
        flash_write_gb_per_s=1.0 / years,
        write_gb_per_s=2.3,
        live_gb={},
        flash_used_share=0.5,
        tpot_p99_s=0.06,
        tpot_mean_s=0.05,
        measured_s=8000.0,
        is_settled=True,
    )


@pytest.fixture
def rows() -> list[ResultRow]:
    return [
        row(Cell(model, config, "tight", "multi_agent", 0), policy, years)
        for model in ("llama-4-maverick", "qwen3-235b-a22b")
        for policy, by_config in YEARS.items()
        for config, years in by_config.items()
    ]


def test_checks_without_their_cells_say_nothing():
    assert all(check.passes is None and check.value is None and check.hinges_on is None for check in run_checks([]))


def test_a_direction_has_no_tolerance_and_a_range_has(rows):
    checks = {check.id: check for check in run_checks(rows)}
    assert checks["1.tight"].passes
    assert checks["1.tight"].is_direction
    assert checks["2.gain.tight.smallest"].value == pytest.approx(1.5)
    assert checks["4.rises.qwen3-235b-a22b"].passes
    fallen = [
        replace(found, lifetime_years=6.9) if found.config == "4/4" and found.policy == "lachesis" else found for found in rows
    ]
    fallen_checks = {check.id: check for check in run_checks(fallen)}
    assert fallen_checks["4.rises.qwen3-235b-a22b"].passes is False
    assert fallen_checks["4.rises.qwen3-235b-a22b"].value == 2


def test_only_a_check_that_fails_says_what_it_hinges_on(rows):
    for found in (rows, [replace(found, lifetime_years=2 * found.lifetime_years) for found in rows]):
        for check in run_checks(found):
            assert check.hinges_on == (hinge_of(check.id) if check.passes is False else None)


def test_every_explanation_belongs_to_a_check():
    ids = [check.id for check in run_checks([])]
    for beginning in HINGES:
        assert any(id.startswith(beginning) for id in ids), beginning
