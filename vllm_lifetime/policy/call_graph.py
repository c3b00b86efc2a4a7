# SPDX-License-Identifier: Apache-2.0
"""The static call graph of KVFlow: each agent has one successor, given or learned as the most frequent one.

What a dynamic workflow cannot be described by; kept for comparison (PBKV section 6.1). Pure; scheduler process.
"""

from collections.abc import Mapping

__all__ = ["MAX_AGENTS", "CallGraph"]

MAX_AGENTS = 1024
"""Agents whose successors are learned; further ones have none."""

MAX_SUCCESSORS = 64
"""Successors counted per agent; further ones are not."""


class CallGraph:
    """`successors`: by agent, the one that is invoked after it; those that are not in it are learned from what is seen."""

    def __init__(self, successors: Mapping[str, str] | None = None) -> None:
        self._given = dict(successors or {})
        self._counts: dict[str, dict[str, int]] = {}

    def observe(self, agent: str, successor: str) -> None:
        """`successor` was invoked right after `agent`. O(1)."""
        if agent not in self._counts and len(self._counts) >= MAX_AGENTS:
            return
        counts = self._counts.setdefault(agent, {})
        if successor in counts or len(counts) < MAX_SUCCESSORS:
            counts[successor] = counts.get(successor, 0) + 1

    def steps_from(self, agent: str) -> dict[str, int]:
        """Invocations until each agent is invoked, when `agent` is now: 1 for its successor. Those that never are, are missing.

        O(length of the chain).
        """
        steps: dict[str, int] = {}
        while True:
            successor = self._successor(agent)
            if successor is None or successor in steps:
                return steps
            steps[successor] = len(steps) + 1
            agent = successor

    def _successor(self, agent: str) -> str | None:
        given = self._given.get(agent)
        if given is not None:
            return given
        counts = self._counts.get(agent)
        # The name decides between equals, so that the order of what was seen does not.
        return None if not counts else min(counts, key=lambda name: (-counts[name], name))
