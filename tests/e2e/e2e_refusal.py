# SPDX-License-Identifier: Apache-2.0
"""A server that should refuse to start."""

import time
from dataclasses import dataclass

import pytest

from benchmarks.server import ServerError, VllmServer

TAIL_LINES = 12
"""A reason within so many lines of the end is seen by whoever started the server."""


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
    lines = tuple(line for line in server.log_path.read_text(errors="replace").splitlines() if line.strip())
    return Refusal(code, seconds, lines)
