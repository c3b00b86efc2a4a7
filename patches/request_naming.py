# SPDX-License-Identifier: Apache-2.0
"""Lets requests name themselves from what the OpenAI and Anthropic protocols already carry.

What: before one app's handler for chat completions, Anthropic messages or responses takes a request, what the request does not
say itself is filled in: its session, and in `kv_transfer_params[key]` its `agent_id`, `parent_agent_id`, `turn` and
`cache_ttl_s`.

- session: `X-Claude-Code-Session-Id`, `session_id` in Anthropic's `metadata.user_id`, Codex's `Session-Id`, or OpenAI's
  `conversation`.
- `agent_id`, `parent_agent_id`: `X-Claude-Code-Agent-Id` and `X-Claude-Code-Parent-Agent-Id`, or Codex's `Thread-Id` and
  `X-Codex-Parent-Thread-Id`.
- `turn`: how many user messages the prompt has; only for a request of a session or workflow. An Anthropic user message that
  brings tool results is no new turn: the model is still in its tool loop.
- `cache_ttl_s`: the longest of Anthropic's `cache_control`, or OpenAI's `prompt_cache_retention`.

A field that the request gives is kept, also when it is null. `prompt_cache_key` is no session: it routes to a cache, and
harnesses share one among sessions that begin alike. Nor is `previous_response_id`: it is another one in each request.

Why: a harness that cannot be changed sends nothing of ours, and vLLM does not act on these fields: it drops `metadata` and
`cache_control` where it translates Anthropic's request to its own. They are read from the body that FastAPI has parsed.

Seams (vLLM 0.31 to 0.33): the handlers in `app.state` and their method that takes `(request, raw_request)`, looked up on the
handler at each request; only the handlers of the app at hand are changed, not their classes. The fields that are set:
`kv_transfer_params` and `session_id`; for Anthropic's request, which has no `session_id`, `vllm_xargs["session_id"]`, which is
where vLLM looks last. Runs in the API server, on its event loop, in time linear in the messages. A failure here leaves the
request as it was.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm_lifetime.patches.versions import require

if TYPE_CHECKING:
    from starlette.datastructures import State
    from starlette.requests import Request

__all__ = ["install"]

logger = logging.getLogger("vllm.lifetime")

_MAX_ID_LENGTH = 256
"""A longer id is not one that a harness made; the engine takes no longer one."""

_SESSION_HEADER = "x-session-id"
_CLAUDE_USER_ID = re.compile(r"_session_([0-9A-Za-z-]+)$")
"""The older form of Claude Code's `metadata.user_id`: `user_<hash>_account_<uuid>_session_<uuid>`."""

_CACHE_CONTROL_S = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_CACHE_CONTROL = "5m"
_CACHE_RETENTION_S = {"24h": 86_400.0}
"""`in_memory`, the other value, asks for nothing beyond what a cache does anyway."""


@dataclass
class _Names:
    """What a request turns out to say: its session, and fields of its metadata."""

    session_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Endpoint:
    """A handler in `app.state`, its method, and what is read from its requests besides the headers."""

    handler: str
    method: str
    read: Callable[[Any, Any, _Names], None]
    """Given the request, its body as parsed JSON (None where there is none) and what is known so far."""

    count_turns: Callable[[Any], int | None]


def install(state: State, key: str) -> None:
    """Make the requests to the handlers in `state`, an app's, name themselves under `kv_transfer_params[key]`.

    To be called once vLLM has made the handlers; calling it again changes nothing more. A handler that is missing, because the
    model does not support what it serves, is passed over.
    Raises `UnsupportedVllmError` and changes nothing when a handler does not look as expected.
    """
    found = []
    for endpoint in _ENDPOINTS:
        handler = getattr(state, endpoint.handler, None)
        if handler is None:
            continue
        method = getattr(handler, endpoint.method, None)
        name = f"{type(handler).__name__}.{endpoint.method}"
        require(inspect.iscoroutinefunction(method), f"{name} is no coroutine function")
        assert method is not None
        if getattr(method, "_lifetime", False):
            continue
        parameters = list(inspect.signature(method).parameters)
        require(parameters[:2] == ["request", "raw_request"], f"{name} does not take (request, raw_request)")
        found.append((handler, endpoint, method))
    for handler, endpoint, method in found:
        setattr(handler, endpoint.method, _name_first(method, endpoint, key))


def _name_first(method: Callable[..., Any], endpoint: _Endpoint, key: str) -> Callable[..., Any]:
    """Return `method`, called after its request has been given its names."""

    @wraps(method)
    async def create_named(request: Any, raw_request: Request | None = None, *args: Any, **kwargs: Any) -> Any:
        try:
            # Parsed already: FastAPI keeps the body in the request.
            body = None if raw_request is None else await raw_request.json()
            _name(request, {} if raw_request is None else raw_request.headers, body, endpoint, key)
        except Exception as error:  # the request must go on
            logger.warning("A request could not be named: %s", type(error).__name__)
        return await method(request, raw_request, *args, **kwargs)

    create_named._lifetime = True  # type: ignore[attr-defined]
    return create_named


def _name(request: Any, headers: Mapping[str, str], body: Any, endpoint: _Endpoint, key: str) -> None:
    """Fill in what `request` does not say itself. Changes nothing if there is nothing to fill in, or when it raises."""
    params = request.kv_transfer_params or {}
    given = params.get(key)
    if given is None:
        given = {}
    if not isinstance(given, dict):
        return  # the connector says what is wrong with it
    names = _read_headers(headers)
    endpoint.read(request, body, names)
    has_session = _has_session(request, headers)
    if (has_session or names.session_id or given.get("workflow_id")) and "turn" not in given:
        turns = endpoint.count_turns(request)
        if turns:
            names.metadata["counted_turn"] = turns
    added = {name: value for name, value in names.metadata.items() if name not in given}
    if added:
        request.kv_transfer_params = {**params, key: {**given, **added}}
    if names.session_id and not has_session:
        _set_session(request, names.session_id)


def _has_session(request: Any, headers: Mapping[str, str]) -> bool:
    """Tell whether vLLM finds a session by itself."""
    in_xargs = (request.vllm_xargs or {}).get("session_id")
    return bool(getattr(request, "session_id", None) or headers.get(_SESSION_HEADER) or in_xargs)


def _set_session(request: Any, session_id: str) -> None:
    """Give `request` a session where vLLM looks for one."""
    if "session_id" in type(request).model_fields:
        request.session_id = session_id
    else:
        request.vllm_xargs = {**(request.vllm_xargs or {}), "session_id": session_id}


# ---------------------------------------------------------------------- headers


def _read_headers(headers: Mapping[str, str]) -> _Names:
    """Read what Claude Code or Codex says of itself in the headers of every request."""
    names = _Names(session_id=_as_id(headers.get("x-claude-code-session-id")))
    agent_id = _as_id(headers.get("x-claude-code-agent-id"))
    parent_id = _as_id(headers.get("x-claude-code-parent-agent-id"))
    thread_id = _as_id(headers.get("thread-id"))
    if names.session_id is None and thread_id is not None:
        # Codex: both headers always; the main thread has the session's id, and a sub-agent a thread of its own.
        names.session_id = session_id = _as_id(headers.get("session-id"))
        if session_id is not None and session_id != thread_id:
            agent_id = thread_id
            parent_id = _as_id(headers.get("x-codex-parent-thread-id"))
            parent_id = None if parent_id == session_id else parent_id
    if agent_id is not None:
        names.metadata["agent_id"] = agent_id
        if parent_id is not None:
            names.metadata["parent_agent_id"] = parent_id
    return names


def _as_id(value: Any) -> str | None:
    """Return `value` if it can be an id."""
    return value if isinstance(value, str) and 0 < len(value) <= _MAX_ID_LENGTH else None


# ---------------------------------------------------------------------- chat completions and responses


def _read_chat(request: Any, body: Any, names: _Names) -> None:
    """Read OpenAI's `prompt_cache_retention`; vLLM's models keep fields that they do not know as attributes."""
    ttl_s = _look_up(_CACHE_RETENTION_S, getattr(request, "prompt_cache_retention", None))
    if ttl_s is not None:
        names.metadata["cache_ttl_s"] = ttl_s


def _read_responses(request: Any, body: Any, names: _Names) -> None:
    """Read `conversation`, an id or an object with one, too."""
    _read_chat(request, body, names)
    conversation = getattr(request, "conversation", None)
    if isinstance(conversation, dict):
        conversation = conversation.get("id")
    names.session_id = names.session_id or _as_id(conversation)


def _count_chat_turns(request: Any) -> int | None:
    return _count_users(request.messages)


def _count_response_turns(request: Any) -> int | None:
    """Count the user messages of the input; None where the input is only the end of the conversation."""
    if request.previous_response_id or request.previous_input_messages or getattr(request, "conversation", None):
        return None
    return 1 if isinstance(request.input, str) else _count_users(request.input)


def _count_users(messages: Iterable[Any]) -> int:
    # The content is left alone: vLLM may hold it as an iterator that can be read only once.
    return sum(1 for message in messages if _role(message) == "user")


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else getattr(message, "role", None)


# ---------------------------------------------------------------------- Anthropic messages


def _read_messages(request: Any, body: Any, names: _Names) -> None:
    """Read `metadata.user_id` and every `cache_control`."""
    names.session_id = names.session_id or _read_claude_user_id((request.metadata or {}).get("user_id"))
    wishes = [wish for wish in map(_read_cache_control, _cacheable(body)) if wish is not None]
    if wishes:
        names.metadata["cache_ttl_s"] = max(wishes)


def _read_claude_user_id(user_id: Any) -> str | None:
    """Return the session in Claude Code's `metadata.user_id`: a string with JSON in it, or the older form; else None."""
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        try:
            parsed = json.loads(user_id)
        except ValueError:
            return None
        return _as_id(parsed.get("session_id")) if isinstance(parsed, dict) else None
    match = _CLAUDE_USER_ID.search(user_id)
    return _as_id(match.group(1)) if match else None


def _cacheable(body: Any) -> Iterator[Any]:
    """All that may carry a `cache_control`: the body itself, tools, and blocks of the system prompt and of messages."""
    if not isinstance(body, dict):
        return
    yield body
    messages = [message.get("content") for message in body.get("messages") or [] if isinstance(message, dict)]
    for blocks in (body.get("tools"), body.get("system"), *messages):
        if isinstance(blocks, list):
            yield from blocks


def _read_cache_control(block: Any) -> float | None:
    """Return the seconds for which `block` asks to be kept; None if it does not ask, or in a way we do not know."""
    control = block.get("cache_control") if isinstance(block, dict) else None
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return None
    return _look_up(_CACHE_CONTROL_S, control.get("ttl") or _DEFAULT_CACHE_CONTROL)


def _look_up(table: dict[str, float], value: Any) -> float | None:
    """Return `table[value]`, None for a value it does not have, whatever its type."""
    return table.get(value) if isinstance(value, str) else None


def _count_message_turns(request: Any) -> int | None:
    return sum(1 for message in request.messages if message.role == "user" and not _has_tool_result(message.content))


def _has_tool_result(content: Any) -> bool:
    return not isinstance(content, str) and any(block.type == "tool_result" for block in content)


_ENDPOINTS = (
    _Endpoint("openai_serving_chat", "create_chat_completion", _read_chat, _count_chat_turns),
    _Endpoint("anthropic_serving_messages", "create_messages", _read_messages, _count_message_turns),
    _Endpoint("openai_serving_responses", "create_responses", _read_responses, _count_response_turns),
)
