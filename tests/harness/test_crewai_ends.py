# SPDX-License-Identifier: Apache-2.0
"""CrewAI's own crews and agents: what ends how, compaction, and remote agents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("crewai_testing", reason="needs requirements/harness-crewai.txt")

from crewai import Task
from crewai.events import crewai_event_bus
from crewai.events.types.a2a_events import A2ADelegationCompletedEvent, A2ADelegationStartedEvent
from crewai.hooks import HookAborted, InterceptionPoint, register_hook, unregister_hook
from crewai.tools import tool
from crewai_testing import FINAL_ANSWER, CrewAI, make_task, of_task
from harness_recorder import Answer, ModelRequest, Recorder, calls
from told import answer, said

from vllm_lifetime.harness import LifetimeClient


@pytest.fixture
def crewai(recorder: Recorder, client: LifetimeClient) -> Iterator[CrewAI]:
    running = CrewAI(recorder, client)
    yield running
    running.listener.close()
    assert client.stats.refused == 0


# ---------------------------------------------------------------------- what does not end well


def test_agent_that_fails_returns_with_each_attempt(crewai: CrewAI) -> None:
    answer(crewai.recorder, then=Answer(status=500))
    with pytest.raises(Exception, match="500"):
        crewai.crew_of([make_task(crewai.agent("A", max_retry_limit=1))]).kickoff()
    assert crewai.said() == ["session_start", *of_task(1, "A"), *of_task(1, "A"), "workflow_end"]


def test_agent_that_takes_too_long_returns(crewai: CrewAI) -> None:
    crewai.answer(delay_s=2.0)
    with pytest.raises(TimeoutError):
        crewai.crew_of([make_task(crewai.agent("A", max_execution_time=1))]).kickoff()
    assert crewai.said() == ["session_start", *of_task(1, "A"), "workflow_end"]


def test_agent_stopped_by_a_hook_returns_though_crewai_says_nothing(crewai: CrewAI) -> None:
    def stop(context: Any) -> None:
        raise HookAborted("no more")

    register_hook(InterceptionPoint.PRE_MODEL_CALL, stop)
    try:
        with pytest.raises(HookAborted):
            crewai.crew("A").kickoff()
    finally:
        unregister_hook(InterceptionPoint.PRE_MODEL_CALL, stop)
    assert crewai.said() == ["session_start", *of_task(1, "A"), "workflow_end"]


async def cancel_when_asked(crewai: CrewAI, task: asyncio.Task[Any]) -> None:
    await asyncio.to_thread(crewai.recorder.wait_for_requests, 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_cancelled_kickoff_ends_its_session(crewai: CrewAI) -> None:
    crewai.answer(delay_s=3.0)  # CrewAI asks from a thread, which outlives the cancellation

    async def run() -> None:
        await cancel_when_asked(crewai, asyncio.create_task(crewai.crew("A").akickoff()))

    asyncio.run(run())
    assert crewai.said() == ["session_start", *of_task(1, "A"), "workflow_end"]


def test_cancelled_kickoff_in_a_session_ends_the_turn_and_the_session_once(crewai: CrewAI) -> None:
    crewai.answer(delay_s=3.0)  # CrewAI asks from a thread, which outlives the cancellation

    async def chat() -> None:
        with crewai.listener.session("chat"):
            await crewai.crew("A").akickoff()

    async def run() -> None:
        await cancel_when_asked(crewai, asyncio.create_task(chat()))

    asyncio.run(run())
    assert crewai.said() == ["session_start", *of_task(1, "A"), "workflow_end"]


def test_crew_that_was_interrupted_and_is_kicked_off_again_is_another_session(crewai: CrewAI) -> None:
    """Ctrl-C in a notebook: no event tells of the end, and the same crew is started again in the same context."""
    crew = crewai.crew("A")

    def interrupt(context: Any) -> None:
        raise KeyboardInterrupt

    register_hook(InterceptionPoint.PRE_STEP, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            crew.kickoff()
    finally:
        unregister_hook(InterceptionPoint.PRE_STEP, interrupt)
    crew.kickoff()
    crewai.said()
    first, second = crewai.sessions
    assert said(crewai.recorder, first) == ["session_start", "workflow_end"]
    assert said(crewai.recorder, second) == ["session_start", *of_task(1, "A"), "workflow_end"]


# ---------------------------------------------------------------------- compaction and remote agents


def test_summarised_conversation_is_a_compaction_of_its_agent(crewai: CrewAI) -> None:
    @tool("read")
    def read(page: str) -> str:
        """Read a page."""
        return f"{page}: " + "word " * 600

    pages = [calls(("read", {"page": str(page)})) for page in range(15)]

    def respond(request: ModelRequest) -> Answer:
        return pages.pop(0) if pages and request.body.get("tools") else Answer(FINAL_ANSWER)

    crewai.recorder.respond = respond
    agent = crewai.agent("Reader", tools=[read], respect_context_window=True)
    task = make_task(agent)
    crewai.crew_of([task]).kickoff()
    said = crewai.said()
    assert said.count("compaction Reader id1") >= 1
    assert (said[:2], said[-2:]) == (
        ["session_start", "subagent_spawn Reader id1"],
        ["subagent_return Reader id1", "workflow_end"],
    )
    event = next(event for event in crewai.recorder.boundaries if event.kind == "compaction")
    # The request that goes on with the summary may be there before the event.
    assert event.expected_return_s == 0.0
    assert {request.lifetime["agent_id"] for request in crewai.recorder.requests} == {str(task.id)}


def test_task_given_to_a_remote_agent_is_a_sub_agent_of_who_gave_it(crewai: CrewAI) -> None:
    """CrewAI's own events, given by a tool: its A2A client needs a package that is not among CrewAI's own."""
    given: dict[str, Any] = {"endpoint": "http://far.example/card", "context_id": "c-1"}
    tasks: list[Task] = []

    @tool("ask_far")
    def ask_far(question: str) -> str:
        """Ask a remote agent."""
        started = A2ADelegationStartedEvent(
            **given,
            task_description=question,
            agent_id="far",
            a2a_agent_name="Far",
            from_task=tasks[0],
            from_agent=tasks[0].agent,
        )
        crewai_event_bus.emit(None, started)
        crewai_event_bus.emit(None, A2ADelegationCompletedEvent(**given, status="completed", result="42"))
        return "42"

    crewai.answer(calls(("ask_far", {"question": "why"})))
    tasks.append(make_task(crewai.agent("Near", tools=[ask_far])))
    crewai.crew_of(tasks).kickoff()
    assert crewai.said() == [
        "session_start",
        "subagent_spawn Near id1",
        "subagent_spawn Far a2a:c-1 of id1",
        "subagent_return Far a2a:c-1 of id1",
        "subagent_return Near id1",
        "workflow_end",
    ]
