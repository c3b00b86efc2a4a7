# SPDX-License-Identifier: Apache-2.0
"""LangChain's own agents and LangGraph's graphs against a server that is told what to answer, and against vLLM."""

from __future__ import annotations

import asyncio
import operator
import subprocess
import sys
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest

pytest.importorskip("langchain", reason="needs requirements/harness.txt")

from conftest import RealServer
from fake_lifetime_server import find_dead_url
from harness_recorder import Answer, ModelRequest, Recorder, calls
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain.tools import tool
from langchain_core.messages import RemoveMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel

from vllm_lifetime.harness import AsyncLifetimeClient, LifetimeClient
from vllm_lifetime.harness.langchain import LifetimeCallbackHandler, LifetimeChatOpenAI, LifetimeMiddleware


def make_model(url: str, **options: Any) -> LifetimeChatOpenAI:
    return LifetimeChatOpenAI(**{"model": "model", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, **options})


def ask(text: str = "question") -> dict[str, Any]:
    return {"messages": [("user", text)]}


class Lang:
    """Agents and graphs on a recorder, and what came of their runs."""

    def __init__(self, recorder: Recorder, client: LifetimeClient) -> None:
        self.recorder = recorder
        self.client = client
        self.handler = LifetimeCallbackHandler(client)
        self.model = make_model(recorder.url)

    def agent(self, name: str, tools: Any = (), **options: Any) -> Any:
        return create_agent(self.model, list(tools), name=name, **options)

    def agent_tool(self, agent: Any) -> Any:
        """A tool that asks an agent, called like it."""

        @tool(agent.name, description="Ask it.")
        def ask_agent(task: str) -> str:
            return str(agent.invoke(ask(task))["messages"][-1].text)

        return ask_agent

    def node(self, state: Any) -> Any:
        """A node that asks the model."""
        return {"messages": [self.model.invoke(state["messages"])]}

    def answer(self, *answers: Answer) -> None:
        self.recorder.answers.extend(answers)

    def answer_by_agent(self, **scripts: list[Answer]) -> None:
        """Let each agent have its own answers, whatever the order in which they ask."""

        def respond(request: ModelRequest) -> Answer:
            script = scripts.get(request.agent or "", [])
            return script.pop(0) if script else Answer("done")

        self.recorder.respond = respond

    def config(self, thread_id: str | None = "s") -> Any:
        configurable = {"configurable": {"thread_id": thread_id}} if thread_id else {}
        return {"callbacks": [self.handler], **configurable}

    def run(self, runnable: Any, thread_id: str | None = "s", given: Any = None) -> Any:
        return runnable.invoke(ask() if given is None else given, self.config(thread_id))

    def story(self, session_id: str | None = None) -> list[str]:
        assert self.client.flush()
        assert not self.handler._calls, "runs are remembered that are over"
        return self.recorder.described(session_id)


@pytest.fixture
def lang(recorder: Recorder, client: LifetimeClient) -> Lang:
    return Lang(recorder, client)


class Results(TypedDict):
    results: Annotated[list[str], operator.add]


@tool
def look_up() -> str:
    """Look it up."""
    return "42"


# ---------------------------------------------------------------------- a run and its end


def test_a_run_of_a_thread_is_one_turn_of_a_session(lang: Lang) -> None:
    lang.answer(calls(("look_up", {})), Answer("it is 42"))
    result = lang.run(lang.agent("planner", [look_up]))
    assert result["messages"][-1].text == "it is 42"
    assert lang.story() == ["request planner", "request planner", "turn_end"]
    assert {request.session_id for request in lang.recorder.requests} == {"s"}
    assert {boundary.session_id for boundary in lang.recorder.boundaries} == {"s"}


def test_a_run_without_a_thread_is_a_session_of_its_own(lang: Lang) -> None:
    agent = lang.agent("planner")
    lang.run(agent, None)
    lang.run(agent, None)
    assert lang.story() == ["session_start", "request planner", "workflow_end"] * 2
    first, second = (request.session_id for request in lang.recorder.requests)
    assert first and second and first != second
    assert [boundary.session_id for boundary in lang.recorder.boundaries] == [first, first, second, second]


def test_sessions_and_workflows_are_named_in_the_config_or_the_handler(lang: Lang) -> None:
    agent = lang.agent("planner")
    agent.invoke(ask(), {"callbacks": [lang.handler], "metadata": {"session_id": "a", "workflow_id": "w"}})
    agent.invoke(ask(), {"callbacks": [LifetimeCallbackHandler(lang.client, session_id="b", workflow_id="v")]})
    agent.invoke(ask(), {"callbacks": [LifetimeCallbackHandler(lang.client, workflow_id="u")]})
    assert lang.story("a") == ["request planner", "turn_end"]
    assert lang.story("b") == ["request planner", "turn_end"]
    assert [request.lifetime["workflow_id"] for request in lang.recorder.requests] == ["w", "v", "u"]
    assert [event.workflow_id for event in lang.recorder.boundaries] == ["w", "v", "u", "u"]
    assert lang.recorder.kinds[-2:] == ["session_start", "session_end"]


def test_an_async_run_reports_the_same(lang: Lang) -> None:
    lang.answer(calls(("look_up", {})))
    asyncio.run(lang.agent("planner", [look_up]).ainvoke(ask(), lang.config()))
    assert lang.story() == ["request planner", "request planner", "turn_end"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_run_that_the_model_fails_ends_its_turn(lang: Lang, is_async: bool) -> None:
    lang.answer(Answer(status=500))
    agent = lang.agent("planner")
    with pytest.raises(Exception, match="told to answer 500"):
        asyncio.run(agent.ainvoke(ask(), lang.config())) if is_async else lang.run(agent)
    assert lang.story() == ["request planner", "turn_end"]


def test_a_tool_that_raises_ends_the_session(lang: Lang) -> None:
    @tool
    def break_down() -> str:
        """Break down."""
        raise ZeroDivisionError("broken")

    lang.answer(calls(("break_down", {})))
    with pytest.raises(ZeroDivisionError):
        lang.run(lang.agent("planner", [break_down]), None)
    assert lang.story() == ["session_start", "request planner", "workflow_end"]


def test_too_many_steps_end_the_turn(lang: Lang) -> None:
    lang.answer(*[calls(("look_up", {}))] * 4)
    with pytest.raises(Exception, match="Recursion limit"):
        lang.agent("planner", [look_up]).invoke(ask(), {**lang.config(), "recursion_limit": 3})
    assert lang.story()[-1] == "turn_end" and lang.recorder.kinds == ["turn_end"]


def test_a_cancelled_run_ends_its_turn(lang: Lang) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(lang.agent("planner").ainvoke(ask(), lang.config()))
        await asyncio.to_thread(lang.recorder.wait_for_requests, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    lang.answer(Answer(delay_s=20))
    asyncio.run(cancel())
    assert lang.story() == ["request planner", "turn_end"]


@pytest.mark.parametrize("mode", ["messages", "values"])
def test_a_streamed_run_ends_when_it_has_been_read(lang: Lang, mode: Any) -> None:
    async def stream() -> None:
        async for _ in lang.agent("planner").astream(ask(), lang.config("b"), stream_mode=mode):
            pass

    for _ in lang.agent("planner").stream(ask(), lang.config("a"), stream_mode=mode):
        pass
    asyncio.run(stream())
    assert lang.story("a") == lang.story("b") == ["request planner", "turn_end"]
    assert [request.body["stream"] for request in lang.recorder.requests] == [mode == "messages"] * 2


def test_a_streamed_run_that_is_not_read_to_its_end_ends(lang: Lang) -> None:
    stream = lang.agent("planner").stream(ask(), lang.config(), stream_mode="messages")
    next(stream)
    stream.close()
    assert lang.story() == ["request planner", "turn_end"]


def test_a_chain_and_a_lone_model_are_runs_too(lang: Lang) -> None:
    chain = ChatPromptTemplate.from_messages([("user", "{text}")]) | lang.model
    config: Any = {"callbacks": [lang.handler], "metadata": {"session_id": "s"}}
    chain.invoke({"text": "hello"}, config)
    for _ in chain.stream({"text": "hello"}, config):
        pass
    lang.model.invoke("hello", config)
    lang.model.batch(["hello", "hello again"], config)
    assert sorted(lang.story("s")) == ["request"] * 5 + ["turn_end"] * 5


# ---------------------------------------------------------------------- graphs and sub-agents


def test_the_nodes_of_a_graph_are_roles_and_end_nothing(lang: Lang) -> None:
    graph = StateGraph(MessagesState)
    for name in ("planner", "coder"):
        graph.add_node(name, lang.node)
    graph.add_node("reviewer", lang.agent("critic"))
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "coder")
    graph.add_edge("coder", "reviewer")
    graph.add_edge("reviewer", END)
    lang.run(graph.compile(name="pipeline"))
    assert lang.story() == ["request planner", "request coder", "request critic", "turn_end"]
    assert "question" in lang.recorder.requests[2].text


def test_agents_that_hand_the_conversation_over_end_nothing(lang: Lang) -> None:
    def transfer(name: str) -> Any:
        @tool(f"to_{name}", description="Hand over.")
        def hand_over() -> Any:
            messages = [{"role": "tool", "content": "yours", "tool_call_id": tool_ids.pop(0)}]
            return Command(goto=name, graph=Command.PARENT, update={"messages": messages})

        return hand_over

    tool_ids = ["call-1", "call-3"]
    graph = StateGraph(MessagesState)
    graph.add_node("triage", lang.agent("triage", [transfer("billing")]), destinations=("billing",))
    graph.add_node("billing", lang.agent("billing", [transfer("triage")]), destinations=("triage",))
    graph.add_edge(START, "triage")
    lang.answer_by_agent(triage=[calls(("to_billing", {}))], billing=[calls(("to_triage", {}))])
    lang.run(graph.compile())
    assert lang.story() == ["request triage", "request billing", "request triage", "turn_end"]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_agent_that_a_tool_asks_is_a_sub_agent(lang: Lang, is_async: bool) -> None:
    lead = lang.agent("lead", [lang.agent_tool(lang.agent("worker"))])
    lang.answer(calls(("worker", {"task": "dig"})), Answer("dug"), Answer("done"))
    if is_async:
        asyncio.run(lead.ainvoke(ask(), lang.config()))
    else:
        lang.run(lead)
    assert lang.story() == [
        "request lead",
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        "request lead",
        "turn_end",
    ]
    spawn = lang.recorder.boundaries[0].spawn
    assert spawn is not None and (spawn.instruction, spawn.position) == ("dig", 0)


def test_a_graph_without_a_name_is_called_like_the_tool_that_asks_it(lang: Lang) -> None:
    graph = StateGraph(MessagesState)
    graph.add_node("digger", lang.node)
    graph.add_edge(START, "digger")
    inner = graph.compile()

    @tool
    def research(task: str) -> str:
        """Research it."""
        return str(inner.invoke(ask(task))["messages"][-1].text)

    lang.answer(calls(("research", {"task": "x"})))
    lang.run(create_agent(lang.model, [research]))
    assert lang.story() == [
        "request",
        "subagent_spawn research research#1",
        "request digger research#1",
        "subagent_return research research#1",
        "request",
        "turn_end",
    ]


def test_sub_agents_of_one_role_at_the_same_time_are_told_apart(lang: Lang) -> None:
    lead = lang.agent("lead", [lang.agent_tool(lang.agent("worker"))])
    lang.answer_by_agent(
        lead=[calls(("worker", {"task": "one"}), ("worker", {"task": "two"}))],
        worker=[Answer(delay_s=0.2), Answer(delay_s=0.2)],
    )
    lang.run(lead)
    story = lang.story()
    asked = {request.lifetime["agent_id"]: request.text for request in lang.recorder.requests if request.agent == "worker"}
    spawned = {event.agent_id: event.spawn for event in lang.recorder.boundaries if event.kind == "subagent_spawn"}
    assert len(spawned) == 2 and spawned.keys() == asked.keys()
    for agent_id, spawn in spawned.items():
        assert spawn is not None and spawn.instruction is not None and agent_id is not None
        assert spawn.instruction in asked[agent_id], "the spawn record is another's"
    assert len([line for line in story if line.startswith("subagent_return")]) == 2


def test_a_sub_agent_may_have_sub_agents(lang: Lang) -> None:
    worker = lang.agent("worker", [lang.agent_tool(lang.agent("digger"))])
    lead = lang.agent("lead", [lang.agent_tool(worker)])
    lang.answer_by_agent(lead=[calls(("worker", {"task": "x"}))], worker=[calls(("digger", {"task": "y"}))])
    lang.run(lead)
    assert lang.story() == [
        "request lead",
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "subagent_spawn digger digger#2 of worker#1",
        "request digger digger#2 of worker#1",
        "subagent_return digger digger#2 of worker#1",
        "request worker worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        "request lead",
        "turn_end",
    ]


def test_agents_that_a_node_sends_tasks_to_are_sub_agents(lang: Lang) -> None:
    def work(state: Any) -> Any:
        return {"results": [worker.invoke(ask(state["task"]))["messages"][-1].text]}

    def fan_out(state: Results) -> list[Send]:
        return [Send("work", {"task": f"task {number}"}) for number in range(3)]

    worker = lang.agent("worker")
    graph = StateGraph(Results)
    graph.add_node("work", work)
    graph.add_conditional_edges(START, fan_out, ["work"])
    lang.run(graph.compile(), given={"results": []})
    story = lang.story()
    assert [line.split()[0] for line in story].count("subagent_spawn") == 3
    assert sorted(line for line in story if line.startswith("subagent_return")) == [
        f"subagent_return worker worker#{number} of work" for number in (1, 2, 3)
    ]
    assert story[-1] == "turn_end"


def test_an_agent_that_a_node_asks_something_of_its_own_is_a_sub_agent(lang: Lang) -> None:
    def delegate(state: MessagesState) -> Any:
        for task in ("one", "two"):
            worker.invoke(ask(task))
        return {"messages": [worker.invoke({"messages": state["messages"]})["messages"][-1]]}

    worker = lang.agent("worker")
    graph = StateGraph(MessagesState)
    graph.add_node("delegate", delegate)
    graph.add_edge(START, "delegate")
    lang.run(graph.compile())
    assert lang.story() == [
        *(f"{what} worker worker#1 of delegate" for _ in range(2) for what in ("subagent_spawn", "request", "subagent_return")),
        "request worker",  # that read the conversation itself
        "turn_end",
    ]


@pytest.mark.parametrize("is_caught", [True, False])
def test_a_sub_agent_that_fails_returns(lang: Lang, is_caught: bool) -> None:
    worker = lang.agent("worker")

    @tool
    def delegate() -> str:
        """Delegate it."""
        try:
            return str(worker.invoke(ask("dig")))
        except Exception:
            if is_caught:
                return "failed"
            raise

    lead = lang.agent("lead", [delegate])
    lang.answer_by_agent(lead=[calls(("delegate", {}))], worker=[Answer(status=500)])
    if is_caught:
        lang.run(lead)
    else:
        with pytest.raises(Exception, match="told to answer 500"):
            lang.run(lead)
    assert lang.story() == [
        "request lead",
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        *(["request lead"] if is_caught else []),
        "turn_end",
    ]


def test_a_run_cancelled_while_sub_agents_work_ends_them_once(lang: Lang) -> None:
    worker = lang.agent("worker")

    @tool
    async def delegate(task: str) -> str:
        """Delegate it."""
        return str(await worker.ainvoke(ask(task)))

    async def cancel() -> None:
        task = asyncio.create_task(lang.agent("lead", [delegate]).ainvoke(ask(), lang.config()))
        await asyncio.to_thread(lang.recorder.wait_for_requests, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    lang.answer_by_agent(
        lead=[calls(("delegate", {"task": "one"}), ("delegate", {"task": "two"}))],
        worker=[Answer(delay_s=20), Answer(delay_s=20)],
    )
    asyncio.run(cancel())
    story = lang.story()
    assert sorted(line for line in story if line.startswith("subagent_return")) == [
        "subagent_return worker worker#1 of lead",
        "subagent_return worker worker#2 of lead",
    ]
    assert story[-1] == "turn_end"


def test_a_run_that_waits_for_a_human_is_not_over(lang: Lang) -> None:
    @tool
    def delete() -> str:
        """Delete it."""
        return f"deleted: {interrupt('sure?')}"

    lead = lang.agent("lead", [lang.agent_tool(lang.agent("worker", [delete]))], checkpointer=InMemorySaver())
    lang.answer_by_agent(lead=[calls(("worker", {"task": "x"}))], worker=[calls(("delete", {}))])
    assert "__interrupt__" in lang.run(lead)
    assert lang.story() == [
        "request lead",
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
    ]
    lang.run(lead, given=Command(resume="yes"))
    assert lang.story()[3:] == [
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        "request lead",
        "turn_end",
    ]


# ---------------------------------------------------------------------- compaction


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_summary_of_the_conversation_is_a_compaction(lang: Lang, is_async: bool) -> None:
    summarize = SummarizationMiddleware(model=lang.model, trigger=("messages", 3), keep=("messages", 1))
    agent = lang.agent("planner", middleware=[summarize])
    given = {"messages": [("user", "a"), ("ai", "b"), ("user", "c")]}
    if is_async:
        asyncio.run(agent.ainvoke(given, lang.config()))
    else:
        lang.run(agent, given=given)
    assert lang.story() == ["request planner", "compaction planner", "request planner", "turn_end"]


def test_a_node_that_replaces_the_messages_compacts_for_all_roles(lang: Lang) -> None:
    def forget(state: MessagesState) -> Any:
        return {"messages": [RemoveMessage(REMOVE_ALL_MESSAGES), ("user", "in short")]}

    graph = StateGraph(MessagesState)
    graph.add_node("planner", lang.node)
    graph.add_node("forget", forget)
    graph.add_node("coder", lang.node)
    graph.add_edge(START, "planner")
    graph.add_edge("planner", "forget")
    graph.add_edge("forget", "coder")
    lang.run(graph.compile())
    assert lang.story() == ["request planner", "compaction", "request coder", "turn_end"]


# ---------------------------------------------------------------------- side by side, and others' business


def test_runs_at_the_same_time_are_kept_apart(lang: Lang) -> None:
    lead = lang.agent("lead", [lang.agent_tool(lang.agent("worker"))])

    def respond(request: ModelRequest) -> Answer:
        is_first = request.agent == "lead" and '"tool"' not in request.text
        return calls(("worker", {"task": "x"}), delay_s=0.1) if is_first else Answer("ok", delay_s=0.05)

    lang.recorder.respond = respond
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda name: lang.run(lead, name), "ab"))

    async def run() -> None:
        await asyncio.gather(*(lead.ainvoke(ask(), lang.config(name)) for name in "cd"))

    asyncio.run(run())
    for name in "abcd":
        assert lang.story(name) == [
            "request lead",
            "subagent_spawn worker worker#1 of lead",
            "request worker worker#1 of lead",
            "subagent_return worker worker#1 of lead",
            "request lead",
            "turn_end",
        ]


def test_a_model_without_the_handler_is_left_alone(lang: Lang) -> None:
    lang.agent("planner").invoke(ask())
    assert lang.story() == ["request"]
    assert "kv_transfer_params" not in lang.recorder.requests[0].body


def test_the_middleware_names_requests_of_any_model(lang: Lang) -> None:
    model = ChatOpenAI(model="model", base_url=lang.recorder.v1, api_key="none", extra_body={"top_k": 5})
    agent = create_agent(model, [look_up], name="planner", middleware=[LifetimeMiddleware()])
    lang.answer(calls(("look_up", {})))
    lang.run(agent)
    asyncio.run(agent.ainvoke(ask(), lang.config()))
    agent.invoke(ask())
    assert lang.story() == ["request planner", "request planner", "turn_end", "request planner", "turn_end", "request"]
    assert [request.session_id for request in lang.recorder.requests] == ["s", "s", "s", None]
    assert {request.body["top_k"] for request in lang.recorder.requests} == {5}


def test_a_run_that_names_no_request_says_so(lang: Lang, caplog: pytest.LogCaptureFixture) -> None:
    model = ChatOpenAI(model="model", base_url=lang.recorder.v1, api_key="none")
    lang.run(create_agent(model, []))
    assert "use LifetimeChatOpenAI, or LifetimeMiddleware" in caplog.text


def test_the_users_headers_and_fields_stay(lang: Lang) -> None:
    body = {"top_k": 5, "kv_transfer_params": {"other": 1, "lifetime": {"retain_s": 60.0}}}
    model = make_model(lang.recorder.url, extra_body=body, default_headers={"X-Mine": "1"})
    lang.run(create_agent(model, [look_up], name="planner"))
    request = lang.recorder.requests[0]
    assert (request.headers["x-mine"], request.session_id, request.body["top_k"]) == ("1", "s", 5)
    assert request.body["kv_transfer_params"] == {"other": 1, "lifetime": {"agent": "planner", "retain_s": 60.0}}
    assert model.extra_body == body


def test_structured_output_and_the_responses_api_are_named(lang: Lang) -> None:
    class Number(BaseModel):
        value: int

    lang.answer(Answer('{"value": 42}'))
    handler = LifetimeCallbackHandler(lang.client, session_id="s", workflow_id="w")
    config: Any = {"callbacks": [handler]}
    assert lang.model.with_structured_output(Number).invoke("how many?", config) == Number(value=42)
    make_model(lang.recorder.url, use_responses_api=True).invoke("hello", config)
    assert [request.session_id for request in lang.recorder.requests] == ["s", "s"]
    assert [request.lifetime["workflow_id"] for request in lang.recorder.requests] == ["w", "w"]


def test_a_name_that_is_too_long_is_cut(lang: Lang) -> None:
    worker = lang.agent("w" * 300)

    @tool
    def delegate() -> str:
        """Delegate it."""
        return str(worker.invoke(ask("x" * 70_000)))

    lang.answer(calls(("delegate", {})))
    lang.run(lang.agent("l" * 300, [delegate]))
    assert lang.story() and lang.recorder.kinds == ["subagent_spawn", "subagent_return", "turn_end"]
    assert lang.client.stats.refused == 0
    assert lang.recorder.requests[1].lifetime["agent_id"] == lang.recorder.boundaries[0].agent_id


# ---------------------------------------------------------------------- never in the way


@pytest.mark.parametrize("make_client", [LifetimeClient, AsyncLifetimeClient])
def test_a_dead_lifetime_server_is_not_noticed(recorder: Recorder, make_client: Callable[..., Any]) -> None:
    async def run() -> str:
        client = make_client(find_dead_url())
        config: Any = {"callbacks": [LifetimeCallbackHandler(client)]}
        result = await create_agent(make_model(recorder.url), []).ainvoke(ask(), config)
        client._outbox.give_up()
        return str(result["messages"][-1].text)

    assert asyncio.run(run()) == "ok"


def test_without_langchain_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['langchain'] = None; import vllm_lifetime.harness.langchain"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'vllm-lifetime[langchain]'" in done.stderr


# ---------------------------------------------------------------------- vLLM


def test_vllm_retires_what_a_graph_leaves(vllm_server: RealServer) -> None:
    """The test model cannot call tools, so what happens is fixed: a planner's node, then one that sends tasks to workers."""
    model = make_model(vllm_server.url, max_tokens=16, temperature=0)
    text = "Read every file of the project and say what is wrong with it. " * 30
    worker = create_agent(model, [], name="worker", system_prompt=text)

    def plan(state: MessagesState) -> Any:
        return {"messages": [model.invoke([("system", f"Plan. {text}"), *state["messages"]])]}

    def work(state: Any) -> Any:
        worker.invoke(ask(state["task"]))
        return {}

    def fan_out(state: MessagesState) -> list[Send]:
        return [Send("work", {"task": f"part {number}"}) for number in range(2)]

    graph = StateGraph(MessagesState)
    graph.add_node("planner", plan)
    graph.add_node("work", work)
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", fan_out, ["work"])
    pipeline = graph.compile(checkpointer=InMemorySaver())

    kinds = ("session_start", "subagent_spawn", "subagent_return", "turn_end", "session_end")
    before = {kind: vllm_server.count_boundaries(kind) for kind in kinds}
    retired = vllm_server.tiers()["hbm"]["retired_blocks"]
    thread_id = f"langgraph-{uuid.uuid4().hex}"
    with LifetimeClient(vllm_server.url) as client:
        config: Any = {"callbacks": [LifetimeCallbackHandler(client)], "configurable": {"thread_id": thread_id}}
        pipeline.invoke(ask("first"), config)
        for _ in pipeline.stream(ask("go on"), config, stream_mode="messages"):
            pass
        client.boundary("session_end", session_id=thread_id)
        assert client.flush()
        assert client.stats.sent == 11 and client.stats.refused == 0
    assert {kind: vllm_server.count_boundaries(kind) - before[kind] for kind in kinds} == {
        "session_start": 0,
        "subagent_spawn": 4,
        "subagent_return": 4,
        "turn_end": 2,
        "session_end": 1,
    }
    assert vllm_server.tiers()["hbm"]["retired_blocks"] > retired
