# SPDX-License-Identifier: Apache-2.0
"""Requests of clients that know nothing of this package name themselves: real SDKs, and what the server says it holds."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from anthropic import Anthropic
from e2e_client import REQUEST_TIMEOUT_S, Api, Delta
from e2e_servers import PLAIN, Servers
from openai import OpenAI

# Long enough for whole blocks, and different for each session: private blocks are what an end retires.
WORDS = "Read the failing test, then the file, fix the function and run the tests again. " * 3


@pytest.fixture
def api(servers: Servers) -> Api:
    """A server with the connector, no lower tiers, empty."""
    api = servers.get(PLAIN)
    api.reset()
    return api


@pytest.fixture
def session() -> str:
    """A session that no test has used."""
    return str(uuid4())


@pytest.fixture
def openai(api: Api) -> Iterator[OpenAI]:
    """OpenAI's own client."""
    with api.server.openai(timeout=REQUEST_TIMEOUT_S) as client:
        yield client


@pytest.fixture
def anthropic(api: Api) -> Iterator[Anthropic]:
    """Anthropic's own client."""
    with Anthropic(base_url=api.server.base_url, api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0) as client:
        yield client


def view(api: Api, session: str) -> dict[str, Any]:
    """What the server knows of `session`, once nothing runs."""
    api.settle()
    answer = api.http.get(f"/lifetime/v1/sessions/{session}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def agents(api: Api, session: str) -> list[tuple[str | None, str | None, int | None]]:
    """Each agent of `session`: its id, its parent's, and its turn."""
    seen = view(api, session)["agents"]
    return sorted(((a["agent_id"], a["parent_agent_id"], a["turn"]) for a in seen), key=lambda agent: agent[0] or "")


def end(api: Api, session: str) -> int:
    """End `session`; returns the blocks that only it could read, at least one."""
    outcome = api.boundary("session_end", session_id=session)
    assert outcome["status"] == "accepted", outcome
    assert outcome["blocks"] > 0
    return int(outcome["blocks"])


def ask_messages(api: Api, client: Anthropic, messages: list[Any], **more: Any) -> None:
    client.messages.create(model=api.server.served_name, max_tokens=4, messages=messages, **more)


def test_claude_code_is_a_stranger(api: Api, anthropic: Anthropic, session: str) -> None:
    """The headers of Claude Code: one session, its main agent and a sub-agent, and the end of it frees what both read."""
    bad = Delta(api)
    headers = {"X-Claude-Code-Session-Id": session}
    conversation: list[Any] = [{"role": "user", "content": f"{session} {WORDS}"}]
    ask_messages(api, anthropic, conversation, extra_headers=headers)
    assert agents(api, session) == [(None, None, 1)]
    tool = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
    conversation += [{"role": "assistant", "content": [tool]}, {"role": "user", "content": [result]}]
    ask_messages(api, anthropic, conversation, extra_headers=headers)
    assert agents(api, session) == [(None, None, 1)], "a tool result began a turn"
    conversation += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"}]
    ask_messages(api, anthropic, conversation, extra_headers=headers)
    assert agents(api, session) == [(None, None, 2)]
    worker = {**headers, "X-Claude-Code-Agent-Id": "a1"}
    ask_messages(api, anthropic, [{"role": "user", "content": f"{uuid4()} {WORDS}"}], extra_headers=worker)
    assert [(name, turn) for name, _, turn in agents(api, session)] == [(None, 2), ("a1", 1)]
    assert bad("lifetime_bad_metadata_total") == 0
    blocks = end(api, session)
    assert api.tiers()["hbm"]["retired_blocks"] >= blocks


def test_the_session_in_the_user_id_is_overlooked(api: Api, anthropic: Anthropic, session: str) -> None:
    """Without the header, `metadata.user_id` tells, also in a stream."""
    message: Any = {"role": "user", "content": f"{session} {WORDS}"}
    with anthropic.messages.stream(
        model=api.server.served_name,
        max_tokens=4,
        messages=[message],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
        metadata={"user_id": json.dumps({"device_id": "d", "account_uuid": "", "session_id": session})},
    ) as stream:
        stream.until_done()
    assert agents(api, session) == [(None, None, 1)]
    end(api, session)


def test_a_chat_does_not_say_its_turn(api: Api, openai: OpenAI, session: str) -> None:
    """A chat completion that names its session only, with the retention of OpenAI's API."""
    bad = Delta(api)
    messages: list[Any] = [{"role": "user", "content": f"{session} {WORDS}"}]
    for turn in (1, 2):
        openai.chat.completions.create(
            model=api.server.served_name,
            messages=messages,
            max_tokens=4,
            extra_headers={"X-Session-ID": session},
            extra_body={"prompt_cache_retention": "24h"},
        )
        assert agents(api, session) == [(None, None, turn)]
        messages += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "thanks"}]
    assert bad("lifetime_bad_metadata_total") == 0
    end(api, session)


def test_codex_is_a_stranger(api: Api, openai: OpenAI, session: str) -> None:
    """The headers of Codex on the Responses API: a session, and a thread of its own for a sub-agent."""
    for thread in (session, "thread-1"):
        openai.responses.create(
            model=api.server.served_name,
            input=[{"role": "user", "content": f"{thread} {WORDS}"}],
            max_output_tokens=4,
            extra_headers={"Session-Id": session, "Thread-Id": thread},
        )
    assert agents(api, session) == [(None, None, 1), ("thread-1", None, 1)]
    end(api, session)


def test_a_conversation_is_forgotten(api: Api, openai: OpenAI, session: str) -> None:
    """`conversation` of the Responses API names the session."""
    openai.responses.create(
        model=api.server.served_name,
        input=f"{session} {WORDS}",
        max_output_tokens=4,
        extra_body={"conversation": {"id": f"conv_{session}"}},
    )
    assert view(api, f"conv_{session}")["state"] == "active"
    end(api, f"conv_{session}")


def test_what_the_request_says_is_overruled(api: Api, anthropic: Anthropic, session: str) -> None:
    """Its own session, agent and turn come first."""
    ask_messages(
        api,
        anthropic,
        [{"role": "user", "content": f"{session} {WORDS}"}],
        extra_headers={"X-Session-ID": session, "X-Claude-Code-Session-Id": "theirs", "X-Claude-Code-Agent-Id": "theirs"},
        extra_body={"kv_transfer_params": {"lifetime": {"agent": "planner", "agent_id": "mine", "turn": 7}}},
    )
    assert agents(api, session) == [("mine", None, 7)]
    assert api.http.get("/lifetime/v1/sessions/theirs").status_code == 404
    end(api, session)


def test_a_plain_request_becomes_a_session(api: Api, openai: OpenAI, anthropic: Anthropic) -> None:
    """Nothing that names a session, no session: a cache key and a user are none."""
    before = api.http.get("/lifetime/v1/sessions").json()["total"]
    openai.chat.completions.create(
        model=api.server.served_name,
        messages=[{"role": "user", "content": WORDS}],
        max_tokens=4,
        user="somebody",
        extra_body={"prompt_cache_key": "k"},
    )
    ask_messages(api, anthropic, [{"role": "user", "content": WORDS}], metadata={"user_id": "somebody"})
    api.settle()
    assert api.http.get("/lifetime/v1/sessions").json()["total"] == before
