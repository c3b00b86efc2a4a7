# SPDX-License-Identifier: Apache-2.0
"""Servers that should refuse to start."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_client import SERVER_ENV

from benchmarks.server import ServerError, VllmServer

TAIL_LINES = 12
"""A reason within so many lines of the end is seen by whoever started the server."""

FORKS = Path(__file__).parent / "refusal_forks.py"
FORKS_TIMEOUT_S = 500


@dataclass(frozen=True)
class Refusal:
    """How a start ended. `lines_after` counts the log's lines behind a sentence."""

    exit_code: int
    seconds: float
    lines: tuple[str, ...]

    def says(self, sentence: str) -> bool:
        """Whether a line of the log holds `sentence`."""
        return any(sentence in line for line in self.lines)

    def lines_after(self, sentence: str) -> int:
        """Lines of the log behind the last one that holds `sentence`."""
        return min(i for i, line in enumerate(reversed(self.lines)) if sentence in line)

    def __str__(self) -> str:
        tail = "\n".join(f"  | {line[:400]}" for line in self.lines[-TAIL_LINES:])
        return f"exit code {self.exit_code} after {self.seconds:.1f} s, {len(self.lines)} lines of log:\n{tail}"


def refusal(server: VllmServer) -> Refusal:
    """Start a server that must end by itself."""
    began = time.monotonic()
    with pytest.raises(ServerError) as caught:
        try:
            server.start()
        finally:
            seconds = time.monotonic() - began
            server.stop()
    text = str(caught.value)
    assert "ended with exit code" in text, text
    code = int(text.split("ended with exit code ")[1].split(".")[0])
    return Refusal(code, seconds, _read_lines(server))


def early_refusals(servers: Mapping[str, VllmServer]) -> dict[str, Refusal | None]:
    """Start servers that must end by themselves before they start a process; None for one that goes on.

    They share one import of vLLM, which is nearly all that such a start costs.
    """
    runs = {}
    for case, server in servers.items():
        command = server.command()
        runs[case] = (command[command.index("serve") :], str(server.log_path))
    done = subprocess.run(
        [sys.executable, str(FORKS)],
        env=os.environ | SERVER_ENV | {"VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"},
        input=json.dumps(runs),
        capture_output=True,
        text=True,
        timeout=FORKS_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stdout.splitlines()[-1])
    return {
        case: None if code is None else Refusal(code, seconds, _read_lines(servers[case]))
        for case, (code, seconds) in ends.items()
    }


def _read_lines(server: VllmServer) -> tuple[str, ...]:
    return tuple(line for line in server.log_path.read_text(errors="replace").splitlines() if line.strip())
