# SPDX-License-Identifier: Apache-2.0
"""AutoGen's own teams and agents: which events they give, and whose name each request has."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("autogen_agentchat", reason="needs requirements/harness.txt")

from autogen_agentchat.agents import AssistantAgent, SocietyOfMindAgent
from autogen_agentchat.base import TaskResult
from autogen_agentchat.conditions import HandoffTermination, MaxMessageTermination, TextMentionTermination
from autogen_agentchat.messages import HandoffMessage
from autogen_agentchat.teams import RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool, TeamTool
from autogen_core import CancellationToken
from autogen_core.models import UserMessage
from autogen_testing import AutoGen, make_model_client
from fake_lifetime_server import find_dead_url
from harness_recorder import Answer, Recorder, calls
from told import said

from vllm_lifetime.harness import AsyncLifetimeClient, LifetimeClient
from vllm_lifetime.harness.autogen import LifetimeSession

if TYPE_CHECKING:
    from conftest import RealServer


@pytest.fixture
def autogen(recorder: Recorder, client: LifetimeClient) -> AutoGen:
    return AutoGen(recorder, client)


# ---------------------------------------------------------------------- teams


def test_round_robin_team_says_whose_request_it_is_and_when_each_turn_is_over(autogen: AutoGen) -> None:
    async def run() -> None:
        with autogen.session as session:
            agents = [autogen.agent("writer"), autogen.agent("critic")]
            team = session.watch(RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(4)))
            result = await team.run(task="write")
            assert result.stop_reason and len(result.messages) == 4
            items = [item async for item in team.run_stream(task="go on")]
            assert isinstance(items[-1], TaskResult)

    asyncio.run(run())
    assert autogen.asked("s") == [
        "writer RoundRobinGroupChat#1/writer",
        "critic RoundRobinGroupChat#1/critic",
        "writer RoundRobinGroupChat#1/writer",
        "critic RoundRobinGroupChat#1/critic",
        "writer RoundRobinGroupChat#1/writer",
        "critic RoundRobinGroupChat#1/critic",
    ]
    assert autogen.said() == [
        "session_start",
        "turn_end writer RoundRobinGroupChat#1/writer",
        "turn_end critic RoundRobinGroupChat#1/critic",
        "turn_end critic RoundRobinGroupChat#1/critic",
        "turn_end writer RoundRobinGroupChat#1/writer",
        "workflow_end",
    ]


def test_speaker_selection_is_a_request_of_the_manager(autogen: AutoGen) -> None:
    autogen.answer(Answer("critic"), Answer("no"), Answer("writer"), Answer("yes"))

    async def run() -> None:
        with autogen.session as session:
            agents: list[Any] = [autogen.agent("writer"), autogen.agent("critic")]
            team = SelectorGroupChat(agents, autogen.model_client, max_turns=2, allow_repeated_speaker=True)
            await session.watch(team).run(task="write")

    asyncio.run(run())
    manager = "SelectorGroupChatManager SelectorGroupChat#1/SelectorGroupChatManager"
    assert autogen.asked() == [
        manager,
        "critic SelectorGroupChat#1/critic",
        manager,
        "writer SelectorGroupChat#1/writer",
    ]
    assert autogen.said() == [
        "session_start",
        f"turn_end {manager}",
        "turn_end critic SelectorGroupChat#1/critic",
        "turn_end writer SelectorGroupChat#1/writer",
        "workflow_end",
    ]


def test_handoff_passes_the_turn_on_and_ends_no_context(autogen: AutoGen) -> None:
    autogen.answer(calls(("transfer_to_refunds", {})), calls(("transfer_to_user", {})), calls(("transfer_to_triage", {})))

    async def run() -> list[Any]:
        with autogen.session as session:
            agents: list[Any] = [
                autogen.agent("triage", handoffs=["refunds"]),
                autogen.agent("refunds", handoffs=["triage", "user"]),
            ]
            end = HandoffTermination("user") | TextMentionTermination("done")
            team = session.watch(Swarm(agents, termination_condition=end))
            first = await team.run(task="my money back")
            second = await team.run(task=HandoffMessage(content="really", source="user", target="refunds"))
            return [*first.messages, *second.messages]

    messages = asyncio.run(run())
    assert [message.type for message in messages].count("HandoffMessage") == 4
    assert autogen.asked() == [
        "triage Swarm#1/triage",
        "refunds Swarm#1/refunds",
        "refunds Swarm#1/refunds",
        "triage Swarm#1/triage",
    ]
    assert autogen.said() == [
        "session_start",
        "turn_end triage Swarm#1/triage",
        "turn_end refunds Swarm#1/refunds",
        "turn_end refunds Swarm#1/refunds",
        "turn_end triage Swarm#1/triage",
        "workflow_end",
    ]


def test_reset_of_a_team_is_the_end_of_its_agents_contexts(autogen: AutoGen) -> None:
    async def run() -> None:
        with autogen.session as session:
            team = session.watch(RoundRobinGroupChat([autogen.agent("writer"), autogen.agent("critic")], max_turns=2))
            await team.run(task="write")
            await team.reset()
            await team.run(task="write")

    asyncio.run(run())
    assert autogen.said() == [
        "session_start",
        "turn_end writer RoundRobinGroupChat#1/writer",
        "turn_end critic RoundRobinGroupChat#1/critic",
        "subagent_return critic RoundRobinGroupChat#1/critic",
        "subagent_return writer RoundRobinGroupChat#1/writer",
        "turn_end writer RoundRobinGroupChat#1/writer",
        "turn_end critic RoundRobinGroupChat#1/critic",
        "workflow_end",
    ]


# ---------------------------------------------------------------------- teams and agents inside


def test_society_of_mind_returns_its_inner_team_after_each_answer(autogen: AutoGen) -> None:
    async def run() -> None:
        with autogen.session as session:
            inner = session.watch(RoundRobinGroupChat([autogen.agent("a"), autogen.agent("b")], name="inner", max_turns=2))
            society = SocietyOfMindAgent("society", inner, autogen.model_client)
            await session.watch(RoundRobinGroupChat([society], name="outer", max_turns=2)).run(task="think")

    asyncio.run(run())
    assert autogen.asked() == [
        "a inner#2/a of inner#2",
        "b inner#2/b of inner#2",
        "society outer#1/society",
        "a inner#3/a of inner#3",
        "b inner#3/b of inner#3",
        "society outer#1/society",
    ]
    one_answer = [
        "subagent_spawn inner inner#2 of outer#1/society",
        "subagent_spawn a inner#2/a of inner#2",
        "subagent_spawn b inner#2/b of inner#2",
        "subagent_return b inner#2/b of inner#2",
        "subagent_return a inner#2/a of inner#2",
        "subagent_return inner inner#2 of outer#1/society",
    ]
    assert autogen.said() == [
        "session_start",
        *one_answer,
        *[line.replace("inner#2", "inner#3") for line in one_answer],
        "turn_end society outer#1/society",
        "workflow_end",
    ]


def test_team_that_is_a_participant_lives_on_between_its_rounds(autogen: AutoGen) -> None:
    async def run() -> None:
        with autogen.session as session:
            inner = session.watch(RoundRobinGroupChat([autogen.agent("a")], name="inner", max_turns=1))
            team = session.watch(RoundRobinGroupChat([inner, autogen.agent("b")], name="outer", max_turns=3))
            await team.run(task="think")
            await team.reset()

    asyncio.run(run())
    assert autogen.asked() == [
        "a inner#2/a of inner#2",
        "b outer#1/b",
        "a inner#2/a of inner#2",
    ]
    assert autogen.said() == [
        "session_start",
        "subagent_spawn inner inner#2 of outer#1",
        "subagent_spawn a inner#2/a of inner#2",
        "turn_end a inner#2/a of inner#2",
        "turn_end b outer#1/b",
        "subagent_return a inner#2/a of inner#2",
        "subagent_return inner inner#2 of outer#1",
        "subagent_return b outer#1/b",
        "workflow_end",
    ]


def run_with_a_tool(autogen: AutoGen, *, keeps_context: bool) -> None:
    autogen.answer(calls(("writer", {"task": "one"})), Answer("one"), calls(("writer", {"task": "two"})), Answer("two"))

    async def run() -> None:
        with autogen.session as session:
            tool = AgentTool(session.watch(autogen.agent("writer"), keeps_context=keeps_context))  # type: ignore[arg-type]
            lead = session.watch(autogen.agent("lead", tools=[tool], max_tool_iterations=5))
            result = await lead.run(task="write")
            assert "done" in result.messages[-1].to_text()  # type: ignore[union-attr]

    asyncio.run(run())


def test_agent_as_a_tool_is_spawned_by_its_caller_and_returns_with_each_call(autogen: AutoGen) -> None:
    run_with_a_tool(autogen, keeps_context=False)
    assert autogen.asked() == [
        "lead lead#1",
        "writer writer#2 of lead#1",
        "lead lead#1",
        "writer writer#3 of lead#1",
        "lead lead#1",
    ]
    assert autogen.said() == [
        "session_start",
        "subagent_spawn writer writer#2 of lead#1",
        "subagent_return writer writer#2 of lead#1",
        "subagent_spawn writer writer#3 of lead#1",
        "subagent_return writer writer#3 of lead#1",
        "turn_end lead lead#1",
        "workflow_end",
    ]


def test_agent_as_a_tool_that_keeps_its_context_returns_when_the_session_ends(autogen: AutoGen) -> None:
    run_with_a_tool(autogen, keeps_context=True)
    assert autogen.said() == [
        "session_start",
        "subagent_spawn writer writer#2 of lead#1",
        "turn_end lead lead#1",
        "turn_end writer writer#2 of lead#1",
        "subagent_return writer writer#2 of lead#1",
        "workflow_end",
    ]


def test_two_tools_at_once_are_two_instances_of_their_own(autogen: AutoGen) -> None:
    """The model calls an agent and a team in one answer; AutoGen runs them side by side."""

    async def run() -> None:
        with autogen.session as session:
            writer = session.watch(autogen.agent("writer"))
            team = session.watch(RoundRobinGroupChat([autogen.agent("a")], name="team", max_turns=1))

            async def call_both() -> str:
                """Call both."""
                token = CancellationToken()
                await asyncio.gather(
                    AgentTool(writer).run_json({"task": "x"}, token),  # type: ignore[arg-type]
                    TeamTool(team, "team", "a team").run_json({"task": "x"}, token),  # type: ignore[arg-type]
                )
                return "both"

            autogen.answer(calls(("call_both", {})), delay_s=0.1)
            await session.watch(autogen.agent("lead", tools=[call_both])).run(task="go")

    asyncio.run(run())
    assert sorted(autogen.asked()[1:3]) == ["a team#3/a of team#3", "writer writer#2 of lead#1"]
    said = autogen.said()
    assert sorted(line for line in said if line.startswith("subagent")) == [
        "subagent_return a team#3/a of team#3",
        "subagent_return team team#3 of lead#1",
        "subagent_return writer writer#2 of lead#1",
        "subagent_spawn a team#3/a of team#3",
        "subagent_spawn team team#3 of lead#1",
        "subagent_spawn writer writer#2 of lead#1",
    ]


# ---------------------------------------------------------------------- requests, and what must not break


def test_extra_body_of_the_model_client_and_of_the_caller_are_kept(recorder: Recorder, client: LifetimeClient) -> None:
    session = LifetimeSession(client, "s")
    configured = make_model_client(recorder.url, extra_body={"top_k": 5, "min_p": 0.1, "kv_transfer_params": {"other": 1}})
    model_client = session.model_client(configured, agent="planner")

    async def run() -> None:
        given = {"top_k": 7, "kv_transfer_params": {"lifetime": {"retain_s": 60}}}
        await model_client.create([UserMessage(content="hi", source="user")])
        await model_client.create(
            [UserMessage(content="hi", source="user")], extra_create_args={"temperature": 0.5, "extra_body": given}
        )

    asyncio.run(run())
    first, second = (request.body for request in recorder.requests)
    assert (first["top_k"], first["min_p"], first["session_id"]) == (5, 0.1, "s")
    assert first["kv_transfer_params"] == {"other": 1, "lifetime": {"agent": "planner", "agent_id": "planner"}}
    assert (second["top_k"], second["min_p"], second["temperature"]) == (7, 0.1, 0.5)
    assert second["kv_transfer_params"]["lifetime"] == {"agent": "planner", "agent_id": "planner", "retain_s": 60}


def test_body_that_cannot_be_merged_is_sent_as_it_is(recorder: Recorder, client: LifetimeClient) -> None:
    model_client = LifetimeSession(client, "s").model_client(make_model_client(recorder.url))
    body = {"kv_transfer_params": "nonsense"}

    async def run() -> None:
        await model_client.create([UserMessage(content="hi", source="user")], extra_create_args={"extra_body": body})

    asyncio.run(run())
    assert recorder.requests[0].body["kv_transfer_params"] == "nonsense"


def test_watched_agent_may_be_a_participant(autogen: AutoGen) -> None:
    async def run() -> None:
        with autogen.session as session:
            agents: list[Any] = [session.watch(autogen.agent("a")), autogen.agent("b")]
            await session.watch(RoundRobinGroupChat(agents, name="team", max_turns=2)).run(task="go")

    asyncio.run(run())
    assert autogen.asked() == ["a team#1/a", "b team#1/b"]
    assert autogen.said() == ["session_start", "turn_end a team#1/a", "turn_end b team#1/b", "workflow_end"]


def test_streaming_agents_are_named_too(autogen: AutoGen) -> None:
    async def run() -> None:
        with autogen.session as session:
            team = RoundRobinGroupChat([autogen.agent("a", model_client_stream=True)], name="team", max_turns=1)
            await session.watch(team).run(task="go")

    asyncio.run(run())
    assert autogen.recorder.requests[0].body["stream"] is True
    assert autogen.asked() == ["a team#1/a"]


def test_watched_team_behaves_as_the_team_does(autogen: AutoGen) -> None:
    plain_client = make_model_client(autogen.recorder.url)

    def make_team(model_client: Any) -> RoundRobinGroupChat:
        return RoundRobinGroupChat([AssistantAgent("a", model_client), AssistantAgent("b", model_client)], max_turns=2)

    plain = make_team(plain_client)
    watched = autogen.session.watch(make_team(autogen.session.model_client(plain_client)))
    assert (watched.name, watched.description) == (plain.name, plain.description)
    assert watched.dump_component() == plain.dump_component()

    async def run(team: Any) -> tuple[list[str], Any]:
        result = await team.run(task="go")
        await team.load_state(await team.save_state())
        return [f"{message.source}: {message.content}" for message in result.messages], result.stop_reason

    async def run_both() -> tuple[Any, Any]:
        return await run(watched), await run(plain)

    as_watched, as_plain = asyncio.run(run_both())
    assert as_watched == as_plain


def test_watch_refuses_what_is_neither_team_nor_agent(autogen: AutoGen) -> None:
    with pytest.raises(TypeError, match="not a str"):
        autogen.session.watch("team")  # type: ignore[call-overload]


def test_client_that_sends_from_the_agents_own_loop(recorder: Recorder) -> None:
    async def run() -> None:
        async with AsyncLifetimeClient(recorder.url) as client:
            with LifetimeSession(client, "s") as session:
                model_client = session.model_client(make_model_client(recorder.url))
                await session.watch(AssistantAgent("solo", model_client)).run(task="go")
            assert await client.flush()

    asyncio.run(run())
    assert said(recorder) == ["session_start", "turn_end solo solo#1", "workflow_end"]


def test_dead_lifetime_server_does_not_hold_up_the_team(recorder: Recorder) -> None:
    with LifetimeClient(find_dead_url()) as client:

        async def run() -> float:
            with LifetimeSession(client) as session:
                model_client = session.model_client(make_model_client(recorder.url))
                team = session.watch(RoundRobinGroupChat([AssistantAgent("a", model_client)], max_turns=3))
                began_s = time.monotonic()
                assert len((await team.run(task="go")).messages) == 4
                return time.monotonic() - began_s

        assert asyncio.run(run()) < 2.0
        assert client.stats.sent == 0
        assert client.stats.queued == 3
        client.close(0.2)


def test_team_on_a_real_server_frees_its_blocks_when_the_session_ends(vllm_server: RealServer) -> None:
    kinds = ("session_start", "subagent_spawn", "subagent_return", "turn_end", "workflow_end")
    before = {kind: vllm_server.count_boundaries(kind) for kind in kinds}
    retired_before = vllm_server.tiers()["hbm"]["retired_blocks"]
    with LifetimeClient(vllm_server.url) as client:

        async def run(session: LifetimeSession) -> None:
            model_client = session.model_client(make_model_client(vllm_server.url, max_tokens=32, temperature=0))
            inner: Any = session.watch(
                RoundRobinGroupChat([AssistantAgent("researcher", model_client)], name="research", max_turns=2)
            )
            agents: list[Any] = [SocietyOfMindAgent("society", inner, model_client), AssistantAgent("critic", model_client)]
            team = session.watch(RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(5)))
            assert len((await team.run(task="Name a river, and say why it is long. " * 8)).messages) >= 5

        with LifetimeSession(client) as session:
            asyncio.run(run(session))
            assert client.flush()
            response = httpx.get(f"{vllm_server.url}/lifetime/v1/sessions/{session.session_id}")
            roles = {agent["agent"] for agent in response.json()["agents"]}
            assert {"society", "critic"} <= roles
        assert client.flush()
        assert (client.stats.refused, client.stats.failed) == (0, 0)
    for kind, count in {"session_start": 1, "subagent_spawn": 4, "turn_end": 2, "workflow_end": 1}.items():
        vllm_server.await_boundaries(kind, before[kind] + count)
    assert vllm_server.count_boundaries("subagent_return") > before["subagent_return"]
    assert vllm_server.tiers()["hbm"]["retired_blocks"] > retired_before


def test_import_without_autogen_says_what_to_install() -> None:
    code = "import sys; sys.modules['autogen_agentchat'] = None; import vllm_lifetime.harness.autogen"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "pip install 'vllm-lifetime[autogen]'" in done.stderr
