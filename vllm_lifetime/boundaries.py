# SPDX-License-Identifier: Apache-2.0
"""What a harness tells us: boundary events, the metadata of a request, and the outcome of an event.

Everything here is plain data, checked and bounded. `Boundary` and `Outcome` travel between the API
server and every EngineCore as JSON-like dictionaries; `RequestMetadata` arrives with each request in
`kv_transfer_params["lifetime"]` and is read in the EngineCore, on the thread that schedules.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

__all__ = [
    "MAX_BATCH",
    "MAX_COUNT",
    "MAX_ID_LENGTH",
    "MAX_RETAIN_S",
    "MAX_SPAWN_TEXT_LENGTH",
    "MAX_SPAWN_TOOLS",
    "METADATA_KEY",
    "Boundary",
    "BoundaryKind",
    "Outcome",
    "OutcomeStatus",
    "RequestMetadata",
    "SegmentClass",
    "Spawn",
    "merge_outcomes",
    "parse_request_metadata",
]

METADATA_KEY = "lifetime"
"""Key of a request's `kv_transfer_params` that holds its `RequestMetadata`."""

MAX_COUNT = 2**31 - 1
"""Largest number accepted where something is counted."""

MAX_BATCH = 1000
"""Most events in one batch."""

MAX_ID_LENGTH = 256
"""Most characters in an id or a name."""

MAX_RETAIN_S = 86_400.0
"""Longest wish to keep something, in seconds: a day."""

MAX_SPAWN_TEXT_LENGTH = 65_536
"""Most characters in a spawn record's instruction, and in its context."""

MAX_SPAWN_TOOLS = 256
"""Most tools in a spawn record."""

Id = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=MAX_ID_LENGTH)]
Count = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
SpawnText = Annotated[str, StringConstraints(strict=True, max_length=MAX_SPAWN_TEXT_LENGTH)]


class BoundaryKind(StrEnum):
    """Events that open or end segments."""

    SESSION_START = "session_start"
    TURN_END = "turn_end"
    SUBAGENT_SPAWN = "subagent_spawn"
    SUBAGENT_RETURN = "subagent_return"
    COMPACTION = "compaction"
    WORKFLOW_END = "workflow_end"
    SESSION_END = "session_end"


class SegmentClass(StrEnum):
    """Kinds of segment: tokens that share one lifetime."""

    SHARED = "shared"
    LEAD = "lead"
    WORKER = "worker"
    REVIEWER = "reviewer"
    REASONING_LADEN = "reasoning_laden"
    REASONING_STRIPPED = "reasoning_stripped"
    UNKNOWN = "unknown"


class Spawn(BaseModel):
    """The record a harness builds a sub-agent from, and where in the session it was spawned."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    instruction: SpawnText | None = None
    """The task given to the sub-agent."""

    context: SpawnText | None = None
    """What else the sub-agent is told."""

    tools: Annotated[tuple[Id, ...], Field(max_length=MAX_SPAWN_TOOLS)] = ()
    """Names of the tools it may call."""

    model: Id | None = None
    """Name of the model that serves it."""

    position: Count | None = None
    """How many sub-agents the session had spawned before this one."""


class Boundary(BaseModel):
    """One event of a harness. Two events with one `message_id` are the same event.

    `session_id` is required, except that a `workflow_end` may name only its workflow.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    message_id: Id
    kind: BoundaryKind
    workflow_id: Id | None = None
    session_id: Annotated[Id | None, Field(validate_default=True)] = None
    agent: Id | None = None
    """Role of the agent the event is about, e.g. `planner`."""

    agent_id: Id | None = None
    """The running instance of that role."""

    parent_agent_id: Id | None = None
    spawn: Spawn | None = None
    expected_return_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """Seconds until the harness expects to read this context again. Set on a `compaction`, it says that the old context will be
    read once more, to be summarised."""

    turn: Count | None = None
    """The turn that the event is about, as in the requests' `RequestMetadata.turn`."""

    generation: Count | None = None
    """The generation of the session that the event is about, as `GET /lifetime/v1/sessions` shows it."""

    sent_at_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    """When the harness sent the event, in Unix seconds of its clock; compared with other events of the session only."""

    @field_validator("session_id", mode="after")
    @classmethod
    def _require_session(cls, session_id: str | None, info: ValidationInfo) -> str | None:
        # A field validator, so that the error names the field. An invalid `kind` or
        # `workflow_id` is missing from `info.data` and reported by itself.
        if session_id is not None or not {"kind", "workflow_id"} <= info.data.keys():
            return session_id
        if info.data["kind"] is not BoundaryKind.WORKFLOW_END:
            raise PydanticCustomError("missing", "Field required")
        if info.data["workflow_id"] is None:
            raise PydanticCustomError("missing", "Field required: workflow_end names a workflow_id or a session_id")
        return None

    @property
    def workflow(self) -> str:
        """Return the workflow the event is about: by default the one named like the session."""
        name = self.workflow_id if self.workflow_id is not None else self.session_id
        assert name is not None  # _require_session
        return name


class RequestMetadata(BaseModel):
    """What a request says about itself in `kv_transfer_params["lifetime"]`. All of it is optional."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    workflow_id: Id | None = None
    agent: Id | None = None
    agent_id: Id | None = None
    parent_agent_id: Id | None = None
    segment_id: Id | None = None
    segment_class: SegmentClass | None = None
    turn: Count | None = None
    """Number of the user message that the request answers; a new number begins a new turn."""

    counted_turn: Count | None = None
    """User messages in the prompt, counted by the server: another number begins a new turn, but events do not know it."""

    retain_s: Annotated[float, Field(ge=0, le=MAX_RETAIN_S, allow_inf_nan=False)] | None = None
    """Wish to keep what this request reads for so many seconds after it, also when its readers are over."""

    cache_ttl_s: Annotated[float, Field(ge=0, le=MAX_RETAIN_S, allow_inf_nan=False)] | None = None
    """The same as the request's protocol has it (`cache_control`, `prompt_cache_retention`). A boundary knows better: what it
    ends is not kept."""


_EMPTY = RequestMetadata()
_KNOWN_KEYS = frozenset(RequestMetadata.model_fields)


def parse_request_metadata(params: object) -> tuple[RequestMetadata, str | None]:
    """Read the metadata from a request's `kv_transfer_params`, whatever they are.

    Returns the metadata and, when something in it was not usable, the reason in one line: one wrong
    field gives the empty metadata, a key we do not know is only left out. A request without metadata
    has the empty metadata and no reason. Called in the EngineCore for each new request; never raises.
    """
    try:
        if not isinstance(params, dict):
            return _EMPTY, None
        raw = params.get(METADATA_KEY)
        if raw is None:
            return _EMPTY, None
        if not isinstance(raw, dict):
            return _EMPTY, f"lifetime metadata ignored: a {type(raw).__name__}, not an object"
        metadata = RequestMetadata.model_validate(raw)
        if raw.keys() <= _KNOWN_KEYS:
            return metadata, None
        return metadata, f"lifetime metadata: {_name_unknown_keys(raw)} ignored"
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        return _EMPTY, f"lifetime metadata ignored: {field}: {first['msg']}"
    except Exception as error:  # the request must go on
        return _EMPTY, f"lifetime metadata ignored: {type(error).__name__}"


def _name_unknown_keys(raw: dict[Any, Any]) -> str:
    """Name at most three of the keys we do not know, each cut short, in one line."""
    unknown = [key for key in raw if key not in _KNOWN_KEYS]
    names = ", ".join(repr(key)[:40] for key in unknown[:3])
    more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
    return f"unknown key{'s' if len(unknown) > 1 else ''} {names}{more}"


class OutcomeStatus(StrEnum):
    """What became of an event, best first. No engine says `queued`: the API server does, to who does not wait for the engines."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    QUEUED = "queued"
    IGNORED = "ignored"
    REJECTED = "rejected"


_RANK = {status: rank for rank, status in enumerate(OutcomeStatus)}


class Outcome(BaseModel):
    """The answer to one event: what it did, and how much it freed or retired in all tiers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    message_id: str
    status: OutcomeStatus
    reason: str | None = None
    blocks: Annotated[int, Field(ge=0)] = 0
    bytes: Annotated[int, Field(ge=0)] = 0


def merge_outcomes(outcomes: list[Outcome]) -> Outcome:
    """Return one outcome for one event that several engines answered.

    Blocks and bytes add up; the status is the best one, with the first reason given for it: an event
    that concerns one engine only is ignored by the others. Raises `ValueError` for an empty list.
    """
    if not outcomes:
        raise ValueError("no outcomes to merge")
    best = min((outcome.status for outcome in outcomes), key=_RANK.__getitem__)
    reasons = (o.reason for o in outcomes if o.status is best and o.reason is not None)
    return Outcome(
        message_id=outcomes[0].message_id,
        status=best,
        reason=next(reasons, None),
        blocks=sum(outcome.blocks for outcome in outcomes),
        bytes=sum(outcome.bytes for outcome in outcomes),
    )
