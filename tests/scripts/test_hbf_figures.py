# SPDX-License-Identifier: Apache-2.0
"""Tables of docs/hbf-simulator.md from the JSON files of `vllm-lifetime simulate hbf`."""

import re
from pathlib import Path
from typing import Any

from scripts.update_figures import HBF_SWEEPS, SECTION, TABLES
from vllm_lifetime.simulate.hbf.sensitivity import SWEEPS


def row(policy: str, years: float, seed: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "qwen",
        "config": "4/4",
        "slo": "tight",
        "trace": "multi_agent",
        "policy": policy,
        "seed": seed,
        "sessions": 40 + seed,
        "lifetime_years": years,
        "write_gb_per_s": 2.25,
        "is_settled": seed == 0,
    } | more


def test_results_are_means_over_seeds_with_the_gain_of_the_means():
    rows = [row("hbm_first", 3.0, 0), row("lachesis", 9.0, 0), row("hbm_first", 5.0, 1), row("lachesis", 11.0, 1)]
    text = TABLES["hbf/results"](rows)
    assert "| tight, qwen | 4/4 | 40 | 2.25 | 4.0 ± 1.4 | 10.0 ± 1.4 (2.50) |" in text
    assert "over 2 seeds" in text
    assert "2 runs had not settled" in text


def test_checks_list_what_fails_and_what_it_hinges_on():
    base = {"what": "gain", "target": "3", "value": 2.0, "is_direction": False, "hinges_on": "growth"}
    checks = [
        base | {"pass": False},
        base | {"pass": True, "what": "order", "is_direction": True, "hinges_on": None},
        base | {"pass": None, "value": None},
    ]
    text = TABLES["hbf/checks"](checks)
    assert "1 of 2 checks pass, of the 1 on a direction 1." in text
    assert "| gain | 3 | 2 | growth |" in text
    assert "order" not in text


def test_the_oracle_ends_the_line_of_lachesis():
    rows = [
        row("lachesis", 9.0, 0, value="0.53", gain=3.0, oracle_share=0.86),
        row("oracle", 10.0, 0, value="oracle", gain=3.4, oracle_share=1.0),
    ]
    text = TABLES["hbf/sweep-ranking"](rows)
    assert "| multi_agent, tight, qwen, 4/4 | `lachesis` | 9.00 (3.00, 86%) | 10.00 (3.40, 100%) |" in text


def test_every_sweep_has_a_table_and_every_section_of_the_page_a_name():
    assert set(HBF_SWEEPS) == set(SWEEPS)
    page = (Path(__file__).parents[2] / "docs" / "hbf-simulator.md").read_text()
    names = [match[2] for match in SECTION.finditer(page)]
    assert {"hbf/results", "hbf/checks", "hbf/sweep-ranking", "hbf/sweep-boundary_loss"} <= set(names) <= set(TABLES)
    assert len(names) == len(re.findall("<!-- figures: ", page))
