# SPDX-License-Identifier: Apache-2.0
"""One session as an adapter sees it: begun once, ended once, and in between agents whose contexts open and close.

Shared by the adapters that follow their harness's agents themselves. Thread-safe; returns at once and raises nothing
because of the server, since the client does not.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_lifetime.boundaries import MAX_ID_LENGTH, BoundaryKind, Spawn
from vllm_lifetime.harness.client import AsyncLifetimeClient, LifetimeClient, request_fields

__all__ = ["Conversation", "Instance", "clip_id"]


def clip_id(agent_id: str) -> str:
    """Return an id that is short enough; what tells it from others is expected at its end."""
    return agent_id[-MAX_ID_LENGTH:]


@dataclass(frozen=True, slots=True)
class Instance:
    """An agent with a context of its own."""

    agent: str | None
    """Its role."""

    agent_id: str | None
    parent_agent_id: str | None = None
    is_spawned: bool = False
    """Whether its opening and closing are events: that of a sub-agent is, that of a session's own agent is not."""


class Conversation:
    """Reports one session through a client, and knows which instances are open."""

    def __init__(
        self,
        client: LifetimeClient | AsyncLifetimeClient,
        session_id: str | None = None,
        workflow_id: str | None = None,
    ) -> None:
        """Nothing is reported before the first event. The session's id is made up unless given."""
        self.session_id = session_id or uuid.uuid4().hex
        self.workflow_id = workflow_id
        self._client = client
        self._lock = threading.RLock()
        self._is_started = False
        self._open: dict[str, Instance] = {}

    @property
    def is_started(self) -> bool:
        """Whether it has begun and not ended."""
        return self._is_started

    def find(self, agent_id: str | None) -> Instance | None:
        """Return the instance of this id, if it is open."""
        return self._open.get(agent_id) if agent_id is not None else None

    def start(self) -> None:
        """Begin the session, unless it has."""
        with self._lock:
            if not self._is_started:
                self._is_started = True
                self.say(BoundaryKind.SESSION_START)

    def open(self, instance: Instance, spawn: Spawn | Mapping[str, Any] | None = None) -> bool:
        """Open an instance; return False if it is open already, or has no id to be known by."""
        with self._lock:
            if instance.agent_id is None or instance.agent_id in self._open:
                return False
            self._open[instance.agent_id] = instance
            if instance.is_spawned:
                self.say(BoundaryKind.SUBAGENT_SPAWN, instance, spawn=spawn)
            return True

    def close(self, agent_ids: Iterable[str] | None = None, *, also_unspawned: bool = False) -> None:
        """Close those of the instances (None: of all) that are open, the last one first.

        Those that were not spawned stay open unless asked for: a session's own agents end with it.
        """
        with self._lock:
            for agent_id in reversed(list(self._open if agent_ids is None else agent_ids)):
                instance = self._open.get(agent_id)
                if instance is not None and (instance.is_spawned or also_unspawned):
                    del self._open[agent_id]
                    self.say(BoundaryKind.SUBAGENT_RETURN, instance)

    def end(self) -> None:
        """End the session with all that is open, unless it has ended. A later event may begin it anew.

        By `workflow_end`, unless the workflow was named: that may be shared with other sessions, so it is `session_end` then.
        """
        with self._lock:
            if not self._is_started:
                return
            self.close()
            self._open.clear()
            self.say(BoundaryKind.WORKFLOW_END if self.workflow_id is None else BoundaryKind.SESSION_END)
            self._is_started = False

    def say(
        self,
        kind: BoundaryKind,
        instance: Instance | None = None,
        *,
        spawn: Spawn | Mapping[str, Any] | None = None,
        expected_return_s: float | None = None,
    ) -> None:
        """Report an event of this session, about an instance or about the session."""
        self._client.boundary(
            kind,
            session_id=self.session_id,
            workflow_id=self.workflow_id,
            agent=instance.agent if instance else None,
            agent_id=instance.agent_id if instance else None,
            parent_agent_id=instance.parent_agent_id if instance else None,
            spawn=spawn,
            expected_return_s=expected_return_s,
        )

    def request_fields(self, instance: Instance | None) -> dict[str, Any]:
        """Return what names a request of `instance` (None: of nobody known), as `client.request_fields` does.

        The turn is left to the server, which counts the user messages: these are what its prompts are cut by.
        """
        return request_fields(
            session_id=self.session_id,
            workflow_id=self.workflow_id,
            agent=instance.agent if instance else None,
            agent_id=instance.agent_id if instance else None,
            parent_agent_id=instance.parent_agent_id if instance else None,
        )
