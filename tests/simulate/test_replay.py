# SPDX-License-Identifier: Apache-2.0
"""Replays of small made-up traces: what each kind of knowledge is worth, in cases where it is known beforehand."""

import numpy as np
import pytest

from vllm_lifetime.prediction.online import OnlineMarkov
from vllm_lifetime.simulate.engine import BlockHashes, replay
from vllm_lifetime.simulate.policies import BELADY, POLICY_NAMES, Variant, replay_policy, train
from vllm_lifetime.simulate.schedule import EventKind, Schedule, make_schedule, mean_final_context_blocks
from vllm_lifetime.simulate.scored import Models, NoisyPredictor
from vllm_lifetime.simulate.session_score import SessionScorePolicy, SessionState
from vllm_lifetime.traces.generate import generate_workload
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession


def made_up(num_sessions: int, turns: int, gap_s: tuple[float, ...], names_session: bool = True) -> Trace:
    """Sessions whose prompts grow by two blocks; the pause before each request is the next of `gap_s`."""
    sessions = []
    for number in range(num_sessions):
        blocks = np.arange(2 * turns, dtype=np.int64) + 1000 * number
        requests = tuple(
            TraceRequest(blocks[: 2 * (turn + 1)], turn - 1, gap_s[(number + turn) % len(gap_s)], 0.1, 32 * (turn + 1), 1)
            for turn in range(turns)
        )
        sessions.append(TraceSession(f"s{number}", requests, names_session))
    return Trace("made up", 16, tuple(sessions))


@pytest.fixture(scope="module")
def workload() -> Schedule:
    return make_schedule(generate_workload("swebench-autogen", 24, seed=1), 8)


def capacity(schedule: Schedule, concurrency: int, fraction: float) -> int:
    return int(fraction * concurrency * mean_final_context_blocks(schedule.trace))


def test_with_room_for_all_everything_that_was_read_before_is_hit() -> None:
    schedule = make_schedule(made_up(4, 5, (1.0,)), 2)
    for name in ("lru", "lifecycle", "lifetime", BELADY):
        result = replay_policy(schedule, name, 1000)
        assert (result.hit_blocks, result.prompt_blocks) == (4 * (2 + 4 + 6 + 8), 4 * (2 + 4 + 6 + 8 + 10))
        assert (result.sessions, result.requests, result.evicted_blocks, result.overcommitted_requests) == (4, 20, 0, 0)


def test_ended_sessions_are_evicted_before_waiting_ones() -> None:
    schedule = make_schedule(made_up(40, 8, (1.0, 5.0, 60.0, 2.0, 17.0)), 6)
    lru, lifecycle, belady = (replay_policy(schedule, name, 50).hit_blocks for name in ("lru", "lifecycle", BELADY))
    assert lru < lifecycle <= belady


def test_without_session_ids_every_policy_is_vllms_own() -> None:
    schedule = make_schedule(made_up(20, 5, (1.0, 9.0), names_session=False), 4)
    lru = replay_policy(schedule, "lru", 20).hits
    for name in ("lifecycle", "hierarchical", "lifetime"):
        assert replay_policy(schedule, name, 20).hits.tolist() == lru.tolist()


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_no_policy_hits_more_than_belady_and_runs_twice_the_same(workload: Schedule, name: str) -> None:
    blocks = capacity(workload, 8, 0.8)
    result = replay_policy(workload, name, blocks)
    assert 0 < result.hit_blocks <= replay_policy(workload, BELADY, blocks).hit_blocks
    assert replay_policy(workload, name, blocks).hits.tolist() == result.hits.tolist()


def test_knowing_more_hits_more_on_retry_loops(workload: Schedule) -> None:
    blocks = capacity(workload, 8, 0.9)
    names = ("lru", "lifecycle", "hierarchical", BELADY)
    rates = [replay_policy(workload, name, blocks).hit_rate for name in names]
    assert rates == sorted(rates)
    assert rates[2] > rates[1] + 0.02


def test_training_leaves_the_models_it_was_given_alone(workload: Schedule) -> None:
    models = Models()
    trained = train(workload, models)
    assert isinstance(models.predictor, OnlineMarkov)
    assert isinstance(trained.predictor, OnlineMarkov)
    assert models.predictor.num_contexts == 0 < trained.predictor.num_contexts
    before = trained.predictor.num_contexts
    replay_policy(workload, "lifetime", 100, trained)
    assert trained.predictor.num_contexts == before


def test_noise_one_is_a_uniform_forecast() -> None:
    predictor = OnlineMarkov()
    predictor.observe(["a"])
    predictor.observe(["a", "b"])
    forecast = NoisyPredictor(predictor, 1.0).predict(["a"])
    assert np.allclose(forecast.probabilities, 1 / 3)
    assert np.allclose(NoisyPredictor(predictor, 0.25).predict(["a"]).probabilities.sum(axis=1), 1.0)
    with pytest.raises(ValueError, match="lambda"):
        NoisyPredictor(predictor, 1.5)


def test_a_score_that_knows_the_next_arrival_comes_close_to_belady() -> None:
    schedule = make_schedule(made_up(40, 8, (1.0, 5.0, 60.0, 2.0, 17.0)), 6)
    arrivals: dict[int, list[float]] = {}
    for event in schedule.events:
        if event.kind is EventKind.START:
            arrivals.setdefault(event.session, []).append(event.at_s)

    def score(state: SessionState, now: float) -> float:
        return -min((at for at in arrivals[state.index] if at >= now), default=1e9)

    lru = replay_policy(schedule, "lru", 50).hit_blocks
    belady = replay_policy(schedule, BELADY, 50).hit_blocks
    oracle = replay(schedule, SessionScorePolicy("oracle", score), 50).hit_blocks
    assert lru < oracle <= belady
    assert oracle - lru > 0.8 * (belady - lru)


def test_a_prompt_longer_than_the_cache_runs_and_is_counted() -> None:
    schedule = make_schedule(made_up(3, 4, (0.0,)), 3, capacity_blocks=6)
    lru, belady = replay_policy(schedule, "lru", 6), replay_policy(schedule, BELADY, 6)
    assert lru.overcommitted_requests == belady.overcommitted_requests == 3


def test_what_fits_is_never_overcommitted(workload: Schedule) -> None:
    blocks = max(len(path) for path in workload.paths)
    schedule = make_schedule(workload.trace, 8, capacity_blocks=blocks)
    assert schedule.events[-1].at_s > workload.events[-1].at_s
    for name in ("lru", "lifetime", BELADY):
        assert replay_policy(schedule, name, blocks).overcommitted_requests == 0


def test_a_session_whose_request_waits_for_room_is_known_to_come() -> None:
    """It pauses no longer, so what it will read is kept when the one before it starts; by recency it goes first."""

    def session(number: int, arrival_s: float, *requests: tuple[int, float, float]) -> TraceSession:
        blocks = 100 * (number + 1) + np.arange(16)
        made = (
            TraceRequest(blocks[:num], i - 1, gap_s, service_s, 16, 1, finish_reason="tool_calls")
            for i, (num, gap_s, service_s) in enumerate(requests)
        )
        return TraceSession(f"s{number}", tuple(made), arrival_s=arrival_s)

    behind = session(0, 0.0, (4, 0.0, 1.0), (5, 19.0, 1.0))
    pauses = session(1, 10.0, (4, 0.0, 1.0), (5, 500.0, 1.0))
    running = session(2, 12.0, (6, 0.0, 30.0))
    before = session(3, 19.0, (11, 0.0, 1.0))
    schedule = make_schedule(Trace("made up", 16, (behind, pauses, running, before)), 1, capacity_blocks=16)
    hits = {name: replay_policy(schedule, name, 16).hits.tolist() for name in ("lru", "lifetime", BELADY)}
    assert [event.session for event in schedule.events if event.kind is EventKind.START] == [0, 1, 2, 3, 0, 1]
    assert hits == {"lru": [0] * 6, "lifetime": [0, 0, 0, 0, 4, 0], BELADY: [0, 0, 0, 0, 4, 0]}


def test_conservative_prefetch_gives_hits_and_needs_a_host_tier(workload: Schedule) -> None:
    blocks = capacity(workload, 8, 0.9)
    none, prefetching = (
        replay_policy(workload, "pbkv", blocks, variant=Variant(has_host=has_host)) for has_host in (False, True)
    )
    assert none.hits.tolist() == replay_policy(workload, "hierarchical", blocks).hits.tolist()
    assert prefetching.hit_blocks > none.hit_blocks


def test_block_ids_are_hashes_of_eight_bytes() -> None:
    hashes = BlockHashes(np.array([1, 256, 0], np.int64))
    assert list(hashes) == [hashes[0], hashes[1], hashes[-1]] == hashes[0:3]
    assert (len(hashes), hashes[1]) == (3, (256).to_bytes(8, "little"))
    with pytest.raises(IndexError):
        hashes[3]
