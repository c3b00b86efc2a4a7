# SPDX-License-Identifier: Apache-2.0
"""What `free_list.TierFreeList` links together: blocks, runs' nodes, and the ends of circular lists."""

from typing import Any, Protocol

from vllm_lifetime.pool.runs import Rank, Run

__all__ = ["Bucket", "FreeBlock", "Ring", "RunNode"]


class FreeBlock(Protocol):
    """What the free list needs of a block: vLLM's `KVCacheBlock` and our `Slot` both have it.

    The two links belong to the free list while the block is in it and are None otherwise.
    """

    block_id: int
    # Any: the neighbours of a block are blocks, runs' nodes or the ends of a list.
    prev_free_block: Any
    next_free_block: Any

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Prefix length in tokens that the block's hash covers; its depth."""


class Ring:
    """The end of a circular list: `next` is its first node, `prev` its last."""

    __slots__ = ("block_id", "next_free_block", "prev_free_block")

    def __init__(self) -> None:
        self.block_id = -1
        self.clear()

    def clear(self) -> None:
        """Take everything out; the elements keep their links."""
        self.prev_free_block: Ring = self
        self.next_free_block: Ring = self

    def is_empty(self) -> bool:
        """Whether nothing is linked."""
        return self.next_free_block is self


class Bucket(Ring):
    """All nodes of one rank, or of one rank group, least recently freed first.

    `turn` is the number of its valid entry in the queue of buckets; 0 while it is in none.
    """

    __slots__ = ("rank", "turn")

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self.rank = rank
        self.turn = 0


class RunNode(Ring):
    """A run in its bucket: linked there by its own links, its free blocks on `chain`, deepest first."""

    __slots__ = ("bucket", "chain", "count", "hint", "last_freed", "run")

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.chain = Ring()
        self.count = 0
        self.bucket: Bucket | None = None
        # Where the last block went in: blocks are freed deepest first, so the next one usually follows it.
        self.hint: Any = self.chain
        self.last_freed = 0
