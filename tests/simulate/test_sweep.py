# SPDX-License-Identifier: Apache-2.0
"""Sweeps: one row per value and policy, over seeds."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vllm_lifetime.simulate.sweep import Sweep, plot_sweep, plot_sweeps, sweep, write_sweep

SMALL = Sweep("swebench-autogen", "noise", ("0", "1"), ("lru", "hierarchical"), 4, 0.9, 12, 12, seeds=2)


def test_noise_changes_what_depends_on_forecasts_and_nothing_else(tmp_path: Path) -> None:
    rows = sweep(SMALL)
    rates = {(row.policy, row.value): row.hit_rate for row in rows}
    assert [(row.value, row.policy, row.seeds) for row in rows] == [
        (value, policy, 2) for value in ("0", "1") for policy in ("lru", "hierarchical")
    ]
    assert rates["lru", "0"] == rates["lru", "1"]
    assert rates["hierarchical", "0"] != rates["hierarchical", "1"]
    assert all(row.deviation > 0 for row in rows)
    assert all(0 < row.evicted_per_read < 2 for row in rows)
    write_sweep(rows, tmp_path / "rows.json")
    assert [row["hit_rate"] for row in json.loads((tmp_path / "rows.json").read_text())] == [row.hit_rate for row in rows]
    plot_sweep(rows, tmp_path / "plot.png")
    plot_sweeps([rows, rows, rows], tmp_path / "plots.png", columns=2)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("parameter", "values"),
    [("concurrency", "2"), ("horizon", "1"), ("horizon", "5"), ("gamma", "0.3"), ("predictor", "markov1"), ("rho", "0.2")],
)
def test_every_parameter_can_be_varied(parameter: str, values: str) -> None:
    small = replace(SMALL, policies=("pbkv", "belady"), seeds=1, workflows=6, training_workflows=4)
    what = replace(small, parameter=parameter, values=(values,))
    pbkv, _ = sweep(what)
    assert 0 < pbkv.hit_rate < 1


@pytest.mark.parametrize(
    ("parameter", "value", "message"),
    [
        ("speed", "1", "unknown parameter 'speed'; there are concurrency"),
        ("noise", "2", "lambda must be in"),
        ("noise", "some", "expected a number, found 'some'"),
        ("horizon", "0", "horizon K must be at least 1"),
        ("concurrency", "0", "concurrency must be at least 1"),
        ("predictor", "no-such-file", "no-such-file"),
    ],
)
def test_what_cannot_be_is_said(parameter: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(replace(SMALL, parameter=parameter, values=(value,), seeds=1, workflows=4, training_workflows=0))
