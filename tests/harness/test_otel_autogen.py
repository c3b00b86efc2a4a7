# SPDX-License-Identifier: Apache-2.0
"""AutoGen, which emits OpenTelemetry's GenAI spans itself, exporting to the endpoint without a line of ours in its process.

Runs in the environment of requirements/harness.txt.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
uvicorn = pytest.importorskip("uvicorn")

from fastapi import FastAPI, Request  # noqa: E402
from fastapi.responses import JSONResponse  # noqa: E402

from vllm_lifetime.control import ControlService, otlp  # noqa: E402

# A harness as its user writes it: OpenTelemetry's usual set-up, and AutoGen.
HARNESS = """
import asyncio, os, sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
trace.set_tracer_provider(provider)

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_ext.models.openai import OpenAIChatCompletionClient


def client(model):
    return OpenAIChatCompletionClient(
        model=model,
        base_url=os.environ["SERVER"] + "/v1",
        api_key="none",
        max_retries=0,
        model_info={
            "vision": False, "function_calling": True, "json_output": False, "family": "unknown", "structured_output": False,
        },
        default_headers={"X-Session-ID": "task-7"},
    )


async def lead(researcher_model):
    researcher = AssistantAgent("researcher", client(researcher_model), description="Looks things up.")
    agent = AssistantAgent("lead", client("good"), tools=[AgentTool(researcher)], reflect_on_tool_use=True)
    await agent.run(task="hello")


async def cancelled():
    task = asyncio.create_task(lead("slow"))
    await asyncio.sleep(2)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def team():
    agents = [AssistantAgent(name, client("good")) for name in ("writer", "critic")]
    await RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(3)).run(task="hello")


async def failing():
    await AssistantAgent("lead", client("bad")).run(task="hello")


runs = {"lead": lead("good"), "bad_sub_agent": lead("bad"), "cancelled": cancelled(), "team": team(), "failing": failing()}
try:
    asyncio.run(runs[sys.argv[1]])
finally:
    provider.shutdown()
"""


class Engines:
    """An `EnginePort` that takes every event."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def call(self, method: str, *args: Any) -> list[Any]:
        self.events += args[1]["events"]
        return [{"outcomes": [{"message_id": event["message_id"], "status": "accepted"} for event in args[1]["events"]]}]


class Server:
    """What vLLM's server is to the harness: a model that calls its tools once, and the endpoint."""

    def __init__(self) -> None:
        self.engines = Engines()
        self.sessions: list[str | None] = []
        service = ControlService(self.engines)
        app = FastAPI()
        app.include_router(otlp.build_router(lambda: service), prefix="/lifetime/v1")
        app.post("/v1/chat/completions")(self.complete)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def start(self) -> None:
        self._thread.start()
        deadline_s = time.monotonic() + 30
        while not self._server.started:
            assert time.monotonic() < deadline_s, "the server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._listener.close()

    async def complete(self, request: Request) -> JSONResponse:
        self.sessions.append(request.headers.get("x-session-id"))
        body = await request.json()
        if body["model"] == "bad":
            return JSONResponse({"error": {"message": "no such model"}}, 404)
        if body["model"] == "slow":
            for _ in range(300):
                await asyncio.sleep(0.1)
                if await request.is_disconnected():
                    break
        message: dict[str, Any] = {"role": "assistant", "content": "done"}
        if body.get("tools") and body["messages"][-1]["role"] != "tool":
            function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"task": "look it up"}'}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            }
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return JSONResponse(
            {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        )


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.start()
    yield server
    server.stop()


def run(server: Server, what: str, run_end: str = "") -> list[tuple[str, str, str | None]]:
    """Run the harness; return what the engines were told."""
    environment = os.environ | {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{server.url}/lifetime/v1/otlp/v1/traces",
        "OTEL_RESOURCE_ATTRIBUTES": "session.id=task-7" + run_end,
        "SERVER": server.url,
    }
    subprocess.run([sys.executable, "-c", HARNESS, what], env=environment, timeout=120, capture_output=True, check=False)
    return [(event["kind"], event["session_id"], event.get("agent")) for event in server.engines.events]


def test_a_lead_with_a_sub_agent(server: Server) -> None:
    assert run(server, "lead") == [("subagent_return", "task-7", "researcher"), ("turn_end", "task-7", None)]
    assert set(server.sessions) == {"task-7"}, "the requests name the same session"


def test_a_process_that_is_one_task_ends_its_workflow(server: Server) -> None:
    assert run(server, "lead", ",lifetime.run_end=workflow_end") == [
        ("subagent_return", "task-7", "researcher"),
        ("workflow_end", "task-7", None),
    ]


@pytest.mark.parametrize("what", ["bad_sub_agent", "cancelled"])
def test_a_sub_agent_that_fails_or_is_cancelled_has_returned(server: Server, what: str) -> None:
    # A cancelled lead is over before the sub-agent that it waited for.
    assert sorted(run(server, what), key=str) == [("subagent_return", "task-7", "researcher"), ("turn_end", "task-7", None)]


def test_a_lead_that_fails_has_ended_its_turn(server: Server) -> None:
    assert run(server, "failing") == [("turn_end", "task-7", None)]


def test_the_agents_of_a_team_are_no_sub_agents(server: Server) -> None:
    # Each speaks in a trace of its own, linked to the one before.
    assert run(server, "team") == [("turn_end", "task-7", None), ("turn_end", "task-7", None)]
