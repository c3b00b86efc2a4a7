# SPDX-License-Identifier: Apache-2.0
"""AutoGen's own teams and agents: what ends how, and sessions side by side."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat", reason="needs requirements/harness.txt")

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, SocietyOfMindAgent
from autogen_agentchat.base import Response, TaskResult
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import TeamTool
from autogen_core import CancellationToken, SingleThreadedAgentRuntime
from autogen_core.models import UserMessage
from autogen_testing import AutoGen, make_model_client
from harness_recorder import Answer, Recorder, calls
from told import answer, asked, said

from vllm_lifetime.harness import LifetimeClient
from vllm_lifetime.harness.autogen import LifetimeSession


@pytest.fixture
def autogen(recorder: Recorder, client: LifetimeClient) -> AutoGen:
    return AutoGen(recorder, client)


# ---------------------------------------------------------------------- runs that do not end well


def test_agent_that_raises_in_a_tool_still_returns_and_the_turn_still_ends(autogen: AutoGen) -> None:
    autogen.answer(calls(("inner", {"task": "x"})), Answer(status=500))

    async def run() -> None:
        with autogen.session as session:
            inner = session.watch(RoundRobinGroupChat([autogen.agent("a")], name="inner", max_turns=1))
            tool = TeamTool(inner, "inner", "a team")  # type: ignore[arg-type]
            result = await session.watch(autogen.agent("lead", tools=[tool])).run(task="go")
            assert "500" in str(result.messages)  # AutoGen makes a tool's error its result

    asyncio.run(run())
    assert autogen.said() == [
        "session_start",
        "subagent_spawn inner inner#2 of lead#1",
        "subagent_spawn a inner#2/a of inner#2",
        "subagent_return a inner#2/a of inner#2",
        "subagent_return inner inner#2 of lead#1",
        "turn_end lead lead#1",
        "workflow_end",
    ]


def test_run_that_raises_ends_its_turn_and_passes_the_error_on(autogen: AutoGen) -> None:
    autogen.answer(Answer("fine"), Answer(status=500))

    async def run() -> None:
        with autogen.session as session:
            team = session.watch(RoundRobinGroupChat([autogen.agent("a"), autogen.agent("b")], name="team", max_turns=2))
            with pytest.raises(RuntimeError, match="500"):
                await team.run(task="go")

    asyncio.run(run())
    assert autogen.said() == ["session_start", "turn_end a team#1/a", "turn_end b team#1/b", "workflow_end"]


def test_cancellation_token_ends_the_nested_team_and_the_turn(autogen: AutoGen) -> None:
    async def run() -> None:
        with autogen.session as session:
            inner = session.watch(RoundRobinGroupChat([autogen.agent("a")], name="inner", max_turns=1))
            society = SocietyOfMindAgent("society", inner, autogen.model_client)
            team = session.watch(RoundRobinGroupChat([society], name="outer", max_turns=1))
            autogen.answer(delay_s=30.0)
            token = CancellationToken()
            task = asyncio.create_task(team.run(task="think", cancellation_token=token))
            await asyncio.to_thread(autogen.recorder.wait_for_requests, 1)
            token.cancel()
            with pytest.raises((asyncio.CancelledError, RuntimeError)):
                await task

    asyncio.run(run())
    said = autogen.said()
    assert sorted(said[:3]) == sorted(
        ["session_start", "subagent_spawn inner inner#2 of outer#1/society", "subagent_spawn a inner#2/a of inner#2"]
    )
    assert sorted(said[3:-1]) == sorted(
        ["subagent_return a inner#2/a of inner#2", "subagent_return inner inner#2 of outer#1/society", "turn_end"]
    )
    assert said[-1] == "workflow_end"


def test_cancelled_task_of_an_agent_ends_its_turn(autogen: AutoGen) -> None:
    autogen.answer(delay_s=30.0)

    async def run() -> None:
        with autogen.session as session:
            task = asyncio.create_task(session.watch(autogen.agent("solo")).run(task="think"))
            await asyncio.to_thread(autogen.recorder.wait_for_requests, 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    assert autogen.said() == ["session_start", "turn_end solo solo#1", "workflow_end"]


@pytest.mark.parametrize("how", ["aclose", "dropped"])
def test_stream_that_is_not_read_to_its_end_ends_the_turn(autogen: AutoGen, how: str) -> None:
    async def run() -> None:
        team = autogen.session.watch(RoundRobinGroupChat([autogen.agent("a"), autogen.agent("b")], name="team", max_turns=2))
        stream = team.run_stream(task="go")
        async for item in stream:
            if getattr(item, "source", None) == "a":
                break
        if how == "aclose":
            await stream.aclose()
        else:
            del stream, item
            gc.collect()
            for _ in range(500):
                await asyncio.sleep(0.01)
                if any(line.startswith("turn_end") for line in autogen.said()):
                    break

    asyncio.run(run())
    # AutoGen lets the team go on to its end meanwhile, so b may have asked, too.
    assert autogen.said()[:2] == ["session_start", "turn_end a team#1/a"]


def test_session_that_is_left_in_the_middle_of_a_run_ends_once(autogen: AutoGen) -> None:
    async def run() -> None:
        team = autogen.session.watch(RoundRobinGroupChat([autogen.agent("a")], name="team", max_turns=1))
        with contextlib.suppress(ZeroDivisionError), autogen.session:
            async for item in team.run_stream(task="go"):
                if getattr(item, "source", None) == "a":
                    raise ZeroDivisionError
        gc.collect()
        await asyncio.sleep(0.2)

    asyncio.run(run())
    assert autogen.said() == ["session_start", "turn_end a team#1/a", "workflow_end"]


def test_consumer_that_stops_at_the_result_has_the_turn_ended_by_then(autogen: AutoGen) -> None:
    async def run() -> list[str]:
        async for item in autogen.session.watch(autogen.agent("solo")).run_stream(task="go"):
            if isinstance(item, TaskResult):
                return await asyncio.to_thread(autogen.said)
        raise AssertionError("no result")

    assert asyncio.run(run()) == ["session_start", "turn_end solo solo#1"]


# ---------------------------------------------------------------------- sessions


def test_two_sessions_at_the_same_time_on_one_model_client_are_told_apart(recorder: Recorder, client: LifetimeClient) -> None:
    answer(recorder, then=Answer(delay_s=0.1))
    shared = make_model_client(recorder.url)

    async def run(session_id: str) -> None:
        with LifetimeSession(client, session_id) as session:
            model_client = session.model_client(shared)
            agents: list[Any] = [AssistantAgent(f"{session_id}_{name}", model_client) for name in ("a", "b")]
            await session.watch(RoundRobinGroupChat(agents, name="team", max_turns=4)).run(task="go")

    async def run_both() -> None:
        await asyncio.gather(run("one"), run("two"))

    asyncio.run(run_both())
    assert client.flush()
    for session_id in ("one", "two"):
        a, b = (f"{session_id}_{name} team#1/{session_id}_{name}" for name in ("a", "b"))
        assert asked(recorder, session_id) == [a, b, a, b]
        assert said(recorder, session_id) == ["session_start", f"turn_end {a}", f"turn_end {b}", "workflow_end"]
    order = [request.session_id for request in recorder.requests]
    assert order != sorted(order, key=str), "they did not run at the same time"


def test_session_is_begun_anew_after_its_end_and_an_unused_one_says_nothing(autogen: AutoGen) -> None:
    async def run() -> None:
        agent = autogen.session.watch(autogen.agent("solo"))
        with LifetimeSession(autogen.client, "unused"):
            pass
        for _ in range(2):
            await agent.run(task="go")
            autogen.session.end()
            autogen.session.end()

    asyncio.run(run())
    assert autogen.said() == [
        "session_start",
        "turn_end solo solo#1",
        "workflow_end",
        "session_start",
        "turn_end solo solo#1",
        "workflow_end",
    ]


def test_named_workflow_is_told_and_does_not_end_with_its_session(recorder: Recorder, client: LifetimeClient) -> None:
    autogen = AutoGen(recorder, client, workflow_id="w")

    async def run() -> None:
        with autogen.session as session:
            await session.watch(autogen.agent("solo")).run(task="go")

    asyncio.run(run())
    assert autogen.said() == ["session_start", "turn_end solo solo#1", "session_end"]
    assert {event.workflow_id for event in recorder.boundaries} == {"w"}
    assert recorder.requests[0].lifetime["workflow_id"] == "w"


def test_team_on_a_runtime_of_its_own_names_its_requests(autogen: AutoGen) -> None:
    """Such a runtime was started elsewhere, so the run cannot be seen from its handlers; who asks can."""

    async def run() -> None:
        runtime = SingleThreadedAgentRuntime()
        runtime.start()
        with autogen.session as session:
            team = RoundRobinGroupChat([autogen.agent("a"), autogen.agent("b")], max_turns=2, runtime=runtime)
            await session.watch(team).run(task="go")
        await runtime.stop()

    asyncio.run(run())
    assert autogen.asked("s") == ["a a", "b b"]
    assert autogen.said() == ["session_start", "turn_end a a", "turn_end b b", "workflow_end"]


def test_agents_outside_of_any_watched_run_are_named_by_hand(recorder: Recorder, client: LifetimeClient) -> None:
    session = LifetimeSession(client, "s")
    model_client = session.model_client(make_model_client(recorder.url), agent="planner")

    async def run() -> None:
        await model_client.create([UserMessage(content="hi", source="user")])
        pieces = [piece async for piece in model_client.create_stream([UserMessage(content="hi", source="user")])]
        assert len(pieces) >= 2

    asyncio.run(run())
    session.end()
    assert client.flush()
    assert asked(recorder) == ["planner planner", "planner planner"]
    assert said(recorder) == ["session_start", "turn_end planner planner", "workflow_end"]


def test_run_in_which_nobody_asks_is_a_turn_all_the_same(autogen: AutoGen) -> None:
    class Echo(BaseChatAgent):
        produced_message_types = (TextMessage,)

        async def on_messages(self, messages: Any, cancellation_token: CancellationToken) -> Response:
            return Response(chat_message=TextMessage(content="echo", source=self.name))

        async def on_reset(self, cancellation_token: CancellationToken) -> None:
            pass

    async def run() -> None:
        with autogen.session as session:
            await session.watch(Echo("echo", "echoes")).run(task="go")

    asyncio.run(run())
    assert autogen.said() == ["session_start", "turn_end", "workflow_end"]
