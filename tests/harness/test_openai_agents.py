# SPDX-License-Identifier: Apache-2.0
"""The OpenAI Agents SDK's own runner against a server that is told what to answer, and against vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("agents", reason="needs requirements/harness.txt")

from agents import (
    Agent,
    GuardrailFunctionOutput,
    InputGuardrailTripwireTriggered,
    MaxTurnsExceeded,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIProvider,
    OpenAIResponsesModel,
    RunConfig,
    RunContextWrapper,
    RunHooks,
    Runner,
    SQLiteSession,
    function_tool,
    input_guardrail,
    set_tracing_disabled,
)
from conftest import RealServer
from fake_lifetime_server import find_dead_url
from harness_recorder import Answer, ModelRequest, Recorder, calls
from openai import AsyncOpenAI, InternalServerError

from vllm_lifetime.harness import AsyncLifetimeClient, LifetimeClient
from vllm_lifetime.harness.openai_agents import LifetimeModel, LifetimeModelProvider, LifetimeRunner

set_tracing_disabled(True)


def make_openai(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def make_model(url: str) -> LifetimeModel:
    return LifetimeModel(OpenAIChatCompletionsModel("model", make_openai(url)))


class Sdk:
    """Agents on a recorder, and what came of their runs."""

    def __init__(self, recorder: Recorder, client: LifetimeClient) -> None:
        self.recorder = recorder
        self.client = client
        self.runner = LifetimeRunner(client)
        self.loop = asyncio.Runner()

    def agent(self, name: str, **options: Any) -> Agent[Any]:
        return Agent(name=name, model=options.pop("model", None) or make_model(self.recorder.url), **options)

    def answer(self, *answers: Answer) -> None:
        self.recorder.answers.extend(answers)

    def answer_by_agent(self, **scripts: list[Answer]) -> None:
        """Let each agent have its own answers, whatever the order in which they ask."""

        def respond(request: ModelRequest) -> Answer:
            script = scripts.get(request.agent or "", [])
            return script.pop(0) if script else Answer("done")

        self.recorder.respond = respond

    def run(self, agent: Agent[Any], session_id: str | None = "s", **options: Any) -> Any:
        return self.loop.run(self.runner.run(agent, "question", session_id=session_id, **options))

    def story(self, session_id: str | None = None) -> list[str]:
        assert self.client.flush()
        return self.recorder.described(session_id)


@pytest.fixture
def sdk(recorder: Recorder, client: LifetimeClient) -> Iterator[Sdk]:
    sdk = Sdk(recorder, client)
    with sdk.loop:
        yield sdk


# ---------------------------------------------------------------------- a run and its end


def test_a_run_of_a_session_is_one_turn_of_it(sdk: Sdk) -> None:
    @function_tool
    def look_up() -> str:
        """Look it up."""
        return "42"

    sdk.answer(calls(("look_up", {})), Answer("it is 42"))
    result = sdk.run(sdk.agent("planner", tools=[look_up]))
    assert result.final_output == "it is 42"
    assert sdk.story() == ["request planner", "request planner", "turn_end"]
    assert {request.session_id for request in sdk.recorder.requests} == {"s"}
    assert {boundary.session_id for boundary in sdk.recorder.boundaries} == {"s"}


def test_a_run_without_a_session_is_a_session_of_its_own(sdk: Sdk) -> None:
    agent = sdk.agent("planner")
    sdk.run(agent, None)
    sdk.run(agent, None)
    assert sdk.story() == ["session_start", "request planner", "workflow_end"] * 2
    first, second = (request.session_id for request in sdk.recorder.requests)
    assert first and second and first != second
    assert [boundary.session_id for boundary in sdk.recorder.boundaries] == [first, first, second, second]


def test_a_session_of_the_sdk_gives_its_id(sdk: Sdk) -> None:
    sdk.loop.run(sdk.runner.run(sdk.agent("planner"), "question", session=SQLiteSession("kept")))
    assert sdk.story("kept") == ["request planner", "turn_end"]


def test_a_workflow_that_is_named_is_not_ended_with_a_run(sdk: Sdk) -> None:
    sdk.run(sdk.agent("planner"), None, workflow_id="w")
    sdk.run(sdk.agent("coder"), "s", workflow_id="w")
    assert sdk.story() == ["session_start", "request planner", "session_end", "request coder", "turn_end"]
    assert {request.lifetime["workflow_id"] for request in sdk.recorder.requests} == {"w"}
    assert {boundary.workflow_id for boundary in sdk.recorder.boundaries} == {"w"}


def test_a_sync_run_reports_the_same(sdk: Sdk) -> None:
    sdk.runner.run_sync(sdk.agent("planner"), "question", session_id="s")
    assert sdk.story() == ["request planner", "turn_end"]


def test_a_run_that_the_model_fails_ends_its_turn(sdk: Sdk) -> None:
    sdk.answer(Answer(status=500))
    with pytest.raises(InternalServerError):
        sdk.run(sdk.agent("planner"))
    assert sdk.story() == ["request planner", "turn_end"]


def test_a_run_that_raises_ends_its_session(sdk: Sdk) -> None:
    @function_tool(failure_error_function=None)
    def break_down() -> str:
        """Break down."""
        raise ZeroDivisionError("broken")

    sdk.answer(calls(("break_down", {})))
    with pytest.raises(Exception, match="broken"):
        sdk.run(sdk.agent("planner", tools=[break_down]), None)
    assert sdk.story() == ["session_start", "request planner", "workflow_end"]


def test_too_many_turns_end_the_turn(sdk: Sdk) -> None:
    @function_tool
    def look_up() -> str:
        """Look it up."""
        return "42"

    sdk.answer(*[calls(("look_up", {}))] * 3)
    with pytest.raises(MaxTurnsExceeded):
        sdk.run(sdk.agent("planner", tools=[look_up]), max_turns=2)
    assert sdk.story() == ["request planner", "request planner", "turn_end"]


def test_a_guardrail_that_trips_ends_the_turn_and_its_own_agent(sdk: Sdk) -> None:
    guard = sdk.agent("guard")

    @input_guardrail
    async def refuse(context: RunContextWrapper[Any], agent: Agent[Any], given: Any) -> GuardrailFunctionOutput:
        await Runner.run(guard, given)
        return GuardrailFunctionOutput(None, tripwire_triggered=True)

    sdk.answer_by_agent(planner=[Answer(delay_s=5)])
    with pytest.raises(InputGuardrailTripwireTriggered):
        sdk.run(sdk.agent("planner", input_guardrails=[refuse]))
    story = sdk.story()
    assert [line for line in story if "guard" in line] == [
        "subagent_spawn guard guard#1 of planner",
        "request guard guard#1 of planner",
        "subagent_return guard guard#1 of planner",
    ]
    assert story[-1] == "turn_end"


def test_a_cancelled_run_ends_its_turn(sdk: Sdk) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(sdk.runner.run(sdk.agent("planner"), "question", session_id="s"))
        await asyncio.to_thread(sdk.recorder.wait_for_requests, 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    sdk.answer(Answer(delay_s=20))
    sdk.loop.run(cancel())
    assert sdk.story() == ["request planner", "turn_end"]


# ---------------------------------------------------------------------- streamed


def test_a_streamed_run_ends_when_it_has_been_read(sdk: Sdk) -> None:
    async def stream() -> str:
        result = sdk.runner.run_streamed(sdk.agent("planner"), "question", session_id="s")
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    sdk.answer(Answer("it is 42"))
    assert sdk.loop.run(stream()).strip() == "it is 42"
    assert sdk.story() == ["request planner", "turn_end"]
    assert sdk.recorder.requests[0].body["stream"] is True


@pytest.mark.parametrize("mode", ["immediate", "after_turn"])
def test_a_streamed_run_that_is_cancelled_ends(sdk: Sdk, mode: Any) -> None:
    async def stream() -> None:
        result = sdk.runner.run_streamed(sdk.agent("planner"), "question", session_id="s")
        await asyncio.to_thread(sdk.recorder.wait_for_requests, 1)
        result.cancel(mode)
        async for _ in result.stream_events():
            pass

    sdk.answer(Answer(delay_s=1))
    sdk.loop.run(stream())
    assert sdk.story() == ["request planner", "turn_end"]


def test_a_streamed_run_that_fails_ends(sdk: Sdk) -> None:
    async def stream() -> None:
        result = sdk.runner.run_streamed(sdk.agent("planner"), "question")
        async for _ in result.stream_events():
            pass

    sdk.answer(Answer(status=500))
    with pytest.raises(InternalServerError):
        sdk.loop.run(stream())
    assert sdk.story() == ["session_start", "request planner", "workflow_end"]


def test_a_streamed_run_that_nobody_reads_ends(sdk: Sdk) -> None:
    async def stream() -> None:
        result = sdk.runner.run_streamed(sdk.agent("planner"), "question", session_id="s")
        assert result.run_loop_task is not None
        await asyncio.wait({result.run_loop_task})
        await asyncio.sleep(0)

    sdk.loop.run(stream())
    assert sdk.story() == ["request planner", "turn_end"]


# ---------------------------------------------------------------------- handoffs and sub-agents


def test_a_handoff_names_the_next_agent_and_ends_nothing(sdk: Sdk) -> None:
    billing = sdk.agent("billing")
    triage = sdk.agent("triage", handoffs=[billing])
    billing.handoffs.append(triage)
    to_billing, to_triage = calls(("transfer_to_billing", {})), calls(("transfer_to_triage", {}))
    sdk.answer(to_billing, to_triage, Answer("done"))
    sdk.run(triage)
    assert sdk.story() == ["request triage", "request billing", "request triage", "turn_end"]
    assert "question" in sdk.recorder.requests[2].text  # the conversation was handed on, and back


def as_tool(agent: Agent[Any], **options: Any) -> Any:
    return agent.as_tool(f"ask_{agent.name}", "Ask it.", **options)


def test_an_agent_used_as_a_tool_is_a_sub_agent(sdk: Sdk) -> None:
    worker = sdk.agent("worker", model=make_model(sdk.recorder.url))
    lead = sdk.agent("lead", tools=[as_tool(worker)])
    sdk.answer(calls(("ask_worker", {"input": "dig"})), Answer("dug"), Answer("done"))
    sdk.run(lead)
    assert sdk.story() == [
        "request lead",
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        "request lead",
        "turn_end",
    ]
    spawn = sdk.recorder.boundaries[0].spawn
    assert spawn is not None
    assert (spawn.instruction, spawn.model, spawn.position, spawn.tools) == ("dig", "model", 0, ())


def test_sub_agents_of_one_role_at_the_same_time_are_told_apart(sdk: Sdk) -> None:
    worker = sdk.agent("worker")
    lead = sdk.agent("lead", tools=[as_tool(worker)])
    both = calls(("ask_worker", {"input": "one"}), ("ask_worker", {"input": "two"}))
    sdk.answer_by_agent(lead=[both], worker=[Answer(delay_s=0.2), Answer(delay_s=0.2)])
    sdk.run(lead)
    asked = {request.lifetime["agent_id"]: request.text for request in sdk.recorder.requests if request.agent == "worker"}
    spawned = {event.agent_id: event.spawn for event in sdk.recorder.boundaries if event.kind == "subagent_spawn"}
    assert sdk.story() and len(spawned) == 2 and spawned.keys() == asked.keys()
    for agent_id, spawn in spawned.items():
        assert spawn is not None and spawn.instruction is not None and agent_id is not None
        assert spawn.instruction in asked[agent_id], "the spawn record is another's"
    returned = [event.agent_id for event in sdk.recorder.boundaries if event.kind == "subagent_return"]
    assert sorted(map(str, returned)) == sorted(map(str, spawned))


def test_a_sub_agent_may_have_sub_agents(sdk: Sdk) -> None:
    digger = sdk.agent("digger")
    worker = sdk.agent("worker", tools=[as_tool(digger)])
    lead = sdk.agent("lead", tools=[as_tool(worker)])
    sdk.answer_by_agent(
        lead=[calls(("ask_worker", {"input": "x"}))],
        worker=[calls(("ask_digger", {"input": "y"}))],
    )
    sdk.run(lead)
    assert sdk.story() == [
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


def test_a_sub_agent_that_hands_off_is_one_instance(sdk: Sdk) -> None:
    writer = sdk.agent("writer")
    worker = sdk.agent("worker", handoffs=[writer])
    lead = sdk.agent("lead", tools=[as_tool(worker)])
    sdk.answer_by_agent(lead=[calls(("ask_worker", {"input": "x"}))], worker=[calls(("transfer_to_writer", {}))])
    sdk.run(lead)
    assert sdk.story() == [
        "request lead",
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "request writer worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        "request lead",
        "turn_end",
    ]


def test_a_run_inside_a_tool_is_a_sub_agent_too(sdk: Sdk) -> None:
    worker = sdk.agent("worker")

    @function_tool
    async def delegate() -> str:
        """Delegate it."""
        return str((await Runner.run(worker, "dig")).final_output)

    @function_tool
    async def delegate_streamed() -> str:
        """Delegate it."""
        result = sdk.runner.run_streamed(worker, "dig deeper")
        async for _ in result.stream_events():
            pass
        return str(result.final_output)

    lead = sdk.agent("lead", tools=[delegate, delegate_streamed])
    sdk.answer_by_agent(lead=[calls(("delegate", {})), calls(("delegate_streamed", {}))])
    sdk.run(lead)
    assert [line for line in sdk.story() if "worker" not in line] == ["request lead"] * 3 + ["turn_end"]
    assert [line for line in sdk.story() if "worker" in line] == [
        f"{what} worker worker#{number} of lead" for number in (1, 2) for what in ("subagent_spawn", "request", "subagent_return")
    ]


@pytest.mark.parametrize("is_told", [True, False], ids=["told to the lead", "raised"])
def test_a_sub_agent_that_fails_returns(sdk: Sdk, is_told: bool) -> None:
    worker = sdk.agent("worker")
    options: dict[str, Any] = {} if is_told else {"failure_error_function": None}
    lead = sdk.agent("lead", tools=[as_tool(worker, **options)])
    sdk.answer_by_agent(lead=[calls(("ask_worker", {"input": "x"}))], worker=[Answer(status=500)])
    if is_told:
        sdk.run(lead)
    else:
        with pytest.raises(Exception, match="told to answer 500"):
            sdk.run(lead)
    assert sdk.story() == [
        "request lead",
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        *(["request lead"] if is_told else []),
        "turn_end",
    ]


def test_a_run_cancelled_while_sub_agents_work_ends_them_once(sdk: Sdk) -> None:
    worker = sdk.agent("worker")
    lead = sdk.agent("lead", tools=[as_tool(worker)])
    sdk.answer_by_agent(
        lead=[calls(("ask_worker", {"input": "one"}), ("ask_worker", {"input": "two"}))],
        worker=[Answer(delay_s=20), Answer(delay_s=20)],
    )

    async def cancel() -> None:
        task = asyncio.create_task(sdk.runner.run(lead, "question", session_id="s"))
        await asyncio.to_thread(sdk.recorder.wait_for_requests, 3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)

    sdk.loop.run(cancel())
    story = sdk.story()
    assert sorted(line for line in story if line.startswith("subagent_return")) == [
        "subagent_return worker worker#1 of lead",
        "subagent_return worker worker#2 of lead",
    ]
    assert story[-1] == "turn_end"


def test_a_run_that_waits_for_an_approval_is_not_over(sdk: Sdk) -> None:
    @function_tool(needs_approval=True)
    def delete() -> str:
        """Delete it."""
        return "deleted"

    worker = sdk.agent("worker", tools=[delete])
    lead = sdk.agent("lead", tools=[as_tool(worker)])
    sdk.answer_by_agent(lead=[calls(("ask_worker", {"input": "x"}))], worker=[calls(("delete", {}))])

    async def run() -> None:
        paused = await sdk.runner.run(lead, "question", session_id="s")
        assert sdk.story() == [
            "request lead",
            "subagent_spawn worker worker#1 of lead",
            "request worker worker#1 of lead",
        ]
        state = paused.to_state()
        for interruption in paused.interruptions:
            state.approve(interruption)
        await sdk.runner.run(lead, state, session_id="s")

    sdk.loop.run(run())
    assert sdk.story()[3:] == [
        "subagent_spawn worker worker#1 of lead",
        "request worker worker#1 of lead",
        "subagent_return worker worker#1 of lead",
        "request lead",
        "turn_end",
    ]


# ---------------------------------------------------------------------- side by side, and others' business


def test_runs_at_the_same_time_are_kept_apart(sdk: Sdk) -> None:
    worker = sdk.agent("worker")
    lead = sdk.agent("lead", tools=[as_tool(worker)])

    def respond(request: ModelRequest) -> Answer:
        is_first = request.agent == "lead" and "ask_worker" not in request.text
        return calls(("ask_worker", {"input": "x"}), delay_s=0.1) if is_first else Answer("ok", delay_s=0.05)

    sdk.recorder.respond = respond

    async def run() -> None:
        await asyncio.gather(*(sdk.runner.run(lead, "question", session_id=name) for name in "abcd"))

    sdk.loop.run(run())
    for name in "abcd":
        assert sdk.story(name) == [
            "request lead",
            "subagent_spawn worker worker#1 of lead",
            "request worker worker#1 of lead",
            "subagent_return worker worker#1 of lead",
            "request lead",
            "turn_end",
        ]


def test_runs_of_others_are_left_alone(sdk: Sdk) -> None:
    sdk.run(sdk.agent("planner"))
    sdk.loop.run(Runner.run(sdk.agent("stranger"), "question"))
    assert sdk.story() == ["request planner", "turn_end", "request"]
    assert "kv_transfer_params" not in sdk.recorder.requests[1].body


def test_a_task_that_outlives_its_run_is_no_sub_agent_of_it(sdk: Sdk) -> None:
    worker = sdk.agent("worker")
    left: list[asyncio.Task[Any]] = []

    @function_tool
    async def start_later() -> str:
        """Start it later."""

        async def later() -> None:
            await asyncio.sleep(0.5)
            await Runner.run(worker, "dig")

        left.append(asyncio.create_task(later()))
        return "started"

    async def run() -> None:
        await sdk.runner.run(sdk.agent("lead", tools=[start_later]), "question", session_id="s")
        await asyncio.gather(*left)

    sdk.answer(calls(("start_later", {})))
    sdk.loop.run(run())
    assert sdk.story() == ["request lead", "request lead", "turn_end", "request"]


def test_the_users_hooks_are_called_as_before(sdk: Sdk) -> None:
    class Hooks(RunHooks[Any]):
        def __init__(self) -> None:
            self.seen: list[str] = []

        async def on_agent_start(self, context: Any, agent: Any) -> None:
            self.seen.append(f"start {agent.name}")

        async def on_llm_start(self, context: Any, agent: Any, system_prompt: Any, input_items: Any) -> None:
            self.seen.append(f"ask {agent.name}")

        async def on_handoff(self, context: Any, from_agent: Any, to_agent: Any) -> None:
            self.seen.append(f"{from_agent.name} to {to_agent.name}")

        async def on_agent_end(self, context: Any, agent: Any, output: Any) -> None:
            self.seen.append(f"end {agent.name}")

    hooks = Hooks()
    triage = sdk.agent("triage", handoffs=[sdk.agent("billing")])
    sdk.answer(calls(("transfer_to_billing", {})))
    sdk.run(triage, hooks=hooks)
    assert hooks.seen == ["start triage", "ask triage", "triage to billing", "start billing", "ask billing", "end billing"]


def test_the_users_headers_and_fields_stay(sdk: Sdk) -> None:
    settings = ModelSettings(
        extra_headers={"X-Mine": "1"},
        extra_body={"top_k": 5, "kv_transfer_params": {"other": 1, "lifetime": {"retain_s": 60.0, "segment_class": "shared"}}},
    )
    sdk.run(sdk.agent("planner", model_settings=settings))
    request = sdk.recorder.requests[0]
    assert (request.headers["x-mine"], request.session_id, request.body["top_k"]) == ("1", "s", 5)
    assert request.body["kv_transfer_params"]["other"] == 1
    assert request.lifetime == {"agent": "planner", "retain_s": 60.0, "segment_class": "shared"}
    assert settings.extra_headers == {"X-Mine": "1"}, "the user's settings were changed"


def test_models_of_a_provider_and_of_the_responses_api_are_named(sdk: Sdk) -> None:
    openai = make_openai(sdk.recorder.url)
    provider = LifetimeModelProvider(OpenAIProvider(openai_client=openai, use_responses=False))
    sdk.run(Agent(name="planner", model="model"), run_config=RunConfig(model_provider=provider))
    sdk.run(sdk.agent("coder", model=LifetimeModel(OpenAIResponsesModel("model", openai))))
    assert sdk.story() == ["request planner", "turn_end", "request coder", "turn_end"]
    assert [request.session_id for request in sdk.recorder.requests] == ["s", "s"]


def test_a_model_of_another_server_is_not_named(sdk: Sdk, caplog: pytest.LogCaptureFixture) -> None:
    bare = OpenAIChatCompletionsModel("model", make_openai(sdk.recorder.url))
    sdk.run(sdk.agent("planner", model=bare))
    assert "kv_transfer_params" not in sdk.recorder.requests[0].body
    assert "wrap the agents' models in LifetimeModel" in caplog.text


def test_a_name_that_is_too_long_is_cut(sdk: Sdk) -> None:
    worker = sdk.agent("w" * 300)
    lead = sdk.agent("l" * 300, tools=[worker.as_tool("ask_worker", "Ask it.")])
    sdk.answer(calls(("ask_worker", {"input": "x" * 70_000})))
    sdk.run(lead)
    assert sdk.story() and sdk.recorder.kinds == ["subagent_spawn", "subagent_return", "turn_end"]
    assert sdk.client.stats.refused == 0
    assert sdk.recorder.requests[1].lifetime["agent_id"] == sdk.recorder.boundaries[0].agent_id


# ---------------------------------------------------------------------- never in the way


@pytest.mark.parametrize("make_client", [LifetimeClient, AsyncLifetimeClient])
def test_a_dead_lifetime_server_is_not_noticed(recorder: Recorder, make_client: Callable[..., Any]) -> None:
    async def run() -> str:
        client = make_client(find_dead_url())
        result = await LifetimeRunner(client).run(Agent(name="planner", model=make_model(recorder.url)), "question")
        client._outbox.give_up()
        return str(result.final_output)

    assert asyncio.run(run()) == "ok"


def test_an_async_client_reports_the_same(recorder: Recorder) -> None:
    async def run() -> None:
        async with AsyncLifetimeClient(recorder.url) as client:
            agent = Agent(name="planner", model=make_model(recorder.url))
            await LifetimeRunner(client).run(agent, "question", session_id="s")

    asyncio.run(run())
    assert recorder.described() == ["request planner", "turn_end"]


def test_without_the_sdk_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['agents'] = None; import vllm_lifetime.harness.openai_agents"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install 'vllm-lifetime[openai-agents]'" in done.stderr


# ---------------------------------------------------------------------- vLLM


def test_vllm_retires_what_a_run_leaves(vllm_server: RealServer) -> None:
    """The test model cannot call tools, so what happens is fixed: a planner, then workers inside a run by plain code."""
    session_id = f"agents-{uuid.uuid4().hex}"
    model = make_model(vllm_server.url)
    settings = ModelSettings(max_tokens=16, temperature=0)
    text = "Read every file of the project and say what is wrong with it. " * 30
    planner, worker = (
        Agent(name=name, instructions=text, model=model, model_settings=settings) for name in ("planner", "worker")
    )
    kinds = ("session_start", "subagent_spawn", "subagent_return", "turn_end", "session_end")
    before = {kind: vllm_server.count_boundaries(kind) for kind in kinds}
    retired = vllm_server.tiers()["hbm"]["retired_blocks"]

    @input_guardrail(run_in_parallel=False)
    async def ask_worker(context: RunContextWrapper[Any], agent: Agent[Any], given: Any) -> GuardrailFunctionOutput:
        await asyncio.gather(*(Runner.run(worker, f"part {number}") for number in range(2)))
        return GuardrailFunctionOutput(None, tripwire_triggered=False)

    planner.input_guardrails.append(ask_worker)

    async def run() -> None:
        runner = LifetimeRunner(client)
        result = await runner.run(planner, "first", session_id=session_id)
        assert result.final_output
        streamed = runner.run_streamed(
            planner, [*result.to_input_list(), {"role": "user", "content": "go on"}], session_id=session_id
        )
        async for _ in streamed.stream_events():
            pass

    with LifetimeClient(vllm_server.url) as client:
        asyncio.run(run())
        client.boundary("session_end", session_id=session_id)
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
