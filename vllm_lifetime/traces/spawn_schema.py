# SPDX-License-Identifier: Apache-2.0
"""What is known of a sub-agent when it is spawned, and what became of it."""

from dataclasses import dataclass

__all__ = ["SpawnSample", "SpawnSignal"]


@dataclass(frozen=True, slots=True)
class SpawnSignal:
    """A worker's spawn signal (Lachesis section 3.5): what the harness built it from, and where in the session. None: not known.

    Traces without text know the lengths only. Where both are known, the text may be the head of a longer one.
    """

    instruction: str | None = None
    context: str | None = None
    instruction_chars: int | None = None
    context_chars: int | None = None
    tools: tuple[str, ...] = ()
    agent: str | None = None
    """Its role."""
    model: str | None = None
    position: int | None = None
    """How many sub-agents the session had spawned before it."""


@dataclass(frozen=True, slots=True)
class SpawnSample:
    """One sub-agent that has returned (or was stopped)."""

    session_id: str
    signal: SpawnSignal
    starts_s: float
    """When it was spawned, on a clock of its session."""
    lifetime_s: float
    """From spawn to return."""
    written_tokens: int
    """Tokens of KV it wrote: the size of its last context."""
