# SPDX-License-Identifier: Apache-2.0
"""Hints in vLLM's envelope (`vllm.v1.kv_hints.protocol`, protocol 0.1): what an orchestrator wishes for KV cache.

The envelope is checked as a whole, each action by itself: one that we do not know, or whose payload is not what it should
be, is answered `rejected` and leaves the others alone. Everything here is plain data, checked and bounded. Runs in the API
server; accepted actions travel to the EngineCores as JSON-like dictionaries.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from vllm_lifetime.boundaries import MAX_RETAIN_S, Boundary, Id, Outcome, OutcomeStatus

__all__ = [
    "ACTION_VERSION",
    "DEFAULT_PRIORITY",
    "MAX_ACTIONS",
    "PROTOCOL_VERSION",
    "HintActionType",
    "HintOutcome",
    "HintStatus",
    "HintTarget",
    "KvHintAction",
    "KvHintsEnvelope",
    "RetainPayload",
    "check_actions",
    "merge_hint_outcomes",
    "outcome_of_boundary",
]

PROTOCOL_VERSION = "0.1"
"""The envelope's version that we speak."""

ACTION_VERSION = "1.0"
"""The version of every action type that we know."""

MAX_ACTIONS = 100
"""Most actions in one envelope."""

DEFAULT_PRIORITY = 35
"""Priority (0 to 100) of a `kv.retain` that names none: what is kept stands among the rest by recency."""


class HintActionType(StrEnum):
    """The actions we know."""

    RETAIN = "kv.retain"
    RELEASE = "kv.release"
    DEMOTE = "kv.demote"
    PREFETCH = "kv.prefetch"
    BOUNDARY = "lifetime.boundary"


class KvHintAction(BaseModel):
    """One wish. Two actions of envelopes with one `message_id` that have one `action_id` are the same action."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    action_id: Id
    action_type: Annotated[Id, Field(examples=["kv.retain"])]
    action_version: Annotated[Id, Field(examples=[ACTION_VERSION])]
    payload: dict[str, Any]
    """What the action type takes."""


class KvHintsEnvelope(BaseModel):
    """A message of an orchestrator. Fields that we do not know are left out, as vLLM does."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    protocol_version: Literal["0.1"]
    message_id: Id
    actions: Annotated[list[KvHintAction], Field(max_length=MAX_ACTIONS)]


class HintTarget(BaseModel):
    """Whose KV cache a hint is about: a session or a workflow, or within it one agent instance or one segment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    session_id: Id | None = None
    workflow_id: Id | None = None
    agent_id: Id | None = None
    segment_id: Id | None = None

    @model_validator(mode="after")
    def _require_owner(self) -> HintTarget:
        if self.session_id is None and self.workflow_id is None:
            raise PydanticCustomError("missing", "session_id or workflow_id is required")
        return self


class RetainPayload(HintTarget):
    """A wish to keep something. It orders what is evicted; it never makes a request wait."""

    ttl_s: Annotated[float, Field(strict=True, ge=0, le=MAX_RETAIN_S, allow_inf_nan=False)]
    """How long from now, in seconds."""

    priority: Annotated[int, Field(strict=True, ge=0, le=100)] = DEFAULT_PRIORITY
    """The higher, the longer kept among what is retained."""


_KNOWN_TYPES: frozenset[str] = frozenset(HintActionType)

_PAYLOADS: dict[str, type[HintTarget]] = {
    HintActionType.RETAIN: RetainPayload,
    HintActionType.RELEASE: HintTarget,
    HintActionType.DEMOTE: HintTarget,
    HintActionType.PREFETCH: HintTarget,
}


class HintStatus(StrEnum):
    """What became of an action, best first. `missing`: there is nothing that it could be about."""

    ACCEPTED = "accepted"
    CLIPPED = "clipped"
    DEFERRED = "deferred"
    DUPLICATE = "duplicate"
    REJECTED = "rejected"
    MISSING = "missing"


_RANK = {status: rank for rank, status in enumerate(HintStatus)}

_STATUS_OF_BOUNDARY = {
    OutcomeStatus.ACCEPTED: HintStatus.ACCEPTED,
    OutcomeStatus.DUPLICATE: HintStatus.DUPLICATE,
    OutcomeStatus.IGNORED: HintStatus.MISSING,
    OutcomeStatus.REJECTED: HintStatus.REJECTED,
    OutcomeStatus.QUEUED: HintStatus.DEFERRED,
}


class HintOutcome(BaseModel):
    """The answer to one action: what it did, and how much of all tiers it concerned."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    action_id: str
    status: HintStatus
    reason: str | None = None
    blocks: Annotated[int, Field(ge=0)] = 0
    bytes: Annotated[int, Field(ge=0)] = 0


def check_actions(envelope: KvHintsEnvelope) -> list[Boundary | KvHintAction | HintOutcome]:
    """Return for each action, in order, what is to be done with it.

    That is a `Boundary` to be reported, an action for the engines (its payload checked and complete), or the outcome
    when nothing is to be done.
    """
    seen: set[str] = set()
    checked: list[Boundary | KvHintAction | HintOutcome] = []
    for action in envelope.actions:
        if action.action_id in seen:
            reason = "this action_id stands in the envelope twice"
            checked.append(HintOutcome(action_id=action.action_id, status=HintStatus.DUPLICATE, reason=reason))
            continue
        seen.add(action.action_id)
        checked.append(_check_action(envelope.message_id, action))
    return checked


def _check_action(message_id: str, action: KvHintAction) -> Boundary | KvHintAction | HintOutcome:
    if action.action_type not in _KNOWN_TYPES:
        known = ", ".join(HintActionType)
        return _reject(action, f"unknown action_type {action.action_type!r}; known: {known}")
    if action.action_version != ACTION_VERSION:
        return _reject(action, f"unknown action_version {action.action_version!r}; known: {ACTION_VERSION}")
    try:
        if action.action_type == HintActionType.BOUNDARY:
            if "message_id" in action.payload:
                return _reject(action, "payload.message_id: not permitted; it is the envelope's, with the action_id")
            return Boundary.model_validate({**action.payload, "message_id": f"{message_id}/{action.action_id}"})
        payload = _PAYLOADS[action.action_type].model_validate(action.payload)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in ("payload", *first["loc"]))
        return _reject(action, f"{where}: {first['msg']}")
    return action.model_copy(update={"payload": payload.model_dump(exclude_none=True)})


def _reject(action: KvHintAction, reason: str) -> HintOutcome:
    return HintOutcome(action_id=action.action_id, status=HintStatus.REJECTED, reason=reason)


def outcome_of_boundary(action_id: str, outcome: Outcome) -> HintOutcome:
    """Return the outcome of the `lifetime.boundary` action whose event had this outcome."""
    return HintOutcome(
        action_id=action_id,
        status=_STATUS_OF_BOUNDARY[outcome.status],
        reason=outcome.reason,
        blocks=outcome.blocks,
        bytes=outcome.bytes,
    )


def merge_hint_outcomes(outcomes: list[HintOutcome]) -> HintOutcome:
    """Return one outcome for one action that several engines answered.

    Blocks and bytes add up; the status is the best one, with the first reason given for it: what one engine holds is
    missing in the others. Raises `ValueError` for an empty list.
    """
    if not outcomes:
        raise ValueError("no outcomes to merge")
    best = min((outcome.status for outcome in outcomes), key=_RANK.__getitem__)
    reasons = (outcome.reason for outcome in outcomes if outcome.status is best and outcome.reason is not None)
    return HintOutcome(
        action_id=outcomes[0].action_id,
        status=best,
        reason=next(reasons, None),
        blocks=sum(outcome.blocks for outcome in outcomes),
        bytes=sum(outcome.bytes for outcome in outcomes),
    )
