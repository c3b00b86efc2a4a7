# SPDX-License-Identifier: Apache-2.0
"""Result files and plots where flash is never written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_lifetime.simulate.hbf.report import plot_lifetimes, results_table, write_json
from vllm_lifetime.simulate.hbf.sweep import ResultRow

ROW = ResultRow(
    model="small",
    config="4/4",
    slo="tight",
    trace="mine",
    policy="lachesis",
    seed=0,
    sessions=3,
    lifetime_years=float("inf"),
    hbm_write_share=1.0,
    write_share={"worker": {"hbm": 1.0, "flash": 0.0}},
    flash_share={"worker": 0.0},
    flash_write_gb_per_s=0.0,
    write_gb_per_s=1.0,
    live_gb={"worker": 1.0},
    flash_used_share=0.0,
    tpot_p99_s=0.05,
    tpot_mean_s=0.05,
    measured_s=10.0,
    is_settled=True,
)


def test_a_lifetime_without_end_is_null_in_the_file(tmp_path: Path) -> None:
    write_json(tmp_path / "results.json", [ROW, replace(ROW, lifetime_years=3.0)])
    rows = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert [row["lifetime_years"] for row in rows] == [None, 3.0]


@pytest.mark.parametrize("others", [[], [replace(ROW, policy="hbm_first", lifetime_years=3.0)]])
def test_a_lifetime_without_end_does_not_spoil_table_and_plot(tmp_path: Path, others: list[ResultRow]) -> None:
    rows = [*others, ROW, replace(ROW, seed=1)]
    plot_lifetimes(rows, tmp_path / "lifetimes.png")
    assert (tmp_path / "lifetimes.png").read_bytes().startswith(b"\x89PNG")
    assert results_table(rows).row_count == 1
