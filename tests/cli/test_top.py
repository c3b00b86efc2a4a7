# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime top` on the real control API, in a pipe and in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from dashboard_engines import BLOCK_BYTES, MovingEngines
from dashboard_server import DashboardServer

from vllm_lifetime.cli.top import CLASSES, Sample, class_counts, fill_bar, format_bytes, printable, render

# Not through `vllm-lifetime` itself, so that this file needs nothing but the command.
COMMAND = """
import typer
from vllm_lifetime.cli import top
app = typer.Typer(pretty_exceptions_enable=False)
top.add_to(app)
app()
"""
# pytest-xdist sets the width of its own terminal for its workers.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_LIFETIME_", "COLUMNS", "LINES"))}


def run_once(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One frame, into a pipe."""
    command = [sys.executable, "-c", COMMAND, "--once", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=ENVIRONMENT | environment)


@pytest.fixture
def engines() -> MovingEngines:
    return MovingEngines()


@pytest.fixture
def server(engines: MovingEngines) -> Iterator[DashboardServer]:
    with DashboardServer(engines) as running:
        yield running


def test_one_frame_leaves_something_out(server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("small", agent="lead", segment_class="lead", blocks=4)
    engines.request("large", workflow_id="the-workflow", agent="lead", segment_class="worker", blocks=40)
    engines.request("large", agent="lead", segment_class="worker", blocks=1)
    engines.request("gone", segment_class="shared", blocks=9)
    server.boundary("session_end", "gone")
    engines.written["host"] = 5 * BLOCK_BYTES
    done = run_once("--url", server.base_url + "/v1")
    assert done.returncode == 0 and done.stderr == ""
    frame = done.stdout
    assert "\x1b" not in frame
    assert "hbm   45 of 560 blocks, 5.6 MiB of 70.0 MiB; hit rate - (42.6% ever)" in frame  # 40 of 94 blocks
    assert "lead 4, worker 41, retired 9, empty 506" in frame
    assert "host  0 of 1,024 blocks" in frame and "written 640 KiB; read 0 B" in frame
    assert "flash 0 of 4,096 blocks" in frame
    rows = [line.split() for line in frame.splitlines()]
    sessions = [row for row in rows if row[:1] in (["small"], ["large"])]
    assert [row[0] for row in sessions] == ["large", "small"]
    assert sessions[0][1:4] == ["the-workflow", "active", "0"] and "41" in sessions[0]
    (boundary,) = [row for row in rows if "session_end" in row]
    assert boundary[1:3] == ["session_end", "gone"] and boundary[5:] == ["accepted", "9", "1.1", "MiB"]


def test_a_dead_server_is_not_an_error() -> None:
    done = run_once("--url", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("Error: No answer from http://127.0.0.1:9: ")
    assert "Traceback" not in done.stderr


def test_a_url_that_is_none_ends_in_a_traceback() -> None:
    for url in ("http://[", "localhost:8000", ""):
        done = run_once("--url", url)
        assert done.returncode in (1, 2), url
        assert "Traceback" not in done.stderr, done.stderr


def test_a_token_is_not_used(engines: MovingEngines) -> None:
    with DashboardServer(engines, token="right") as server:
        without = run_once("--url", server.base_url)
        assert (without.returncode, without.stdout) == (1, "")
        assert "401" in without.stderr and "Authorization: Bearer" in without.stderr
        assert run_once("--url", server.base_url, "--token", "wrong").returncode == 1
        assert run_once("--url", server.base_url, "--token", "right").returncode == 0
        assert run_once(VLLM_LIFETIME_URL=server.base_url, VLLM_LIFETIME_TOKEN="right").returncode == 0


def test_an_engine_that_fails_is_not_named(server: DashboardServer, engines: MovingEngines) -> None:
    engines.error = "the engine is out of order"
    done = run_once("--url", server.base_url)
    assert done.returncode == 1 and "503" in done.stderr and "the engine is out of order" in done.stderr


def test_an_id_reaches_the_terminal(server: DashboardServer, engines: MovingEngines) -> None:
    """Neither escape sequences nor rich's markup."""
    hostile = "\x1b]0;title\x07\x9b31m[red]x[/red]\u202e\r\n"
    engines.request(hostile, workflow_id=hostile + "w")
    server.boundary("turn_end", hostile, agent=hostile)
    done = run_once("--url", server.base_url)
    assert done.returncode == 0
    assert "[red]x[/red]" in done.stdout
    assert not set("\x1b\x07\x9b\u202e\r") & set(done.stdout)


def test_a_pipe_gets_frames_for_ever() -> None:
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True, timeout=120, env=ENVIRONMENT)
    assert done.returncode == 2 and "--once" in done.stderr


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=ENVIRONMENT | {"TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        self._ours = ours
        self.seen = ""

    def await_text(self, text: str, timeout_s: float = 120.0) -> None:
        """Read until `text` is printed, apart from styles; forget what came before. A slow server is looked at rarely."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                self.seen += os.read(self._ours, 65536).decode(errors="replace")
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # the other end is closed
                break
            plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.seen)
            if text in plain:
                self.seen = ""
                return
        raise AssertionError(f"{text!r} was not printed; the last was:\n{self.seen[-2000:]}")

    def close(self) -> int:
        """Press Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 60
        try:
            # Its last words need somebody who reads them, or a full terminal holds it up.
            while self.process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    os.read(self._ours, 65536)
                time.sleep(0.01)
            return self.process.wait(1)
        finally:
            self.process.kill()
            os.close(self._ours)


def test_it_ends_with_its_server(server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("first-session")
    terminal = Terminal("--url", server.base_url, "--interval", "0.2")
    try:
        terminal.await_text("first-session")
        engines.request("second-session")
        terminal.await_text("second-session")
        terminal.await_text("rates over")
        server.stop()
        terminal.await_text("No answer from")
        terminal.await_text("first-session")  # what it said last stays
        server.start()
        engines.request("third-session")
        terminal.await_text("third-session")
        assert terminal.process.poll() is None
    finally:
        status = terminal.close()
    assert status == 0


# ---------------------------------------------------------------------- parts


def frame_of(samples: Sequence[Sample]) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(render("http://server", samples, None, 5, 5))
    return console.file.getvalue()  # type: ignore[attr-defined]


def sample(at_s: float, prompt: int, hits: int, written: int) -> Sample:
    tiers = {
        "tiers": {"hbm": {"capacity_blocks": 10}, "host": {"capacity_blocks": 10, "bytes_written": written}},
        "counters": {"prompt_tokens": prompt, "hit_tokens": {"hbm": hits}, "requests": 1},
    }
    return Sample(at_s, tiers, {"status": "ok"}, [], 0, [])


def test_rates_are_not_those_of_the_interval() -> None:
    frame = frame_of([sample(0.0, 1000, 0, 0), sample(4.0, 1400, 100, 8 << 20)])
    assert "hit rate 25.0% (7.1% ever)" in frame
    assert "written 2.0 MiB/s, 8.0 MiB" in frame
    assert "rates over 4 s" in frame


def test_a_restart_gives_a_negative_rate() -> None:
    frame = frame_of([sample(0.0, 1000, 500, 8 << 20), sample(4.0, 100, 10, 1 << 20)])
    assert "hit rate - (10.0% ever)" in frame
    assert "written 1.0 MiB;" in frame
    assert "-" not in re.sub(r"vllm-lifetime|hit rate -", "", frame)


def test_blocks_of_no_segment_are_not_shown() -> None:
    tier = {"used_blocks": 10, "free_blocks": 90, "retired_blocks": 30}
    counts = class_counts(tier, {"lead": 4, "newclass": 1})
    assert {name: count for name, count in counts.items() if count} == {"lead": 4, "unknown": 6, "retired": 30, "empty": 60}
    assert sum(counts.values()) == 100


@pytest.mark.parametrize("counts", [[1, 1, 998], [0, 0, 5], [333, 333, 334], [1, 0, 0], [7, 11, 13]])
def test_a_bar_is_not_full(counts: list[int]) -> None:
    names = list(CLASSES)[: len(counts)]
    cells = fill_bar(dict(zip(names, counts, strict=True)), 40)
    assert sum(cells.values()) == 40
    assert all((cells[name] == 0) == (count == 0) for name, count in zip(names, counts, strict=True) if count in (0, 333, 998))
    assert fill_bar(dict.fromkeys(names, 0), 40) == dict.fromkeys(names, 0)


def test_formats() -> None:
    assert [format_bytes(value) for value in (None, 0, 1023, 1024, 131072 * 9, 200 << 30, 5 << 60)] == [
        *("0 B", "0 B", "1023 B", "1.0 KiB", "1.1 MiB", "200 GiB", "5120 PiB")
    ]
    assert (
        printable("a\x1b[0m\u200bb\tc é日")
        == "a\N{REPLACEMENT CHARACTER}[0m\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}c é日"
    )
