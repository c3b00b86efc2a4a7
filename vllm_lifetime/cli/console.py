# SPDX-License-Identifier: Apache-2.0
"""Where a command prints its results."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["results_console"]


def results_console(pipe_width: int = 140, *, highlight: bool = False) -> Console:
    """Standard output; `pipe_width` columns where there is no terminal to ask, so that lines are not broken."""
    from rich.console import Console

    console = Console(highlight=highlight)
    return console if console.is_terminal else Console(highlight=highlight, width=pipe_width)
