# SPDX-License-Identifier: Apache-2.0
"""A fake of the engines behind the control API, and ways to ask the API over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from vllm_lifetime.control import ControlService, ControlSettings, build_router, direct
from vllm_lifetime.control.auth import Guard
from vllm_lifetime.control.routes import BOUNDARIES_PATH

API = "/lifetime/v1"
is_direct = False
"""Whether the apps of `build_app` answer boundaries before their middlewares, as on vLLM's app. The fixture `way` sets it."""

TURN_END = {"message_id": "m1", "kind": "turn_end", "session_id": "s1"}


class FakeEngines:
    """An `EnginePort` that records calls and answers for each of `count` engines."""

    def __init__(self, count: int = 1, error: Exception | None = None, delay_s: float = 0.0) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.count = count
        self.error = error
        self.delay_s = delay_s
        self.is_open = threading.Event()
        """No call ends while it is not set."""
        self.is_open.set()
        self.answers: list[Any] | None = None
        self.sessions: list[dict[str, dict[str, Any]]] = [{} for _ in range(count)]
        self.oldest_io_s = 0.0
        self.num_running = 0
        self.max_running = 0

    async def call(self, method: str, *args: Any) -> list[Any]:
        assert method == "lifetime_call"
        self.calls.append((args[0], args[1]))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await self.work()
        finally:
            self.num_running -= 1
        if self.error is not None:
            raise self.error
        if self.answers is not None:
            return self.answers
        return [self.answer(args[0], args[1], rank) for rank in range(self.count)]

    async def work(self) -> None:
        """What a call takes."""
        await asyncio.sleep(self.delay_s)
        while not self.is_open.is_set():
            await asyncio.sleep(0.01)

    def answer(self, method: str, payload: dict[str, Any], rank: int) -> dict[str, Any]:
        match method:
            case "boundaries":
                return {"outcomes": [_outcome(event["message_id"], rank) for event in payload["events"]]}
            case "hints":
                return {"outcomes": [self._hint(action, rank) for action in payload["actions"]]}
            case "release":
                return {"outcome": _outcome(payload["message_id"], rank)}
            case "tiers":
                return {
                    "tiers": {
                        "hbm": {"capacity_blocks": 10, "used_blocks": rank, "path": "x", "on": True},
                        "flash": {"capacity_blocks": 50, "oldest_io_s": 0.5 * rank, "bytes_written": 100},
                    },
                    "classes": {"hbm": {"lead": 1, "worker": rank}},
                    "counters": {"prompt_tokens": 7, "hit_tokens": {"hbm": 2, "host": 1, "flash": rank}, "requests": 1},
                }
            case "sessions":
                names = sorted(name for name in self.sessions[rank] if payload["after"] is None or name > payload["after"])
                views = [self.sessions[rank][name] for name in names[: payload["limit"]]]
                if not payload["segments"]:
                    views = [{key: value for key, value in view.items() if key != "agents"} for view in views]
                return {"sessions": views, "total": len(self.sessions[rank])}
            case "session":
                return {"session": self.sessions[rank].get(payload["session_id"])}
            case "health":
                return {"oldest_io_s": self.oldest_io_s, "deadline_s": 2.0, "flash_faults": rank}
        return {"error": f"no call {method!r}"}

    @staticmethod
    def _hint(action: dict[str, Any], rank: int) -> dict[str, Any]:
        if rank > 0:
            return {
                "action_id": action["action_id"],
                "status": "missing",
                "reason": "nothing of that name",
                "blocks": 0,
                "bytes": 0,
            }
        return {"action_id": action["action_id"], "status": "accepted", "reason": None, "blocks": 3, "bytes": 300}

    def events(self) -> list[dict[str, Any]]:
        """All events that the engines were sent."""
        return [event for method, payload in self.calls if method == "boundaries" for event in payload["events"]]


def _outcome(message_id: str, rank: int) -> dict[str, Any]:
    return {"message_id": message_id, "status": "accepted" if rank == 0 else "ignored", "blocks": rank}


def session_view(session_id: str | None, **changes: Any) -> dict[str, Any]:
    """A session as an engine shows it."""
    held = {"blocks": 4, "private_blocks": 2, "bytes": 400, "private_bytes": 200}
    segment = {
        "segment_id": None,
        "class": "lead",
        "closes_at": "workflow_end",
        "state": "open",
        "age_s": 2.0,
        "blocks": {"hbm": 4},
        "private_blocks": {"hbm": 2},
    }
    agent = {
        "agent": "planner",
        "agent_id": None,
        "parent_agent_id": None,
        "state": "active",
        "turn": None,
        "running_requests": 1,
        "segments": [segment],
    }
    view = {
        "session_id": session_id,
        "workflow_ids": [session_id or "w"],
        "state": "active",
        "generation": 1,
        "running_requests": 1,
        "idle_s": 1.5,
        "held": {"hbm": held},
        "last_boundary": None,
        "agents": [agent],
    }
    return view | changes


def build_app(engines: Any, timeout_s: float = 5.0, settings: ControlSettings | None = None, **options: Any) -> FastAPI:
    """The control API alone in an app."""
    settings = settings or ControlSettings()
    service = ControlService(engines, timeout_s, settings=settings, **options)
    app = FastAPI()
    app.include_router(build_router(lambda: service, settings))
    if is_direct:
        direct.mount(app, direct.build_endpoint(lambda: service, Guard(settings)), BOUNDARIES_PATH, service.hurry)
    return app


def send(app: FastAPI, method: str, path: str, *, client: tuple[str, int] = ("127.0.0.1", 123), **kwargs: Any) -> httpx.Response:
    """One request, in this process; JSON unless `headers` say otherwise."""
    if "content" in kwargs:
        kwargs["headers"] = {"content-type": "application/json"} | kwargs.get("headers", {})

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as session:
            return await session.request(method, path, **kwargs)

    return asyncio.run(request())


@contextlib.contextmanager
def serve(app: FastAPI, *, unix_socket: Path | None = None, **options: Any) -> Iterator[str]:
    """A real server of `app`, in a thread, on a port that the system chooses; gives its URL."""
    if unix_socket is None:
        listener = socket.create_server(("127.0.0.1", 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(unix_socket))
    config = uvicorn.Config(app, **{"log_level": "warning", "access_log": False} | options)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        deadline_s = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline_s, "the server did not start"
            time.sleep(0.01)
        yield "http://localhost" if unix_socket is not None else f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listener.close()
