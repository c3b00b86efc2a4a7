# SPDX-License-Identifier: Apache-2.0
"""vLLM servers as the fan-out sees them: real HTTP servers that record events, and can be killed, slow or unwell."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Annotated, Any, Self

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from kept_port import KeptPort

from vllm_lifetime.control import ControlSettings
from vllm_lifetime.control.fanout import build_fanout_app

PREFIX = "/lifetime/v1"


def await_true(holds: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Wait until `holds()`."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


class ServerThread:
    """An app that listens on a port of its own, in a thread. `kill` and `start` again keep the port."""

    def __init__(self) -> None:
        self._port = KeptPort()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def build_app(self) -> FastAPI:
        """The app."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """The root."""
        return f"http://127.0.0.1:{self._port.number}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._port.close()

    def start(self) -> None:
        """Listen."""
        server = self._server = uvicorn.Server(uvicorn.Config(self.build_app(), log_level="critical"))
        listener = self._port.listener()
        self._thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        self._thread.start()
        await_true(lambda: server.started, f"something listens on {self.url}")

    def stop(self) -> None:
        """Shut down as on SIGTERM."""
        self._end(force=False)

    def kill(self) -> None:
        """Stop listening and drop every connection, answered or not."""
        self._end(force=True)

    def _end(self, *, force: bool) -> None:
        if self._server is None or self._thread is None:
            return
        self._server.force_exit = force
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self._server = None


class FanoutServer(ServerThread):
    """The fan-out's app."""

    def __init__(self, urls: list[str], *, drain_s: float = 5.0, **more: Any) -> None:
        super().__init__()
        self._arguments = {"settings": ControlSettings(), "drain_s": drain_s, **more}
        self._urls = urls

    def build_app(self) -> FastAPI:
        """The real one."""
        return build_fanout_app(self._urls, **self._arguments)


class FakeEngine(ServerThread):
    """One server, which remembers everything."""

    def __init__(self, *, token: str | None = None, sessions: dict[str, int] | None = None) -> None:
        super().__init__()
        self.token = token
        self.sessions = dict(sessions or {})
        """Blocks held by session."""

        self.events: list[dict[str, Any]] = []
        """Every event that arrived and was not refused, again if it was sent again."""

        self.requests: list[tuple[str, str, Any]] = []
        """Method, path and JSON of every request that changes something, refused or not."""

        self.preferences: set[str | None] = set()
        """Values of the header `Prefer` of those."""

        self.hints: list[dict[str, Any]] = []
        self.delay_s = 0.0
        self.is_open = threading.Event()
        """Nothing is answered while it is not set."""
        self.is_open.set()
        self.status: int | None = None
        """Answer every change with this status instead."""

        self.retry_after: str | None = None
        self.spoilt: set[str] = set()
        """Message ids that make a whole request a 422."""

        self.forget_answers = 0
        """So many requests are carried out but answered 500."""

        self.health_status = "ok"

    @property
    def message_ids(self) -> list[str]:
        """Of the events, each once, in the order of their first arrival."""
        return list(dict.fromkeys(event["message_id"] for event in self.events))

    def build_app(self) -> FastAPI:
        """The routes that the fan-out uses."""
        app = FastAPI()

        @app.middleware("http")
        async def unwell(request: Request, call_next: Any) -> Any:
            if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
                return JSONResponse({"detail": "The token is not valid here."}, 401)
            if request.method != "GET":
                body = await request.json() if await request.body() else None
                self.preferences.add(request.headers.get("prefer"))
                self.requests.append((request.method, str(request.url).removeprefix(self.url), body))
                await self._pause()
                if self.status is not None:
                    headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
                    return JSONResponse({"detail": "unwell"}, self.status, headers)
            else:
                await self._pause()
            return await call_next(request)

        @app.post(f"{PREFIX}/boundaries")
        async def boundaries(request: Request) -> Response:
            body = await request.json()
            events = body if isinstance(body, list) else [body]
            for index, event in enumerate(events):
                if event["message_id"] in self.spoilt:
                    error = {"loc": ["body", index, "kind"], "msg": "unknown kind", "type": "enum"}
                    return JSONResponse({"detail": [error]}, 422)
            outcomes = [self._outcome(event) for event in events]
            if self.forget_answers:
                self.forget_answers -= 1
                return JSONResponse({"detail": "forgotten"}, 500)
            return JSONResponse({"outcomes": outcomes}, 202)

        @app.post(f"{PREFIX}/hints")
        async def hints(request: Request) -> Response:
            body = await request.json()
            self.hints.append(body)
            done = {"status": "accepted", "blocks": 2, "bytes": 20}
            outcomes = [{"action_id": action["action_id"], **done} for action in body["actions"]]
            return JSONResponse({"message_id": body["message_id"], "outcomes": outcomes})

        @app.get(f"{PREFIX}/tiers")
        async def tiers() -> dict[str, Any]:
            engine = {"tiers": {"hbm": {"capacity_blocks": 100, "used_blocks": sum(self.sessions.values())}}}
            return engine | {"engines": [engine]}

        @app.get(f"{PREFIX}/sessions")
        async def sessions(limit: Annotated[int, Query(le=500)] = 100, after: str | None = None) -> dict[str, Any]:
            names = [name for name in sorted(self.sessions) if after is None or name > after]
            return {"sessions": [self._view(name) for name in names[:limit]], "total": len(self.sessions)}

        @app.get(f"{PREFIX}/sessions/{{session_id:path}}")
        async def session(session_id: str) -> Response:
            if session_id not in self.sessions:
                return JSONResponse({"detail": f"No engine knows the session {session_id!r}."}, 404)
            return JSONResponse(self._view(session_id) | {"agents": []})

        @app.delete(f"{PREFIX}/sessions/{{session_id:path}}")
        async def release(session_id: str) -> Response:
            if session_id not in self.sessions:
                return JSONResponse({"detail": f"No engine knows the session {session_id!r}."}, 404)
            blocks = self.sessions.pop(session_id)
            outcome = {"message_id": "delete", "status": "accepted", "blocks": blocks, "bytes": 10 * blocks}
            return JSONResponse({"outcome": outcome})

        @app.get(f"{PREFIX}/health")
        async def health() -> Response:
            body = {"status": self.health_status, "oldest_io_s": 0.5, "deadline_s": 10.0, "flash_faults": 1}
            return JSONResponse(body, 200 if self.health_status == "ok" else 503)

        return app

    async def _pause(self) -> None:
        await asyncio.sleep(self.delay_s)
        while not self.is_open.is_set():
            await asyncio.sleep(0.01)

    def _outcome(self, event: dict[str, Any]) -> dict[str, Any]:
        message_id = event["message_id"]
        is_known = message_id in self.message_ids
        self.events.append(event)
        if is_known:
            return {"message_id": message_id, "status": "duplicate", "reason": "already accepted", "blocks": 0, "bytes": 0}
        blocks = self.sessions.get(event.get("session_id") or "", 0)
        if not blocks:
            return {"message_id": message_id, "status": "ignored", "reason": "holds nothing here", "blocks": 0, "bytes": 0}
        return {"message_id": message_id, "status": "accepted", "blocks": blocks, "bytes": 10 * blocks}

    def _view(self, name: str) -> dict[str, Any]:
        blocks = self.sessions[name]
        return {
            "session_id": name,
            "workflow_ids": [name],
            "state": "active",
            "generation": 0,
            "running_requests": 1,
            "idle_s": 1.0,
            "held": {"hbm": {"blocks": blocks, "private_blocks": blocks, "bytes": 10 * blocks, "private_bytes": 10 * blocks}},
        }
