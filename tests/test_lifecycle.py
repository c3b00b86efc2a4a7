# SPDX-License-Identifier: Apache-2.0
"""Leases: opened by requests, ended by boundaries, once each, and bounded."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_lifetime.boundaries import Boundary, OutcomeStatus, RequestMetadata
from vllm_lifetime.lifecycle import MAX_REMEMBERED_MESSAGES, Lease, Lifecycle
from vllm_lifetime.pool.runs import Run

BLOCK_BYTES = 10


def make() -> tuple[Lifecycle, list[Lease]]:
    """A registry, and the leases it has ended; each counts as one block."""
    ended: list[Lease] = []

    def end(lease: Lease) -> int:
        ended.append(lease)
        return 1

    return Lifecycle(end, BLOCK_BYTES), ended


def event(kind: str, message_id: str, **fields: Any) -> Boundary:
    """A boundary."""
    return Boundary.model_validate({"kind": kind, "message_id": message_id, **fields})


def read_something(lease: Lease | None) -> None:
    """Give the lease a run, so that it is not idle."""
    assert lease is not None
    run = Run(0, 1, 1)
    run.add_member(0)
    run.add_reader(lease)


def test_no_name_no_lease() -> None:
    """A request without session and workflow has an unknown lifetime."""
    lifecycle, _ = make()
    assert lifecycle.start_request(None, RequestMetadata()) is None
    assert len(lifecycle) == 0


def test_the_session_is_the_default_workflow() -> None:
    """`workflow_end` with the session's name ends it."""
    lifecycle, ended = make()
    lease = lifecycle.start_request("s", RequestMetadata())
    outcome = lifecycle.apply(event("workflow_end", "m", workflow_id="s"))
    assert outcome.status is OutcomeStatus.ACCEPTED
    assert (outcome.blocks, outcome.bytes) == (1, BLOCK_BYTES)
    assert ended == [lease]


def test_session_end_ends_its_leases_only() -> None:
    """A workflow over two sessions goes on in the other."""
    lifecycle, ended = make()
    one = lifecycle.start_request("s1", RequestMetadata(workflow_id="w"))
    two = lifecycle.start_request("s2", RequestMetadata(workflow_id="w"))
    lifecycle.apply(event("session_end", "m1", session_id="s1"))
    assert ended == [one]
    lifecycle.apply(event("workflow_end", "m2", workflow_id="w"))
    assert ended == [one, two]


def test_an_event_counts_once() -> None:
    """Retries are harmless, also after the workflow has been opened again."""
    lifecycle, ended = make()
    lifecycle.start_request("s", RequestMetadata())
    assert lifecycle.apply(event("session_end", "m", session_id="s")).status is OutcomeStatus.ACCEPTED
    lifecycle.start_request("s", RequestMetadata())
    outcome = lifecycle.apply(event("session_end", "m", session_id="s"))
    assert outcome.status is OutcomeStatus.DUPLICATE
    assert len(ended) == 1 and len(lifecycle) == 1


def test_unknown_and_early_events_change_nothing() -> None:
    """An end of what is not here, and kinds that free nothing yet, say so."""
    lifecycle, ended = make()
    lifecycle.start_request("s", RequestMetadata())
    for message_id, kind in enumerate(("turn_end", "session_start", "compaction", "subagent_return", "subagent_spawn")):
        assert lifecycle.apply(event(kind, str(message_id), session_id="s")).status is OutcomeStatus.IGNORED
    outcome = lifecycle.apply(event("session_end", "x", session_id="other"))
    assert outcome.status is OutcomeStatus.IGNORED and "'other'" in (outcome.reason or "")
    assert not ended and len(lifecycle) == 1


def test_a_new_request_after_the_end_opens_a_new_generation() -> None:
    """The old lease stays ended."""
    lifecycle, _ = make()
    old = lifecycle.start_request("s", RequestMetadata())
    lifecycle.apply(event("session_end", "m", session_id="s"))
    new = lifecycle.start_request("s", RequestMetadata())
    assert new is not old
    assert old is not None
    lifecycle.finish_request(old)
    assert len(lifecycle) == 1


def test_idle_leases_are_forgotten() -> None:
    """Sessions that never say goodbye do not pile up: a lease lives as long as its requests and its blocks."""
    lifecycle, _ = make()
    for i in range(100_000):
        lease = lifecycle.start_request(f"s{i}", RequestMetadata(workflow_id=f"w{i}"))
        assert lease is not None
        lifecycle.finish_request(lease)
    assert len(lifecycle) == 0
    assert not lifecycle._by_session and not lifecycle._by_workflow


def test_a_lease_goes_with_its_last_block() -> None:
    """Its blocks were evicted everywhere: nothing is left to retire."""
    lifecycle, _ = make()
    lease = lifecycle.start_request("s", RequestMetadata())
    read_something(lease)
    assert lease is not None
    lifecycle.finish_request(lease)
    assert len(lifecycle) == 1
    for run in list(lease.runs):
        run.remove_member(0)
    assert len(lifecycle) == 0


def test_message_ids_are_bounded() -> None:
    """Only so many are remembered."""
    lifecycle, _ = make()
    for i in range(MAX_REMEMBERED_MESSAGES + 100):
        lifecycle.apply(event("turn_end", str(i), session_id="s"))
    assert len(lifecycle._messages) == MAX_REMEMBERED_MESSAGES


class LifecycleMachine(RuleBasedStateMachine):
    """Any order of requests and events: the indexes agree, and no lease ends twice."""

    def __init__(self) -> None:
        super().__init__()
        self.lifecycle, self.ended = make()
        self.running: list[Lease] = []
        self.count = 0

    @rule(session=st.sampled_from([None, "a", "b"]), workflow=st.sampled_from([None, "a", "v", "w"]), reads=st.booleans())
    def start(self, session: str | None, workflow: str | None, reads: bool) -> None:
        lease = self.lifecycle.start_request(session, RequestMetadata(workflow_id=workflow))
        assert (lease is None) == (session is None and workflow is None)
        if lease is not None:
            assert lease not in self.ended
            self.running.append(lease)
            if reads:
                read_something(lease)

    @rule(which=st.integers(0, 100))
    def finish(self, which: int) -> None:
        if self.running:
            self.lifecycle.finish_request(self.running.pop(which % len(self.running)))

    @rule(kind=st.sampled_from(["session_end", "workflow_end"]), name=st.sampled_from(["a", "b", "v", "w"]), again=st.booleans())
    def end(self, kind: str, name: str, again: bool) -> None:
        self.count += not again
        before = len(self.ended)
        fields = {"session_id": name} if kind == "session_end" else {"workflow_id": name}
        outcome = self.lifecycle.apply(event(kind, f"{kind}-{name}-{self.count}", **fields))
        assert outcome.blocks == len(self.ended) - before

    @invariant()
    def indexes_agree(self) -> None:
        leases = set(self.lifecycle._leases.values())
        assert set().union(*self.lifecycle._by_workflow.values(), set()) == leases
        assert set().union(*self.lifecycle._by_session.values(), set()) == {x for x in leases if x.session_id is not None}
        assert all(self.lifecycle._by_session.values()) and all(self.lifecycle._by_workflow.values())
        assert len(self.ended) == len(set(self.ended))
        assert not leases & set(self.ended)
        assert all(lease.runs or lease.num_requests for lease in leases)


TestLifecycleMachine = LifecycleMachine.TestCase
TestLifecycleMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
