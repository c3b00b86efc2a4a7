# SPDX-License-Identifier: Apache-2.0
"""`POST /lifetime/v1/hooks/claude-code`: takes Claude Code's own hooks.

What they say is `vllm_lifetime.harness.claude_code`'s. Claude Code waits for the answer and reads it, so it is an empty object,
at once: the engines are told afterwards, and what they say stands in `GET /lifetime/v1/events`. It does not send a hook again; an
event that cannot be delivered is logged and lost, which costs space for a while.

Runs in the API server, on its event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from pydantic import TypeAdapter

from vllm_lifetime.boundaries import Boundary
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
    teller = _Teller(get_service)

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
            teller.tell(boundary)
        else:
            logger.debug("lifetime: a hook of Claude Code was ignored: %s", reason)
        return {}

    return router


class _Teller:
    """Tells the engines of boundaries, in order, while nobody waits for it."""

    def __init__(self, get_service: Callable[[], ControlService]) -> None:
        self._get_service = get_service
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_failing = False

    def tell(self, boundary: Boundary) -> None:
        """Have the boundary sent. How many may wait is the service's to bound."""
        task = asyncio.create_task(self._send(boundary))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, boundary: Boundary) -> None:
        try:
            await self._get_service().apply_boundaries([boundary])
            self._is_failing = False
        except ControlError as error:
            if not self._is_failing:
                logger.warning("lifetime: hooks of Claude Code are lost: %s", error.detail)
            self._is_failing = True
