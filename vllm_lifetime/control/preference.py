# SPDX-License-Identifier: Apache-2.0
"""Reads the header `Prefer` (RFC 7240). Runs in the API server, on its event loop, for each POST of boundaries."""

from __future__ import annotations

import re
from functools import lru_cache

from starlette.types import Scope

__all__ = ["APPLIED", "RESPOND_ASYNC", "prefers_async"]

RESPOND_ASYNC = "respond-async"
"""The preference for an answer at once, before the work is done."""

APPLIED = (b"preference-applied", RESPOND_ASYNC.encode())
"""The header, as ASGI has it, of an answer to which the preference was applied."""

_ELEMENT = re.compile(rb'(?:[^",]|"(?:[^"\\]|\\.)*"?)+', re.DOTALL)
"""One preference of the list, with its parameters. A comma in a quoted string is part of it."""

_NAME = re.compile(rb"[ \t]*respond-async[ \t]*(?![^ \t=;])", re.IGNORECASE)
_NO_VALUE = re.compile(rb'(?:=[ \t]*(?:"")?[ \t]*)?(?:;|$)')
"""What follows the name: an empty value is none, and parameters say nothing to us."""


def prefers_async(scope: Scope) -> bool:
    """Tell whether a request prefers not to wait. `scope` is its ASGI scope."""
    values = [value for name, value in scope["headers"] if name == b"prefer"]
    return bool(values) and _asks(values[0] if len(values) == 1 else b",".join(values))


@lru_cache(maxsize=64)
def _asks(value: bytes) -> bool:
    """Tell whether the preference stands in the header's value. Of one that stands there twice, the first counts."""
    for element in _ELEMENT.finditer(value):
        if found := _NAME.match(element[0]):
            return _NO_VALUE.match(element[0], found.end()) is not None
    return False
