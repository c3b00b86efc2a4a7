# SPDX-License-Identifier: Apache-2.0
"""Claude Code: what its hooks say about boundaries, and the block of its settings that has them sent.

Claude Code calls a hook with one JSON object per event and, for hooks of type `http`, posts it. Nothing here does IO:
`control/claude_code.py` receives, `cli/hooks.py` writes settings. Checked against Claude Code 2.1.332:

- A hook waits for its answer, so a slow server slows Claude Code. Any 2xx with an empty body or a JSON object lets it go
  on; everything else is an error that it shows or logs, and goes on too.
- `SessionStart` is not sent over HTTP. It is not missed: the first request opens a session, also one that had ended.
- `Stop` comes when the main agent's turn is over, but not when the user interrupts it; the next one closes what that left.
- A sub-agent's `agent_id` stands in its `SubagentStart` and `SubagentStop`, and in the header `X-Claude-Code-Agent-Id` of
  its requests. One that starts and never stops is held by nothing here: its session's end ends it, else the engine's lease.
- The request that writes a compaction's summary comes after `PreCompact` and still extends the old context.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, StringConstraints

from vllm_lifetime.boundaries import MAX_ID_LENGTH, Boundary, BoundaryKind
from vllm_lifetime.harness.client import TOKEN_VARIABLE

__all__ = ["HOOK_EVENTS", "HOOK_PATH", "HookPayload", "SettingsError", "build_hooks", "merge_hooks", "translate"]

HOOK_PATH = "/lifetime/v1/hooks/claude-code"
"""Where the control API takes hooks."""

HOOK_EVENTS = ("Stop", "StopFailure", "SubagentStart", "SubagentStop", "PreCompact", "SessionEnd")
"""The hooks that are asked for: all that say something and are sent over HTTP, each thing once."""

HOOK_TIMEOUT_S = 2
"""Longest wait of Claude Code for an answer, in seconds. The server answers before it does anything."""

REPEAT_WINDOW_S = 30
"""Two equal payloads within a window of so many seconds are one event that was sent twice. Later they are two: a long turn
may compact its context several times, and each time the payload is the same."""

_Id = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID_LENGTH)]


class HookPayload(BaseModel):
    """What is read of a hook's payload; the rest of it is different for each event, and grows with each version."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    session_id: _Id
    hook_event_name: str
    agent_id: Any = None
    agent_type: Any = None
    source: Any = None
    background_tasks: Any = None
    session_crons: Any = None


def translate(payload: Mapping[str, Any], received_at_s: float) -> tuple[Boundary | None, str | None]:
    """Return the boundary that a hook's payload tells of, or none and the reason.

    `received_at_s` is the receiver's clock, Unix seconds. Raises pydantic's `ValidationError` only for what cannot come from
    Claude Code: a payload without a session or an event.
    """
    hook = HookPayload.model_validate(payload)
    fields, reason = _read(hook)
    if fields is None:
        return None, reason
    content = json.dumps(payload, sort_keys=True).encode()
    window = int(received_at_s // REPEAT_WINDOW_S)
    message_id = f"claude-code-{hashlib.sha256(content).hexdigest()[:32]}-{window}"
    return Boundary(message_id=message_id, session_id=hook.session_id, sent_at_s=received_at_s, **fields), None


def _read(hook: HookPayload) -> tuple[dict[str, Any] | None, str | None]:
    """Return the fields of a boundary that are particular to the event, or none and the reason."""
    agent = {"agent_id": _id_or_none(hook.agent_id), "agent": _id_or_none(hook.agent_type)}
    match hook.hook_event_name:
        case "SessionStart":
            if hook.source == "compact":
                return None, "the session goes on after a compaction"
            return {"kind": BoundaryKind.SESSION_START}, None
        case "Stop":
            if hook.background_tasks or hook.session_crons:
                return None, "the turn goes on when what runs in the background wakes it"
            # Also when `stop_hook_active`: another hook had sent Claude Code on, and now it stops again.
            return {"kind": BoundaryKind.TURN_END}, None
        case "StopFailure":
            return {"kind": BoundaryKind.TURN_END}, None
        case "SubagentStart" | "SubagentStop" if agent["agent_id"] is None or agent["agent"] is None:
            # Claude Code forks its own context to summarize it; there is no sub-agent whose requests we could know.
            return None, "no sub-agent with a type and an id"
        case "SubagentStart":
            return {"kind": BoundaryKind.SUBAGENT_SPAWN, **agent}, None
        case "SubagentStop":
            # Whatever `background_tasks` says: it lists this very sub-agent, still, and those beside it.
            return {"kind": BoundaryKind.SUBAGENT_RETURN, **agent}, None
        case "PreCompact" | "PostCompact":
            # 0: once a request does not extend the old context, rather than now, since the summary is still to be written.
            # Without an id it is the main agent's, which has no role in its requests even if its hooks name a type.
            of_agent = agent if agent["agent_id"] is not None else {}
            return {"kind": BoundaryKind.COMPACTION, "expected_return_s": 0.0, **of_agent}, None
        case "SessionEnd":
            return {"kind": BoundaryKind.SESSION_END}, None
        case name:
            return None, f"{name[:40]} is no boundary"


def _id_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_ID_LENGTH else None


class SettingsError(ValueError):
    """A settings file does not have the form that Claude Code reads."""


def build_hooks(server_url: str) -> dict[str, Any]:
    """Return the value of `hooks` in Claude Code's settings that posts to the server at `server_url`, its root.

    The token is named, not written down: Claude Code fills it in from its environment, and leaves it empty if it is not there.
    """
    handler = {
        "type": "http",
        "url": server_url.rstrip("/") + HOOK_PATH,
        "timeout": HOOK_TIMEOUT_S,
        "headers": {"Authorization": f"Bearer ${TOKEN_VARIABLE}"},
        "allowedEnvVars": [TOKEN_VARIABLE],
    }
    return {event: [{"hooks": [copy.deepcopy(handler)]}] for event in HOOK_EVENTS}


def merge_hooks(settings: Mapping[str, Any], server_url: str) -> dict[str, Any]:
    """Return `settings` with our hooks in them, those of an earlier time replaced, and everything else as it was.

    Raises `SettingsError` where `hooks` does not have the form that Claude Code reads.
    """
    merged = copy.deepcopy(dict(settings))
    hooks = merged.setdefault("hooks", {})
    if not isinstance(hooks, dict):
        raise SettingsError(f"`hooks` must be an object, not {_name_type(hooks)}")
    for event, groups in list(hooks.items()):
        if not isinstance(groups, list):
            raise SettingsError(f"`hooks.{event}` must be a list, not {_name_type(groups)}")
        kept = [group for group in map(_without_ours, groups) if group is not None]
        if kept or not groups:
            hooks[event] = kept
        else:
            del hooks[event]
    for event, groups in build_hooks(server_url).items():
        hooks.setdefault(event, []).extend(groups)
    return merged


def _without_ours(group: Any) -> Any:
    """Return a group of hooks without ours; none if nothing else was in it."""
    if not isinstance(group, dict) or not isinstance(group.get("hooks"), list):
        return group
    others = [hook for hook in group["hooks"] if not _is_ours(hook)]
    if len(others) == len(group["hooks"]):
        return group
    return {**group, "hooks": others} if others else None


def _is_ours(hook: Any) -> bool:
    return isinstance(hook, dict) and hook.get("type") == "http" and str(hook.get("url", "")).endswith(HOOK_PATH)


def _name_type(value: object) -> str:
    names: dict[type, str] = {list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null" if value is None else "an object")
