# SPDX-License-Identifier: Apache-2.0
"""The made-up workloads: the same for the same seed, shaped as the paper says, every parameter with a source."""

import itertools

import pytest

from tests.traces.trace_testing import assert_same_traces
from vllm_lifetime.traces.generate import generate_workload
from vllm_lifetime.traces.schema import Trace
from vllm_lifetime.traces.workload_spec import WORKLOADS, list_parameters, load_workload


def histories(trace: Trace) -> list[tuple[str, ...]]:
    return [tuple(request.agent for request in session.requests) for session in trace.sessions]


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
                assert shared >= len(before) - 1 - 200 // spec.block_size_tokens
            last[request.agent] = blocks
        assert session.requests[-1].ends_turn


@pytest.mark.parametrize(
    ("name", "agents"), [("hover-langchain", ("verifier", "critic")), ("swebench-autogen", ("tester", "analyzer"))]
)
def test_dynamic_workflows_loop_and_differ(name: str, agents: tuple[str, str]) -> None:
    found = histories(generate_workload(name, 60))
    loops = {history.count(agents[1]) for history in found}
    assert len(loops) >= 3
    assert len(set(found)) > 20


def test_the_static_workflow_is_always_the_same_chain() -> None:
    assert len(set(histories(generate_workload("financebench-crewai", 20)))) == 1


def test_an_unknown_name_or_no_workflows_is_an_error() -> None:
    with pytest.raises(ValueError, match="known are hover-langchain"):
        generate_workload("hover", 1)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        generate_workload("hover-langchain", 0)


@pytest.mark.parametrize(("name", "concurrency"), list(zip(WORKLOADS, (72, 24, 48), strict=True)))
def test_every_parameter_says_where_it_came_from(name: str, concurrency: int) -> None:
    parameters = list(list_parameters(name))
    assert load_workload(name).concurrency == concurrency
    assert len(parameters) > 50
    for parameter in parameters:
        assert parameter.source.startswith(("PBKV", "assumed", "calibrated")), parameter
