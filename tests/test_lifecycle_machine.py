# SPDX-License-Identifier: Apache-2.0
"""Random interleavings of requests and events, lost, doubled, delayed and reordered, over real pools.

After every step: nothing that a running request or a live segment reads is free or retired, a closed segment holds no block,
every index agrees with every other, and the tiers add up.
"""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.lifecycle_testing import LEASE_S, Served, World
from tests.pool.pool_testing import Content
from vllm_lifetime.agents import Agent
from vllm_lifetime.boundaries import Boundary, BoundaryKind, OutcomeStatus
from vllm_lifetime.lifecycle import MAX_LINES
from vllm_lifetime.segments import Segment

SESSIONS = st.sampled_from(["s", "t", None])
NAMES = st.sampled_from([None, "a", "b"])
NUM_HBM = 40
MAX_HELD = NUM_HBM - 10


class LifecycleMachine(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(NUM_HBM, 0, 0)
        self.running: list[Served] = []
        self.contexts: dict[tuple[str | None, str | None], Content] = {}
        self.late: list[Boundary] = []
        self.sent: list[Boundary] = []
        self.count = 0

    # ------------------------------------------------------------------ requests

    @precondition(lambda self: self.num_held() < MAX_HELD)
    @rule(
        session=SESSIONS,
        workflow=st.sampled_from([None, None, "w"]),
        name=NAMES,
        parent=st.sampled_from([None, None, "a"]),
        turn=st.sampled_from([None, None, 1, 2, 3]),
        keep=st.floats(0, 1),
        more=st.integers(0, 3),
        answer=st.integers(0, 2),
        segment=st.sampled_from([None, None, None, "named"]),
        segment_class=st.sampled_from([None, None, None, "lead", "reasoning_laden", "reasoning_stripped", "worker"]),
        fresh=st.integers(0, 5),
    )
    def start(
        self,
        session: str | None,
        workflow: str | None,
        name: str | None,
        parent: str | None,
        turn: int | None,
        keep: float,
        more: int,
        answer: int,
        segment: str | None,
        segment_class: str | None,
        fresh: int,
    ) -> None:
        """A request goes on from the agent's last context, all of it or a part."""
        old = self.contexts.get((session, name), (0,))
        kept = old[: max(1, round(keep * len(old)))]
        self.count += 1
        prompt = (*kept, *[(fresh + i) % 6 for i in range(more)])[:12]
        extra = tuple(range(20, 20 + answer))
        metadata: dict[str, Any] = {"workflow_id": workflow, "agent_id": name, "turn": turn}
        metadata |= {"segment_id": segment, "segment_class": segment_class}
        if parent != name:
            metadata["parent_agent_id"] = parent
        served = self.world.start(prompt, extra, session, **metadata)
        self.contexts[session, name] = prompt + extra
        self.running.append(served)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), count=st.integers(1, 14))
    def compute(self, which: int, count: int) -> None:
        served = self.running[which % len(self.running)]
        missing = len(served.request.content) - len(served.request.blocks)
        self.world.compute(served, min(count, missing, NUM_HBM - self.num_held()))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), is_aborted=st.booleans())
    def finish(self, which: int, is_aborted: bool) -> None:
        self.world.finish(self.running.pop(which % len(self.running)), is_aborted=is_aborted)

    # ------------------------------------------------------------------ events

    @rule(
        kind=st.sampled_from(list(BoundaryKind)),
        session=st.sampled_from(["s", "t"]),
        workflow=st.sampled_from([None, None, "w"]),
        name=NAMES,
        turn=st.sampled_from([None, None, 1, 2, 3]),
        generation=st.sampled_from([None, None, 0, 1]),
        has_time=st.booleans(),
        expects=st.sampled_from([None, 0.0]),
        fate=st.sampled_from(["now", "now", "late", "lost", "twice"]),
    )
    def send(
        self,
        kind: BoundaryKind,
        session: str,
        workflow: str | None,
        name: str | None,
        turn: int | None,
        generation: int | None,
        has_time: bool,
        expects: float | None,
        fate: str,
    ) -> None:
        """The harness sends an event; the network does with it what it likes."""
        self.count += 1
        self.world.now += 0.1
        event = Boundary(
            message_id=f"m{self.count}",
            kind=kind,
            session_id=session,
            workflow_id=workflow,
            agent_id=name,
            turn=turn,
            generation=generation,
            sent_at_s=self.world.now if has_time else None,
            expected_return_s=expects,
        )
        if fate == "late":
            self.late.append(event)
        elif fate != "lost":
            self.deliver(event)
            if fate == "twice":
                assert self.world.lifecycle.apply(event).status is OutcomeStatus.DUPLICATE

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 100))
    def arrive(self, which: int) -> None:
        """A delayed event arrives, out of order."""
        self.deliver(self.late.pop(which % len(self.late)))

    @precondition(lambda self: self.sent)
    @rule(which=st.integers(0, 100))
    def retry(self, which: int) -> None:
        """An old event again changes nothing."""
        before = self.world.retired()
        assert self.world.lifecycle.apply(self.sent[which % len(self.sent)]).status is OutcomeStatus.DUPLICATE
        assert self.world.retired() == before

    def deliver(self, event: Boundary) -> None:
        before = self.num_retired()
        outcome = self.world.lifecycle.apply(event)
        self.sent.append(event)
        assert outcome.blocks == self.num_retired() - before
        assert outcome.status is OutcomeStatus.ACCEPTED or outcome.blocks == 0
        assert outcome.status is OutcomeStatus.ACCEPTED or outcome.reason

    @rule(seconds=st.sampled_from([1.0, LEASE_S / 2, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.lifecycle.expire()
        for agent in self.agents():
            assert agent.num_requests or agent.last_active > self.world.now - LEASE_S

    def teardown(self) -> None:
        """Everything ends, and nothing is left over."""
        for served in self.running:
            self.world.finish(served)
        self.running = []
        self.world.now += LEASE_S + 1
        self.world.lifecycle.expire()
        self.check()
        assert len(self.world.lifecycle) == len(self.world.lifecycle.segments) == self.world.lifecycle.num_agents == 0
        assert not self.world.lifecycle._by_workflow

    # ------------------------------------------------------------------ what must hold

    def num_held(self) -> int:
        return sum(1 for block in self.world.tiers.blocks if block.ref_cnt)

    def num_retired(self) -> int:
        """Retired blocks, held ones included."""
        runs = (self.world.tiers.hbm.run_of[block.block_id] for block in self.world.tiers.blocks)
        return sum(1 for run in runs if run is not None and run.is_retired)

    def agents(self) -> list[Agent]:
        return [agent for session in self.world.lifecycle.sessions() for agent in session.agents]

    @invariant()
    def check(self) -> None:
        world = self.world
        hbm, lifecycle = world.tiers.hbm, world.lifecycle
        free = {block.block_id for block in hbm.get_all_free_blocks()}
        held = {block.block_id for block in world.tiers.blocks if block.ref_cnt}
        assert not free & held and len(free) + len(held) == NUM_HBM == hbm.num_free_blocks + len(held)
        rows = set(lifecycle.segments)
        members: dict[int, int] = {}
        for block in world.tiers.blocks:
            run = hbm.run_of[block.block_id]
            if run is None:
                continue
            members[id(run)] = members.get(id(run), 0) + 1
            live = [reader for reader in run.readers if reader.is_live]
            assert len(live) == len(run.readers), "a closed segment holds a block"
            assert run.is_retired == (not live and not run.has_unknown_reader), "a live block is retired, or a dead one is not"
            assert all(isinstance(reader, Segment) and reader in rows and run in reader.runs for reader in run.readers)
        for segment in rows:
            assert segment.is_live and not segment.is_empty
            assert all(segment in run.readers and members[id(run)] == sum(run.num_blocks) for run in segment.runs)
            assert not segment.is_closing or segment.num_requests
        for reader in world.ended:
            assert not reader.runs and not reader.is_live and reader not in rows
        agents = self.agents()
        assert len(set(agents)) == len(agents) == lifecycle.num_agents
        assert set(lifecycle._by_activity) == set(agents)
        assert all(agent.is_empty for agent in lifecycle._idle) and set(lifecycle._idle) <= set(agents)
        times = [agent.last_active for agent in lifecycle._by_activity]
        assert times == sorted(times)
        for session in lifecycle.sessions():
            assert session.leases and lifecycle._sessions[session.key] is session
            for workflow, lease in session.leases.items():
                assert lease in lifecycle._by_workflow[workflow] and lease.session is session and lease.agents
                assert all(0 < len(lines) <= MAX_LINES for lines in lease.lines.values())
        assert sum(map(len, lifecycle._by_workflow.values())) == sum(len(s.leases) for s in lifecycle.sessions())
        running = [served.reading for served in self.running if served.reading is not None]
        for reading in running:
            assert reading.prompt.is_live and reading.output.is_live, "a running request reads as a closed segment"


TestLifecycle = LifecycleMachine.TestCase
TestLifecycle.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
