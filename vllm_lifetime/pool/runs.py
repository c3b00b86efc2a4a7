# SPDX-License-Identifier: Apache-2.0
"""Runs: consecutive blocks of one prefix with the same access set, the node that is ranked.

A block never carries a rank, its run does. Ending a workflow or refreshing a score therefore touches as many nodes as the
workflow has runs, not as many as it has blocks.

All of this lives in the scheduler process, on its one thread.
"""

__all__ = ["ACTIVE_RANK", "DEMOTED_RANK", "MAX_COUNTED_WORKFLOWS", "Rank", "RankGroup", "Reader", "Run", "retired_rank"]

MAX_COUNTED_WORKFLOWS = 64
"""A run counts the workflows that ever read it up to here; what so many share is last of the retired in any case."""

Rank = tuple[float, ...]
"""Eviction rank, lowest evicted first; compared as a tuple."""

ACTIVE_RANK: Rank = (1, 0.0, 0.0)
"""Rank of every run that may still be read and that nothing has scored: ordered by recency alone."""

DEMOTED_RANK: Rank = (1, -1.0, 0.0)
"""Rank of what the harness wants out of the way: the first of the active to go, until it is read again."""


def retired_rank(num_workflows: int) -> Rank:
    """Rank of a run that no active workflow reads: the fewer workflows ever read it, the sooner it goes.

    PBKV section 4.2.1: retired cache goes first, and a prefix that many workflows shared is kept longest.
    """
    return (0, num_workflows)


class RankGroup:
    """Runs that always have the same rank, since the same agents read them: they move together, whatever their number.

    `rank` is an active one, see `AccessTable.set_group_rank`. `buckets[tier]` is the group's place in that tier's order; while
    its rank is `ACTIVE_RANK`, its runs stand among the others of that rank instead.
    """

    __slots__ = ("buckets", "rank", "runs")

    def __init__(self, num_tiers: int) -> None:
        self.rank: Rank = ACTIVE_RANK
        self.runs: set[Run] = set()
        self.buckets: list[object | None] = [None] * num_tiers


class Reader:
    """Someone who may read runs until a boundary says otherwise: a segment, or the wish to retain some for a time.

    `runs` is the reverse of `Run.readers`, so that a boundary finds its runs without a search. `is_live` turns False once, at the
    boundary; what a request of an ended reader still writes is retired from birth.
    """

    __slots__ = ("is_live", "runs", "workflow_id")

    def __init__(self, workflow_id: str) -> None:
        self.workflow_id = workflow_id
        self.is_live = True
        self.runs: set[Run] = set()

    def leave(self, run: "Run") -> None:
        """Be no reader of `run` any more, without retiring it: somebody else still reads it, or is about to be taken out."""
        run.remove_reader(self)
        if not self.runs:
            self.on_last_run_gone()

    def on_last_run_gone(self) -> None:
        """Called when the last run of this reader has left every tier."""


class Run:
    """Blocks `start <= index < end` of one prefix, all with the same readers and no fork inside.

    Whoever reads one of its blocks therefore reads all that lie before it. `is_closed`: its last block has known successors, so
    it cannot be extended.

    `num_blocks[tier]` counts its members there, held or free; the same block may have a copy in several tiers.
    `nodes[tier]` is its place in that tier's free list (made on first use by `TierFreeList`).
    `group`: whose rank it has; None: its own.
    """

    __slots__ = (
        "_rank",
        "end",
        "group",
        "has_unknown_reader",
        "is_closed",
        "nodes",
        "num_blocks",
        "readers",
        "start",
        "workflows",
    )

    def __init__(self, start: int, end: int, num_tiers: int) -> None:
        self.start = start
        self.end = end
        self.readers: set[Reader] = set()
        self.has_unknown_reader = False
        self.is_closed = False
        self.workflows: set[str] = set()
        self._rank: Rank = ACTIVE_RANK
        self.group: RankGroup | None = None
        self.num_blocks = [0] * num_tiers
        self.nodes: list[object | None] = [None] * num_tiers

    @property
    def rank(self) -> Rank:
        """Its eviction rank, or its group's. To be given one of its own takes it out of its group."""
        group = self.group
        return self._rank if group is None else group.rank

    @rank.setter
    def rank(self, rank: Rank) -> None:
        self.leave_group()
        self._rank = rank

    def join_group(self, group: RankGroup) -> None:
        """Have the rank of `group` from now on. O(1)."""
        self.leave_group()
        self.group = group
        group.runs.add(self)

    def leave_group(self) -> None:
        """Have a rank of its own, `ACTIVE_RANK` if it had its group's. O(1)."""
        if self.group is not None:
            self.group.runs.discard(self)
            self.group = None
            self._rank = ACTIVE_RANK

    @property
    def num_workflows(self) -> int:
        """Workflows that ever read it, at most `MAX_COUNTED_WORKFLOWS`."""
        return len(self.workflows)

    @property
    def is_retired(self) -> bool:
        """Whether no active workflow can read it."""
        return self.group is None and self._rank[0] == 0

    def is_private_to(self, reader: Reader) -> bool:
        """Whether `reader` is the only one who may read it (nobody any more, if `reader` has ended)."""
        if self.has_unknown_reader:
            return False
        if not reader.is_live:
            return not self.readers and self.is_retired
        return len(self.readers) == 1 and reader in self.readers

    def can_grow(self, index: int, reader: Reader) -> bool:
        """Whether block `index`, new and written by `reader`, may become its last."""
        return self.end == index and not self.is_closed and self.is_private_to(reader)

    def is_read_by(self, reader: Reader | None) -> bool:
        """Whether `reader` (None: somebody unknown) is in the access set already, or is past being added to it."""
        if reader is None:
            return self.has_unknown_reader
        return reader in self.readers or not reader.is_live

    def add_reader(self, reader: Reader) -> None:
        """Let `reader` into the access set. O(1)."""
        self.note_workflow(reader)
        self.readers.add(reader)
        reader.runs.add(self)

    def note_workflow(self, reader: Reader) -> None:
        """Count `reader`'s workflow among those that ever read this run."""
        if len(self.workflows) < MAX_COUNTED_WORKFLOWS:
            self.workflows.add(reader.workflow_id)

    def remove_reader(self, reader: Reader) -> bool:
        """Take `reader` out. Returns whether the run has nobody left who may read it."""
        self.readers.discard(reader)
        reader.runs.discard(self)
        return not self.readers and not self.has_unknown_reader

    def copy_access_set(self, start: int, end: int) -> "Run":
        """A run over `[start, end)` with the same readers, rank and group, and no members yet."""
        twin = Run(start, end, len(self.num_blocks))
        twin.has_unknown_reader = self.has_unknown_reader
        twin.workflows = set(self.workflows)
        twin._rank = self._rank
        if self.group is not None:
            twin.join_group(self.group)
        for reader in self.readers:
            twin.readers.add(reader)
            reader.runs.add(twin)
        return twin

    def add_member(self, tier: int) -> None:
        """Count one more block of this run in `tier`."""
        self.num_blocks[tier] += 1

    def remove_member(self, tier: int) -> None:
        """Count one block less in `tier`; the run leaves its readers and its group with its last block."""
        self.num_blocks[tier] -= 1
        if self.num_blocks[tier] == 0 and not any(self.num_blocks):
            self.leave_group()
            readers, self.readers = self.readers, set()
            for reader in readers:
                reader.runs.discard(self)
                if not reader.runs:
                    reader.on_last_run_gone()

    def __repr__(self) -> str:
        return f"Run([{self.start}, {self.end}), rank={self.rank}, readers={len(self.readers)}, blocks={self.num_blocks})"
