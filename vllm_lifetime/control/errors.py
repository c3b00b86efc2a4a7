# SPDX-License-Identifier: Apache-2.0
"""Errors of the control API, and the one map from error to HTTP status.

Routes and services raise these; `ControlRoute` answers with them. It works on the router rather than
as an exception handler of the app, because the app is vLLM's: its handlers turn validation errors into
OpenAI-style 400s that drop the position in a batch.
"""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

__all__ = [
    "ERROR_STATUS",
    "BodyTooLarge",
    "ControlError",
    "ControlRoute",
    "EngineUnavailable",
    "InvalidBody",
]


class ControlError(Exception):
    """An error that the caller of the control API is told about. `detail` is JSON-like."""

    def __init__(self, detail: str | list[dict[str, Any]]) -> None:
        """Keep what the caller is told."""
        super().__init__(detail)
        self.detail = detail


class InvalidBody(ControlError):
    """The body is not what the route takes. `detail` is a list of `{loc, msg, type}`."""


class BodyTooLarge(ControlError):
    """The body is longer than the route reads."""


class EngineUnavailable(ControlError):
    """An engine is dead, does not answer, or answers with an error."""


ERROR_STATUS: dict[type[ControlError], int] = {
    InvalidBody: 422,
    BodyTooLarge: 413,
    EngineUnavailable: 503,
}
"""HTTP status of each error."""


class ControlRoute(APIRoute):
    """A route that answers a `ControlError` with its status and `{"detail": ...}`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with `ControlError` translated."""
        handle = super().get_route_handler()

        async def handle_errors(request: Request) -> Response:
            try:
                return await handle(request)
            except ControlError as error:
                return JSONResponse({"detail": error.detail}, ERROR_STATUS[type(error)])

        return handle_errors
