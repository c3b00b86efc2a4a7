# SPDX-License-Identifier: Apache-2.0
"""The wear ledgers as the scheduler side knows them: the workers' latest snapshots, shown in the metrics and by the control API.

EngineCore process, scheduler thread. The ledgers themselves are kept in the workers (`flash/wear.py`).
"""

import time
from collections.abc import Iterable
from typing import Any

from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.flash_writes import FlashWrites
from vllm_lifetime.flash.wear_figures import WearSnapshot, wear_figures
from vllm_lifetime.flash.write_history import INTERVAL_S, NUM_INTERVALS

__all__ = ["WearState"]

FIGURES_EVERY_S = 1.0
"""How often the gauges are looked at, at most."""


class WearState:
    """The flash files of one engine, one for each rank."""

    def __init__(self, recorder: stats.Recorder) -> None:
        self._recorder = recorder
        self._snapshots: dict[str, WearSnapshot] = {}
        """By file name."""
        self._counted: dict[tuple[str, str, str], int] = {}
        self._due = 0.0

    def bind(self, snapshots: Iterable[WearSnapshot], writes: FlashWrites) -> None:
        """The workers' flash files are open: the budget counts what was written in the day before."""
        for snapshot in snapshots:
            self._snapshots[snapshot.header.flash_name] = snapshot
            for segment_class, reason, _, length in snapshot.written:
                # What was written in earlier lives is in the ledger, not in this process's counters.
                self._counted[snapshot.header.flash_name, segment_class, reason] = length
        writes.replay(self._written_by_interval(time.time()), INTERVAL_S)

    def _written_by_interval(self, now_s: float) -> list[int]:
        """KV bytes written in each interval of the last day, all files, oldest first."""
        last = int(now_s // INTERVAL_S)
        totals = [0] * NUM_INTERVALS
        for snapshot in self._snapshots.values():
            for back, length in enumerate(reversed(snapshot.history_counts)):
                # A clock that was set back: what lies ahead of it was just now.
                index = NUM_INTERVALS - 1 - max(0, last - snapshot.history_last + back)
                if index >= 0:
                    totals[index] += length
        return totals

    def update(self, snapshots: Iterable[WearSnapshot], now: float) -> None:
        """Newer snapshots have come; count what is new in them. `now`: a `time.monotonic` time."""
        for snapshot in snapshots:
            name = snapshot.header.flash_name
            self._snapshots[name] = snapshot
            for segment_class, reason, _, length in snapshot.written:
                key = (name, segment_class, reason)
                self._recorder.count(stats.FLASH_WRITTEN_BYTES, segment_class, reason, by=length - self._counted.get(key, 0))
                self._counted[key] = length
        if now >= self._due:
            self._due = now + FIGURES_EVERY_S
            self._show()

    def _show(self) -> None:
        for figures in self.describe():
            name, cycles = figures["file"], figures["cycles"]
            for of in ("mean", "max"):
                self._recorder.set(stats.FLASH_CYCLES, name, of, to=cycles[of])
            self._recorder.set(stats.FLASH_ENDURANCE_USED, name, to=figures["endurance_used"])
            if figures["write_amplification"] is not None:
                self._recorder.set(stats.FLASH_WRITE_AMPLIFICATION, name, to=figures["write_amplification"])
            for window in ("hour", "day", "ledger"):
                years = figures["device_years"][window]
                if years is not None:
                    self._recorder.set(stats.FLASH_DEVICE_YEARS, name, window, to=years)
            for kind, count in figures["ledger"]["errors"].items():
                self._recorder.set(stats.WEAR_LEDGER_ERRORS, name, kind, to=count)

    def describe(self) -> list[dict[str, Any]]:
        """The figures of each file, as of now."""
        now_s = time.time()
        return [wear_figures(snapshot, now_s) for _, snapshot in sorted(self._snapshots.items())]
