# SPDX-License-Identifier: Apache-2.0
"""Reads MapCoder workflows: real sequences of agents with token totals. Prompts are put together by a convention."""

from pathlib import Path

from vllm_lifetime.traces.pieces import Piece, PiecedPrompts
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import Row, TraceError, is_text, json_lines

__all__ = ["read_mapcoder"]

BLOCK_SIZE_TOKENS = 16
PREFIX_TOKENS = 192
"""Instructions of an agent, the same in every workflow. Assumed."""
CHARS_PER_TOKEN = 4.0
FIRST_TOKEN_S, OUTPUT_TOKENS_PER_S = 0.5, 40.0
"""How long a call runs; the log does not say. Assumed."""


def read_mapcoder(path: Path) -> Trace:
    """Read workflows (.jsonl, also packed), each a session. Raises TraceError.

    The log has one total of prompt tokens for a workflow. A call's prompt is its agent's prefix, the task, and every output so
    far; an output counts as many tokens in later prompts as makes their sum the logged total. Written tokens are spread evenly.
    """
    prompts = PiecedPrompts(BLOCK_SIZE_TOKENS)
    sessions = tuple(_read_workflow(row, index, prompts) for index, row in enumerate(json_lines(path)))
    if not sessions:
        raise TraceError(str(path), "expected at least one workflow, found none")
    return Trace("mapcoder", BLOCK_SIZE_TOKENS, sessions)


def _read_workflow(row: Row, index: int, prompts: PiecedPrompts) -> TraceSession:
    agents = row.items("seq")
    if not agents or not all(is_text(agent) and agent for agent in agents):
        raise row.error("seq", "a list of agents' names, at least one")
    calls = len(agents)
    task: Piece = (("task", index), round(row.count("desc_chars") / CHARS_PER_TOKEN))
    spare = _total(row, "prompt_tokens") - calls * (PREFIX_TOKENS + task[1])
    output_in_prompt = max(0, spare) // max(1, calls * (calls - 1) // 2)
    output_tokens = _total(row, "completion_tokens") // calls
    requests = []
    for call, agent in enumerate(agents):
        outputs: list[Piece] = [(("output", index, earlier), output_in_prompt) for earlier in range(call)]
        try:
            blocks, input_tokens = prompts.blocks([(("prefix", agent), PREFIX_TOKENS), task, *outputs])
        except ValueError as error:
            raise TraceError(row.where, str(error)) from error
        requests.append(
            TraceRequest(
                blocks=blocks,
                after=call - 1,
                gap_s=0.0,
                service_s=FIRST_TOKEN_S + output_tokens / OUTPUT_TOKENS_PER_S,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                agent=agent,
                agent_id=agent,
                finish_reason="stop",
                ends_turn=call == calls - 1,
            )
        )
    return TraceSession(f"workflow-{index}", tuple(requests))


def _total(row: Row, name: str) -> int:
    counts = row.items(name)
    if not all(type(count) is int and 0 <= count < 1 << 53 for count in counts):
        raise row.error(name, "a list of whole numbers of at least 0, below 2**53")
    return sum(counts)
