# SPDX-License-Identifier: Apache-2.0
"""The `vllm-lifetime` command: one file per subcommand.

Nothing here imports vLLM or torch before a subcommand needs them, so that `--help` answers at once.
"""

from __future__ import annotations

import typer

from vllm_lifetime.cli import analyze, bench, control, hooks, predict, rank, record, replay, serve, simulate, top, version, wear

app = typer.Typer(
    name="vllm-lifetime",
    help="Lifetime-aware KV cache for agents on vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
serve.add_to(app)
control.add_to(app)
top.add_to(app)
wear.add_to(app)
hooks.add_to(app)
predict.add_to(app)
rank.add_to(app)
record.add_to(app)
replay.add_to(app)
bench.add_to(app)
simulate.add_to(app)
analyze.add_to(app)
version.add_to(app)


def main() -> None:
    """Run the command line; the console script `vllm-lifetime` starts here."""
    app()
