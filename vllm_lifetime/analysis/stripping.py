# SPDX-License-Identifier: Apache-2.0
"""What a session would write if its harness stripped reasoning at every turn's end (Lachesis 3.3).

When the next message comes, the turn's reasoning is dropped and what stood after it is written again without it. So a turn
that wrote W tokens, R of them reasoning, has a `reasoning_laden` segment of W, and the next turn begins by writing W - R as part
of its `reasoning_stripped` one. Without reasoning nothing is written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_lifetime.analysis.clock import Times
from vllm_lifetime.analysis.reasoning import Output
from vllm_lifetime.analysis.structure import SessionStructure
from vllm_lifetime.analysis.writes import SessionWrites

__all__ = ["StrippedTurn", "strip_session", "turn_reasoning"]


@dataclass(frozen=True, slots=True)
class StrippedTurn:
    """One turn that another one follows, as if its reasoning were stripped then. Tokens, and seconds of the reference clock."""

    laden_tokens: float
    """What it wrote, without the prompt of its first request."""
    reasoning_tokens: float
    stripped_tokens: float
    """What the next turn's first request writes: this turn without its reasoning, and the new message."""
    kept_tokens: float
    """What that request writes if nothing is stripped: the new message."""
    laden_lifetime_s: float
    stripped_lifetime_s: float


def strip_session(
    structure: SessionStructure, written: SessionWrites, times: Times, outputs: Sequence[Output]
) -> list[StrippedTurn]:
    """The turns of a session's main agent that another turn follows which begins with no less context: nothing was dropped yet.

    `outputs` are that agent's, in order. O(turns x requests).
    """
    main = next((agent for agent in structure.agents if agent.is_root), None)
    if main is None:
        return []
    requests = structure.session.requests
    spans: dict[tuple[int, int], list[int]] = {}
    for place, key in enumerate(zip(main.epochs, main.turns, strict=True)):
        spans.setdefault(key, []).append(place)
    turns = []
    for (key, places), (next_key, next_places) in zip(spans.items(), list(spans.items())[1:], strict=False):
        indices = [main.indices[place] for place in places]
        following = main.indices[next_places[0]]
        if key[0] != next_key[0] or requests[following].input_tokens < requests[indices[-1]].input_tokens:
            continue
        laden = sum(requests[i].output_tokens for i in indices) + sum(written.prefill_tokens[i] for i in indices[1:])
        reasoning = sum(
            requests[main.indices[place]].output_tokens * outputs[place][0] / max(1, outputs[place][1]) for place in places
        )
        message = written.prefill_tokens[following]
        last_of_epoch = max(place for place, epoch in enumerate(main.epochs) if epoch == next_key[0])
        at_end = last_of_epoch == len(main.indices) - 1
        end_s = times.session_end_s if at_end else float(times.ends_s[main.indices[last_of_epoch]])
        turns.append(
            StrippedTurn(
                laden_tokens=laden,
                reasoning_tokens=reasoning,
                stripped_tokens=message + (laden - reasoning if reasoning else 0.0),
                kept_tokens=message,
                laden_lifetime_s=float(times.ends_s[indices[-1]] - times.starts_s[indices[0]]),
                stripped_lifetime_s=end_s - float(times.starts_s[following]),
            )
        )
    return turns


def turn_reasoning(structure: SessionStructure, outputs: Sequence[Output]) -> list[float]:
    """For each turn of a session's main agent, the share of reasoning in what was generated. O(requests)."""
    main = next((agent for agent in structure.agents if agent.is_root), None)
    sums: dict[int, tuple[int, int]] = {}
    for turn, (reasoning, total) in zip(main.turns if main else (), outputs, strict=True):
        before = sums.get(turn, (0, 0))
        sums[turn] = (before[0] + reasoning, before[1] + total)
    return [reasoning / total for reasoning, total in sums.values() if total]
