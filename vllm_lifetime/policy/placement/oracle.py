# SPDX-License-Identifier: Apache-2.0
"""Lachesis with a predictor that is never wrong: workers ranked by their true lifetime. Offline only."""

from typing import ClassVar

from vllm_lifetime.policy.placement.contract import PlacedSegment
from vllm_lifetime.policy.placement.lachesis import Lachesis

__all__ = ["Oracle"]


class Oracle(Lachesis):
    """As `Lachesis`; the score is `lifetime_s`."""

    name: ClassVar[str] = "oracle"
    is_offline: ClassVar[bool] = True

    def _key(self, segment: PlacedSegment) -> tuple[float, bool]:
        if segment.lifetime_s is None:
            raise ValueError("the placement 'oracle' needs every worker's lifetime_s, which only a replay knows")
        return segment.lifetime_s, True
