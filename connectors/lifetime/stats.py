# SPDX-License-Identifier: Apache-2.0
"""Metrics on vLLM's `/metrics`: their names, what the scheduler side collects, and how it reaches Prometheus.

`LifetimeStats` is filled in EngineCore and shipped, as plain data, to the API server, where `LifetimePromMetrics` applies it.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter as PromCounter
from prometheus_client import Gauge, Histogram
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

__all__ = ["METRICS", "LifetimePromMetrics", "LifetimeStats", "Metric", "Recorder"]

STEP_BUCKETS_S = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3)
REUSE_BUCKETS_S = (0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10000)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name without the `vllm:lifetime_` prefix, kind, labels and help text."""

    name: str
    kind: type[PromMetric]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = REUSE_BUCKETS_S
    """Of a histogram."""


TIER_BLOCKS = Metric(
    "tier_blocks",
    Gauge,
    ("tier", "state"),
    "Blocks of a tier by state. used: referenced, or readable and live. free: empty or retired. retired: the part of free "
    "that is still readable. capacity = used + free.",
)
BYTES_READ = Metric("bytes_read", PromCounter, ("tier",), "KV bytes read from a tier below HBM.")
BYTES_WRITTEN = Metric("bytes_written", PromCounter, ("tier",), "KV bytes written to a tier below HBM.")
HIT_BLOCKS = Metric("hit_blocks", PromCounter, ("tier",), "Prompt blocks found in a tier when a request was admitted.")
HIT_TOKENS = Metric("hit_tokens", PromCounter, ("tier",), "Prompt tokens found in a tier when a request was admitted.")
PLACED_BLOCKS = Metric(
    "placed_blocks", PromCounter, ("tier", "class"), "With flash in place, new blocks by the tier that gave them and by class."
)
SPILLED_BLOCKS = Metric(
    "spilled_blocks",
    PromCounter,
    ("tier", "class"),
    "With flash in place, new blocks by the tier that should have given them but had no room, and by class.",
)
EMULATED_DELAY = Metric(
    "emulated_delay_microseconds",
    PromCounter,
    (),
    "Time by which steps were delayed so that flash in place takes as long as the emulated device; 0 if nothing is emulated.",
)
EVICTIONS = Metric(
    "evictions",
    PromCounter,
    ("tier", "reason"),
    "Blocks given up for space. retired: no active workflow read it. demoted: a copy lies below. lost: live, with no other copy.",
)
LOADS = Metric(
    "loads",
    PromCounter,
    ("outcome",),
    "Loads by outcome. done, failed (some block did not verify or could not be read), late (missed its deadline), skipped_slower "
    "(recomputing was expected to be faster), skipped_no_room (the whole request did not fit).",
)
RECOMPUTED_BLOCKS = Metric("recomputed_blocks", PromCounter, (), "Blocks that a failed or late load left to be recomputed.")
REUSE_GAP = Metric(
    "eviction_to_reuse_seconds",
    Histogram,
    ("outcome",),
    "Time from a block's eviction from HBM to the next request for it (regret). recomputed: it was computed again. reloaded: it "
    "came back from below.",
)
BOUNDARIES = Metric("boundaries", PromCounter, ("kind", "status"), "Boundary events by kind and outcome.")
RETIRED_BLOCKS = Metric("retired_blocks", PromCounter, (), "Blocks retired by a boundary, by a request or by time, all tiers.")
FLASH_FAULTS = Metric(
    "flash_faults",
    PromCounter,
    ("kind",),
    "Flash reads and writes that failed, by kind; each was served by recomputing or by not keeping the block.",
)
FLASH_WRITTEN_BYTES = Metric(
    "flash_written_bytes",
    PromCounter,
    ("class", "reason"),
    "Bytes written to flash files by segment class and reason. KV: demotion (from HBM), move (from host), in_place. Class "
    "overhead: record, header, ledger.",
)
FLASH_WRITES_REFUSED = Metric(
    "flash_writes_refused",
    PromCounter,
    ("class", "reason"),
    "Blocks near their eviction that were not written to flash. placement: their class never is. rank: all that flash holds is "
    "worth more.",
)
FLASH_THROTTLES = Metric("flash_throttles", PromCounter, (), "How often the budget of bytes written to flash was used up.")
FLASH_THROTTLED = Metric("flash_throttled", Gauge, (), "1 while that budget is used up, else 0.")
FLASH_CYCLES = Metric(
    "flash_cycles",
    Gauge,
    ("file", "of"),
    "Program/erase cycles of a flash file's erase blocks, in its life: mean and max, had writes been levelled by whole pages.",
)
FLASH_ENDURANCE_USED = Metric("flash_endurance_used", Gauge, ("file",), "Share of a flash file's program/erase budget spent.")
FLASH_WRITE_AMPLIFICATION = Metric(
    "flash_write_amplification", Gauge, ("file",), "Bytes programmed, in whole pages, for each byte of KV, in a file's life."
)
FLASH_DEVICE_YEARS = Metric(
    "flash_device_years",
    Gauge,
    ("file", "window"),
    "Years that flash of the file's size lasts at its mean rate of writes over the last hour, the last day, the ledger's life.",
)
WEAR_LEDGER_ERRORS = Metric(
    "wear_ledger_errors", Gauge, ("file", "kind"), "Failed reads and writes of a wear ledger since the process started, by errno."
)
SESSIONS = Metric("sessions", Gauge, (), "Live sessions, and workflows that name no session.")
AGENTS = Metric("agents", Gauge, (), "Agents known, those without blocks included.")
SEGMENTS = Metric("segments", Gauge, (), "Live segments: parts of agents' contexts that share one lifetime.")
EXPIRED_AGENTS = Metric(
    "expired_agents", Gauge, (), "Agents closed because nothing was heard of them for a lease's time, since the start."
)
CLASS_BLOCKS = Metric(
    "class_blocks",
    Gauge,
    ("tier", "class"),
    "Blocks of a tier that a live segment reads, by the segment's class; `shared` where several workflows read it.",
)
CONTROL_CALL_SECONDS = Metric(
    "control_call_seconds",
    Histogram,
    ("call",),
    "Processor time that the scheduler thread spent on one call of the control API: boundaries (all events that came together), "
    "hints, release.",
    STEP_BUCKETS_S,
)
HINTS = Metric("hints", PromCounter, ("action", "status"), "Hint actions by type and outcome.")
REQUESTS = Metric("requests", PromCounter, (), "Requests admitted; one that is preempted counts again.")
PROMPT_TOKENS = Metric("prompt_tokens", PromCounter, (), "Tokens of admitted requests, of which `hit_tokens` were found.")
BAD_METADATA = Metric("bad_metadata", PromCounter, (), "Requests whose lifetime metadata could not be used in full.")

PREFETCHED_BLOCKS = Metric(
    "prefetched_blocks",
    PromCounter,
    ("outcome",),
    "Blocks brought up to HBM ahead of their request. issued: all of them. Of these, used: a request has hit it. wasted: handed "
    "out again before anybody read it, or there already when it came. cancelled: an allocation needed the space first. failed: "
    "it did not arrive.",
)
PREDICTIONS = Metric(
    "predictions",
    PromCounter,
    ("predictor", "outcome"),
    "Forecasts by predictor (online: learns while serving; trained: from predictor_path). made: all. failed: raised, or took too "
    "long. judged: the workflow's next invocation, or its end, has come. correct: and was the likeliest.",
)
SCORER_SECONDS = Metric(
    "scorer_seconds",
    Histogram,
    ("part",),
    "Time that the scheduler thread spent at a time. refresh: a forecast and new ranks, at a request's start or end and at "
    "boundaries. prefetch: a decision what to prefetch.",
    STEP_BUCKETS_S,
)
SCORER_UPDATES = Metric("scorer_updates", PromCounter, (), "Runs of blocks whose rank was looked at again.")
PREDICTOR_IN_USE = Metric("predictor_in_use", Gauge, ("predictor",), "1 for the predictor that answers at present, else 0.")
SCORED_WORKFLOWS = Metric("scored_workflows", Gauge, (), "Workflows of which the scorer keeps a forecast.")
TIME_HORIZON = Metric(
    "time_horizon_seconds", Gauge, (), "How far ahead a next use counts for the scorer; follows how fast HBM is replaced."
)

METRICS = (
    TIER_BLOCKS,
    BYTES_READ,
    BYTES_WRITTEN,
    HIT_BLOCKS,
    HIT_TOKENS,
    PLACED_BLOCKS,
    SPILLED_BLOCKS,
    EMULATED_DELAY,
    EVICTIONS,
    LOADS,
    RECOMPUTED_BLOCKS,
    REUSE_GAP,
    BOUNDARIES,
    RETIRED_BLOCKS,
    FLASH_FAULTS,
    FLASH_WRITTEN_BYTES,
    FLASH_WRITES_REFUSED,
    FLASH_THROTTLES,
    FLASH_THROTTLED,
    FLASH_CYCLES,
    FLASH_ENDURANCE_USED,
    FLASH_WRITE_AMPLIFICATION,
    FLASH_DEVICE_YEARS,
    WEAR_LEDGER_ERRORS,
    SESSIONS,
    AGENTS,
    SEGMENTS,
    EXPIRED_AGENTS,
    CLASS_BLOCKS,
    CONTROL_CALL_SECONDS,
    HINTS,
    REQUESTS,
    PROMPT_TOKENS,
    BAD_METADATA,
    PREFETCHED_BLOCKS,
    PREDICTIONS,
    SCORER_SECONDS,
    SCORER_UPDATES,
    PREDICTOR_IN_USE,
    SCORED_WORKFLOWS,
    TIME_HORIZON,
)

Key = tuple[str, tuple[str, ...]]


class Recorder:
    """Collects on the scheduler thread; `take` hands over what has come since the last call. No locks, no IO."""

    def __init__(self) -> None:
        self.counters: Counter[Key] = Counter()
        self._totals: Counter[Key] = Counter()
        self.gauges: dict[Key, float] = {}
        self.observations: dict[Key, list[float]] = {}

    def count(self, metric: Metric, *labels: str, by: int = 1) -> None:
        """Add to a counter."""
        if by:
            self.counters[metric.name, labels] += by

    def total(self, metric: Metric, *labels: str) -> int:
        """A counter's value since the start; without labels, over all of them."""
        parts = (self._totals, self.counters)
        if labels or not metric.labels:
            return sum(part[metric.name, labels] for part in parts)
        return sum(value for part in parts for (name, _), value in part.items() if name == metric.name)

    def totals_by_two(self, metric: Metric) -> dict[str, dict[str, int]]:
        """The values since the start of a counter with two labels, by the first, then by the second. O(all counters)."""
        answer: dict[str, dict[str, int]] = {}
        for part in (self._totals, self.counters):
            for (name, labels), value in part.items():
                if name == metric.name:
                    by_second = answer.setdefault(labels[0], {})
                    by_second[labels[1]] = by_second.get(labels[1], 0) + value
        return answer

    def set(self, metric: Metric, *labels: str, to: float) -> None:
        """Set a gauge."""
        self.gauges[metric.name, labels] = to

    def observe(self, metric: Metric, *labels: str, value: float) -> None:
        """Add to a histogram."""
        self.observations.setdefault((metric.name, labels), []).append(value)

    def take(self) -> "LifetimeStats":
        """What was recorded, as plain data; the recorder starts afresh."""
        data: dict[str, Any] = {
            "counters": [[name, list(labels), value] for (name, labels), value in self.counters.items()],
            "gauges": [[name, list(labels), value] for (name, labels), value in self.gauges.items()],
            "observations": [[name, list(labels), values] for (name, labels), values in self.observations.items()],
        }
        self._totals.update(self.counters)
        self.counters = Counter()
        self.gauges = {}
        self.observations = {}
        return LifetimeStats(data=data)


@dataclass
class LifetimeStats(KVConnectorStats):
    """`data` holds `counters`, `gauges` and `observations`: lists of [metric name, label values, value or values]."""

    def reset(self) -> None:
        self.data = {"counters": [], "gauges": [], "observations": []}

    def aggregate(self, other: KVConnectorStats) -> "LifetimeStats":
        for part in ("counters", "gauges", "observations"):
            self.data.setdefault(part, []).extend(other.data.get(part, ()))
        return self

    def reduce(self) -> dict[str, int | float]:
        """The counters of the interval, for vLLM's log line."""
        totals: Counter[str] = Counter()
        for name, labels, value in self.data.get("counters", ()):
            totals[".".join([name, *labels])] += value
        return dict(totals)

    def is_empty(self) -> bool:
        return not any(self.data.values())


class LifetimePromMetrics(KVConnectorPromMetrics):
    """Prometheus metrics of the connector, in the API server."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {}
        for metric in METRICS:
            options: dict[str, Any] = {"buckets": metric.buckets} if metric.kind is Histogram else {}
            # Gauges of several API servers are the same engine's: the latest one counts.
            if metric.kind is Gauge:
                options["multiprocess_mode"] = "mostrecent"
            self._metrics[metric.name] = metric_types[metric.kind](
                name=f"vllm:lifetime_{metric.name}",
                documentation=metric.help,
                labelnames=[*labelnames, *metric.labels],
                **options,
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Apply one interval's statistics of engine `engine_idx`."""
        engine_labels = self.per_engine_labelvalues[engine_idx]
        for name, labels, value in transfer_stats_data.get("counters", ()):
            self._metrics[name].labels(*engine_labels, *labels).inc(value)
        for name, labels, value in transfer_stats_data.get("gauges", ()):
            self._metrics[name].labels(*engine_labels, *labels).set(value)
        for name, labels, values in transfer_stats_data.get("observations", ()):
            histogram = self._metrics[name].labels(*engine_labels, *labels)
            for value in values:
                histogram.observe(value)
