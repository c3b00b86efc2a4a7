# SPDX-License-Identifier: Apache-2.0
"""Figures, table and plot of the comparison of placement policies, from made-up counters."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.placement_report import Run, build_report, num_differing, plot, read_run, table
from benchmarks.server import Metrics

KNOWN: dict[str, Any] = {"block_bytes": 100, "requests": 5, "prompt_tokens": 50, "cached_tokens": 20, "wall_s": 1.0}


def metrics(**changes: float) -> Metrics:
    """Counters; a change is named `placed_TIER_CLASS`, `spilled_TIER_CLASS`, or `flash_bytes`."""
    found: Metrics = {("vllm:num_preemptions_total", ()): 0.0}
    for name, value in changes.items():
        kind, tier, *rest = name.split("_", 2)
        if name == "flash_bytes":
            found["vllm:lifetime_bytes_written_total", (("tier", "flash"),)] = value
        else:
            found[f"vllm:lifetime_{kind}_blocks_total", (("class", rest[0]), ("tier", tier))] = value
    return found


def make_run(policy: str, flash_bytes: int, reviewers_in_hbm: int, share: float = 0.5, seed: int = 0) -> Run:
    after = metrics(
        placed_hbm_reviewer=reviewers_in_hbm,
        placed_flash_reviewer=10 - reviewers_in_hbm,
        placed_flash_lead=10,
        flash_bytes=flash_bytes,
    )
    return read_run(metrics(), after, share=share, seed=seed, policy=policy, **KNOWN)


def test_a_run_is_the_difference_of_two_scrapes() -> None:
    before = metrics(placed_hbm_worker=5, placed_flash_lead=1, spilled_hbm_worker=1, flash_bytes=100)
    after = metrics(
        placed_hbm_worker=8,
        placed_flash_lead=2,
        placed_flash_reasoning_stripped=4,
        placed_hbm_unknown=9,
        spilled_hbm_worker=3,
        flash_bytes=450,
    )
    run = read_run(before, after, share=0.5, seed=1, policy="lachesis", **KNOWN)
    assert run.placed_blocks["worker"] == {"hbm": 3, "flash": 0}
    assert run.placed_blocks["lead"] == {"hbm": 0, "flash": 5}
    assert run.spilled_blocks["worker"] == {"hbm": 2, "flash": 0}
    assert (run.flash_bytes_written, run.preemptions) == (350, 0)
    assert (run.bytes_in("hbm"), run.bytes_in("flash")) == (300, 500)
    assert run.hbm_share_of_writes == pytest.approx(3 / 8)
    assert run.hbm_share_of("worker") == 1.0
    assert run.hbm_share_of("reviewer") == 0.0


def test_gains_compare_equal_seeds() -> None:
    runs = [
        make_run("hbm_first", 1000, 1, seed=0),
        make_run("hbm_first", 3000, 1, seed=1),
        make_run("lachesis", 500, 8, seed=0),
        make_run("lachesis", 1000, 8, seed=1),
    ]
    cells = {cell["policy"]: cell for cell in build_report(runs, 0, {})["cells"]}
    assert (cells["lachesis"]["gain"], cells["lachesis"]["gain_low"], cells["lachesis"]["gain_high"]) == (2.5, 2.0, 3.0)
    assert cells["hbm_first"]["gain"] == 1.0
    assert cells["lachesis"]["hbm_share_rise"] == 8.0
    assert cells["lachesis"]["hbm_share_of_class"]["reviewer"] == 0.8


@pytest.mark.parametrize(
    ("flash", "reviewers", "expected"),
    [((900, 600, 500), 8, (1, 1, 1)), ((900, 500, 600), 8, (1, 0, 1)), ((500, 900, 400), 5, (0, 1, 0))],
)
def test_order_is_told_as_it_is(flash: tuple[int, int, int], reviewers: int, expected: tuple[int, int, int]) -> None:
    policies = ("hbm_first", "lachesis_no_predictive", "lachesis")
    runs = [make_run(policy, written, reviewers) for policy, written in zip(policies, flash, strict=True)]
    (order,) = build_report(runs, 0, {})["orders"]
    keys = ("no_predictive_below_hbm_first", "lachesis_below_no_predictive", "reviewers_mostly_in_hbm")
    assert tuple(order[key] for key in keys) == expected
    assert (order["share"], order["seeds"]) == (0.5, 1)


@pytest.mark.parametrize(("differing", "identical"), [(0, True), (3, False), (None, None)])
def test_tokens_identical(differing: int | None, identical: bool | None) -> None:
    report = build_report([make_run("hbm_first", 1000, 1)], differing, {"wall_s": 7})
    assert report["tokens_identical"] is identical
    assert report["wall_s"] == 7


def test_differing_requests() -> None:
    one = {("a", 0): (1, 2), ("a", 1): (3,), ("b", 0): (4,)}
    assert num_differing(one, dict(one)) == 0
    assert num_differing(one, {("a", 0): (1, 2), ("a", 1): (9,), ("c", 0): (4,)}) == 3


def test_table_and_plot_with_and_without_a_baseline(tmp_path: Path) -> None:
    alone = [make_run("lachesis", 500_000, 8)]
    both = [make_run(policy, 1_000_000 if policy == "hbm_first" else 400_000, 8) for policy in ("hbm_first", "lachesis")]
    for runs, gain in ((alone, ""), (both, "2.50 (2.50 to 2.50)")):
        report = build_report(runs, 0, {})
        console = Console(width=130)
        with console.capture() as captured:
            console.print(table(report))
        assert gain in captured.get()
        assert "lachesis" in captured.get()
        plot(report, tmp_path / "out" / "placement.png")
        assert (tmp_path / "out" / "placement.png").read_bytes().startswith(b"\x89PNG")
