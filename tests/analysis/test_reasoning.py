# SPDX-License-Identifier: Apache-2.0
"""How much of what an agent wrote was reasoning, from Claude Code sessions known by structure."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_lifetime.analysis.reasoning import read_reasoning
from vllm_lifetime.traces.read import read_trace


def llm(tokens: int, *sizes: tuple[str, int]) -> dict[str, Any]:
    usage = {"input_tokens": tokens, "output_tokens": 1}
    return {
        "kind": "llm",
        "t0": 1.0,
        "t1": 2.0,
        "model": "m",
        "usage": usage,
        "blocks": [{"type": t, "chars": n} for t, n in sizes],
    }


def test_characters_by_request_of_the_main_agent(tmp_path: Path) -> None:
    events = [
        {"kind": "user", "t": 0.0, "chars": 9},
        llm(100, ("thinking", 30), ("text", 50), ("tool_use", 20)),
        llm(0, ("thinking", 1000)),  # without input it was no request
        llm(200, ("text", 7)),
    ]
    path = tmp_path / "c.jsonl"
    path.write_text(json.dumps({"sid": "s", "events": events}) + "\n")
    assert read_reasoning(path, "claude-code") == {"s": [(30, 100), (0, 7)]}
    assert len(read_trace(path, "claude-code").sessions[0].requests) == 2
    assert read_reasoning(path, "mooncake") == {}


@pytest.mark.skipif("VLLM_LIFETIME_TRACES" not in os.environ, reason="VLLM_LIFETIME_TRACES names no folder of traces")
def test_real_sessions_have_an_output_for_each_request_of_their_main_agent() -> None:
    path = Path(os.environ["VLLM_LIFETIME_TRACES"]) / "claude-code-sessions/claude_code_struct.jsonl.xz"
    outputs = read_reasoning(path, "claude-code")
    for session in read_trace(path, "claude-code").sessions:
        main = [request for request in session.requests if request.parent_agent_id is None]
        assert len(main) == len(outputs[session.session_id])
        for request, (_, characters) in zip(main, outputs[session.session_id], strict=True):
            assert request.output_tokens >= round(characters / 4)
