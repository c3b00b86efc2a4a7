# SPDX-License-Identifier: Apache-2.0
"""`POST /lifetime/v1/hooks/claude-code`: takes Claude Code's own hooks.

What they say is `vllm_lifetime.harness.claude_code`'s. Claude Code waits for the answer and reads it, so it is an empty object,
at once: the engines are told afterwards, and what they say stands in `GET /lifetime/v1/events`. It does not send a hook again; an
event that cannot be delivered is logged, counted and lost, which costs space for a while.

Runs in the API server, on its event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter

from vllm_lifetime.control.body import parse_json, read_body, validate_body
from vllm_lifetime.control.errors import ControlError, ControlRoute
from vllm_lifetime.control.openapi import describe_errors_of, json_body, schema_of
from vllm_lifetime.harness.claude_code import HookPayload, translate

if TYPE_CHECKING:
    from vllm_lifetime.control.service import ControlService

__all__ = ["build_router"]

logger = logging.getLogger("vllm_lifetime.control")

_PAYLOAD = TypeAdapter(HookPayload)
_BODY = json_body(
    schema_of(HookPayload),
    "The payload of a hook of Claude Code. Events that are no boundary are ignored.",
    {"the end of a session": {"session_id": "0a1b", "hook_event_name": "SessionEnd", "reason": "other"}},
)


def build_router(get_service: Callable[[], ControlService]) -> APIRouter:
    """Return the route `/hooks/claude-code`, without a prefix and without authentication.

    `get_service` returns the service; it is called on the event loop, for each boundary.
    """
    router = APIRouter(route_class=ControlRoute, tags=["lifetime"])

    @router.post(
        "/hooks/claude-code",
        status_code=HTTPStatus.ACCEPTED,
        summary="Take a hook of Claude Code",
        responses=describe_errors_of(413, 415, 422),
        openapi_extra=_BODY,
    )
    async def post_hook(request: Request) -> dict[str, Any]:
        payload = parse_json(await read_body(request))
        validate_body(_PAYLOAD, payload)
        boundary, reason = translate(payload, time.time())
        if boundary is not None:
            service = get_service()
            try:
                service.queue_boundaries([boundary])
            except ControlError as error:  # not Claude Code's trouble
                service.note_lost([boundary], error)
        else:
            logger.debug("lifetime: a hook of Claude Code was ignored: %s", reason)
        return {}

    return router
