# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_lifetime.boundaries import (
    MAX_COUNT,
    MAX_ID_LENGTH,
    MAX_SPAWN_TEXT_LENGTH,
    MAX_SPAWN_TOOLS,
    Boundary,
    BoundaryKind,
    Outcome,
    OutcomeStatus,
    RequestMetadata,
    SegmentClass,
    merge_outcomes,
    parse_request_metadata,
)

TURN_END = {"message_id": "m1", "kind": "turn_end", "session_id": "s1"}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=20,
)
metadata_fields = st.sampled_from([*RequestMetadata.model_fields, "other", "line\nbreak"])


def errors_of(event: dict[str, Any]) -> list[tuple[tuple[int | str, ...], str]]:
    with pytest.raises(ValidationError) as caught:
        Boundary.model_validate(event)
    return [(error["loc"], error["type"]) for error in caught.value.errors()]


@pytest.mark.parametrize("kind", list(BoundaryKind))
def test_every_kind_is_accepted_with_a_session(kind: BoundaryKind) -> None:
    event = Boundary.model_validate(TURN_END | {"kind": kind.value})
    assert event.kind is kind
    assert event.workflow == "s1"


@pytest.mark.parametrize("kind", [kind for kind in BoundaryKind if kind is not BoundaryKind.WORKFLOW_END])
def test_a_session_is_required_even_beside_a_workflow(kind: BoundaryKind) -> None:
    event = {"message_id": "m1", "kind": kind.value, "workflow_id": "w1"}
    assert errors_of(event) == [(("session_id",), "missing")]


def test_workflow_end_may_name_only_its_workflow() -> None:
    event = Boundary.model_validate({"message_id": "m1", "kind": "workflow_end", "workflow_id": "w1"})
    assert (event.session_id, event.workflow) == (None, "w1")


def test_workflow_end_must_name_something() -> None:
    assert errors_of({"message_id": "m1", "kind": "workflow_end"}) == [(("session_id",), "missing")]


@pytest.mark.parametrize(
    ("change", "field", "error"),
    [
        ({"message_id": ""}, ("message_id",), "string_too_short"),
        ({"message_id": "m" * (MAX_ID_LENGTH + 1)}, ("message_id",), "string_too_long"),
        ({"message_id": 1}, ("message_id",), "string_type"),
        ({"kind": "end"}, ("kind",), "enum"),
        ({"session_id": ""}, ("session_id",), "string_too_short"),
        ({"workflow_id": ["w"]}, ("workflow_id",), "string_type"),
        ({"sesion_id": "s"}, ("sesion_id",), "extra_forbidden"),
        ({"expected_return_s": -1}, ("expected_return_s",), "greater_than_equal"),
        ({"expected_return_s": float("inf")}, ("expected_return_s",), "finite_number"),
        ({"expected_return_s": float("nan")}, ("expected_return_s",), "finite_number"),
        ({"expected_return_s": "5"}, ("expected_return_s",), "float_type"),
        ({"expected_return_s": True}, ("expected_return_s",), "float_type"),
        ({"spawn": {"position": -1}}, ("spawn", "position"), "greater_than_equal"),
        ({"spawn": {"position": MAX_COUNT + 1}}, ("spawn", "position"), "less_than_equal"),
        ({"spawn": {"instruction": "x" * (MAX_SPAWN_TEXT_LENGTH + 1)}}, ("spawn", "instruction"), "string_too_long"),
        ({"spawn": {"tools": ["t"] * (MAX_SPAWN_TOOLS + 1)}}, ("spawn", "tools"), "too_long"),
        ({"spawn": {"tools": ["ok", ""]}}, ("spawn", "tools", 1), "string_too_short"),
        ({"spawn": {"task": "x"}}, ("spawn", "task"), "extra_forbidden"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], field: tuple[int | str, ...], error: str) -> None:
    assert errors_of(TURN_END | change) == [(field, error)]


def test_an_event_survives_the_way_to_the_engine() -> None:
    spawn = {"instruction": "do", "context": "it", "tools": ["bash"], "model": "m", "position": 2}
    event = Boundary.model_validate(
        TURN_END | {"kind": "subagent_spawn", "agent": "a", "agent_id": "a1", "parent_agent_id": "a0", "spawn": spawn}
    )
    assert Boundary.model_validate(event.model_dump(mode="json", exclude_none=True)) == event


@pytest.mark.parametrize("params", [None, {}, {"lifetime": None}, {"do_remote_decode": True}, "text", 7, []])
def test_a_request_without_metadata_gives_no_reason(params: object) -> None:
    assert parse_request_metadata(params) == (RequestMetadata(), None)


def test_metadata_is_read() -> None:
    raw = {
        "workflow_id": "w",
        "agent": "planner",
        "agent_id": "p1",
        "parent_agent_id": "p0",
        "segment_id": "s",
        "segment_class": "worker",
        "turn": 3,
    }
    metadata, reason = parse_request_metadata({"lifetime": raw, "other": 1})
    assert reason is None
    assert metadata.segment_class is SegmentClass.WORKER
    assert metadata.model_dump(mode="json", exclude_none=True) == raw


def test_unknown_keys_are_left_out_and_named() -> None:
    metadata, reason = parse_request_metadata({"lifetime": {"agent": "a", "agnt\n": 1}})
    assert metadata == RequestMetadata(agent="a")
    assert reason == "lifetime metadata: unknown key 'agnt\\n' ignored"
    _, reason = parse_request_metadata({"lifetime": {f"key{i}": i for i in range(5)}})
    assert reason == "lifetime metadata: unknown keys 'key0', 'key1', 'key2' and 2 more ignored"


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ({"turn": -1, "agent": "a"}, "turn"),
        ({"turn": True}, "turn"),
        ({"turn": "3"}, "turn"),
        ({"segment_class": "flash"}, "segment_class"),
        ({"agent": b"bytes"}, "agent"),
        ({"workflow_id": "w" * (MAX_ID_LENGTH + 1)}, "workflow_id"),
        ([], "list"),
        ("worker", "str"),
    ],
)
def test_wrong_metadata_is_empty_and_says_why(raw: object, name: str) -> None:
    metadata, reason = parse_request_metadata({"lifetime": raw})
    assert metadata == RequestMetadata()
    assert reason is not None
    assert name in reason


@given(json_values | st.builds(lambda raw: {"lifetime": raw}, json_values))
def test_any_json_is_taken(params: object) -> None:
    metadata, reason = parse_request_metadata(params)
    assert isinstance(metadata, RequestMetadata)
    assert reason is None or ("\n" not in reason and len(reason) < 500)


@given(st.dictionaries(metadata_fields, json_values, max_size=8))
def test_any_values_of_the_fields_are_taken(raw: dict[str, object]) -> None:
    metadata, reason = parse_request_metadata({"lifetime": raw})
    assert isinstance(metadata, RequestMetadata)
    assert reason is None or ("\n" not in reason and len(reason) < 500)


class Hostile(dict[str, object]):
    """A mapping whose methods fail."""

    def get(self, *_: object) -> object:
        raise RuntimeError("no")

    def keys(self) -> Any:
        raise RuntimeError("no")


def test_an_object_that_fails_is_taken() -> None:
    assert parse_request_metadata(Hostile()) == (RequestMetadata(), "lifetime metadata ignored: RuntimeError")
    assert parse_request_metadata({"lifetime": Hostile(agent="a")})[0] == RequestMetadata()


def outcome(status: OutcomeStatus, **fields: Any) -> Outcome:
    return Outcome(message_id="m1", status=status, **fields)


def test_outcomes_add_up_under_the_best_status() -> None:
    merged = merge_outcomes(
        [
            outcome(OutcomeStatus.IGNORED, reason="no such session"),
            outcome(OutcomeStatus.ACCEPTED, blocks=3, bytes=300),
            outcome(OutcomeStatus.DUPLICATE, reason="seen", blocks=1, bytes=100),
        ]
    )
    assert merged == outcome(OutcomeStatus.ACCEPTED, blocks=4, bytes=400)


def test_the_reason_is_one_of_the_best_status() -> None:
    merged = merge_outcomes(
        [outcome(OutcomeStatus.REJECTED, reason="full"), outcome(OutcomeStatus.IGNORED, reason="no such session")]
    )
    assert merged == outcome(OutcomeStatus.IGNORED, reason="no such session")


def test_no_outcomes_do_not_merge() -> None:
    with pytest.raises(ValueError, match="no outcomes"):
        merge_outcomes([])


@given(st.lists(st.sampled_from(OutcomeStatus), min_size=1, max_size=6))
def test_merging_does_not_depend_on_the_order_of_engines(statuses: list[OutcomeStatus]) -> None:
    outcomes = [outcome(status, blocks=index, bytes=2 * index) for index, status in enumerate(statuses)]
    assert merge_outcomes(outcomes) == merge_outcomes(outcomes[::-1])
