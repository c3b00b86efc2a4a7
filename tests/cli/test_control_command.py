# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime control` as a process of its own, in front of real HTTP servers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from fanout_fakes import PREFIX, FakeEngine, await_true

EVENT = {"message_id": "m1", "kind": "turn_end", "session_id": "s1"}


class Control:
    """The command, on a port that the system chose."""

    def __init__(self, *arguments: str, log: Path, **environment: str) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command(*arguments, "--port", "0"), stdout=output, stderr=output, env=clean_environment() | environment
            )

    def __enter__(self) -> Self:
        def has_started() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return self._address() is not None

        await_true(has_started, "the command listens", timeout_s=60)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def _address(self) -> str | None:
        found = re.search(r"running on (http://\S+)", self.log.read_text())
        return found and found[1]

    @property
    def url(self) -> str:
        address = self._address()
        assert address is not None
        return f"{address}{PREFIX}"

    def end(self, signum: int) -> str:
        """Send a signal, wait for the end, return the log."""
        self.process.send_signal(signum)
        self.process.wait(30)
        return self.log.read_text()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from vllm_lifetime.cli import main; main()", "control", *arguments]


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("VLLM_LIFETIME_")}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, which must come by itself."""
    whole = clean_environment() | environment
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60, env=whole)


@pytest.fixture
def engines() -> Iterator[list[FakeEngine]]:
    with FakeEngine(token="theirs") as first, FakeEngine(token="theirs") as second:
        yield [first, second]


def test_an_event_goes_through_the_command_to_every_server(engines: list[FakeEngine], tmp_path: Path) -> None:
    options = [option for engine in engines for option in ("--engine", f"{engine.url}/v1")]
    with Control(*options, log=tmp_path / "log", VLLM_LIFETIME_ENGINE_TOKEN="theirs") as control:
        response = httpx.post(f"{control.url}/boundaries", json=EVENT)
        assert response.status_code == 202, response.text
        assert response.json()["outcomes"][0]["reason"] == "holds nothing here"
        assert [engine.events for engine in engines] == [[EVENT], [EVENT]]
        health = httpx.get(f"{control.url}/health").json()
        assert [server["url"] for server in health["servers"]] == [engine.url for engine in engines]
        log = control.end(signal.SIGTERM)
    assert "theirs" not in log and "Traceback" not in log


def test_the_commands_own_token_is_asked_for(engines: list[FakeEngine], tmp_path: Path) -> None:
    tokens = {"VLLM_LIFETIME_TOKEN": "ours", "VLLM_LIFETIME_ENGINE_TOKEN": "theirs"}
    with Control("--engine", engines[0].url, log=tmp_path / "log", **tokens) as control:
        assert httpx.post(f"{control.url}/boundaries", json=EVENT).status_code == 401
        headers = {"Authorization": "Bearer ours"}
        assert httpx.post(f"{control.url}/boundaries", json=EVENT, headers=headers).status_code == 202
    assert engines[0].message_ids == ["m1"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_shutdown_says_what_is_lost(tmp_path: Path, signum: int) -> None:
    down = FakeEngine()
    with Control("--engine", down.url, "--drain", "0.5", log=tmp_path / "log") as control:
        response = httpx.post(f"{control.url}/boundaries", json=EVENT)
        assert response.json()["outcomes"][0]["reason"] == f"queued for {down.url}"
        log = control.end(signum)
    assert f"not delivered to {down.url}: 1 event(s)" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_without_a_token_it_does_not_listen_to_other_machines(host: str) -> None:
    done = run("--engine", "http://127.0.0.1:1", "--host", host)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: --host {host} ") and "VLLM_LIFETIME_TOKEN" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_a_token_it_listens_to_other_machines(tmp_path: Path) -> None:
    options = ("--engine", "http://127.0.0.1:1", "--host", "0.0.0.0")
    with Control(*options, log=tmp_path / "log", VLLM_LIFETIME_TOKEN="ours") as control:
        url = control.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/health").status_code == 401
        assert httpx.get(f"{url}/health", headers={"Authorization": "Bearer ours"}).status_code == 503


@pytest.mark.parametrize(
    ("urls", "said"),
    [
        (["localhost:8000"], "'localhost:8000' is no http:// or https:// URL"),
        (["http://me:secret@host"], "use --engine-token"),
        (["http://a:1", "http://a:1/v1"], "the same server stands there twice"),
    ],
)
def test_an_engine_that_cannot_be_meant_is_refused(urls: list[str], said: str) -> None:
    done = run(*(option for url in urls for option in ("--engine", url)))
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split()) and "secret" not in done.stderr


def test_without_an_engine_there_is_nothing_to_do() -> None:
    done = run()
    assert done.returncode == 2 and "--engine" in done.stderr


def test_it_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys\n"
        "import vllm_lifetime.cli.control, vllm_lifetime.control.fanout\n"
        "print({'torch', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr
