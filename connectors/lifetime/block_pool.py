# SPDX-License-Identifier: Apache-2.0
"""vLLM's block pool with our free list in place of the LRU queue.

EngineCore process, scheduler thread. Everything that vLLM calls on its pool stays: only the queue's order differs, and only
for blocks whose request came with metadata.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from vllm_lifetime.pool.access import HBM_TIER
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Run
from vllm_lifetime.pool.tiered import TieredFreeList

__all__ = ["BlockPlacer", "LifetimeBlockPool", "PoolListener"]


class BlockPlacer(Protocol):
    """Who chooses the tier of new blocks in a pool that has been split. On the hot path."""

    def take(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks, which are free, out of the free lists."""


class PoolListener(Protocol):
    """What the connector's scheduler side wants to know of the pool. Every call is on the hot path."""

    def on_blocks_cached(
        self, request: Request, group_id: int, blocks: Sequence[KVCacheBlock], num_cached: int, num_full: int
    ) -> None:
        """Blocks `num_cached <= i < num_full` of `request` have got their hashes, in KV cache group `group_id`."""

    def on_blocks_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Blocks are about to be handed out; those with a hash lose it now."""

    def on_prefix_cache_reset(self) -> None:
        """Every hash of HBM is gone; the tiers below must follow (R25)."""

    def on_lent_blocks_needed(self) -> None:
        """The free list does not suffice: lent blocks must be given back with `LifetimeBlockPool.take_back`, now."""


class LifetimeBlockPool(BlockPool):
    """`BlockPool` whose `free_block_queue` is a `TierFreeList`.

    Without a listener, or for requests without metadata, its order is stock vLLM's exactly.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.listener: PoolListener | None = None
        # The stock queue gave out its first block as the null block; the new one must not hold it.
        self.free_list: TierFreeList[KVCacheBlock] = TierFreeList(self.blocks, HBM_TIER)
        self.free_list.remove(self.null_block)
        self.free_block_queue = self.free_list  # type: ignore[assignment]
        self._run_of = self.free_list.run_of
        self._placer: BlockPlacer | None = None
        self.num_lent = 0
        """Blocks out of the free list that count as free, because they come back whenever they are needed: see `lend`."""

    def split(self, first_flash_id: int, placer: BlockPlacer) -> TieredFreeList[KVCacheBlock]:
        """Blocks from id `first_flash_id` on lie in flash: keep a free list per tier, from which `placer` takes.

        Raises:
            ValueError: a block has been taken already, or one of the tiers would have none.

        """
        if self.free_list.num_free_blocks != len(self.blocks) - 1:
            raise ValueError(f"{self.free_list.num_free_blocks} of {len(self.blocks) - 1} blocks are free: the pool is in use")
        tiers = TieredFreeList(self.blocks, first_flash_id)
        tiers.remove(self.null_block)
        self.free_list = tiers
        self.free_block_queue = tiers  # type: ignore[assignment]
        self._run_of = tiers.run_of
        self._placer = placer
        return tiers

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        super().cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask)
        if self.listener is not None and num_cached_blocks < num_full_blocks:
            self.listener.on_blocks_cached(request, kv_cache_group_id, blocks, num_cached_blocks, num_full_blocks)

    def get_num_free_blocks(self) -> int:
        return self.free_list.num_free_blocks + self.num_lent

    def lend(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the next blocks for content that nobody waits for. They still count as free, and an allocation that needs them
        gets them (`PoolListener.on_lent_blocks_needed`). Give them back with `take_back`.

        Raises:
            ValueError: fewer blocks are free; nothing is taken.

        """
        if num_blocks > self.free_list.num_free_blocks:
            raise ValueError(f"Cannot lend {num_blocks} blocks, {self.free_list.num_free_blocks} are free")
        blocks = self.get_new_blocks(num_blocks)
        self.num_lent += len(blocks)
        return blocks

    def take_back(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Lent blocks come back, deepest first; those that have been filled take their place by rank, the others are empty."""
        self.num_lent -= len(blocks)
        self.free_blocks(blocks)

    def adopt(self, block: KVCacheBlock, key: BlockHashWithGroupId, num_tokens: int, run: Run | None) -> bool:
        """A lent block has been filled with the content of hash `key`, which ends at `num_tokens` tokens: it can be hit now.

        Returns False, and leaves it empty, if HBM has that content by now. Nobody knows the tokens here: the KV event has the
        hash alone, as those of vLLM's own offloading do.
        """
        if self.cached_block_hash_to_block.get_one_block(key) is not None:
            return False
        self._insert_block_hash(key, block, num_tokens=num_tokens)
        self.free_list.set_run(block, run)
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(
                BlockStored(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    medium=self.medium,
                    lora_name=None,
                    group_idx=get_group_id(key),
                )
            )
        return True

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > self.free_list.num_free_blocks and self.num_lent and self.listener is not None:
            self.listener.on_lent_blocks_needed()
        if num_blocks > self.free_list.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        placer = self._placer
        blocks = self.free_list.popleft_n(num_blocks) if placer is None else placer.take(num_blocks)
        if self.listener is not None:
            self.listener.on_blocks_allocated(blocks)
        if self._reuse_watchers:
            self._notify_reuse(blocks)
        if (
            not self.enable_caching
            or self.metrics_collector
            or self.enable_kv_cache_events
            or self.cached_block_hashes_by_block
            or placer is not None
        ):
            self._hand_out(blocks)
            return blocks
        # What `_hand_out` comes to when all are HBM's and nobody wants to be told: one loop instead of four calls per block.
        run_of = self._run_of
        forget = self.cached_block_hash_to_block.pop
        for block in blocks:
            key = block.block_hash
            if key is not None:
                block_id = block.block_id
                run = run_of[block_id]
                if run is not None:
                    run_of[block_id] = None
                    run.remove_member(HBM_TIER)
                forget(key, block_id)
                block.reset_hash()
            block.ref_cnt += 1
        return blocks

    def _hand_out(self, blocks: Sequence[KVCacheBlock]) -> None:
        collector = self.metrics_collector
        for block in blocks:
            if self.enable_caching:
                self._maybe_evict_cached_block(block)
            block.ref_cnt += 1
            if collector:
                collector.on_block_allocated(block)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        collector = self.metrics_collector
        if len(blocks) == 1:
            block = blocks[0]
            if block.ref_cnt == 0 and not block.is_null:
                self.free_list.remove(block)
            block.ref_cnt += 1
            if collector:
                collector.on_block_accessed(block)
            return
        free = []
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                free.append(block)
            block.ref_cnt += 1
            if collector:
                collector.on_block_accessed(block)
        self.free_list.remove_n(free)

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        blocks = list(blocks)
        super().unpin_blocks(blocks, on_reuse)
        for block in blocks:
            if block.ref_cnt == 0 and block.block_hash is None:
                self.free_list.keep_turn(block)

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        # Every way in which a block loses its hash comes through here: eviction, partial blocks that fill up, moved hashes.
        if block.block_hash is not None and (block.next_free_block is not None or self._run_of[block.block_id] is not None):
            self.free_list.forget_hash(block)
        return super()._remove_cached_block_hashes(block)

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        self.free_list.forget_all_hashes()
        if self.listener is not None:
            self.listener.on_prefix_cache_reset()
        return True

    def twin_of(self, block: KVCacheBlock) -> KVCacheBlock | None:
        """Another block with the same content, if vLLM computed it twice."""
        if block.block_hash is None:
            return None
        twin = self.cached_block_hash_to_block.get_one_block(block.block_hash)
        return None if twin is block else twin
