# SPDX-License-Identifier: Apache-2.0
"""The deterministic path (Lachesis section 4): short-lived classes to HBM, long-lived ones to flash, freed at the boundary."""

from typing import ClassVar

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement.contract import PlacedSegment, Placement, PlacementConfig, Tier, TierState

__all__ = ["LONG_LIVED", "SHORT_LIVED", "LachesisNoPredictive", "tier_of_class"]

LONG_LIVED = frozenset({SegmentClass.SHARED, SegmentClass.LEAD, SegmentClass.REASONING_STRIPPED})
"""Classes that outlive the turn or sub-agent in which they are written (table 1). Shared prefixes are written once."""

SHORT_LIVED = frozenset({SegmentClass.WORKER, SegmentClass.REVIEWER, SegmentClass.REASONING_LADEN})
"""Classes that end with the turn or the sub-agent."""


def tier_of_class(segment_class: SegmentClass, config: PlacementConfig) -> Tier:
    """Where the class alone puts a segment."""
    if segment_class in LONG_LIVED:
        return Tier.FLASH
    return Tier.HBM if segment_class in SHORT_LIVED else config.unknown_tier


class LachesisNoPredictive(Placement):
    """Lachesis without the predictive path (section 5.4): every worker goes to HBM until it is full."""

    name: ClassVar[str] = "lachesis_no_predictive"

    def __init__(self, tiers: TierState, config: PlacementConfig | None = None) -> None:
        super().__init__(tiers, config)
        self._tiers_by_class = {segment_class: tier_of_class(segment_class, self.config) for segment_class in SegmentClass}

    def tier_for(self, segment: PlacedSegment, num_blocks: int) -> Tier:
        """As its class says."""
        return self._tiers_by_class[segment.segment_class]
