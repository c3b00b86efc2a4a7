# SPDX-License-Identifier: Apache-2.0
"""The workload of the comparison of placement policies: what is sent, in which round, and what is alive meanwhile."""

from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.placement_workload import (
    Contexts,
    Request,
    Workload,
    WorkloadConfig,
    generate,
    lead_id,
    mean_live_blocks,
    num_written_blocks,
)
from vllm_lifetime.boundaries import Boundary, BoundaryKind, parse_request_metadata

CONFIG = WorkloadConfig(sessions=6, concurrency=3)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return generate(CONFIG)


def test_same_seed_same_workload(workload: Workload) -> None:
    assert generate(CONFIG) == workload
    assert generate(WorkloadConfig(seed=1, sessions=6, concurrency=3)).rounds != workload.rounds


def test_every_boundary_is_one_that_the_server_takes(workload: Workload) -> None:
    events = [Boundary.model_validate(event) for one in workload.rounds for event in one.events]
    assert len({event.message_id for event in events}) == len(events)
    kinds = Counter(event.kind for event in events)
    assert kinds[BoundaryKind.SUBAGENT_SPAWN] == kinds[BoundaryKind.SUBAGENT_RETURN]
    assert kinds[BoundaryKind.SESSION_END] == CONFIG.sessions
    assert kinds[BoundaryKind.TURN_END] == CONFIG.sessions * CONFIG.turns


def test_sub_agents_send_only_between_spawn_and_return(workload: Workload) -> None:
    spawned: set[str] = set()
    returned: set[str] = set()
    ended: set[str] = set()
    senders: set[str] = set()
    for one in workload.rounds:
        for event in one.events:
            if event["kind"] == BoundaryKind.SUBAGENT_SPAWN:
                spawned.add(event["agent_id"])
            elif event["kind"] == BoundaryKind.SUBAGENT_RETURN:
                returned.add(event["agent_id"])
            elif event["kind"] == BoundaryKind.SESSION_END:
                ended.add(event["session_id"])
        for request in one.requests:
            agent = request.agent
            assert agent.session_id not in ended
            assert agent.parent_id is None or agent.agent_id in spawned - returned
            senders.add(agent.agent_id)
    assert spawned == returned
    assert spawned | {lead_id(session) for session in ended} == senders


def test_what_ends_in_a_round_ends_before_anything_begins(workload: Workload) -> None:
    for one in workload.rounds:
        begins = [event["kind"] == BoundaryKind.SUBAGENT_SPAWN for event in one.events]
        assert begins == sorted(begins)


def test_never_more_sessions_than_at_a_time(workload: Workload) -> None:
    live: set[str] = set()
    for one in workload.rounds:
        live -= {event["session_id"] for event in one.events if event["kind"] == BoundaryKind.SESSION_END}
        live |= {request.agent.session_id for request in one.requests}
        assert len(live) <= CONFIG.concurrency


def prompts_of(workload: Workload) -> dict[str, list[tuple[Request, list[int], list[int]]]]:
    """By agent: its requests, their prompts, and made-up answers."""
    contexts = Contexts()
    found: dict[str, list[tuple[Request, list[int], list[int]]]] = {}
    for one in workload.rounds:
        for request in one.requests:
            prompt = contexts.prompt(request)
            answer = [1000 + request.index] * workload.config.output_tokens
            contexts.record(request, prompt, answer)
            found.setdefault(request.agent.agent_id, []).append((request, prompt, answer))
    return found


def test_contexts_grow_until_the_turn_strips_them(workload: Workload) -> None:
    found = prompts_of(workload)
    num_stripped = 0
    for sent in found.values():
        for (_, before, answer), (request, prompt, _) in pairwise(sent):
            if request.keeps_tokens is None:
                assert prompt[: len(before) + len(answer)] == [*before, *answer]
            else:
                assert prompt[: request.keeps_tokens] == before[: request.keeps_tokens]
                assert len(prompt) < len(before)
                num_stripped += 1
    assert num_stripped == CONFIG.sessions * (CONFIG.turns - 1)


def test_reviewers_read_a_whole_worker_and_share_no_prefix_with_it(workload: Workload) -> None:
    found = prompts_of(workload)
    reviews = [sent[0] for sent in found.values() if sent[0][0].agent.role == "reviewer"]
    assert reviews
    for request, prompt, _ in reviews:
        assert request.reads is not None
        _, last, answer = found[request.reads][-1]
        assert prompt[len(request.adds) :] == [*last, *answer]
        assert prompt[0] != last[0] or prompt[:32] != last[:32]


def test_lifetimes_are_what_was_drawn_and_as_predictable_as_the_papers(workload: Workload) -> None:
    spawned = {e["agent_id"]: one.number for one in workload.rounds for e in one.events if e["kind"] == "subagent_spawn"}
    returned = {e["agent_id"]: one.number for one in workload.rounds for e in one.events if e["kind"] == "subagent_return"}
    for worker in workload.workers:
        assert returned[worker.agent.agent_id] - spawned[worker.agent.agent_id] == worker.rounds
    workers = generate(WorkloadConfig(sessions=60)).workers
    pairs = [(a, b) for i, a in enumerate(workers) for b in workers[:i] if a.rounds != b.rounds]
    tau = sum(1 if (a.shown > b.shown) == (a.rounds > b.rounds) else -1 for a, b in pairs) / len(pairs)
    assert 0.45 < tau < 0.62


def test_live_blocks_by_hand() -> None:
    config = WorkloadConfig(sessions=1, concurrency=1, turns=1, min_workers=1, max_workers=1, review_share=0.0)
    workload = generate(config)
    (worker,) = workload.workers
    live = mean_live_blocks(workload, 16)
    length = workload.rounds[-1].number - workload.rounds[0].number
    sizes = [len(prompt) + len(answer) for _, prompt, answer in prompts_of(workload)[worker.agent.agent_id]]
    sent_in = [one.number for one in workload.rounds for request in one.requests if request.agent == worker.agent]
    ends = [*sent_in[1:], sent_in[0] + worker.rounds]
    expected = sum(-(-size // 16) * (end - at) for size, at, end in zip(sizes, sent_in, ends, strict=True))
    assert live["worker"] == pytest.approx(expected / length)
    assert live["reviewer"] == 0
    assert live["lead"] == pytest.approx(config.task_tokens // 16)


def test_written_blocks_are_all_tokens_once(workload: Workload) -> None:
    found = prompts_of(workload)
    tokens = 0
    for sent in found.values():
        length = 0
        for request, prompt, answer in sent:
            tokens += len(prompt) + len(answer) - (length if request.keeps_tokens is None else request.keeps_tokens)
            length = len(prompt) + len(answer)
    assert num_written_blocks(workload, 16) == tokens // 16


def test_roles_of_workers_are_no_reviewers(workload: Workload) -> None:
    from vllm_lifetime.agents import subagent_class

    roles = {worker.agent.role for worker in workload.workers}
    assert {str(subagent_class(role)) for role in roles} == {"worker"}
    assert str(subagent_class("reviewer")) == "reviewer"
    assert parse_request_metadata({"lifetime": {"agent": sorted(roles)[0]}})[1] is None
