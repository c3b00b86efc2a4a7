# SPDX-License-Identifier: Apache-2.0
"""The records that the lifecycle keeps: sessions, their leases, and what is remembered of those that have ended.

Scheduler process, one thread. `lifecycle.py` and `conversations.py` change them.
"""

from vllm_lifetime.agents import Agent
from vllm_lifetime.boundaries import BoundaryKind

__all__ = ["EndedSession", "Lease", "Session"]


class Session:
    """One session, or one workflow that names no session."""

    __slots__ = (
        "generation",
        "key",
        "last_active",
        "last_boundary",
        "last_boundary_at",
        "leases",
        "opened_sent_at_s",
        "session_id",
    )

    def __init__(self, key: tuple[str | None, str | None], generation: int, opened_sent_at_s: float | None, now: float) -> None:
        self.key = key
        self.session_id = key[0]
        self.generation = generation
        self.opened_sent_at_s = opened_sent_at_s
        self.leases: dict[str, Lease] = {}
        self.last_active = now
        self.last_boundary: BoundaryKind | None = None
        self.last_boundary_at = now

    @property
    def agents(self) -> list[Agent]:
        """All agents of all its workflows."""
        return [agent for lease in self.leases.values() for agent in lease.agents]

    def find_leases(self, workflow_id: str | None) -> list["Lease"]:
        """Its lease of a workflow, if it has one; of None, all of them."""
        if workflow_id is None:
            return list(self.leases.values())
        lease = self.leases.get(workflow_id)
        return [] if lease is None else [lease]


class Lease:
    """One workflow within one session. After its end a new request with the same ids gets a new one."""

    __slots__ = ("lines", "names_agents", "session", "waiting_spawns", "workflow_id")

    def __init__(self, workflow_id: str, session: Session) -> None:
        self.workflow_id = workflow_id
        self.session = session
        self.lines: dict[str | None, list[Agent]] = {}
        """By name (`agent_id`, else role, else None): its conversations."""
        self.waiting_spawns: dict[str, float] = {}
        """When sub-agents were announced that no request has named yet, oldest first."""
        self.names_agents = False
        """Whether a request has named its agent."""

    # An announced sub-agent may stand under its own name and among the nameless ones: a dictionary names it once.

    @property
    def agents(self) -> list[Agent]:
        """All its agents."""
        return list({agent: None for lines in self.lines.values() for agent in lines})

    def find(self, name: str | None) -> list[Agent]:
        """The conversations of the agent called `name`; of None, those of every agent that nobody spawned."""
        if name is None:
            return list({agent: None for lines in self.lines.values() for agent in lines if not agent.is_subagent})
        return list(
            {
                agent: None
                for lines in self.lines.values()
                for agent in lines
                if name == agent.agent_id or name == agent.role or name == agent.name
            }
        )


class EndedSession:
    """What is remembered of an ended session; `at` is when, on the lifecycle's clock."""

    __slots__ = ("at", "generation", "last_boundary", "sent_at_s")

    def __init__(self, generation: int, sent_at_s: float | None, at: float, last_boundary: BoundaryKind | None) -> None:
        self.generation = generation
        self.sent_at_s = sent_at_s
        self.at = at
        self.last_boundary = last_boundary
