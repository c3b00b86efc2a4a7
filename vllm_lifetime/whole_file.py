# SPDX-License-Identifier: Apache-2.0
"""A file is written as a whole or not at all: a full disk in the middle leaves what was there before. And what JSON can hold."""

import math
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

__all__ = ["finite", "replacing", "write_text"]

_T = TypeVar("_T")


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give the name of a file to write beside `path`, with its suffix, that takes its place if the block ends without an error.

    A link is followed, and a file keeps its mode. What is no regular file (`/dev/stdout`, a pipe) cannot be replaced and is
    written to directly, as is a file in a folder that takes no new ones.

    Raises OSError. Whatever is raised in the block, nothing is left of the new file.
    """
    given = Path(path)
    # Before links are followed: a pipe's name in /dev/fd leads to one that no file has.
    if given.exists() and not given.is_file():
        yield given
        return
    target = Path(os.path.realpath(given))
    temporary = target.with_name(f".{secrets.token_hex(8)}{target.suffix}")
    try:
        # Not by `mkstemp`, whose files only their owner may read.
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except PermissionError:
        if not target.exists():
            raise
        yield target
        return
    try:
        yield temporary
        if target.exists():
            temporary.chmod(target.stat().st_mode & 0o7777)
        _put(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _put(temporary: Path, target: Path) -> None:
    try:
        os.replace(temporary, target)
    except OSError:
        # A file that is mounted by itself, as in a container, has its name for good.
        if not target.is_file():
            raise
        shutil.copyfile(temporary, target)


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def finite(value: _T) -> _T | None:
    """`value`, or None, JSON's null, in the place of infinity and NaN, which JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
