# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that stands in for a lifetime server: it can be slow, broken, strict, stopped and started again."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from vllm_lifetime.boundaries import Boundary


class FakeLifetimeServer:
    """Answers `POST /lifetime/v1/boundaries` as told, and remembers what it took."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.delay_s = 0.0
        self.statuses: list[int] = []
        """Statuses of the next answers; 202 when none is left."""
        self.is_wrong: Callable[[dict[str, Any]], bool] = lambda event: False
        """Which events make their whole list a 422."""
        self.is_rejected: Callable[[dict[str, Any]], bool] = lambda event: False
        self.is_async = False
        """Whether it knows `Prefer: respond-async`."""
        self.preferences: list[str | None] = []
        self.requests = 0
        self.batches: list[list[dict[str, Any]]] = []
        """Lists of events that were taken."""
        self.app = FastAPI()
        self.app.post("/lifetime/v1/boundaries")(self._answer)
        self.port = 0
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch]

    async def _answer(self, request: Request) -> JSONResponse:
        self.requests += 1
        self.preferences.append(request.headers.get("prefer"))
        body = await request.json()
        await asyncio.sleep(self.delay_s)
        status = self.statuses.pop(0) if self.statuses else 202
        if self.token is not None and request.headers.get("authorization") != f"Bearer {self.token}":
            status = 401
        if status != 202:
            return JSONResponse({"detail": f"told to answer {status}"}, status)
        events = body if isinstance(body, list) else [body]
        try:
            if any(self.is_wrong(event) for event in events):
                raise ValueError("an event is wrong")
            for event in events:
                Boundary.model_validate(event)
        except (ValidationError, ValueError) as error:
            return JSONResponse({"detail": str(error)}, 422)
        self.batches.append(events)
        if self.is_async:
            queued = [{"message_id": event["message_id"], "status": "queued", "blocks": 0, "bytes": 0} for event in events]
            return JSONResponse({"outcomes": queued}, 202, {"preference-applied": "respond-async"})
        outcomes = [
            {"message_id": event["message_id"], "status": "rejected" if self.is_rejected(event) else "accepted"}
            for event in events
        ]
        return JSONResponse({"outcomes": outcomes}, 202)

    def start(self) -> Self:
        """Listen on a port that the system chooses; after a stop, on the same one."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(self.app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server is not None and self._server.started)
        return self

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)
            assert not self._thread.is_alive()
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


def find_dead_url() -> str:
    """Return the URL of a port where nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"
