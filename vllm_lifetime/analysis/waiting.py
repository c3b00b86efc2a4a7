# SPDX-License-Identifier: Apache-2.0
"""For how much of its life a lead agent's context is not read because its sub-agents work (Lachesis 3.4)."""

from typing import NamedTuple

from vllm_lifetime.analysis.clock import Times
from vllm_lifetime.analysis.structure import AgentRequests, Opens, SessionStructure

__all__ = ["Waiting", "lead_waiting"]


class Waiting(NamedTuple):
    """How long one lead agent waited, in seconds of the reference clock."""

    lifetime_s: float
    """From its first request to the end of the session."""
    for_subagents_s: float
    """While at least one sub-agent of its is under way and it runs no request itself."""
    for_user_s: float
    """The rest of the pauses before a user's messages."""


def lead_waiting(structure: SessionStructure, times: Times) -> list[Waiting]:
    """One entry for each agent that nobody spawned and that has sub-agents. O(requests x log)."""
    return [_waiting(structure, agent, times) for agent in structure.agents if agent.is_root and agent.has_children]


def _waiting(structure: SessionStructure, lead: AgentRequests, times: Times) -> Waiting:
    own, child, user = range(3)
    changes: list[tuple[float, int, int]] = []

    def span(kind: int, begins_s: float, ends_s: float) -> None:
        if begins_s < ends_s:
            changes.extend(((begins_s, kind, 1), (ends_s, kind, -1)))

    for place, index in enumerate(lead.indices):
        span(own, float(times.starts_s[index]), float(times.ends_s[index]))
        if structure.opens[index] is Opens.MESSAGE:
            span(user, float(times.ends_s[lead.indices[place - 1]]), float(times.starts_s[index]))
    for agent in structure.agents:
        if agent.parent_agent_id == lead.agent_id:
            span(child, float(times.starts_s[agent.indices[0]]), float(times.ends_s[list(agent.indices)].max()))
    active, last_s = [0, 0, 0], 0.0
    for_subagents_s = for_user_s = 0.0
    for at_s, kind, change in sorted(changes):
        if not active[own]:
            if active[child]:
                for_subagents_s += at_s - last_s
            elif active[user]:
                for_user_s += at_s - last_s
        active[kind] += change
        last_s = at_s
    return Waiting(times.session_end_s - float(times.starts_s[lead.indices[0]]), for_subagents_s, for_user_s)
