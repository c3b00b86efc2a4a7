# SPDX-License-Identifier: Apache-2.0
"""HBM as the server keeps it, in runs and not in blocks: what a request hits, what is evicted for it, who may read what.

Does what vLLM's block pool does with our `TierFreeList` and `AccessTable`, for prompts that are given as block ids, and with the
same `Run`, `Reader` and `Rank`: the same hits and evictions, block for block (tests/simulate/test_cache.py), at a cost per run.
The cached part of a run is a prefix of it, since its deepest block is evicted first.

What is simulated of a request: it holds its whole prompt from its start to its end. A block of the prompt that is not cached is
computed at the start, and a request that starts later hits it. The blocks of its answer are not simulated; they are new in the
next prompt that contains them. Whether there is room for it is the schedule's matter; if what runs at once needs more blocks than
there are, it gets them all the same (`num_overcommitted`), and all else is evicted.
"""

import heapq
import itertools
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.pool.runs import ACTIVE_RANK, DEMOTED_RANK, Rank, Reader, Run, retired_rank
from vllm_lifetime.simulate.next_use_order import agreed_length

__all__ = ["CachedRun", "RunCache"]

HBM = 0


class CachedRun(Run):
    """A run of which every block is cached: `[start, end)` of the prompt `path`, at least.

    `holds`: up to which block each running request that reads it does so. `is_anonymous`: its request had no metadata; in the
    server its blocks are in no run, and here it is split wherever a request leaves it, so that all its blocks have the same age.
    `turn` is its place among those of its rank, `last_freed` when blocks of it were last given back.
    """

    __slots__ = ("holds", "is_anonymous", "last_freed", "path", "serial", "turn")

    def __init__(self, path: NDArray[np.int64], start: int, end: int, serial: int, *, is_anonymous: bool = False) -> None:
        super().__init__(start, end, 1)
        self.num_blocks[HBM] = end - start
        self.path = path
        self.serial = serial
        self.is_anonymous = is_anonymous
        self.holds: list[int] = []
        self.last_freed = 0
        self.turn = 0

    def __hash__(self) -> int:
        # Sets of runs are then walked in the same order in every process.
        return self.serial

    @property
    def held_end(self) -> int:
        """Blocks before this one are held by a running request."""
        return max(self.holds) if self.holds else self.start

    @property
    def num_free(self) -> int:
        """Blocks that may be evicted."""
        return self.end - self.held_end


class RunCache:
    """See the module. `before_eviction` is called before blocks are evicted, so that ranks can be brought up to date.

    `evicted(run, start)`, if given, is told that the blocks of `run` from `start` on are gone.
    """

    def __init__(
        self,
        capacity_blocks: int,
        before_eviction: Callable[[], None] | None = None,
        evicted: Callable[[CachedRun, int], None] | None = None,
    ) -> None:
        self.capacity_blocks = capacity_blocks
        self.num_blocks = 0
        """Blocks cached, held or free; more than the capacity only while what runs needs more."""
        self.num_overcommitted = 0
        """Requests that found too few blocks that could be evicted."""
        self.num_evicted = 0
        self._before_eviction = before_eviction
        self._evicted = evicted
        self._by_first: dict[int, CachedRun] = {}
        """By the id of their first block."""
        self._queue: list[tuple[Rank, int, CachedRun]] = []
        self._clock = itertools.count(1)
        self._serials = itertools.count(1)

    def runs(self) -> list[CachedRun]:
        """All runs that hold a block."""
        return list(self._by_first.values())

    def num_reclaimable(self) -> int:
        """Blocks that are empty, or retired and not held. O(runs)."""
        retired = sum(run.num_free for run in self._by_first.values() if run.is_retired)
        return max(0, self.capacity_blocks - self.num_blocks) + retired

    def count_hits(self, path: NDArray[np.int64]) -> int:
        """How many leading blocks of `path` are cached. Changes nothing."""
        position = 0
        while position < len(path):
            run = self._by_first.get(int(path[position]))
            if run is None:
                break
            position = agreed_length(path, run.path, position, min(len(path), run.end))
        return position

    # ------------------------------------------------------------------ requests

    def start(
        self, path: NDArray[np.int64], reader: Reader | None, next_reader: Reader | None = None, boundary: int | None = None
    ) -> int:
        """A request with the prompt `path` starts. Returns how many of its leading blocks were cached.

        `reader` reads and writes the blocks before `boundary`, `next_reader` those after it and reads the ones before; as
        `pool.access.Path`. O(runs of the prefix), O(log n) per run that is split.
        """
        hit = self._hold(path)
        length = len(path)
        if length > hit:
            self._make_room(length - hit)
        boundary = length if boundary is None or next_reader is reader else min(boundary, length)
        self._follow(path, 0, min(hit, boundary), reader)
        if hit < boundary:
            self._write(path, hit, boundary, reader)
        if boundary < length:
            self._join(path, boundary, next_reader)
            if boundary < hit:
                self._follow(path, boundary, hit, next_reader)
            if hit < length:
                self._write(path, max(hit, boundary), length, next_reader)
        return hit

    def finish(self, path: NDArray[np.int64]) -> None:
        """The request with the prompt `path` gives its blocks back, the deepest first. Before it, ranks must be up to date."""
        runs: list[tuple[CachedRun, int]] = []
        position = 0
        while position < len(path):
            run = self._by_first[int(path[position])]
            end = agreed_length(path, run.path, position, min(len(path), run.end))
            runs.append((run, end))
            position = end
        for run, end in reversed(runs):
            before = run.held_end
            run.holds.remove(end)
            held_end = run.held_end
            if held_end == before:
                continue
            if run.is_anonymous and run.start < held_end:
                self._split(run, held_end)
            run.last_freed = next(self._clock)
            self._enqueue(run)
        if self.num_blocks > self.capacity_blocks:
            self._evict(self.num_blocks - self.capacity_blocks)

    def _hold(self, path: NDArray[np.int64]) -> int:
        """Hold what is cached of `path`. Returns how many blocks that is."""
        position = 0
        length = len(path)
        while position < length:
            run = self._by_first.get(int(path[position]))
            if run is None:
                break
            position = agreed_length(path, run.path, position, min(length, run.end))
            run.holds.append(position)
        return position

    # ------------------------------------------------------------------ access sets, as `AccessTable`

    def _follow(self, path: NDArray[np.int64], start: int, end: int, reader: Reader | None) -> None:
        """`reader` reads the cached blocks `[start, end)` of `path`; a run that it leaves before its end is split there."""
        if start >= end:
            return
        runs = self._runs_between(path, start, end)
        for run, leaves in runs:
            self._pass(run, leaves, reader, forks=leaves < end)

    def _join(self, path: NDArray[np.int64], end: int, reader: Reader | None) -> None:
        """`reader` reads the first `end` blocks of `path`, which another one has gone through before it."""
        for run, leaves in self._runs_between(path, 0, end):
            self._pass(run, leaves, reader, forks=False)

    def _runs_between(self, path: NDArray[np.int64], start: int, end: int) -> list[tuple[CachedRun, int]]:
        """The runs of the cached blocks `[start, end)` of `path`, and up to which block it follows each.

        O(runs of the prefix).
        """
        runs: list[tuple[CachedRun, int]] = []
        position = 0
        while position < end:
            run = self._by_first[int(path[position])]
            position = agreed_length(path, run.path, position, min(end, run.end))
            if position > start:
                runs.append((run, position))
        return runs

    def _pass(self, run: CachedRun, index: int, reader: Reader | None, *, forks: bool) -> None:
        if run.end > index and (forks or run.is_anonymous or not run.is_read_by(reader)):
            run = self._split(run, index)
        if run.is_anonymous:
            return
        if run.rank is DEMOTED_RANK:
            self.set_rank(run, ACTIVE_RANK)
        if reader is None:
            if not run.has_unknown_reader:
                run.has_unknown_reader = True
                self.set_rank(run, ACTIVE_RANK)
        elif reader.is_live and reader not in run.readers:
            run.add_reader(reader)
            if run.is_retired:
                self.set_rank(run, ACTIVE_RANK)

    def _write(self, path: NDArray[np.int64], start: int, end: int, reader: Reader | None) -> None:
        """`reader` has computed the blocks `[start, end)` of `path`; the request holds all of it."""
        self.num_blocks += end - start
        if start:
            last, _ = self._runs_between(path, start - 1, start)[0]
            if last.end > start:
                # The path leaves it here: seen already, unless it was another reader who came so far.
                self._pass(last, start, reader, forks=True)
                last, _ = self._runs_between(path, start - 1, start)[0]
            if self._can_grow(last, start, reader):
                last.path = path
                last.end = end
                last.num_blocks[HBM] = end - last.start
                last.holds.remove(start)
                last.holds.append(end)
                return
        run = CachedRun(path, start, end, next(self._serials), is_anonymous=reader is None)
        if reader is None:
            run.has_unknown_reader = True
        elif reader.is_live:
            run.add_reader(reader)
        else:
            run.note_workflow(reader)
            run.rank = retired_rank(1)
        run.holds.append(end)
        self._by_first[int(path[start])] = run

    @staticmethod
    def _can_grow(run: CachedRun, index: int, reader: Reader | None) -> bool:
        if run.is_anonymous or reader is None:
            return run.is_anonymous and reader is None and run.end == index and not run.is_closed
        return run.can_grow(index, reader)

    def _split(self, run: CachedRun, index: int) -> CachedRun:
        """Cut the blocks before `index` off `run`; they form the returned run, with the same readers."""
        front = CachedRun(run.path, run.start, index, next(self._serials), is_anonymous=run.is_anonymous)
        front.has_unknown_reader = run.has_unknown_reader
        front.workflows = set(run.workflows)
        front.rank = run.rank
        for reader in run.readers:
            front.readers.add(reader)
            reader.runs.add(front)
        front.is_closed = True
        front.holds = [min(end, index) for end in run.holds]
        front.last_freed = run.last_freed
        run.holds = [end for end in run.holds if end > index]
        self._by_first[int(run.path[run.start])] = front
        run.start = index
        run.num_blocks[HBM] = run.end - index
        self._by_first[int(run.path[index])] = run
        return front

    def set_rank(self, run: Run, rank: Rank) -> None:
        """As `AccessTable.set_rank`: it becomes the most recently used of its new rank. O(log runs)."""
        if run.rank == rank:
            return
        run.rank = rank
        if isinstance(run, CachedRun):
            self._enqueue(run)

    def end_reader(self, reader: Reader) -> int:
        """As `AccessTable.end`: what nobody else may read is retired. Returns the blocks retired."""
        reader.is_live = False
        retired = 0
        runs = [run for run in reader.runs if isinstance(run, CachedRun)]
        for run in sorted(runs, key=lambda run: (run.last_freed, -run.start)):
            if run.remove_reader(reader):
                self.set_rank(run, retired_rank(run.num_workflows))
                retired += run.num_blocks[HBM]
        return retired

    # ------------------------------------------------------------------ eviction

    def _enqueue(self, run: CachedRun) -> None:
        if run.num_free:
            run.turn = next(self._clock)
            heapq.heappush(self._queue, (run.rank, run.turn, run))
            if len(self._queue) > 8 * len(self._by_first) + 1024:
                self._queue = [entry for entry in self._queue if entry[1] == entry[2].turn and entry[2].num_free]
                heapq.heapify(self._queue)

    def _make_room(self, count: int) -> None:
        missing = self.num_blocks + count - self.capacity_blocks
        if missing > 0:
            self.num_overcommitted += not self._evict(missing)

    def _evict(self, count: int) -> bool:
        """Evict `count` blocks, or all that nobody holds. Returns whether there were so many."""
        if self._before_eviction is not None:
            self._before_eviction()
        queue = self._queue
        while count and queue:
            _, turn, run = queue[0]
            num_free = run.num_free if turn == run.turn else 0
            taken = min(count, num_free)
            if taken:
                count -= taken
                self._shorten(run, run.end - taken)
            if taken == num_free:
                heapq.heappop(queue)
        return not count

    def _shorten(self, run: CachedRun, end: int) -> None:
        self.num_blocks -= run.end - end
        self.num_evicted += run.end - end
        if self._evicted is not None:
            self._evicted(run, end)
        run.end = end
        run.num_blocks[HBM] = end - run.start
        # What follows it is computed anew and may then have other readers: as a run of its own, as in the server.
        run.is_closed = True
        if end == run.start:
            first = int(run.path[end])
            if self._by_first.get(first) is run:
                del self._by_first[first]
            run.num_blocks[HBM] = 1
            run.remove_member(HBM)
