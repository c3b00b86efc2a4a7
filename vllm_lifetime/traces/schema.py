# SPDX-License-Identifier: Apache-2.0
"""One schema for every trace: sessions of requests whose prompts are given as block ids, not as text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEFAULT_AGENT", "Trace", "TraceRequest", "TraceSession"]

DEFAULT_AGENT = "agent"
"""Role of an agent that the trace does not name."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request to the engine, and what the harness knew when it was over.

    `blocks` are the ids of the whole blocks of its prompt, in prefix order, unique over the trace: two blocks are equal if and
    only if they and all before them hold the same tokens. `after` is the index, within the session, of the request that it waits
    for (-1: the session's start); it arrives `gap_s` after that one's end and runs for `service_s`.
    """

    blocks: NDArray[np.int64]
    after: int
    gap_s: float
    service_s: float
    input_tokens: int
    output_tokens: int
    agent: str = DEFAULT_AGENT
    agent_id: str | None = None
    parent_agent_id: str | None = None
    finish_reason: str | None = None
    """`tool_calls`, `stop` or `length`, where the trace says so."""
    tool: str | None = None
    """Name of the (first) tool that it calls."""
    ends_turn: bool = False
    """Whether a `turn_end` boundary follows it."""
    ends_agent: bool = False
    """Whether its agent's `subagent_return` boundary follows it."""
    compacts: bool = False
    """Whether a `compaction` boundary of its agent precedes it."""


@dataclass(frozen=True, slots=True)
class TraceSession:
    """One session: its requests in an order in which each comes after the one that it waits for.

    A `session_end` follows the last.

    `names_session`: whether the engine is told to which session each request belongs.
    """

    session_id: str
    requests: Sequence[TraceRequest]
    names_session: bool = True
    arrival_s: float | None = None
    """When it began, from the trace's start, for open-loop traces; None: as soon as there is room."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace. `name` is for tables."""

    name: str
    block_size_tokens: int
    sessions: Sequence[TraceSession] = field(default_factory=tuple)
