# SPDX-License-Identifier: Apache-2.0
"""Which conversation of a lease a request goes on with, by what its prompt shares with what each has read.

Scheduler process, one thread.
"""

from collections.abc import Sequence

from vllm_lifetime.agents import Agent, Continuation
from vllm_lifetime.boundaries import RequestMetadata
from vllm_lifetime.sessions import Lease

__all__ = ["MIN_NEW_TOKENS", "MIN_SHARED_TOKENS", "Conversations"]

SPAWN_WAIT_S = 60.0
"""Seconds for which an announced sub-agent may be recognised in a conversation that names no agent."""

MIN_SHARED_TOKENS = 1024
"""Nameless conversations that share less than this are different ones: a header or a tool list in common says nothing."""

MIN_NEW_TOKENS = 4096
"""A nameless request that leaves a conversation in the middle and brings at least so many tokens of its own has compacted it;
with fewer it is another conversation with the same top. On 431 recorded Claude Code sessions 98.4 % of the blocks behind such
departures were never read again, and of 45 sub-agents made to share their parent's top 1 was mistaken; sub-agents start small
(median 1,862 tokens, 90 % below 3,750), compacted contexts large (95 % above 7,040)."""


class Conversations:
    """Tells the conversations of one name apart.

    Args:
        hash_tokens: tokens per block hash, as in a request's `block_hashes`.
        min_shared_tokens: see `MIN_SHARED_TOKENS`.
        min_new_tokens: see `MIN_NEW_TOKENS`.

    """

    def __init__(self, hash_tokens: int, min_shared_tokens: int, min_new_tokens: int) -> None:
        self._min_shared_tokens = min_shared_tokens
        self._min_new_tokens = min_new_tokens
        self.set_hash_tokens(hash_tokens)

    def set_hash_tokens(self, hash_tokens: int) -> None:
        """Tokens per block hash, once they are known."""
        self._min_shared_blocks = max(1, self._min_shared_tokens // hash_tokens)
        self._min_new_blocks = max(1, self._min_new_tokens // hash_tokens)

    def find(
        self, lease: Lease, name: str | None, metadata: RequestMetadata, hashes: Sequence[bytes], now: float
    ) -> Agent | None:
        """The conversation under `name` that the prompt continues, or the announced sub-agent that it begins; None if neither.

        O(log blocks) per conversation of the name.
        """
        lines = lease.lines.get(name, [])
        longest = 0
        best: Agent | None = None
        best_common = -1
        for agent in lines:
            if agent.is_crowd:
                continue
            how, common = agent.continuation(hashes)
            longest = max(longest, common)
            if common > best_common and self._goes_on(agent, how, common, len(hashes), metadata):
                best, best_common = agent, common
        if best is not None:
            if name is not None:
                lease.waiting_spawns.pop(name, None)
            return best
        spawned = self._announced(lease, metadata, bool(lines) and longest < self._min_shared_blocks, now)
        if spawned is not None:
            lease.lines.setdefault(name, []).append(spawned)
        return spawned

    @staticmethod
    def _announced(lease: Lease, metadata: RequestMetadata, is_apart: bool, now: float) -> Agent | None:
        """The sub-agent that events announced and whose requests do not name its id, if this new conversation is its own."""
        if metadata.agent_id is not None:
            return None
        for name, at in list(lease.waiting_spawns.items()):
            if now - at > SPAWN_WAIT_S:
                del lease.waiting_spawns[name]
                continue
            agent = lease.lines[name][0]
            is_meant = agent.role == metadata.agent if metadata.agent is not None else is_apart and not lease.names_agents
            if is_meant and name != metadata.agent:
                del lease.waiting_spawns[name]
                return agent
        return None

    def _goes_on(self, agent: Agent, how: Continuation, common: int, length: int, metadata: RequestMetadata) -> bool:
        """Whether a prompt of `length` blocks that continues `agent` so is of its conversation, not of one beside it."""
        if how is Continuation.NEW:
            return agent.num_requests == 0
        if how is Continuation.EXTENDS:
            return common > 0
        if agent.num_requests:
            return False
        if agent.agent_id is not None:
            return common > 0
        if how is Continuation.DROPS_TURN and (agent.turn_is_over or metadata.turn not in (None, agent.turn)):
            return common > 0
        if agent.is_summarised and common >= min(self._min_shared_blocks, len(agent.history) // 2):
            return common > 0
        if common < self._min_shared_blocks:
            return False
        return how is Continuation.DROPS_TURN or length - common >= self._min_new_blocks
