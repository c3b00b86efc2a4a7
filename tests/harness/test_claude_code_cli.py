# SPDX-License-Identifier: Apache-2.0
"""The real Claude Code, with a stand-in for its model: what its requests and its hooks say, and what ours make of them.

It runs where it is: VLLM_LIFETIME_TEST_CLAUDE names an executable, the package claude_agent_sdk brings one, or `claude` is on
the PATH. It talks to this machine only, and its home is a temporary directory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_lifetime_server import FakeLifetimeServer, find_dead_url
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse

from vllm_lifetime.boundaries import Boundary
from vllm_lifetime.control import claude_code
from vllm_lifetime.harness.claude_code import build_hooks

TIMEOUT_S = 120
TOKEN = "token-of-the-test"


def find_claude() -> str | None:
    if named := os.environ.get("VLLM_LIFETIME_TEST_CLAUDE"):
        return named
    package = importlib.util.find_spec("claude_agent_sdk")
    if package is not None and package.origin is not None:
        bundled = Path(package.origin).parent / "_bundled" / "claude"
        if bundled.exists():
            return str(bundled)
    return shutil.which("claude")


CLAUDE = find_claude()
pytestmark = pytest.mark.skipif(
    CLAUDE is None, reason="no Claude Code here: set VLLM_LIFETIME_TEST_CLAUDE, or install claude_agent_sdk"
)


class FakeModel(FakeLifetimeServer):
    """Speaks Anthropic's messages API, takes hooks by the real route, and remembers both in one order."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, dict[str, Any]]] = []
        self.tokens: set[str | None] = set()
        self.app.post("/v1/messages")(self._complete)
        self.app.include_router(claude_code.build_router(lambda: self), prefix="/lifetime/v1")  # type: ignore[arg-type, return-value]

    def queue_boundaries(self, events: list[Boundary]) -> None:
        for event in events:
            self.log.append(("event", event.model_dump(mode="json", exclude_none=True)))

    async def _complete(self, request: Request) -> Any:
        body = await request.json()
        said = json.dumps(body["messages"])
        self.log.append(("request", {"headers": dict(request.headers), "metadata": body.get("metadata"), "said": said}))
        if "FAIL" in said:
            return JSONResponse({"type": "error", "error": {"type": "not_found_error", "message": "no such model"}}, 404)
        block: dict[str, Any] = {"type": "text", "text": "Fine."}
        tools = {tool["name"] for tool in body.get("tools", [])} & {"Agent", "Task"}
        if "SPAWN" in said and "tool_result" not in said and tools:
            task = {"description": "look", "prompt": "say hi", "subagent_type": "general-purpose"}
            block = {"type": "tool_use", "id": "toolu_1", "name": tools.pop(), "input": task}
        return StreamingResponse(stream(block), media_type="text/event-stream")

    def events(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [entry for kind, entry in self.log if kind == "event"]

    def requests_of_agents(self) -> list[dict[str, Any]]:
        return [entry for kind, entry in self.log if kind == "request"]


def stream(block: dict[str, Any]) -> Iterator[str]:
    """One message of the model, as server-sent events."""

    def event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    usage = {"input_tokens": 10, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    yield event("message_start", message=message | {"stop_reason": None, "stop_sequence": None})
    if block["type"] == "text":
        start, delta = block | {"text": ""}, {"type": "text_delta", "text": block["text"]}
    else:
        start, delta = block | {"input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
    yield event("content_block_start", index=0, content_block=start)
    yield event("content_block_delta", index=0, delta=delta)
    yield event("content_block_stop", index=0)
    reason = "end_turn" if block["type"] == "text" else "tool_use"
    yield event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage={"output_tokens": 5})
    yield event("message_stop")


@pytest.fixture
def model() -> Iterator[FakeModel]:
    with FakeModel() as running:
        yield running


@pytest.fixture
def claude(model: FakeModel, tmp_path: Path) -> Any:
    """Return a function that runs one prompt to its end, with our hooks."""
    home = tmp_path / "home"
    project = home / "project"
    project.mkdir(parents=True)

    def run(prompt: str, *arguments: str, hooks_url: str = model.url, **env: str) -> subprocess.CompletedProcess[str]:
        assert CLAUDE is not None
        settings = tmp_path / "settings.json"
        settings.write_text(json.dumps({"hooks": build_hooks(hooks_url)}))
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "ANTHROPIC_BASE_URL": model.url,
            "ANTHROPIC_API_KEY": "none",
            "VLLM_LIFETIME_TOKEN": TOKEN,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_TELEMETRY": "1",
            "HTTPS_PROXY": find_dead_url(),  # whatever else it may want to reach
            "NO_PROXY": "127.0.0.1,localhost",
            **env,
        }
        return subprocess.run(
            [CLAUDE, "-p", prompt, "--settings", str(settings), *arguments],
            cwd=project,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run


def wait_for_session_end(model: FakeModel) -> list[dict[str, Any]]:
    deadline_s = time.monotonic() + 10
    while not any(event["kind"] == "session_end" for event in model.events()):
        assert time.monotonic() < deadline_s, model.log
        time.sleep(0.01)
    return model.events()


def test_a_turn_and_the_end_of_the_session_are_reported(model: FakeModel, claude: Any) -> None:
    done = claude("hello")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "Fine.", "")
    events = wait_for_session_end(model)
    assert [event["kind"] for event in events] == ["turn_end", "session_end"]
    (session_id,) = {event["session_id"] for event in events}
    for request in model.requests_of_agents():
        assert request["headers"]["x-claude-code-session-id"] == session_id
        assert json.loads(request["metadata"]["user_id"])["session_id"] == session_id
        assert "x-claude-code-agent-id" not in request["headers"]


def test_a_subagent_is_the_same_in_its_requests_and_its_events(model: FakeModel, claude: Any) -> None:
    assert claude("SPAWN one").returncode == 0
    events = wait_for_session_end(model)
    spawn = next(event for event in events if event["kind"] == "subagent_spawn")
    back = next(event for event in events if event["kind"] == "subagent_return")
    assert spawn["agent_id"] == back["agent_id"]
    assert spawn["agent"] == back["agent"] == "general-purpose"
    of_subagent = [
        request for request in model.requests_of_agents() if request["headers"].get("x-claude-code-agent-id") == spawn["agent_id"]
    ]
    assert of_subagent
    assert {request["headers"]["x-claude-code-session-id"] for request in of_subagent} == {spawn["session_id"]}
    kinds = [event["kind"] for event in events]
    # The main agent may stop while its sub-agent runs: that is no end of a turn.
    assert kinds.count("turn_end") == 1
    assert kinds.index("subagent_return") < kinds.index("turn_end") < kinds.index("session_end")


def test_a_compaction_is_reported_before_its_summary_is_asked_for(model: FakeModel, claude: Any) -> None:
    session_id = "11111111-2222-4333-8444-555555555555"
    assert claude("hello", "--session-id", session_id).returncode == 0
    assert claude("again", "--resume", session_id).returncode == 0
    before = len(model.log)
    assert claude("/compact", "--resume", session_id).returncode == 0
    wait_for_session_end(model)
    what = [entry["kind"] if kind == "event" else kind for kind, entry in model.log[before:]]
    assert what[0] == "compaction"
    assert what.count("compaction") == 1
    assert set(what[1:-1]) == {"request"}
    assert what[-1] == "session_end"
    assert {event["session_id"] for event in model.events()} == {session_id}
    assert len({event["message_id"] for event in model.events()}) == len(model.events())


def test_a_turn_that_fails_has_ended(model: FakeModel, claude: Any) -> None:
    assert claude("FAIL").returncode != 0
    events = wait_for_session_end(model)
    assert [event["kind"] for event in events] == ["turn_end", "session_end"]


def test_a_server_that_is_not_there_does_not_stop_claude_code(model: FakeModel, claude: Any) -> None:
    done = claude("hello", hooks_url=find_dead_url())
    assert (done.returncode, done.stdout.strip()) == (0, "Fine.")
    assert model.events() == []


def test_the_users_own_headers_and_a_stable_system_prompt_can_be_had(model: FakeModel, claude: Any) -> None:
    done = claude("hello", ANTHROPIC_CUSTOM_HEADERS="X-Session-ID: mine\nX-Two: 2", CLAUDE_CODE_ATTRIBUTION_HEADER="0")
    assert done.returncode == 0
    for request in model.requests_of_agents():
        assert request["headers"]["x-session-id"] == "mine"
        assert request["headers"]["x-two"] == "2"
