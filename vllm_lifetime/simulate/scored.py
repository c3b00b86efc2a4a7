# SPDX-License-Identifier: Apache-2.0
"""The server's `Scorer` as a policy of replays, and what it knows from before."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.agents import Reading
from vllm_lifetime.policy.eviction import EvictionPolicy
from vllm_lifetime.policy.scorer import Scorer
from vllm_lifetime.policy.turnover import Turnover
from vllm_lifetime.prediction.forecast import Forecast, TransitionPredictor
from vllm_lifetime.prediction.next_use import NextUseModel
from vllm_lifetime.prediction.online import OnlineMarkov
from vllm_lifetime.prediction.time_to_live import TimeToLive
from vllm_lifetime.simulate.engine import Engine, ReplayPolicy
from vllm_lifetime.simulate.schedule import Event
from vllm_lifetime.traces.schema import TraceRequest, TraceSession

__all__ = ["Models", "NoisyPredictor", "ScoredPolicy"]


class NoisyPredictor:
    """A predictor whose forecasts are mixed with a uniform one (PBKV Eq. 5): (1 - noise) P + noise U, U over agents and END."""

    def __init__(self, predictor: TransitionPredictor, noise: float) -> None:
        if not 0.0 <= noise <= 1.0:
            raise ValueError(f"the noise lambda must be in [0, 1], it is {noise}")
        self._predictor = predictor
        self._noise = noise

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """As the predictor, with noise."""
        agents, probabilities = self._predictor.predict(history, hidden_state)
        return Forecast(agents, (1.0 - self._noise) * probabilities + self._noise / probabilities.shape[1])

    def observe(self, history: Sequence[str]) -> None:
        """Passed on, if the predictor learns."""
        observe = getattr(self._predictor, "observe", None)
        if observe is not None:
            observe(history)


@dataclass
class Models:
    """What a scorer knows from before; it goes on learning in a replay, so each replay has its own copy."""

    predictor: TransitionPredictor = field(default_factory=OnlineMarkov)
    next_use: NextUseModel = field(default_factory=NextUseModel)
    time_to_live: TimeToLive = field(default_factory=TimeToLive)


class ScoredPolicy(ReplayPolicy):
    """A policy of `policy/eviction.py` on the server's own `Scorer`, whose horizon follows the cache's turnover."""

    def __init__(self, policy: EvictionPolicy, models: Models) -> None:
        super().__init__(policy.name)
        self.acts_on_boundaries = policy.acts_on_boundaries
        self.models = models
        self._policy = policy

    def begin(self, engine: Engine) -> None:
        self._engine = engine
        self._turnover = Turnover(engine.cache.capacity_blocks, self._policy.time_horizon_s)
        self._scorer = Scorer(
            engine.cache.set_rank,
            self._policy,
            self.models.predictor,
            self.models.next_use,
            clock=lambda: engine.now,
            time_to_live=self.models.time_to_live,
            slow_prediction_s=float("inf"),
        )

    def start_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        self._scorer.start_request(reading, event.at_s)

    def finish_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        self._scorer.finish_request(reading, event.at_s, request.finish_reason, request.tool)

    def end_turn(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        self._scorer.end_turn(reading, event.at_s)

    def end_session(self, event: Event, session: TraceSession, reading: Reading) -> None:
        # Who knows no boundaries is not told that a workflow is over, either.
        if self.acts_on_boundaries:
            self._scorer.end_workflow(reading.prompt.workflow_id, reading.agent.lease.session.key, event.at_s)

    def before_eviction(self, now: float) -> None:
        if self._turnover.observe(self._engine.cache.num_evicted, now):
            self._scorer.set_horizon(self._turnover.horizon_s, now)
        self._scorer.advance(now)
