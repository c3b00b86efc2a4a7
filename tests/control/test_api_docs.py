# SPDX-License-Identifier: Apache-2.0
"""docs/api.md: every request in it gets the answer that stands below it, as far as a fake of the engines can tell."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from control_fakes import FakeEngines, build_app, send, session_view

TEXT = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
EXAMPLES = [
    example
    for block in re.findall(r"```\n(curl .*?)```", TEXT, re.DOTALL)
    for example in re.findall(r"^(curl .*?)\n(\d{3}) (\{.*?\})$", block, re.DOTALL | re.MULTILINE)
]


def test_no_example_was_missed() -> None:
    assert len(EXAMPLES) == TEXT.count("\ncurl ") == 10


@pytest.mark.parametrize(("command", "status", "answer"), EXAMPLES)
def test_an_example_is_answered_as_it_says(command: str, status: str, answer: str) -> None:
    words = [word for word in shlex.split(command.replace("\\\n", " "))[1:] if word.strip()]
    options = {words[at]: words[at + 1] for at in range(len(words) - 1) if words[at].startswith("-")}
    url = next(word for word in words if word.startswith("localhost"))
    engines = FakeEngines()
    engines.sessions[0] = {name: session_view(name) for name in ("s-42", "s-43")}
    app = build_app(engines)
    if "/events" in url:
        event = json.loads(answer)["events"][0]["event"]
        send(app, "POST", "/lifetime/v1/boundaries", json=event)
    kwargs: dict[str, Any] = {"content": options["-d"]} if "-d" in options else {}
    kwargs["headers"] = dict(words[at + 1].split(": ") for at in range(len(words)) if words[at] == "-H")
    method = options.get("-X", "POST" if "-d" in options else "GET")
    response = send(app, method, urlsplit(f"http://{url}").path + "?" + urlsplit(f"http://{url}").query, **kwargs)
    assert response.status_code == int(status)
    if "prefer" in kwargs["headers"]:
        assert response.json() == json.loads(answer)
    assert keys(response.json()) == keys(json.loads(answer))


def keys(answer: Any) -> Any:
    """The keys of an answer, two levels deep: what stands below is the engines'."""
    if isinstance(answer, list):
        return keys(answer[0]) if answer else {}
    return {key: sorted(value) if isinstance(value, dict) and key == "outcome" else None for key, value in answer.items()}
