# SPDX-License-Identifier: Apache-2.0
"""The adapters' tests, each in its framework's own environment (no vLLM, no torch), against one real server."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_ahead import ahead
from e2e_servers import Servers

from benchmarks.server import VllmServer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "harness"))

from harness_server import SERVER_ARGS, SERVER_ENV, SERVER_LOCK_VARIABLE, SERVER_URL_VARIABLE  # noqa: E402

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


Results = dict[str, subprocess.CompletedProcess[str] | None]


def run_tests(environment: str, server_url: str, lock: Path) -> subprocess.CompletedProcess[str] | None:
    """Run an environment's tests; None if it has not been made."""
    python = ROOT / environment / "bin" / "python"
    if not python.exists():
        return None
    files = [str(Path("tests", "harness", name)) for name in ENVIRONMENTS[environment]]
    env = {**os.environ, SERVER_URL_VARIABLE: server_url, SERVER_LOCK_VARIABLE: str(lock)}
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


@ahead(num_starts=2)
def results(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What became of each environment's tests, on a server with room for the prompts of agent frameworks.

    The environments run side by side, but for the tests that count the server's boundaries.
    """
    directory = tmp_path_factory.mktemp("harness")
    server = VllmServer(servers.model, log_path=directory / "server.log", args=SERVER_ARGS, env=SERVER_ENV, connector={})
    with server, ThreadPoolExecutor(len(ENVIRONMENTS)) as threads:
        running = {name: threads.submit(run_tests, name, server.base_url, directory / "lock") for name in ENVIRONMENTS}
        return {name: each.result() for name, each in running.items()}


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_an_adapter_reports_other_boundaries(environment: str, results: Results) -> None:
    """Every adapter with its real framework, its boundaries counted by a real server."""
    done = results[environment]
    if done is None:
        pytest.skip(f"no {environment}: make harness-venvs")
    print(done.stdout[-6000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
