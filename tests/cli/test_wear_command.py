# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime wear`: from files, from a server, and what it says when there is nothing to say."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from vllm_lifetime.cli import wear as wear_command
from vllm_lifetime.cli.wear import find_ledgers, format_age
from vllm_lifetime.flash import FlashDevice, FlashGeometry, WearOptions

GEOMETRY = FlashGeometry(
    model="m", dtype="float32", block_size_tokens=16, num_layers=1, slot_bytes=8192, hash_algorithm="sha256", hash_seed="0"
)
RUNNER = CliRunner()


def run(*arguments: str) -> Any:
    app = typer.Typer()

    @app.callback()
    def root() -> None:
        """One command of several, as in the real program."""

    wear_command.add_to(app)
    return RUNNER.invoke(app, ["wear", *arguments])


@pytest.fixture
def flash(tmp_path: Path) -> Path:
    """A flash file to which a lead has written two blocks and a worker one."""
    path = tmp_path / "flash.kv"
    device = FlashDevice.open(path, GEOMETRY, size_bytes=1 << 20, persist=True, wear=WearOptions(endurance_cycles=3000))
    for slot, segment_class in enumerate(("lead", "lead", "worker")):
        device.write(slot, bytes([slot + 1]) * 32, [np.ones(8192, np.uint8)], segment_class)
    device.close()
    return path


@pytest.mark.parametrize("suffix", ["", ".wear"])
def test_a_file(flash: Path, suffix: str) -> None:
    result = run(f"{flash}{suffix}")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert "flash.kv:" in result.stdout
    (lead,) = [line.split() for line in lines if line.split()[:1] == ["lead"]]
    assert lead[1:3] == ["16.0", "KiB"]
    (worker,) = [line.split() for line in lines if line.split()[:1] == ["worker"]]
    assert worker[1:3] == ["8.0", "KiB"]
    assert "overhead" in result.stdout and "device-years" in result.stdout
    assert "3,000 cycles x 1.0 MiB" in result.stdout


def test_json(flash: Path) -> None:
    answer = json.loads(run("--json", str(flash)).stdout)
    (figures,) = answer["wear"]
    assert figures["written_bytes"]["lead"] == {"demotion": 16384}
    assert figures["payload_bytes"] == 3 * 8192
    assert answer["flash_writes"] is None


def test_the_ledgers_of_all_ranks(flash: Path) -> None:
    content = Path(f"{flash}.wear").read_bytes()
    Path(f"{flash}.wear").unlink()
    ranks = [flash.with_name(f"flash.kv.dp0-rank{rank}.wear") for rank in (0, 1)]
    for rank in ranks:
        rank.write_bytes(content)
    assert find_ledgers(flash) == ranks
    assert len(json.loads(run("--json", str(flash)).stdout)["wear"]) == 2
    Path(f"{flash}.wear").write_bytes(content)
    assert find_ledgers(flash) == [Path(f"{flash}.wear"), *ranks], "the first engine's file has the plain name"


def test_no_ledger_and_a_damaged_one(flash: Path, tmp_path: Path) -> None:
    result = run(str(tmp_path / "none.kv"))
    assert (result.exit_code, "there is no ledger beside it" in result.stderr) == (2, True)
    Path(f"{flash}.wear").write_bytes(b"junk")
    result = run(str(flash))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: The wear ledger") and result.stderr.count("\n") == 1


def tiers_answer(flash: Path, **writes: Any) -> dict[str, Any]:
    """What a server with this flash file says."""
    wear = json.loads(run("--json", str(flash)).stdout)["wear"]
    state = {"placement": "lachesis", **writes}
    engine = {"tiers": {}, "wear": wear, "flash_writes": state}
    return {"tiers": {}, "wear": wear, "engines": [engine]}


def answering(monkeypatch: pytest.MonkeyPatch, status: int, content: bytes) -> list[str]:
    asked = []

    def get(url: str, **_: Any) -> httpx.Response:
        asked.append(url)
        return httpx.Response(status, content=content)

    monkeypatch.setattr(httpx, "get", get)
    return asked


def test_a_server(flash: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = tiers_answer(
        flash, bytes_per_day=1 << 30, available_bytes=0, is_throttled=True, refused_blocks={"reviewer": {"placement": 7}}
    )
    asked = answering(monkeypatch, 200, json.dumps(answer).encode())
    result = run("--url", "http://host:1/")
    run("--url", "http://host:1/v1/")
    assert asked == ["http://host:1/lifetime/v1/tiers"] * 2, "also of the URL that an OpenAI client has"
    assert result.exit_code == 0
    assert "placement lachesis, 7 blocks refused; budget 1.0 GiB a day: used up for now, nothing is written." in result.stdout
    assert "lead" in result.stdout


@pytest.mark.parametrize(
    "status,content,text",
    [
        (404, b"", "was it started with --kv-connector lifetime?"),
        (401, b"who are you", "401 who are you"),
        (200, b"[1]", "answered what is no state of tiers"),
        (200, b"not json", "answered what is no state of tiers"),
    ],
)
def test_a_server_that_has_no_answer(monkeypatch: pytest.MonkeyPatch, status: int, content: bytes, text: str) -> None:
    answering(monkeypatch, status, content)
    result = run("--url", "http://host:1")
    assert result.exit_code == 1
    assert text in result.stderr


def test_no_server() -> None:
    result = run("--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "no answer from http://127.0.0.1:9/lifetime/v1/tiers" in result.stderr


@pytest.mark.parametrize("url", ["nonsense", "", "http://[::1", "ftp://host"])
def test_what_is_no_url_is_bad_input(url: str) -> None:
    result = run("--url", url)
    assert result.exit_code == 2
    assert "not a URL of a server" in result.stderr


def test_a_server_without_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, 200, b'{"tiers": {}, "engines": [{"tiers": {}}]}')
    result = run("--url", "http://host:1")
    assert (result.exit_code, result.stdout.strip()) == (0, "This server has no flash tier that keeps a wear ledger.")


def test_ages() -> None:
    assert [format_age(s) for s in (5, 119, 240, 7200, 200_000)] == ["5 s", "119 s", "4.0 minutes", "2.0 hours", "2.3 days"]
