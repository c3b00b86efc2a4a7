# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hbf_testing import CONFIG, dialogues, multi_agent, node, started, worker
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement import PlacedSegment, Tier, TierCounts, parse_placement
from vllm_lifetime.simulate.hbf import closed_forms
from vllm_lifetime.simulate.hbf import node as node_module
from vllm_lifetime.simulate.hbf.ablations import ABLATIONS, POLICIES, SizedSegment, parse_policy
from vllm_lifetime.simulate.hbf.node import MAX_SESSIONS, SimulationError, _largest, admit_sessions
from vllm_lifetime.simulate.hbf.replay_trace import CLASSES, ReplayTrace, Request, build_trace
from vllm_lifetime.simulate.hbf.state import (
    FREE,
    LOG_CLOSE,
    LOG_MOVE,
    LOG_OPEN,
    LOG_READ,
    LOG_REQUEST,
    LOG_WRITE,
    LOGGED,
    POLICY_NUMBERS,
    DecisionLog,
)

ALL = sorted(POLICY_NUMBERS)


def test_compiled_code_knows_every_policy():
    assert set(POLICY_NUMBERS) == set(POLICIES)


@pytest.mark.parametrize("make_trace", [multi_agent, dialogues])
@pytest.mark.parametrize("policy", ALL)
def test_the_python_policies_decide_as_the_compiled_ones(policy: str, make_trace):
    """Every decision of a run is replayed through the object that the server uses, or that an ablation is defined by."""
    trace = make_trace(np.random.default_rng(1))
    log = DecisionLog(np.zeros((60_000, 4), np.int64))
    setup = node(policy, hbm=1_500, flash=400_000)
    run = started(setup, trace, 12, log)
    run.run(100.0, max_steps=12_000)
    events = log.rows[: run.state.counts[LOGGED]]
    assert len(events) > 4_000
    tiers_wanted = _replay(policy, trace, setup.hbm_tokens, setup.flash_tokens, events)
    if not policy.startswith("hbm_first") and policy not in ("lru_migrate", "output_length"):
        assert tiers_wanted == {Tier.HBM, Tier.FLASH}


@pytest.mark.parametrize("policy", ["lachesis", "read_write_ratio"])
def test_they_decide_alike_when_boundaries_are_lost_too(policy: str):
    """A lost boundary is a close that comes when the lease is over."""
    trace = multi_agent(np.random.default_rng(1))
    log = DecisionLog(np.zeros((60_000, 4), np.int64))
    setup = node(policy, hbm=5_000, flash=400_000)
    run = started(setup, trace, 12, log, boundary_loss=0.4)
    run.run(100.0, max_steps=12_000)
    _replay(policy, trace, setup.hbm_tokens, setup.flash_tokens, log.rows[: run.state.counts[LOGGED]])


def _replay(policy: str, trace: ReplayTrace, hbm: int, flash: int, events: np.ndarray) -> set[Tier]:
    tiers = TierCounts(hbm, flash)
    placement = POLICIES[policy](tiers, CONFIG)
    is_per_tier = getattr(placement, "evicts_per_tier", False)
    segments: dict[int, PlacedSegment] = {}
    dead: list[list[int]] = []
    seen = set()
    for at, (kind, uid, a, b) in enumerate(events.tolist()):
        if kind == LOG_OPEN:
            program = trace.programs[a]
            rows = trace.rows[program["first_row"] : program["end_row"]]
            segments[uid] = SizedSegment(
                CLASSES[program["kind"]],
                score=float(program["score"]),
                expected_blocks=float(program["expected_tokens"]),
                lifetime_s=float(program["lifetime_s"]),
            )
            segments[uid].final_blocks = int(rows["prefill_tokens"].sum() + rows["decode_tokens"].sum())
            placement.open(segments[uid])
        elif kind == LOG_REQUEST:
            placement.on_request(segments[uid], a)
        elif kind == LOG_READ:
            placement.on_read(segments[uid], a)
        elif kind == LOG_CLOSE:
            segment = segments.pop(uid)
            placement.close(segment)
            if placement.frees_at_boundary:
                for tier in Tier:
                    tiers.free[tier] += segment.blocks[tier]
            else:
                dead.append(segment.blocks)
        elif kind == LOG_WRITE:
            segment = segments[uid]
            if b < 0:  # what a session had written before the run began
                placement.on_allocated(segment, Tier.FLASH, a)
                tiers.free[Tier.FLASH] -= a
                continue
            wanted = placement.tier_for(segment, a)
            assert wanted == b, (at, segment.segment_class)
            seen.add(wanted)
            if placement.migrates and tiers.free[Tier.HBM] < a:
                moves = at + 1
                while events[moves, 0] == LOG_MOVE and tiers.free[Tier.HBM] < a:
                    victim = placement.next_to_migrate()
                    assert victim is segments[int(events[moves, 1])], at
                    number = int(events[moves, 2])
                    placement.on_freed(victim, Tier.HBM, number)
                    placement.on_allocated(victim, Tier.FLASH, number)
                    tiers.free[Tier.HBM] += number
                    tiers.free[Tier.FLASH] -= number
                    moves += 1
            left = a
            while left:
                for tier in (wanted, wanted.other):
                    for blocks in dead if is_per_tier else ():
                        if left <= tiers.free[tier]:
                            break
                        tiers.free[tier] += blocks[tier]
                        blocks[tier] = 0
                    given = min(left, tiers.free[tier])
                    tiers.free[tier] -= given
                    left -= given
                    if given:
                        placement.on_allocated(segment, tier, given)
                if left:
                    oldest = dead.pop(0)
                    for tier in Tier:
                        tiers.free[tier] += oldest[tier]
    return seen


@pytest.mark.parametrize("policy", ["lachesis", "oracle", "oracle_per_byte"])
def test_where_there_is_no_worker_every_policy_that_ranks_decides_by_class(policy: str):
    """So that one run stands for all of them."""
    trace = dialogues(np.random.default_rng(8))
    written = []
    for name in ("lachesis_no_predictive", policy):
        run = started(node(name, hbm=1_500, flash=400_000), trace, 12)
        run.clear()
        run.run(50.0)
        written.append(run.measure().written.tolist())
    assert written[0] == written[1]


@pytest.mark.parametrize("policy", sorted(ABLATIONS))
def test_an_ablation_is_offline_and_does_not_reach_the_server_s_table(policy: str):
    assert parse_policy(policy).is_offline
    with pytest.raises(ValueError, match="unknown placement"):
        parse_placement(policy)


def test_with_a_queue_for_each_tier_hbm_turns_over_as_if_blocks_were_freed_at_the_boundary():
    """Which is why the baseline's share of HBM writes rests on one queue for both tiers."""
    trace = multi_agent(np.random.default_rng(6))
    written = {}
    for policy in ("hbm_first", "hbm_first_freed", "hbm_first_lru_per_tier"):
        run = started(node(policy, hbm=4_000, flash=60_000), trace, 8)
        run.run(10.0, least_tokens=100_000)
        run.clear()
        run.run(10.0, least_tokens=300_000)
        written[policy] = run.measure().hbm_write_share
    assert written["hbm_first_lru_per_tier"] == pytest.approx(written["hbm_first_freed"], rel=0.05)
    assert written["hbm_first_freed"] > 3 * written["hbm_first"]


def test_a_lost_boundary_keeps_the_segment_for_its_lease():
    """One session that writes 40 tokens and loses every end: what stays is what it wrote during the last 20 seconds."""
    trace = build_trace([worker(20, 20)], 0.2)
    held = {}
    for loss in (0.0, 1.0):
        run = started(node("lachesis_no_predictive"), trace, 1, boundary_loss=loss)
        run.run(60.0)
        run.clear()
        run.run(60.0)
        measured = run.measure()
        held[loss] = float(measured.live.sum())
    rate = measured.total / measured.measured_s
    assert held[1.0] - held[0.0] == pytest.approx(20.0 * rate, rel=0.1)


def test_lost_boundaries_that_fill_both_tiers_end_before_their_lease():
    """As many boundaries are lost as there are: without that, the node would be full after a minute."""
    trace = multi_agent(np.random.default_rng(7))
    run = started(node("lachesis", hbm=2_000, flash=30_000, lease_s=1e6), trace, 8, boundary_loss=0.9)
    run.clear()
    run.run(10.0, least_tokens=300_000)
    assert run.measure().total >= 300_000


def test_more_lost_segments_than_are_remembered_end_before_their_lease(monkeypatch):
    """They take the actors that new programs need."""
    monkeypatch.setattr(node_module, "MOST_LOST", 3)
    trace = multi_agent(np.random.default_rng(9))
    run = started(node("lachesis", hbm=20_000, flash=4_000_000, lease_s=1e6), trace, 8, boundary_loss=0.9)
    run.clear()
    run.run(10.0, least_tokens=200_000)
    assert run.measure().total >= 200_000


def test_equal_seeds_give_equal_runs():
    trace = multi_agent(np.random.default_rng(2))
    first, second = (started(node("lachesis"), trace, 10) for _ in range(2))
    for run in (first, second):
        run.clear()
        run.run(50.0)
    assert (first.measure().written == second.measure().written).all()
    assert first.measure().tpot_p99_s == second.measure().tpot_p99_s


def test_more_kv_than_both_tiers_hold_is_refused_with_a_sentence():
    run = started(node("hbm_first", hbm=100, flash=100), build_trace([worker(150, 300)], 0.2), 1)
    with pytest.raises(SimulationError, match="does not fit into HBM and flash"):
        run.run(100.0)


def test_all_tokens_of_ended_sessions_are_written():
    trace = build_trace([worker(100, 37, 3)], 0.2)
    run = started(node("lachesis_no_predictive"), trace, 1)
    run.clear()
    run.run(1000.0)
    measured = run.measure()
    per_session = 3 * (100 + 37)
    assert 0 <= measured.total - measured.sessions_ended * per_session <= per_session
    assert run.state.counts[FREE + 1] == 200_000


# ------------------------------------------------------------------------------------------------ closed forms


def test_a_step_takes_what_arithmetic_says():
    """One session that decodes all the time: weights, its context, and a flush of each block."""
    setup = node("lachesis_no_predictive", hbm=1, flash=10_000_000, read_s=1e-6, flush_s=1e-5, program_s=0.002)
    run = started(setup, build_trace([worker(1000, 100_000, shared_tokens=500)], 0.2), 1)
    run.run(2.0)
    run.clear()
    start = int(run.state.tokens.sum())
    run.run(0.0, least_tokens=16_000)
    measured = run.measure()
    steps = measured.written.sum()
    context = 500 + start + steps / 2
    expected = 0.01 + 1e-6 * context + 1e-5 + 0.002 / 16
    assert measured.measured_s / steps == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("hbm", "flash"), [(20_000, 200_000), (50_000, 100_000)])
def test_hbm_first_takes_its_part_of_the_capacity(hbm: int, flash: int):
    run = started(node(hbm=hbm, flash=flash), multi_agent(np.random.default_rng(3)), 8)
    run.run(10.0, least_tokens=int(1.5 * (hbm + flash)))
    run.clear()
    run.run(10.0, least_tokens=6 * (hbm + flash))
    expected = closed_forms.hbm_first_share(hbm, flash)
    assert run.measure().hbm_write_share == pytest.approx(expected, rel=0.05)


def test_an_hbm_that_holds_all_that_is_short_lived_leaves_only_the_leads_to_flash():
    trace = multi_agent(np.random.default_rng(4))
    written = {}
    for policy in ("lachesis_no_predictive", "oracle"):
        run = started(node(policy, hbm=2_000_000, flash=2_000_000), trace, 8)
        run.run(20.0)
        run.clear()
        run.run(400.0)
        measured = run.measure()
        lead = CLASSES.index(SegmentClass.LEAD)
        long_lived = measured.written[lead].sum() / measured.total
        gain = closed_forms.gain(0.05, measured.hbm_write_share)
        assert gain == pytest.approx(closed_forms.saturated_gain(0.05, long_lived), rel=0.05)
        written[policy] = measured.written.tolist()
    assert written["lachesis_no_predictive"] == written["oracle"]


def test_a_full_hbm_takes_what_it_can_turn_over():
    """Far more live workers than HBM holds, taken as they come: its share is capacity over write rate and residence."""
    hbm = 4_000
    random = np.random.default_rng(5)
    trace = build_trace([worker(int(random.integers(50, 300)), int(random.integers(100, 300))) for _ in range(50)], 0.2)
    run = started(node("lachesis_no_predictive", hbm=hbm, flash=2_000_000), trace, 60)
    run.run(50.0)
    run.clear()
    run.run(400.0)
    measured = run.measure()
    rate = measured.total / measured.measured_s
    share = closed_forms.placed_share(0.0, hbm, rate, residence_s=float(measured.live.sum()) / rate)
    assert measured.hbm_write_share == pytest.approx(share, rel=0.1)


def test_admission_finds_the_most_sessions_within_the_slo():
    trace = build_trace([worker(10, 2000, shared_tokens=1000)], 0.2)
    setup = node("hbm_first", hbm=10_000_000, flash=10_000_000, read_s=1e-6)
    sessions = admit_sessions(setup, trace, 0.05, 0, CONFIG, warmup_s=40.0, measure_s=60.0)
    # Each reads 1,000 to 3,000 tokens, and 40 ms are left for reading 40,000.
    assert 14 <= sessions <= 24
    with pytest.raises(SimulationError, match="take a longer SLO"):
        admit_sessions(setup, trace, 0.005, 0, CONFIG, warmup_s=1.0, measure_s=5.0)


@given(st.integers(1, MAX_SESSIONS), st.integers(1, MAX_SESSIONS), st.integers(1, 200))
def test_the_search_for_sessions_ends_where_the_slo_does(most: int, start: int, step: int):
    found = _largest(lambda sessions: sessions <= most, start, step, 200)
    assert found <= most <= found + max(1, found // 200)
    assert _largest(lambda sessions: sessions <= most, start, step, MAX_SESSIONS) == most


def test_sessions_whose_past_does_not_fit_are_too_many_and_no_error():
    """What a session has written before the run begins already fills flash."""
    program = worker(900, 10, rounds=2)
    program.requests[1] = Request(1, 500, wait_s=1.0)
    trace = build_trace([program], 0.2)
    setup = node(hbm=5_000, flash=20_000)
    with pytest.raises(SimulationError, match="does not fit"):
        started(setup, trace, 64)
    assert 5 <= admit_sessions(setup, trace, 1.0, 0, CONFIG, warmup_s=20.0, measure_s=20.0) <= 40


def test_a_lead_waits_for_all_of_its_workers():
    children = [worker(5, 10), worker(5, 500)]
    lead = worker(5, 5)
    lead.requests[0].children = children
    lead.requests.append(Request(5, 5))
    trace = build_trace([lead], 0.2)
    assert trace.programs["lifetime_s"][0] == pytest.approx(1.0 + 0.1 + 500 * 0.2 + 1.0)
    run = started(node(), trace, 1)
    run.clear()
    run.run(500.0)
    assert run.measure().sessions_ended == pytest.approx(500 / (5.25 + 0.2), rel=0.2)
