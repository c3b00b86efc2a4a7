# SPDX-License-Identifier: Apache-2.0
"""The order in which live sub-agents are expected to return, for placement: scored at their spawn, learned from at their return.

EngineCore process, scheduler thread: under 0.2 ms a spawn, about 0.4 ms a return. Files are read when the engine starts; what was
learned is written by a thread of its own (`learned_state.py`).
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vllm.logger import init_logger

from vllm_lifetime.agents import Agent
from vllm_lifetime.boundaries import Boundary, BoundaryKind, Outcome, OutcomeStatus
from vllm_lifetime.connectors.lifetime.learned_state import LearnedState
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.prediction.lifetime_rank import LifetimeRank, LifetimeRankError, load_base
from vllm_lifetime.prediction.predictor_file import PredictorFileError
from vllm_lifetime.prediction.spawn_features import signal_of
from vllm_lifetime.traces.spawn_schema import SpawnSignal

__all__ = ["MAX_SPAWNED", "SpawnRanks"]

logger = init_logger(__name__)

MAX_SPAWNED = 4096
"""Announced sub-agents that are remembered until they return; of more, the latest."""

PART = "rank"


class _Spawned(NamedTuple):
    signal: SpawnSignal
    at_s: float
    score: float


class SpawnRanks:
    """Scores of the sub-agents that `subagent_spawn` announced.

    Args:
        lifecycle: finds the agents that an event is about.
        rank_path: a file of `vllm-lifetime rank train`; None, or one that cannot be used (a warning): the order by expected size,
            until enough was learned.
        state_path: where what was learned is kept across restarts; None: nowhere.
        clock: monotonic seconds.

    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        rank_path: Path | None,
        state_path: Path | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        base = None
        if rank_path is not None:
            try:
                base = load_base(rank_path)
            except PredictorFileError as error:
                logger.warning("rank_path: %s Sub-agents are ordered by expected size, and what is learned.", error)
        self.rank = LifetimeRank(base)
        self._spawned: OrderedDict[Agent, _Spawned] = OrderedDict()
        self._state: LearnedState | None = None
        if state_path is not None:
            path = state_path.with_name(f"{state_path.name}.{PART}")
            saved = LearnedState.read(path).get(PART)
            if saved is not None:
                try:
                    self.rank.restore(saved)
                except LifetimeRankError as error:
                    logger.warning("state_path: %s: %s Learning starts afresh.", path, error)
            self._state = LearnedState(path, {PART: self.rank.to_json}, lambda: self.rank.num_observed)

    def __len__(self) -> int:
        """Announced sub-agents that have not returned."""
        return len(self._spawned)

    def score_of(self, agent: Agent) -> float | None:
        """Higher: it is expected to live longer; only the order counts. None: no `subagent_spawn` has announced it. O(1)."""
        spawned = self._spawned.get(agent)
        return None if spawned is None else spawned.score

    def apply(self, event: Boundary, act: Callable[[Boundary], Outcome]) -> Outcome:
        """Have `act` carry out the event; take up who was spawned by it, and learn from who has returned."""
        if event.kind is BoundaryKind.SUBAGENT_SPAWN:
            outcome = act(event)
            if outcome.status is OutcomeStatus.ACCEPTED:
                for agent in self._agents_of(event):
                    if agent not in self._spawned:
                        self._take_up(agent, event)
            return outcome
        # They are forgotten when they have returned.
        returning = self._agents_of(event) if event.kind is BoundaryKind.SUBAGENT_RETURN else []
        outcome = act(event)
        if outcome.status is OutcomeStatus.ACCEPTED:
            for agent in returning:
                spawned = self._spawned.pop(agent, None)
                if spawned is not None:
                    self.rank.observe(spawned.signal, self._clock() - spawned.at_s)
        return outcome

    def _agents_of(self, event: Boundary) -> list[Agent]:
        name = event.agent_id or event.agent
        return [] if name is None else self._lifecycle.find_agents(event.session_id, event.workflow_id, name)

    def _take_up(self, agent: Agent, event: Boundary) -> None:
        signal = signal_of(event)
        self._spawned[agent] = _Spawned(signal, self._clock(), self.rank.score(signal))
        if len(self._spawned) > MAX_SPAWNED:
            self._spawned.popitem(last=False)

    def shutdown(self) -> None:
        """Write what was learned."""
        if self._state is not None:
            self._state.shutdown()
