# SPDX-License-Identifier: Apache-2.0
"""Advice: variants, picks, and what is said of them."""

import json
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from tests.analysis.analysis_testing import delegating, stripping, trace_of
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.simulate.hbf.advice_report import advice_table, plot_advice, write_advice
from vllm_lifetime.simulate.hbf.advise import (
    BASE,
    Advice,
    Outcome,
    Scale,
    VariantAdvice,
    advise,
    fit_durations,
    scaled,
    sentence_of,
    variants,
)
from vllm_lifetime.simulate.hbf.hardware import load_device
from vllm_lifetime.simulate.hbf.node import SimulationError
from vllm_lifetime.simulate.hbf.own_trace import own_trace
from vllm_lifetime.simulate.hbf.replay_trace import Program, Request, all_programs
from vllm_lifetime.simulate.hbf.sweep import Setup
from vllm_lifetime.simulate.hbf.workloads import Session


def real_sessions() -> list[Session]:
    trace = trace_of(stripping(), stripping("t", 5000), delegating(), delegating("e", 2000, rounds=3))
    return own_trace(trace, "mine", 1800.0).sessions(ttft_s=1.0)


def outcome(config: str, years: float, sessions: float, variant: str = BASE, policy: str = "lachesis") -> Outcome:
    return Outcome(variant, config, policy, sessions, years, 1.0, 0.1, 0.05, is_settled=True)


# ------------------------------------------------------------------------------------------------ variants


def test_a_scale_changes_what_it_says_and_nothing_else() -> None:
    before = real_sessions()
    after = scaled(before, Scale(outputs=2.0, observations=0.5, tools=4.0))
    for old, new in zip(before, after, strict=True):
        for one, other in zip(all_programs(old.root), all_programs(new.root), strict=True):
            assert one.shared_tokens == other.shared_tokens
            for mine, theirs in zip(one.requests, other.requests, strict=True):
                assert theirs.decode_tokens == 2 * mine.decode_tokens
                assert theirs.prefill_tokens == (max(1, round(mine.prefill_tokens / 2)) if mine.prefill_tokens else 0)
                assert theirs.wait_s == pytest.approx(mine.wait_s * (1 if mine.answers_user else 4))
    workers = [p for s in after for p in all_programs(s.root) if p.segment_class is SegmentClass.WORKER]
    mean = sum(worker.tokens for worker in workers) / len(workers)
    assert [worker.expected_tokens for worker in workers] == [pytest.approx(mean)] * 2


def test_variants_change_one_thing_each() -> None:
    names = [variant.name for variant in variants("tight")]
    assert names[0] == BASE
    assert "SLO loose" in names and "SLO tight" not in names
    assert {"SLO tight", "SLO loose"} <= {variant.name for variant in variants("80")}
    for variant in variants("tight")[1:]:
        changes = (variant.slo != "tight", variant.scale != Scale(), variant.endurance != 1.0)
        assert sum(changes) == 1


def test_runs_are_as_long_as_several_sessions() -> None:
    sessions = [Session("long", Program(SegmentClass.LEAD, [Request(5, 5), Request(5, 5, wait_s=10_000.0)]))]
    setup = fit_durations(Setup(), sessions, 0.1)
    assert setup.warmup_s == pytest.approx(2 * 10_001.0)
    assert setup.admission_measure_s == pytest.approx(3 * 10_001.0)
    short = [Session("short", Program(SegmentClass.LEAD, [Request(5, 5)]))]
    assert fit_durations(Setup(), short, 0.1) == Setup()


def test_a_session_that_is_compacted_is_as_long_as_all_of_its_parts() -> None:
    first = Program(SegmentClass.LEAD, [Request(1, 0), Request(1, 0, wait_s=8000.0)])
    first.successor = Program(SegmentClass.LEAD, [Request(1, 0), Request(1, 0, wait_s=4000.0)])
    assert fit_durations(Setup(), [Session("s", first)], 0.1).warmup_s == pytest.approx(24_000.0)


# ------------------------------------------------------------------------------------------------ words


def test_the_sentence_names_what_lasts_and_what_serves() -> None:
    outcomes = [
        outcome("1/7", 4.0, 90),
        outcome("1/7", 3.0, 90, policy="hbm_first"),
        outcome("4/4", 8.0, 60),
        outcome("4/4", 4.0, 60, policy="hbm_first"),
        outcome("8/8*", 20.0, 95),
        outcome("1/7", 9.0, 90, "SLO loose"),
        outcome("4/4", 7.0, 60, "SLO loose"),
        outcome("4/4", 2.4, 60, "endurance x0.3"),
    ]
    text = sentence_of("mine", "small", "tight", load_device(), outcomes)
    assert text == (
        "For mine on small at 60 ms: with 8 stacks, 4/4 under lachesis lasts longest, 8.0 years (2.00 times hbm_first), and "
        "serves 60 sessions, while 1/7 serves most, 90, and lasts 4.0 years; 4/4 stays the longest-lived in 1 of 2 variants, "
        "not with SLO loose (1/7); with 16 stacks, 8/8* under lachesis lasts 20.0 years, and serves 95 sessions."
    )


def test_the_sentence_says_when_the_warranty_is_not_reached_and_no_split_serves_more() -> None:
    text = sentence_of("mine", "small", "80", load_device(), [outcome("1/7", 4.0, 99), outcome("4/4", 3.9, 100)])
    assert "at 80 ms: with 8 stacks, 1/7 under lachesis lasts longest, 4.0 years, less than a warranty of 5 years" in text
    assert "serves 99 sessions, as many as any" in text


def test_the_sentence_says_when_flash_is_never_written() -> None:
    found = [outcome("4/4", float("inf"), 9), outcome("4/4", 3.0, 9, policy="hbm_first"), outcome("1/7", 3.0, 9)]
    text = sentence_of("mine", "small", "tight", load_device(), found)
    assert "4/4 under lachesis lasts longest, endless years, and serves 9 sessions, as many as any" in text


def test_an_endless_lifetime_is_null_in_the_file_and_drawn_as_nothing(tmp_path: Path) -> None:
    found = [outcome("1/7", float("inf"), 9), outcome("4/4", 3.0, 9)]
    picks = [VariantAdvice(BASE, found[0], found[1])]
    advice = Advice("mine", "small", "tight", "Take it.", found, picks, {("SLO loose", "1/7"): "does not fit"})
    write_advice(tmp_path / "advice.json", [advice], "mine: 4 sessions")
    read = json.loads((tmp_path / "advice.json").read_text(), parse_constant=pytest.fail)
    assert read["workload"] == "mine: 4 sessions"
    assert [row["lifetime_years"] for row in read["advice"][0]["outcomes"]] == [None, 3.0]
    assert read["advice"][0]["failed"] == [{"variant": "SLO loose", "config": "1/7", "reason": "does not fit"}]
    assert read["advice"][0]["picks"][0]["longest"]["lifetime_years"] is None
    # Of the second one, nothing can be drawn.
    plot_advice([advice, replace(advice, outcomes=found[:1])], tmp_path / "advice.png")
    assert (tmp_path / "advice.png").read_bytes().startswith(b"\x89PNG")


# ------------------------------------------------------------------------------------------------ runs


def small_setup(folder: Path, **changes: str) -> Setup:
    """The package's device with stacks so small that its pool is full soon, and short runs."""
    text = (resources.files("vllm_lifetime.simulate.hbf") / "data" / "rubin_hbf.toml").read_text("utf-8")
    for old, new in ({"value = 512,": "value = 12,", "value = 36,": "value = 2.1,"} | changes).items():
        text = text.replace(old, new)
    path = folder / "small.toml"
    path.write_text(text)
    return Setup(
        device=str(path), admission_warmup_s=10.0, admission_measure_s=20.0, warmup_s=20.0, measure_s=40.0, turnovers=1.0
    )


def test_advice_has_every_variant_of_every_split(tmp_path: Path) -> None:
    sessions = []
    for number in range(6):
        worker = Program(SegmentClass.WORKER, [Request(3000 + 500 * number, 40, ttft_s=0.1)], expected_tokens=3000.0)
        lead = Program(
            SegmentClass.LEAD, [Request(500, 20, ttft_s=0.1, children=[worker]), Request(90, 9, wait_s=0.5, ttft_s=0.1)]
        )
        sessions.append(Session("mine", lead))
    setup = small_setup(tmp_path, **{"value = 12,": "value = 14,"})
    heard: list[int] = []
    cells: list[object] = []
    advice = advise(
        setup,
        "mine",
        sessions,
        "qwen3-235b-a22b",
        ["1/7", "8/8*"],
        "15",
        ["lachesis"],
        on_start=heard.append,
        on_done=cells.append,
    )
    names = [variant.name for variant in variants("15")]
    assert heard == [len(cells)] == [2 * sum(not name.startswith("endurance") for name in names)]
    run = {(found.variant, found.config) for found in advice.outcomes}
    assert run | set(advice.failed) | {(name, "1/7") for name in names} >= {(name, "8/8*") for name in names}
    years = {found.variant: found.lifetime_years for found in advice.outcomes if found.config == "8/8*"}
    assert years["endurance x0.1"] == pytest.approx(0.1 * years[BASE])
    assert advice.sentence.startswith("For mine on qwen3-235b-a22b at 15 ms: ")
    table = advice_table(advice)
    assert table.row_count == len(advice.picks)


def test_what_no_configuration_can_run_is_said_with_the_reason(tmp_path: Path) -> None:
    sessions = [Session("big", Program(SegmentClass.LEAD, [Request(10_000_000, 5)]))]
    setup = replace(small_setup(tmp_path), device="rubin_hbf")
    with pytest.raises(SimulationError, match="no configuration can run big: not even one session keeps"):
        advise(setup, "big", sessions, "qwen3-235b-a22b", ["4/4"], "15", ["hbm_first"])
