# SPDX-License-Identifier: Apache-2.0
"""`POST /boundaries` at the least cost, for harnesses that post a thousand events a second.

`build_endpoint` makes the one function that answers such a POST, whichever way it came: through the app's router, or by
`mount`, which puts it before the app's middlewares and its search for a route. Those cost more than the answer itself.

Runs in the API server, on its event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from vllm_lifetime.boundaries import MAX_BATCH, Boundary, Outcome, OutcomeStatus
from vllm_lifetime.control.auth import Guard
from vllm_lifetime.control.body import parse_json, read_body, validate_body
from vllm_lifetime.control.errors import Handler, answer_errors
from vllm_lifetime.control.preference import APPLIED, prefers_async
from vllm_lifetime.control.service import ControlService

__all__ = ["DirectBoundaries", "build_endpoint", "mount", "parse_events", "quiet_access_log"]

_EVENT = TypeAdapter(Boundary)
_BATCH = TypeAdapter(Annotated[list[Boundary], Field(min_length=1, max_length=MAX_BATCH)])

_OUTCOMES = TypeAdapter(list[Outcome])
_QUEUED = b'{"message_id":%%b,"status":"%b","blocks":0,"bytes":0}' % OutcomeStatus.QUEUED.encode()
"""The `Outcome` of an event that is queued, for its id as JSON."""

_NEEDLESS = frozenset(
    {
        ("starlette", "CORSMiddleware"),  # the guard refuses what it would allow
        ("prometheus_fastapi_instrumentator", "PrometheusInstrumentatorMiddleware"),
        ("vllm", "AuthenticationMiddleware"),  # has no say under our prefix
        ("vllm", "CohereErrorEnvelopeMiddleware"),
        ("vllm", "WebSocketMetricsMiddleware"),
    }
)
"""Middlewares, by package and class, that do nothing for our answer. Any other may be there to keep somebody out."""


def build_endpoint(get_service: Callable[[], ControlService], guard: Guard) -> Handler:
    """Return what answers a `POST /boundaries`: check the caller, read the events, apply or queue them. It never raises."""

    async def post_boundaries(request: Request) -> Response:
        guard.check(request.scope)
        events = parse_events(await read_body(request))
        service = get_service()
        # A `BoundaryOutcomes`, written without making one.
        if prefers_async(request.scope):
            service.queue_boundaries(events)
            outcomes = b"[%b]" % b",".join([_QUEUED % to_json(event.message_id) for event in events])
            headers = [APPLIED]
        else:
            outcomes = _OUTCOMES.dump_json(await service.apply_boundaries(events), exclude_none=True)
            headers = []
        response = Response(b'{"outcomes":%b}' % outcomes, HTTPStatus.ACCEPTED, media_type="application/json")
        response.raw_headers += headers
        return response

    return answer_errors(post_boundaries, guard)


def parse_events(body: bytes) -> list[Boundary]:
    """Read one event or a list of events. Raises `InvalidBody`, which names the field, unless all are valid."""
    is_list = body.lstrip()[:1] == b"["
    try:
        return _BATCH.validate_json(body) if is_list else [_EVENT.validate_json(body)]
    except ValidationError:
        pass  # Read again in two steps, whose errors tell what is no JSON from what is no event.
    data = parse_json(body)
    return validate_body(_BATCH, data) if isinstance(data, list) else [validate_body(_EVENT, data)]


class DirectBoundaries:
    """An ASGI app that answers POSTs to one path by `answer`, and passes everything else on to `app`, after `before_others`."""

    def __init__(self, app: ASGIApp, answer: ASGIApp, path: str, before_others: Callable[[], None]) -> None:
        """`path` is without the server's `root_path`."""
        self._app = app
        self._before_others = before_others
        self._answer = answer
        self._path = path

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Answer, or pass on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            if path.endswith(self._path) and path.removeprefix(scope.get("root_path", "")) == self._path:
                return self._answer(scope, receive, send)
        self._before_others()
        return self._app(scope, receive, send)


def mount(app: FastAPI, endpoint: Handler, path: str, before_others: Callable[[], None]) -> None:
    """Answer POSTs to `path` by `endpoint`, before the middlewares of `app` that do nothing for it.

    `before_others` is called when anything else comes, before it is passed on.

    The others stay before it, each in an instance of its own. The route is still needed: it serves if somebody builds the
    middlewares anew, and stands in the OpenAPI document.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        response = await endpoint(Request(scope, receive, send))
        await response(scope, receive, send)

    guarded: ASGIApp = answer
    for middleware in reversed(app.user_middleware):
        owner: Any = middleware.cls
        name = getattr(owner, "__module__", "").partition(".")[0], getattr(owner, "__name__", "")
        if name not in _NEEDLESS:
            guarded = owner(guarded, *middleware.args, **middleware.kwargs)
    # vLLM has its middlewares built already, so that `add_middleware` would raise; it has not begun to serve.
    stack = app.middleware_stack if app.middleware_stack is not None else app.build_middleware_stack()
    app.middleware_stack = DirectBoundaries(stack, guarded, path, before_others)


def quiet_access_log(path: str) -> None:
    """Keep successful POSTs to `path` out of uvicorn's access log: a thousand lines a second help nobody.

    Not by a filter, which is asked when the record has been made: that takes nearly as long as our part of the answer.
    """
    logger = logging.getLogger("uvicorn.access")
    log = logger.info

    def info(message: object, *args: object, **options: Any) -> None:
        # uvicorn: client, method, path with query, HTTP version, status.
        match args:
            case (_, "POST", str(target), _, int(status)) if status < HTTPStatus.BAD_REQUEST:
                if target.partition("?")[0].endswith(path):
                    return
        log(message, *args, **{"stacklevel": 2} | options)

    logger.info = info  # type: ignore[method-assign, assignment]
