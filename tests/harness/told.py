# SPDX-License-Identifier: Apache-2.0
"""What a recorder was told, a line each, so that whole sequences can be compared."""

from __future__ import annotations

import re
from collections import deque

from harness_recorder import Answer, ModelRequest, Recorder


def said(recorder: Recorder, session_id: str | None = None) -> list[str]:
    """The boundaries: `kind agent agent_id of parent_agent_id`, with what is absent left out.

    Ids that are UUIDs are numbered by their first appearance: `id1`, `id2`, ...
    """
    lines = []
    for event in recorder.boundaries if session_id is None else recorder.of_session(session_id):
        lines.append(_line(event.kind.value, event.agent, event.agent_id, event.parent_agent_id))
    return _number_uuids(lines)


def asked(recorder: Recorder, session_id: str | None = None) -> list[str]:
    """The requests to the model: `agent agent_id of parent_agent_id`, as in `said`."""
    requests = [request for request in recorder.requests if session_id in (None, request.session_id)]
    names = [request.lifetime for request in requests]
    return _number_uuids([_line(name.get("agent"), name.get("agent_id"), name.get("parent_agent_id")) for name in names])


def answer(recorder: Recorder, *answers: Answer, then: Answer) -> None:
    """Let the model give these answers, one after another, and `then` that one."""
    left = deque(answers)

    def respond(request: ModelRequest) -> Answer:
        return left.popleft() if left else then

    recorder.respond = respond


def _line(*words: str | None) -> str:
    *names, parent = words
    return " ".join(word for word in [*names, f"of {parent}" if parent else None] if word)


def _number_uuids(lines: list[str]) -> list[str]:
    numbers: dict[str, str] = {}
    pattern = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
    return [pattern.sub(lambda match: numbers.setdefault(match[0], f"id{len(numbers) + 1}"), line) for line in lines]
