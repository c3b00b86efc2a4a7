# SPDX-License-Identifier: Apache-2.0
"""Who reads which run, over all tiers: runs are made, split, extended and retired here.

Scheduler process, one thread.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import ACTIVE_RANK, DEMOTED_RANK, Rank, RankGroup, Reader, Run, retired_rank

__all__ = ["FLASH_TIER", "HBM_TIER", "HOST_TIER", "TIER_NAMES", "AccessTable", "Path"]

HBM_TIER, HOST_TIER, FLASH_TIER = range(3)
"""Numbers of the tiers in `Run.num_blocks`."""

TIER_NAMES = ("hbm", "host", "flash")
"""By tier number."""


class Path:
    """The prefix that one request reads and extends: its reader, and how many of its blocks have been looked at.

    From block `boundary` on it is `next_reader` that writes; it then reads everything before, too.
    """

    __slots__ = ("boundary", "next_reader", "num_seen", "reader")

    def __init__(self, reader: Reader | None, next_reader: Reader | None = None, boundary: int = 0) -> None:
        self.reader = reader
        self.next_reader = None if next_reader is reader else next_reader
        self.boundary = boundary
        self.num_seen = 0


class AccessTable:
    """Keeps `Run.readers`, ranks and the members' runs of every tier in step.

    Args:
        free_lists: one per tier, in the order of `Run.num_blocks`; tier 0 is HBM.
        copies_of: the blocks below HBM that hold a hash, as (tier, block) pairs, so that copies share their run.
        twin_of: another HBM block with the same content, if it was computed twice.

    """

    def __init__(
        self,
        free_lists: Sequence[TierFreeList[Any]],
        copies_of: Callable[[bytes], Sequence[tuple[int, Any]]],
        twin_of: Callable[[Any], Any | None],
    ) -> None:
        self._free_lists = free_lists
        self._copies_of = copies_of
        self._twin_of = twin_of
        self._hbm = free_lists[HBM_TIER]
        self.has_runs = False
        """Whether any request has come with metadata; until then every call here can be skipped."""
        self.on_access_change: Callable[[Run, Reader | None], None] | None = None
        """Called when the rank of an active run may not be what a scorer would give it: with the reader that has joined it, or
        with None when one has left, or somebody else has given it a rank."""

    # ------------------------------------------------------------------ reading and writing blocks

    def read(self, path: Path, blocks: Sequence[Any], count: int) -> None:
        """The request of `path` reads the first `count` blocks of its prefix, which are in HBM.

        Every run among them gets the path's reader; a run that the path leaves before its end is split there first, so that a
        run's blocks always have one access set. O(blocks not looked at yet), and O(blocks) of a run that is split.
        """
        self._follow(path, blocks, count, are_new=False)

    def write(self, path: Path, blocks: Sequence[Any], end: int) -> None:
        """The blocks of `path` up to `end` have got their hashes: put the new ones into runs.

        A block whose content is known already (in another HBM block, or in a copy below) joins that run. Others extend the run
        before them if it is private to the reader, or start a run. Blocks without a hash (a sliding window's null ones) are
        passed over. Costs as `read`.
        """
        self._follow(path, blocks, end, are_new=True)

    def _follow(self, path: Path, blocks: Sequence[Any], end: int, *, are_new: bool) -> None:
        if path.next_reader is not None and end > path.boundary:
            self._follow_as_one(path, blocks, path.boundary, are_new=are_new)
            path.reader, path.next_reader = path.next_reader, None
            self._join(path.reader, blocks, path.num_seen)
        self._follow_as_one(path, blocks, end, are_new=are_new)

    def _join(self, reader: Reader, blocks: Sequence[Any], end: int) -> None:
        """`reader` reads the first `end` blocks, which another one has gone through before it. O(runs)."""
        run_of = self._hbm.run_of
        index = 0
        while index < end:
            run = run_of[blocks[index].block_id]
            if run is None:
                index += 1
                continue
            after = min(run.end, end) if run.start <= index else index + 1
            self._pass(run, after, blocks, reader, forks=False)
            index = after

    def _follow_as_one(self, path: Path, blocks: Sequence[Any], end: int, *, are_new: bool) -> None:
        start = path.num_seen
        if end <= start:
            return
        reader = path.reader
        run_of = self._hbm.run_of
        run_before = run_of[blocks[start - 1].block_id] if start else None
        for index in range(start, end):
            block = blocks[index]
            run = run_of[block.block_id]
            if are_new and run is None and block.block_hash is not None:
                run = self._known_run(block)
                if run is None and reader is not None:
                    if run_before is not None and run_before.can_grow(index, reader):
                        run = run_before
                        run.end = index + 1
                    else:
                        run = self._new_run(index, reader)
                if run is not None:
                    self._hbm.set_run(block, run)
            if run is not run_before:
                if run_before is not None:
                    self._pass(run_before, index, blocks, reader, forks=True)
                run_before = run
        if run_before is not None:
            self._pass(run_before, end, blocks, reader, forks=False)
        path.num_seen = end

    def _pass(self, run: Run, index: int, blocks: Sequence[Any], reader: Reader | None, *, forks: bool) -> None:
        """`reader` reads `run` up to block `index`, where its path ends for now, or `forks` off into another run."""
        if run.start >= index:
            run = self._relabel(run, index, blocks)
        elif run.end > index and (forks or not run.is_read_by(reader)):
            run = self._split(run, index, blocks)
        if run.rank is DEMOTED_RANK:
            self.set_rank(run, ACTIVE_RANK)
        self._add_reader(run, reader)

    def _new_run(self, index: int, reader: Reader) -> Run:
        self.has_runs = True
        run = Run(index, index + 1, len(self._free_lists))
        if reader.is_live:
            self.join(run, reader)
        else:
            run.note_workflow(reader)
            run.rank = retired_rank(1)
        return run

    def _known_run(self, block: Any) -> Run | None:
        for tier, copy in self._copies_of(block.block_hash):
            run: Run | None = self._free_lists[tier].run_of[copy.block_id]
            if run is not None:
                return run
        twin = self._twin_of(block)
        return None if twin is None else self._hbm.run_of[twin.block_id]

    def _split(self, run: Run, end: int, blocks: Sequence[Any]) -> Run:
        """Cut the blocks before `end` off `run`; they form the returned run, with the same readers. `blocks` leads through it."""
        front = self._twin(run, run.start, end)
        for block in blocks[run.start : end]:
            self._move(HBM_TIER, block, run, front)
            twin = self._twin_of(block)
            if twin is not None:
                self._move(HBM_TIER, twin, run, front)
            for tier, copy in self._copies_of(block.block_hash):
                self._move(tier, copy, run, front)
        run.start = end
        return front

    def _relabel(self, run: Run, end: int, blocks: Sequence[Any]) -> Run:
        """Give the blocks before `end` that are `run`'s, which begins only there or later, a run of their own; returns it.

        When a run is split, a content that HBM holds more than twice keeps one block with the wrong part: no index leads to it.
        """
        start = end
        while start and self._hbm.run_of[blocks[start - 1].block_id] is run:
            start -= 1
        own = self._twin(run, start, end)
        for block in blocks[start:end]:
            self._hbm.set_run(block, own)
        return own

    def _twin(self, run: Run, start: int, end: int) -> Run:
        """A closed run over `[start, end)` that is read as `run` is, and whose rank is as old."""
        twin = run.copy_access_set(start, end)
        twin.is_closed = True
        if self.on_access_change is not None and not twin.is_retired:
            self.on_access_change(twin, None)
        return twin

    def _move(self, tier: int, block: Any, old: Run, new: Run) -> None:
        free_list = self._free_lists[tier]
        if free_list.run_of[block.block_id] is old:
            free_list.set_run(block, new)

    # ------------------------------------------------------------------ access sets and ranks

    def _add_reader(self, run: Run, reader: Reader | None) -> None:
        if reader is None:
            if not run.has_unknown_reader:
                run.has_unknown_reader = True
                self.set_rank(run, ACTIVE_RANK)
            return
        if reader.is_live and reader not in run.readers:
            if run.is_retired:
                self.set_rank(run, ACTIVE_RANK)
            self.join(run, reader)

    def join(self, run: Run, reader: Reader) -> None:
        """Let a live `reader` into the access set of `run`. O(1)."""
        run.add_reader(reader)
        if self.on_access_change is not None:
            self.on_access_change(run, reader)

    def set_rank(self, run: Run, rank: Rank) -> None:
        """Give `run` a rank of its own in every tier. O(log buckets) per tier, whatever the run's length."""
        if run.group is None and run.rank == rank:
            return
        run.rank = rank
        for free_list in self._free_lists:
            free_list.set_rank(run)
        if self.on_access_change is not None and rank[0] != 0 and rank is not DEMOTED_RANK:
            self.on_access_change(run, None)

    @property
    def num_tiers(self) -> int:
        """Tiers, as many as `RankGroup` needs to know of."""
        return len(self._free_lists)

    @property
    def free_lists(self) -> Sequence[TierFreeList[Any]]:
        """One per tier."""
        return self._free_lists

    def set_group(self, run: Run, group: RankGroup | None) -> None:
        """Let `run`, which is active, have the rank of `group` in every tier, or `ACTIVE_RANK`. Costs as `set_rank`."""
        if run.group is group:
            return
        if group is None:
            run.leave_group()
        else:
            run.join_group(group)
        for free_list in self._free_lists:
            free_list.set_rank(run)

    def set_group_rank(self, group: RankGroup, rank: Rank) -> None:
        """Give the runs of `group` another active rank in every tier; of equal ranks, what gets it last goes last.

        O(log buckets) per tier, whatever the number of runs; but O(r log r) to or from `ACTIVE_RANK`, where the runs stand one by
        one, by recency, among those of which nothing is known.
        """
        was_common, group.rank = group.rank is ACTIVE_RANK, rank
        is_common = rank is ACTIVE_RANK
        if was_common and is_common:
            return
        if not is_common:
            for free_list in self._free_lists:
                free_list.set_group_rank(group)
        if was_common or is_common:
            for run in sorted(group.runs, key=self._last_freed):
                for free_list in self._free_lists:
                    free_list.set_rank(run)

    def end(self, reader: Reader) -> list[int]:
        """`reader` reads nothing any more: each run that nobody else may read is retired, at once, in every tier.

        Returns the blocks retired by tier. O(r log r) in the reader's runs.
        """
        reader.is_live = False
        retired = [0] * len(self._free_lists)
        # Least recently freed first, so that equal ranks keep their recency, a prefix's deepest run before its parent.
        for run in sorted(reader.runs, key=self._last_freed):
            if run.remove_reader(reader):
                self.set_rank(run, retired_rank(run.num_workflows))
                for tier, count in enumerate(run.num_blocks):
                    retired[tier] += count
            elif self.on_access_change is not None:
                self.on_access_change(run, None)
        return retired

    def _last_freed(self, run: Run) -> tuple[int, int]:
        return (self._hbm.last_freed(run), -run.start)
