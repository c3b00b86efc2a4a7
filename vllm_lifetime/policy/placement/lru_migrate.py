# SPDX-License-Identifier: Apache-2.0
"""Recency instead of lifetime: write to HBM, and when it is full copy the live segment that was read longest ago to flash."""

from typing import ClassVar

from vllm_lifetime.policy.placement.contract import PlacedSegment, Placement, PlacementConfig, Tier, TierState

__all__ = ["LruMigrate"]


class LruMigrate(Placement):
    """What a reactive policy does (Lachesis section 3.1): it learns a segment's lifetime by waiting, and pays a copy for it."""

    name: ClassVar[str] = "lru_migrate"
    uses_reads: ClassVar[bool] = True
    migrates: ClassVar[bool] = True

    def __init__(self, tiers: TierState, config: PlacementConfig | None = None) -> None:
        super().__init__(tiers, config)
        # Segments with blocks in HBM, the one read longest ago first.
        self._order: dict[PlacedSegment, None] = {}

    def tier_for(self, segment: PlacedSegment, num_blocks: int) -> Tier:
        """Always HBM."""
        return Tier.HBM

    def on_allocated(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """A write counts as a read."""
        super().on_allocated(segment, tier, num_blocks)
        if tier is Tier.HBM and num_blocks:
            self._touch(segment)

    def on_read(self, segment: PlacedSegment, num_block_reads: float) -> None:
        """The segment is the last to be moved away."""
        super().on_read(segment, num_block_reads)
        if segment in self._order:
            self._touch(segment)

    def on_freed(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """Without blocks in HBM it is out of the order."""
        super().on_freed(segment, tier, num_blocks)
        if not segment.blocks[Tier.HBM]:
            self._order.pop(segment, None)

    def next_to_migrate(self) -> PlacedSegment | None:
        """Read longest ago. O(1)."""
        return next(iter(self._order), None)

    def close(self, segment: PlacedSegment) -> None:
        """Nothing of it is left to move."""
        self._order.pop(segment, None)

    def _touch(self, segment: PlacedSegment) -> None:
        self._order.pop(segment, None)
        self._order[segment] = None
