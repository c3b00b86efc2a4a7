# SPDX-License-Identifier: Apache-2.0
"""Sessions, turns, sub-agents and what closes them: by events in any order, by what requests show, and by time."""

import gc
import sys
from typing import Any

import pytest

from tests.lifecycle_testing import BLOCK_BYTES, LEASE_S, World
from vllm_lifetime.boundaries import OutcomeStatus
from vllm_lifetime.lifecycle import MAX_ENDED_SESSIONS, MAX_IDLE_AGENTS, MAX_LINES, MAX_REMEMBERED_MESSAGES

ACCEPTED, DUPLICATE, IGNORED = OutcomeStatus.ACCEPTED, OutcomeStatus.DUPLICATE, OutcomeStatus.IGNORED
SYSTEM = (1, 2)
"""Two blocks that every conversation here begins with."""


@pytest.fixture
def world() -> World:
    """A lifecycle over an empty pool."""
    return World()


# ---------------------------------------------------------------------- naming


def test_no_name_no_lease(world: World) -> None:
    """A request without session and workflow has an unknown lifetime."""
    assert world.start(SYSTEM, session=None).reading is None
    assert len(world.lifecycle) == 0


def test_the_session_is_the_default_workflow(world: World) -> None:
    """`workflow_end` with the session's name ends it."""
    world.serve(SYSTEM, (3,))
    outcome = world.event("workflow_end", workflow_id="s", session_id=None)
    assert (outcome.status, outcome.blocks, outcome.bytes) == (ACCEPTED, 3, 3 * BLOCK_BYTES)
    assert len(world.retired()) == 3


def test_session_end_leaves_the_workflow_in_another_session(world: World) -> None:
    """A workflow over two sessions goes on in the other; its own end ends it there, too."""
    world.serve((1, 1), session="s1", workflow_id="w")
    world.serve((2, 2), session="s2", workflow_id="w")
    assert world.event("session_end", session_id="s1").blocks == 2
    assert world.retired() == {(1,), (1, 1)}
    assert world.event("workflow_end", workflow_id="w", session_id=None).blocks == 2
    assert len(world.lifecycle) == 0


def test_workflow_end_leaves_the_session_s_other_workflow(world: World) -> None:
    """Two workflows of one session end one by one."""
    world.serve((1, 1), workflow_id="v")
    world.serve((2, 2), workflow_id="w")
    world.event("workflow_end", workflow_id="v")
    assert world.retired() == {(1,), (1, 1)}
    assert world.lifecycle.find_session("s") is not None


# ---------------------------------------------------------------------- turns


def test_turn_end_frees_what_the_turn_added(world: World) -> None:
    """The first prompt of the turn survives; tool calls and answers do not."""
    world.serve((*SYSTEM, 3), (4,))
    world.serve((*SYSTEM, 3, 4, 5), (6,))
    assert world.classes() == {"reasoning_stripped": 3, "reasoning_laden": 3}
    outcome = world.event("turn_end")
    assert (outcome.status, outcome.blocks) == (ACCEPTED, 3)
    assert world.retired() == {(*SYSTEM, 3, 4), (*SYSTEM, 3, 4, 5), (*SYSTEM, 3, 4, 5, 6)}
    assert world.segment_classes() == ["reasoning_stripped"]


def test_turns_go_on_after_turn_end(world: World) -> None:
    """The next turn has a segment of its own, and the prompt without the reasoning is kept."""
    for turn in range(3):
        stripped = (*SYSTEM, 3, *range(10, 10 + turn))
        world.serve(stripped, (50 + turn, 51))
        world.serve((*stripped, 50 + turn, 51), (52,))
        assert world.event("turn_end").blocks == 3
        assert world.classes() == {"reasoning_stripped": len(stripped)}


def test_a_new_turn_number_is_a_turn_end(world: World) -> None:
    """Without any event: the next user message says that the last turn is over."""
    world.serve((*SYSTEM, 3), (4, 5), turn=1)
    world.serve((*SYSTEM, 3, 4, 5), (6,), turn=1)
    world.serve((*SYSTEM, 3, 9), turn=2)
    assert world.retired() == {(*SYSTEM, 3, 4), (*SYSTEM, 3, 4, 5), (*SYSTEM, 3, 4, 5, 6)}


def test_stripped_reasoning_is_seen_without_event_and_number(world: World) -> None:
    """A prompt that repeats the turn's first one, and not what came after, begins a new turn."""
    world.serve((*SYSTEM, 3), (4, 5), agent="coder")
    world.serve((*SYSTEM, 3, 4, 5), (6, 7), agent="coder")
    world.serve((*SYSTEM, 3, 9), (10,), agent="coder")
    assert world.retired() == {(*SYSTEM, 3, 4), (*SYSTEM, 3, 4, 5), (*SYSTEM, 3, 4, 5, 6), (*SYSTEM, 3, 4, 5, 6, 7)}
    assert world.classes() == {"reasoning_stripped": 4, "reasoning_laden": 1}


def test_turn_end_frees_what_the_next_turn_reads(world: World) -> None:
    """A harness that keeps its reasoning is found out after one turn: later turn ends free nothing, nor in other sessions."""
    world.serve((*SYSTEM, 3), (4, 5), turn=1)
    world.event("turn_end", turn=1)
    assert len(world.retired()) == 2
    world.serve((*SYSTEM, 3, 4, 5, 6), (7, 8), turn=2)
    assert not world.retired()
    assert world.event("turn_end", turn=2).blocks == 0
    world.serve((*SYSTEM, 13), (14, 15), session="other", turn=1)
    assert world.event("turn_end", session_id="other").blocks == 0
    assert not world.retired()


def test_a_lost_last_answer_is_not_stripped_reasoning(world: World) -> None:
    """The last answer in another tokenization: the harness keeps its turns all the same."""
    world.serve((*SYSTEM, 3), (4,), turn=1)
    world.serve((*SYSTEM, 3, 4, 5, 6, 7), (8, 9), turn=1)
    world.serve((*SYSTEM, 3, 4, 5, 6, 7, 20, 21), (22, 23), turn=2)
    assert world.retired() == {(*SYSTEM, 3, 4, 5, 6, 7, 8), (*SYSTEM, 3, 4, 5, 6, 7, 8, 9)}
    assert world.event("turn_end", turn=2).blocks == 0


def test_an_aborted_answer_is_kept_as_if_it_would_be_read(world: World) -> None:
    """No later prompt has half an answer in it."""
    served = world.start((*SYSTEM, 3), (4, 5))
    world.compute(served)
    world.finish(served, is_aborted=True)
    assert world.retired() == {(*SYSTEM, 3, 4), (*SYSTEM, 3, 4, 5)}


def test_explicit_classes_are_believed(world: World) -> None:
    """A request that says what its tokens are is not second-guessed; `segment_id` names segments of its own."""
    world.serve((1, 1), (5,), segment_class="lead", agent="a")
    world.serve((2, 2), (5,), segment_class="reasoning_laden", agent="b")
    world.serve((3, 3), (5,), segment_class="shared", agent="c", segment_id="prompt")
    assert world.classes() == {"lead": 3, "reasoning_laden": 3, "shared": 3}
    assert world.event("turn_end").blocks == 3
    assert world.classes() == {"lead": 3, "shared": 3}


# ---------------------------------------------------------------------- sub-agents


def spawn_two(world: World) -> None:
    """A lead with a worker and a reviewer that share its first two blocks."""
    world.serve((*SYSTEM, 3), agent_id="lead", agent="lead")
    world.event("subagent_spawn", agent="coder", agent_id="w1", parent_agent_id="lead", spawn={"instruction": "x", "position": 0})
    world.event("subagent_spawn", agent="code reviewer", agent_id="r1", parent_agent_id="lead")
    world.serve((*SYSTEM, 4), (5, 6), agent_id="w1")
    world.serve((*SYSTEM, 7), (8,), agent_id="r1")


def test_subagent_return_frees_its_private_blocks_only(world: World) -> None:
    """R32: the parent's context stays, the other sub-agent's too."""
    spawn_two(world)
    assert world.segment_classes() == ["lead", "reviewer", "worker"]
    # The shared top counts for the longest-lived of its readers.
    assert world.classes() == {"lead": 3, "worker": 3, "reviewer": 2}
    outcome = world.event("subagent_return", agent_id="w1")
    assert (outcome.status, outcome.blocks) == (ACCEPTED, 3)
    assert world.retired() == {(*SYSTEM, 4), (*SYSTEM, 4, 5), (*SYSTEM, 4, 5, 6)}
    assert world.segment_classes() == ["lead", "reviewer"]
    assert world.event("subagent_return", agent_id="w1").status is IGNORED


def test_the_return_of_an_unknown_agent_ends_the_main_agent(world: World) -> None:
    """It does not."""
    world.serve((*SYSTEM, 3), (4,))
    outcome = world.event("subagent_return", agent_id="never seen")
    assert outcome.status is IGNORED and "'never seen'" in (outcome.reason or "")
    assert world.event("subagent_return").status is IGNORED
    assert not world.retired()


def test_a_spawn_that_no_request_names_takes_the_main_conversation(world: World) -> None:
    """Its requests went to another engine: a new conversation with the main one's top is not the sub-agent's."""
    world = World(num_hbm=200)
    world.serve((*SYSTEM, *range(10, 30)), (4,))
    world.event("subagent_spawn", agent="explorer", agent_id="a1")
    new = (*SYSTEM, *range(40, 43))
    world.serve(new, (5,))
    world.serve((*new, 5, 6, 7, 8), (9,))
    assert world.event("subagent_return", agent="explorer", agent_id="a1").blocks == 0
    assert not world.retired()


def test_a_spawn_waits_for_its_conversation_for_ever(world: World) -> None:
    """A minute later a new conversation is somebody else's."""
    world.serve((*SYSTEM, 3), (4,))
    world.event("subagent_spawn", agent="explorer", agent_id="a1")
    world.now += 61
    world.serve((9, 8), (7,))
    assert world.event("subagent_return", agent_id="a1").blocks == 0


def test_a_spawn_with_an_id_misses_requests_that_name_the_role(world: World) -> None:
    """The first conversation of that role is the announced sub-agent's."""
    world.serve((1, 2, 3), (4,))
    world.event("subagent_spawn", agent="explorer", agent_id="a1")
    world.serve((9, 8), (7,), agent="explorer")
    world.serve((9, 8, 7, 6), (5,), agent="explorer")
    assert "worker" in world.segment_classes()
    assert world.event("subagent_return", agent="explorer", agent_id="a1").blocks == 5


def test_an_event_s_agent_id_misses_requests_that_named_the_role(world: World) -> None:
    """Another instance of the role that has an id is not meant."""
    world.serve((*SYSTEM, 3), agent="coder")
    world.serve((*SYSTEM, 4), agent="coder", agent_id="c2")
    assert world.event("subagent_return", agent="coder", agent_id="c1").blocks == 1
    assert world.retired() == {(*SYSTEM, 3)}


def test_requests_alone_say_who_spawned_whom(world: World) -> None:
    """`parent_agent_id` without any event makes a worker, and a lead of the parent."""
    world.serve((*SYSTEM, 3), agent_id="lead")
    world.serve((*SYSTEM, 4), (5,), agent_id="w1", parent_agent_id="lead")
    assert world.segment_classes() == ["lead", "worker"]


def test_an_announced_subagent_is_recognised_among_nameless_requests(world: World) -> None:
    """The harness announces it by events but does not name its requests: the new conversation is the sub-agent's."""
    world.serve((*SYSTEM, 3), (4,))
    world.event("subagent_spawn", agent="explorer", agent_id="a1")
    world.serve((9, 8), (7,))
    world.serve((9, 8, 7, 6), (5,))
    assert world.segment_classes() == ["lead", "reasoning_laden", "worker"]
    assert world.event("subagent_return", agent_id="a1").blocks == 5
    assert world.event("session_end").blocks == 4


# ---------------------------------------------------------------------- compaction


def test_compaction_keeps_the_dropped_suffix(world: World) -> None:
    """R31: what the compacted context no longer has is retired; what it shares with the old one stays."""
    old = (*SYSTEM, *range(10, 30))
    world.serve(old)
    new = (*SYSTEM, *range(40, 46))
    served = world.start(new)
    assert not world.retired(), "before the request has its prefix"
    world.compute(served)
    world.finish(served)
    assert world.retired() == {old[: n + 1] for n in range(2, len(old))}


def test_a_side_request_ends_the_conversation(world: World) -> None:
    """A nameless request with the same top and little of its own is another conversation, and both go on."""
    main = (*SYSTEM, *range(10, 20))
    world.serve(main)
    world.serve((*SYSTEM, 50, 51))
    assert not world.retired()
    world.serve((*main, 20, 21))
    world.serve((*SYSTEM, 50, 51, 52))
    assert not world.retired()


def test_two_conversations_take_turns_at_ending_each_other(world: World) -> None:
    """Parallel requests of one named agent are told apart while they run."""
    one, two = world.start((*SYSTEM, 10, 11), (12,), agent="a"), world.start((*SYSTEM, 20, 21), (22,), agent="a")
    for served in (one, two):
        world.compute(served)
    for served in (one, two):
        world.finish(served)
    world.serve((*SYSTEM, 10, 11, 12, 13), agent="a")
    world.serve((*SYSTEM, 20, 21, 22, 23), agent="a")
    assert not world.retired()


def test_a_compaction_event_frees_at_once(world: World) -> None:
    """The context has been replaced; what another agent reads of it stays."""
    world.serve((*SYSTEM, 3), (4,), agent_id="main")
    world.serve((*SYSTEM, 7), agent_id="other")
    assert world.event("compaction", agent_id="main").blocks == 2
    world.serve((*SYSTEM, 9), (10,), agent_id="main")
    assert world.classes() == {"reasoning_stripped": 4, "reasoning_laden": 1}


def test_a_compaction_event_before_the_summary_waits_for_it(world: World) -> None:
    """`expected_return_s`: the context is read once more, and then replaced, by however little."""
    world.serve((*SYSTEM, 3, 4), (5,))
    assert world.event("compaction", expected_return_s=0.0).blocks == 0
    world.serve((*SYSTEM, 3, 4, 5, 6), (7,))
    assert not world.retired()
    world.serve((*SYSTEM, 8), (9,))
    assert (*SYSTEM, 3) in world.retired() and SYSTEM not in world.retired()


def test_another_conversation_ends_one_that_is_about_to_be_compacted(world: World) -> None:
    """Announced, but not summarised yet: a request that shares the top is a side request, as ever."""
    world.serve((1, *range(10, 30)), (5,))
    world.event("compaction", expected_return_s=0.0)
    world.serve((1, 50), (51,))
    assert not world.retired()


def test_pressure_in_mid_turn_loses_the_part_that_survives_it() -> None:
    """Evicted during a tool call and computed again by a later request of the turn, the prompt is still the base's."""
    world = World(num_hbm=32, num_host=0, num_flash=0)
    base = (*SYSTEM, 3, 4, 5, 6)
    for evictions in (8, 5):
        world.serve(base, (7,), turn=evictions)
        world.serve((*base, 7, 8), (9,), turn=evictions)
        for i in range(evictions):
            world.serve((60 + i, 1, 2, 3, 4, 5), session=f"o{i}")
        world.serve((*base, 7, 8, 9, 10), (11,), turn=evictions)
        world.event("turn_end", turn=evictions)
        assert base not in world.retired() and base[:3] not in world.retired()


def test_two_workers_of_one_role_end_each_other() -> None:
    """They take turns and have no ids: with the same top they are two conversations."""
    world = World(num_hbm=200)
    one, two = (*SYSTEM, *range(10, 20)), (*SYSTEM, 30, 31, 32)
    for _ in range(3):
        world.serve(one, (50,), agent="coder")
        world.serve(two, (60,), agent="coder")
        assert not world.retired()
        one, two = (*one, 50, 51), (*two, 60, 61)


def test_a_retry_teaches_that_turns_are_stripped(world: World) -> None:
    """The same prompt again says nothing about what the next turn brings back."""
    world.serve((*SYSTEM, 3), (4, 5), turn=1)
    world.serve((*SYSTEM, 3), (4, 5), turn=1)
    world.serve((*SYSTEM, 3, 4, 5, 6), (7, 8), turn=2)
    assert world.event("turn_end", turn=2).blocks == 0


# ---------------------------------------------------------------------- order, duplicates, loss


def test_an_event_counts_once(world: World) -> None:
    """Retries are harmless, also after the session has been opened again."""
    world.serve(SYSTEM)
    assert world.event("session_end", message_id="m").status is ACCEPTED
    world.serve(SYSTEM)
    assert world.event("session_end", message_id="m").status is DUPLICATE
    assert not world.retired()


def test_events_about_what_is_not_here_change_nothing(world: World) -> None:
    """They say so, and open nothing."""
    for kind in ("turn_end", "compaction", "subagent_return", "session_end", "workflow_end"):
        outcome = world.event(kind, session_id="other", agent_id="a")
        assert outcome.status is IGNORED and outcome.reason
    assert len(world.lifecycle) == 0


@pytest.mark.parametrize("running", ["turn_end", "subagent_return", "compaction", "workflow_end", "session_end"])
def test_a_boundary_takes_blocks_from_a_running_request(world: World, running: str) -> None:
    """It waits for the request, which may go on writing; then everything of it is retired."""
    served = world.start((*SYSTEM, 3), (4, 5), agent="a", segment_class="reasoning_laden")
    world.compute(served, 1)
    outcome = world.event(running, agent="a")
    assert outcome.status is ACCEPTED and outcome.blocks == 0 and "wait" in (outcome.reason or "")
    assert not world.retired()
    world.compute(served)
    assert not world.retired()
    world.finish(served)
    assert len(world.retired()) == 5


def test_a_late_turn_end_retires_a_reopened_session(world: World) -> None:
    """By the clock, by the turn, by the generation, and when the session has not answered anything yet."""
    world.serve((*SYSTEM, 3), (4,))
    world.event("session_end", sent_at_s=100.0)
    served = world.start((*SYSTEM, 3), (9,), turn=7)
    world.compute(served)
    late: list[dict[str, Any]] = [{}, {"sent_at_s": 99.0}, {"turn": 6}, {"generation": 0}]
    for fields in late:
        assert world.event("turn_end", **fields).status is IGNORED, fields
    world.finish(served)
    for fields in late[1:]:
        assert world.event("turn_end", **fields).status is IGNORED, fields
    assert world.retired() == {(*SYSTEM, 3, 4)}, "what only the ended generation had read"
    assert world.event("session_end", sent_at_s=99.0).status is IGNORED
    assert world.event("turn_end", sent_at_s=101.0, turn=7, generation=1).blocks == 1


def test_a_turn_end_that_is_overtaken_ends_the_next_turn(world: World) -> None:
    """A background sender is slower than the next request: nothing has been answered in this turn yet."""
    world.serve((*SYSTEM, 3), (4, 5), turn=1)
    served = world.start((*SYSTEM, 3, 6), (7, 8), turn=2)
    world.compute(served)
    assert world.event("turn_end", sent_at_s=10.0).status is IGNORED
    world.finish(served)
    world.serve((*SYSTEM, 3, 6, 7, 8, 9), (10, 11), turn=2)
    assert world.event("turn_end", sent_at_s=20.0).blocks == 5


def test_a_late_subagent_return_ends_the_next_one_of_that_name(world: World) -> None:
    """After the session's end it finds nothing; in a session opened again it is recognised by its time."""
    spawn_two(world)
    world.event("session_end", sent_at_s=10.0)
    assert world.event("subagent_return", agent_id="w1").status is IGNORED
    world.serve((*SYSTEM, 4), (5, 6), agent_id="w1")
    assert world.event("subagent_return", agent_id="w1", sent_at_s=9.0).status is IGNORED
    assert not world.retired() & {(*SYSTEM, 4)}


def test_generations_count_reopenings(world: World) -> None:
    """Also when the session went by the end of its only workflow."""
    for generation in range(3):
        world.serve(SYSTEM)
        session = world.lifecycle.find_session("s")
        assert session is not None and session.generation == generation
        world.event("session_end") if generation else world.event("workflow_end", workflow_id="s")
        ended = world.lifecycle.find_ended("s")
        assert ended is not None and ended.generation == generation and ended.last_boundary is not None


def test_lost_sessions_hold_their_blocks_for_ever(world: World) -> None:
    """A lease's time after its last request an agent is closed; one that is still running, or heard of, is not."""
    world.serve((1, 1), session="lost")
    running = world.start((2, 2), session="running")
    world.compute(running)
    world.now += LEASE_S - 1
    world.serve((3, 3), session="alive")
    world.now += 2
    assert world.lifecycle.expire() == 2
    assert world.retired() == {(1,), (1, 1)}
    assert world.lifecycle.num_expired == 1
    world.finish(running)
    world.now += LEASE_S + 1
    assert world.lifecycle.expire() == 4
    assert len(world.lifecycle) == 0


def test_a_ghost_subagent_holds_its_blocks_for_ever(world: World) -> None:
    """It never returns: its own lease ends it, while its session goes on."""
    spawn_two(world)
    world.now += LEASE_S - 1
    world.serve((*SYSTEM, 3, 9), agent_id="lead")
    world.now += 2
    world.lifecycle.expire()
    assert (*SYSTEM, 4) in world.retired() and (*SYSTEM, 7) in world.retired()
    assert (*SYSTEM, 3) not in world.retired()


# ---------------------------------------------------------------------- bounds


def test_100k_sessions_opened_and_dropped_leave_memory_flat() -> None:
    """Opened by requests and by events, ended or not: what is remembered is bounded."""
    world = World(num_hbm=16, num_host=0, num_flash=0)

    def churn(start: int, count: int) -> None:
        for i in range(start, start + count):
            match i % 4:
                case 0:
                    world.serve((i % 200, 1), session=f"s{i}", workflow_id=f"w{i}", agent=f"role{i}", turn=i)
                case 1:
                    world.serve((i % 200, 2), session=f"s{i}")
                    world.event("session_end", session_id=f"s{i}")
                case 2:
                    world.event("session_start", session_id=f"s{i}")
                case 3:
                    world.event("subagent_spawn", session_id=f"s{i}", agent_id=f"a{i}", spawn={"instruction": "x" * 100})
            world.ended.clear()

    def held_bytes() -> int:
        """Bytes of all objects and containers; a text that is kept makes its container larger."""
        gc.collect()
        return sum(map(sys.getsizeof, gc.get_objects()))

    churn(0, 50_000)  # fills every record that is bounded
    before = held_bytes()
    churn(50_000, 50_000)
    grown = held_bytes() - before
    lifecycle = world.lifecycle
    print(f"{grown} of {before} bytes grown")
    assert len(lifecycle) <= MAX_IDLE_AGENTS + 16 and lifecycle.num_agents <= MAX_IDLE_AGENTS + 16
    assert len(lifecycle._ended) <= MAX_ENDED_SESSIONS and len(lifecycle._messages) <= MAX_REMEMBERED_MESSAGES
    assert grown < 200_000, "four bytes a session"


def test_hundreds_of_requests_at_once_are_as_many_conversations() -> None:
    """While all run, further ones are one crowd; afterwards there is room again."""
    world = World(num_hbm=1000)
    served = [world.start((i, 1), (2,), workflow_id="w") for i in range(250)]
    session = world.lifecycle.find_session("s")
    assert session is not None and len(session.agents) == MAX_LINES + 1
    for each in served:
        world.compute(each)
        world.finish(each)
    assert world.event("session_end").blocks == 750


def test_agents_that_share_one_prompt_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own blocks are gone, the shared one never goes: the longest silent ones are closed."""
    monkeypatch.setattr("vllm_lifetime.lifecycle.MAX_AGENTS", 50)
    world = World(num_hbm=32, num_host=0, num_flash=0)
    for i in range(200):
        world.serve((*SYSTEM, i % 100, 1), session=f"s{i}")
    assert world.lifecycle.num_agents <= 50
    assert SYSTEM not in world.retired()


def test_conversations_of_one_name_are_bounded(world: World) -> None:
    """A harness that names nothing but its session, and begins conversation after conversation."""
    world = World(num_hbm=1000)
    for i in range(MAX_LINES + 20):
        world.serve((100 + i, 1))
    session = world.lifecycle.find_session("s")
    assert session is not None and len(session.agents) == MAX_LINES
    assert (100, 1) in world.retired() and (100 + MAX_LINES + 19, 1) not in world.retired()


def test_blocks_evicted_everywhere_leave_a_session_behind(world: World) -> None:
    """Nothing is left to retire: it is idle, and its end says so."""
    world.serve((1, 1), session="gone")
    for i in range(40):
        world.serve((50 + i, 3), session=f"other {i}")
    session = world.lifecycle.find_session("gone")
    assert session is not None and all(not agent.segments for agent in session.agents)
    assert world.event("session_end", session_id="gone").blocks == 0
