# SPDX-License-Identifier: Apache-2.0
"""The segment table: one row per live segment, with its class, the boundary that closes it and its blocks by tier.

A **segment** is the part of one agent instance's context that shares one lifetime (Lachesis sections 2.3 and 4). It is the
`Reader` of the pool's runs: a block belongs to every segment that reads it, and closing a segment retires what no other reads.

Scheduler process, one thread, no IO.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from vllm_lifetime.boundaries import BoundaryKind, SegmentClass
from vllm_lifetime.pool.runs import Reader, Run

if TYPE_CHECKING:
    from vllm_lifetime.agents import Agent

__all__ = ["CLOSES_AT", "Segment", "SegmentTable", "class_of_run"]

CLOSES_AT: dict[SegmentClass, BoundaryKind] = {
    SegmentClass.SHARED: BoundaryKind.WORKFLOW_END,
    SegmentClass.LEAD: BoundaryKind.WORKFLOW_END,
    SegmentClass.REASONING_STRIPPED: BoundaryKind.WORKFLOW_END,
    SegmentClass.UNKNOWN: BoundaryKind.WORKFLOW_END,
    SegmentClass.WORKER: BoundaryKind.SUBAGENT_RETURN,
    SegmentClass.REVIEWER: BoundaryKind.SUBAGENT_RETURN,
    SegmentClass.REASONING_LADEN: BoundaryKind.TURN_END,
}
"""The boundary that ends each class (Lachesis table 1). The end of the workflow or session ends every segment."""

_LONGEST_FIRST = tuple(CLOSES_AT)
_LENGTH_ORDER = {segment_class: order for order, segment_class in enumerate(_LONGEST_FIRST)}


class Segment(Reader):
    """One row. `is_closing`: its boundary has come, and requests that still run as this segment are waited for."""

    __slots__ = ("agent", "is_closing", "num_requests", "opened_at", "segment_class", "segment_id", "table")

    def __init__(
        self,
        table: "SegmentTable",
        agent: "Agent",
        workflow_id: str,
        segment_class: SegmentClass,
        opened_at: float,
        segment_id: str | None = None,
    ) -> None:
        super().__init__(workflow_id)
        self.table = table
        self.agent = agent
        self.segment_class = segment_class
        self.segment_id = segment_id
        self.opened_at = opened_at
        self.num_requests = 0
        self.is_closing = False

    @property
    def closes_at(self) -> BoundaryKind:
        """The boundary that closes it."""
        return CLOSES_AT[self.segment_class]

    @property
    def is_empty(self) -> bool:
        """Whether no request runs as this segment and it reads no block in any tier."""
        return self.num_requests == 0 and not self.runs

    def on_last_run_gone(self) -> None:
        """Its last block has left every tier."""
        self.table.forget_if_empty(self)


class SegmentTable:
    """All live segments: those that read a block or run a request.

    Args:
        end_reader: takes a segment out of all access sets and retires what nobody else reads; returns the blocks retired.
        on_empty: called when a segment has no block and no request left.

    """

    def __init__(self, end_reader: Callable[[Reader], int], on_empty: Callable[[Segment], None]) -> None:
        self._end_reader = end_reader
        self._on_empty = on_empty
        self._rows: dict[Segment, None] = {}

    def __len__(self) -> int:
        """Live segments."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Segment]:
        """The live segments, oldest first."""
        return iter(self._rows)

    def start_request(self, segment: Segment) -> None:
        """A request runs as `segment`. O(1)."""
        segment.num_requests += 1
        self._rows[segment] = None

    def finish_request(self, segment: Segment) -> int:
        """A request that ran as `segment` is over. Returns the blocks retired, if a boundary had been waiting for it."""
        segment.num_requests -= 1
        if segment.is_closing and segment.num_requests == 0:
            return self._end(segment)
        self.forget_if_empty(segment)
        return 0

    def close(self, segment: Segment, *, is_lost: bool = False) -> int | None:
        """The segment's boundary has come. Returns the blocks retired in all tiers, or None: it waits for a running request.

        `is_lost`: nobody said so, its lease has run out; what its requests' protocol asked to be kept is kept. O(r log r) in the
        segment's runs.
        """
        if not segment.is_live:
            return 0
        if segment.num_requests:
            segment.is_closing = True
            return None
        return self._end(segment, is_lost=is_lost)

    def _end(self, segment: Segment, *, is_lost: bool = False) -> int:
        wish = segment.agent.wish
        if wish is not None and not is_lost:
            others = [other for other in segment.agent.segments if other is not segment]
            for run in segment.runs:
                if wish in run.readers and not any(other in run.readers for other in others):
                    wish.leave(run)
        blocks = self._end_reader(segment)
        self.forget_if_empty(segment)
        return blocks

    def forget_if_empty(self, segment: Segment) -> None:
        """Drop the row of a segment that has nothing left."""
        if segment.is_empty and segment in self._rows:
            del self._rows[segment]
            self._on_empty(segment)

    # ------------------------------------------------------------------ looking

    def count_blocks(self, segments: Iterable[Segment], num_tiers: int) -> tuple[list[int], list[int]]:
        """Blocks by tier that any of `segments` reads, and those of them that no other segment reads. O(runs)."""
        segments = set(segments)
        blocks = [0] * num_tiers
        private = [0] * num_tiers
        for run in {run for segment in segments for run in segment.runs}:
            is_private = not run.has_unknown_reader and run.readers <= segments
            for tier, count in enumerate(run.num_blocks):
                blocks[tier] += count
                if is_private:
                    private[tier] += count
        return blocks, private

    def count_classes(self, num_tiers: int) -> list[dict[SegmentClass, int]]:
        """Blocks by tier and class of everything that a live segment reads. O(runs), whatever the number of blocks."""
        counts = [dict.fromkeys(SegmentClass, 0) for _ in range(num_tiers)]
        for run in {run for segment in self._rows for run in segment.runs}:
            segment_class = class_of_run(run)
            for tier, count in enumerate(run.num_blocks):
                counts[tier][segment_class] += count
        return counts


def class_of_run(run: Run) -> SegmentClass:
    """The class of a run's blocks: `shared` between workflows, else that of its longest-lived reader."""
    segments = [reader for reader in run.readers if isinstance(reader, Segment)]
    if not segments:
        return SegmentClass.UNKNOWN
    first = segments[0].workflow_id
    if any(segment.workflow_id != first for segment in segments):
        return SegmentClass.SHARED
    return min((segment.segment_class for segment in segments), key=_LENGTH_ORDER.__getitem__)
