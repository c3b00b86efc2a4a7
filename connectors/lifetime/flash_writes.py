# SPDX-License-Identifier: Apache-2.0
"""Whether a block may be written to flash now: its class under the placement policy, and the day's budget of bytes.

EngineCore process, scheduler thread.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from vllm.logger import init_logger

from vllm_lifetime.agents import Agent
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions
from vllm_lifetime.policy.placement.contract import PlacementConfig, Tier
from vllm_lifetime.policy.placement.registry import parse_placement
from vllm_lifetime.policy.write_admission import WriteAdmission
from vllm_lifetime.policy.write_budget import WriteBudget
from vllm_lifetime.pool.runs import Run
from vllm_lifetime.segments import Segment, class_of_run

__all__ = ["FlashWrites"]

logger = init_logger(__name__)

WORKERS_EVERY_S = 1.0
"""How often the live workers are looked at."""


class FlashWrites:
    """The decisions, and their counts. One per engine.

    Args:
        segments: the live segments.
        block_bytes: of one block, over all ranks.
        now: a `time.monotonic` time.
        score_of: the predicted rank of a sub-agent's lifetime, where one was made at its spawn; None: there are none.

    Raises:
        ValueError: the budget is smaller than a block can be written with.

    """

    def __init__(
        self,
        options: LifetimeOptions,
        segments: Iterable[Segment],
        recorder: stats.Recorder,
        block_bytes: int,
        now: float,
        *,
        score_of: Callable[[Agent], float | None] | None = None,
    ) -> None:
        unknown_tier = Tier.FLASH if options.placement_unknown == "flash" else Tier.HBM
        self.placement = options.placement
        self._admission = WriteAdmission(parse_placement(options.placement), PlacementConfig(unknown_tier=unknown_tier))
        self._segments = segments
        self._score_of = score_of
        self._recorder = recorder
        self._block_bytes = block_bytes
        self.budget_bytes = options.flash_write_bytes_per_day
        self._budget = None if self.budget_bytes is None else WriteBudget(self.budget_bytes, block_bytes, now)
        self._workers_due = 0.0
        self._admitted: dict[Run | None, bool] = {}
        """What has been found since `begin`."""

    # ------------------------------------------------------------------ classes

    def begin(self, now: float) -> None:
        """A look at blocks begins."""
        self._admitted.clear()
        if self._admission.ranks_workers and now >= self._workers_due:
            self._workers_due = now + WORKERS_EVERY_S
            sizes, scores = [], []
            for segment in self._segments:
                if segment.segment_class is SegmentClass.WORKER and (size := _size_of(segment)):
                    score = self._score(segment)
                    if score is None:
                        sizes.append(size)
                    else:
                        scores.append(score)
            self._admission.set_workers(sizes, scores)

    def admits(self, run: Run | None) -> bool:
        """Whether blocks of `run` may be written. O(readers) once for each run and `begin`."""
        if self._admission.admits_all:
            return True
        known = self._admitted.get(run)
        if known is None:
            known = self._admitted[run] = self._look_at(run)
        return known

    def _look_at(self, run: Run | None) -> bool:
        segment_class = SegmentClass.UNKNOWN if run is None else class_of_run(run)
        if segment_class is SegmentClass.WORKER and self._admission.ranks_workers and run is not None:
            # One that lives long enough is enough.
            workers = (reader for reader in run.readers if isinstance(reader, Segment))
            return any(self._admission.admits(segment_class, _size_of(worker), self._score(worker)) for worker in workers)
        return self._admission.admits(segment_class)

    def _score(self, worker: Segment) -> float | None:
        score = None if self._score_of is None else self._score_of(worker.agent)
        return None if score is None or math.isnan(score) else score

    def count_refused(self, runs: Sequence[Run | None], reason: str) -> None:
        """These blocks' runs: they are not written, because of `placement` or of their `rank`."""
        for run in runs:
            segment_class = SegmentClass.UNKNOWN if run is None else class_of_run(run)
            self._recorder.count(stats.FLASH_WRITES_REFUSED, segment_class.value, reason)

    # ------------------------------------------------------------------ the budget

    def replay(self, written: Sequence[int], interval_s: float) -> None:
        """The budget also counts what was written before this process began; see `WriteBudget.replay`."""
        if self._budget is not None:
            self._budget.replay(written, interval_s)

    def available_blocks(self, now: float) -> int | None:
        """Blocks that the budget allows to be written at `now`; None without a budget."""
        if self._budget is None:
            return None
        was_used_up = self._budget.is_used_up
        count = self._budget.available(now) // self._block_bytes
        if was_used_up and not self._budget.is_used_up:
            self._recorder.set(stats.FLASH_THROTTLED, to=0)
        return count

    def available_bytes(self, now: float) -> int | None:
        """Likewise in bytes."""
        return None if self._budget is None else self._budget.available(now)

    @property
    def is_throttled(self) -> bool:
        """Whether the budget is used up for now."""
        return self._budget is not None and self._budget.is_used_up

    def spend(self, num_blocks: int) -> None:
        """So many blocks are ordered to be written."""
        if self._budget is None:
            return
        was_used_up = self._budget.is_used_up
        self._budget.spend(num_blocks * self._block_bytes)
        if self._budget.is_used_up and not was_used_up:
            self._recorder.count(stats.FLASH_THROTTLES)
            self._recorder.set(stats.FLASH_THROTTLED, to=1)
            logger.warning_once(
                "lifetime: flash_write_bytes_per_day = %d is used up for now: nothing is written to flash until more comes in. "
                "Blocks that would have gone there are recomputed when they are asked for.",
                self.budget_bytes,
            )

    def give_back(self, num_blocks: int) -> None:
        """So many of the blocks that were ordered have not been written."""
        if self._budget is not None and num_blocks:
            self._budget.give_back(num_blocks * self._block_bytes)


def _size_of(segment: Segment) -> int:
    """Blocks that a segment reads, wherever they are. O(runs)."""
    return sum(run.end - run.start for run in segment.runs)
