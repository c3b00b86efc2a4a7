# SPDX-License-Identifier: Apache-2.0
"""Lachesis (section 4): the deterministic path, and for workers the predictive one: rank all live workers by predicted lifetime
and let the first k into HBM, where k comes from HBM's free capacity after what is kept for reviewers.

The paper leaves the arithmetic of k open. Here, at the spawn of a worker:

- `reserve = max(0, min(mean + deviations x sd of the reviewers' live blocks, share x HBM) - reviewers' blocks in HBM)`
- `k = floor(workers in HBM + (free HBM - reserve) / (growth x mean final size of admitted workers))`, where workers in HBM are
  the live ones that were admitted, times the part of their blocks that is in HBM
- the worker is admitted if its rank among all live workers, itself included, is at most k.

What has spilled does not count as being in HBM. If it did, k would not fall while HBM is full: once all were admitted, all would
go on being admitted, and the rank would decide nothing. The reviewers' live blocks are sampled at each spawn of a worker. Workers
never allocate inside the reserve.
"""

import math
from typing import ClassVar

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement.contract import PlacedSegment, PlacementConfig, Tier, TierState
from vllm_lifetime.policy.placement.lachesis_no_predictive import LachesisNoPredictive
from vllm_lifetime.policy.placement.running import RunningMean
from vllm_lifetime.policy.placement.worker_ranks import WorkerRanks

__all__ = ["REVIEWER_WEIGHT", "SIZE_WEIGHT", "Lachesis"]

REVIEWER_WEIGHT = 0.005
"""Weight of the newest sample of the reviewers' live blocks: some hundred spawns are remembered."""

SIZE_WEIGHT = 0.02
"""Weight of the newest final size of an admitted worker."""


class Lachesis(LachesisNoPredictive):
    """Both paths."""

    name: ClassVar[str] = "lachesis"

    def __init__(self, tiers: TierState, config: PlacementConfig | None = None) -> None:
        super().__init__(tiers, config)
        self.num_admitted = 0
        """Live workers that were admitted at their spawn."""
        self._ranks = WorkerRanks()
        self._keys: dict[PlacedSegment, tuple[float, bool]] = {}
        self._reviewer_blocks = [0, 0]
        self._admitted_blocks = [0, 0]
        self._reviewer_live = RunningMean(REVIEWER_WEIGHT)
        self._final_size = RunningMean(SIZE_WEIGHT)
        self._reserve_target = 0.0

    @property
    def num_workers(self) -> int:
        """Live workers."""
        return len(self._ranks)

    @property
    def reserve_blocks(self) -> float:
        """HBM that workers must leave free for reviewers, in blocks."""
        return max(0.0, self._reserve_target - self._reviewer_blocks[Tier.HBM])

    def open(self, segment: PlacedSegment) -> None:
        """Decide about a worker at its spawn; O(log n) in the live workers."""
        if segment.segment_class is not SegmentClass.WORKER:
            return
        key, is_score = self._key(segment)
        self._keys[segment] = key, is_score
        rank = self._ranks.add(key, is_score=is_score)
        live = self._reviewer_live
        live.add(self._reviewer_blocks[Tier.HBM] + self._reviewer_blocks[Tier.FLASH])
        most = self.config.max_reserve_share * self.tiers.capacity_blocks(Tier.HBM)
        self._reserve_target = min(live.mean + self.config.reserve_deviations * live.deviation, most)
        if rank <= self._num_admissible(segment):
            segment.is_admitted = True
            self.num_admitted += 1

    def _key(self, segment: PlacedSegment) -> tuple[float, bool]:
        """What orders the worker, and whether that is a model's score."""
        if segment.score is not None and not math.isnan(segment.score):
            return segment.score, True
        return segment.expected_blocks or 0.0, False

    def _num_admissible(self, segment: PlacedSegment) -> int:
        """k."""
        size = max(1.0, self._final_size.mean if self._final_size.count else segment.expected_blocks or 0.0)
        room = self.tiers.free_blocks(Tier.HBM) - self.reserve_blocks
        in_hbm = float(self.num_admitted)
        held = self._admitted_blocks[Tier.HBM] + self._admitted_blocks[Tier.FLASH]
        if held:
            in_hbm *= self._admitted_blocks[Tier.HBM] / held
        return math.floor(in_hbm + room / (self.config.growth * size))

    def tier_for(self, segment: PlacedSegment, num_blocks: int) -> Tier:
        """By class; a worker in HBM only if it was admitted and the reserve stays whole."""
        if segment.segment_class is not SegmentClass.WORKER:
            return super().tier_for(segment, num_blocks)
        if not segment.is_admitted:
            return Tier.FLASH
        has_room = self.tiers.free_blocks(Tier.HBM) - self.reserve_blocks >= num_blocks
        return Tier.HBM if has_room else Tier.FLASH

    def on_allocated(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """Count reviewers' and admitted workers' blocks as well."""
        super().on_allocated(segment, tier, num_blocks)
        if segment.is_admitted:
            self._admitted_blocks[tier] += num_blocks
        if segment.segment_class is SegmentClass.REVIEWER:
            self._reviewer_blocks[tier] += num_blocks

    def on_freed(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """Count reviewers' and admitted workers' blocks as well."""
        super().on_freed(segment, tier, num_blocks)
        if segment.is_admitted:
            self._admitted_blocks[tier] -= num_blocks
        if segment.segment_class is SegmentClass.REVIEWER:
            self._reviewer_blocks[tier] -= num_blocks

    def close(self, segment: PlacedSegment) -> None:
        """O(log n) in the live workers."""
        if segment.segment_class is SegmentClass.REVIEWER:
            for tier in Tier:
                self._reviewer_blocks[tier] -= segment.blocks[tier]
        elif segment.segment_class is SegmentClass.WORKER:
            key, is_score = self._keys.pop(segment)
            self._ranks.remove(key, is_score=is_score)
            if segment.is_admitted:
                self.num_admitted -= 1
                for tier in Tier:
                    self._admitted_blocks[tier] -= segment.blocks[tier]
                self._final_size.add(segment.written_blocks)
