# SPDX-License-Identifier: Apache-2.0
"""Placement policies that only explain results: each changes one thing about a policy of `policy/placement/`. Offline only.

| name | what it changes | what it tells |
|---|---|---|
| `hbm_first_freed` | `hbm_first` whose blocks are freed at the boundary | what the boundary alone is worth, without placement |
| `hbm_first_lru_per_tier` | `hbm_first` that evicts from each tier's own queue | that the baseline is one queue for both tiers |
| `oracle_per_byte` | `oracle` that ranks by lifetime per byte | whether a worker's size should count in the rank |
"""

from typing import ClassVar

from vllm_lifetime.policy.placement import PLACEMENTS, PlacedSegment, Placement, parse_placement
from vllm_lifetime.policy.placement.hbm_first import HbmFirst
from vllm_lifetime.policy.placement.oracle import Oracle

__all__ = ["ABLATIONS", "POLICIES", "HbmFirstFreed", "HbmFirstLruPerTier", "OraclePerByte", "SizedSegment", "parse_policy"]


class SizedSegment(PlacedSegment):
    """A segment of which a replay knows how much it will have written when it closes: `final_blocks`, at least 1."""

    __slots__ = ("final_blocks",)

    final_blocks: int


class HbmFirstFreed(HbmFirst):
    """HBM-first, and what is dead is free at once."""

    name: ClassVar[str] = "hbm_first_freed"
    frees_at_boundary: ClassVar[bool] = True
    is_offline: ClassVar[bool] = True


class HbmFirstLruPerTier(HbmFirst):
    """HBM-first over two caches that know nothing of each other: a full tier evicts what is dead in it, and does not look whether
    the other has room. So HBM turns over, as it does where blocks are freed at the boundary."""

    name: ClassVar[str] = "hbm_first_lru_per_tier"
    is_offline: ClassVar[bool] = True
    evicts_per_tier: ClassVar[bool] = True
    """The oldest dead segment of a tier goes when this tier is full, not when both are."""


class OraclePerByte(Oracle):
    """The oracle with another order: true lifetime over true size. Segments must be `SizedSegment`."""

    name: ClassVar[str] = "oracle_per_byte"

    def _key(self, segment: PlacedSegment) -> tuple[float, bool]:
        if segment.lifetime_s is None or not isinstance(segment, SizedSegment):
            raise ValueError("the placement 'oracle_per_byte' needs every worker's lifetime_s and final_blocks")
        return segment.lifetime_s / segment.final_blocks, True


ABLATIONS: dict[str, type[Placement]] = {policy.name: policy for policy in (HbmFirstFreed, HbmFirstLruPerTier, OraclePerByte)}

POLICIES: dict[str, type[Placement]] = PLACEMENTS | ABLATIONS
"""All that the simulator can run."""


def parse_policy(name: str) -> type[Placement]:
    """The policy of that name. Raises ValueError, saying which there are."""
    if name in ABLATIONS:
        return ABLATIONS[name]
    try:
        return parse_placement(name, is_live=False)
    except ValueError:
        raise ValueError(f"unknown placement {name!r}; there are {', '.join(POLICIES)}") from None
