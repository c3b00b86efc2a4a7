# SPDX-License-Identifier: Apache-2.0
"""Kyung et al. by segment: what is read much per block written goes to flash, the rest to HBM (Lachesis sections 2.3 and 3.4).

The ratio of a segment is not known when it is written; its class's is learned from the segments that have closed. HBM takes the
classes of the lowest ratios until what they keep live fills it.
"""

from typing import ClassVar

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement.contract import PlacedSegment, Placement, PlacementConfig, Tier, TierState

__all__ = ["FORGETTING", "ReadWriteRatio"]

FORGETTING = 0.001
"""Part of what a class has read and written so far that one more closed segment of it makes forgotten."""


class ReadWriteRatio(Placement):
    """Reads per write by class against the ratio up to which classes fill HBM. A class that is unheard of goes to HBM."""

    name: ClassVar[str] = "read_write_ratio"
    uses_reads: ClassVar[bool] = True

    def __init__(self, tiers: TierState, config: PlacementConfig | None = None) -> None:
        super().__init__(tiers, config)
        self._reads = dict.fromkeys(SegmentClass, 0.0)
        self._writes = dict.fromkeys(SegmentClass, 0.0)
        self._live_blocks = dict.fromkeys(SegmentClass, 0)

    def ratio(self, segment_class: SegmentClass) -> float:
        """Mean block reads per block written of the class; 0: none has closed yet."""
        writes = self._writes[segment_class]
        return self._reads[segment_class] / writes if writes else 0.0

    def tier_for(self, segment: PlacedSegment, num_blocks: int) -> Tier:
        """HBM if the live blocks of the classes with a lower ratio leave room there. O(classes)."""
        own = self.ratio(segment.segment_class)
        lower = sum(blocks for other, blocks in self._live_blocks.items() if self.ratio(other) < own)
        return Tier.HBM if lower < self.tiers.capacity_blocks(Tier.HBM) else Tier.FLASH

    def on_allocated(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """Count what is live of the class."""
        super().on_allocated(segment, tier, num_blocks)
        self._live_blocks[segment.segment_class] += num_blocks

    def on_freed(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """Count what is live of the class."""
        super().on_freed(segment, tier, num_blocks)
        self._live_blocks[segment.segment_class] -= num_blocks

    def close(self, segment: PlacedSegment) -> None:
        """Learn from it."""
        name = segment.segment_class
        self._live_blocks[name] -= segment.num_blocks
        self._reads[name] += segment.block_reads - FORGETTING * self._reads[name]
        self._writes[name] += segment.written_blocks - FORGETTING * self._writes[name]
