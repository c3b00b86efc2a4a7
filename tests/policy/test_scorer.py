# SPDX-License-Identifier: Apache-2.0
"""`Scorer`: its ranks against a model that knows the histories and computes each score anew; bounds; failures."""

import math
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from numpy.typing import NDArray

from tests.pool.pool_testing import Request, Tiers
from vllm_lifetime.agents import Agent, Reading
from vllm_lifetime.boundaries import Boundary, BoundaryKind, RequestMetadata
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.policy import scorer as scorer_module
from vllm_lifetime.policy.eviction import EVICTION_POLICIES
from vllm_lifetime.policy.inheritance import Inheritance
from vllm_lifetime.policy.retention import Retention, RetentionTable
from vllm_lifetime.policy.scorer import Scorer
from vllm_lifetime.policy.scoring import agent_values, one_step_values, score
from vllm_lifetime.pool.access import Path
from vllm_lifetime.pool.runs import ACTIVE_RANK, DEMOTED_RANK, Rank, Reader, Run
from vllm_lifetime.prediction.forecast import END, Forecast
from vllm_lifetime.prediction.next_use import NextUseModel, PauseState
from vllm_lifetime.segments import Segment

ROLES = ("planner", "coder", "tester")
SESSIONS = ("one", "two", "three")
CONTENTS = ((1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 5), (1, 5, 6), (7, 8, 9), (7, 8), (7, 5, 6))


class HashPredictor:
    """Forecasts that are different for each history, and nothing else."""

    def __init__(self) -> None:
        self.observed: list[tuple[str, ...]] = []

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        rng = np.random.default_rng(zlib.crc32(repr((tuple(history), hidden_state)).encode()))
        return Forecast(ROLES, rng.dirichlet(np.ones(len(ROLES) + 1), size=3))

    def observe(self, history: Sequence[str]) -> None:
        self.observed.append(tuple(history))


class World:
    """A pool, a lifecycle and a scorer, as the engine puts them together."""

    def __init__(self, policy: str = "hierarchical", **options: object) -> None:
        self.now = 0.0
        self.tiers = Tiers(24, 6, 0)
        self.lifecycle = Lifecycle(
            lambda reader: sum(self.tiers.table.end(reader)), block_bytes=1, hash_tokens=16, clock=lambda: self.now
        )
        self.retentions = RetentionTable(self.tiers.table, 30)
        self.predictor = options.pop("predictor", None) or HashPredictor()
        options.setdefault("inheritance", Inheritance(learns=False))
        ranks_alone = options.pop("ranks_alone", False)
        self.scorer = Scorer(
            self.tiers.table.set_rank if ranks_alone else self.tiers.table,
            EVICTION_POLICIES[policy],
            self.predictor,  # type: ignore[arg-type]
            options.pop("next_use", None),  # type: ignore[arg-type]
            lambda: self.now,
            slow_prediction_s=math.inf,
            **options,  # type: ignore[arg-type]
        )

    def start(self, session: str, role: str | None, content: tuple[int, ...]) -> tuple[Reading, Request]:
        hashes = [bytes(content[: index + 1]).ljust(8, b"\0") for index in range(len(content))]
        reading = self.lifecycle.start_request(session, RequestMetadata(agent=role), hashes)
        assert reading is not None
        self.scorer.start_request(reading)
        request = self.tiers.start(Path(reading.prompt, reading.output, reading.boundary_blocks or len(content)), content)
        self.tiers.grow(request, len(content))
        self.lifecycle.has_read(reading)
        return reading, request

    def finish(self, reading: Reading, request: Request, finish_reason: str | None = None, tool: str | None = None) -> None:
        self.scorer.finish_request(reading, None, finish_reason, tool)
        self.lifecycle.finish_request(reading, ())
        self.tiers.finish(request)

    def run(self, session: str, role: str | None, content: tuple[int, ...], **how: str) -> Reading:
        reading, request = self.start(session, role, content)
        self.finish(reading, request, **how)
        return reading

    def end(self, session: str, number: int = 0) -> None:
        # The lifecycle may have forgotten a session whose agents have all returned; the scorer has not.
        self.scorer.end_workflow(session, (session, None))
        self.lifecycle.apply(Boundary(message_id=f"{session}{number}", kind=BoundaryKind.SESSION_END, session_id=session))

    def rank(self, content: tuple[int, ...], index: int = -1) -> Rank:
        """Of the run of a block of `content`."""
        length = len(content) if index < 0 else index + 1
        run = self.tiers.hbm.run_of[self.tiers.by_hash[bytes(content[:length])][0].block_id]
        assert run is not None
        return run.rank


class ScorerMachine(RuleBasedStateMachine):
    """Requests, ends, wishes, demotions and strangers; after each, every rank is what the model says."""

    @initialize()
    def begin(self) -> None:
        self.world = World()
        self.histories: dict[str, list[str]] = {}
        self.running: list[tuple[str, Reading, Request]] = []
        self.num_ends = 0
        self.ended: set[Reader] = set()
        """Segments of ended workflows, of which a request may still run."""

    @rule(session=st.sampled_from(SESSIONS), role=st.sampled_from(ROLES), content=st.sampled_from(CONTENTS))
    def start(self, session: str, role: str, content: tuple[int, ...]) -> None:
        if len(self.running) < 4:
            self.histories.setdefault(session, []).append(role)
            self.running.append((session, *self.world.start(session, role, content)))

    @rule(index=st.integers(0, 3))
    def finish(self, index: int) -> None:
        if self.running:
            _, reading, request = self.running.pop(index % len(self.running))
            self.world.finish(reading, request)

    @rule(session=st.sampled_from(SESSIONS))
    def end(self, session: str) -> None:
        self.num_ends += 1
        self.ended.update(segment for segment in self.world.lifecycle.segments if segment.workflow_id == session)
        self.world.end(session, self.num_ends)
        self.histories.pop(session, None)

    @rule(session=st.sampled_from(SESSIONS), role=st.sampled_from(ROLES))
    def subagent_returns(self, session: str, role: str) -> None:
        self.num_ends += 1
        event = Boundary(
            message_id=f"return{self.num_ends}", kind=BoundaryKind.SUBAGENT_RETURN, session_id=session, agent=role
        )
        self.world.lifecycle.apply(event)

    @rule(content=st.sampled_from(CONTENTS))
    def a_stranger_reads(self, content: tuple[int, ...]) -> None:
        self.world.tiers.run(None, content)

    @rule(session=st.sampled_from(SESSIONS), priority=st.sampled_from([0, 50, 90]), ttl_s=st.sampled_from([1.0, 5.0]))
    def wish(self, session: str, priority: int, ttl_s: float) -> None:
        retentions = self.world.retentions
        runs = {run for agent in self.agents(session) for segment in agent.segments for run in segment.runs}
        retentions.retain(retentions.new(session, priority), runs, ttl_s, self.world.now)

    @rule(session=st.sampled_from(SESSIONS))
    def demote(self, session: str) -> None:
        for run in [run for agent in self.agents(session) for segment in agent.segments for run in segment.runs]:
            self.world.tiers.table.set_rank(run, DEMOTED_RANK)

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.retentions.expire(self.world.now)

    @rule(index=st.integers(0, 23))
    def copy_down(self, index: int) -> None:
        block = self.world.tiers.blocks[index]
        if block.block_hash is not None:
            self.world.tiers.copy_down(self.world.tiers.host, block)

    def agents(self, session: str) -> list[Agent]:
        return self.world.lifecycle.find_agents(session, None, None)

    @invariant()
    def ranks_are_the_models(self) -> None:
        world = self.world
        world.scorer.advance()
        for _, _, run in world.tiers.members():
            readers = [reader for reader in run.readers if reader.is_live]
            if run.is_retired:
                assert not readers
                assert not run.has_unknown_reader
            elif run.rank is not DEMOTED_RANK:
                assert run.rank == pytest.approx(self.rank_of(run, readers), abs=1e-9)

    def rank_of(self, run: Run, readers: Sequence[Reader]) -> Rank:
        agents: dict[str, set[str]] = {}
        ranks: list[Rank] = [ACTIVE_RANK] if run.has_unknown_reader else []
        for reader in readers:
            if isinstance(reader, Retention):
                ranks.append(reader.rank)
            elif reader in self.ended:
                ranks.append(ACTIVE_RANK)
            elif isinstance(reader, Segment):
                agents.setdefault(reader.workflow_id, set()).add(reader.agent.role or "")
        if agents:
            total = score(
                (agent_values(HashPredictor().predict(tuple(self.histories[session]))), dict.fromkeys(roles, 1.0))
                for session, roles in agents.items()
            )
            ranks.append((1, total, 0.0))
        return max(ranks)

    @invariant()
    def eviction_order_is_by_rank(self) -> None:
        for free_list in self.world.tiers.free_lists:
            ranks = [
                ACTIVE_RANK if run is None else run.rank
                for run in (free_list.run_of[block.block_id] for block in free_list.iter_cached_blocks())
            ]
            assert ranks == sorted(ranks)

    @invariant()
    def nothing_is_left_of_what_is_over(self) -> None:
        scorer = self.world.scorer
        assert len(scorer) == len(self.histories)
        states = set(scorer._workflows.values())
        assert {workflow for workflow, _ in scorer.ranking._by_reader.values()} <= states
        for audience in scorer.ranking._audiences.values():
            assert set(audience.access) <= states
        for workflow in states:
            assert all(scorer.ranking._audiences[audience.key] is audience for audience in workflow.audiences)


def test_ranks_equal_those_computed_from_scratch() -> None:
    run_state_machine_as_test(
        ScorerMachine,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
        ),
    )


# ---------------------------------------------------------------------- time


class FixedNextUse(NextUseModel):
    """Says what it is told to; `remaining_s` by tool."""

    def __init__(self, **remaining_s: float) -> None:
        super().__init__()
        self.times = remaining_s
        self.seen: list[tuple[str, PauseState, float]] = []

    def observe(self, state: PauseState, gap_s: float) -> None:
        self.seen.append(("returned", state, gap_s))

    def observe_end(self, state: PauseState, waited_s: float) -> None:
        self.seen.append(("ended", state, waited_s))

    def observe_waiting(self, state: PauseState, waited_s: float) -> None:
        self.seen.append(("seen", state, waited_s))

    def expected_remaining_s(self, state: PauseState, waited_s: float, pace: float = 1.0) -> float:
        return self.times[state.tool or "user"] * pace + waited_s

    def reuse_discount(self, state: PauseState, waited_s: float, horizon_s: float, pace: float = 1.0) -> float:
        return math.exp(-self.expected_remaining_s(state, waited_s, pace) / horizon_s)

    def median_s(self, state: PauseState) -> float:
        return self.times[state.tool or "user"]


class SelfPredictor:
    """The same agent goes on for ever."""

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        return Forecast((history[-1],), np.array([[1.0, 0.0]] * 3))


@pytest.mark.parametrize("policy", ["lifetime", "lifetime_ordered", "time"])
@pytest.mark.parametrize("ranks_alone", [False, True])
def test_what_is_read_sooner_is_kept_longer(policy: str, ranks_alone: bool) -> None:
    next_use = FixedNextUse(test=400.0, read=1.0, user=90.0)
    world = World(policy, next_use=next_use, predictor=SelfPredictor(), ranks_alone=ranks_alone)
    world.run("one", None, (1, 2), tool="test")
    world.run("two", None, (3, 4), tool="read")
    world.run("three", None, (5, 6), finish_reason="stop")
    assert world.rank((1, 2)) < world.rank((5, 6)) < world.rank((3, 4))
    order = [world.tiers.hbm.run_of[block.block_id] for block in world.tiers.hbm.iter_cached_blocks()]
    assert [run.rank for run in order if run] == sorted(run.rank for run in order if run)


def test_a_workflow_that_has_waited_long_is_ranked_again() -> None:
    """Its expected wait grows with what it has waited; `advance` finds it, and nothing before it is due."""
    world = World("lifetime", next_use=FixedNextUse(read=1.0), predictor=SelfPredictor())
    world.run("one", None, (1, 2), tool="read")
    first = world.rank((1, 2))
    world.scorer.advance()
    assert world.rank((1, 2)) == first
    world.now = 300.0
    world.scorer.advance()
    assert world.rank((1, 2)) < first


def test_a_new_horizon_ranks_all_that_waits_anew() -> None:
    """Worths by different horizons cannot be compared."""
    world = World("lifetime", next_use=FixedNextUse(read=100.0, test=10_000.0), predictor=SelfPredictor())
    world.run("one", None, (1, 2), tool="read")
    world.run("two", None, (3, 4), tool="test")
    before = world.rank((1, 2)), world.rank((3, 4))
    world.scorer.set_horizon(3000.0, world.now)
    world.scorer.advance()
    assert world.rank((1, 2)) > before[0]
    assert world.rank((3, 4)) > before[1]


def test_a_slow_session_is_expected_later_than_others_in_the_same_state() -> None:
    world = World("lifetime", next_use=FixedNextUse(read=10.0), predictor=SelfPredictor())
    for _ in range(8):
        world.run("slow", None, (1, 2), tool="read")
        world.now += 100.0
    world.run("slow", None, (1, 2), tool="read")
    world.run("new", None, (3, 4), tool="read")
    assert world.rank((1, 2)) < world.rank((3, 4))


def test_advance_does_a_bounded_number_of_workflows_a_call() -> None:
    world = World("lifetime", next_use=FixedNextUse(read=1.0), predictor=SelfPredictor())
    for number in range(scorer_module.MAX_UPDATES + 3):
        world.run(f"s{number}", None, (1,), tool="read")
    before, world.now = world.scorer.num_updates, 300.0
    world.scorer.advance()
    assert world.scorer.num_updates - before == scorer_module.MAX_UPDATES
    world.scorer.advance()
    assert world.scorer.num_updates - before == scorer_module.MAX_UPDATES + 3
    world.scorer.advance()
    assert world.scorer.num_updates - before == scorer_module.MAX_UPDATES + 3


def test_pauses_and_ends_are_learned() -> None:
    model = FixedNextUse(read=1.0, user=2.0)
    world = World("lifetime", next_use=model)
    world.run("one", "coder", (1,), tool="read", finish_reason="tool_calls")
    world.now = 4.0
    reading = world.run("one", "coder", (1,), finish_reason="stop")
    world.now = 5.0
    world.scorer.end_turn(reading)
    world.now = 9.0
    world.end("one")
    assert model.seen == [
        ("returned", PauseState("coder", "tool_calls", "read", False), 4.0),
        ("seen", PauseState("coder", "stop", None, False), 1.0),
        ("ended", PauseState("coder", "stop", None, True), 5.0),
    ]
    assert world.predictor.observed == [("coder",), ("coder", "coder"), ("coder", "coder", END)]  # type: ignore[attr-defined]


def test_a_workflow_pauses_when_its_last_request_is_over() -> None:
    """Parallel sub-agents: while one runs, the workflow is not waiting for anything."""
    model = FixedNextUse(read=1.0, user=1.0)
    world = World("lifetime", next_use=model)
    first, second = world.start("one", "coder", (1,)), world.start("one", "tester", (2,))
    world.finish(*first, tool="read")
    world.now = 7.0
    world.finish(*second, tool="read")
    world.now = 9.0
    world.run("one", "coder", (1,))
    assert model.seen == [("returned", PauseState("tester", None, "read", False), 2.0)]


# ---------------------------------------------------------------------- other policies


class FixedTimeToLive:
    """Ten seconds for every tool."""

    def observe(self, tool: str | None, gap_s: float) -> None:
        pass

    def time_to_live_s(self, tool: str | None) -> float:
        return 10.0


def test_ttl_pins_after_a_tool_call_and_is_lru_otherwise() -> None:
    world = World("ttl", time_to_live=FixedTimeToLive())
    world.run("one", None, (1, 2), finish_reason="tool_calls", tool="read")
    world.run("two", None, (3, 4), finish_reason="stop")
    assert world.rank((3, 4)) == ACTIVE_RANK < world.rank((1, 2))
    world.now = 10.0
    world.scorer.advance()
    assert world.rank((1, 2)) == ACTIVE_RANK


def test_kvflow_evicts_what_is_furthest_in_the_graph_first() -> None:
    """Steps to execution, the fewest over all workflows; what is never executed again goes first."""
    world = World("kvflow")
    for session in ("past", "now"):
        for number, role in enumerate(ROLES[: 3 if session == "past" else 1]):
            world.run(session, role, (8 if session == "past" else 9, number))
    assert world.rank((9, 0)) == (1, -math.inf, 0.0)  # the planner is not called twice
    assert world.rank((8, 1)) == (1, -math.inf, 0.0)  # the other workflow has come to its end
    world.run("again", "tester", (9, 5))
    world.run("again", "planner", (9, 6))
    assert world.rank((9, 5)) == (1, -2.0, 0.0)
    world.run("again", "coder", (9, 5, 7))
    assert world.rank((9, 5)) == (1, -1.0, 0.0)


# ---------------------------------------------------------------------- failures and bounds


class Broken:
    """Raises."""

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        raise RuntimeError("no")

    def observe(self, history: Sequence[str]) -> None:
        raise RuntimeError("no")


class Undefined:
    """Says nothing that means anything."""

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        return Forecast(ROLES, np.full((3, 4), np.nan))


@pytest.mark.parametrize("predictor", [Broken(), Undefined()])
def test_a_predictor_that_fails_leaves_recency(predictor: object) -> None:
    world = World(predictor=predictor)
    world.run("one", "coder", (1, 2))
    world.run("two", "coder", (3, 4))
    world.run("one", "coder", (1, 2))
    assert world.scorer.num_prediction_failures
    assert world.rank((1, 2)) is world.rank((3, 4)) is ACTIVE_RANK
    order = [block.block_hash for block in world.tiers.hbm.iter_cached_blocks()]
    assert order == [bytes([3, 4]), bytes([3]), bytes([1, 2]), bytes([1])]


def test_a_predictor_that_fails_is_left_alone_for_a_while() -> None:
    world = World(predictor=Broken())
    for _ in range(5):
        world.run("one", "coder", (1, 2))
    assert world.scorer.num_predictions == 1
    world.now = 1.0
    world.run("one", "coder", (1, 2))
    assert world.scorer.num_predictions == 2


def test_a_slow_prediction_is_a_failure() -> None:
    world = World()
    world.scorer._slow_prediction_s = 0.0
    world.run("one", "coder", (1, 2))
    assert world.scorer.num_prediction_failures == 1
    assert world.rank((1, 2)) is ACTIVE_RANK


def test_ranks_come_back_when_the_predictor_does() -> None:
    world = World()
    world.scorer._slow_prediction_s = 0.0
    world.run("one", "coder", (1, 2))
    world.scorer._slow_prediction_s = math.inf
    world.now = 2.0
    world.run("one", "coder", (1, 2))
    assert world.rank((1, 2))[1] > 0


def test_workflows_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorer_module, "MAX_WORKFLOWS", 5)
    world = World("lifetime", next_use=FixedNextUse(read=1.0))
    for number in range(40):
        world.run(f"s{number}", "coder", (number,), tool="read")
    scorer = world.scorer
    assert len(scorer) == 5
    assert len(scorer.ranking._by_reader) <= 10
    assert len(scorer.ranking._audiences) <= 5
    for _ in range(2000):
        world.now += 100.0
        scorer.advance()
    assert len(scorer._due) < 100
    # What was forgotten is ordered by recency again.
    assert world.rank((30,)) is ACTIVE_RANK


def test_two_segments_of_one_role_count_once() -> None:
    world = World(policy="hierarchical", predictor=SelfPredictor())
    world.run("one", "coder", (1, 2))
    world.run("one", "coder", (1, 2, 3))
    assert world.rank((1, 2))[1] == pytest.approx(1 + 0.7 + 0.49)


def test_agents_without_a_name_are_one_agent() -> None:
    world = World(policy="hierarchical", predictor=SelfPredictor())
    world.run("one", None, (1, 2))
    world.run("two", END, (3, 4))
    assert world.rank((1, 2)) == world.rank((3, 4)) == (1, pytest.approx(2.19), 0.0)


def test_one_step_value_is_equation_1() -> None:
    world = World()
    world.run("one", "coder", (1, 2))
    world.run("two", "tester", (1, 3))
    run = world.tiers.hbm.run_of[world.tiers.by_hash[bytes([1])][0].block_id]
    assert run is not None
    wanted = [one_step_values(HashPredictor().predict((role,)))[role] for role in ("coder", "tester")]
    assert world.scorer.one_step_value(run) == pytest.approx(sum(wanted))


def test_what_an_agent_inherits_counts_for_it() -> None:
    """A rule: the tester reads what the coder has read."""
    world = World(inheritance=Inheritance({"tester": ["coder"]}))
    world.run("one", "coder", (1, 2))
    values = agent_values(HashPredictor().predict(("coder",)))
    assert world.rank((1, 2))[1] == pytest.approx(values["coder"] + values["tester"])


def test_inheritance_is_learned_from_what_is_read() -> None:
    """The tester goes on where the coder has ended; the planner reads two of three blocks of its."""
    world = World(inheritance=Inheritance())
    for number in range(9):
        content = (number, 1, 2)
        world.run(f"s{number}", "coder", content)
        world.run(f"s{number}", "tester", (*content, 3))
        world.run(f"t{number}", "coder", (*content[:1], 9, 9))
        world.run(f"t{number}", "planner", (*content[:1], 9, 8))
        world.end(f"s{number}")
        world.end(f"t{number}")
    assert world.scorer.inheritance.weight("coder", "tester") == pytest.approx(9 / 10)
    # The block that all share had been read by others only in other workflows.
    assert world.scorer.inheritance.weight("coder", "planner") == pytest.approx(9 / 10 * 2 / 3)
    assert world.scorer.inheritance.weight("tester", "coder") == 0.0


def test_a_hidden_state_makes_another_forecast() -> None:
    world = World()
    reading, request = world.start("one", "coder", (1, 2))
    world.scorer.advance()
    before = world.rank((1, 2))
    world.scorer.observe_hidden_state(reading, np.ones(4, np.float32))
    assert world.rank((1, 2)) != before
    world.finish(reading, request)


def test_a_late_finish_does_not_end_a_later_request() -> None:
    """A request of an ended workflow finishes while the workflow of the same name that came after it runs one."""
    world = World("lifetime", next_use=FixedNextUse(read=1.0))
    old = world.start("one", "coder", (1, 2))
    world.end("one")
    new = world.start("one", "coder", (1, 2))
    world.finish(*old, tool="read")
    (workflow,) = world.scorer._workflows.values()
    assert workflow.num_running == 1
    world.finish(*new, tool="read")
    assert workflow.num_running == 0


def test_a_run_that_is_split_before_it_was_ranked_is_ranked_in_both_parts() -> None:
    """A stranger reads on from the middle of a run: its front is a new run by the time that ranks are brought up to date."""
    world = World(predictor=SelfPredictor())
    world.run("one", "coder", (1, 2, 3, 4))
    world.tiers.run(None, (1, 2, 5, 6))
    world.scorer.advance()
    assert world.rank((1, 2)) == world.rank((1, 2, 3, 4)) == (1, pytest.approx(2.19), 0.0)
