# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime version`: which of the two packages is which version, and whether they fit."""

from __future__ import annotations

import importlib.metadata

import typer

from vllm_lifetime.patches import versions


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    app.command("version")(version)


def version() -> None:
    """Print the versions of vllm-lifetime and of the vLLM beside it."""
    installed = versions.installed_vllm_version()
    fits = "supported" if versions.is_supported(installed) else "not supported"
    series = ", ".join(f"{series}.x" for series in versions.SUPPORTED)
    typer.echo(f"vllm-lifetime {importlib.metadata.version('vllm-lifetime')}")
    typer.echo(f"vllm {installed} ({fits}; supported: {series})")
