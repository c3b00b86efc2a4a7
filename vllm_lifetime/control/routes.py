# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of the control API. They translate; `ControlService` does the work.

The router carries its own error handling (`ControlRoute`), so that it answers alike on vLLM's app and
on a plain one. Runs in the API server.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from vllm_lifetime.boundaries import MAX_BATCH, Boundary
from vllm_lifetime.control.errors import BodyTooLarge, ControlRoute, InvalidBody
from vllm_lifetime.control.service import ControlService

__all__ = ["MAX_BODY_BYTES", "PREFIX", "build_router"]

PREFIX = "/lifetime/v1"

MAX_BODY_BYTES = 1 << 20
"""Longest body read, in bytes."""

MAX_ERRORS = 100
"""Most errors named in one answer, so that a small body cannot ask for a huge one."""

_BATCH = TypeAdapter(Annotated[list[Boundary], Field(min_length=1, max_length=MAX_BATCH)])
_EVENT = TypeAdapter(Boundary)

_BODY_DESCRIPTION = {
    "description": f"A `Boundary`, or a list of 1 to {MAX_BATCH}.",
    "required": True,
    "content": {"application/json": {"schema": {"anyOf": [{"type": "object"}, {"type": "array"}]}}},
}


def build_router(get_service: Callable[[], ControlService]) -> APIRouter:
    """Return the control API as a router; `get_service` is FastAPI's dependency for the service."""
    router = APIRouter(prefix=PREFIX, route_class=ControlRoute, tags=["lifetime"])
    service_of = Annotated[ControlService, Depends(get_service)]

    @router.post(
        "/boundaries",
        status_code=HTTPStatus.ACCEPTED,
        summary="Report one boundary, or a list of them",
        openapi_extra={"requestBody": _BODY_DESCRIPTION},
    )
    async def post_boundaries(request: Request, service: service_of) -> dict[str, Any]:
        events = parse_events(await read_body(request))
        outcomes = await service.apply_boundaries(events)
        return {"outcomes": [outcome.model_dump(mode="json", exclude_none=True) for outcome in outcomes]}

    @router.get("/tiers", summary="Capacity and use of each tier")
    async def get_tiers(service: service_of) -> dict[str, Any]:
        return await service.read_tiers()

    return router


async def read_body(request: Request) -> bytes:
    """Return the request's body. Raises `BodyTooLarge` before more than the limit is kept.

    The declared length refuses early; what arrives is counted too, since a chunked body declares none.
    """
    too_large = f"The body is longer than {MAX_BODY_BYTES} bytes."
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise BodyTooLarge(too_large)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(too_large)
    return bytes(body)


def parse_events(body: bytes) -> list[Boundary]:
    """Read one event or a list of events. Raises `InvalidBody`, which names the field, unless all are valid."""
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        detail = {"loc": ["body"], "msg": f"Invalid JSON: {error}", "type": "json_invalid"}
        raise InvalidBody([detail]) from None
    try:
        if isinstance(data, list):
            return _BATCH.validate_python(data)
        return [_EVENT.validate_python(data)]
    except ValidationError as error:
        # Without the input: it may hold what JSON cannot say, or what should not be repeated.
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise InvalidBody(
            [{"loc": ["body", *item["loc"]], "msg": item["msg"], "type": item["type"]} for item in errors[:MAX_ERRORS]]
        ) from None
