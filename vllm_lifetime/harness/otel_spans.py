# SPDX-License-Identifier: Apache-2.0
"""What is read of an OpenTelemetry span, and the conventions by which it is understood.

Three are known: OpenTelemetry's own for GenAI (`gen_ai.*`, releases up to 0.1.0 of the separate conventions), OpenInference and
OpenLLMetry (Traceloop). Pure data; `vllm_lifetime.harness.otel` draws the conclusions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

__all__ = [
    "AGENT_ID_KEY",
    "NAME_KEYS",
    "READ_KEYS",
    "READ_RESOURCE_KEYS",
    "RESOURCE_SESSION_KEY",
    "RUN_END_KEY",
    "SESSION_END_EVENT",
    "SESSION_KEYS",
    "WORKFLOW_KEY",
    "Role",
    "Span",
    "first_of",
    "role_of",
]

SESSION_KEYS = (
    "gen_ai.conversation.id",
    "traceloop.association.properties.thread_id",
    "session.id",
    "traceloop.association.properties.session_id",
)
"""Attributes that name the session, best first."""

WORKFLOW_KEY = "lifetime.workflow_id"
"""Attribute, of a span or of the resource, that names the workflow as the requests do."""

RUN_END_KEY = "lifetime.run_end"
"""Attribute of the resource: what the end of a root span is, `turn_end` or `workflow_end`.

Without it, the end of a workflow's span is a `workflow_end` if the span or the resource names the workflow, or if the session
is the process (named by the resource alone). A session that spans name is a conversation: the next run in it may read all of it
again, so that a `workflow_end` would give up what the next message needs; there it is a `turn_end`.
"""

RESOURCE_SESSION_KEY = "session.id"
"""Attribute of the resource that names the session of all spans for which nothing else does."""

SESSION_END_EVENT = "session.end"
"""Name of the span event that ends a session, with its `session.id`: OpenTelemetry's own event for it."""

_OPERATION = "gen_ai.operation.name"
_OPENINFERENCE = "openinference.span.kind"
_TRACELOOP = "traceloop.span.kind"

NAME_KEYS = ("gen_ai.agent.name", "agent.name", "traceloop.entity.name")
"""Attributes that name the agent, best first."""

AGENT_ID_KEY = "gen_ai.agent.id"
"""Attribute that identifies the agent: its definition or one instance, as the harness has it."""

READ_KEYS = frozenset({_OPERATION, _OPENINFERENCE, _TRACELOOP, *NAME_KEYS, AGENT_ID_KEY, *SESSION_KEYS, WORKFLOW_KEY})
"""The attributes of a span that are read at all."""

READ_RESOURCE_KEYS = frozenset({RESOURCE_SESSION_KEY, WORKFLOW_KEY, RUN_END_KEY})
"""The attributes of a resource that are read."""


class Role(Enum):
    """What a span is about, if it matters here."""

    AGENT = auto()
    """One invocation of a named agent."""
    WORKFLOW = auto()
    """A run of several agents."""
    RUN = auto()
    """A run that names neither an agent nor a workflow."""
    TOOL = auto()
    """An agent calls something."""


_OPERATIONS = {
    "invoke_agent": Role.AGENT,
    "invoke_workflow": Role.WORKFLOW,
    "execute_tool": Role.TOOL,
}
_OPENINFERENCE_KINDS = {"AGENT": Role.AGENT, "CHAIN": Role.RUN, "TOOL": Role.TOOL}
_TRACELOOP_KINDS = {"agent": Role.AGENT, "workflow": Role.WORKFLOW, "tool": Role.TOOL}


@dataclass(slots=True)
class Span:
    """What is read of one ended span. Ids are 16 and 8 bytes; `parent_id` is empty for a root.

    `attributes` and `resource` hold what `READ_KEYS` and `READ_RESOURCE_KEYS` name, each 1 to 256 characters long. `session_ends`
    are the `session.end` events: the session each names, if any, and when it was, in nanoseconds since 1970.
    """

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    ended_ns: int
    attributes: Mapping[str, str]
    resource: Mapping[str, str]
    session_ends: tuple[tuple[str | None, int], ...] = ()


def first_of(attributes: Mapping[str, str], keys: Iterable[str]) -> str | None:
    """The value of the first of `keys` that is there."""
    for key in keys:
        value = attributes.get(key)
        if value is not None:
            return value
    return None


def role_of(attributes: Mapping[str, str]) -> Role | None:
    """What a span with these attributes is about: the first of the conventions that says anything."""
    if not attributes:
        return None
    role = _OPERATIONS.get(attributes.get(_OPERATION, ""))
    if role is not None:
        return role
    role = _OPENINFERENCE_KINDS.get(attributes.get(_OPENINFERENCE, ""))
    if role is Role.AGENT and "agent.name" not in attributes:
        # Instrumentations wrap a whole run in such a span, and call each step of a node named "agent" one.
        return Role.RUN
    return role or _TRACELOOP_KINDS.get(attributes.get(_TRACELOOP, ""))
