# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest

from vllm_lifetime.boundaries import Boundary, BoundaryKind, Outcome, OutcomeStatus
from vllm_lifetime.hints import (
    HintOutcome,
    HintStatus,
    KvHintAction,
    KvHintsEnvelope,
    check_actions,
    merge_hint_outcomes,
    outcome_of_boundary,
)


def check(action_type: str, payload: dict[str, Any], version: str = "1.0", message_id: str = "e1") -> Any:
    action = {"action_id": "a1", "action_type": action_type, "action_version": version, "payload": payload}
    envelope = KvHintsEnvelope.model_validate({"protocol_version": "0.1", "message_id": message_id, "actions": [action]})
    (checked,) = check_actions(envelope)
    return checked


def test_the_envelope_is_vllms() -> None:
    """What vLLM's own type says is read, and no field is missing."""
    protocol = pytest.importorskip("vllm.v1.kv_hints.protocol")
    msgspec = pytest.importorskip("msgspec")
    action = protocol.KvHintAction(
        action_id="a1", action_type="kv.retain", action_version="1.0", payload={"session_id": "s", "ttl_s": 1}
    )
    theirs = protocol.KvHintsEnvelope(protocol_version="0.1", message_id="e1", actions=[action])
    ours = KvHintsEnvelope.model_validate_json(msgspec.json.encode(theirs))
    assert ours.model_dump() == msgspec.to_builtins(theirs)
    assert isinstance(check_actions(ours)[0], KvHintAction)


def test_what_a_later_vllm_adds_is_left_out() -> None:
    action = {
        "action_id": "a",
        "action_type": "kv.release",
        "action_version": "1.0",
        "payload": {"session_id": "s"},
        "deadline": 5,
    }
    envelope = KvHintsEnvelope.model_validate({"protocol_version": "0.1", "message_id": "e1", "actions": [action], "sender": "x"})
    assert isinstance(check_actions(envelope)[0], KvHintAction)


@pytest.mark.parametrize(
    ("action_type", "payload", "complete"),
    [
        ("kv.retain", {"session_id": "s", "ttl_s": 5}, {"session_id": "s", "ttl_s": 5.0, "priority": 35}),
        ("kv.retain", {"workflow_id": "w", "ttl_s": 0, "priority": 100}, {"workflow_id": "w", "ttl_s": 0.0, "priority": 100}),
        ("kv.release", {"session_id": "s", "agent_id": "a"}, {"session_id": "s", "agent_id": "a"}),
        ("kv.demote", {"session_id": "s", "segment_id": "g", "agent_id": None}, {"session_id": "s", "segment_id": "g"}),
        ("kv.prefetch", {"workflow_id": "w"}, {"workflow_id": "w"}),
    ],
)
def test_a_valid_action_goes_to_the_engines_with_its_payload_complete(
    action_type: str, payload: dict[str, Any], complete: dict[str, Any]
) -> None:
    action = check(action_type, payload)
    assert isinstance(action, KvHintAction)
    assert action.payload == complete


@pytest.mark.parametrize(
    ("action_type", "version", "payload", "reason"),
    [
        (
            "kv.fetch",
            "1.0",
            {},
            "unknown action_type 'kv.fetch'; known: kv.retain, kv.release, kv.demote, kv.prefetch, lifetime.boundary",
        ),
        ("KV.RETAIN", "1.0", {}, "unknown action_type"),
        ("kv.retain", "1.1", {"session_id": "s", "ttl_s": 5}, "unknown action_version '1.1'; known: 1.0"),
        ("kv.retain", "1.0", {"session_id": "s"}, "payload.ttl_s: Field required"),
        ("kv.retain", "1.0", {"ttl_s": 5}, "session_id or workflow_id is required"),
        ("kv.retain", "1.0", {"session_id": "s", "ttl_s": 86_401}, "payload.ttl_s: Input should be less than or equal to 86400"),
        ("kv.retain", "1.0", {"session_id": "s", "ttl_s": -1}, "payload.ttl_s"),
        ("kv.retain", "1.0", {"session_id": "s", "ttl_s": float("inf")}, "payload.ttl_s"),
        ("kv.retain", "1.0", {"session_id": "s", "ttl_s": "5"}, "payload.ttl_s"),
        ("kv.retain", "1.0", {"session_id": "s", "ttl_s": 5, "priority": 101}, "payload.priority"),
        ("kv.retain", "1.0", {"session_id": "s", "ttl_s": 5, "tokens": [0, 9]}, "payload.tokens: Extra inputs are not permitted"),
        ("kv.release", "1.0", {"agent_id": "a"}, "session_id or workflow_id is required"),
        ("kv.release", "1.0", {"session_id": "s" * 257}, "payload.session_id"),
        ("lifetime.boundary", "1.0", {"kind": "turn_end"}, "payload.session_id: Field required"),
        ("lifetime.boundary", "1.0", {"kind": "over", "session_id": "s"}, "payload.kind"),
        (
            "lifetime.boundary",
            "1.0",
            {"kind": "turn_end", "session_id": "s", "message_id": "m"},
            "payload.message_id: not permitted",
        ),
    ],
)
def test_what_we_cannot_do_is_rejected_with_a_reason(
    action_type: str, version: str, payload: dict[str, Any], reason: str
) -> None:
    outcome = check(action_type, payload, version)
    assert isinstance(outcome, HintOutcome)
    assert (outcome.action_id, outcome.status) == ("a1", HintStatus.REJECTED)
    assert outcome.reason is not None and reason in outcome.reason


def test_a_boundary_gets_its_message_id_from_envelope_and_action() -> None:
    event = check("lifetime.boundary", {"kind": "session_end", "session_id": "s"}, message_id="x" * 253)
    assert event == Boundary(message_id="x" * 253 + "/a1", kind=BoundaryKind.SESSION_END, session_id="s")
    outcome = check("lifetime.boundary", {"kind": "session_end", "session_id": "s"}, message_id="x" * 254)
    assert isinstance(outcome, HintOutcome) and outcome.reason is not None and "256 characters" in outcome.reason


@pytest.mark.parametrize(
    ("boundary", "hint"),
    [
        (OutcomeStatus.ACCEPTED, HintStatus.ACCEPTED),
        (OutcomeStatus.DUPLICATE, HintStatus.DUPLICATE),
        (OutcomeStatus.IGNORED, HintStatus.MISSING),
        (OutcomeStatus.REJECTED, HintStatus.REJECTED),
    ],
)
def test_every_outcome_of_a_boundary_is_one_of_a_hint(boundary: OutcomeStatus, hint: HintStatus) -> None:
    outcome = outcome_of_boundary("a1", Outcome(message_id="m", status=boundary, reason="because", blocks=2, bytes=20))
    assert outcome == HintOutcome(action_id="a1", status=hint, reason="because", blocks=2, bytes=20)


def test_merged_hints_tell_of_the_engine_they_concern() -> None:
    def outcome(status: str, reason: str | None = None, blocks: int = 0) -> HintOutcome:
        return HintOutcome(action_id="a1", status=HintStatus(status), reason=reason, blocks=blocks, bytes=10 * blocks)

    missing = outcome("missing", "nothing here")
    assert merge_hint_outcomes([missing, outcome("rejected", "no room")]).reason == "no room"
    merged = merge_hint_outcomes([missing, outcome("clipped", "half of it", 3), outcome("accepted", None, 4)])
    assert merged == outcome("accepted", None, 7)
    assert merge_hint_outcomes([missing, missing]) == missing
    with pytest.raises(ValueError, match="no outcomes"):
        merge_hint_outcomes([])
