# SPDX-License-Identifier: Apache-2.0
"""A real HTTP server that stands in for a lifetime server: it can be slow, broken, strict, stopped and started again."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from kept_port import KeptPort
from pydantic import ValidationError

from vllm_lifetime.boundaries import Boundary


class FakeLifetimeServer:
    """Answers `POST /lifetime/v1/boundaries` as told, and remembers what it took."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        self.delay_s = 0.0
        self.is_open = threading.Event()
        """Nothing is answered while it is not set."""
        self.is_open.set()
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
        self._port = KeptPort()
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port.number}"

    @property
    def events(self) -> list[dict[str, Any]]:
        return [event for batch in self.batches for event in batch]

    async def _answer(self, request: Request) -> JSONResponse:
        self.requests += 1
        self.preferences.append(request.headers.get("prefer"))
        body = await request.json()
        await asyncio.sleep(self.delay_s)
        while not self.is_open.is_set():
            await asyncio.sleep(0.01)
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
        """Listen on a port that the system chose; after a stop, on the same one."""
        config = uvicorn.Config(self.app, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._port.listener()]}, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server is not None and self._server.started)
        return self

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(60)
            assert not self._thread.is_alive()
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._port.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for what may take a loaded machine long, and never happens if something is wrong."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.005)


_dead_ports: list[KeptPort] = []


def find_dead_url() -> str:
    """Return the URL of a port where nobody listens, and nobody will while this process lives."""
    _dead_ports.append(KeptPort())
    return f"http://127.0.0.1:{_dead_ports[-1].number}"
