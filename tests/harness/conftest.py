# SPDX-License-Identifier: Apache-2.0
"""What the tests of the adapters talk to: a recorder that is told what to answer, and a real vLLM server.

The adapters' own libraries live in environments without vLLM (requirements/harness*.txt), which run these tests too; a test
that misses its library is skipped. The real server runs in `.venv`, or is the one that VLLM_LIFETIME_TEST_SERVER_URL names.
"""

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from harness_recorder import Recorder
from harness_server import SERVER_ARGS, SERVER_ENV, SERVER_LOCK_VARIABLE, SERVER_URL_VARIABLE

from benchmarks.server import Metrics, VllmServer, metric_sum, parse_metrics
from vllm_lifetime.harness import LifetimeClient

ROOT = Path(__file__).resolve().parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a vLLM server."""
    for item in items:
        if isinstance(item, pytest.Function) and "vllm_server" in item.fixturenames:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """A model server and lifetime server that is told what to answer."""
    with Recorder() as running:
        yield running


@pytest.fixture
def client(recorder: Recorder) -> Iterator[LifetimeClient]:
    """A client that reports to the recorder. Call `flush()` before looking at the recorder's boundaries."""
    with LifetimeClient(recorder.url) as running:
        yield running


@dataclass(frozen=True)
class RealServer:
    """A vLLM server with the lifetime connector and the test model."""

    url: str
    model: str = "model"

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def metrics(self) -> Metrics:
        """What `/metrics` says now."""
        return parse_metrics(httpx.get(f"{self.url}/metrics", timeout=30.0).text)

    def count_boundaries(self, kind: str, status: str | None = "accepted") -> int:
        """Boundaries of a kind that ended so, however if None, since the server's start."""
        ended = {} if status is None else {"status": status}
        return int(metric_sum(self.metrics(), "vllm:lifetime_boundaries_total", kind=kind, **ended))

    def await_boundaries(self, kind: str, count: int, status: str | None = "accepted", timeout_s: float = 60.0) -> None:
        """Wait until so many have been counted: metrics come with the engine's next step or report."""
        deadline_s = time.monotonic() + timeout_s
        while (seen := self.count_boundaries(kind, status)) < count:
            if time.monotonic() >= deadline_s:
                latest = httpx.get(f"{self.url}/lifetime/v1/events", timeout=10).json()["events"][-10:]
                pytest.fail(f"{seen} of {count} boundaries {kind} {status} after {timeout_s} s; the latest: {latest}")
            time.sleep(0.1)

    def tiers(self) -> dict[str, Any]:
        """Capacity and use by tier."""
        tiers: dict[str, Any] = httpx.get(f"{self.url}/lifetime/v1/tiers", timeout=30.0).json()["tiers"]
        return tiers


@pytest.fixture
def vllm_server(running_server: RealServer) -> Iterator[RealServer]:
    """A vLLM server with the lifetime connector, of which nobody else asks anything meanwhile."""
    with contextlib.ExitStack() as stack:
        if path := os.environ.get(SERVER_LOCK_VARIABLE):
            fcntl.flock(stack.enter_context(open(path, "a")), fcntl.LOCK_EX)
        yield running_server


@pytest.fixture(scope="session")
def running_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for the whole session."""
    if url := os.environ.get(SERVER_URL_VARIABLE):
        yield RealServer(url.rstrip("/"))
        return
    python = find_vllm_python()
    if python is None:
        pytest.skip(f"needs an environment with vLLM in .venv (make venv), or {SERVER_URL_VARIABLE}")
    model = ROOT / "build" / "test-model"
    subprocess.run([python, "-m", "scripts.make_test_model", model], cwd=ROOT, check=True, capture_output=True)
    server = _Server(python, model, tmp_path_factory.mktemp("vllm") / "server.log")
    with server:
        yield RealServer(server.base_url, server.served_name)


def find_vllm_python() -> Path | None:
    """The Python that runs vLLM: this one, else that of `.venv`."""
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    python = ROOT / ".venv" / "bin" / "python"
    return python if python.exists() else None


class _Server(VllmServer):
    """A server that runs in another environment than the tests."""

    def __init__(self, python: Path, model: Path, log_path: Path) -> None:
        super().__init__(
            model,
            log_path=log_path,
            args=SERVER_ARGS,
            env=SERVER_ENV,
            connector={},
        )
        self.python = python

    def command(self) -> list[str]:
        return [str(self.python), *super().command()[1:]]
