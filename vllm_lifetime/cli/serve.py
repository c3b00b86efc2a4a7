# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime serve MODEL ...`: `vllm serve MODEL --kv-connector lifetime ...`, in this process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from itertools import zip_longest

import typer

from vllm_lifetime.patches import distribution_name
from vllm_lifetime.patches.versions import UnsupportedVllmError

NOT_INSTALLED = (
    "vLLM is not installed in this environment. Install it beside vllm-lifetime: "
    "`pip install vllm` for CUDA; for CPUs see the README."
)


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    app.command(
        "serve",
        options_metavar="MODEL [ANY OPTION OF vllm serve]",
        # From MODEL on nothing is ours to parse, not even --help.
        context_settings={
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "allow_interspersed_args": False,
        },
    )(serve)


def serve(context: typer.Context) -> None:
    """Serve MODEL with vLLM and its KV cache under vllm-lifetime.

    Takes what `vllm serve` takes and passes it on untouched; `vllm-lifetime serve MODEL --help` lists
    it. Adds `--kv-connector lifetime` unless a connector is chosen already.
    """
    if importlib.util.find_spec("vllm") is None:
        typer.echo(f"Error: {NOT_INSTALLED}", err=True)
        raise typer.Exit(1)
    sys.argv = ["vllm", *serve_arguments(context.args)]
    distribution_name.apply()
    # Imports torch: seconds, not milliseconds.
    from vllm.entrypoints.cli.main import main as vllm_main

    try:
        vllm_main()
    except UnsupportedVllmError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None


def serve_arguments(arguments: Sequence[str]) -> list[str]:
    """Return vLLM's arguments for the `arguments` given to us, with our connector chosen.

    Ours goes last: vLLM looks for the model in the word after `serve`.
    """
    if any(_chooses_connector(argument, value) for argument, value in zip_longest(arguments, arguments[1:], fillvalue="")):
        return ["serve", *arguments]
    return ["serve", *arguments, "--kv-connector", "lifetime"]


def _chooses_connector(argument: str, value: str) -> bool:
    """Tell whether `argument`, or the word `value` behind it, names a connector, in any of vLLM's spellings.

    vLLM accepts underscores for dashes, `--option=value`, and `--option.field value`. Options of the connector alone choose none.
    """
    if not argument.startswith("--"):
        return False
    option, _, inline = argument.partition("=")
    name, _, field = option.partition(".")
    name = name.replace("_", "-")
    if name == "--kv-connector":
        return True
    if name != "--kv-transfer-config":
        return False
    return field == "kv_connector" if field else '"kv_connector"' in (inline or value)
