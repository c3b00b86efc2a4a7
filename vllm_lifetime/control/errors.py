# SPDX-License-Identifier: Apache-2.0
"""Errors of the control API, and the one map from error to HTTP status.

Routes and services raise these; `ControlRoute` answers with them. It works on the router rather than
as an exception handler of the app, because the app is vLLM's: its handlers turn validation errors into
OpenAI-style 400s that drop the position in a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Scope

__all__ = [
    "ERROR_STATUS",
    "MAX_ERRORS",
    "BodyTooLarge",
    "ControlError",
    "ControlRoute",
    "DirectRoute",
    "EngineUnavailable",
    "ForeignOrigin",
    "Handler",
    "InvalidBody",
    "InvalidRequest",
    "RateLimited",
    "SessionUnknown",
    "Unauthorized",
    "UnsupportedContent",
    "answer_errors",
    "describe_errors",
    "find_header",
]

MAX_ERRORS = 100
"""Most errors named in one answer, so that a small body cannot ask for a huge one."""


class ControlError(Exception):
    """An error that the caller of the control API is told about. `detail` is JSON-like."""

    def __init__(self, detail: str | list[dict[str, Any]]) -> None:
        """Keep what the caller is told."""
        super().__init__(detail)
        self.detail = detail

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {}


class InvalidRequest(ControlError):
    """A parameter or the body is not what the route takes. `detail` is a list of `{loc, msg, type}`."""


class InvalidBody(InvalidRequest):
    """The body is not what the route takes."""


class BodyTooLarge(ControlError):
    """The body is longer than the route reads."""


class UnsupportedContent(ControlError):
    """The body's content type or encoding is none that the route reads."""


class Unauthorized(ControlError):
    """The caller has no valid token, and needs one."""

    @property
    def headers(self) -> dict[str, str]:
        """Name the way to authenticate."""
        return {"WWW-Authenticate": "Bearer"}


class ForeignOrigin(ControlError):
    """A browser sent the request for a page of another origin."""


class SessionUnknown(ControlError):
    """No engine knows the session."""


class RateLimited(ControlError):
    """More events than this server takes. `retry_after_s` is when as many will be taken, in seconds."""

    def __init__(self, detail: str, retry_after_s: float) -> None:
        """Keep what the caller is told."""
        super().__init__(detail)
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Say when to try again, in whole seconds."""
        return {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


class EngineUnavailable(ControlError):
    """An engine is dead, does not answer, or answers with an error."""


ERROR_STATUS: dict[type[ControlError], int] = {
    InvalidRequest: 422,
    InvalidBody: 422,
    BodyTooLarge: 413,
    UnsupportedContent: 415,
    Unauthorized: 401,
    ForeignOrigin: 403,
    SessionUnknown: 404,
    RateLimited: 429,
    EngineUnavailable: 503,
}
"""HTTP status of each error."""

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
"""What answers a request."""

JSON_ONLY = frozenset({"application/json"})
"""Content types of a body that is JSON."""


class ControlRoute(APIRoute):
    """A route that answers a `ControlError` with its status and `{"detail": ...}`.

    A body is read only if its content type is one that the route's `openapi_extra["requestBody"]` names,
    and JSON where that names none. This also keeps pages of other origins out: a browser asks the server
    before it lets them send JSON, but not before it lets them send a form.
    """

    def get_route_handler(self) -> Handler:
        """Return FastAPI's handler, with the content type checked and errors translated."""
        described = (self.openapi_extra or {}).get("requestBody", {}).get("content", {})
        return answer_errors(super().get_route_handler(), self._check, frozenset(described or JSON_ONLY))

    async def _check(self, request: Request) -> None:
        """Call the route's dependencies, which take the request and may raise."""
        for depends in self.dependencies:
            if depends.dependency is not None:
                await depends.dependency(request)


class DirectRoute(APIRoute):
    """A route whose endpoint is the whole handler: it takes the request, checks the caller too, and never raises.

    FastAPI's search for parameters and dependencies takes about a third of the time of a POST.
    """

    def get_route_handler(self) -> Handler:
        """Return the endpoint."""
        handler: Handler = self.endpoint
        return handler


def answer_errors(
    handle: Handler, check: Callable[[Request], Coroutine[Any, Any, None]], accepted: frozenset[str] = JSON_ONLY
) -> Handler:
    """Return `handle` with the content type checked and errors translated into answers.

    `check` lets the caller pass or raises; it is called when `handle`, which checks by itself, is not.
    """

    async def handle_errors(request: Request) -> Response:
        try:
            if request.method in _METHODS_WITH_BODY and (given := _content_type(request)) not in accepted:
                await check(request)  # a stranger is told to authenticate first
                wanted = " or ".join(sorted(accepted))
                raise UnsupportedContent(f"The body must have the content type {wanted}, not {given[:100]!r}.")
            return await handle(request)
        except ControlError as error:
            return JSONResponse({"detail": error.detail}, ERROR_STATUS[type(error)], error.headers)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except RequestValidationError as error:
            return JSONResponse({"detail": describe_errors(error.errors())}, ERROR_STATUS[InvalidRequest])

    return handle_errors


_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


def describe_errors(errors: Sequence[Any], *prefix: str | int) -> list[dict[str, Any]]:
    """Return pydantic's errors as the `detail` of an `InvalidRequest`, each `loc` behind `prefix`.

    Without the input: it may hold what JSON cannot say, or what should not be repeated.
    """
    return [{"loc": [*prefix, *item["loc"]], "msg": item["msg"], "type": item["type"]} for item in errors[:MAX_ERRORS]]


def find_header(scope: Scope, name: bytes) -> bytes:
    """Return the first value of a header, empty if there is none. A third of the time of `request.headers`."""
    for given, value in scope["headers"]:
        if given == name:
            return bytes(value)
    return b""


def _content_type(request: Request) -> str:
    return find_header(request.scope, b"content-type").decode("latin-1").partition(";")[0].strip().lower()
