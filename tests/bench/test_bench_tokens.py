# SPDX-License-Identifier: Apache-2.0
"""Tokens of blocks: equal where blocks are, different where they are not, inside the vocabulary."""

import numpy as np
import pytest
from bench_testing import BLOCK, chain, make_request, make_trace
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.bench.plan import PlanError, make_plan
from vllm_lifetime.bench.tokens import TokenSource
from vllm_lifetime.traces.schema import TraceSession


def of_block(source: TokenSource, block: int) -> tuple[int, ...]:
    return tuple(source.block_tokens(np.array([block], np.int64)).tolist())


@given(
    blocks=st.lists(st.integers(0, 2**62 - 1), min_size=1, max_size=30),
    seed=st.integers(-3, 2**40),
    width=st.integers(2, 2000),
    spare=st.integers(0, 3),
)
def test_equal_blocks_are_equal_and_different_ones_differ(blocks: list[int], seed: int, width: int, spare: int) -> None:
    needed = TokenSource(62, max(blocks), 5, 5 + width, seed).id_tokens
    source = TokenSource(needed + spare, max(blocks), 5, 5 + width, seed)
    tokens = source.block_tokens(np.array(blocks, np.int64))
    assert len(tokens) == len(blocks) * (needed + spare)
    assert tokens.min() >= 5 and tokens.max() < 5 + width
    assert len({of_block(source, block) for block in blocks}) == len(set(blocks))
    rows = [tuple(row) for row in tokens.reshape(len(blocks), -1).tolist()]
    assert rows == [of_block(source, block) for block in blocks]


@pytest.mark.parametrize("width", [2, 3, 7])
def test_no_two_of_all_blocks_agree_in_the_smallest_vocabulary(width: int) -> None:
    needed = TokenSource(20, 200, 0, width).id_tokens
    source = TokenSource(needed, 200, 0, width)
    assert len({of_block(source, block) for block in range(201)}) == 201


def test_another_seed_hits_the_cache_of_the_last_run() -> None:
    """Not even the first engine block of 16 tokens is the same under another seed."""
    one, other = (TokenSource(64, 10**6, seed=seed).block_tokens(np.arange(200)).reshape(200, 64) for seed in (0, 1))
    assert not (one[:, :16] == other[:, :16]).all(axis=1).any()


def test_blocks_that_are_all_id_are_the_same_under_another_seed() -> None:
    one, other = (TokenSource(2, 900_000, seed=seed) for seed in (0, 1))
    assert one.id_tokens == 2
    assert not any(of_block(one, block) == of_block(other, block) for block in range(200))


def test_tails_are_shared() -> None:
    """What a prompt holds beyond whole blocks is its own."""
    source = TokenSource(16, 10)
    tails = {tuple(source.tail_tokens(session, request, 15).tolist()) for session in range(20) for request in range(20)}
    assert len(tails) == 400


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"first_token": 16, "vocabulary_size": 17}, "leave fewer than two token ids"),
        ({"first_token": 0, "vocabulary_size": 2, "tokens_per_block": 6}, "--vocabulary-size 2 it must be at least 7"),
    ],
)
def test_blocks_that_cannot_be_told_apart(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make_plan(make_trace(chain("s", 98)), **options)


# ---------------------------------------------------------------------- plans


def test_a_plan_scales_prompts_and_outputs() -> None:
    trace = make_trace(TraceSession("s", (make_request([0, 1, 2], input_tokens=3 * BLOCK + 2, output_tokens=30),)))
    for tokens_per_block, prompt, output in ((None, 14, 30), (4, 14, 30), (8, 28, 60), (2, 7, 15), (1, 3, 8)):
        (request,) = make_plan(trace, tokens_per_block=tokens_per_block).sessions[0].requests
        assert (request.prompt_tokens, request.output_tokens) == (prompt, output)


def test_prompts_share_what_their_blocks_share() -> None:
    plan = make_plan(make_trace(chain("one", 0), TraceSession("two", (make_request([0, 1, 9]),))))
    one = plan.prompt(plan.sessions[0], plan.sessions[0].requests[2]).tolist()
    two = plan.prompt(plan.sessions[1], plan.sessions[1].requests[0]).tolist()
    assert one[:8] == two[:8]
    assert one[8:12] != two[8:12]
    assert len(one) == len(two) == 14


def test_an_empty_request_has_a_token() -> None:
    plan = make_plan(make_trace(TraceSession("s", (make_request([], input_tokens=0, output_tokens=0),))))
    (request,) = plan.sessions[0].requests
    assert len(plan.prompt(plan.sessions[0], request)) == request.prompt_tokens == request.output_tokens == 1


def test_the_first_request_of_a_sub_agent_spawns_it() -> None:
    requests = (
        make_request([0], agent_id="main"),
        make_request([5], 0, agent_id="helper", parent_agent_id="main"),
        make_request([5, 6], 1, agent_id="helper", parent_agent_id="main"),
        make_request([0, 1], 2, agent_id="main"),
    )
    (session,) = make_plan(make_trace(TraceSession("s", requests))).sessions
    assert [request.spawns for request in session.requests] == [False, True, False, False]


def test_a_prompt_that_does_not_fit_is_refused_with_what_would() -> None:
    trace = make_trace(chain("short", 0), TraceSession("long", (make_request(list(range(100)), output_tokens=50),)))
    plan = make_plan(trace, tokens_per_block=64)
    plan.check_fits(None)
    with pytest.raises(PlanError) as refused:
        plan.check_fits(3000)
    assert "request 0 of session 'long' has 6,432 tokens of prompt and 800 of output" in str(refused.value)
    advice = int(str(refused.value).split("--tokens-per-block ")[1])
    make_plan(trace, tokens_per_block=advice).check_fits(3000)
    with pytest.raises(PlanError):
        make_plan(trace, tokens_per_block=advice + 1).check_fits(3000)


def test_a_model_that_is_too_small_for_any_scale() -> None:
    plan = make_plan(make_trace(TraceSession("long", (make_request(list(range(100))),))))
    with pytest.raises(PlanError, match="Try a model with a longer context"):
        plan.check_fits(99)


@pytest.mark.parametrize(
    ("sessions", "sentence"),
    [
        ((), "no session has a request"),
        ((TraceSession("s", ()),), "no session has a request"),
        ((TraceSession("s", (make_request([0], 0),)),), "request 0 of session 's' waits for request 0, which is not before it"),
        ((TraceSession("s", (make_request([-1]),)),), "a block id is negative"),
    ],
)
def test_a_trace_that_cannot_be_replayed(sessions: tuple[TraceSession, ...], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        make_plan(make_trace(*sessions))
