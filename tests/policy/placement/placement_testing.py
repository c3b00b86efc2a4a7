# SPDX-License-Identifier: Apache-2.0
"""An allocator around a placement policy, as a caller has to be: conserves blocks, spills, migrates, counts."""

from collections import Counter

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement import PlacedSegment, Placement, Tier, TierCounts


class Allocator:
    """Two tiers without block ids. Blocks of closed segments of a policy that does not free at the boundary are never evicted."""

    def __init__(self, policy: type[Placement], hbm_blocks: int, flash_blocks: int, **settings: object) -> None:
        self.tiers = TierCounts(hbm_blocks, flash_blocks)
        self.policy = policy(self.tiers, **settings)
        self.live: list[PlacedSegment] = []
        self.dead = [0, 0]
        self.spilled: Counter[tuple[SegmentClass, Tier, Tier]] = Counter()
        self.copied = 0

    def open(self, segment: PlacedSegment) -> PlacedSegment:
        self.policy.open(segment)
        self.live.append(segment)
        return segment

    def write(self, segment: PlacedSegment, num_blocks: int) -> bool:
        """Whether all of it found a place."""
        if num_blocks > sum(self.tiers.free):
            return False
        wanted = self.policy.tier_for(segment, num_blocks)
        if wanted is Tier.HBM and self.policy.migrates:
            self._make_room(num_blocks)
        fits = min(num_blocks, self.tiers.free[wanted])
        for tier, number in ((wanted, fits), (wanted.other, num_blocks - fits)):
            if number:
                self.tiers.free[tier] -= number
                self.policy.on_allocated(segment, tier, number)
                if tier is not wanted:
                    self.spilled[segment.segment_class, wanted, tier] += number
        return True

    def _make_room(self, num_blocks: int) -> None:
        while self.tiers.free[Tier.HBM] < num_blocks and (victim := self.policy.next_to_migrate()) is not None:
            number = min(victim.blocks[Tier.HBM], self.tiers.free[Tier.FLASH])
            if not number:
                return
            self.policy.on_freed(victim, Tier.HBM, number)
            self.policy.on_allocated(victim, Tier.FLASH, number)
            self.tiers.free[Tier.HBM] += number
            self.tiers.free[Tier.FLASH] -= number
            self.copied += number

    def free(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        self.policy.on_freed(segment, tier, num_blocks)
        self.tiers.free[tier] += num_blocks

    def close(self, segment: PlacedSegment) -> None:
        self.live.remove(segment)
        self.policy.close(segment)
        for tier in Tier:
            if self.policy.frees_at_boundary:
                self.tiers.free[tier] += segment.blocks[tier]
            else:
                self.dead[tier] += segment.blocks[tier]

    def check(self) -> None:
        for tier in Tier:
            held = sum(segment.blocks[tier] for segment in self.live)
            assert self.tiers.free[tier] + held + self.dead[tier] == self.tiers.capacity[tier]
            assert self.tiers.free[tier] >= 0
