# SPDX-License-Identifier: Apache-2.0
"""The adapters' tests, each in its framework's own environment (no vLLM, no torch), against one real server."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_servers import Servers

from benchmarks.server import VllmServer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from harness_server import SERVER_ARGS, SERVER_ENV, SERVER_URL_VARIABLE  # noqa: E402

ENVIRONMENTS = (".venv-harness", ".venv-harness-crewai")
TIMEOUT_S = 400


@pytest.fixture(scope="module")
def server_url(servers: Servers, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with room for the prompts of agent frameworks."""
    servers.stop()
    log_path = tmp_path_factory.mktemp("harness") / "server.log"
    with VllmServer(model, log_path=log_path, args=SERVER_ARGS, env=SERVER_ENV, connector={}) as server:
        yield server.base_url


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_adapter_reports_other_boundaries(environment: str, server_url: str) -> None:
    """Everything of tests/harness that needs a framework of this environment."""
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no {environment}: make harness-venvs")
    # The framework's telemetry is off, and nothing of it is left in the user's home.
    env = {**os.environ, SERVER_URL_VARIABLE: server_url}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/harness"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
