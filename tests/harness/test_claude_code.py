# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
from typing import Any

import pytest
from claude_code_payloads import SESSION, SUBAGENT, payload
from pydantic import ValidationError

from vllm_lifetime.harness.claude_code import (
    HOOK_EVENTS,
    REPEAT_WINDOW_S,
    SettingsError,
    build_hooks,
    merge_hooks,
    translate,
)

NOW_S = 1_800_000_000.0


def read(hook: dict[str, Any], received_at_s: float = NOW_S) -> dict[str, Any] | None:
    """Return the boundary without what every boundary has."""
    boundary, reason = translate(hook, received_at_s)
    assert (boundary is None) != (reason is None)
    if boundary is None:
        return None
    assert (boundary.session_id, boundary.sent_at_s) == (SESSION, received_at_s)
    return boundary.model_dump(mode="json", exclude_none=True, exclude={"message_id", "session_id", "sent_at_s"})


def id_of(hook: dict[str, Any], received_at_s: float = NOW_S) -> str:
    boundary, _ = translate(hook, received_at_s)
    assert boundary is not None
    return boundary.message_id


SUBAGENT_NAME = {"agent_id": SUBAGENT, "agent": "general-purpose"}


@pytest.mark.parametrize(
    ("hook", "boundary"),
    [
        (payload("SessionStart"), {"kind": "session_start"}),
        (payload("SessionStart", source="resume"), {"kind": "session_start"}),
        (payload("SessionStart", source="clear"), {"kind": "session_start"}),
        (payload("SessionStart", source="fork"), {"kind": "session_start"}),
        (payload("SessionStart", source="compact"), None),
        (payload("UserPromptSubmit"), None),
        (payload("PreToolUse"), None),
        (payload("Stop"), {"kind": "turn_end"}),
        (payload("Stop", stop_hook_active=True), {"kind": "turn_end"}),
        (payload("StopFailure"), {"kind": "turn_end"}),
        (payload("SubagentStart"), {"kind": "subagent_spawn", **SUBAGENT_NAME}),
        (payload("SubagentStop"), {"kind": "subagent_return", **SUBAGENT_NAME}),
        (payload("PreCompact"), {"kind": "compaction", "expected_return_s": 0.0}),
        (payload("PreCompact", trigger="auto"), {"kind": "compaction", "expected_return_s": 0.0}),
        (payload("PreCompact", agent_type="coder"), {"kind": "compaction", "expected_return_s": 0.0}),
        (
            payload("PreCompact", agent_id=SUBAGENT, agent_type="general-purpose"),
            {"kind": "compaction", "expected_return_s": 0.0, **SUBAGENT_NAME},
        ),
        (payload("PostCompact"), {"kind": "compaction", "expected_return_s": 0.0}),
        (payload("SessionEnd"), {"kind": "session_end"}),
        (payload("SessionEnd", reason="clear"), {"kind": "session_end"}),
        (payload("SessionEnd", reason="prompt_input_exit"), {"kind": "session_end"}),
    ],
    ids=lambda value: value["hook_event_name"] if isinstance(value, dict) and "hook_event_name" in value else None,
)
def test_each_hook_says_what_it_means(hook: dict[str, Any], boundary: dict[str, Any] | None) -> None:
    assert read(hook) == boundary


@pytest.mark.parametrize(
    "waiting",
    [
        {"background_tasks": [{"id": "b1", "type": "shell", "status": "running", "description": "tests", "command": "make"}]},
        {"session_crons": [{"id": "c1", "schedule": "*/5 * * * *", "recurring": True, "prompt": "look"}]},
    ],
)
def test_a_stop_that_waits_for_something_in_the_background_ends_no_turn(waiting: dict[str, Any]) -> None:
    assert read(payload("Stop", **waiting)) is None


def test_an_older_stop_without_lists_ends_the_turn() -> None:
    hook = payload("Stop")
    for key in ("background_tasks", "session_crons", "prompt_id", "last_assistant_message", "effort"):
        del hook[key]
    assert read(hook) == {"kind": "turn_end"}


@pytest.mark.parametrize("changes", [{"agent_type": ""}, {"agent_id": ""}, {"agent_id": None}, {"agent_id": "x" * 300}])
def test_what_claude_code_forks_for_itself_is_no_subagent(changes: dict[str, Any]) -> None:
    """A `subagent_return` that named nobody would be the main agent's."""
    assert read(payload("SubagentStop", **changes)) is None
    assert read(payload("SubagentStart", **changes)) is None


def test_a_hook_that_is_sent_again_is_the_same_event() -> None:
    for event in (*HOOK_EVENTS, "SessionStart", "PostCompact"):
        assert id_of(payload(event)) == id_of(copy.deepcopy(payload(event)), NOW_S + 1)
    reordered = dict(reversed(payload("Stop").items()))
    assert id_of(payload("Stop")) == id_of(reordered)


def test_two_turns_are_two_events() -> None:
    ids = {id_of(payload("Stop", prompt_id=f"p{turn}")) for turn in range(10)}
    assert len(ids) == 10


def test_two_turns_of_an_older_claude_code_are_two_events() -> None:
    """Without `prompt_id` their payloads may be equal; a long turn compacts twice with equal ones in any version."""
    for event in ("Stop", "PreCompact"):
        hook = payload(event)
        hook.pop("prompt_id")
        assert id_of(hook) != id_of(hook, NOW_S + REPEAT_WINDOW_S)


def test_sessions_do_not_share_events() -> None:
    other = payload("SessionEnd", session_id="other")
    assert id_of(other) != id_of(payload("SessionEnd"))
    assert len(id_of(other)) <= 256


@pytest.mark.parametrize("event", ["", "Notification", "SomethingOfNextYear", "x" * 10_000])
def test_an_unknown_hook_is_ignored_with_a_short_reason(event: str) -> None:
    boundary, reason = translate({"session_id": "s", "hook_event_name": event, "new": {"deep": [1]}}, NOW_S)
    assert boundary is None
    assert reason is not None and len(reason) < 100


def test_fields_of_unknown_types_break_nothing() -> None:
    hook = payload("Stop", background_tasks=0, session_crons={}, agent_id=[1], agent_type=7, source=None)
    assert read(hook) == {"kind": "turn_end"}


@pytest.mark.parametrize("hook", [{}, {"session_id": "s"}, {"hook_event_name": "Stop"}, payload("Stop", session_id="")])
def test_what_cannot_come_from_claude_code_is_an_error(hook: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        translate(hook, NOW_S)


def test_the_hooks_post_to_the_server_and_name_the_token_without_holding_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LIFETIME_TOKEN", "secret")
    hooks = build_hooks("http://gpu:8000/")
    assert tuple(hooks) == HOOK_EVENTS
    assert hooks["Stop"] == [
        {
            "hooks": [
                {
                    "type": "http",
                    "url": "http://gpu:8000/lifetime/v1/hooks/claude-code",
                    "timeout": 2,
                    "headers": {"Authorization": "Bearer $VLLM_LIFETIME_TOKEN"},
                    "allowedEnvVars": ["VLLM_LIFETIME_TOKEN"],
                }
            ]
        }
    ]
    assert "secret" not in str(hooks)


SETTINGS: dict[str, Any] = {
    "model": "opus",
    "hooks": {
        "PreToolUse": [{"matcher": "Bash", "hooks": [{"type": "command", "command": "check"}]}],
        "Stop": [{"hooks": [{"type": "command", "command": "say done"}]}],
        "Notification": [],
    },
    "permissions": {"allow": ["Read"]},
}


def test_merging_keeps_everything_that_was_there() -> None:
    before = copy.deepcopy(SETTINGS)
    merged = merge_hooks(SETTINGS, "http://gpu:8000")
    assert before == SETTINGS
    assert list(merged) == ["model", "hooks", "permissions"]
    assert merged["hooks"]["PreToolUse"] == before["hooks"]["PreToolUse"]
    assert merged["hooks"]["Notification"] == []
    assert merged["hooks"]["Stop"] == before["hooks"]["Stop"] + build_hooks("http://gpu:8000")["Stop"]
    assert set(merged["hooks"]) == {"PreToolUse", "Notification", *HOOK_EVENTS}


def test_merging_twice_changes_nothing_and_another_server_replaces_the_first() -> None:
    once = merge_hooks(SETTINGS, "http://gpu:8000")
    assert merge_hooks(once, "http://gpu:8000") == once
    assert merge_hooks(once, "http://other:1") == merge_hooks(SETTINGS, "http://other:1")


def test_our_hook_is_replaced_also_where_it_stands_beside_another() -> None:
    ours = build_hooks("http://gpu:8000")["Stop"][0]["hooks"][0]
    theirs = {"type": "command", "command": "say done"}
    merged = merge_hooks({"hooks": {"Stop": [{"hooks": [ours, theirs]}], "Setup": [{"hooks": [ours]}]}}, "http://new:1")
    assert merged["hooks"]["Stop"] == [{"hooks": [theirs]}, *build_hooks("http://new:1")["Stop"]]
    assert "Setup" not in merged["hooks"]


@pytest.mark.parametrize("settings", [{"hooks": []}, {"hooks": None}, {"hooks": {"Stop": {"type": "http"}}}])
def test_settings_of_another_form_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="must be"):
        merge_hooks(settings, "http://gpu:8000")


def test_groups_of_another_form_are_left_alone() -> None:
    odd = {"hooks": {"Setup": ["?", {"matcher": "x"}, {"hooks": "none"}]}}
    assert merge_hooks(odd, "http://gpu:8000")["hooks"]["Setup"] == odd["hooks"]["Setup"]
