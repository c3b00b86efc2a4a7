# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from vllm_lifetime.cli import hooks
from vllm_lifetime.harness.claude_code import build_hooks, merge_hooks


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    app = typer.Typer()
    hooks.add_to(app)
    return CliRunner().invoke(app, ["hooks", "claude-code", *arguments], env={"VLLM_LIFETIME_URL": None, **(env or {})})


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "settings.json"
    path.write_text('{"model": "opüs", "hooks": {"Stop": [{"hooks": [{"type": "command", "command": "say"}]}]}}')
    path.chmod(0o640)
    return path


def test_the_hooks_are_printed_as_a_block_of_settings() -> None:
    result = run()
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"hooks": build_hooks("http://localhost:8000")}
    assert result.stdout.endswith("}\n")


@pytest.mark.parametrize(
    ("arguments", "env"),
    [
        (("--url", "https://gpu/"), {}),
        (("--url", "https://gpu/v1"), {}),
        ((), {"VLLM_LIFETIME_URL": "https://gpu"}),
    ],
)
def test_the_server_is_the_one_named(arguments: tuple[str, ...], env: dict[str, str]) -> None:
    result = run(*arguments, env=env)
    assert json.loads(result.stdout) == {"hooks": build_hooks("https://gpu")}


def test_without_write_the_merged_settings_are_only_printed(settings: Path) -> None:
    before = settings.read_bytes()
    result = run("--settings", str(settings))
    assert json.loads(result.stdout) == merge_hooks(json.loads(before), "http://localhost:8000")
    assert settings.read_bytes() == before
    assert list(settings.parent.iterdir()) == [settings]


def test_writing_keeps_a_copy_the_mode_and_what_was_there(settings: Path) -> None:
    before = settings.read_bytes()
    result = run("--settings", str(settings), "--write")
    assert result.exit_code == 0
    assert "settings.json.bak" in result.stdout
    assert json.loads(settings.read_text()) == merge_hooks(json.loads(before), "http://localhost:8000")
    assert "opüs" in settings.read_text()
    assert settings.stat().st_mode & 0o777 == 0o640
    assert settings.with_name("settings.json.bak").read_bytes() == before


def test_writing_again_changes_nothing_and_no_copy_is_overwritten(settings: Path) -> None:
    first = settings.read_bytes()
    run("--settings", str(settings), "--write")
    second = settings.read_bytes()
    assert "already" in run("--settings", str(settings), "--write").stdout
    assert settings.read_bytes() == second
    run("--settings", str(settings), "--write", "--url", "http://other:1")
    assert settings.with_name("settings.json.bak").read_bytes() == first
    assert settings.with_name("settings.json.bak.1").read_bytes() == second
    assert len(list(settings.parent.iterdir())) == 3


def test_settings_that_are_not_there_yet_are_made(tmp_path: Path) -> None:
    path = tmp_path / "project" / ".claude" / "settings.json"
    result = run("--settings", str(path), "--write")
    assert result.exit_code == 0
    assert json.loads(path.read_text()) == {"hooks": build_hooks("http://localhost:8000")}
    assert list(path.parent.iterdir()) == [path]


def test_a_linked_settings_file_stays_a_link(settings: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(settings)
    assert run("--settings", str(link), "--write").exit_code == 0
    assert link.is_symlink()
    assert "SessionEnd" in settings.read_text()


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"hooks": []}', b"\xff", b"// comment\n{}"])
def test_a_file_that_is_no_settings_is_left_alone(settings: Path, content: bytes) -> None:
    settings.write_bytes(content)
    result = run("--settings", str(settings), "--write")
    assert result.exit_code == 2
    assert str(settings) in result.output and "nothing was changed" in result.output
    assert settings.read_bytes() == content
    assert list(settings.parent.iterdir()) == [settings]


def test_a_place_that_cannot_be_written_is_an_error(settings: Path) -> None:
    result = run("--settings", str(settings / "below-a-file.json"), "--write")
    assert result.exit_code == 2
    assert "nothing was changed" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--url", "localhost:8000"), "not a URL"), (("--write",), "--settings"), (("--url", "ftp://x"), "not a URL")],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], said: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert said in result.output
