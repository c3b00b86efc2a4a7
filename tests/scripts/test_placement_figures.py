# SPDX-License-Identifier: Apache-2.0
"""The figures of docs/placement.md."""

from typing import Any

import pytest

from benchmarks.placement_report import CLASSES, POLICIES, TIERS, Run, build_report
from scripts.placement_figures import placement_section


def report(differing: int = 0) -> dict[str, Any]:
    runs = [
        Run(
            share=share,
            seed=seed,
            policy=policy,
            block_bytes=100,
            placed_blocks={name: {"hbm": 10 * number, "flash": 90 - 10 * number} for name in CLASSES},
            spilled_blocks={name: dict.fromkeys(TIERS, 1) for name in CLASSES},
            flash_bytes_written=6_000_000 // (1 + number + seed),
            preemptions=0,
            requests=100,
            prompt_tokens=1,
            cached_tokens=1,
            wall_s=1.0,
        )
        for share in (0.25, 0.5)
        for number, policy in enumerate(POLICIES)
        for seed in (0, 1)
    ]
    return build_report(
        runs,
        differing,
        {
            "settings": {"block_size": 32},
            "workload": {"sessions": 4, "concurrency": 2, "seeds": 2, "requests": [900, 1000]},
            "live_blocks": {"lead": 10.4, "worker": 100.0},
            "hbm_blocks": {"0.25": 30, "0.5": 60},
            "flash_blocks": 2400,
            "taus": {"shown": [0.531, 0.5], "rank": [0.49, 0.48]},
            "machine": {"cpus": 2},
            "wall_s": 600.0,
        },
    )


def test_every_cell_is_a_line_of_both_tables() -> None:
    section = placement_section(report())
    lines = section.splitlines()
    assert sum(line.startswith("| 0.25 (30 blocks) | `hbm_first` |") for line in lines) == 2
    assert sum(line.startswith("|  | `lachesis` |") for line in lines) == 4
    assert "| `lachesis` | 1.8 | 2.50 (2.00 to 3.00) | 22.2% |" in section
    tables = [line for line in lines if line.startswith("|")]
    for table in (tables[:8], tables[8:]):
        assert len({line.count("|") for line in table}) == 1
        assert len(table) == 2 + 2 * len(POLICIES)


@pytest.mark.parametrize(
    ("differing", "expected"),
    [(0, "of all 1,900 requests are the same on all 6 servers"), (7, "7 answers differ from the first server's")],
)
def test_what_held_in_all_runs_is_said(differing: int, expected: str) -> None:
    section = placement_section(report(differing))
    assert expected in section
    assert "than `hbm_first` in 4 of 4 runs, `lachesis` less than that in 4" in section
    assert "lead 10, worker 100" in section
    assert "0.53, 0.50" in section
