# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime hooks HARNESS`: the configuration by which a harness reports its boundaries by itself."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_lifetime.cli.failure import fail


def add_to(app: typer.Typer) -> None:
    """Register the commands on `app`."""
    hooks = typer.Typer(
        help="Print or install what makes a harness report its boundaries by itself.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    hooks.command("claude-code")(claude_code)
    app.add_typer(hooks, name="hooks")


def claude_code(
    url: Annotated[
        str, typer.Option(envvar="VLLM_LIFETIME_URL", help="The vLLM server's root, or that of `vllm-lifetime control`.")
    ] = "http://localhost:8000",
    settings: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings file to merge the hooks into, such as ~/.claude/settings.json.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the file, after a copy of it, rather than print it.")] = False,
) -> None:
    """Print the hooks of Claude Code's settings that report to a server, or merge them into a settings file.

    Hooks for a server that were put there earlier are replaced; everything else in the file stays.
    """
    from vllm_lifetime.harness.claude_code import SettingsError, build_hooks, merge_hooks
    from vllm_lifetime.harness.client import read_server_url

    try:
        root = str(read_server_url(url))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--url") from None
    if settings is None:
        if write:
            raise typer.BadParameter("needs --settings FILE", param_hint="--write")
        typer.echo(_to_json({"hooks": build_hooks(root)}), nl=False)
        return
    # A settings file is often a link into somebody's dotfiles: it is the file behind it that is written.
    path = settings.expanduser().resolve()
    try:
        before = _read_settings(path)
        after = merge_hooks(before or {}, root)
        if not write:
            typer.echo(_to_json(after), nl=False)
        elif after == before:
            typer.echo(f"{path} has these hooks already")
        else:
            backup = _write_settings(path, after)
            typer.echo(f"Wrote {path}" + (f"; what it was is in {backup}" if backup is not None else ""))
    except (OSError, SettingsError) as error:
        fail(f"{path}: {error}; nothing was changed")


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings in a file; none if there is no file. Raises `OSError`, and `SettingsError` for what is not settings."""
    from vllm_lifetime.harness.claude_code import SettingsError

    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise SettingsError(f"not UTF-8: {error}") from None
    if not text.strip():
        return {}
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise SettingsError("not a JSON object")
    return settings


def _write_settings(path: Path, settings: dict[str, Any]) -> Path | None:
    """Replace the file as a whole, or leave it as it is; return the copy made of it, none if there was no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    backup = _back_up(path) if path.exists() else None
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(_to_json(settings))
        if backup is not None:
            shutil.copymode(backup, temporary)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return backup


def _back_up(path: Path) -> Path:
    """Copy the file to a name beside it that is free, and return that."""
    number = 0
    while True:
        backup = path.with_name(path.name + (f".bak.{number}" if number else ".bak"))
        try:
            with open(backup, "xb"):
                pass
        except FileExistsError:
            number += 1
            continue
        shutil.copy2(path, backup)
        return backup


def _to_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
