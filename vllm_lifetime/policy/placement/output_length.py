# SPDX-License-Identifier: Apache-2.0
"""Kyung et al. as published: by request, longest expected outputs to flash, shortest to HBM (Lachesis sections 2.3 and 6)."""

import math
from typing import ClassVar

from vllm_lifetime.policy.placement.contract import PlacedSegment, Placement, PlacementConfig, Tier, TierState

__all__ = ["BINS_PER_OCTAVE", "FORGETTING", "NUM_BINS", "OutputLength"]

BINS_PER_OCTAVE = 4
"""Bins of the histogram of expected output lengths for each doubling."""

NUM_BINS = 80
"""Covers outputs up to a million tokens."""

FORGETTING = 0.0005
"""Part of the histogram that one more request makes forgotten."""


class OutputLength(Placement):
    """A request goes to HBM if its expected output is below the length up to which requests write what HBM can hold.

    The length is a quantile, weighted by blocks, of what requests have written so far; which quantile, HBM's share of all that is
    live says. All that a request writes follows it.
    """

    name: ClassVar[str] = "output_length"
    uses_requests: ClassVar[bool] = True

    def __init__(self, tiers: TierState, config: PlacementConfig | None = None) -> None:
        super().__init__(tiers, config)
        self._written = [0.0] * NUM_BINS
        self._live_blocks = 0
        self._bins: dict[PlacedSegment, int] = {}

    def on_request(self, segment: PlacedSegment, expected_output_tokens: float) -> None:
        """Decide about all that the request will write. O(bins)."""
        self._written = [(1.0 - FORGETTING) * blocks for blocks in self._written]
        own = min(NUM_BINS - 1, int(BINS_PER_OCTAVE * math.log2(max(1.0, expected_output_tokens))))
        self._bins[segment] = own
        share = min(1.0, self.tiers.capacity_blocks(Tier.HBM) / max(1, self._live_blocks))
        below = sum(self._written[:own])
        segment.tier = Tier.HBM if below <= share * sum(self._written) else Tier.FLASH

    def tier_for(self, segment: PlacedSegment, num_blocks: int) -> Tier:
        """Where its present request goes."""
        return segment.tier

    def on_allocated(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """Learn what requests of this length write."""
        super().on_allocated(segment, tier, num_blocks)
        self._live_blocks += num_blocks
        self._written[self._bins.get(segment, 0)] += num_blocks

    def on_freed(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """Count what is live."""
        super().on_freed(segment, tier, num_blocks)
        self._live_blocks -= num_blocks

    def close(self, segment: PlacedSegment) -> None:
        """Count what is live."""
        self._live_blocks -= segment.num_blocks
        self._bins.pop(segment, None)
