# SPDX-License-Identifier: Apache-2.0
"""Reads OTLP trace exports, in protobuf or JSON, compressed or not, and writes the answers to them.

Only what `vllm_lifetime.harness.otel_spans` needs is read. Protobuf needs the packages opentelemetry-proto and
googleapis-common-protos, which vLLM brings along; JSON needs neither.

Pure functions: they may run in any thread.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic_core import from_json, to_json

from vllm_lifetime.boundaries import MAX_ID_LENGTH
from vllm_lifetime.harness.otel_spans import READ_KEYS, READ_RESOURCE_KEYS, RESOURCE_SESSION_KEY, SESSION_END_EVENT, Span

__all__ = [
    "ENCODINGS",
    "JSON_TYPE",
    "MAX_EXPORT_BYTES",
    "PROTOBUF_TYPE",
    "Export",
    "ExportTooLarge",
    "MalformedExport",
    "ProtobufMissing",
    "decode_export",
    "encode_error",
    "encode_success",
]

MAX_EXPORT_BYTES = 4 << 20
"""Longest export read, in bytes, as sent and after decompression."""

PROTOBUF_TYPE = "application/x-protobuf"
JSON_TYPE = "application/json"

ENCODINGS = {"": None, "identity": None, "gzip": 31, "deflate": 15}
"""Content encodings that are read, with the window bits by which zlib knows them."""

_SESSION_KEYS_OF_EVENT = frozenset({RESOURCE_SESSION_KEY})
_MAX_NS = 2**63 - 1


class MalformedExport(Exception):
    """The body is not an export in the encoding that it claims. The text says where."""


class ExportTooLarge(Exception):
    """The body is longer than `MAX_EXPORT_BYTES`, perhaps only when it is decompressed."""


class ProtobufMissing(Exception):
    """The packages that read protobuf are not installed."""


class Export(NamedTuple):
    """The spans of an export, and how many spans in it are no spans: without valid ids, or not ended."""

    spans: list[Span]
    num_invalid: int


def decode_export(body: bytes, content_type: str, encoding: str) -> Export:
    """Read an export. `encoding` is one of `ENCODINGS`.

    Raises `MalformedExport`, `ExportTooLarge` and `ProtobufMissing`.
    """
    window_bits = ENCODINGS[encoding]
    if window_bits is not None:
        body = _decompress(body, window_bits)
    if len(body) > MAX_EXPORT_BYTES:
        raise ExportTooLarge
    return _read_json(body) if content_type == JSON_TYPE else _read_protobuf(body)


def _decompress(body: bytes, window_bits: int) -> bytes:
    """Decompress as far as is needed to know that it is not too long."""
    result = bytearray()
    while body:
        # A gzip file may be several, one behind the other.
        stream = zlib.decompressobj(window_bits)
        try:
            result += stream.decompress(body, MAX_EXPORT_BYTES + 1 - len(result))
        except zlib.error as error:
            raise MalformedExport(f"The body cannot be decompressed: {error}.") from None
        if len(result) > MAX_EXPORT_BYTES:
            raise ExportTooLarge
        if not stream.eof:
            raise MalformedExport("The compressed body ends too early.")
        body = stream.unused_data
    return bytes(result)


# ---------------------------------------------------------------------- protobuf


class _Protobuf(NamedTuple):
    request: Callable[[], Any]
    response: Callable[[], Any]
    status: Callable[..., Any]
    decode_error: type[Exception]


@cache
def _protobuf() -> _Protobuf:
    # Imported when the first export comes: most servers get none.
    try:
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
        from google.rpc.status_pb2 import Status  # type: ignore[import-untyped]
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
            ExportTraceServiceResponse,
        )
    except ImportError as error:
        raise ProtobufMissing(
            f"This server cannot read protobuf ({error}): pip install opentelemetry-proto googleapis-common-protos, "
            "or export JSON."
        ) from None
    return _Protobuf(ExportTraceServiceRequest, ExportTraceServiceResponse, Status, DecodeError)


def _read_protobuf(body: bytes) -> Export:
    protobuf = _protobuf()
    request = protobuf.request()
    try:
        request.ParseFromString(body)
    except protobuf.decode_error as error:
        raise MalformedExport(f"The body is not an ExportTraceServiceRequest: {error}") from None
    spans: list[Span] = []
    num_invalid = 0
    for resource_spans in request.resource_spans:
        resource = _pick(resource_spans.resource.attributes, READ_RESOURCE_KEYS)
        for scope_spans in resource_spans.scope_spans:
            for message in scope_spans.spans:
                ends: tuple[tuple[str | None, int], ...] = ()
                if message.events:
                    ends = tuple(
                        (_pick(event.attributes, _SESSION_KEYS_OF_EVENT).get(RESOURCE_SESSION_KEY), event.time_unix_nano)
                        for event in message.events
                        if event.name == SESSION_END_EVENT
                    )
                span = _make_span(
                    message.trace_id,
                    message.span_id,
                    message.parent_span_id,
                    message.end_time_unix_nano,
                    _pick(message.attributes, READ_KEYS),
                    resource,
                    ends,
                )
                if span is None:
                    num_invalid += 1
                else:
                    spans.append(span)
    return Export(spans, num_invalid)


_NOTHING: Mapping[str, str] = {}


def _pick(attributes: Iterable[Any], keys: frozenset[str]) -> Mapping[str, str]:
    """The attributes called `keys` that are usable as ids: text, or whole numbers."""
    picked: dict[str, str] = {}
    for attribute in attributes:
        if attribute.key in keys:
            value = attribute.value
            text = value.string_value or (str(value.int_value) if value.HasField("int_value") else "")
            if 0 < len(text) <= MAX_ID_LENGTH:
                picked[attribute.key] = text
    return picked or _NOTHING


def _make_span(
    trace_id: bytes,
    span_id: bytes,
    parent_id: bytes,
    ended_ns: int,
    attributes: Mapping[str, str],
    resource: Mapping[str, str],
    session_ends: tuple[tuple[str | None, int], ...],
) -> Span | None:
    """The span, or None if OTLP does not allow it. A span without an end is one that still runs, which nobody should export."""
    if len(trace_id) != 16 or len(span_id) != 8 or len(parent_id) not in (0, 8) or not 0 < ended_ns <= _MAX_NS:
        return None
    if not any(trace_id) or not any(span_id) or not all(0 <= at_ns <= _MAX_NS for _, at_ns in session_ends):
        return None
    return Span(trace_id, span_id, parent_id if any(parent_id) else b"", ended_ns, attributes, resource, session_ends)


# ---------------------------------------------------------------------- JSON


def _read_json(body: bytes) -> Export:
    try:
        request = from_json(body)
    except ValueError as error:
        raise MalformedExport(f"The body is not JSON: {error}") from None
    spans: list[Span] = []
    num_invalid = 0
    for resource_spans in _objects(_object(request, "the body"), "resourceSpans"):
        resource = _pick_json(_object(resource_spans.get("resource", {}), "resource"), READ_RESOURCE_KEYS)
        for scope_spans in _objects(resource_spans, "scopeSpans"):
            for message in _objects(scope_spans, "spans"):
                span = _span_from_json(message, resource)
                if span is None:
                    num_invalid += 1
                else:
                    spans.append(span)
    return Export(spans, num_invalid)


def _span_from_json(message: dict[str, Any], resource: Mapping[str, str]) -> Span | None:
    ends = []
    for event in _objects(message, "events"):
        if event.get("name") == SESSION_END_EVENT:
            session = _pick_json(event, _SESSION_KEYS_OF_EVENT).get(RESOURCE_SESSION_KEY)
            ends.append((session, _whole_number(event, "timeUnixNano")))
    return _make_span(
        _hexadecimal(message, "traceId"),
        _hexadecimal(message, "spanId"),
        _hexadecimal(message, "parentSpanId"),
        _whole_number(message, "endTimeUnixNano"),
        _pick_json(message, READ_KEYS),
        resource,
        tuple(ends),
    )


def _object(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise MalformedExport(f"Expected an object for {what}, not {type(value).__name__}.")


def _objects(parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
    values = parent.get(key) or []
    if not isinstance(values, list):
        raise MalformedExport(f"Expected a list for {key}, not {type(values).__name__}.")
    return [_object(value, f"an item of {key}") for value in values]


def _hexadecimal(parent: dict[str, Any], key: str) -> bytes:
    """The bytes of an id, none if it is no hexadecimal text: OTLP's JSON does not use protobuf's base64."""
    try:
        return bytes.fromhex(parent.get(key) or "")
    except (TypeError, ValueError):
        return b"?"


def _whole_number(parent: dict[str, Any], key: str) -> int:
    """A 64-bit number, which JSON may carry as text; -1 if it is none."""
    value = parent.get(key, 0)
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) <= 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else -1


def _pick_json(parent: dict[str, Any], keys: frozenset[str]) -> Mapping[str, str]:
    picked: dict[str, str] = {}
    for attribute in _objects(parent, "attributes"):
        key = attribute.get("key")
        if isinstance(key, str) and key in keys:
            value = _object(attribute.get("value") or {}, "value")
            text = value.get("stringValue", value.get("intValue"))
            if isinstance(text, int) and not isinstance(text, bool):
                text = str(text)
            if isinstance(text, str) and 0 < len(text) <= MAX_ID_LENGTH:
                picked[key] = text
    return picked or _NOTHING


# ---------------------------------------------------------------------- answers


def encode_success(content_type: str, num_rejected: int, message: str) -> bytes:
    """An ExportTraceServiceResponse: `partial_success` is set if spans were rejected. Raises `ProtobufMissing`."""
    if content_type == JSON_TYPE:
        rejected = {"partialSuccess": {"rejectedSpans": str(num_rejected), "errorMessage": message}}
        return to_json(rejected if num_rejected else {})
    response = _protobuf().response()
    if num_rejected:
        response.partial_success.rejected_spans = num_rejected
        response.partial_success.error_message = message
    encoded: bytes = response.SerializeToString()
    return encoded


def encode_error(content_type: str, message: str) -> bytes:
    """A google.rpc.Status. Raises `ProtobufMissing`."""
    if content_type == JSON_TYPE:
        return to_json({"message": message})
    encoded: bytes = _protobuf().status(message=message).SerializeToString()
    return encoded
