# SPDX-License-Identifier: Apache-2.0
"""Reads the body of a request, bounded in length and depth. Runs in the API server, on its event loop."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from vllm_lifetime.control.errors import BodyTooLarge, InvalidBody, describe_errors, find_header

__all__ = ["MAX_BODY_BYTES", "parse_json", "read_body", "validate_body"]

MAX_BODY_BYTES = 1 << 20
"""Longest body read, in bytes."""

Model = TypeVar("Model")


async def read_body(request: Request) -> bytes:
    """Return the request's body. Raises `BodyTooLarge` before more than the limit is kept, and `ClientDisconnect`.

    The declared length refuses early; what arrives is counted too, since a chunked body declares none.
    """
    declared = find_header(request.scope, b"content-length")
    if declared.isdigit() and int(declared[:20]) > MAX_BODY_BYTES:
        raise _too_large()
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            raise _too_large()
        if not message.get("more_body", False):
            return bytes(body)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"The body is longer than {MAX_BODY_BYTES} bytes.")


def parse_json(body: bytes) -> Any:
    """Return what a JSON body says. Raises `InvalidBody`, also for one that nests some 200 deep, where the parser ends."""
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidBody([{"loc": ["body"], "msg": f"Invalid JSON: {error}", "type": "json_invalid"}]) from None


def validate_body(adapter: TypeAdapter[Model], data: Any) -> Model:
    """Return `data` as the adapter's type. Raises `InvalidBody`, which names the fields that are wrong."""
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidBody(describe_errors(errors, "body")) from None
