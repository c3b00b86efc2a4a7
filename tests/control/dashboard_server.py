# SPDX-License-Identifier: Apache-2.0
"""The real control API over real HTTP, with engines that a test moves."""

from __future__ import annotations

import threading
import time
from typing import Self

import httpx
import uvicorn
from dashboard_engines import MovingEngines
from fastapi import FastAPI
from pydantic import SecretStr

from vllm_lifetime.control import ControlService, ControlSettings, build_router

START_TIMEOUT_S = 20.0
HEALTH_TIMEOUT_S = 2.0


class DashboardServer:
    """Uvicorn on a thread, on the loopback interface, as a context manager. It can be stopped and started again on its port."""

    def __init__(self, engines: MovingEngines, *, token: str | None = None, port: int = 0) -> None:
        self.engines = engines
        self.port = port
        self._settings = ControlSettings(tokens=(SecretStr(token),) if token else ())
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def start(self) -> None:
        """Return when it answers. Each start is a new run of the server: the event log begins anew."""
        app = FastAPI()
        service = ControlService(self.engines, settings=self._settings, health_timeout_s=HEALTH_TIMEOUT_S)
        app.include_router(build_router(lambda: service, self._settings))
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="warning", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("uvicorn did not start")
            time.sleep(0.01)
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        """Close every connection and end the thread."""
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join(START_TIMEOUT_S)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base_url(self) -> str:
        """The server's root."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def page_url(self) -> str:
        """Where the dashboard is."""
        return f"{self.base_url}/lifetime/v1/dashboard"

    def boundary(self, kind: str, session_id: str, **fields: object) -> dict[str, object]:
        """Post one boundary; returns its outcome."""
        event = {"message_id": f"{kind}-{time.monotonic_ns()}", "kind": kind, "session_id": session_id, **fields}
        response = httpx.post(f"{self.base_url}/lifetime/v1/boundaries", json=event, headers=self._headers)
        assert response.status_code == 202, response.text
        (outcome,) = response.json()["outcomes"]
        return dict(outcome)
