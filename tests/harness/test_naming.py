# SPDX-License-Identifier: Apache-2.0
"""What becomes of headers and fields that a user gave to a request that is named."""

from typing import Any

import pytest

from vllm_lifetime.harness import request_fields
from vllm_lifetime.harness.naming import add_name

NAME = request_fields(session_id="s", workflow_id="w", agent="planner")


def test_a_request_without_fields_gets_the_name_alone() -> None:
    assert add_name(NAME, None, None) == (NAME["extra_headers"], NAME["extra_body"])


def test_the_users_metadata_goes_first_but_not_the_session() -> None:
    body = {"top_k": 5, "kv_transfer_params": {"other": 1, "lifetime": {"agent": "mine", "retain_s": 60.0}}}
    headers, fields = add_name(NAME, {"X-Mine": "1", "X-Session-ID": "mine"}, body) or ({}, {})
    assert headers == {"X-Mine": "1", "X-Session-ID": "s"}
    assert fields == {
        "top_k": 5,
        "kv_transfer_params": {"other": 1, "lifetime": {"workflow_id": "w", "agent": "mine", "retain_s": 60.0}},
    }
    assert body["kv_transfer_params"] == {"other": 1, "lifetime": {"agent": "mine", "retain_s": 60.0}}, "the user's was changed"


def test_a_session_that_no_header_can_say_goes_into_the_body() -> None:
    headers, fields = add_name(request_fields(session_id="сессия"), None, {"top_k": 5}) or ({}, {})
    assert (headers, fields) == ({}, {"top_k": 5, "session_id": "сессия"})


@pytest.mark.parametrize("body", [b"raw", [1], {"kv_transfer_params": "x"}, {"kv_transfer_params": {"lifetime": [1]}}])
def test_fields_that_leave_no_room_are_left_alone(body: Any) -> None:
    assert add_name(NAME, None, body) is None
