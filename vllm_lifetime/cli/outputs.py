# SPDX-License-Identifier: Apache-2.0
"""Where a command may write: found out before the work, and never over what it reads."""

import os
from collections.abc import Iterable
from pathlib import Path

__all__ = ["check_outputs"]


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None] = ()) -> None:
    """See that each of `outputs` can be a file in a folder that exists, and is no other of them and none of `inputs`.

    None stands for nothing.

    Raises ValueError, in one sentence, and OSError where the system does not tell.
    """
    sources = [source for source in inputs if source is not None and source.exists()]
    taken: set[str] = set()
    for target in outputs:
        if target is None:
            continue
        if not target.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {str(target.parent)!r} to write {target.name} to")
        if target.is_dir():
            raise ValueError(f"{str(target)!r} is a folder; give the name of a file to write")
        if any(target.exists() and target.samefile(source) for source in sources):
            raise ValueError(f"{str(target)!r} is read by this command and would be overwritten; give another name")
        real = os.path.realpath(target)
        if not (target.exists() and os.access(target, os.W_OK)) and not os.access(os.path.dirname(real), os.W_OK):
            raise ValueError(f"{str(target)!r} cannot be written, since its folder takes no new file; give another name")
        if target.exists() and not target.is_file():
            continue  # a pipe or a terminal, which may take several
        if real in taken:
            raise ValueError(f"{str(target)!r} is named for two outputs, of which one would overwrite the other; give two names")
        taken.add(real)
