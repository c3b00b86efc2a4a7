# SPDX-License-Identifier: Apache-2.0
"""Which tier new KV blocks come from when flash is in place: the placement policy's word, spill, and the counts of both.

EngineCore process, scheduler thread, on the hot path. vLLM asks its pool for blocks without a word about whose they are; the
request is known from `patches/allocating_request.py`, its segments from its `Reading`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_lifetime.agents import Agent
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.connectors.lifetime.metadata import PlacedInFlash
from vllm_lifetime.connectors.lifetime.request_state import RequestState
from vllm_lifetime.policy.placement.contract import PlacedSegment, Placement, PlacementConfig, Tier
from vllm_lifetime.pool.access import FLASH_TIER, HBM_TIER, TIER_NAMES
from vllm_lifetime.pool.runs import Reader
from vllm_lifetime.pool.tiered import TieredFreeList
from vllm_lifetime.pool.tiers import TierUsage
from vllm_lifetime.segments import Segment

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

__all__ = ["InPlacePool"]

POOL_TIERS = (HBM_TIER, FLASH_TIER)
"""By `Tier`."""

MIN_ROWS = 64
"""With fewer segments than this it is not worth looking for those that have nothing left."""


class _Row:
    """One segment as the placement policy knows it. A block remembers the row for which it was taken."""

    __slots__ = ("is_open", "placed")

    def __init__(self, placed: PlacedSegment) -> None:
        self.placed = placed
        self.is_open = True


class InPlacePool:
    """See the module. One per engine.

    Args:
        pool: the engine's block pool, from which nothing has been taken yet; it is split in two.
        num_hbm_blocks: blocks with lower ids lie in HBM.
        placement: the policy's class, and its settings.
        requests: the scheduler side's requests, by id.
        score_of: the predicted rank of a sub-agent's lifetime, where one was made at its spawn; None: there are none.

    """

    def __init__(
        self,
        pool: LifetimeBlockPool,
        num_hbm_blocks: int,
        placement: type[Placement],
        config: PlacementConfig,
        block_size_tokens: int,
        requests: Mapping[str, RequestState],
        recorder: stats.Recorder,
        *,
        score_of: Callable[[Agent], float | None] | None = None,
    ) -> None:
        self.tiers: TieredFreeList[KVCacheBlock] = pool.split(num_hbm_blocks, self)
        self._capacity = (num_hbm_blocks - 1, len(pool.blocks) - num_hbm_blocks)  # the null block is never anybody's
        self._placement = placement(self, config)
        self._block_size = block_size_tokens
        self._requests = requests
        self._recorder = recorder
        self._score_of = score_of
        self._request_blocks: Mapping[str, Sequence[KVCacheBlock]] = {}
        self._request_id: str | None = None
        self._rows: dict[Segment, _Row] = {}
        self._max_rows = MIN_ROWS
        self._row_of: list[_Row | None] = [None] * len(pool.blocks)
        self._placed_in_flash: list[PlacedInFlash] = []

    def bind(self, manager: "KVCacheManager") -> None:
        """The cache manager, of one group, that takes blocks from the pool."""
        (group,) = manager.coordinator.single_type_managers
        self._request_blocks = group.req_to_blocks

    # ------------------------------------------------------------------ the policy's view

    def capacity_blocks(self, tier: Tier) -> int:
        """All blocks of a tier that can be had."""
        return self._capacity[tier]

    def free_blocks(self, tier: Tier) -> int:
        """Blocks of a tier that can be had at no loss. O(1)."""
        part = self.tiers.hbm if tier is Tier.HBM else self.tiers.flash
        retired = part.num_retired_blocks if self._placement.frees_at_boundary else 0
        return part.num_empty_blocks + retired

    # ------------------------------------------------------------------ taking blocks

    def begin_request(self, request: "Request") -> None:
        """Blocks that are taken from now on are for `request`."""
        self._request_id = request.request_id

    def end_request(self) -> None:
        """Blocks that are taken from now on are for nobody known."""
        self._request_id = None

    def take(self, count: int) -> list[KVCacheBlock]:
        """The next `count` blocks of the present request, of its prompt's and its output's segment. At most so many are free."""
        request_id = self._request_id
        state = None if request_id is None else self._requests.get(request_id)
        if request_id is None or state is None or state.reading is None:
            return self._take(count, None)
        start = len(self._request_blocks.get(request_id, ()))
        num_prompt = min(max(state.boundary_tokens // self._block_size - start, 0), count)
        reading = state.reading
        if reading.output is reading.prompt or num_prompt == count:
            return self._take(count, reading.prompt)
        if num_prompt == 0:
            return self._take(count, reading.output)
        return self._take(num_prompt, reading.prompt) + self._take(count - num_prompt, reading.output)

    def _take(self, count: int, segment: Segment | None) -> list[KVCacheBlock]:
        """`count` blocks for `segment`, from the tier where the policy wants it if there is room. O(count)."""
        if not count:
            return []
        row = None if segment is None else self._row(segment)
        segment_class = SegmentClass.UNKNOWN if segment is None else segment.segment_class
        wanted = self._placement.config.unknown_tier if row is None else self._placement.tier_for(row.placed, count)
        is_blind = not self._placement.frees_at_boundary
        # What nobody has wishes for ages alike in both tiers.
        is_indifferent = is_blind or (segment_class is SegmentClass.UNKNOWN and wanted is Tier.HBM)
        blocks = self.tiers.take(count, None if is_indifferent else POOL_TIERS[wanted], uses_retired=not is_blind)
        first_flash_id = self.tiers.first_flash_id
        row_of = self._row_of
        in_flash: list[int] = []
        lost: Counter[tuple[_Row, Tier]] | None = None
        for block in blocks:
            block_id = block.block_id
            is_flash = block_id >= first_flash_id
            if is_flash:
                in_flash.append(block_id)
            old = row_of[block_id]
            if old is not None and old.is_open:
                lost = Counter() if lost is None else lost
                lost[old, Tier.FLASH if is_flash else Tier.HBM] += 1
            row_of[block_id] = row
        num_flash = len(in_flash)
        if in_flash:
            self._placed_in_flash.append((segment_class.value, in_flash))
        if lost is not None:
            for (old, tier), number in lost.items():
                self._placement.on_freed(old.placed, tier, number)
        for tier, number in ((Tier.HBM, count - num_flash), (Tier.FLASH, num_flash)):
            if not number:
                continue
            if row is not None:
                self._placement.on_allocated(row.placed, tier, number)
            self._recorder.count(stats.PLACED_BLOCKS, TIER_NAMES[POOL_TIERS[tier]], segment_class.value, by=number)
            if tier is not wanted:
                self._recorder.count(stats.SPILLED_BLOCKS, TIER_NAMES[POOL_TIERS[wanted]], segment_class.value, by=number)
        return blocks

    def take_placed(self) -> list[PlacedInFlash]:
        """What was taken from flash since the last call, in this order, for the worker's wear ledger."""
        taken, self._placed_in_flash = self._placed_in_flash, []
        return taken

    # ------------------------------------------------------------------ segments

    def _row(self, segment: Segment) -> _Row:
        """The policy's row of `segment`, opened now if it is new, or if the harness has called it another class since."""
        row = self._rows.get(segment)
        if row is not None and row.placed.segment_class is segment.segment_class:
            return row
        if row is None:
            if len(self._rows) >= self._max_rows:
                self._close_empty()
            row = self._rows[segment] = _Row(self._placed(segment))
            self._placement.open(row.placed)
            return row
        before = row.placed
        self._placement.close(before)
        row.placed = self._placed(segment)
        self._placement.open(row.placed)
        for tier in Tier:
            self._placement.on_allocated(row.placed, tier, before.blocks[tier])
        return row

    def _placed(self, segment: Segment) -> PlacedSegment:
        score = None
        if segment.segment_class is SegmentClass.WORKER and self._score_of is not None:
            score = self._score_of(segment.agent)
        return PlacedSegment(segment.segment_class, score=score)

    def close(self, reader: Reader) -> None:
        """A segment's boundary has come, or somebody else reads on no longer. O(log n) in the live segments."""
        if isinstance(reader, Segment) and reader in self._rows:
            self._close(reader)

    def _close(self, segment: Segment) -> None:
        row = self._rows.pop(segment)
        row.is_open = False
        self._placement.close(row.placed)

    def _close_empty(self) -> None:
        """Close those that have no block and no request left, though no boundary came. O(segments), O(1) amortised."""
        for segment in [segment for segment in self._rows if segment.is_empty]:
            self._close(segment)
        self._max_rows = 2 * len(self._rows) + MIN_ROWS

    # ------------------------------------------------------------------ views

    def by_tier(self, blocks: Sequence[KVCacheBlock]) -> list[tuple[str, Sequence[KVCacheBlock]]]:
        """`blocks` by the tier in which they lie. O(blocks)."""
        first = self.tiers.first_flash_id
        parts: tuple[list[KVCacheBlock], list[KVCacheBlock]] = ([], [])
        for block in blocks:
            parts[block.block_id >= first].append(block)
        return [(TIER_NAMES[tier], part) for tier, part in zip(POOL_TIERS, parts, strict=True) if part]

    def num_in_flash(self, blocks: Sequence[KVCacheBlock]) -> int:
        """How many of `blocks` lie in flash."""
        first = self.tiers.first_flash_id
        return sum(block.block_id >= first for block in blocks)

    def usage(self) -> dict[str, TierUsage]:
        """Blocks of both tiers by state. O(1)."""
        by_tier = {}
        for tier, part in ((Tier.HBM, self.tiers.hbm), (Tier.FLASH, self.tiers.flash)):
            free = part.num_empty_blocks + part.num_retired_blocks
            by_tier[TIER_NAMES[POOL_TIERS[tier]]] = TierUsage(self._capacity[tier], free, part.num_retired_blocks)
        return by_tier

    def held(self) -> dict[str, int]:
        """Blocks by tier that a request references. O(1)."""
        parts = (self.tiers.hbm, self.tiers.flash)
        return {TIER_NAMES[POOL_TIERS[tier]]: self._capacity[tier] - parts[tier].num_free_blocks for tier in Tier}
