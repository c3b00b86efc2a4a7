# SPDX-License-Identifier: Apache-2.0
"""Requests that name themselves: vLLM's own routes, request classes and handlers, up to where a handler would ask the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from vllm_lifetime.patches import request_naming
from vllm_lifetime.patches.versions import UnsupportedVllmError

chat_serving: Any = pytest.importorskip("vllm.entrypoints.openai.chat_completion.serving")
chat_router: Any = pytest.importorskip("vllm.entrypoints.openai.chat_completion.api_router")
messages_serving: Any = pytest.importorskip("vllm.entrypoints.anthropic.serving")
messages_router: Any = pytest.importorskip("vllm.entrypoints.anthropic.api_router")
responses_serving: Any = pytest.importorskip("vllm.entrypoints.openai.responses.serving")
responses_router: Any = pytest.importorskip("vllm.entrypoints.openai.responses.api_router")

from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse  # noqa: E402

UUID = "0d2f7e5c-3b0a-4f0e-9c47-5a4e9b1c2d3e"
CLAUDE = {"X-Claude-Code-Session-Id": UUID}
HELLO = [{"role": "user", "content": "hello"}]
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}


class Recorder:
    """The end of a handler, where it would ask the engine: keeps what the engine would be told."""

    def __init__(self) -> None:
        self.has_kv_connector = True
        self.engine_client = None
        self.session: str | None = None
        self.params: dict[str, Any] | None = None
        self.request: Any = None

    async def record(self, request: Any, raw_request: Any) -> Any:
        self.request = request
        self.session = self._get_session_id(request, raw_request)  # type: ignore[attr-defined]
        self.params = (request.to_sampling_params(16, {}).extra_args or {}).get("kv_transfer_params")
        return ErrorResponse(error=ErrorInfo(code=200, type="test", message="enough seen"))

    @property
    def lifetime(self) -> Any:
        """The metadata that the engine would be given."""
        return (self.params or {}).get("lifetime")


class Chat(Recorder, chat_serving.OpenAIServingChat):  # type: ignore[misc]
    _create_chat_completion = Recorder.record


class Messages(Recorder, messages_serving.AnthropicServingMessages):  # type: ignore[misc]
    _create_chat_completion = Recorder.record
    _merge_inline_system = False

    class disabled_thinking_effort_resolver:
        """vLLM 0.33 asks it at each request."""

        @staticmethod
        async def resolve_for(request: Any) -> str:
            return "none"


class Responses(Recorder, responses_serving.OpenAIServingResponses):  # type: ignore[misc]
    _create_responses = Recorder.record


class Server:
    """An app with vLLM's routes and handlers."""

    def __init__(self) -> None:
        app = FastAPI()
        self.state = app.state
        self.chat = self.state.openai_serving_chat = Chat()
        self.messages = self.state.anthropic_serving_messages = Messages()
        self.responses = self.state.openai_serving_responses = Responses()
        for router in (chat_router, messages_router, responses_router):
            router.attach_router(app)
        self.http = TestClient(app)

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None) -> None:
        answer = self.http.post(path, json={"model": "m", **body}, headers=headers)
        assert answer.status_code == 200, answer.text

    def ask_chat(self, headers: dict[str, str] | None = None, **body: Any) -> Recorder:
        self._post("/v1/chat/completions", {"messages": HELLO, **body}, headers)
        return self.chat

    def ask_messages(self, headers: dict[str, str] | None = None, **body: Any) -> Recorder:
        self._post("/v1/messages", {"max_tokens": 5, "messages": HELLO, **body}, headers)
        return self.messages

    def ask_responses(self, headers: dict[str, str] | None = None, **body: Any) -> Recorder:
        self._post("/v1/responses", {"input": "hello", **body}, headers)
        return self.responses

    def asks(self) -> list[Callable[..., Recorder]]:
        """All three ways to ask."""
        return [self.ask_chat, self.ask_messages, self.ask_responses]


@pytest.fixture
def server() -> Server:
    """A server whose requests name themselves."""
    server = Server()
    request_naming.install(server.state, "lifetime")
    return server


def params(**metadata: Any) -> dict[str, Any]:
    return {"kv_transfer_params": {"lifetime": metadata}}


# ---------------------------------------------------------------------- who is untouched


def test_without_the_patch_nothing_is_named() -> None:
    for ask in Server().asks():
        answer = ask(CLAUDE)
        assert (answer.session, answer.params) == (None, None)


def test_an_untagged_request_stays_as_it_is(server: Server) -> None:
    for ask in server.asks():
        answer = ask()
        assert (answer.session, answer.params) == (None, None)


def test_other_apps_keep_vllms_handlers(server: Server) -> None:
    for ask in Server().asks():
        assert ask(CLAUDE).params is None


def test_a_fully_tagged_request_is_untouched(server: Server) -> None:
    said = {"workflow_id": "w", "agent_id": "mine", "parent_agent_id": "lead", "turn": 7, "cache_ttl_s": 1.5}
    headers = {**CLAUDE, "X-Session-ID": "mine", "X-Claude-Code-Agent-Id": "theirs"}
    for ask in server.asks():
        answer = ask(headers, prompt_cache_retention="24h", cache_control={"type": "ephemeral"}, **params(**said))
        assert answer.session == "mine"
        assert answer.params == {"lifetime": said}
        assert "session_id" not in (answer.request.vllm_xargs or {})


def test_null_is_a_word_too(server: Server) -> None:
    for ask in server.asks():
        assert ask(CLAUDE, **params(turn=None)).lifetime == {"turn": None}


def test_parameters_of_others_stay(server: Server) -> None:
    for ask in server.asks():
        answer = ask(CLAUDE, kv_transfer_params={"remote_port": 7})
        assert answer.params == {"remote_port": 7, "lifetime": {"counted_turn": 1}}


@pytest.mark.parametrize("given", ["planner", ["planner"], 3])
def test_metadata_that_is_no_object_is_left_to_the_connector(given: Any, server: Server) -> None:
    for ask in server.asks():
        assert ask(CLAUDE, kv_transfer_params={"lifetime": given}).lifetime == given


# ---------------------------------------------------------------------- sessions and agents


def test_claude_codes_headers_name_session_and_agent(server: Server) -> None:
    agent = {"X-Claude-Code-Agent-Id": "a1", "X-Claude-Code-Parent-Agent-Id": "a0"}
    for ask in server.asks():
        answer = ask({**CLAUDE, **agent})
        assert answer.session == UUID
        assert answer.lifetime == {"agent_id": "a1", "parent_agent_id": "a0", "counted_turn": 1}
        answer = ask(CLAUDE)
        assert (answer.session, answer.lifetime) == (UUID, {"counted_turn": 1})


@pytest.mark.parametrize(
    "user_id",
    [
        json.dumps({"device_id": "d", "account_uuid": "", "session_id": UUID}),
        f"user_5f2a_account_9b1d2c3e-0000-4000-8000-000000000000_session_{UUID}",
        f"user_5f2a_account__session_{UUID}",
    ],
)
def test_claude_codes_user_id_names_the_session(user_id: str, server: Server) -> None:
    answer = server.ask_messages(metadata={"user_id": user_id})
    assert (answer.session, answer.lifetime) == (UUID, {"counted_turn": 1})


@pytest.mark.parametrize(
    "user_id",
    [
        "somebody@example.org",
        "{not json",
        "[" * 10_000,
        '{"session_id": 7}',
        json.dumps({"session_id": "x" * 257}),
        "[]",
        "",
        None,
        7,
        {"session_id": UUID},
    ],
)
def test_another_user_id_is_no_session(user_id: Any, server: Server) -> None:
    answer = server.ask_messages(metadata={"user_id": user_id})
    assert (answer.session, answer.params) == (None, None)


def test_deep_json_in_the_user_id_fails_nothing(server: Server) -> None:
    answer = server.ask_messages(metadata={"user_id": '{"a":' * 100_000})
    assert (answer.session, answer.params) == (None, None)


def test_the_session_that_the_request_names_comes_first(server: Server) -> None:
    for ask in server.asks():
        assert ask({**CLAUDE, "X-Session-ID": "header"}).session == "header"
        assert ask(CLAUDE, vllm_xargs={"session_id": "xargs"}).session == "xargs"
    assert server.ask_chat(CLAUDE, session_id="body").session == "body"
    assert server.ask_responses(CLAUDE, session_id="body").session == "body"


def test_other_xargs_stay(server: Server) -> None:
    answer = server.ask_messages(CLAUDE, vllm_xargs={"mine": 3})
    assert answer.request.vllm_xargs["mine"] == 3
    assert answer.session == UUID


def test_codex_names_session_thread_and_parent(server: Server) -> None:
    main = server.ask_responses({"Session-Id": "s", "Thread-Id": "s"})
    assert (main.session, main.lifetime) == ("s", {"counted_turn": 1})
    child = server.ask_responses({"Session-Id": "s", "Thread-Id": "t1", "X-Codex-Parent-Thread-Id": "s"})
    assert (child.session, child.lifetime) == ("s", {"agent_id": "t1", "counted_turn": 1})
    grandchild = server.ask_responses({"Session-Id": "s", "Thread-Id": "t2", "X-Codex-Parent-Thread-Id": "t1"})
    assert grandchild.lifetime == {"agent_id": "t2", "parent_agent_id": "t1", "counted_turn": 1}


@pytest.mark.parametrize("headers", [{"Session-Id": "a login"}, {"Thread-Id": "a forum's"}])
def test_half_of_codexs_headers_is_somebody_elses(headers: dict[str, str], server: Server) -> None:
    answer = server.ask_responses(headers)
    assert (answer.session, answer.params) == (None, None)


@pytest.mark.parametrize("conversation", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_is_a_session(conversation: Any, server: Server) -> None:
    answer = server.ask_responses(conversation=conversation)
    assert (answer.session, answer.lifetime) == ("conv_1", None)


def test_a_cache_key_is_no_session(server: Server) -> None:
    for ask in server.asks():
        assert ask(prompt_cache_key="k", user="u").session is None
    assert server.ask_responses(previous_response_id="resp_1").session is None


@pytest.mark.parametrize("value", ["", "x" * 257])
def test_an_unusable_header_is_passed_over(value: str, server: Server) -> None:
    for ask in server.asks():
        answer = ask({"X-Claude-Code-Session-Id": value, "X-Claude-Code-Agent-Id": value})
        assert (answer.session, answer.params) == (None, None)


# ---------------------------------------------------------------------- turns


TOOL_CALL = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "tool_call_id": "t1", "content": "42"},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": [{"type": "text", "text": "two"}]},
]


def test_turns_are_the_user_messages_of_a_chat(server: Server) -> None:
    session = {"X-Session-ID": "s"}
    assert server.ask_chat(session, messages=CONVERSATION).lifetime == {"counted_turn": 2}
    assert server.ask_chat(session, messages=CONVERSATION[:-1]).lifetime == {"counted_turn": 1}
    assert server.ask_chat(session, messages=CONVERSATION[:1]).params is None
    # The content has not been used up by counting.
    assert list(server.ask_chat(session, messages=CONVERSATION).request.messages[-1]["content"]) == CONVERSATION[-1]["content"]


def test_a_workflow_is_enough_for_turns(server: Server) -> None:
    for ask in server.asks():
        assert ask(**params(workflow_id="w")).lifetime == {"workflow_id": "w", "counted_turn": 1}


def test_tool_results_are_no_turns_of_messages(server: Server) -> None:
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
        {"role": "user", "content": [TOOL_RESULT]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {}}]},
        {"role": "user", "content": [TOOL_RESULT, {"type": "text", "text": "a reminder of the harness"}]},
    ]
    assert server.ask_messages(CLAUDE, messages=conversation).lifetime == {"counted_turn": 1}
    conversation += [{"role": "assistant", "content": "done"}, {"role": "user", "content": "two"}]
    assert server.ask_messages(CLAUDE, messages=conversation).lifetime == {"counted_turn": 2}


def test_turns_of_responses(server: Server) -> None:
    session = {"X-Session-ID": "s"}
    items = [
        {"role": "user", "content": "one"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "two"}]},
    ]
    assert server.ask_responses(session, input=items).lifetime == {"counted_turn": 2}
    assert server.ask_responses(session, input=items[:3]).lifetime == {"counted_turn": 1}


def test_the_end_of_a_conversation_does_not_tell_its_turns(server: Server) -> None:
    session = {"X-Session-ID": "s"}
    assert server.ask_responses(session, previous_response_id="resp_1").params is None
    assert server.ask_responses(session, conversation="conv_1").params is None


# ---------------------------------------------------------------------- retention


def block(**control: Any) -> dict[str, Any]:
    return {"type": "text", "text": "x", "cache_control": {"type": "ephemeral", **control}}


@pytest.mark.parametrize(
    ("body", "cache_ttl_s"),
    [
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600),
        ({"system": [block(ttl="1h")]}, 3600),
        ({"tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]}, 3600),
        ({"messages": [{"role": "user", "content": [block()]}]}, 300),
        ({"messages": [{"role": "user", "content": [{**TOOL_RESULT, "cache_control": {"type": "ephemeral"}}]}]}, 300),
        ({"system": [block(ttl="1h"), block()], "messages": [{"role": "user", "content": [block()]}]}, 3600),
        ({"system": [block(ttl="2 weeks")]}, None),
        ({"system": [block(ttl=["1h"])]}, None),
        ({"cache_control": {"type": "eternal"}}, None),
        ({"cache_control": "1h"}, None),
        ({"cache_control": None}, None),
        ({"system": "x"}, None),
    ],
)
def test_cache_control_is_a_wish_to_keep(body: dict[str, Any], cache_ttl_s: int | None, server: Server) -> None:
    expected = None if cache_ttl_s is None else {"cache_ttl_s": cache_ttl_s}
    assert server.ask_messages(**body).lifetime == expected


def test_prompt_cache_retention_is_a_wish_to_keep(server: Server) -> None:
    for ask in (server.ask_chat, server.ask_responses):
        assert ask(prompt_cache_retention="24h").lifetime == {"cache_ttl_s": 86_400}
        assert ask(prompt_cache_retention="in_memory").params is None
        assert ask(prompt_cache_retention="24h", **params(cache_ttl_s=5)).lifetime == {"cache_ttl_s": 5}


def test_what_is_added_is_valid_metadata(server: Server) -> None:
    from vllm_lifetime.boundaries import parse_request_metadata

    answer = server.ask_messages({**CLAUDE, "X-Claude-Code-Agent-Id": "a1"}, system=[block(ttl="1h")])
    metadata, problem = parse_request_metadata(answer.params)
    assert problem is None
    assert metadata.model_dump(exclude_none=True) == {"agent_id": "a1", "counted_turn": 1, "cache_ttl_s": 3600}


# ---------------------------------------------------------------------- costs and failures


def test_the_body_is_parsed_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette import requests

    parsed: list[int] = []

    def loads(text: bytes) -> Any:
        parsed.append(len(text))
        return json.loads(text)

    monkeypatch.setattr(requests, "json", SimpleNamespace(loads=loads))
    for count, ask in enumerate(server.asks(), start=1):
        ask(CLAUDE)
        assert len(parsed) == count


def test_a_failure_of_ours_fails_no_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    def fail(*_: Any) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(request_naming, "_read_headers", fail)
    for ask in server.asks():
        answer = ask(CLAUDE)
        assert (answer.session, answer.params) == (None, None)
    assert "A request could not be named: KeyError" in caplog.text


def test_a_call_without_http_is_served(server: Server) -> None:
    import asyncio

    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(model="m", messages=HELLO, session_id="s")
    asyncio.run(server.chat.create_chat_completion(request))
    assert (server.chat.session, server.chat.lifetime) == ("s", {"counted_turn": 1})


# ---------------------------------------------------------------------- installing


def test_installing_twice_wraps_once(server: Server) -> None:
    before = server.chat.create_chat_completion
    request_naming.install(server.state, "lifetime")
    assert server.chat.create_chat_completion == before


def test_a_handler_that_the_model_lacks_is_passed_over() -> None:
    server = Server()
    server.state.openai_serving_chat = None
    del server.state.openai_serving_responses
    request_naming.install(server.state, "lifetime")
    assert server.ask_messages(CLAUDE).session == UUID


async def without_request(self: Any, prompt: Any, raw_request: Any = None) -> None: ...


@pytest.mark.parametrize("method", [None, lambda request, raw_request: None, without_request])
def test_a_handler_of_another_shape_is_refused(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    monkeypatch.setattr(Responses, "create_responses", method)
    with pytest.raises(UnsupportedVllmError, match=r"Responses\.create_responses"):
        request_naming.install(server.state, "lifetime")
    assert "create_chat_completion" not in vars(server.chat)
