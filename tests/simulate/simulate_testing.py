# SPDX-License-Identifier: Apache-2.0
"""Small traces made up by hypothesis, and a cache that is simulated block by block with the server's free list and access
table."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from vllm_lifetime.pool.access import AccessTable, Path
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Rank, Reader, Run
from vllm_lifetime.pool.tiers import Slot

HBM = 0


class Prefixes:
    """Numbers prefixes: two prompts share a block's id if they agree up to it."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], int] = {}

    def blocks(self, content: tuple[int, ...]) -> NDArray[np.int64]:
        return np.array([self._ids.setdefault(content[: i + 1], len(self._ids)) for i in range(len(content))], np.int64)


contents = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)


class BlockCache:
    """vLLM's pool over `TierFreeList`, with as many blocks again for what does not fit; those are never left cached."""

    def __init__(self, capacity_blocks: int) -> None:
        self.blocks = [Slot(i) for i in range(capacity_blocks)]
        self.free_list: TierFreeList[Slot] = TierFreeList(self.blocks, HBM)
        self.by_id: dict[int, Slot] = {}
        self.access = AccessTable([self.free_list], lambda key: [], lambda block: None)
        self.evicted: list[int] = []

    def fits(self, path: NDArray[np.int64]) -> bool:
        hits = self._hits(path)
        num_free_hits = sum(block.ref_cnt == 0 for block in hits)
        return len(path) - len(hits) <= self.free_list.num_free_blocks - num_free_hits

    def _hits(self, path: NDArray[np.int64]) -> list[Slot]:
        hits: list[Slot] = []
        for number in path.tolist():
            if number not in self.by_id:
                break
            hits.append(self.by_id[number])
        return hits

    def start(self, path: NDArray[np.int64], access_path: Path) -> tuple[int, list[Slot]]:
        blocks = self._hits(path)
        hit = len(blocks)
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_list.remove(block)
            block.ref_cnt += 1
        new = self.free_list.popleft_n(len(path) - hit)
        for block in new:
            if block.block_hash is not None:
                self.free_list.forget_hash(block)
                number = int.from_bytes(block.block_hash, "little")
                self.evicted.append(number)
                del self.by_id[number]
            block.ref_cnt = 1
        self.access.read(access_path, blocks, hit)
        blocks += new
        for index in range(hit, len(path)):
            number = int(path[index])
            assert number not in self.by_id
            blocks[index].block_hash = number.to_bytes(8, "little")
            blocks[index].block_hash_num_tokens = 16 * (index + 1)
            self.by_id[number] = blocks[index]
        self.access.write(access_path, blocks, len(path))
        return hit, blocks

    def finish(self, blocks: list[Slot]) -> None:
        freed = []
        for block in reversed(blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_list.append_n(freed)

    def set_rank(self, run: Run, rank: Rank) -> None:
        self.access.set_rank(run, rank)


def rank_by_readers(reader_scores: dict[Reader, float], run: Run) -> Rank:
    """A rank that, as any sum over readers, is never lower for a prefix than for what follows it."""
    return (1, sum(reader_scores.get(reader, 0.0) for reader in run.readers) or 0.0, 0.0)
