# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of the control API. They translate; `ControlService` does the work.

The router carries its own error handling (`ControlRoute`), so that it answers alike on vLLM's app and
on a plain one. Runs in the API server.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from pydantic import BaseModel, TypeAdapter
from starlette.convertors import Convertor, register_url_convertor

from vllm_lifetime.boundaries import MAX_BATCH, MAX_ID_LENGTH, Boundary
from vllm_lifetime.control import claude_code, dashboard, otlp
from vllm_lifetime.control.auth import Guard
from vllm_lifetime.control.body import MAX_BODY_BYTES, parse_json, read_body, validate_body
from vllm_lifetime.control.direct import build_endpoint
from vllm_lifetime.control.errors import MAX_ERRORS, ControlRoute, DirectRoute
from vllm_lifetime.control.openapi import BOUNDARY_RULE, describe_errors_of, json_body, schema_of
from vllm_lifetime.control.preference import RESPOND_ASYNC
from vllm_lifetime.control.service import ControlService
from vllm_lifetime.control.settings import ControlSettings
from vllm_lifetime.control.views import (
    BoundaryOutcomes,
    EventsPage,
    HealthView,
    HintOutcomes,
    ReleaseOutcome,
    SessionsPage,
    SessionView,
    TiersView,
)
from vllm_lifetime.hints import MAX_ACTIONS, KvHintsEnvelope

__all__ = ["BOUNDARIES_PATH", "MAX_BODY_BYTES", "MAX_ERRORS", "MAX_PAGE", "PREFIX", "build_router"]

PREFIX = "/lifetime/v1"

BOUNDARIES_PATH = f"{PREFIX}/boundaries"
"""Path of the route that takes events."""

MAX_PAGE = 500
"""Most sessions, and most events, in one answer."""

_ENVELOPE = TypeAdapter(KvHintsEnvelope)

_EVENT_SCHEMA = {**schema_of(Boundary), **BOUNDARY_RULE}
_BOUNDARIES_BODY = json_body(
    {"anyOf": [_EVENT_SCHEMA, {"type": "array", "items": _EVENT_SCHEMA, "minItems": 1, "maxItems": MAX_BATCH}]},
    f"A `Boundary`, or a list of 1 to {MAX_BATCH}.",
    {
        "one event": {"message_id": "8f0e-1", "kind": "turn_end", "session_id": "s-42", "turn": 3},
        "a list": [{"message_id": "8f0e-2", "kind": "workflow_end", "workflow_id": "w-7"}],
    },
)
_PREFERENCE = {
    "name": "Prefer",
    "in": "header",
    "schema": {"type": "string"},
    "description": f"`{RESPOND_ASYNC}` (RFC 7240): answer when the events are queued, before the engines have acted. Each "
    "outcome is then `queued`; what became of the event stands in `/events`. Other preferences are left alone.",
    "example": RESPOND_ASYNC,
}
_ACCEPTED = {
    "description": "An outcome for each event, or, if the caller prefers not to wait, that it is queued.",
    "headers": {
        "Preference-Applied": {
            "schema": {"type": "string", "const": RESPOND_ASYNC},
            "description": "Sent if the answer did not wait for the engines.",
        }
    },
}
_HINTS_BODY = json_body(
    schema_of(KvHintsEnvelope),
    f"vLLM's `KvHintsEnvelope` with up to {MAX_ACTIONS} actions: `kv.retain`, `kv.release`, `kv.demote`, `kv.prefetch` and "
    "`lifetime.boundary`, each of version 1.0.",
    {
        "keep a session for five minutes": {
            "protocol_version": "0.1",
            "message_id": "8f0e-3",
            "actions": [
                {
                    "action_id": "a",
                    "action_type": "kv.retain",
                    "action_version": "1.0",
                    "payload": {"session_id": "s-42", "ttl_s": 300},
                }
            ],
        }
    },
)


class _IdConvertor(Convertor[str]):
    """A path parameter of any characters, slashes and line breaks too (Starlette's `path` stops at a line break)."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("lifetime_id", _IdConvertor())

SessionId = Annotated[str, Path(min_length=1, max_length=MAX_ID_LENGTH, description="Percent-encoded; any characters.")]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Most of them in the answer.")]
AfterName = Annotated[str | None, Query(max_length=MAX_ID_LENGTH, description="`next` of the answer before.")]
AfterNumber = Annotated[int | None, Query(ge=0, description="`next` of the answer before. Without it: the latest.")]
WithSegments = Annotated[bool, Query(description="With the agents and segments of each session.")]


def build_router(get_service: Callable[[], ControlService], settings: ControlSettings | None = None) -> APIRouter:
    """Return the control API as a router.

    `get_service` returns the service; it is called for every request, on the event loop. `settings` say who may use the
    API; their default is what the environment says.
    """
    guard = Guard(settings if settings is not None else ControlSettings.from_environment())
    guarded = APIRouter(
        route_class=ControlRoute,
        tags=["lifetime"],
        dependencies=[Depends(guard)],
        responses=describe_errors_of(401, 403),
    )
    _add_writes(guarded, get_service, guard)
    _add_reads(guarded, get_service)
    guarded.include_router(claude_code.build_router(get_service))
    guarded.include_router(otlp.build_router(get_service))
    router = APIRouter(prefix=PREFIX)
    _add_document(guarded, router)
    router.include_router(guarded)
    # A page without data: whoever opens it gives it the token.
    router.include_router(dashboard.build_router())
    return router


def _add_document(guarded: APIRouter, router: APIRouter) -> None:
    """Add the route that describes all routes of `router`."""
    document: dict[str, Any] = {}

    @guarded.get("/openapi.json", include_in_schema=False)
    async def get_document() -> Response:
        if not document:
            document.update(get_openapi(title="vllm-lifetime control API", version="1", routes=router.routes))
        return JSONResponse(document)


def _add_writes(router: APIRouter, get_service: Callable[[], ControlService], guard: Guard) -> None:
    router.add_api_route(
        "/boundaries",
        build_endpoint(get_service, guard),
        methods=["POST"],
        status_code=HTTPStatus.ACCEPTED,
        summary="Report one boundary, or a list of them",
        response_model=BoundaryOutcomes,
        responses=describe_errors_of(413, 415, 422, 429, 503) | {HTTPStatus.ACCEPTED.value: _ACCEPTED},
        openapi_extra={**_BOUNDARIES_BODY, "parameters": [_PREFERENCE]},
        route_class_override=DirectRoute,
    )

    @router.post(
        "/hints",
        summary="Wish for the fate of KV cache, in vLLM's envelope",
        response_model=HintOutcomes,
        responses=describe_errors_of(413, 415, 422, 429, 503),
        openapi_extra=_HINTS_BODY,
    )
    async def post_hints(request: Request) -> Response:
        envelope = validate_body(_ENVELOPE, parse_json(await read_body(request)))
        outcomes = await get_service().apply_hints(envelope)
        return _answer(HintOutcomes.model_construct(message_id=envelope.message_id, outcomes=outcomes))

    @router.delete(
        "/sessions/{session_id:lifetime_id}",
        summary="Retire what only this session can read; it may go on",
        response_model=ReleaseOutcome,
        responses=describe_errors_of(422, 429, 503),
    )
    async def delete_session(session_id: SessionId) -> Response:
        return _answer(ReleaseOutcome.model_construct(outcome=await get_service().release_session(session_id)))


def _add_reads(router: APIRouter, get_service: Callable[[], ControlService]) -> None:
    @router.get(
        "/sessions",
        summary="Sessions, by name",
        response_model=SessionsPage,
        responses=describe_errors_of(422, 503),
    )
    async def get_sessions(limit: Limit = 100, after: AfterName = None, segments: WithSegments = False) -> Response:
        return _answer_as_given(await get_service().read_sessions(limit, after, segments=segments))

    @router.get(
        "/sessions/{session_id:lifetime_id}",
        summary="One session, with its agents and segments",
        response_model=SessionView,
        responses=describe_errors_of(404, 422, 503),
    )
    async def get_session(session_id: SessionId) -> Response:
        return _answer_as_given(await get_service().read_session(session_id))

    @router.get(
        "/tiers",
        summary="Capacity and use of each tier",
        response_model=TiersView,
        responses=describe_errors_of(503),
    )
    async def get_tiers() -> Response:
        return _answer(await get_service().read_tiers())

    @router.get(
        "/events",
        summary="The latest events that this API server took",
        response_model=EventsPage,
        responses=describe_errors_of(422),
    )
    async def get_events(limit: Limit = 100, after: AfterNumber = None) -> Response:
        return _answer(get_service().read_events(after, limit))

    @router.get(
        "/health",
        summary="Whether the engines answer and their transfers come to an end",
        response_model=HealthView,
        responses={503: {"description": "They do not.", "model": HealthView}},
    )
    async def get_health() -> Response:
        health = await get_service().read_health()
        return _answer(health, HTTPStatus.OK if health.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)


def _answer(view: BaseModel, status: int = HTTPStatus.OK) -> Response:
    """Return a view as JSON, without what is absent. FastAPI would check and copy it first; it is checked."""
    return Response(view.model_dump_json(exclude_none=True), status, media_type="application/json")


def _answer_as_given(view: BaseModel) -> Response:
    """Return a view as JSON, with each null that stands in it."""
    return Response(view.model_dump_json(exclude_unset=True, by_alias=True), media_type="application/json")
