# SPDX-License-Identifier: Apache-2.0
"""CrewAI's own crews, flows and agents: which events they give, and whose name each request has."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("crewai_testing", reason="needs requirements/harness-crewai.txt")

import httpx
from crewai import LLM, Agent, Crew, Process
from crewai.events import ContextWindowSummarizationCompletedEvent, crewai_event_bus
from crewai.events.types.flow_events import FlowCreatedEvent
from crewai.flow.async_feedback import HumanFeedbackPending, PendingFeedbackContext
from crewai.flow.flow import Flow, listen, start
from crewai.flow.human_feedback import human_feedback
from crewai.tools import tool
from crewai_testing import CrewAI, make_task, of_task
from fake_lifetime_server import find_dead_url
from harness_recorder import Recorder, calls
from told import said

from vllm_lifetime.harness import LifetimeClient
from vllm_lifetime.harness.crewai import LifetimeInterceptor, LifetimeListener

if TYPE_CHECKING:
    from conftest import RealServer


@pytest.fixture
def crewai(recorder: Recorder, client: LifetimeClient) -> Iterator[CrewAI]:
    running = CrewAI(recorder, client)
    yield running
    running.listener.close()
    assert client.stats.refused == 0


# ---------------------------------------------------------------------- crews


def test_sequential_crew_is_a_session_whose_tasks_are_sub_agents(crewai: CrewAI) -> None:
    assert "done" in crewai.crew("Researcher", "Writer").kickoff().raw
    assert crewai.said() == [
        "session_start",
        *of_task(1, "Researcher"),
        *of_task(2, "Writer"),
        "workflow_end",
    ]
    assert crewai.asked() == ["Researcher id1", "Writer id2"]
    (session,) = crewai.sessions
    assert [request.headers["x-session-id"] for request in crewai.recorder.requests] == [session, session]
    ids = [event.agent_id for event in crewai.recorder.boundaries if event.kind == "subagent_spawn"]
    assert [request.lifetime["agent_id"] for request in crewai.recorder.requests] == ids


def test_spawn_tells_what_the_sub_agent_was_made_from(crewai: CrewAI) -> None:
    @tool("look_up")
    def look_up(word: str) -> str:
        """Look a word up."""
        return word

    agent = crewai.agent("Senior\n  Researcher ", tools=[look_up])
    crewai.crew_of([make_task(agent, "find the answer"), make_task(agent, "x" * 70_000)]).kickoff()
    crewai.said()
    first, second = (event.spawn for event in crewai.recorder.boundaries if event.kind == "subagent_spawn")
    assert (first.instruction, first.tools, first.model) == ("find the answer", ("look_up",), "model")
    assert "find the answer" in first.context
    assert (first.position, second.position) == (0, 1)
    assert len(second.instruction) == 65_536
    assert crewai.recorder.requests[0].agent == "Senior Researcher"


def test_delegated_task_is_a_sub_agent_of_the_one_who_delegates(crewai: CrewAI) -> None:
    task = {"task": "a part", "context": "all of it", "coworker": "Writer"}
    crewai.answer(calls(("delegate_work_to_coworker", task)))
    writer, whole = crewai.agent("Writer"), make_task(None)
    crew = Crew(agents=[writer], tasks=[whole], process=Process.hierarchical, manager_llm=crewai.llm())
    crew.kickoff()
    assert crewai.asked() == [
        "Crew Manager id1",
        "Writer id2 of id1",
        "Crew Manager id1",
    ]
    assert crewai.said() == [
        "session_start",
        "subagent_spawn Crew Manager id1",
        "subagent_spawn Writer id2 of id1",
        "subagent_return Writer id2 of id1",
        "subagent_return Crew Manager id1",
        "workflow_end",
    ]


def test_tasks_that_run_side_by_side_are_told_apart(crewai: CrewAI) -> None:
    crewai.answer(delay_s=0.2)
    tasks = [make_task(crewai.agent(role), async_execution=role != "C") for role in ("A", "B", "C")]
    crewai.crew_of(tasks).kickoff()
    said = crewai.said()
    assert (said[0], said[-1], len(said)) == ("session_start", "workflow_end", 8)
    by_role = {role: str(task.id) for role, task in zip("ABC", tasks, strict=True)}
    assert {request.agent: request.lifetime["agent_id"] for request in crewai.recorder.requests} == by_role
    events = [(event.kind.value, event.agent, event.agent_id) for event in crewai.recorder.boundaries[1:-1]]
    for role, task_id in by_role.items():
        spawned, returned = (events.index((f"subagent_{kind}", role, task_id)) for kind in ("spawn", "return"))
        assert spawned < returned
    assert events.index(("subagent_spawn", "B", by_role["B"])) < events.index(("subagent_return", "A", by_role["A"]))


async def kickoff_in_every_way(crewai: CrewAI) -> None:
    shared = crewai.crew("Each")
    await asyncio.gather(
        crewai.crew("In a thread").kickoff_async(),
        crewai.crew("In a task").akickoff(),
        shared.kickoff_for_each_async([{"n": "1"}, {"n": "2"}]),
    )


def test_kickoffs_at_the_same_time_are_sessions_of_their_own(crewai: CrewAI) -> None:
    crewai.answer(delay_s=0.2)
    asyncio.run(kickoff_in_every_way(crewai))
    crewai.said()
    assert len(crewai.sessions) == 4
    roles = []
    for session in crewai.sessions:
        (request,) = (request for request in crewai.recorder.requests if request.session_id == session)
        roles.append(request.agent or "")
        assert said(crewai.recorder, session) == ["session_start", *of_task(1, roles[-1]), "workflow_end"]
    assert sorted(roles) == ["Each", "Each", "In a task", "In a thread"]


def test_one_after_another_are_sessions_of_their_own(crewai: CrewAI) -> None:
    crew = crewai.crew("A")
    for _ in range(2):
        crew.kickoff()
    crewai.said()
    assert len(crewai.sessions) == 2
    for session in crewai.sessions:
        assert said(crewai.recorder, session) == ["session_start", *of_task(1, "A"), "workflow_end"]


# ---------------------------------------------------------------------- agents and flows


def test_lone_agent_is_a_session_and_nobodys_sub_agent(crewai: CrewAI) -> None:
    crewai.agent("Solo").kickoff("hello")
    assert crewai.said() == ["session_start", "workflow_end"]
    assert crewai.asked() == ["Solo id1"]
    assert crewai.recorder.requests[0].session_id == crewai.sessions[0]


def test_flow_is_one_session_for_all_that_it_kicks_off(crewai: CrewAI) -> None:
    class Story(Flow[Any]):
        _skip_auto_memory = True

        @start()
        def plan(self) -> str:
            return str(crewai.crew("Planner").kickoff().raw)

        @listen(plan)
        async def write(self, plan: str) -> str:
            return str((await crewai.agent("Writer").kickoff_async("write")).raw)

    Story(suppress_flow_events=True).kickoff()
    assert crewai.said() == ["session_start", *of_task(1, "Planner"), *of_task(2, "Writer"), "workflow_end"]
    assert crewai.asked() == ["Planner id1", "Writer id2"]
    assert len(crewai.sessions) == 1


def test_flow_that_waits_for_a_person_is_over(crewai: CrewAI) -> None:
    class Ask:
        def request_feedback(self, context: PendingFeedbackContext, flow: Any) -> str:
            raise HumanFeedbackPending(context=context)

    class Story(Flow[Any]):
        _skip_auto_memory = True

        @start()
        @human_feedback(message="well?", provider=Ask())
        def plan(self) -> str:
            return str(crewai.crew("Planner").kickoff().raw)

    assert isinstance(Story(suppress_flow_events=True).kickoff(), HumanFeedbackPending)
    assert crewai.said() == ["session_start", *of_task(1, "Planner"), "workflow_end"]


def test_flow_that_puts_its_own_end_off_is_over_with_each_kickoff(crewai: CrewAI) -> None:
    """As a conversational flow does, which tells CrewAI's bus of its end once, after the last turn."""

    class Story(Flow[Any]):
        _skip_auto_memory = True

        @start()
        def plan(self) -> str:
            return str(crewai.crew("Planner").kickoff().raw)

    story = Story(suppress_flow_events=True, defer_trace_finalization=True)
    story.kickoff()
    with crewai.listener.session("chat"):
        story.kickoff()
        story.kickoff()
    crewai.said()
    first, chat = crewai.sessions
    assert said(crewai.recorder, first) == ["session_start", *of_task(1, "Planner"), "workflow_end"]
    turns = [*of_task(1, "Planner"), "turn_end", *of_task(2, "Planner"), "turn_end"]
    assert said(crewai.recorder, chat) == ["session_start", *turns, "workflow_end"]


def test_flow_that_fails_is_over(crewai: CrewAI) -> None:
    class Story(Flow[Any]):
        _skip_auto_memory = True

        @start()
        def plan(self) -> str:
            crewai.crew("Planner").kickoff()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Story(suppress_flow_events=True).kickoff()
    assert crewai.said() == ["session_start", *of_task(1, "Planner"), "workflow_end"]


# ---------------------------------------------------------------------- sessions by hand


def test_kickoffs_in_a_session_are_its_turns(crewai: CrewAI) -> None:
    crew, agent = crewai.crew("A"), crewai.agent("Solo")
    with crewai.listener.session("chat") as session_id:
        assert session_id == "chat"
        crew.kickoff()
        crew.kickoff()
        agent.kickoff("hello")
    assert crewai.said() == [
        "session_start",
        *of_task(1, "A"),
        "turn_end",
        *of_task(1, "A"),
        "turn_end",
        "turn_end",
        "workflow_end",
    ]
    assert crewai.asked("chat") == ["A id1", "A id1", "Solo id2"]


def test_named_workflow_is_told_and_does_not_end_with_its_session(crewai: CrewAI) -> None:
    with crewai.listener.session(workflow_id="w"):
        crewai.crew("A").kickoff()
    assert crewai.said() == ["session_start", *of_task(1, "A"), "turn_end", "session_end"]
    assert {event.workflow_id for event in crewai.recorder.boundaries} == {"w"}
    assert crewai.recorder.requests[0].lifetime["workflow_id"] == "w"


def test_sessions_in_two_threads_are_told_apart(crewai: CrewAI) -> None:
    crewai.answer(delay_s=0.1)

    def run(name: str) -> None:
        with crewai.listener.session(name):
            crewai.crew(name).kickoff()

    threads = [threading.Thread(target=run, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    crewai.said()
    for name in ("one", "two"):
        assert crewai.asked(name) == [f"{name} id1"]
        assert said(crewai.recorder, name) == ["session_start", *of_task(1, name), "turn_end", "workflow_end"]


def test_direct_call_of_a_model_is_named_by_its_session_only(crewai: CrewAI) -> None:
    llm = crewai.llm()
    llm.call("hello")
    with crewai.listener.session("chat"):
        crewai.crew("A").kickoff()
        llm.call("hello")
    llm.call("hello")
    first, _, third, last = crewai.recorder.requests
    assert [request.session_id for request in (first, third, last)] == [None, "chat", None]
    assert third.lifetime == {}
    assert "kv_transfer_params" not in first.body and "kv_transfer_params" not in last.body


# ---------------------------------------------------------------------- requests, and what must not break


def test_users_own_fields_are_kept(crewai: CrewAI) -> None:
    own = {"extra_body": {"top_k": 5, "kv_transfer_params": {"other": 1, "lifetime": {"retain_s": 60}}}}
    llm = crewai.llm(additional_params=own, default_headers={"X-Session-ID": "mine", "X-Other": "1"}, temperature=0.5)
    crewai.crew_of([make_task(crewai.agent("A", llm=llm))]).kickoff()
    (request,) = crewai.recorder.requests
    assert (request.body["top_k"], request.body["temperature"]) == (5, 0.5)
    assert request.body["kv_transfer_params"]["other"] == 1
    assert (request.agent, request.lifetime["retain_s"]) == ("A", 60)
    assert (request.headers["x-session-id"], request.headers["x-other"]) == ("mine", "1")


def test_streamed_answers_are_asked_for_by_name_too(crewai: CrewAI) -> None:
    crewai.crew_of([make_task(crewai.agent("A", llm=crewai.llm(stream=True)))]).kickoff()
    assert crewai.recorder.requests[0].body["stream"] is True
    assert crewai.asked() == ["A id1"]


def test_request_that_cannot_be_named_is_sent_as_it_is(crewai: CrewAI) -> None:
    request = httpx.Request("POST", f"{crewai.recorder.v1}/chat/completions", content=b"no JSON")
    with crewai.listener.session("chat"):
        assert LifetimeInterceptor().on_outbound(request) is request


def test_listener_that_was_closed_says_nothing(crewai: CrewAI) -> None:
    crewai.listener.close()
    crewai.crew("A").kickoff()
    assert crewai.said() == []
    assert crewai.recorder.requests[0].session_id is None


def emit_behind_a_slow_handler() -> None:
    """A summary's event waits behind another listener, which takes its time on the thread of CrewAI's bus."""

    async def hold(source: Any, event: FlowCreatedEvent) -> None:
        time.sleep(0.3)

    with crewai_event_bus.scoped_handlers():
        crewai_event_bus.register_handler(FlowCreatedEvent, hold)
        crewai_event_bus.emit(None, FlowCreatedEvent(flow_name="slow"))
    crewai_event_bus.emit(None, ContextWindowSummarizationCompletedEvent(agent_id="a", agent_role="A"))


def test_session_ends_after_what_crewai_has_emitted_in_it(crewai: CrewAI) -> None:
    with crewai.listener.session():
        emit_behind_a_slow_handler()
    assert crewai.said() == ["session_start", "compaction A a", "workflow_end"]


def test_what_crewai_has_emitted_is_reported_before_the_listener_is_closed(recorder: Recorder) -> None:
    with LifetimeClient(recorder.url) as client:
        with LifetimeListener(client) as listener:
            session = listener.session()
            session.__enter__()
            emit_behind_a_slow_handler()
        assert client.flush()
        assert recorder.kinds == ["session_start", "compaction"]
        session.__exit__(None, None, None)


def test_dead_lifetime_server_does_not_hold_up_the_crew(crewai: CrewAI) -> None:
    crewai.listener.close()
    with LifetimeClient(find_dead_url()) as client:
        listener = LifetimeListener(client)
        crew = crewai.crew("A", "B")
        began_s = time.monotonic()
        assert "done" in crew.kickoff().raw
        took_s = time.monotonic() - began_s
        crewai_event_bus.flush()
        listener.close()
        assert (client.stats.queued, client.stats.sent) == (6, 0)
        client.close(0.2)
    assert took_s < 5.0


def test_crew_on_a_real_server_frees_its_blocks_when_it_is_done(vllm_server: RealServer) -> None:
    kinds = ("session_start", "subagent_spawn", "subagent_return")
    before = {kind: vllm_server.count_boundaries(kind) for kind in kinds}
    ends_before = vllm_server.count_boundaries("workflow_end", status=None)
    retired_before = vllm_server.tiers()["hbm"]["retired_blocks"]
    with LifetimeClient(vllm_server.url) as client:
        listener = LifetimeListener(client)
        llm = LLM(
            model="hosted_vllm/model",
            base_url=vllm_server.v1,
            api_key="none",
            max_tokens=32,
            temperature=0,
            interceptor=LifetimeInterceptor(),
        )
        tasks = [
            make_task(Agent(role=role, goal="answer", backstory="a test", llm=llm, max_iter=2), "Name a river. " * 10)
            for role in ("Researcher", "Writer")
        ]
        crew = Crew(agents=[task.agent for task in tasks if task.agent is not None], tasks=tasks)
        assert crew.kickoff().raw
        crewai_event_bus.flush()
        listener.close()
        assert client.flush()
        assert (client.stats.sent, client.stats.refused, client.stats.failed) == (6, 0, 0)
    for kind, count in {"session_start": 1, "subagent_spawn": 2, "subagent_return": 2}.items():
        vllm_server.await_boundaries(kind, before[kind] + count)
    # Ignored if all that the crew held was its agents', which have returned.
    vllm_server.await_boundaries("workflow_end", ends_before + 1, status=None)
    assert vllm_server.tiers()["hbm"]["retired_blocks"] > retired_before


def test_import_without_crewai_says_what_to_install() -> None:
    code = "import sys; sys.modules['crewai'] = None; import vllm_lifetime.harness.crewai"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'vllm-lifetime[crewai]'" in done.stderr
