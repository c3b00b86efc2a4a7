# SPDX-License-Identifier: Apache-2.0
"""How much of what an agent wrote was reasoning, for the formats that say so. The trace schema has no field for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_lifetime.traces.codex import codex_calls
from vllm_lifetime.traces.source import Row, json_lines

__all__ = ["REASONING_FORMATS", "Output", "read_reasoning"]

Output = tuple[int, int]
"""What one request wrote: reasoning, and all of it. Characters for Claude Code, tokens for Codex."""


def _claude_code(session: Row) -> list[Output]:
    outputs = []
    for event in session.rows("events"):
        if event.text("kind") != "llm":
            continue
        usage = event.child("usage")
        fields = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        # As the reader of the trace does: an event without input was no request.
        if any(usage.count(name, 0) for name in fields):
            sizes = [(block.text("type"), block.count("chars", 0)) for block in event.rows("blocks", [])]
            outputs.append((sum(chars for kind, chars in sizes if kind == "thinking"), sum(chars for _, chars in sizes)))
    return outputs


def _codex(session: Row) -> list[Output]:
    return [(min(call.reasoning_tokens, call.output_tokens), call.output_tokens) for call in codex_calls(session)]


REASONING_FORMATS = {"claude-code": _claude_code, "codex": _codex}


def read_reasoning(path: Path, format: str) -> Mapping[str, Sequence[Output]]:
    """For each session the outputs of the requests of its main agent, in order; empty for formats that do not tell.

    Raises TraceError.
    """
    outputs_of = REASONING_FORMATS.get(format)
    if outputs_of is None:
        return {}
    return {row.text("sid"): outputs_of(row) for row in json_lines(path)}
