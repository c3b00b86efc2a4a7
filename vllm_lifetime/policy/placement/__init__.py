# SPDX-License-Identifier: Apache-2.0
"""Placement: which tier a KV block is written to, decided before it is written (Lachesis section 4)."""

from vllm_lifetime.policy.placement.contract import PlacedSegment, Placement, PlacementConfig, Tier, TierCounts, TierState
from vllm_lifetime.policy.placement.registry import PLACEMENTS, parse_placement

__all__ = ["PLACEMENTS", "PlacedSegment", "Placement", "PlacementConfig", "Tier", "TierCounts", "TierState", "parse_placement"]
