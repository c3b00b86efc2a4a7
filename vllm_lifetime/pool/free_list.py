# SPDX-License-Identifier: Apache-2.0
"""One tier's free list: the blocks that nobody references, in the order in which they are handed out.

Order, first handed out first:

1. *empty* blocks (no hash), most recently freed first: vLLM's order for blocks that cannot be hit;
2. *buckets* by rank, lowest first (`runs.Rank`). In a bucket the least recently freed node comes first. A node is either one
   block of no run (its request had no metadata) or one run, which hands out its free blocks deepest first. A rank group has a
   bucket of its own, so that all its runs move at once; of buckets of equal rank the one that got it first goes first.

Without metadata there are no runs, every block with a hash stands in the bucket `ACTIVE_RANK`, and the order is that of
vLLM's `FreeKVCacheBlockQueue`, block by block: same calls, same order. That bucket as a whole may be given another place among
the active ones (`set_common_rank`); what stands in it keeps its order.

The list is intrusive, like vLLM's: it links the blocks' own `prev_free_block` and `next_free_block` and allocates nothing
per block. One thread (the scheduler's) uses it.

Costs: `append_n`, `prepend_n`, `remove`, `popleft_n` are O(1) per block; `set_rank` is O(log buckets) per run whatever the run's
length, `set_group_rank` O(log buckets) whatever the number of runs.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

from vllm_lifetime.pool.nodes import Bucket, FreeBlock, Ring, RunNode
from vllm_lifetime.pool.runs import ACTIVE_RANK, Rank, RankGroup, Run

__all__ = ["TierFreeList"]


Block = TypeVar("Block", bound=FreeBlock)

_MIN_BUCKETS = 64
"""With fewer buckets, or entries of the queue, than this it is not worth looking for those that are left over."""

_Entry = tuple[Rank, int, Bucket]
"""A bucket's place in the queue: its rank, and a number that grows from entry to entry. Valid while it is the bucket's `turn`."""


class TierFreeList(Generic[Block]):
    """The free list of tier number `tier`; see the module for its order.

    Has the methods of vLLM's `FreeKVCacheBlockQueue` (`popleft`, `popleft_n`, `remove`, `append`, `append_n`, `prepend_n`,
    `get_all_free_blocks`, `iter_blocks_after`, `num_free_blocks`), so that it can stand in its place.

    Args:
        blocks: the blocks of the tier, indexed by `block_id`; all start empty, in this order.
        tier: index into `Run.nodes` and `Run.num_blocks`.

    """

    # No __slots__: vLLM's pool is free to hang attributes on its queue.

    def __init__(self, blocks: Sequence[Block], tier: int) -> None:
        self.tier = tier
        self.run_of: list[Run | None] = [None] * len(blocks)
        self.num_free_blocks = 0
        self.num_empty_blocks = 0
        self.num_retired_blocks = 0
        self._empty = Ring()
        self._active = Bucket(ACTIVE_RANK)
        self._buckets: dict[Rank, Bucket] = {ACTIVE_RANK: self._active}
        self._queue: list[_Entry] = []
        self._num_turns = 0
        self._max_buckets = _MIN_BUCKETS
        self._max_entries = _MIN_BUCKETS
        self._clock = 0
        # Blocks that lost their hash while free, or had none, keep their turn, as in vLLM: they are not in the empty list.
        self._unhashed_in_order: set[int] = set()
        self.prepend_n(blocks)

    # ------------------------------------------------------------------ taking blocks

    def popleft(self) -> Block:
        """Take the first block.

        Raises:
            ValueError: the list is empty.

        """
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Block]:
        """Take the first `n` blocks.

        Raises:
            ValueError: fewer than `n` blocks are free; nothing is taken.

        """
        if not 0 <= n <= self.num_free_blocks:
            raise ValueError(f"{n} blocks were asked for, {self.num_free_blocks} are free")
        if n == 1 and not self.num_empty_blocks and not self._unhashed_in_order:
            # One block per 16 or so decoded tokens of each request: the commonest call by far.
            _, turn, bucket = self._queue[0]
            if bucket is not self._active or turn != bucket.turn:
                bucket = self._lowest_bucket()
            node = ring = bucket.next_free_block
            if node is not bucket:
                if isinstance(node, RunNode):
                    ring = node.chain.next_free_block
                after = ring.next_free_block
                before = ring.prev_free_block
                before.next_free_block = after
                after.prev_free_block = before
                ring.prev_free_block = ring.next_free_block = None  # type: ignore[assignment]
                self.num_free_blocks -= 1
                if isinstance(node, RunNode):
                    if node.hint is ring:
                        node.hint = node.chain
                    self._shrink(node, 1)
                return [ring]  # type: ignore[list-item]
        taken: list[Block] = []
        self.num_free_blocks -= n
        if self.num_empty_blocks:
            left = self._take(self._empty, n, taken)
            self.num_empty_blocks -= n - left
        else:
            left = n
        while left > 0:
            bucket = self._lowest_bucket()
            node = bucket.next_free_block
            if isinstance(node, RunNode):
                wanted = left
                left = self._take(node.chain, left, taken)
                if node.hint.next_free_block is None:  # it was taken
                    node.hint = node.chain
                self._shrink(node, wanted - left)
            else:
                left = self._take(bucket, left, taken)
        if self._unhashed_in_order:
            self._unhashed_in_order.difference_update(block.block_id for block in taken)
        return taken

    def remove(self, block: Block) -> None:
        """Take `block` out of the middle.

        Raises:
            RuntimeError: the block is not in the list.

        """
        before = block.prev_free_block
        after = block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"remove() called on a block that is not free: {block}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
        run = self.run_of[block.block_id]
        if run is not None:
            node: RunNode = run.nodes[self.tier]  # type: ignore[assignment]
            if node.hint is block:
                node.hint = before
            self._shrink(node, 1)
        elif (self.num_empty_blocks or self._unhashed_in_order) and block.block_hash_num_tokens is None:
            self._unlinked_without_hash(block)

    def remove_n(self, blocks: Sequence[Block]) -> None:
        """`remove` for each of `blocks`: the blocks of a prefix hit.

        Raises:
            RuntimeError: a block is not in the list.

        """
        run_of = self.run_of
        may_be_empty = self.num_empty_blocks or self._unhashed_in_order
        open_run: Run | None = None
        node: RunNode | None = None
        count = 0
        for block in blocks:
            before = block.prev_free_block
            after = block.next_free_block
            if before is None or after is None:
                raise RuntimeError(f"remove_n() called on a block that is not free: {block}")
            before.next_free_block = after
            after.prev_free_block = before
            block.prev_free_block = block.next_free_block = None
            run = run_of[block.block_id]
            if run is not None:
                if run is not open_run:
                    if node is not None:
                        self._shrink(node, count)
                    open_run, count = run, 0
                    node = run.nodes[self.tier]  # type: ignore[assignment]
                count += 1
                if node.hint is block:  # type: ignore[union-attr]
                    node.hint = before  # type: ignore[union-attr]
            elif may_be_empty and block.block_hash_num_tokens is None:
                self._unlinked_without_hash(block)
        if node is not None:
            self._shrink(node, count)
        self.num_free_blocks -= len(blocks)

    # ------------------------------------------------------------------ giving blocks back

    def append(self, block: Block) -> None:
        """Give one block back as the most recently used of its rank."""
        self.append_n((block,))

    def append_n(self, blocks: Sequence[Block]) -> None:
        """Give back blocks that have a hash, each as the most recently used of its rank so far."""
        run_of = self.run_of
        # Blocks of one run that follow one another, or of none, go between `place` and `after`.
        open_run: Run | None = None
        node: RunNode | None = None
        after: Ring = self._active
        place = after.prev_free_block
        count = after_depth = depth = 0
        for block in blocks:
            run = run_of[block.block_id]
            if run is not None:
                block_depth = block.block_hash_num_tokens or 0
                if run is not open_run or not after_depth <= block_depth <= depth:
                    place.next_free_block = after
                    after.prev_free_block = place
                    if node is not None:
                        self._grow(node, count, place)
                    open_run, count = run, 0
                    node = self._node_of(run)
                    after = self._place_in_chain(node, block_depth)
                    after_depth = 0 if after is node.chain else after.block_hash_num_tokens or 0  # type: ignore[attr-defined]
                    place = after.prev_free_block
                depth = block_depth
                count += 1
            elif node is not None:
                place.next_free_block = after
                after.prev_free_block = place
                self._grow(node, count, place)
                open_run = node = None
                after = self._active
                place = after.prev_free_block
            block.prev_free_block = place
            place.next_free_block = block  # type: ignore[assignment]
            place = block  # type: ignore[assignment]
        place.next_free_block = after
        after.prev_free_block = place
        if node is not None:
            self._grow(node, count, place)
        self.num_free_blocks += len(blocks)
        if not self._active.turn and not self._active.is_empty():
            self._enqueue(self._active)

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        """Give back blocks that hold nothing worth keeping: the first of them is handed out next."""
        ring = self._empty
        first = ring.next_free_block
        last: Ring = ring
        for block in blocks:
            block.prev_free_block = last
            last.next_free_block = block  # type: ignore[assignment]
            last = block  # type: ignore[assignment]
        last.next_free_block = first
        first.prev_free_block = last
        self.num_free_blocks += len(blocks)
        self.num_empty_blocks += len(blocks)

    # ------------------------------------------------------------------ runs

    def set_rank(self, run: Run) -> None:
        """Move `run` to the bucket of its present rank, as the most recently used there."""
        node = run.nodes[self.tier]
        if not isinstance(node, RunNode) or node.bucket is None:
            return
        was_retired = node.bucket.rank[0] == 0
        self._unlink_node(node)
        self._link_node(node)
        if was_retired != run.is_retired:
            self.num_retired_blocks += node.count if run.is_retired else -node.count

    def set_group_rank(self, group: RankGroup) -> None:
        """`group` has got another rank, and neither it nor the one before is `ACTIVE_RANK`: move its bucket there."""
        bucket = group.buckets[self.tier]
        if isinstance(bucket, Bucket):
            bucket.rank = group.rank
            if bucket.next_free_block is not bucket:
                self._enqueue(bucket)
            else:
                bucket.turn = 0

    @property
    def common_rank(self) -> Rank:
        """The rank of the bucket `ACTIVE_RANK`, of all that has no other: that one, unless it was given another."""
        return self._active.rank

    def set_common_rank(self, rank: Rank) -> None:
        """Let what has the rank `ACTIVE_RANK` stand where `rank` is, another active one. O(log buckets)."""
        bucket = self._active
        bucket.rank = rank
        if bucket.is_empty():
            bucket.turn = 0
        else:
            self._enqueue(bucket)

    def rank_of(self, run: Run | None) -> Rank:
        """Where a run's blocks, or those of no run, stand in this tier."""
        return self._active.rank if run is None or run.rank == ACTIVE_RANK else run.rank

    def last_freed(self, run: Run) -> int:
        """When a block of `run` was last given back here, as a sequence number; 0 is never."""
        node = run.nodes[self.tier]
        return node.last_freed if isinstance(node, RunNode) else 0

    def set_run(self, block: Block, run: Run | None) -> None:
        """Make `block` a member of `run`, free or not. O(1) if `run` frees deepest first, as vLLM does."""
        block_id = block.block_id
        old = self.run_of[block_id]
        if old is run:
            return
        is_free = block.next_free_block is not None
        if is_free:
            self.remove(block)
        self.run_of[block_id] = run
        if run is not None:
            run.add_member(self.tier)
        if old is not None:
            old.remove_member(self.tier)
        if is_free:
            self.append_n((block,))

    def keep_turn(self, block: Block) -> None:
        """`block` was given back with `append` though it has no hash, because somebody still reads it (`unpin_blocks`)."""
        self._unhashed_in_order.add(block.block_id)

    def forget_hash(self, block: Block) -> None:
        """`block` is about to lose its hash: it leaves its run. A free block of no run keeps its turn, as in vLLM."""
        run = self.run_of[block.block_id]
        is_free = block.next_free_block is not None
        if run is None:
            if is_free and block.block_hash_num_tokens is not None:
                self._unhashed_in_order.add(block.block_id)
            return
        if is_free:
            self.remove(block)
        self.run_of[block.block_id] = None
        run.remove_member(self.tier)
        if is_free:
            self.prepend_n((block,))

    def forget_all_hashes(self) -> None:
        """Every block is free and loses its hash (a prefix-cache reset): all become empty, in the order they had. O(blocks)."""
        blocks = list(self.iter_blocks_after(None))
        for block in blocks:
            run = self.run_of[block.block_id]
            if run is not None:
                self.run_of[block.block_id] = None
                run.remove_member(self.tier)
                run.nodes[self.tier] = None
        self._empty.clear()
        for _, _, bucket in self._queue:
            bucket.clear()
            bucket.turn = 0
        self._buckets = {ACTIVE_RANK: self._active}
        self._queue.clear()
        self._unhashed_in_order.clear()
        self.num_free_blocks = self.num_empty_blocks = self.num_retired_blocks = 0
        self.prepend_n(blocks)

    # ------------------------------------------------------------------ looking

    def get_all_free_blocks(self) -> list[Block]:
        """All blocks in the order in which they would be handed out. O(n); for tests and tools."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Blocks in the order in which they would be handed out, after `cursor` (from the first if None).

        The list must not change meanwhile. O(1) per block, and O(n) to find a cursor.
        """
        blocks = self._iter_all()
        if cursor is not None:
            for block in blocks:
                if block.block_id == cursor.block_id:
                    break
        return blocks

    def iter_cached_blocks(self) -> Iterator[Block]:
        """Free blocks that an active workflow, or nobody known, may still read, in eviction order.

        Skips the empty and the retired ones without walking them. The list must not change meanwhile.
        """
        for bucket in self._iter_buckets():
            if bucket.rank[0] != 0:
                yield from self._iter_bucket(bucket)

    def iter_common_blocks(self) -> Iterator[Block]:
        """Free blocks of the rank `ACTIVE_RANK`, least recently freed first. The list must not change meanwhile."""
        return self._iter_bucket(self._active)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that hold what an active workflow, or nobody known, may still read."""
        return self.num_free_blocks - self.num_empty_blocks - self.num_retired_blocks

    # ------------------------------------------------------------------ inside

    def _iter_all(self) -> Iterator[Block]:
        yield from self._iter_ring(self._empty)
        for bucket in self._iter_buckets():
            yield from self._iter_bucket(bucket)

    def _iter_buckets(self) -> Iterator[Bucket]:
        """The buckets that hold something, lowest rank first. O(buckets), and O(log buckets) for each one taken."""
        queue = self._queue.copy()
        while queue:
            _, turn, bucket = heapq.heappop(queue)
            if bucket.turn == turn:
                yield bucket

    def _iter_bucket(self, bucket: Bucket) -> Iterator[Block]:
        node = bucket.next_free_block
        while node is not bucket:
            if isinstance(node, RunNode):
                yield from self._iter_ring(node.chain)
            else:
                yield node  # type: ignore[misc]
            node = node.next_free_block

    def _iter_ring(self, ring: Ring) -> Iterator[Block]:
        node = ring.next_free_block
        while node is not ring:
            yield node  # type: ignore[misc]
            node = node.next_free_block

    @staticmethod
    def _take(ring: Ring, limit: int, taken: list[Block]) -> int:
        """Unlink up to `limit` blocks from the front of `ring`, stopping before a run's node; returns what is left of `limit`."""
        node = ring.next_free_block
        append = taken.append
        while limit and node.block_id >= 0:
            append(node)  # type: ignore[arg-type]
            after = node.next_free_block
            node.prev_free_block = node.next_free_block = None  # type: ignore[assignment]
            node = after
            limit -= 1
        ring.next_free_block = node
        node.prev_free_block = ring
        return limit

    def _unlinked_without_hash(self, block: Block) -> None:
        """`block`, without a hash, has been taken out of the middle: of the empty list, unless it kept its turn."""
        if block.block_id in self._unhashed_in_order:
            self._unhashed_in_order.discard(block.block_id)
        else:
            self.num_empty_blocks -= 1

    def _lowest_bucket(self) -> Bucket:
        """The bucket of lowest rank that has a node; drops the empty ones it meets. O(log buckets) amortised."""
        queue = self._queue
        while True:
            _, turn, bucket = queue[0]
            if bucket.turn == turn:
                if bucket.next_free_block is not bucket:
                    return bucket
                self._dequeue(bucket)
            heapq.heappop(queue)

    def _dequeue(self, bucket: Bucket) -> None:
        """An empty bucket's entry is void from now on; nobody needs a rank that no run has."""
        bucket.turn = 0
        if bucket is not self._active and self._buckets.get(bucket.rank) is bucket:
            del self._buckets[bucket.rank]

    def _drop_empty_buckets(self) -> None:
        """Forget ranks that runs have left. O(buckets), but O(1) amortised."""
        for bucket in list(self._buckets.values()):
            if bucket.is_empty():
                self._dequeue(bucket)
        self._max_buckets = 2 * len(self._buckets) + _MIN_BUCKETS

    def _enqueue(self, bucket: Bucket) -> None:
        """Give `bucket` a place in the queue by its rank, behind those that have the same; an entry that it had is void."""
        if len(self._queue) >= self._max_entries:
            self._queue = [entry for entry in self._queue if entry[2].turn == entry[1]]
            heapq.heapify(self._queue)
            self._max_entries = 2 * len(self._queue) + _MIN_BUCKETS
        self._num_turns += 1
        bucket.turn = self._num_turns
        heapq.heappush(self._queue, (bucket.rank, bucket.turn, bucket))

    def _node_of(self, run: Run) -> RunNode:
        node = run.nodes[self.tier]
        if not isinstance(node, RunNode):
            node = run.nodes[self.tier] = RunNode(run)
        return node

    def _grow(self, node: RunNode, count: int, last: Ring) -> None:
        """`count` blocks have come to `node`'s chain, `last` as the last: it is the most recently freed of its bucket now."""
        node.hint = last
        node.count += count
        if node.run.is_retired:
            self.num_retired_blocks += count
        self._clock += 1
        node.last_freed = self._clock
        bucket = node.bucket
        if bucket is None:
            self._link_node(node)
        elif bucket.prev_free_block is not node:
            before, after, newest = node.prev_free_block, node.next_free_block, bucket.prev_free_block
            before.next_free_block = after
            after.prev_free_block = before
            node.prev_free_block = newest
            node.next_free_block = bucket
            newest.next_free_block = bucket.prev_free_block = node

    @staticmethod
    def _place_in_chain(node: RunNode, depth: int) -> Ring:
        """The chain's element before which a block of `depth` belongs (deepest first); O(1) behind the last one placed."""
        chain = node.chain
        last = chain.prev_free_block
        if last is chain or (last.block_hash_num_tokens or 0) >= depth:  # type: ignore[attr-defined]
            return chain
        place = node.hint
        if place is not chain and (place.block_hash_num_tokens or 0) < depth:
            place = chain
        place = place.next_free_block
        while place is not chain and (place.block_hash_num_tokens or 0) > depth:
            place = place.next_free_block
        ring: Ring = place
        return ring

    def _shrink(self, node: RunNode, count: int) -> None:
        """`count` blocks have left `node`'s chain."""
        node.count -= count
        if node.run.is_retired:
            self.num_retired_blocks -= count
        if node.count == 0:
            self._unlink_node(node)

    def _bucket_of(self, run: Run) -> Bucket:
        """Where `run` stands: in its group's bucket, or in that of its rank."""
        group = run.group
        rank = run.rank
        if group is not None and rank is not ACTIVE_RANK:
            own = group.buckets[self.tier]
            if not isinstance(own, Bucket):
                own = group.buckets[self.tier] = Bucket(rank)
            return own
        bucket = self._buckets.get(rank)
        if bucket is None:
            if len(self._buckets) >= self._max_buckets:
                self._drop_empty_buckets()
            bucket = self._buckets[rank] = Bucket(rank)
        return bucket

    def _link_node(self, node: RunNode) -> None:
        bucket = self._bucket_of(node.run)
        last = bucket.prev_free_block
        node.prev_free_block = last
        node.next_free_block = bucket
        last.next_free_block = node
        bucket.prev_free_block = node
        node.bucket = bucket
        if not bucket.turn:
            self._enqueue(bucket)

    @staticmethod
    def _unlink_node(node: RunNode) -> None:
        node.prev_free_block.next_free_block = node.next_free_block
        node.next_free_block.prev_free_block = node.prev_free_block
        node.prev_free_block = node.next_free_block = node
        node.bucket = None
