# SPDX-License-Identifier: Apache-2.0
"""The made-up workloads: the same for the same seed, shaped as the paper says, every parameter with a source."""

import itertools
from dataclasses import replace

import pytest

from tests.traces.trace_testing import assert_same_traces
from vllm_lifetime.simulate.policies import replay_policy
from vllm_lifetime.simulate.schedule import Schedule, make_schedule
from vllm_lifetime.traces.generate import generate_workload
from vllm_lifetime.traces.schema import Trace
from vllm_lifetime.traces.workload_spec import WORKLOADS, list_parameters, load_workload

LONGEST_INSTRUCTION_TOKENS = 200


def histories(trace: Trace) -> list[tuple[str, ...]]:
    return [tuple(request.agent for request in session.requests) for session in trace.sessions]


def reuse_potential(trace: Trace) -> float:
    """The hit rate if nothing is ever evicted."""
    read = [block for session in trace.sessions for request in session.requests for block in request.blocks.tolist()]
    return 1.0 - len(set(read)) / len(read)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_decides_the_trace_and_more_workflows_do_not_change_the_first(name: str) -> None:
    trace = generate_workload(name, 6, seed=3)
    assert_same_traces(trace, generate_workload(name, 6, seed=3))
    longer = generate_workload(name, 9, seed=3)
    assert_same_traces(trace, Trace(longer.name, longer.block_size_tokens, longer.sessions[:6]))
    assert [len(r.blocks) for s in trace.sessions for r in s.requests] != [
        len(r.blocks) for s in generate_workload(name, 6, seed=4).sessions for r in s.requests
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_prefixes_are_global_and_the_rest_is_private(name: str) -> None:
    spec, trace = load_workload(name), generate_workload(name, 5)
    private = [
        {int(b) for r in s.requests for b in r.blocks[spec.prefixes[spec.agents[r.agent].prefix] // spec.block_size_tokens :]}
        for s in trace.sessions
    ]
    for index, blocks in enumerate(private):
        assert all(blocks.isdisjoint(other) for other in private[index + 1 :])
    for session in trace.sessions:
        last: dict[str, list[int]] = {}
        for index, request in enumerate(session.requests):
            blocks = request.blocks.tolist()
            assert request.after == index - 1
            assert len(set(blocks)) == len(blocks)
            if request.agent in last:
                # What it read before, up to its own instruction, it reads again.
                before = last[request.agent]
                shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, blocks, strict=False)))
                assert shared >= len(before) - 1 - LONGEST_INSTRUCTION_TOKENS // spec.block_size_tokens
            last[request.agent] = blocks
        assert session.requests[-1].ends_turn


@pytest.mark.parametrize(
    ("name", "giver", "heir"),
    [
        ("hover-langchain", "verifier", "judge"),
        ("swebench-autogen", "localizer", "analyzer"),
        ("financebench-crewai", "analyst", "auditor"),
    ],
)
def test_an_agent_goes_on_in_the_context_of_another_one(name: str, giver: str, heir: str) -> None:
    spec = load_workload(name)
    for session in generate_workload(name, 5).sessions:
        names = [request.agent for request in session.requests]
        first = names.index(heir)
        given = max(index for index in range(first) if names[index] == giver)
        before, after = session.requests[given].blocks, session.requests[first].blocks[: len(session.requests[given].blocks)]
        shared = int((before[: len(after)] == after).sum())
        assert shared >= len(before) - 1 - LONGEST_INSTRUCTION_TOKENS // spec.block_size_tokens


@pytest.mark.parametrize(("name", "agent"), [("hover-langchain", "critic"), ("swebench-autogen", "analyzer")])
def test_dynamic_workflows_loop_and_differ(name: str, agent: str) -> None:
    loops = [history.count(agent) for history in histories(generate_workload(name, 60))]
    assert min(loops) >= 2
    assert len(set(loops)) >= 5


def test_the_static_workflow_is_always_the_same_chain() -> None:
    assert len(set(histories(generate_workload("financebench-crewai", 20)))) == 1


@pytest.mark.parametrize(
    ("name", "least"), [("hover-langchain", 0.78), ("swebench-autogen", 0.78), ("financebench-crewai", 0.68)]
)
def test_most_of_what_is_read_has_been_read_before(name: str, least: float) -> None:
    assert least < reuse_potential(generate_workload(name, 20)) < 0.9


@pytest.fixture(scope="module", params=["hover-langchain", "swebench-autogen"])
def reduced(request: pytest.FixtureRequest) -> tuple[Schedule, int]:
    """A dynamic workload with 12 workflows at a time, and as much less cache."""
    concurrency = 12
    spec = load_workload(request.param)
    spec = replace(spec, concurrency=concurrency, capacity_blocks=spec.capacity_blocks * concurrency // spec.concurrency)
    schedule = make_schedule(generate_workload(spec.name, 3 * concurrency, spec=spec), concurrency)
    return schedule, spec.capacity_blocks


def test_each_mechanism_adds_hits_as_in_the_paper(reduced: tuple[Schedule, int]) -> None:
    schedule, capacity_blocks = reduced
    policies = ("lru", "lifecycle", "hierarchical", "belady")
    lru, lifecycle, hierarchical, best = (replay_policy(schedule, name, capacity_blocks).hit_rate for name in policies)
    assert lru + 0.02 < lifecycle
    assert lifecycle + 0.1 < hierarchical < best


def test_an_unknown_name_or_no_workflows_is_an_error() -> None:
    with pytest.raises(ValueError, match="known are hover-langchain"):
        generate_workload("hover", 1)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        generate_workload("hover-langchain", 0)


@pytest.mark.parametrize(("name", "concurrency"), list(zip(WORKLOADS, (72, 24, 48), strict=True)))
def test_every_parameter_says_where_it_came_from(name: str, concurrency: int) -> None:
    parameters = list(list_parameters(name))
    assert load_workload(name).concurrency == concurrency
    assert len(parameters) > 40
    for parameter in parameters:
        assert parameter.source.startswith(("PBKV", "assumed", "calibrated")), parameter
