# SPDX-License-Identifier: Apache-2.0
"""What may be written to flash that lies behind HBM (`flash_mode: staged`), by segment class. Pure; scheduler process.

The decisions are those of placement (Lachesis section 4, `placement/`): what a policy would have in HBM at any price is not
worth a write, since it ends before it would be read back. Where flash is a part of the KV tensor such a block spills to flash
if HBM is full; here it is dropped and computed again. Of workers, whose lifetimes differ (section 3.5), the policy `lachesis`
writes the longer-lived half: by the rank that was predicted when they were spawned, and those of whose spawn nobody told by
size, as lifetime and size go together (Kendall's tau .51 to .72 in the paper's traces). The two cannot be compared, so that
each kind has its half.
"""

import math
from collections.abc import Sequence

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement.contract import Placement, PlacementConfig, Tier
from vllm_lifetime.policy.placement.lachesis import Lachesis
from vllm_lifetime.policy.placement.lachesis_no_predictive import LachesisNoPredictive

__all__ = ["WriteAdmission"]

_NEVER = frozenset({SegmentClass.REASONING_LADEN, SegmentClass.REVIEWER})
"""They end with the turn, or when the reviewer returns."""


class WriteAdmission:
    """Which classes may be written.

    Args:
        placement: the policy by whose classes it goes; one that does not go by class admits all.
        config: where segments of no known class go.

    """

    def __init__(self, placement: type[Placement], config: PlacementConfig) -> None:
        self.admits_all = not issubclass(placement, LachesisNoPredictive)
        """Nothing is ever refused."""
        self.ranks_workers = issubclass(placement, Lachesis)
        """Whether `set_workers` is wanted."""
        self._refused = frozenset() if self.admits_all else _NEVER
        if not self.admits_all and config.unknown_tier is Tier.HBM:
            self._refused |= {SegmentClass.UNKNOWN}
        self._smallest_worker = 0
        self._lowest_score = -math.inf

    def set_workers(self, sizes: Sequence[int], scores: Sequence[float] = ()) -> None:
        """The live workers have changed: of each kind the upper half may be written, a single one as well. O(n log n).

        `sizes`: in blocks, of those without a score. `scores`: as in `admits`, none of them NaN.
        """
        self._smallest_worker = sorted(sizes)[len(sizes) // 2] if sizes else 0
        self._lowest_score = sorted(scores)[len(scores) // 2] if scores else -math.inf

    def admits(self, segment_class: SegmentClass, num_blocks: int = 0, score: float | None = None) -> bool:
        """Whether blocks of this class may be written. O(1).

        `num_blocks`: the worker's size. `score`: its predicted rank, higher: it lives longer; None: there is none.
        """
        if segment_class is SegmentClass.WORKER and self.ranks_workers:
            return num_blocks >= self._smallest_worker if score is None else score >= self._lowest_score
        return segment_class not in self._refused
