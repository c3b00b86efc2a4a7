# SPDX-License-Identifier: Apache-2.0
"""The adapters' tests, each in its framework's own environment (no vLLM, no torch), against one real server."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_servers import Servers

from benchmarks.server import VllmServer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from harness_server import SERVER_ARGS, SERVER_ENV, SERVER_URL_VARIABLE  # noqa: E402

ENVIRONMENTS = {
    ".venv-harness": (
        "test_openai_agents.py",
        "test_langchain.py",
        "test_naming.py",
        "test_autogen.py",
        "test_autogen_ends.py",
        "test_conversation.py",
        "test_otel_autogen.py",
        "test_claude_code_cli.py",
    ),
    ".venv-harness-crewai": ("test_crewai.py", "test_crewai_ends.py"),
}
"""What needs a framework; the rest of tests/harness runs beside everything else."""

TIMEOUT_S = 500


def run_tests(environment: str, server_url: str, *options: str) -> subprocess.CompletedProcess[str] | None:
    """Run an environment's tests; None if it has not been made."""
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        return None
    files = [str(Path("tests", "harness", name)) for name in ENVIRONMENTS[environment]]
    env = {**os.environ, SERVER_URL_VARIABLE: server_url}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def results(
    servers: Servers, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[subprocess.CompletedProcess[str] | None]]:
    """What became of each environment's tests, on a server with room for the prompts of agent frameworks.

    The environments run side by side, but for the tests that count the server's boundaries.
    """
    servers.stop()
    log_path = tmp_path_factory.mktemp("harness") / "server.log"
    server = VllmServer(model, log_path=log_path, args=SERVER_ARGS, env=SERVER_ENV, connector={})
    with server, ThreadPoolExecutor(len(ENVIRONMENTS)) as threads:
        running = {name: threads.submit(run_tests, name, server.base_url, "-m", "not e2e") for name in ENVIRONMENTS}
        finished = {name: [each.result()] for name, each in running.items()}
        for name, runs in finished.items():
            runs.append(run_tests(name, server.base_url, "-m", "e2e"))
        return finished


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_adapter_reports_other_boundaries(
    environment: str, results: dict[str, list[subprocess.CompletedProcess[str] | None]]
) -> None:
    """Every adapter with its real framework, its boundaries counted by a real server."""
    for done in results[environment]:
        if done is None:
            pytest.skip(f"no {environment}: make harness-venvs")
        print(done.stdout[-6000:], done.stderr[-2000:])
        assert done.returncode == 0, done.stdout[-6000:]
        assert " passed" in done.stdout
