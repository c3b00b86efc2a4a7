# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that plays both parts of a lifetime server: it answers as the model what it is told to, takes
boundaries, and remembers all of it in one list."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from vllm_lifetime.boundaries import Boundary

MODEL = "model"


@dataclass(frozen=True)
class Answer:
    """What the model says: a text, or tool calls as `(name, arguments)`, or an HTTP error; after `delay_s` seconds."""

    text: str = "ok"
    tool_calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    status: int = 200
    delay_s: float = 0.0


def calls(*tool_calls: tuple[str, Mapping[str, Any]], delay_s: float = 0.0) -> Answer:
    """The model calls these tools, all in one message."""
    return Answer("", tool_calls, delay_s=delay_s)


@dataclass(frozen=True)
class ModelRequest:
    """A request to the model, as it arrived."""

    headers: Mapping[str, str]
    body: Mapping[str, Any]
    at_s: float

    @property
    def session_id(self) -> str | None:
        return self.headers.get("x-session-id") or self.body.get("session_id")

    @property
    def lifetime(self) -> dict[str, Any]:
        return dict((self.body.get("kv_transfer_params") or {}).get("lifetime") or {})

    @property
    def agent(self) -> str | None:
        return self.lifetime.get("agent")

    @property
    def text(self) -> str:
        """All messages as one string, to tell requests apart by."""
        return json.dumps(self.body.get("messages") or self.body.get("input"))


@dataclass(frozen=True)
class Event:
    """A boundary, as it arrived."""

    boundary: Boundary

    @property
    def at_s(self) -> float:
        """When it was reported, not when it arrived: clients send in the background."""
        return self.boundary.sent_at_s or 0.0


@dataclass
class Recorder:
    """See the module. Answers are taken from `respond` if set, else from `answers` in order, else they are `ok`."""

    answers: deque[Answer] = field(default_factory=deque)
    respond: Callable[[ModelRequest], Answer] | None = None
    arrivals: list[ModelRequest | Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self._complete)
        self.app.post("/v1/responses")(self._respond)
        self.app.post("/lifetime/v1/boundaries")(self._take_boundaries)
        self._ids = itertools.count(1)
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.port = 0

    # -- what it saw -----------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Its root: what `LifetimeClient` takes. `v1` is what an OpenAI client takes."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def requests(self) -> list[ModelRequest]:
        """Requests to the model, in order of arrival."""
        return [arrival for arrival in self.arrivals if isinstance(arrival, ModelRequest)]

    @property
    def boundaries(self) -> list[Boundary]:
        """Boundaries, in order of arrival, which is the order in which a client reported them."""
        return [arrival.boundary for arrival in self.arrivals if isinstance(arrival, Event)]

    def of_session(self, session_id: str | None) -> list[Boundary]:
        """The boundaries of one session."""
        return [boundary for boundary in self.boundaries if boundary.session_id == session_id]

    @property
    def kinds(self) -> list[str]:
        """The boundaries' kinds, in order of arrival."""
        return [boundary.kind.value for boundary in self.boundaries]

    def story(self) -> list[str]:
        """Requests and boundaries in the order in which they were made, e.g. `request planner`, `turn_end planner`."""
        lines = []
        for arrival in sorted(self.arrivals, key=lambda arrival: arrival.at_s):
            if isinstance(arrival, Event):
                lines.append(f"{arrival.boundary.kind.value} {arrival.boundary.agent or ''}".strip())
            else:
                lines.append(f"request {arrival.agent or ''}".strip())
        return lines

    def described(self, session_id: str | None = None) -> list[str]:
        """Requests and boundaries as in `story`, of one session, with ids: `request worker worker#1 of lead`."""
        lines = []
        for arrival in sorted(self.arrivals, key=lambda arrival: arrival.at_s):
            if isinstance(arrival, Event):
                event = arrival.boundary
                what, session, names = event.kind.value, event.session_id, (event.agent, event.agent_id, event.parent_agent_id)
            else:
                said = arrival.lifetime
                names = (said.get("agent"), said.get("agent_id"), said.get("parent_agent_id"))
                what, session = "request", arrival.session_id
            if session_id in (None, session):
                agent, agent_id, parent = names
                lines.append(" ".join(filter(None, [what, agent, agent_id, f"of {parent}" if parent else None])))
        return numbered(lines)

    def wait_for_requests(self, count: int, timeout_s: float = 10.0) -> None:
        """Block until so many requests to the model have arrived."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.requests) < count:
            if time.monotonic() > deadline_s:
                raise AssertionError(f"{len(self.requests)} of {count} requests after {timeout_s} s")
            time.sleep(0.01)

    # -- what it answers -------------------------------------------------------------------

    async def _take_boundaries(self, request: Request) -> JSONResponse:
        body = await request.json()
        events = [Boundary.model_validate(event) for event in (body if isinstance(body, list) else [body])]
        self.arrivals.extend(map(Event, events))
        return JSONResponse({"outcomes": [{"message_id": e.message_id, "status": "accepted"} for e in events]}, 202)

    async def _next(self, request: Request) -> tuple[ModelRequest, Answer]:
        arrived = ModelRequest(dict(request.headers), await request.json(), time.time())
        self.arrivals.append(arrived)
        scripted = self.answers.popleft() if self.answers else Answer()
        answer = scripted if self.respond is None else self.respond(arrived)
        await asyncio.sleep(answer.delay_s)
        return arrived, answer

    async def _complete(self, request: Request) -> Response:
        arrived, answer = await self._next(request)
        if answer.status != 200:
            return JSONResponse({"error": {"message": f"told to answer {answer.status}", "code": answer.status}}, answer.status)
        tool_calls = [
            {"id": f"call-{next(self._ids)}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in answer.tool_calls
        ]
        head = {"id": f"chatcmpl-{next(self._ids)}", "created": int(time.time()), "model": MODEL}
        finish = "tool_calls" if tool_calls else "stop"
        usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
        if arrived.body.get("stream"):
            return StreamingResponse(_stream(head, answer.text, tool_calls, finish, usage), media_type="text/event-stream")
        message = {"role": "assistant", "content": answer.text or None} | ({"tool_calls": tool_calls} if tool_calls else {})
        choice = {"index": 0, "finish_reason": finish, "message": message}
        return JSONResponse({**head, "object": "chat.completion", "choices": [choice], "usage": usage})

    async def _respond(self, request: Request) -> Response:
        """The Responses API: text only, not streamed."""
        _, answer = await self._next(request)
        if answer.status != 200:
            return JSONResponse({"error": {"message": f"told to answer {answer.status}", "code": answer.status}}, answer.status)
        text = {"type": "output_text", "text": answer.text, "annotations": []}
        message = {"id": "msg-1", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        return JSONResponse(
            {
                "id": f"resp-{next(self._ids)}",
                "object": "response",
                "created_at": time.time(),
                "status": "completed",
                "model": MODEL,
                "output": [message],
                "tools": [],
                "tool_choice": "auto",
                "parallel_tool_calls": True,
                "usage": {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12, **details},
            }
        )

    # -- life ------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Listen on a port that the system chooses."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self.app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + 10
        while not server.started:
            if time.monotonic() > deadline_s:
                raise AssertionError("the recorder did not start")
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening."""
        assert self._server is not None and self._thread is not None
        self._server.should_exit = True
        self._thread.join(10)


def numbered(lines: list[str]) -> list[str]:
    """Lines with the random ends of ids, eight hexadecimal digits, numbered by their first appearance: `worker#1`."""
    numbers: dict[str, str] = {}
    return [re.sub(r"-[0-9a-f]{8}\b", lambda match: numbers.setdefault(match[0], f"#{len(numbers) + 1}"), line) for line in lines]


async def _stream(
    head: Mapping[str, Any], text: str, tool_calls: list[dict[str, Any]], finish: str, usage: Mapping[str, Any]
) -> AsyncIterator[str]:
    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        return f"data: {json.dumps({**head, 'object': 'chat.completion.chunk', 'choices': choices, **more})}\n\n"

    def delta(part: dict[str, Any], finish_reason: str | None = None) -> str:
        return chunk([{"index": 0, "delta": part, "finish_reason": finish_reason}])

    yield delta({"role": "assistant", "content": ""})
    for word in text.split():
        yield delta({"content": f"{word} "})
    for index, call in enumerate(tool_calls):
        yield delta({"tool_calls": [{"index": index, **call}]})
    yield delta({}, finish)
    yield chunk([], usage=usage)
    yield "data: [DONE]\n\n"
