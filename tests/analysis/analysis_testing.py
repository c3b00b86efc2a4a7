# SPDX-License-Identifier: Apache-2.0
"""Small made-up sessions. A block is one token, so that sizes can be counted by hand."""

from typing import Any

import numpy as np

from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

__all__ = ["ask", "delegating", "made_up_trace", "stripping", "trace_of"]


def ask(blocks: list[int], out: int, after: int, gap_s: float = 0.0, **more: Any) -> TraceRequest:
    """A request of agent `main` whose prompt is `blocks`."""
    fields: dict[str, Any] = {"service_s": 1.0, "input_tokens": len(blocks), "agent_id": "main"}
    return TraceRequest(blocks=np.array(blocks, np.int64), after=after, gap_s=gap_s, output_tokens=out, **(fields | more))


def stripping(name: str = "s", base: int = 0) -> TraceSession:
    """Two turns; what the first one added is dropped when the second begins.

    Request 0 reads 10 tokens and writes 5. Request 1 reads these 15 and an observation of 3, and writes 4. Request 2 reads the
    first 10 and 6 new ones, and writes 2.
    """
    first = [base + token for token in range(10)]
    return TraceSession(
        name,
        (
            ask(first, 5, -1),
            ask([*first, *range(base + 10, base + 18)], 4, 0, 5.0, ends_turn=True),
            ask([*first, *range(base + 100, base + 106)], 2, 1, 100.0, ends_turn=True),
        ),
    )


def delegating(name: str = "d", base: int = 1000, role: str = "Explore", rounds: int = 2) -> TraceSession:
    """A lead asks, a sub-agent of `role` runs `rounds` requests, the lead goes on with its result.

    The lead's prompts are 20 and 33 tokens long, of which 5 were generated; the sub-agent begins with 8 tokens, writes 10 in each
    request, and each observation is 2 tokens.
    """
    lead = [base + token for token in range(20)]
    requests = [ask(lead, 5, -1, agent="lead")]
    context = [base + 200 + token for token in range(8)]
    own = {"agent": role, "agent_id": "sub", "parent_agent_id": "main"}
    for number in range(rounds):
        requests.append(ask(list(context), 10, number, 0.5, ends_agent=number == rounds - 1, **own))
        context += [base + 300 + 20 * number + token for token in range(12)]
    requests.append(ask([*lead, *range(base + 400, base + 413)], 1, rounds, agent="lead", ends_turn=True))
    return TraceSession(name, tuple(requests))


def trace_of(*sessions: TraceSession) -> Trace:
    """A trace of sessions whose blocks are one token each."""
    return Trace("made-up", 1, sessions)


def made_up_trace() -> Trace:
    """Sessions with turns, a worker and a reviewer."""
    return trace_of(
        stripping(),
        stripping("t", 5000),
        delegating(),
        delegating("e", 2000, rounds=3),
        delegating("f", 3000, role="code-reviewer", rounds=1),
    )
