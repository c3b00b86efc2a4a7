# SPDX-License-Identifier: Apache-2.0
"""The cache over runs hits and evicts exactly what a pool of blocks does with the server's free list and access table."""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from simulate_testing import BlockCache, Prefixes, contents, rank_by_readers

from vllm_lifetime.pool.access import Path
from vllm_lifetime.pool.runs import DEMOTED_RANK, Reader, Run
from vllm_lifetime.pool.tiers import Slot
from vllm_lifetime.simulate.cache import CachedRun, RunCache

NUM_WORKFLOWS = 3


@dataclass
class Side:
    """One of the two caches, with readers of its own."""

    cache: RunCache | BlockCache
    readers: list[Reader] = field(default_factory=lambda: [Reader(f"w{i % NUM_WORKFLOWS}") for i in range(NUM_WORKFLOWS * 2)])
    running: list[tuple[NDArray[np.int64], list[Slot]]] = field(default_factory=list)
    scores: dict[Reader, float] = field(default_factory=dict)

    def start(self, path: NDArray[np.int64], who: int | None, boundary: int) -> int:
        reader = None if who is None else self.readers[who]
        output = None if who is None else self.readers[who + NUM_WORKFLOWS]
        if isinstance(self.cache, RunCache):
            hit = self.cache.start(path, reader, output, boundary)
            self.running.append((path, []))
        else:
            hit, blocks = self.cache.start(path, Path(reader, output, boundary))
            self.running.append((path, blocks))
        return hit

    def finish(self, index: int) -> None:
        path, blocks = self.running.pop(index)
        if isinstance(self.cache, RunCache):
            self.cache.finish(path)
        else:
            self.cache.finish(blocks)

    def end(self, who: int) -> int:
        reader = self.readers[who]
        self.readers[who] = Reader(reader.workflow_id)
        return self.cache.end_reader(reader) if isinstance(self.cache, RunCache) else sum(self.cache.access.end(reader))

    def give_score(self, who: int, score: float) -> None:
        """Deepest first, as `AccessTable.end` does: of equals a prefix then stays longer than what follows it."""
        reader = self.readers[who]
        self.scores[reader] = score
        for run in self.deepest_first(reader):
            if not run.is_retired:
                self.cache.set_rank(run, rank_by_readers(self.scores, run))

    def deepest_first(self, reader: Reader) -> list[Run]:
        """The same order on both sides: of two that begin equally deep, the one that was freed before the other."""
        if isinstance(self.cache, BlockCache):
            last_freed = self.cache.free_list.last_freed
            return sorted(reader.runs, key=lambda run: (-run.start, last_freed(run)))
        runs = [run for run in reader.runs if isinstance(run, CachedRun)]
        return [*sorted(runs, key=lambda run: (-run.start, run.last_freed))]

    def demote(self, who: int) -> None:
        for run in self.deepest_first(self.readers[who]):
            if len(run.readers) == 1 and not run.is_retired:
                self.cache.set_rank(run, DEMOTED_RANK)

    def cached(self) -> set[int]:
        """The ids of all cached blocks."""
        if isinstance(self.cache, BlockCache):
            return set(self.cache.by_id)
        return {int(block) for run in self.cache.runs() for block in run.path[run.start : run.end]}


@settings(max_examples=250, deadline=None)
@given(data=st.data(), capacity=st.integers(6, 16), named=st.sampled_from(["nobody", "everybody", "some"]))
def test_hits_and_evictions_are_those_of_the_servers_pool(data: st.DataObject, capacity: int, named: str) -> None:
    prefixes = Prefixes()
    runs, blocks = Side(RunCache(capacity)), Side(BlockCache(capacity))
    sides = (runs, blocks)
    workflows = st.integers(0, NUM_WORKFLOWS - 1)
    names = {"nobody": st.none(), "everybody": workflows, "some": st.none() | workflows}[named]
    for _ in range(data.draw(st.integers(1, 40))):
        kind = data.draw(st.sampled_from(["start", "start", "finish", "finish", "end", "score", "demote"]))
        if kind == "start":
            path = prefixes.blocks(data.draw(contents))
            assert isinstance(blocks.cache, BlockCache)
            if not blocks.cache.fits(path):
                continue
            who, boundary = data.draw(names), data.draw(st.integers(0, 6))
            hit, expected = (side.start(path, who, boundary) for side in sides)
            assert hit == expected
        elif kind == "finish" and runs.running:
            index = data.draw(st.integers(0, len(runs.running) - 1))
            for side in sides:
                side.finish(index)
        elif kind == "end":
            who = data.draw(st.integers(0, 2 * NUM_WORKFLOWS - 1))
            retired, expected = (side.end(who) for side in sides)
            assert retired == expected
        elif kind == "score":
            who, score = data.draw(st.integers(0, 2 * NUM_WORKFLOWS - 1)), data.draw(st.integers(0, 3))
            for side in sides:
                side.give_score(who, score)
        elif kind == "demote":
            who = data.draw(st.integers(0, 2 * NUM_WORKFLOWS - 1))
            for side in sides:
                side.demote(who)
        assert runs.cached() == blocks.cached()
