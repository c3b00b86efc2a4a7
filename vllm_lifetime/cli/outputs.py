# SPDX-License-Identifier: Apache-2.0
"""Where a command may write: found out before the work, and never over what it reads."""

from collections.abc import Iterable
from pathlib import Path

__all__ = ["check_outputs"]


def check_outputs(outputs: Iterable[Path | None], inputs: Iterable[Path | None] = ()) -> None:
    """See that each of `outputs` can be a file in a folder that exists, and is none of `inputs`; None stands for nothing.

    Raises ValueError, in one sentence, and OSError where the system does not tell.
    """
    sources = [source for source in inputs if source is not None and source.exists()]
    for target in outputs:
        if target is None:
            continue
        if not target.absolute().parent.is_dir():
            raise ValueError(f"there is no folder {str(target.parent)!r} to write {target.name} to")
        if target.is_dir():
            raise ValueError(f"{str(target)!r} is a folder; give the name of a file to write")
        if any(target.exists() and target.samefile(source) for source in sources):
            raise ValueError(f"{str(target)!r} is read by this command and would be overwritten; give another name")
