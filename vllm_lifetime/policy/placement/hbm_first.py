# SPDX-License-Identifier: Apache-2.0
"""HBM-first: what an engine does without Lachesis (section 5.2): HBM while it has a free block, else flash."""

from typing import ClassVar

from vllm_lifetime.policy.placement.contract import PlacedSegment, Placement, Tier

__all__ = ["HbmFirst"]


class HbmFirst(Placement):
    """Every block to HBM if it has room. Nothing is freed at a boundary, so that HBM's capacity hardly turns over."""

    name: ClassVar[str] = "hbm_first"
    frees_at_boundary: ClassVar[bool] = False

    def tier_for(self, segment: PlacedSegment, num_blocks: int) -> Tier:
        """Always HBM."""
        return Tier.HBM
