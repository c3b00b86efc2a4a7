# SPDX-License-Identifier: Apache-2.0
"""The demo's workload: the same for everyone, with the prefixes it promises."""

from dataclasses import replace
from itertools import combinations

import pytest

from benchmarks.agent_workload import (
    FIRST_TOKEN,
    LANES,
    POLICIES,
    Conversation,
    Engine,
    WorkloadConfig,
    generate,
    prompts_of,
    replay,
    stand_in_output,
)

SMALL = WorkloadConfig(lanes=tuple(replace(lane, workflows=6) for lane in LANES))


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_same_seed_same_workload() -> None:
    assert generate(SMALL) == generate(SMALL)
    assert generate(SMALL) != generate(replace(SMALL, seed=1))


def test_adding_workflows_changes_none_of_the_others() -> None:
    more = replace(SMALL, lanes=tuple(replace(lane, workflows=9) for lane in LANES))
    for lane in LANES:
        before = [w.calls for w in generate(SMALL).in_lane(lane.name)]
        assert [w.calls for w in generate(more).in_lane(lane.name)][:6] == before


def test_tokens_are_in_the_vocabulary() -> None:
    workload = generate(SMALL)
    tokens = {t for w in workload.workflows for p in prompts_of(workload, w) for t in p}
    assert min(tokens) >= FIRST_TOKEN
    assert max(tokens) < SMALL.vocab_size


def test_every_workflow_starts_and_ends_within_the_transition_table() -> None:
    workload = generate(WorkloadConfig())
    for lane in LANES:
        workflows = workload.in_lane(lane.name)
        assert len(workflows) == lane.workflows
        for workflow in workflows:
            assert workflow.calls[0].agent == lane.start
            assert len(workflow.calls) <= workload.config.max_calls
            for a, b in zip(workflow.calls, workflow.calls[1:], strict=False):
                assert b.agent in dict(workload.config.agent(a.agent).successors)


def test_retry_loops_happen() -> None:
    workload = generate(WorkloadConfig())
    agents = [[c.agent for c in w.calls] for w in workload.workflows]
    assert any(calls.count("coder") > 2 and calls.count("tester") > 2 for calls in agents)
    assert len({len(calls) for calls in agents}) > 3


def test_two_workflows_share_exactly_the_agents_system_prompt() -> None:
    workload = generate(SMALL)
    for lane in LANES:
        firsts = [next(prompts_of(workload, w)) for w in workload.in_lane(lane.name)]
        for a, b in combinations(firsts, 2):
            assert common_prefix(a, b) == workload.config.agent(lane.start).system_tokens


def test_two_agents_share_nothing() -> None:
    prompts = generate(SMALL).system_prompts.values()
    assert all(common_prefix(list(a), list(b)) == 0 for a, b in combinations(prompts, 2))


def test_a_call_extends_what_the_same_agent_saw_before() -> None:
    workload = generate(SMALL)
    extended = 0
    for workflow in workload.workflows:
        last: dict[str, list[int]] = {}
        for call, prompt in zip(workflow.calls, prompts_of(workload, workflow), strict=True):
            if call.agent in last:
                before = last[call.agent]
                assert prompt[: len(before)] == before
                assert len(prompt) > len(before)
                extended += 1
            last[call.agent] = [*prompt, *stand_in_output(SMALL, workflow, call)]
    assert extended


def test_history_holds_what_was_generated_and_observed() -> None:
    workload = generate(SMALL)
    workflow = max(workload.workflows, key=lambda w: len(w.calls))
    conversation = Conversation(workload, workflow)
    first = workflow.calls[0]
    before = conversation.prompt(first)
    conversation.record(first, [7, 8, 9])
    assert conversation.prompt(first) == [*before, 7, 8, 9, *first.observation]


def test_describe_counts_tokens() -> None:
    workload = generate(SMALL)
    described = workload.describe()
    prompts = [p for w in workload.workflows for p in prompts_of(workload, w)]
    assert described["requests"] == len(prompts) == workload.calls
    assert described["prompt_tokens"] == sum(map(len, prompts))
    assert described["longest_prompt"] == max(map(len, prompts))
    assert described["workflows"] == 12
    assert described["concurrency"] == sum(lane.concurrency for lane in LANES)


@pytest.mark.parametrize("policy", ["lru", "lifecycle", "lookahead", "unbounded"])
def test_replay_accounts_for_every_token(policy: str) -> None:
    workload = generate(SMALL)
    result = replay(workload, Engine(blocks=400), policy)
    assert result.prompt_tokens == workload.describe()["prompt_tokens"]
    assert 0 < result.cached_tokens < result.prompt_tokens
    assert result.cached_tokens % SMALL.block_size == 0
    assert len(result.ttft_s) == workload.calls
    assert len(result.workflow_s) == len(workload.workflows)


def test_policies_agree_when_nothing_is_evicted() -> None:
    workload = generate(SMALL)
    results = [replay(workload, Engine(blocks=5000), p) for p in (*POLICIES, "unbounded")]
    assert len({r.cached_tokens for r in results}) == 1


def test_an_engine_that_is_too_small_is_refused() -> None:
    with pytest.raises(RuntimeError, match="--blocks"):
        replay(generate(SMALL), Engine(blocks=50), "lru")


def test_the_default_workload_is_in_the_regime_that_it_is_meant_for() -> None:
    from benchmarks.demo import Settings

    workload = generate(WorkloadConfig())
    engine = Engine(Settings.blocks)
    lru = replay(workload, engine, "lru").hit_rate
    assert 0.27 <= lru <= 0.46
    # Live workflows alone need more than there is: who is next decides.
    lifecycle = replay(workload, engine, "lifecycle").hit_rate
    assert 1.05 * lru <= lifecycle
    assert replay(workload, engine, "lookahead").hit_rate >= 1.2 * lifecycle
