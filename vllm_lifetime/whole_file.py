# SPDX-License-Identifier: Apache-2.0
"""A file is written as a whole or not at all: a full disk in the middle leaves what was there before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["replacing", "write_text"]


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give the name of a file to write beside `path`, with its suffix, that takes its place if the block ends without an error.

    A link is followed. What is no regular file (`/dev/stdout`, a pipe) cannot be replaced, and is written to directly.

    Raises OSError. Whatever is raised in the block, nothing is left of the new file.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        yield target
        return
    # Not by `mkstemp`, whose files only their owner may read.
    temporary = target.with_name(f".{os.getpid()}.{target.name}")
    try:
        yield temporary
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text. Raises OSError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
