# SPDX-License-Identifier: Apache-2.0
"""What a placement policy is: it names the tier of every KV block before the block is written (Lachesis section 4).

A policy is pure: no vLLM, no torch, no IO, no clock. The same objects decide in the server (on the thread that schedules) and
offline. It never allocates: the caller's allocator draws blocks from the tier that `tier_for` names and, if it has too few, from
the other one; it counts those spills itself. What the caller owes the policy, for every segment:

```
placement.open(segment)                               once, before its first block
placement.on_request(segment, expected_output_tokens) each request that writes into it, before its blocks; see `uses_requests`
placement.tier_for(segment, num_blocks)               once per allocation
placement.on_allocated(segment, tier, num_blocks)     what each tier then gave
placement.on_read(segment, num_block_reads)           see `uses_reads`
placement.on_freed(segment, tier, num_blocks)         blocks lost before the end: preempted, evicted, moved away
placement.close(segment)                              once, at its boundary; its blocks need no `on_freed`
```

A caller need not make the calls of which the policy says that it does not use them. All are O(1), `open` and `close` O(log n) in
the live segments (plus a move of n pointers).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Protocol

from vllm_lifetime.boundaries import SegmentClass

__all__ = ["NUM_TIERS", "PlacedSegment", "Placement", "PlacementConfig", "Tier", "TierCounts", "TierState"]


class Tier(IntEnum):
    """The two tiers between which KV is placed; also the index of a tier in every list here."""

    HBM = 0
    FLASH = 1

    @property
    def other(self) -> Tier:
        """Where an allocation goes that does not fit here."""
        return Tier.FLASH if self is Tier.HBM else Tier.HBM


NUM_TIERS = len(Tier)


class TierState(Protocol):
    """The allocator as a policy sees it.

    `free_blocks` are those that can be handed out now at no loss. Under a policy that `frees_at_boundary`, blocks of closed
    segments are free even if they are still readable; under one that does not, they are not, until the caller evicts them.
    """

    def capacity_blocks(self, tier: Tier) -> int:
        """All blocks of the tier."""
        ...

    def free_blocks(self, tier: Tier) -> int:
        """Blocks that the tier can hand out now. O(1)."""
        ...


class TierCounts:
    """A `TierState` that is two numbers a tier, for whoever has no block pool."""

    __slots__ = ("capacity", "free")

    def __init__(self, hbm_blocks: int, flash_blocks: int) -> None:
        self.capacity = [hbm_blocks, flash_blocks]
        self.free = [hbm_blocks, flash_blocks]

    def capacity_blocks(self, tier: Tier) -> int:
        """All blocks of the tier."""
        return self.capacity[tier]

    def free_blocks(self, tier: Tier) -> int:
        """Blocks that are not taken."""
        return self.free[tier]


class PlacedSegment:
    """One live segment as placement sees it: one row of the paper's segment table, without the block ids.

    Args:
        segment_class: what the harness says it is.
        score: predicted rank of its lifetime at spawn, higher = lives longer; only the order counts. None: no model.
        expected_blocks: expected size when it closes, in blocks; None: unknown. Orders workers that have no score.
        lifetime_s: its true lifetime, which only a replay knows; the oracle alone looks at it.

    `blocks`: its blocks by tier, kept by the policy's `on_allocated` and `on_freed`. `block_reads`: block reads told of so far.
    `is_admitted`: a worker that the predictive path lets into HBM.
    `tier`: where its present request goes, for policies that decide by request.
    """

    __slots__ = (
        "block_reads",
        "blocks",
        "expected_blocks",
        "is_admitted",
        "lifetime_s",
        "score",
        "segment_class",
        "tier",
        "written_blocks",
    )

    def __init__(
        self,
        segment_class: SegmentClass,
        *,
        score: float | None = None,
        expected_blocks: float | None = None,
        lifetime_s: float | None = None,
    ) -> None:
        self.segment_class = segment_class
        self.score = score
        self.expected_blocks = expected_blocks
        self.lifetime_s = lifetime_s
        self.blocks = [0] * NUM_TIERS
        self.written_blocks = 0
        self.block_reads = 0.0
        self.is_admitted = False
        self.tier = Tier.HBM

    @property
    def num_blocks(self) -> int:
        """Blocks in both tiers."""
        return self.blocks[Tier.HBM] + self.blocks[Tier.FLASH]


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Settings of the policies; the defaults are those that the simulator is calibrated with.

    `growth`: HBM that an admitted worker is counted with, in mean final sizes of admitted workers. `max_reserve_share`: most of
    HBM that is kept for reviewers; 0 keeps none. `reserve_deviations`: deviations above the mean that it covers.
    Raises ValueError if one is out of range.
    """

    unknown_tier: Tier = Tier.HBM
    """Where segments of no known class go."""
    growth: float = 2.0
    max_reserve_share: float = 0.9
    reserve_deviations: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.growth < float("inf"):
            raise ValueError(f"growth must be a number above 0; it is {self.growth}")
        if not 0 <= self.max_reserve_share <= 1:
            raise ValueError(f"max_reserve_share must be from 0 to 1; it is {self.max_reserve_share}")
        if not 0 <= self.reserve_deviations < float("inf"):
            raise ValueError(f"reserve_deviations must be 0 or more; it is {self.reserve_deviations}")


class Placement(ABC):
    """A placement policy over the tiers of one engine. One thread."""

    name: ClassVar[str]
    frees_at_boundary: ClassVar[bool] = True
    """Whether a closed segment's blocks count as free at once. If not, they stay cached until **both** tiers have no free block,
    and then go oldest segment first (HBM-first, section 5.3)."""
    uses_reads: ClassVar[bool] = False
    """Whether it wants `on_read`."""
    uses_requests: ClassVar[bool] = False
    """Whether it wants `on_request`."""
    migrates: ClassVar[bool] = False
    """Whether a full HBM is made room in by `next_to_migrate` before anything spills."""
    is_offline: ClassVar[bool] = False
    """Whether it knows what only a replay can know."""

    def __init__(self, tiers: TierState, config: PlacementConfig | None = None) -> None:
        self.tiers = tiers
        self.config = config or PlacementConfig()

    def open(self, segment: PlacedSegment) -> None:  # noqa: B027
        """A segment begins; the decision about the whole of it, if there is one, falls here.

        Raises ValueError if the policy needs what the segment does not say (only offline policies do).
        """

    @abstractmethod
    def tier_for(self, segment: PlacedSegment, num_blocks: int) -> Tier:
        """Where the next `num_blocks` of an open segment should go. Whether they fit is the caller's matter."""

    def on_allocated(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """`tier` gave the segment `num_blocks`."""
        segment.blocks[tier] += num_blocks
        segment.written_blocks += num_blocks

    def on_freed(self, segment: PlacedSegment, tier: Tier, num_blocks: int) -> None:
        """The open segment lost `num_blocks` of `tier`. Raises ValueError if it has not so many."""
        if num_blocks > segment.blocks[tier]:
            raise ValueError(f"a segment with {segment.blocks[tier]} blocks in {tier.name} cannot lose {num_blocks}")
        segment.blocks[tier] -= num_blocks

    def on_request(self, segment: PlacedSegment, expected_output_tokens: float) -> None:  # noqa: B027
        """A request begins that will write into the segment."""

    def on_read(self, segment: PlacedSegment, num_block_reads: float) -> None:
        """Decode steps have read the segment: the sum, over the steps, of its blocks then."""
        segment.block_reads += num_block_reads

    def next_to_migrate(self) -> PlacedSegment | None:
        """The segment whose HBM blocks go to flash so that a write fits; None if there is none, or it never migrates."""
        return None

    def close(self, segment: PlacedSegment) -> None:  # noqa: B027
        """The segment's boundary has come. `segment.blocks` still says what it held."""
