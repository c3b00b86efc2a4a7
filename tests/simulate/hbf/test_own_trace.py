# SPDX-License-Identifier: Apache-2.0
"""Traces as programs: what is written, by which class, who waits for whom, and with which pauses."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.analysis.analysis_testing import ask, delegating, made_up_trace, stripping, trace_of
from tests.simulate.hbf.hbf_testing import CONFIG, node
from vllm_lifetime.analysis.clock import Delays
from vllm_lifetime.analysis.report import analyze
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.simulate.hbf.node import NodeRun
from vllm_lifetime.simulate.hbf.own_trace import own_trace, read_own_trace
from vllm_lifetime.simulate.hbf.replay_trace import Program, all_programs, build_trace
from vllm_lifetime.traces.jsonl import write_jsonl
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import TraceError


def programs_of(trace: Trace, pauses: str = "trace", idle_cap_s: float = 1800.0) -> list[Program]:
    own = own_trace(trace, "mine", idle_cap_s)
    return [session.root for session in own.sessions(pauses=pauses, ttft_s=1.0)]


def tokens_by_class(roots: list[Program]) -> Counter[SegmentClass]:
    tokens: Counter[SegmentClass] = Counter()
    for root in roots:
        for program in all_programs(root):
            tokens[program.segment_class] += program.tokens
    return tokens


def made_session(number: int, chance: random.Random) -> TraceSession:
    """A main agent that grows, drops, compacts and ends turns, with sub-agents that it waits for or that run beside it."""
    base = fresh = 100_000 * number
    requests: list[TraceRequest] = []

    def take(count: int) -> list[int]:
        nonlocal fresh
        fresh += count
        return list(range(fresh - count, fresh))

    context, last, beside = take(chance.randint(1, 20)), -1, list[tuple[list[int], int, str]]()
    for place in range(chance.randint(2, 12)):
        compacts = place > 0 and chance.random() < 0.1
        if compacts or chance.random() < 0.3:
            context = context[: chance.randint(0, len(context))]
        context = context + take(chance.randint(0, 8))
        out, ends_turn = chance.randint(0, 9), chance.random() < 0.4
        flags = {"ends_turn": ends_turn, "compacts": compacts, "agent": "lead"}
        requests.append(ask(context, out, last, chance.random() * 9, **flags))
        last = len(requests) - 1
        if chance.random() < 0.8:
            context = context + take(out)
        if chance.random() < 0.3:
            name = f"sub{len(requests)}"
            waits, after = chance.random() < 0.6, last
            own = {"agent": chance.choice(["Explore", "reviewer"]), "agent_id": name, "parent_agent_id": "main"}
            asked = take(chance.randint(1, 9))
            for _ in range(chance.randint(1, 3)):
                requests.append(ask(asked, 4, after, 1.0, **own))
                after = len(requests) - 1
                asked = asked + take(6)
            if waits:
                last = after
            else:
                beside.append((asked, after, name))
        if beside and chance.random() < 0.5:
            asked, after, name = beside.pop()
            requests.append(ask(asked, 4, after, 1.0, agent="Explore", agent_id=name, parent_agent_id="main"))
    return TraceSession(f"session-{base}", tuple(requests))


@settings(max_examples=30, deadline=None)
@given(st.randoms(use_true_random=False))
def test_programs_write_what_the_analysis_finds_in_each_class(chance: random.Random) -> None:
    trace = trace_of(*(made_session(number, chance) for number in range(1, 4)), stripping(), delegating())
    roots = programs_of(trace)
    expected: Counter[SegmentClass] = Counter()
    for segment in analyze(trace, Delays()).segments:
        expected[segment.segment_class] += segment.written_tokens
    assert tokens_by_class(roots) == {name: count for name, count in expected.items() if name is not SegmentClass.SHARED}
    decoded = sum(r.decode_tokens for root in roots for program in all_programs(root) for r in program.requests)
    assert decoded == sum(request.output_tokens for session in trace.sessions for request in session.requests)
    waited_s = sum(r.wait_s for root in roots for program in all_programs(root) for r in program.requests)
    assert waited_s == pytest.approx(sum(request.gap_s for session in trace.sessions for request in session.requests))


@settings(max_examples=8, deadline=None)
@given(st.randoms(use_true_random=False))
def test_a_node_replays_any_trace_and_keeps_its_tokens(chance: random.Random) -> None:
    roots = programs_of(trace_of(*(made_session(number, chance) for number in range(1, 6)), stripping(), delegating()))
    built = build_trace(roots, 0.2)
    # In the order of `all_programs`, lifetimes are those of the recursive definition.
    recursive = [root.lifetime_s(0.2) for root in roots]
    assert built.programs["lifetime_s"][: len(roots)] == pytest.approx(recursive)
    run = NodeRun(node("lachesis", hbm=300, flash=4000), built, 3, 0, CONFIG)
    run.clear()
    run.run(400.0)  # Raises if tokens are lost, or more programs run than `most_actors` says.
    assert run.measure().sessions_ended > 3


def test_a_turn_that_is_stripped_is_a_program_of_its_own() -> None:
    root, _ = programs_of(trace_of(stripping(), stripping("t", 5000)))
    assert root.segment_class is SegmentClass.REASONING_STRIPPED
    (laden,) = (program for program in all_programs(root) if program.segment_class is SegmentClass.REASONING_LADEN)
    assert laden.reads_parent
    # It writes the first answer, the observation and the second answer; 10 tokens of the prompt and the next message stay.
    assert [(r.prefill_tokens, r.decode_tokens) for r in laden.requests] == [(0, 5), (3, 4)]
    assert root.tokens == 10 + 6 + 2
    assert [request.wait_s for request in laden.requests] == [0.0, 5.0]
    assert (root.requests[-1].wait_s, root.requests[-1].answers_user) == (100.0, True)


def test_a_sub_agent_is_waited_for_and_reads_what_it_did_not_write() -> None:
    root, _ = programs_of(trace_of(delegating(), stripping()))
    assert root.segment_class is SegmentClass.LEAD
    (worker,) = root.requests[0].children
    assert worker.segment_class is SegmentClass.WORKER
    assert worker.tokens == 8 + 10 + 2 + 10
    assert len(root.requests) == 2
    assert not root.requests[1].children


def test_a_sub_agent_that_runs_beside_its_agent_does_so_here() -> None:
    own = {"agent": "Explore", "agent_id": "sub", "parent_agent_id": "main"}
    session = TraceSession(
        "beside",
        (
            ask([1, 2, 3], 2, -1, agent="lead"),
            ask([50, 51], 300, 0, **own),
            ask([1, 2, 3, 4, 5, 6], 2, 0, 1.0, agent="lead"),
            ask([50, 51, *range(1000, 1310)], 5, 1, **own),
        ),
    )
    root, _ = programs_of(trace_of(session, stripping("t", 5000)))
    worker, rest = root.requests[0].children
    assert (worker.segment_class, rest.segment_class) == (SegmentClass.WORKER, SegmentClass.LEAD)
    assert rest.reads_parent
    assert rest.shared_tokens == 0
    assert rest.requests[0].wait_s == pytest.approx(1.0)
    assert build_trace([root], 0.2).most_actors == 3


def test_sub_agents_one_after_the_other_do_not_run_at_once() -> None:
    def own(name: str) -> dict[str, str]:
        return {"agent": "Explore", "agent_id": name, "parent_agent_id": "main"}

    session = TraceSession(
        "chain",
        (
            ask([1, 2], 2, -1, agent="lead"),
            ask([50], 3, 0, **own("a")),
            ask([60], 3, 1, **own("b")),
            ask([1, 2, 3, 4, 5], 1, 2, agent="lead"),
        ),
    )
    root, _ = programs_of(trace_of(session, stripping("t", 5000)))
    (first,) = root.requests[0].children
    assert first.successor is not None
    assert first.successor.segment_class is SegmentClass.WORKER


@pytest.mark.parametrize("parent", ["sub", "gone"])
def test_a_sub_agent_whose_parent_is_itself_or_unknown_starts_with_what_it_waited_for(parent: str) -> None:
    own = {"agent": "Explore", "agent_id": "sub", "parent_agent_id": parent}
    session = TraceSession("odd", (ask([1, 2], 2, -1), ask([50], 3, 0, **own), ask([1, 2, 3, 4, 5], 1, 1)))
    root, _ = programs_of(trace_of(session, stripping("t", 5000)))
    assert [child.segment_class for child in root.requests[0].children] == [SegmentClass.WORKER]


def test_a_compaction_begins_a_new_program() -> None:
    session = TraceSession(
        "compacts",
        (ask([1, 2, 3], 2, -1), ask([1, 2, 3, 4, 5], 2, 0, ends_turn=True), ask([1, 70, 71], 1, 1, compacts=True)),
    )
    root, _ = programs_of(trace_of(session, stripping("t", 5000)))
    assert root.successor is not None
    assert (root.successor.shared_tokens, root.successor.tokens) == (1, 3)


@pytest.mark.parametrize(
    ("pauses", "cap_s", "expected"),
    [("trace", 1800.0, [0.0, 5.0, 100.0]), ("trace", 30.0, [0.0, 5.0, 30.0]), ("none", 1800.0, [0.0, 0.0, 0.0])],
)
def test_pauses_are_those_of_the_trace_up_to_the_cap(pauses: str, cap_s: float, expected: list[float]) -> None:
    roots = programs_of(trace_of(stripping(), stripping("t", 5000)), pauses, cap_s)
    waits = [request.wait_s for program in all_programs(roots[0]) for request in program.requests]
    assert sorted(waits)[-3:] == pytest.approx(expected)


def test_fixed_pauses_are_the_means_of_tools_and_users() -> None:
    slower = TraceSession("slow", (ask([9, 8], 1, -1), ask([9, 8, 7, 6], 1, 0, 15.0, ends_turn=True)))
    roots = programs_of(trace_of(stripping(), slower), "fixed")
    tool_s = {r.wait_s for root in roots for p in all_programs(root) for r in p.requests if r.wait_s and not r.answers_user}
    assert list(tool_s) == [pytest.approx(10.0)]


def test_paper_pauses_are_drawn_by_their_seed() -> None:
    own = own_trace(made_up_trace(), "mine", 1800.0)
    runs = [build_trace([s.root for s in own.sessions(pauses="paper", seed=seed, ttft_s=1.0)], 0.2) for seed in (1, 1, 2)]
    assert (runs[0].rows == runs[1].rows).all()
    assert not np.array_equal(runs[0].rows["wait_s"], runs[2].rows["wait_s"])


def test_workers_are_ranked_by_the_other_sessions_where_there_are_enough() -> None:
    many = trace_of(*(delegating(f"d{n}", 1000 * n, rounds=1 + n % 4) for n in range(1, 25)))
    workers = [p for root in programs_of(many) for p in all_programs(root) if p.segment_class is SegmentClass.WORKER]
    assert len(workers) == 24
    assert all(np.isfinite(worker.score) for worker in workers)
    assert {worker.expected_tokens for worker in workers} == {np.mean([worker.tokens for worker in workers])}
    few = [p for root in programs_of(made_up_trace()) for p in all_programs(root) if p.segment_class is SegmentClass.WORKER]
    assert all(np.isnan(worker.score) for worker in few)


def test_a_description_says_what_is_written() -> None:
    text = own_trace(made_up_trace(), "mine", 1800.0).describe()
    assert text.startswith("mine: 5 sessions, ")
    assert "worker" in text and "3 sub-agents" in text and "user 100.0 s" in text


@pytest.mark.parametrize(
    ("trace", "sentence"),
    [
        (trace_of(), "mine: the trace has no requests; record a trace with turn ends or sub-agents"),
        (trace_of(TraceSession("a", (ask([1], 1, -1),)), TraceSession("b", (ask([2], 1, -1),))), "has no boundaries"),
    ],
)
def test_a_trace_that_says_nothing_is_refused(trace: Trace, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        own_trace(trace, "mine", 1800.0)


def test_wrong_pauses_and_caps_are_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown pauses 'long'; there are trace, none, fixed, paper"):
        programs_of(made_up_trace(), "long")
    with pytest.raises(ValueError, match="the idle cap must be a number of seconds of at least 0"):
        programs_of(made_up_trace(), idle_cap_s=float("nan"))


def test_a_file_is_read_by_its_format(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    write_jsonl(made_up_trace(), path)
    own = read_own_trace(path, "jsonl", 1800.0)
    assert (own.name, len(own.real_sessions)) == ("mine", 5)
    with pytest.raises(TraceError, match="unknown format 'pcap'"):
        read_own_trace(path, "pcap", 1800.0)
