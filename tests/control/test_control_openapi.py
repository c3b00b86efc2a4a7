# SPDX-License-Identifier: Apache-2.0
"""The OpenAPI document, and the routes held against it on a real server by schemathesis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from control_fakes import API, FakeEngines, build_app, send, serve, session_view
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import allow_header_conformance, negative_data_rejection, positive_data_acceptance

from vllm_lifetime.control import ControlSettings

HEADERS = {"Authorization": "Bearer secret"}
SETTINGS = ControlSettings(tokens=("secret",), events_per_s=1e6, events_burst=10**6)


class KnowingEngines(FakeEngines):
    """Engines that know every second session they are asked for."""

    def answer(self, method: str, payload: dict[str, Any], rank: int) -> dict[str, Any]:
        if method == "session" and len(payload["session_id"]) % 2:
            return {"session": session_view(payload["session_id"])}
        return super().answer(method, payload, rank)


def build_known_app() -> Any:
    engines = KnowingEngines(count=2)
    for number in range(5):
        engines.sessions[number % 2][f"s{number}"] = session_view(f"s{number}")
    return build_app(engines, settings=SETTINGS)


def read_document() -> dict[str, Any]:
    response = send(build_known_app(), "GET", f"{API}/openapi.json", headers=HEADERS)
    assert response.status_code == 200
    return dict(response.json())


DOCUMENT = read_document()


def find_references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"]
        for value in node.values():
            yield from find_references(value)
    elif isinstance(node, list):
        for value in node:
            yield from find_references(value)


def test_every_route_is_described_and_nothing_else() -> None:
    methods = {path.removeprefix(API): sorted(routes) for path, routes in DOCUMENT["paths"].items()}
    assert methods == {
        "/boundaries": ["post"],
        "/hints": ["post"],
        "/sessions": ["get"],
        "/sessions/{session_id}": ["delete", "get"],
        "/tiers": ["get"],
        "/health": ["get"],
        "/events": ["get"],
        "/hooks/claude-code": ["post"],
        "/otlp/v1/traces": ["post"],
        "/dashboard": ["get"],
    }
    assert DOCUMENT["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"


def test_bodies_are_described_in_full() -> None:
    body = DOCUMENT["paths"][f"{API}/boundaries"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    event, batch = body["anyOf"]
    assert set(event["required"]) == {"message_id", "kind"}
    assert "turn_end" in event["properties"]["kind"]["enum"]
    assert event["additionalProperties"] is False
    assert event["properties"]["spawn"]["anyOf"][0]["properties"]["tools"]["maxItems"] == 256
    assert (batch["items"], batch["minItems"], batch["maxItems"]) == (event, 1, 1000)


def test_the_preference_is_described() -> None:
    route = DOCUMENT["paths"][f"{API}/boundaries"]["post"]
    (parameter,) = route["parameters"]
    assert (parameter["name"], parameter["in"], parameter.get("required", False)) == ("Prefer", "header", False)
    accepted = route["responses"]["202"]
    assert accepted["headers"]["Preference-Applied"]["schema"]["const"] == "respond-async"
    assert accepted["content"]["application/json"]["schema"]["$ref"].endswith("/BoundaryOutcomes")
    assert "queued" in DOCUMENT["components"]["schemas"]["OutcomeStatus"]["enum"]


def test_the_document_is_whole_alone_and_as_part_of_an_apps() -> None:
    of_app = send(build_known_app(), "GET", "/openapi.json").json()
    for document in (DOCUMENT, of_app):
        for reference in set(find_references(document)):
            node = document
            for key in reference.removeprefix("#/").split("/"):
                node = node[key]
    assert {path: of_app["paths"][path] for path in DOCUMENT["paths"]} == DOCUMENT["paths"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server whose engines know some sessions."""
    with serve(build_known_app()) as url:
        yield url


@schemathesis.serializer("application/x-protobuf")
def serialize_protobuf(context: schemathesis.SerializationContext, value: Any) -> bytes:
    """Bytes that are hardly ever an export."""
    return value if isinstance(value, bytes) else str(value).encode()


SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)


@SCHEMA.parametrize()
@settings(max_examples=10, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_no_request_gets_an_answer_that_is_not_described(case: schemathesis.Case, url: str) -> None:
    """Neither a status nor a body, nor a 5xx; what the document allows is served and what it forbids refused."""
    # Starlette names the methods of one of two routes with the same path.
    excluded = [allow_header_conformance, positive_data_acceptance]
    if case.method in ("GET", "DELETE"):
        excluded.append(negative_data_rejection)  # a parameter that nobody reads is no error
    response = case.call_and_validate(base_url=url, headers=HEADERS, excluded_checks=excluded)
    is_valid = case.meta is not None and case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE
    if is_valid and case.path.startswith((f"{API}/boundaries", f"{API}/hints")) and response.status_code == 422:
        # For JSON schema 1.0 is an integer.
        assert {error["type"] for error in response.json()["detail"]} == {"int_type"}
