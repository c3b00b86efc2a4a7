# SPDX-License-Identifier: Apache-2.0
"""`POST /lifetime/v1/otlp/v1/traces`: an OTLP/HTTP endpoint that reads boundaries from a harness's spans.

What spans say is `vllm_lifetime.harness.otel`'s; this takes exports, and sends what follows from them to the engines. Answers
are OTLP's: 200 with an ExportTraceServiceResponse, else a google.rpc.Status, in the encoding of the request. Exporters try again
after 429 and 503, and after nothing else that is answered here.

A boundary that cannot be delivered is kept, and sent with the next export or by itself: a retried export holds the same spans,
and those say nothing new.

Runs in the API server, on its event loop; large exports are decoded in a thread. Each API server knows the spans that it got: a
harness's exports go to one of them as long as its connection lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from prometheus_client import Counter as PrometheusCounter

from vllm_lifetime.boundaries import MAX_BATCH, Boundary
from vllm_lifetime.control.errors import ERROR_STATUS, ControlError, ControlRoute, EngineUnavailable
from vllm_lifetime.control.otlp_decoding import (
    ENCODINGS,
    JSON_TYPE,
    MAX_EXPORT_BYTES,
    PROTOBUF_TYPE,
    Export,
    ExportTooLarge,
    MalformedExport,
    ProtobufMissing,
    decode_export,
    encode_error,
    encode_success,
)
from vllm_lifetime.harness.otel import Report, SpanOutcome, SpanTable

if TYPE_CHECKING:
    from vllm_lifetime.control.service import ControlService

__all__ = ["KEEP_S", "MAX_KEPT", "RETRY_S", "build_router"]

logger = logging.getLogger("vllm_lifetime.control")

MAX_KEPT = 10_000
"""Most boundaries kept while the engines are not available; the oldest go first."""

KEEP_S = 120.0
"""Seconds for which they are kept. Later than that they would be about what has long gone on."""

RETRY_S = 5.0
"""Seconds between tries to deliver them, and what an exporter is told to wait."""

_IN_THREAD_BYTES = 32 << 10
"""Exports longer than this, and compressed ones, are decoded in a thread: 1000 spans take some 20 ms."""

_SLICE = 500
"""Spans taken before the event loop gets its turn."""

_BODY = {
    "requestBody": {
        "description": f"An ExportTraceServiceRequest of up to {MAX_EXPORT_BYTES} bytes, with or without gzip.",
        "required": True,
        "content": {
            PROTOBUF_TYPE: {"schema": {"type": "string", "format": "binary"}},
            JSON_TYPE: {"schema": {"type": "object"}},
        },
    }
}
_ERRORS = {
    400: "Not an export in the encoding that it claims.",
    413: "The export is too long, as sent or decompressed.",
    415: "Another content type or encoding.",
    429: "More boundaries than this server takes: try again.",
    501: "This server lacks the packages that read protobuf.",
    503: "The engines are not available: try again.",
}


def build_router(get_service: Callable[[], ControlService], table: SpanTable | None = None) -> APIRouter:
    """Return the route `/otlp/v1/traces`, without a prefix and without authentication.

    `get_service` returns the service; it is called on the event loop, for every export and when held spans are decided. `table`
    is what remembers the spans.
    """
    router = APIRouter(route_class=ControlRoute, tags=["lifetime"])
    receiver = _Receiver(get_service, table if table is not None else SpanTable())

    @router.post(
        "/otlp/v1/traces",
        summary="Take an OTLP export of spans, and the boundaries that they tell of",
        response_class=Response,
        responses={status: {"description": text} for status, text in _ERRORS.items()},
        openapi_extra=_BODY,
    )
    async def post_traces(request: Request) -> Response:
        # ControlRoute lets no other type than these two in.
        given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        content_type = JSON_TYPE if given == JSON_TYPE else PROTOBUF_TYPE
        try:
            return await _take_export(request, content_type, receiver)
        except ProtobufMissing as error:
            return Response(encode_error(JSON_TYPE, str(error)), 501, media_type=JSON_TYPE)

    return router


async def _take_export(request: Request, content_type: str, receiver: _Receiver) -> Response:
    """Answer an export. Raises `ProtobufMissing`."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        return _refuse(content_type, 415, f"The content encoding must be gzip or deflate, or none, not {encoding[:100]!r}.")
    try:
        body = await _read_body(request)
        if len(body) > _IN_THREAD_BYTES or ENCODINGS[encoding] is not None:
            export = await asyncio.to_thread(decode_export, body, content_type, encoding)
        else:
            export = decode_export(body, content_type, encoding)
        outcomes = await receiver.take(export)
    except MalformedExport as error:
        return _refuse(content_type, 400, str(error))
    except ExportTooLarge:
        return _refuse(content_type, 413, f"The export is longer than {MAX_EXPORT_BYTES} bytes: make the batches smaller.")
    except ControlError as error:
        headers = error.headers
        if isinstance(error, EngineUnavailable):
            headers = {**headers, "Retry-After": f"{RETRY_S:g}"}
        return _refuse(content_type, ERROR_STATUS[type(error)], str(error.detail), headers)
    num_rejected, message = _describe_rejected(export.num_invalid, outcomes)
    return Response(encode_success(content_type, num_rejected, message), media_type=content_type)


async def _read_body(request: Request) -> bytes:
    """Return the body. Raises `ExportTooLarge` before more than the limit is kept, and Starlette's `ClientDisconnect`."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > MAX_EXPORT_BYTES:
        raise ExportTooLarge
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_EXPORT_BYTES:
            raise ExportTooLarge
    return bytes(body)


def _refuse(content_type: str, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_error(content_type, message), status, headers, media_type=content_type)


def _describe_rejected(num_invalid: int, outcomes: Counter[SpanOutcome]) -> tuple[int, str]:
    """How many spans were of no use although they should have been, and why."""
    reasons = {
        "without valid ids or an end": num_invalid,
        "of agents or workflows without a session (gen_ai.conversation.id, session.id, or session.id of the resource)": outcomes[
            SpanOutcome.NO_SESSION
        ],
        "of sub-agents without a name (gen_ai.agent.name)": outcomes[SpanOutcome.NO_NAME],
    }
    texts = [f"{number} {reason}" for reason, number in reasons.items() if number]
    return sum(reasons.values()), f"Spans of no use here: {'; '.join(texts)}." if texts else ""


class _Receiver:
    """Takes spans, and delivers the boundaries that become known by them or by time."""

    def __init__(self, get_service: Callable[[], ControlService], table: SpanTable) -> None:
        self._get_service = get_service
        self._table = table
        self._kept: deque[tuple[float, Boundary]] = deque()
        """Boundaries to deliver, each with when it became known (monotonic seconds)."""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._counter = _span_counter()

    async def take(self, export: Export) -> Counter[SpanOutcome]:
        """Take an export; return what became of its spans. Raises as `ControlService.apply_boundaries` does."""
        self._count("invalid", export.num_invalid)
        outcomes: Counter[SpanOutcome] = Counter()
        try:
            for start in range(0, len(export.spans), _SLICE):
                report = self._table.ingest(export.spans[start : start + _SLICE])
                self._keep(report)
                outcomes += report.outcomes
                await asyncio.sleep(0)
            self._keep(self._table.expire())
            await self._deliver()
        finally:
            self._arm()
        return outcomes

    def _keep(self, report: Report) -> None:
        for outcome, number in report.outcomes.items():
            self._count(outcome.value, number)
        now = time.monotonic()
        self._kept.extend((now, boundary) for boundary in report.boundaries)
        num_lost = 0
        while self._kept and (len(self._kept) > MAX_KEPT or self._kept[0][0] + KEEP_S < now):
            self._kept.popleft()
            num_lost += 1
        self._count("lost", num_lost)

    def _count(self, outcome: str, number: int) -> None:
        if number:
            self._counter.labels(outcome).inc(number)

    async def _deliver(self) -> None:
        """Send what is kept. What could not be sent stays."""
        while self._kept:
            batch = [self._kept.popleft() for _ in range(min(len(self._kept), MAX_BATCH))]
            try:
                await self._get_service().apply_boundaries([boundary for _, boundary in batch])
            except BaseException:
                self._kept.extendleft(reversed(batch))
                raise

    def _arm(self) -> None:
        """Wake up when held spans are due, or when it is time to try again."""
        delays = [delay for delay in (self._table.next_expiry_s, RETRY_S if self._kept else None) if delay is not None]
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(min(delays), self._wake) if delays else None

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._tick())

    async def _tick(self) -> None:
        self._keep(self._table.expire())
        try:
            await self._deliver()
        except ControlError as error:
            logger.info("%d boundaries from spans wait: %s", len(self._kept), error.detail)
        finally:
            self._arm()


@cache
def _span_counter() -> PrometheusCounter:
    # Made with the first router, and not on import: vLLM removes the metrics that it finds when it makes its own.
    return PrometheusCounter(
        "vllm:lifetime_otlp_spans",
        "Spans taken, by what became of them.",
        ["outcome"],
    )
