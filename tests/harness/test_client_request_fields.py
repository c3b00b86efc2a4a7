# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import uuid

import openai
import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient

from vllm_lifetime.boundaries import SegmentClass, parse_request_metadata
from vllm_lifetime.harness import request_fields


def test_every_field_is_where_the_server_looks_for_it() -> None:
    fields = request_fields(
        session_id="s",
        workflow_id="w",
        agent="planner",
        agent_id="p1",
        parent_agent_id="p0",
        segment_class=SegmentClass.LEAD,
        turn=0,
        retain_s=300,
    )
    assert fields["extra_headers"] == {"X-Session-ID": "s"}
    assert set(fields["extra_body"]) == {"kv_transfer_params"}
    metadata, reason = parse_request_metadata(fields["extra_body"]["kv_transfer_params"])
    assert reason is None
    assert metadata.model_dump(exclude_none=True) == {
        "workflow_id": "w",
        "agent": "planner",
        "agent_id": "p1",
        "parent_agent_id": "p0",
        "segment_class": "lead",
        "turn": 0,
        "retain_s": 300.0,
    }


def test_what_is_not_given_is_not_sent() -> None:
    assert request_fields() == {"extra_headers": {}, "extra_body": {}}
    assert request_fields(session_id="s") == {"extra_headers": {"X-Session-ID": "s"}, "extra_body": {}}


def test_a_request_of_the_openai_client_carries_them() -> None:
    app = FastAPI()
    seen: list[tuple[str | None, object]] = []

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> dict[str, object]:
        seen.append((request.headers.get("x-session-id"), (await request.json()).get("kv_transfer_params")))
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": []}

    client = openai.OpenAI(base_url="http://testserver/v1", api_key="-", http_client=TestClient(app))
    client.chat.completions.create(model="m", messages=[], **request_fields(session_id="s", agent="a"))
    client.chat.completions.create(model="m", messages=[], **request_fields())
    assert seen == [("s", {"lifetime": {"agent": "a"}}), (None, None)]


@pytest.mark.parametrize("session_id", ["Grüße", "two\nlines", "会话"])
def test_a_session_id_that_no_header_can_hold_goes_into_the_body(session_id: str) -> None:
    assert request_fields(session_id=session_id) == {"extra_headers": {}, "extra_body": {"session_id": session_id}}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"agent": 7}, "agent"),
        ({"segment_class": "leader"}, "segment_class"),
        ({"turn": -1}, "turn"),
        ({"retain_s": 1e9}, "retain_s"),
        ({"session_id": uuid.uuid4()}, "UUID"),
    ],
)
def test_a_wrong_argument_never_breaks_the_agent(
    arguments: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert request_fields(**arguments) == {"extra_headers": {}, "extra_body": {}}  # type: ignore[arg-type]
    (record,) = caplog.records
    assert said in record.message
