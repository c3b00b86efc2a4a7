# SPDX-License-Identifier: Apache-2.0
"""Keeps the gauges on `/metrics` up to date. EngineCore process, scheduler thread, once per step."""

import time
from typing import TYPE_CHECKING

from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.forecasting import PREDICTORS

if TYPE_CHECKING:
    from vllm_lifetime.connectors.lifetime.scheduler import LifetimeScheduler

__all__ = ["Gauges"]

CLASSES_EVERY_S = 1.0
"""How often blocks are counted by class, at most, while the engine runs."""

CLASSES_SHARE = 200
"""And so many times longer than the count itself takes."""


class Gauges:
    """Sets those that have changed since they were last set."""

    def __init__(self, recorder: stats.Recorder) -> None:
        self._recorder = recorder
        self._shown: dict[tuple[str, ...], float] = {}
        self._classes_due = 0.0

    def show(self, scheduler: "LifetimeScheduler") -> None:
        """Look at everything; O(1) but for the blocks by class, which are counted by runs and seldom."""
        for name, usage in scheduler.usage().items():
            for state in ("capacity", "used", "free", "retired"):
                self._set(stats.TIER_BLOCKS, getattr(usage, state), name, state)
        lifecycle = scheduler.lifecycle
        self._set(stats.SESSIONS, len(lifecycle))
        self._set(stats.AGENTS, lifecycle.num_agents)
        self._set(stats.SEGMENTS, len(lifecycle.segments))
        self._set(stats.EXPIRED_AGENTS, lifecycle.num_expired)
        forecasting = scheduler.forecasting
        if forecasting is not None:
            self._set(stats.SCORED_WORKFLOWS, forecasting.num_workflows)
            self._set(stats.TIME_HORIZON, forecasting.time_horizon_s)
            for predictor in PREDICTORS:
                self._set(stats.PREDICTOR_IN_USE, int(forecasting.predictor.in_use == predictor), predictor)
        now = time.monotonic()
        if now >= self._classes_due:
            for tier, by_class in scheduler.calls.count_classes().items():
                for segment_class, count in by_class.items():
                    self._set(stats.CLASS_BLOCKS, count, tier, segment_class)
            done = time.monotonic()
            self._classes_due = done + max(CLASSES_EVERY_S, CLASSES_SHARE * (done - now))

    def _set(self, metric: stats.Metric, value: float, *labels: str) -> None:
        key = (metric.name, *labels)
        if self._shown.get(key) != value:
            self._shown[key] = value
            self._recorder.set(metric, *labels, to=value)
