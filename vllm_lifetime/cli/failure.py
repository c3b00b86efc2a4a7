# SPDX-License-Identifier: Apache-2.0
"""How a command says that it cannot do what it was asked for."""

from typing import NoReturn

import typer

__all__ = ["fail"]


def fail(message: str, exit_code: int = 1) -> NoReturn:
    """Print the sentence to standard error and end with `exit_code`."""
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(exit_code) from None
