# SPDX-License-Identifier: Apache-2.0
"""Who did what in one session of a trace: agents, their turns, and what each request answered."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from vllm_lifetime.traces.schema import TraceRequest, TraceSession

__all__ = ["AgentRequests", "Opens", "SessionStructure", "read_structure"]


class Opens(Enum):
    """What a request answers: it decides what the reference clock charges before it (Lachesis Eq. 1)."""

    AGENT = auto()
    """It is its agent's first: an initial prefill, which the clock does not charge."""
    MESSAGE = auto()
    """A user's message, after its agent's turn had ended."""
    OBSERVATION = auto()
    """A tool's or a sub-agent's result."""


@dataclass(frozen=True, slots=True)
class AgentRequests:
    """The requests of one agent in one session: indices into the session's requests, and for each its turn and epoch.

    Turns count up after each request that ends one. An epoch is what lies between two compactions. `turns` and `epochs` never
    fall.
    """

    agent_id: str
    role: str
    parent_agent_id: str | None
    indices: Sequence[int]
    turns: Sequence[int]
    epochs: Sequence[int]
    has_children: bool

    @property
    def is_root(self) -> bool:
        """Whether nobody spawned it."""
        return self.parent_agent_id is None


@dataclass(frozen=True, slots=True)
class SessionStructure:
    """One session by agents, in the order of their first requests. `opens` has an entry for each request."""

    session: TraceSession
    agents: Sequence[AgentRequests]
    opens: Sequence[Opens]


def read_structure(session: TraceSession) -> SessionStructure:
    """The structure of one session. O(requests)."""
    own: dict[str, list[int]] = {}
    for index, request in enumerate(session.requests):
        own.setdefault(_agent_id(request), []).append(index)
    parents = {request.parent_agent_id for request in session.requests}
    opens = [Opens.AGENT] * len(session.requests)
    agents = []
    for agent_id, indices in own.items():
        turn = epoch = 0
        turns, epochs = [], []
        for place, index in enumerate(indices):
            request = session.requests[index]
            if place:
                ended = session.requests[indices[place - 1]].ends_turn
                opens[index] = Opens.MESSAGE if ended else Opens.OBSERVATION
                turn += ended
                epoch += request.compacts
            turns.append(turn)
            epochs.append(epoch)
        first = session.requests[indices[0]]
        agents.append(
            AgentRequests(agent_id, first.agent, first.parent_agent_id, indices, turns, epochs, has_children=agent_id in parents)
        )
    return SessionStructure(session, agents, opens)


def _agent_id(request: TraceRequest) -> str:
    return request.agent_id or request.agent
