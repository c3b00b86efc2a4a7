# SPDX-License-Identifier: Apache-2.0
"""How a command says that it cannot do what it was asked for."""

from typing import NoReturn

import typer

__all__ = ["BAD_INPUT", "NO_ANSWER", "fail"]


BAD_INPUT = 2
"""As typer ends for a wrong option: what was asked for, or a file that was given, cannot be used."""

NO_ANSWER = 1
"""A server, or something else outside, does not do its part."""


def fail(message: str, exit_code: int = BAD_INPUT) -> NoReturn:
    """Print the sentence to standard error and end with `exit_code`."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(exit_code) from None
