# SPDX-License-Identifier: Apache-2.0
"""The scorer in the live engine: which models it has, when it is told what, and what the metrics say of it.

EngineCore process, scheduler thread. Files are read when the engine starts; nothing else here does IO (`learned_state.py` has a
thread of its own).
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from vllm_lifetime.agents import Reading
from vllm_lifetime.boundaries import Boundary, BoundaryKind, Outcome
from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.learned_state import LearnedState
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.policy.scorer import Scorer
from vllm_lifetime.policy.turnover import Turnover
from vllm_lifetime.pool.access import AccessTable
from vllm_lifetime.pool.runs import Run
from vllm_lifetime.prediction.forecast import END, Forecast, TransitionPredictor
from vllm_lifetime.prediction.next_use import NextUseModel
from vllm_lifetime.prediction.online import OnlineMarkov, SwitchingPredictor
from vllm_lifetime.prediction.serving import PredictorFileError, load_predictor
from vllm_lifetime.prediction.time_to_live import TimeToLive
from vllm_lifetime.sessions import Lease

if TYPE_CHECKING:
    from vllm.v1.request import Request

__all__ = ["PREDICTORS", "Forecasting", "JudgedPredictor"]

logger = init_logger(__name__)

PREDICTORS = ("online", "trained")

MAX_OPEN_FORECASTS = 8192
"""Forecasts of which it is remembered what they said, until the next invocation shows whether it was right."""

JUDGED_HISTORY = 8
"""So many of a workflow's latest invocations tell its forecast from another's."""


class JudgedPredictor:
    """Counts how often the likeliest next invocation was the next one. A `TransitionPredictor` around another."""

    def __init__(self, predictor: SwitchingPredictor, recorder: stats.Recorder) -> None:
        self.predictor = predictor
        self._recorder = recorder
        self._said: OrderedDict[tuple[str, ...], tuple[str, str]] = OrderedDict()
        self.num_observed = 0
        """Invocations and ends."""

    @property
    def in_use(self) -> str:
        """Which predictor answers at present."""
        return PREDICTORS[self.predictor.uses_trained]

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """As `TransitionPredictor.predict`."""
        forecast = self.predictor.predict(history, hidden_state)
        index = int(forecast.probabilities[0].argmax())
        key = tuple(history[-JUDGED_HISTORY:])
        self._said[key] = (END if index == len(forecast.agents) else forecast.agents[index], self.in_use)
        self._said.move_to_end(key)
        if len(self._said) > MAX_OPEN_FORECASTS:
            self._said.popitem(last=False)
        return forecast

    def observe(self, history: Sequence[str]) -> None:
        """As `SwitchingPredictor.observe`."""
        self.num_observed += 1
        said = self._said.get(tuple(history[-JUDGED_HISTORY - 1 : -1]))
        if said is not None:
            agent, predictor = said
            self._recorder.count(stats.PREDICTIONS, predictor, "judged")
            self._recorder.count(stats.PREDICTIONS, predictor, "correct", by=agent == history[-1])
        self.predictor.observe(history)


class Forecasting:
    """See the module. One per engine whose policy needs a scorer.

    Args:
        lifecycle: whose sessions and workflows are scored.
        state_path: this engine's file of what was learned; None: nothing is kept.

    """

    def __init__(self, options: LifetimeOptions, lifecycle: Lifecycle, recorder: stats.Recorder, state_path: Path | None) -> None:
        self._policy = options.policy
        self._lifecycle = lifecycle
        self._recorder = recorder
        self._horizon = options.horizon
        saved = LearnedState.read(state_path) if state_path is not None else {}
        self.online, self.next_use = self._restore(saved, state_path)
        self.predictor = JudgedPredictor(SwitchingPredictor(self.online, self._load(options)), recorder)
        self._state = None
        if state_path is not None:
            parts = {"predictor": self.online.to_json, "next_use": self.next_use.to_json}
            self._state = LearnedState(state_path, parts, lambda: self.predictor.num_observed)
        self._scorer: Scorer | None = None
        self._turnover: Turnover | None = None
        self._counted = (0, 0, 0)
        self._running: dict[str, Reading] = {}
        self._reads_hidden_states = bool(options.hidden_states)

    def _restore(self, saved: dict[str, str], path: Path | None) -> tuple[OnlineMarkov, NextUseModel]:
        try:
            online = OnlineMarkov.from_json(saved["predictor"], self._horizon) if "predictor" in saved else None
            next_use = NextUseModel.from_json(saved["next_use"]) if "next_use" in saved else None
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("state_path: %s cannot be used (%s): learning starts afresh, and the file is replaced", path, error)
            online = next_use = None
        return online or OnlineMarkov(self._horizon), next_use or NextUseModel()

    @staticmethod
    def _load(options: LifetimeOptions) -> TransitionPredictor | None:
        if options.predictor_path is None:
            return None
        try:
            return load_predictor(options.predictor_path)
        except PredictorFileError as error:
            logger.warning("predictor_path: %s Predictions come from the model that learns while serving.", error)
            return None

    def bind(self, access: AccessTable, capacity_blocks: int) -> None:
        """The pool of so many blocks is there: whose ranks the scorer sets."""
        self._turnover = Turnover(capacity_blocks, self._policy.time_horizon_s, time.monotonic())
        self._scorer = Scorer(
            access,
            self._policy,
            self.predictor,
            self.next_use,
            time.monotonic,
            time_to_live=TimeToLive() if self._policy.pins_ttl else None,
        )

    # ------------------------------------------------------------------ what happens

    def on_start(self, request_id: str, reading: Reading) -> None:
        """A request arrives."""
        if self._scorer is None:
            return
        start = time.perf_counter()
        if self._reads_hidden_states:
            self._running[request_id] = reading
        self._scorer.start_request(reading)
        self._took("refresh", start)

    def on_unnamed_start(self) -> None:
        """A request without metadata has been admitted; before `on_use` of its prompt."""
        if self._scorer is not None:
            self._scorer.ranking.start_unnamed()

    @property
    def follows_use(self) -> bool:
        """Whether `on_use` does anything: not before the first request without metadata."""
        return self._scorer is not None and self._scorer.ranking.follows_use

    def on_use(self, block_hashes: Sequence[BlockHash], group_id: int) -> None:
        """A request, named or not, has got, or is about to give back, these blocks of a KV cache group, from its first one on.

        O(1) per block.
        """
        if self._scorer is not None:
            ranking = self._scorer.ranking
            ranking.use([make_block_hash_with_group_id(block_hash, group_id) for block_hash in ranking.sample(block_hashes)])

    def on_hidden_states(self, rows: dict[str, NDArray[np.float32]]) -> None:
        """Prompts have been computed; rows of requests that are over or unknown are left out."""
        for request_id, row in rows.items():
            reading = self._running.get(request_id)
            if reading is not None and self._scorer is not None:
                start = time.perf_counter()
                self._scorer.observe_hidden_state(reading, row)
                self._took("refresh", start)

    def on_finish(self, request: "Request", reading: Reading) -> None:
        """A request is over; before its blocks are freed."""
        self._running.pop(request.request_id, None)
        if self._scorer is None:
            return
        start = time.perf_counter()
        reason = request.get_finished_reason()
        self._scorer.finish_request(reading, finish_reason=None if reason is None else str(reason))
        self._took("refresh", start)

    def on_replaced(self, request_id: str, reading: Reading) -> None:
        """A request was never heard of again before another came under its id."""
        self._running.pop(request_id, None)
        if self._scorer is not None:
            self._scorer.finish_request(reading)

    def apply(self, event: Boundary) -> Outcome:
        """Act on a boundary, and let the scorer know what has ended by it."""
        if self._scorer is None:
            return self._lifecycle.apply(event)
        leases = self._leases_of(event)
        outcome = self._lifecycle.apply(event)
        start = time.perf_counter()
        if event.kind is BoundaryKind.TURN_END:
            for lease in leases:
                for agent in lease.agents:
                    if agent.turn_is_over:
                        self._scorer.end_turn(agent.base)
        self.end_leases(leases)
        self._took("refresh", start)
        return outcome

    def _leases_of(self, event: Boundary) -> list[Lease]:
        """Those that the event may end; and that it may pause, if it is a turn's."""
        if event.kind is BoundaryKind.WORKFLOW_END:
            agents = self._lifecycle.find_agents(None, event.workflow, None)
        elif event.kind in (BoundaryKind.SESSION_END, BoundaryKind.SUBAGENT_RETURN, BoundaryKind.TURN_END):
            agents = self._lifecycle.find_agents(event.session_id, None, None)
        else:
            return []
        return list(dict.fromkeys(agent.lease for agent in agents))

    def end_leases(self, leases: Sequence[Lease]) -> None:
        """Tell the scorer of those of `leases` that are over."""
        if self._scorer is None:
            return
        for lease in leases:
            if lease.session.leases.get(lease.workflow_id) is not lease:
                self._scorer.end_workflow(lease.workflow_id, lease.session.key)

    def on_step(self, now: float, num_evicted: int) -> None:
        """Once per step, with the blocks evicted from HBM so far: ranks that time has changed. Bounded."""
        if self._scorer is None or self._turnover is None:
            return
        if self._turnover.observe(num_evicted, now):
            self._scorer.set_horizon(self._turnover.horizon_s, now)
        self._scorer.advance(now)

    # ------------------------------------------------------------------ looking

    def one_step_value(self, run: Run) -> float:
        """Eq. 1."""
        return 0.0 if self._scorer is None else self._scorer.one_step_value(run)

    def show(self) -> None:
        """Bring counters and gauges up to date. O(1)."""
        scorer = self._scorer
        if scorer is None:
            return
        counts = (scorer.num_predictions, scorer.num_prediction_failures, scorer.num_updates)
        made, failed, updates = (new - old for new, old in zip(counts, self._counted, strict=True))
        if made or failed or updates:
            self._counted = counts
            self._recorder.count(stats.PREDICTIONS, self.predictor.in_use, "made", by=made)
            self._recorder.count(stats.PREDICTIONS, self.predictor.in_use, "failed", by=failed)
            self._recorder.count(stats.SCORER_UPDATES, by=updates)

    @property
    def time_horizon_s(self) -> float:
        """How far ahead a next use counts at present, in seconds."""
        return self._policy.time_horizon_s if self._turnover is None else self._turnover.horizon_s

    @property
    def num_workflows(self) -> int:
        """Workflows that are scored."""
        return 0 if self._scorer is None else len(self._scorer)

    def _took(self, part: str, start: float) -> None:
        self._recorder.observe(stats.SCORER_SECONDS, part, value=time.perf_counter() - start)

    def shutdown(self) -> None:
        """Write what was learned."""
        if self._state is not None:
            self._state.shutdown()
