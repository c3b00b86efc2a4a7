# SPDX-License-Identifier: Apache-2.0
"""Compiling with numba, typed, and with a cache wherever one can be written."""

from collections.abc import Callable
from typing import TypeVar, cast

import numba

__all__ = ["called_from_compiled", "compiled"]

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile `function` at its first call; keep the result on disk.

    numba keeps it beside the source, or in the user's cache folder (or NUMBA_CACHE_DIR) if that cannot be written. Where there is
    no such folder either, it is compiled anew in each process. It sees a change of the file that the function stands in, not of a
    constant from another file: remove `__pycache__` after changing one.
    """
    return _compile(function)


def called_from_compiled(function: Function) -> Function:
    """As `compiled`, for what only compiled code calls: without the way in from Python it compiles faster."""
    return _compile(function, no_cpython_wrapper=True, no_cfunc_wrapper=True)


def _compile(function: Function, **options: bool) -> Function:
    try:
        return cast(Function, numba.njit(cache=True, error_model="numpy", **options)(function))
    except RuntimeError:
        return cast(Function, numba.njit(error_model="numpy", **options)(function))
