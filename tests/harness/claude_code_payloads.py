# SPDX-License-Identifier: Apache-2.0
"""Payloads of Claude Code's hooks, of the shape that version 2.1.332 sends; the values are made up."""

from __future__ import annotations

from typing import Any

SESSION = "0a1b2c3d-0000-4000-8000-000000000001"
SUBAGENT = "a0123456789abcdef"

_BASE: dict[str, Any] = {
    "session_id": SESSION,
    "transcript_path": f"/home/user/.claude/projects/-home-user-project/{SESSION}.jsonl",
    "cwd": "/home/user/project",
}
_IN_TURN = _BASE | {"prompt_id": "11111111-0000-4000-8000-000000000001", "permission_mode": "default"}
_SUBAGENT_TASK = {
    "id": SUBAGENT,
    "type": "subagent",
    "status": "running",
    "description": "look around",
    "agent_type": "general-purpose",
}


def payload(event: str, **changes: Any) -> dict[str, Any]:
    """Return the payload of a hook, with some of it changed."""
    return _PAYLOADS[event] | changes


_PAYLOADS: dict[str, dict[str, Any]] = {
    "SessionStart": _BASE | {"hook_event_name": "SessionStart", "source": "startup"},
    "UserPromptSubmit": _IN_TURN | {"hook_event_name": "UserPromptSubmit", "prompt": "hello"},
    "PreToolUse": _IN_TURN
    | {
        "effort": {"level": "medium"},
        "hook_event_name": "PreToolUse",
        "tool_name": "Agent",
        "tool_input": {"description": "look around", "prompt": "say hi", "subagent_type": "general-purpose"},
        "tool_use_id": "toolu_1",
    },
    "SubagentStart": {key: value for key, value in _IN_TURN.items() if key != "permission_mode"}
    | {"agent_id": SUBAGENT, "agent_type": "general-purpose", "hook_event_name": "SubagentStart"},
    "SubagentStop": _IN_TURN
    | {
        "agent_id": SUBAGENT,
        "agent_type": "general-purpose",
        "effort": {"level": "medium"},
        "hook_event_name": "SubagentStop",
        "stop_hook_active": False,
        "agent_transcript_path": f"/home/user/.claude/projects/-home-user-project/{SESSION}/subagents/agent-{SUBAGENT}.jsonl",
        "last_assistant_message": "Hi.",
        "background_tasks": [_SUBAGENT_TASK],
        "session_crons": [],
    },
    "Stop": _IN_TURN
    | {
        "effort": {"level": "medium"},
        "hook_event_name": "Stop",
        "stop_hook_active": False,
        "last_assistant_message": "Fine.",
        "background_tasks": [],
        "session_crons": [],
    },
    "StopFailure": {key: value for key, value in _IN_TURN.items() if key != "permission_mode"}
    | {
        "effort": {"level": "medium"},
        "hook_event_name": "StopFailure",
        "error": "model_not_found",
        "last_assistant_message": "There's an issue with the selected model.",
    },
    "PreCompact": _BASE
    | {
        "prompt_id": "11111111-0000-4000-8000-000000000001",
        "hook_event_name": "PreCompact",
        "trigger": "manual",
        "custom_instructions": None,
    },
    "PostCompact": _BASE
    | {
        "prompt_id": "11111111-0000-4000-8000-000000000001",
        "hook_event_name": "PostCompact",
        "trigger": "manual",
        "compact_summary": "What was said.",
    },
    "SessionEnd": _BASE
    | {"prompt_id": "11111111-0000-4000-8000-000000000001", "hook_event_name": "SessionEnd", "reason": "other"},
}
