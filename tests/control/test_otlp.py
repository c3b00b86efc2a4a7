# SPDX-License-Identifier: Apache-2.0
"""The OTLP endpoint, asked by OpenTelemetry's own SDK and exporter over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any

import httpx
import pytest
from control_fakes import API, FakeEngines, serve
from fastapi import APIRouter, Depends, FastAPI
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult
from prometheus_client import REGISTRY
from pydantic import SecretStr

from vllm_lifetime.control import ControlService, ControlSettings, otlp, otlp_decoding
from vllm_lifetime.control.auth import Guard
from vllm_lifetime.control.errors import ControlRoute
from vllm_lifetime.control.otlp_decoding import JSON_TYPE, MAX_EXPORT_BYTES, PROTOBUF_TYPE, decode_export
from vllm_lifetime.harness.otel import SpanTable

TRACES = f"{API}/otlp/v1/traces"
LEAD = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "lead", "gen_ai.conversation.id": "s1"}
SUB = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "researcher"}
TOOL = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "ask"}


@contextlib.contextmanager
def endpoint(engines: FakeEngines, settings: ControlSettings | None = None, table: SpanTable | None = None) -> Iterator[str]:
    """A real server with the route, mounted as the control API mounts it; gives the route's URL."""
    settings = settings or ControlSettings()
    service = ControlService(engines, settings=settings)
    router = APIRouter(prefix=API, route_class=ControlRoute, dependencies=[Depends(Guard(settings))])
    router.include_router(otlp.build_router(lambda: service, table))
    app = FastAPI()
    app.include_router(router)
    with serve(app) as url:
        yield url + TRACES


@contextlib.contextmanager
def tracer(url: str, *, batch: bool = True, resource: dict[str, str] | None = None, **options: Any) -> Iterator[Any]:
    exporter = OTLPSpanExporter(endpoint=url, **options)
    provider = TracerProvider(resource=Resource(resource or {}))
    provider.add_span_processor(BatchSpanProcessor(exporter) if batch else SimpleSpanProcessor(exporter))
    try:
        yield provider.get_tracer("a-harness")
    finally:
        provider.shutdown()


def wait_for(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.02)


def seen(engines: FakeEngines) -> list[tuple[str, str | None, str | None]]:
    return [(event["kind"], event.get("session_id"), event.get("agent")) for event in engines.events()]


def run_lead_with_sub_agent(tracer: Any) -> None:
    with (
        tracer.start_as_current_span("POST /ask"),
        tracer.start_as_current_span("invoke_agent lead", attributes=LEAD),
        tracer.start_as_current_span("execute_tool ask", attributes=TOOL),
        tracer.start_as_current_span("invoke_agent researcher", attributes=SUB),
        tracer.start_as_current_span("chat m", attributes={"gen_ai.operation.name": "chat"}),
    ):
        pass


def count_of(outcome: str) -> float:
    return REGISTRY.get_sample_value("vllm:lifetime_otlp_spans_total", {"outcome": outcome}) or 0.0


# ---------------------------------------------------------------------- by the SDK


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
@pytest.mark.parametrize("batch", [False, True])
def test_spans_of_the_sdk_end_the_turn_and_return_the_sub_agent(
    monkeypatch: pytest.MonkeyPatch, batch: bool, compression: str
) -> None:
    engines = FakeEngines()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", compression)
    with endpoint(engines) as url:
        # As a user does it: nothing but the variable.
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", url)
        with tracer(None, batch=batch) as spans:  # type: ignore[arg-type]
            run_lead_with_sub_agent(spans)
    assert seen(engines) == [("subagent_return", "s1", "researcher"), ("turn_end", "s1", None)]


def test_a_sub_agent_returns_while_its_lead_still_runs() -> None:
    engines = FakeEngines()
    with (
        endpoint(engines) as url,
        tracer(url, batch=False) as spans,
        spans.start_as_current_span("invoke_agent lead", attributes=LEAD),
    ):
        with (
            spans.start_as_current_span("execute_tool ask", attributes=TOOL | {"gen_ai.conversation.id": "s1"}),
            spans.start_as_current_span("invoke_agent researcher", attributes=SUB),
        ):
            pass
        assert seen(engines) == [("subagent_return", "s1", "researcher")]


class Cancelled(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError, Cancelled, GeneratorExit])
def test_agents_that_fail_or_are_cancelled_have_ended(error: type[BaseException]) -> None:
    engines = FakeEngines()
    with (
        endpoint(engines) as url,
        tracer(url) as spans,
        contextlib.suppress(error),
        spans.start_as_current_span("invoke_agent lead", attributes=LEAD),
        spans.start_as_current_span("execute_tool ask", attributes=TOOL),
        spans.start_as_current_span("invoke_agent researcher", attributes=SUB),
    ):
        raise error
    assert seen(engines) == [("subagent_return", "s1", "researcher"), ("turn_end", "s1", None)]


def test_a_session_for_a_whole_process_comes_from_its_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = FakeEngines()
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "session.id=task-7,lifetime.run_end=workflow_end")
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "solo"}
    with endpoint(engines) as url:
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
        with provider.get_tracer("t").start_as_current_span("invoke_agent solo", attributes=agent):
            pass
        provider.shutdown()
    assert seen(engines) == [("workflow_end", "task-7", None)]


def test_many_sessions_of_one_process_come_from_a_span_processor() -> None:
    session: ContextVar[str] = ContextVar("session")

    class SessionOnSpans(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            if (value := session.get(None)) is not None:
                span.set_attribute("session.id", value)

    engines = FakeEngines()
    agent = {"gen_ai.operation.name": "invoke_agent"}
    with endpoint(engines) as url, tracer(url) as spans:
        spans.span_processor.add_span_processor(SessionOnSpans())
        spans.start_span("invoke_agent", attributes=agent).end()
        for name in ("a", "b"):
            copy_context().run(lambda name=name: (session.set(name), spans.start_span("invoke_agent", attributes=agent).end()))
    assert seen(engines) == [("turn_end", "a", None), ("turn_end", "b", None)]


def test_a_session_end_event_of_the_sdk_ends_the_session() -> None:
    engines = FakeEngines()
    with endpoint(engines) as url, tracer(url) as spans, spans.start_as_current_span("main") as span:
        span.add_event("session.end", {"session.id": "s1"})
    assert seen(engines) == [("session_end", "s1", None)]
    assert engines.events()[0]["sent_at_s"] == pytest.approx(time.time(), abs=30)


def test_the_token_travels_in_the_exporters_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = FakeEngines()
    with endpoint(engines, ControlSettings(tokens=(SecretStr("t0p"),))) as url:
        with tracer(url, batch=False) as spans:
            spans.start_span("invoke_agent lead", attributes=LEAD).end()
        assert seen(engines) == []
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20t0p")
        with tracer(url, batch=False) as spans:
            spans.start_span("invoke_agent lead", attributes=LEAD).end()
    assert seen(engines) == [("turn_end", "s1", None)]


def test_many_harnesses_at_once_lose_nothing() -> None:
    engines = FakeEngines(delay_s=0.01)
    with endpoint(engines) as url:

        def run(number: int) -> None:
            with tracer(url) as spans:
                for turn in range(20):
                    spans.start_span("turn", attributes=LEAD | {"gen_ai.conversation.id": f"s{number}-{turn}"}).end()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(run, range(8)))
    assert sorted(session or "" for _, session, _ in seen(engines)) == sorted(f"s{n}-{t}" for n in range(8) for t in range(20))


# ---------------------------------------------------------------------- engines that are away


def test_an_export_that_the_engines_missed_is_retried_and_counts_once() -> None:
    engines = FakeEngines(error=RuntimeError("away"))
    with endpoint(engines) as url:
        threading.Timer(1.0, lambda: setattr(engines, "error", None)).start()
        exporter = OTLPSpanExporter(endpoint=url, timeout=20)
        results: list[SpanExportResult] = []
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(_Recorder(exporter, results)))
        provider.get_tracer("t").start_span("invoke_agent lead", attributes=LEAD).end()
        provider.shutdown()
    assert results == [SpanExportResult.SUCCESS]
    assert len({event["message_id"] for event in engines.events()}) == 1
    assert len(engines.calls) > 1


class _Recorder:
    def __init__(self, exporter: OTLPSpanExporter, results: list[SpanExportResult]) -> None:
        self._exporter = exporter
        self._results = results

    def export(self, spans: Any) -> SpanExportResult:
        self._results.append(self._exporter.export(spans))
        return self._results[-1]

    def shutdown(self) -> None:
        self._exporter.shutdown()


def test_engines_that_are_away_are_a_503_that_says_when_to_come_back() -> None:
    engines = FakeEngines(error=RuntimeError("away"))
    with endpoint(engines) as url:
        response = post(url, export_of(LEAD).SerializeToString())
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
        assert response.headers["content-type"] == PROTOBUF_TYPE
        assert "away" in Status.FromString(response.content).message


def test_what_no_exporter_retries_is_delivered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "RETRY_S", 0.2)
    engines = FakeEngines(error=RuntimeError("away"))
    with endpoint(engines) as url:
        assert post(url, export_of(LEAD).SerializeToString()).status_code == 503
        wait_for(lambda: len(engines.calls) >= 3)
        engines.error = None
        num_calls = len(engines.calls)
        wait_for(lambda: len(engines.calls) > num_calls)
        num_calls = len(engines.calls)
        time.sleep(0.5)
        assert len(engines.calls) == num_calls, "it was delivered again"


def test_what_cannot_be_delivered_for_long_is_given_up_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "KEEP_S", 0.3)
    monkeypatch.setattr(otlp, "RETRY_S", 0.1)
    lost = count_of("lost")
    with endpoint(FakeEngines(error=RuntimeError("away"))) as url:
        assert post(url, export_of(LEAD).SerializeToString()).status_code == 503
        wait_for(lambda: count_of("lost") == lost + 1)


def test_more_boundaries_than_the_server_takes_are_a_429() -> None:
    engines = FakeEngines()
    with endpoint(engines, ControlSettings(events_per_s=1.0, events_burst=1)) as url:
        assert post(url, export_of(LEAD).SerializeToString()).status_code == 200
        response = post(url, export_of(LEAD, LEAD).SerializeToString())
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1


# ---------------------------------------------------------------------- held spans


def test_a_span_whose_parent_does_not_come_is_decided_without_another_export() -> None:
    engines = FakeEngines()
    expired = count_of("expired")
    with endpoint(engines, table=SpanTable(hold_s=0.5)) as url, tracer(url, batch=False) as spans:
        with spans.start_as_current_span("a loop that runs for hours"):
            spans.start_span("invoke_agent lead", attributes=LEAD).end()
            assert seen(engines) == []
            wait_for(lambda: seen(engines) == [("turn_end", "s1", None)])
        assert count_of("expired") == expired + 1
    assert len(engines.events()) == 1


# ---------------------------------------------------------------------- on the wire


def export_of(*attributes: dict[str, str], session_end: str | None = None, salt: bytes = b"") -> ExportTraceServiceRequest:
    """An export of root spans with these attributes, under ids that no test has used."""
    request = ExportTraceServiceRequest()
    scope_spans = request.resource_spans.add().scope_spans.add()
    for each in attributes:
        export_of.number = number = getattr(export_of, "number", 0) + 1  # type: ignore[attr-defined]
        span = scope_spans.spans.add(
            trace_id=number.to_bytes(16, "big"), span_id=b"\x01" * 8, name="x", end_time_unix_nano=1_700_000_000 * 10**9
        )
        for key, value in each.items():
            span.attributes.add(key=key).value.string_value = value
        if session_end is not None:
            event = span.events.add(name="session.end", time_unix_nano=5)
            event.attributes.add(key="session.id").value.string_value = session_end
    return request


def post(url: str, body: bytes, content_type: str = PROTOBUF_TYPE, **headers: str) -> httpx.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(url, content=body, headers={"content-type": content_type, **names}, timeout=30)


JSON_EXPORT = {
    "resourceSpans": [
        {
            "resource": {"attributes": [{"key": "service.name", "value": {"stringValue": "x"}}]},
            "scopeSpans": [
                {
                    "scope": {"name": "a", "newField": {}},
                    "spans": [
                        {
                            "traceId": "5B8EFFF798038103D269B633813FC60C",
                            "spanId": "EEE19B7EC3C1B174",
                            "parentSpanId": "",
                            "flags": 257,
                            "name": "invoke_agent lead",
                            "startTimeUnixNano": "1544712660000000000",
                            "endTimeUnixNano": "1544712661500000000",
                            "kind": 1,
                            "attributes": [
                                {"key": "gen_ai.operation.name", "value": {"stringValue": "invoke_agent"}},
                                {"key": "session.id", "value": {"intValue": "42"}},
                                {"key": "other", "value": {"arrayValue": {"values": [{"doubleValue": 0.5}]}}},
                            ],
                            "events": [{"name": "exception", "timeUnixNano": 1544712661400000000}],
                            "status": {"code": 2},
                        }
                    ],
                }
            ],
        }
    ]
}


def test_an_export_in_json_has_hexadecimal_ids_and_is_answered_in_json() -> None:
    engines = FakeEngines()
    with endpoint(engines) as url:
        response = post(
            url, gzip.compress(json.dumps(JSON_EXPORT).encode()), JSON_TYPE + "; charset=utf-8", content_encoding="gzip"
        )
    assert (response.status_code, response.headers["content-type"], response.json()) == (200, JSON_TYPE, {})
    assert engines.events() == [
        {
            "message_id": "otlp:5b8efff798038103d269b633813fc60c:eee19b7ec3c1b174:turn_end",
            "kind": "turn_end",
            "session_id": "42",
            "sent_at_s": 1544712661.5,
        }
    ]


@pytest.mark.parametrize("content_type", [PROTOBUF_TYPE, JSON_TYPE])
def test_an_empty_export_is_a_success(content_type: str) -> None:
    with endpoint(FakeEngines()) as url:
        response = post(url, b"{}" if content_type == JSON_TYPE else b"", content_type)
    assert (response.status_code, response.headers["content-type"]) == (200, content_type)
    assert response.content == (b"{}" if content_type == JSON_TYPE else b"")


def test_json_and_protobuf_say_the_same() -> None:
    attributes = LEAD | {"lifetime.workflow_id": "w", "unknown": "x"}
    request = export_of(attributes, session_end="s9")
    span = request.resource_spans[0].scope_spans[0].spans[0]
    pair = [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()]
    event = {"name": "session.end", "timeUnixNano": 5, "attributes": [{"key": "session.id", "value": {"stringValue": "s9"}}]}
    message = {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "endTimeUnixNano": str(span.end_time_unix_nano),
        "attributes": pair,
        "events": [event, {"name": "other"}],
    }
    as_json = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [message]}]}]}).encode()
    decoded = decode_export(request.SerializeToString(), PROTOBUF_TYPE, "")
    assert decoded == decode_export(as_json, JSON_TYPE, "")
    assert decoded.spans[0].session_ends == (("s9", 5),)
    assert dict(decoded.spans[0].attributes) == LEAD | {"lifetime.workflow_id": "w"}


def test_spans_of_no_use_are_a_partial_success_that_says_why() -> None:
    engines = FakeEngines()
    request = export_of(LEAD, {"gen_ai.operation.name": "invoke_agent"}, {"http.route": "/"}, LEAD, LEAD, LEAD)
    spans = request.resource_spans[0].scope_spans[0].spans
    spans[3].trace_id = bytes(16)
    spans[4].span_id = b"short"
    spans[5].end_time_unix_nano = 0
    with endpoint(engines) as url:
        response = post(url, request.SerializeToString())
        retried = post(url, request.SerializeToString())
    assert response.status_code == 200
    partial = ExportTraceServiceResponse.FromString(response.content).partial_success
    assert partial.rejected_spans == 4
    assert "3 without valid ids or an end" in partial.error_message
    assert "1 of agents or workflows without a session" in partial.error_message
    assert ExportTraceServiceResponse.FromString(retried.content).partial_success.rejected_spans == 3
    assert seen(engines) == [("turn_end", "s1", None)]


@pytest.mark.parametrize(
    ("body", "content_type", "encoding", "status", "reason"),
    [
        (b"\xff\xff\xff", PROTOBUF_TYPE, "", 400, "not an ExportTraceServiceRequest"),
        (b"{", JSON_TYPE, "", 400, "not JSON"),
        (b"[" * 100_000, JSON_TYPE, "", 400, "not JSON"),
        (b"[]", JSON_TYPE, "", 400, "an object for the body"),
        (b'{"resourceSpans": 1}', JSON_TYPE, "", 400, "a list for resourceSpans"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": [7]}]}]}', JSON_TYPE, "", 400, "an item of spans"),
        (b'{"resourceSpans": [{"resource": []}]}', JSON_TYPE, "", 400, "an object for resource"),
        (rb'{"a": "\ud800"}', JSON_TYPE, "", 400, "not JSON"),
        (b"not gzip", PROTOBUF_TYPE, "gzip", 400, "cannot be decompressed"),
        (gzip.compress(b"x" * 100, mtime=0)[:-9], PROTOBUF_TYPE, "gzip", 400, "ends too early"),
        (b"", PROTOBUF_TYPE, "zstd", 415, "gzip or deflate"),
        (b"x" * (MAX_EXPORT_BYTES + 1), PROTOBUF_TYPE, "", 413, "longer than"),
        (gzip.compress(bytes(MAX_EXPORT_BYTES + 1)), PROTOBUF_TYPE, "gzip", 413, "longer than"),
        (zlib.compress(bytes(MAX_EXPORT_BYTES + 1)), PROTOBUF_TYPE, "deflate", 413, "longer than"),
    ],
)
def test_what_is_no_export_is_refused_with_a_status_that_no_exporter_retries(
    body: bytes, content_type: str, encoding: str, status: int, reason: str
) -> None:
    engines = FakeEngines()
    with endpoint(engines) as url:
        response = post(url, body, content_type, content_encoding=encoding)
    assert response.status_code == status
    assert response.headers["content-type"] == content_type
    message = response.json()["message"] if content_type == JSON_TYPE else Status.FromString(response.content).message
    assert reason in message
    assert engines.calls == []


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_another_content_type_is_refused(content_type: str) -> None:
    with endpoint(FakeEngines()) as url:
        assert post(url, b"", content_type).status_code == 415


def test_a_gzip_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < MAX_EXPORT_BYTES
    before = time.process_time()
    with pytest.raises(otlp_decoding.ExportTooLarge):
        decode_export(bomb, PROTOBUF_TYPE, "gzip")
    assert time.process_time() - before < 1.0


def test_a_bomb_of_many_gzip_members_is_not_unpacked() -> None:
    member = gzip.compress(bytes(MAX_EXPORT_BYTES // 2))
    with pytest.raises(otlp_decoding.ExportTooLarge):
        decode_export(member * 3, PROTOBUF_TYPE, "gzip")


def test_an_export_in_two_gzip_members_is_read() -> None:
    body = export_of(LEAD, LEAD).SerializeToString()
    assert len(decode_export(gzip.compress(body[:50]) + gzip.compress(body[50:]), PROTOBUF_TYPE, "gzip").spans) == 2


def test_a_body_without_a_declared_length_is_bounded_too() -> None:
    with endpoint(FakeEngines()) as url:
        chunks = (b"x" * 65536 for _ in range(MAX_EXPORT_BYTES // 65536 + 1))
        response = httpx.post(url, content=chunks, headers={"content-type": PROTOBUF_TYPE}, timeout=30)
    assert response.status_code == 413


@pytest.mark.parametrize("size", ["small", "large", "compressed"])
def test_large_exports_are_decoded_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch, size: str) -> None:
    in_loop: list[bool] = []

    def decode(*args: Any) -> otlp_decoding.Export:
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop()
            in_loop.append(True)
        in_loop.append(False)
        return decode_export(*args)

    monkeypatch.setattr(otlp, "decode_export", decode)
    body = export_of(*[LEAD | {"gen_ai.input.messages": "x" * 1000}] * (1 if size == "small" else 100)).SerializeToString()
    engines = FakeEngines()
    with endpoint(engines) as url:
        if size == "compressed":
            assert post(url, gzip.compress(body), content_encoding="gzip").status_code == 200
        else:
            assert post(url, body).status_code == 200
    assert in_loop[0] == (size == "small")
    assert len(engines.events()) == (1 if size == "small" else 100)


def test_a_server_without_the_protobuf_packages_says_so_and_reads_json(monkeypatch: pytest.MonkeyPatch) -> None:
    otlp_decoding._protobuf.cache_clear()
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.collector.trace.v1.trace_service_pb2", None)
    try:
        engines = FakeEngines()
        with endpoint(engines) as url:
            response = post(url, b"")
            assert response.status_code == 501
            assert "pip install opentelemetry-proto" in response.json()["message"]
            assert post(url, b"x", content_encoding="zstd").status_code == 501
            assert post(url, json.dumps(JSON_EXPORT).encode(), JSON_TYPE).status_code == 200
        assert len(engines.events()) == 1
    finally:
        otlp_decoding._protobuf.cache_clear()


def test_what_becomes_of_spans_is_counted() -> None:
    before = {name: count_of(name) for name in ("boundary", "other", "no_session", "invalid", "duplicate")}
    request = export_of(LEAD, {"gen_ai.operation.name": "invoke_agent"}, {})
    request.resource_spans[0].scope_spans[0].spans.add(span_id=b"x")
    with endpoint(FakeEngines()) as url:
        post(url, request.SerializeToString())
        post(url, request.SerializeToString())
    after = {name: count_of(name) - number for name, number in before.items()}
    assert after == {"boundary": 1, "other": 1, "no_session": 1, "invalid": 2, "duplicate": 3}
