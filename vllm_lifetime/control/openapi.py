# SPDX-License-Identifier: Apache-2.0
"""What the OpenAPI document says of bodies that the routes read themselves, and of errors. Used once, when routes are made."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from vllm_lifetime.boundaries import BoundaryKind
from vllm_lifetime.control.views import ErrorList, ErrorText

__all__ = ["BOUNDARY_RULE", "describe_errors_of", "json_body", "schema_of"]

_TEXTS = {
    401: "No valid token, and one is needed.",
    403: "Sent by a browser for a page of another origin.",
    404: "No engine knows the session.",
    413: "The body is too long.",
    415: "The body has another content type.",
    422: "Not what the route takes; `detail` names each field.",
    429: "More events than this server takes; `Retry-After` says when to try again.",
    503: "An engine is dead, does not answer, or does not keep up: try again.",
}

BOUNDARY_RULE = {
    "anyOf": [
        {"required": ["session_id"], "properties": {"session_id": {"type": "string"}}},
        {
            "required": ["kind", "workflow_id"],
            "properties": {"kind": {"const": BoundaryKind.WORKFLOW_END.value}, "workflow_id": {"type": "string"}},
        },
    ]
}
"""Of a `Boundary`, what its fields by themselves do not say: it names a session, or ends a workflow."""


def describe_errors_of(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return FastAPI's `responses` for these error statuses."""
    return {status: {"description": _TEXTS[status], "model": ErrorList if status == 422 else ErrorText} for status in statuses}


def json_body(schema: dict[str, Any], description: str, examples: dict[str, Any]) -> dict[str, Any]:
    """Return FastAPI's `openapi_extra` for a JSON body; `examples` have a summary for a key."""
    named = {summary: {"summary": summary, "value": value} for summary, value in examples.items()}
    content = {"application/json": {"schema": schema, "examples": named}}
    return {"requestBody": {"description": description, "required": True, "content": content}}


def schema_of(model: Any) -> dict[str, Any]:
    """Return the JSON schema of what `model` reads, complete in itself.

    A reference would have to lead into the components of whichever document the route stands in, vLLM's or ours.
    """
    schema = TypeAdapter(model).json_schema(ref_template="{model}")
    definitions = schema.pop("$defs", {})

    def inline(node: Any) -> Any:
        if isinstance(node, list):
            return [inline(item) for item in node]
        if not isinstance(node, dict):
            return node
        rest = {key: inline(value) for key, value in node.items() if key != "$ref"}
        return {**inline(definitions[node["$ref"]]), **rest} if "$ref" in node else rest

    return dict(inline(schema))
