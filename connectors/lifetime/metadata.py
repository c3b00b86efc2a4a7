# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the connector tell each other, once per engine step.

Scheduler side to worker: `LifetimeMetadata`. Worker to scheduler side: `LifetimeWorkerMetadata`. Once, at start: `FlashReport`.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vllm_lifetime.flash.wear_figures import WearSnapshot

__all__ = [
    "BYTES_READ",
    "BYTES_WRITTEN",
    "DELAY_US",
    "Demotion",
    "FlashReport",
    "JobResult",
    "LifetimeMetadata",
    "LifetimeWorkerMetadata",
    "Load",
    "PlacedInFlash",
    "Store",
]

BYTES_READ = "bytes_read"
BYTES_WRITTEN = "bytes_written"
DELAY_US = "delay_us"
"""Microseconds by which steps were delayed so that flash in place takes as long as the emulated device."""


PlacedInFlash = tuple[str, list[int]]
"""Segment class, and the ids of blocks in flash that were taken for it; flash in place."""


@dataclass(slots=True)
class Store:
    """Copy HBM blocks down, to host slots or, where there is no host tier, to flash slots under `keys`."""

    job_id: int
    block_ids: list[int]
    slots: list[int]
    keys: list[bytes] | None = None
    """Block hashes, if the slots are in flash."""
    classes: list[str] | None = None
    """The blocks' segment classes, likewise; for the wear ledger."""


@dataclass(slots=True)
class Demotion:
    """Write host slots to flash slots under `keys`."""

    job_id: int
    host_slots: list[int]
    flash_slots: list[int]
    keys: list[bytes]
    classes: list[str]
    """The blocks' segment classes, for the wear ledger."""


@dataclass(slots=True)
class Load:
    """Bring blocks up for a request that waits for them, or ahead of one."""

    job_id: int
    request_id: str | None
    """None: nobody waits, see `prefetch.py`."""
    host_slots: list[int]
    host_block_ids: list[int]
    flash_slots: list[int]
    flash_keys: list[bytes]
    flash_block_ids: list[int]
    deadline_s: float
    """Seconds from now after which what has not arrived is given up."""


@dataclass
class LifetimeMetadata(KVConnectorMetadata):
    """One step's orders. `step` numbers the steps that compute something; 0 for the others."""

    step: int = 0
    stores: list[Store] = field(default_factory=list)
    demotions: list[Demotion] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    flush: set[int] = field(default_factory=set)
    """Stores whose source blocks this step's forward pass overwrites: they must end before it starts."""
    cancel: set[int] = field(default_factory=set)
    """Loads whose target blocks this step's forward pass, or another load, overwrites: they must be over before."""
    clear_flash: bool = False
    placed: list[PlacedInFlash] = field(default_factory=list)
    """What was taken since the step before."""


@dataclass(slots=True)
class JobResult:
    """What became of a job on one worker, or on all of them after aggregation."""

    failed: set[int] = field(default_factory=set)
    """Positions in the job's slots (loads: host slots, then flash slots) that did not make it."""
    is_late: bool = False
    seconds: float = 0.0
    """How long the transfer itself took, without the wait for the end of the engine's step."""
    num_reports: int = 1

    def merge(self, other: "JobResult") -> None:
        """Add another worker's result: a block that failed on one rank has failed (R9), and the slowest rank counts."""
        self.failed |= other.failed
        self.is_late |= other.is_late
        self.seconds = max(self.seconds, other.seconds)
        self.num_reports += other.num_reports


@dataclass
class LifetimeWorkerMetadata(KVConnectorWorkerMetadata):
    """Finished jobs, and what the flash device counted since the last report."""

    step: int = 0
    """The step that this report ends, as in `LifetimeMetadata`."""
    results: dict[int, JobResult] = field(default_factory=dict)
    flash: Counter[str] = field(default_factory=Counter)
    """What the flash device counted since the last report: `BYTES_READ`, `BYTES_WRITTEN`, and faults by kind."""
    oldest_start: float | None = None
    """When the oldest transfer still out began, given up or not: a `time.monotonic` time, one clock for all processes."""
    hidden_states: dict[str, np.ndarray] = field(default_factory=dict)
    """Request -> hidden state of its prompt's last token, float32 `[hidden size]`; from the one rank that sends them."""
    wear: list[WearSnapshot] = field(default_factory=list)
    """The wear ledger of each rank's flash file, if it has changed since it was last sent."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "LifetimeWorkerMetadata":
        """Merge two workers' reports of one step."""
        if not isinstance(other, LifetimeWorkerMetadata):
            raise TypeError(f"cannot merge {type(other).__name__} into LifetimeWorkerMetadata")
        for job_id, result in other.results.items():
            mine = self.results.get(job_id)
            if mine is None:
                self.results[job_id] = result
            else:
                mine.merge(result)
        self.step = max(self.step, other.step)
        self.flash.update(other.flash)
        starts = [start for start in (self.oldest_start, other.oldest_start) if start is not None]
        self.oldest_start = min(starts, default=None)
        self.hidden_states.update(other.hidden_states)
        self.wear.extend(other.wear)
        return self


@dataclass
class FlashReport(KVConnectorHandshakeMetadata):
    """A worker's flash device as it was opened. Flash in place has no slots, and keeps nothing."""

    num_slots: int
    recovered: list[tuple[int, bytes]]
    """(slot, block hash) of the blocks that survived a restart."""
    wear: WearSnapshot | None = None
    """Its wear ledger."""
