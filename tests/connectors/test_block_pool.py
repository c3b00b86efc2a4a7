# SPDX-License-Identifier: Apache-2.0
"""Without metadata our block pool is stock vLLM's, operation by operation."""

import logging
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.pool.access import HBM_TIER, AccessTable, Path
from vllm_lifetime.pool.runs import Reader

BLOCK_SIZE = 16
PREFIXES = 3
MAX_BLOCKS = 6
"""Longest request; PREFIXES * MAX_BLOCKS different hashes, so that a pool of a dozen blocks meets duplicates."""

SETTINGS = settings(max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True)
def quiet_vllm() -> Iterator[None]:
    """The stock pool logs every reset, also a refused one."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def block_hash(prefix: int, index: int) -> bytes:
    """Hash of block `index` of prefix number `prefix`."""
    return bytes([prefix, index]) * 16


def hashes_of(prefix: int) -> list[bytes]:
    return [block_hash(prefix, index) for index in range(MAX_BLOCKS)]


class RecordingCollector:
    """Stands for `KVCacheMetricsCollector`: which block, which event."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        self.calls.append(("allocated", block.block_id))

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        self.calls.append(("accessed", block.block_id))

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        self.calls.append(("evicted", block.block_id))

    def reset(self) -> None:
        self.calls.append(("reset", -1))


class UnknownListener:
    """A connector all of whose requests come without metadata: every write goes through an `AccessTable`."""

    def __init__(self, pool: LifetimeBlockPool) -> None:
        self.pool = pool
        self.table = AccessTable([pool.free_list], lambda _hash: (), pool.twin_of)
        self.handed_out: list[int] = []
        self.num_resets = 0

    def on_blocks_cached(
        self, request: Any, group_id: int, blocks: Sequence[KVCacheBlock], num_cached: int, num_full: int
    ) -> None:
        assert group_id == 0
        path = Path(None)
        self.table.read(path, blocks, num_cached)
        self.table.write(path, blocks, num_full)

    def on_blocks_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.handed_out += [block.block_id for block in blocks]

    def on_prefix_cache_reset(self) -> None:
        self.num_resets += 1


class Running:
    """A request that holds blocks, by id because each pool has its own."""

    def __init__(self, prefix: int, ids: list[int], num_cached: int) -> None:
        self.prefix = prefix
        self.ids = ids
        self.num_cached = num_cached
        self.block_hashes = hashes_of(prefix)


class Lockstep(RuleBasedStateMachine):
    """Drives a stock pool and ours with the same calls; every answer and the whole queue must agree."""

    enable_caching = True
    has_listener = False

    @initialize(num_blocks=st.integers(1, 14))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.collectors = (RecordingCollector(), RecordingCollector())
        self.stock, self.ours = (
            cls(num_blocks, self.enable_caching, BLOCK_SIZE, enable_kv_cache_events=False, metrics_collector=collector)  # type: ignore[arg-type]
            for cls, collector in zip((BlockPool, LifetimeBlockPool), self.collectors, strict=True)
        )
        self.pools: tuple[BlockPool, BlockPool] = (self.stock, self.ours)
        self.listener = UnknownListener(self.ours) if self.has_listener else None
        self.ours.listener = self.listener
        self.running: list[Running] = []
        self.reused: tuple[list[int], list[int]] = ([], [])

    # ------------------------------------------------------------------ helpers

    def both(self, call: Callable[[BlockPool], Any]) -> Any:
        """The same call on both pools; the same answer, or the same exception."""
        answers = []
        for pool in self.pools:
            try:
                answer: Any = call(pool)
            except ValueError as error:
                answer = ("ValueError", str(error))
            answers.append(answer)
        assert answers[0] == answers[1]
        return answers[0]

    def allocate_ids(self, count: int) -> list[int]:
        count = min(count, self.stock.get_num_free_blocks())
        return self.both(lambda pool: [block.block_id for block in pool.get_new_blocks(count)])

    def pick(self, number: int) -> Running:
        return self.running[number % len(self.running)]

    @staticmethod
    def blocks(pool: BlockPool, ids: Sequence[int]) -> list[KVCacheBlock]:
        return [pool.blocks[i] for i in ids]

    def release(self, ids: Sequence[int]) -> None:
        self.both(lambda pool: pool.free_blocks(iter(self.blocks(pool, ids))))

    # ------------------------------------------------------------------ what the scheduler does

    @rule(prefix=st.integers(0, PREFIXES - 1), count=st.integers(0, MAX_BLOCKS))
    def new_request_without_a_hit(self, prefix: int, count: int) -> None:
        self.running.append(Running(prefix, self.allocate_ids(count), 0))

    @rule(prefix=st.integers(0, PREFIXES - 1), count=st.integers(0, MAX_BLOCKS))
    def new_request_with_a_hit(self, prefix: int, count: int) -> None:
        hit: list[int] = []
        for block_hash_ in hashes_of(prefix):
            found = self.both(lambda pool, h=block_hash_: _ids(pool.get_cached_block(h, [0])))
            if found is None:
                break
            hit += found
        self.both(lambda pool: pool.touch(self.blocks(pool, hit)))
        ids = hit + self.allocate_ids(min(count, MAX_BLOCKS - len(hit)))
        self.running.append(Running(prefix, ids, len(hit)))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), count=st.integers(1, MAX_BLOCKS))
    def grow(self, number: int, count: int) -> None:
        request = self.pick(number)
        request.ids += self.allocate_ids(min(count, MAX_BLOCKS - len(request.ids)))

    @precondition(lambda self: self.running and self.enable_caching)
    @rule(number=st.integers(0, 99), count=st.integers(1, MAX_BLOCKS))
    def fill(self, number: int, count: int) -> None:
        """Blocks get their hashes; another request's block may have the same one already."""
        request = self.pick(number)
        end = min(request.num_cached + count, len(request.ids))
        # A block that was hit by its id alone (`touch_anything`) may have got a hash from its owner.
        if any(self.stock.blocks[i].block_hash is not None for i in request.ids[request.num_cached : end]):
            return
        start, request.num_cached = request.num_cached, end
        self.both(
            lambda pool: pool.cache_full_blocks(
                request,  # type: ignore[arg-type]
                self.blocks(pool, request.ids),
                start,
                end,
                BLOCK_SIZE,
                0,
            )
        )

    @precondition(lambda self: self.running and self.enable_caching)
    @rule(number=st.integers(0, 99), prefix=st.integers(0, PREFIXES - 1), index=st.integers(0, MAX_BLOCKS - 1))
    def second_hash(self, number: int, prefix: int, index: int) -> None:
        """A cached block becomes reachable by another key too, as vLLM does for partial blocks."""
        ids = [i for i in self.pick(number).ids if self.stock.blocks[i].block_hash is not None]
        if ids:
            key = make_block_hash_with_group_id(block_hash(prefix, index), 0)  # type: ignore[arg-type]
            tokens = (index + 1) * BLOCK_SIZE
            self.both(lambda pool: pool._insert_block_hash(key, pool.blocks[ids[0]], num_tokens=tokens))

    @rule(prefix=st.integers(0, PREFIXES - 1), count=st.integers(1, MAX_BLOCKS), num_filled=st.integers(0, MAX_BLOCKS))
    def serve(self, prefix: int, count: int, num_filled: int) -> None:
        """A request from its start to its end."""
        self.new_request_with_a_hit(prefix, count)
        if self.enable_caching and num_filled:
            self.fill(-1, num_filled)
        self.finish(-1)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def finish(self, number: int) -> None:
        request = self.pick(number)
        self.running.remove(request)
        self.release(request.ids[::-1])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish_in_any_order(self, data: st.DataObject) -> None:
        """Several requests at once, their blocks mixed, the null block among them (sliding windows free it)."""
        requests = data.draw(st.lists(st.sampled_from(self.running), min_size=1, unique=True))
        for request in requests:
            self.running.remove(request)
        ids = [i for request in requests for i in request.ids] + [self.stock.null_block.block_id]
        self.release(data.draw(st.permutations(ids)))

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), count=st.integers(1, MAX_BLOCKS))
    def drop_tail(self, number: int, count: int) -> None:
        """Part of a request's blocks is given back while it goes on (speculative blocks)."""
        request = self.pick(number)
        cut = max(0, len(request.ids) - count)
        tail, request.ids = request.ids[cut:], request.ids[:cut]
        request.num_cached = min(request.num_cached, cut)
        self.release(tail[::-1])

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def unpin(self, number: int) -> None:
        request = self.pick(number)
        if len(set(request.ids)) != len(request.ids):
            return
        self.running.remove(request)
        for pool, reused in zip(self.pools, self.reused, strict=True):
            pool.unpin_blocks(self.blocks(pool, request.ids), lambda block, log=reused: log.append(block.block_id))

    @rule(data=st.data())
    def touch_anything(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.integers(0, self.num_blocks - 1), max_size=MAX_BLOCKS, unique=True))
        self.both(lambda pool: pool.touch(self.blocks(pool, ids)))
        null = self.stock.null_block.block_id
        ids = [i for i in ids if i != null]
        self.running.append(Running(0, ids, len(ids)))

    @rule(data=st.data(), is_hit=st.booleans())
    def evict(self, data: st.DataObject, is_hit: bool) -> None:
        """Free or held: it only stops being a hit."""
        hits = [block.block_id for block in self.stock.blocks if block.block_hash is not None]
        among = hits if is_hit and hits else range(self.num_blocks)
        ids = data.draw(st.sets(st.sampled_from(among), max_size=MAX_BLOCKS))
        self.both(lambda pool: pool.evict_blocks(ids))

    @rule()
    def reset(self) -> None:
        num_resets = self.listener.num_resets if self.listener else 0
        done = self.both(lambda pool: pool.reset_prefix_cache())
        if self.listener:
            assert self.listener.num_resets == num_resets + done

    @rule()
    def finish_all_and_reset(self) -> None:
        self.release([i for request in self.running for i in request.ids[::-1]])
        self.running.clear()
        self.reset()
        assert len(self.ours.cached_block_hash_to_block) == 0

    @rule(extra=st.integers(1, 3))
    def ask_for_too_much(self, extra: int) -> None:
        count = self.stock.get_num_free_blocks() + extra
        answer = self.both(lambda pool: pool.get_new_blocks(count))
        assert answer[0] == "ValueError"

    # ------------------------------------------------------------------ what must agree

    @invariant()
    def agree(self) -> None:
        stock, ours = self.stock, self.ours
        order = [block.block_id for block in stock.free_block_queue.get_all_free_blocks()]
        assert [block.block_id for block in ours.free_block_queue.get_all_free_blocks()] == order
        assert [block.block_id for block in ours.free_block_queue.iter_blocks_after(None)] == order
        if order:
            middle = len(order) // 2
            after = ours.free_block_queue.iter_blocks_after(ours.blocks[order[middle]])
            assert [block.block_id for block in after] == order[middle + 1 :]
        assert ours.get_num_free_blocks() == stock.get_num_free_blocks() == len(order)
        assert ours.get_usage() == stock.get_usage()
        for ours_block, stock_block in zip(ours.blocks, stock.blocks, strict=True):
            assert ours_block.ref_cnt == stock_block.ref_cnt
            assert ours_block.block_hash == stock_block.block_hash
            assert (ours_block.prev_free_block is None) == (stock_block.prev_free_block is None)
        for prefix in range(PREFIXES):
            for hash_ in hashes_of(prefix):
                hit = _ids(stock.get_cached_block(hash_, [0]))  # type: ignore[arg-type]
                assert _ids(ours.get_cached_block(hash_, [0])) == hit  # type: ignore[arg-type]
        assert ours.cached_block_hashes_by_block == stock.cached_block_hashes_by_block
        assert self.reused[0] == self.reused[1]
        assert self.collectors[0].calls == self.collectors[1].calls
        free_list = ours.free_list
        assert free_list.num_retired_blocks == 0
        in_ring = sum(1 for _ in free_list._iter_ring(free_list._empty))
        assert free_list.num_empty_blocks == in_ring
        assert free_list.num_cached_blocks == sum(1 for _ in free_list.iter_cached_blocks())
        assert free_list.run_of == [None] * self.num_blocks


def _ids(blocks: list[KVCacheBlock] | None) -> list[int] | None:
    return None if blocks is None else [block.block_id for block in blocks]


class LockstepWithListener(Lockstep):
    has_listener = True


class LockstepWithoutCaching(Lockstep):
    enable_caching = False


@pytest.mark.parametrize("machine", [Lockstep, LockstepWithListener, LockstepWithoutCaching])
def test_no_metadata_order_is_stock(machine: type[Lockstep]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)


# ---------------------------------------------------------------------- with metadata


def fill_and_free(pool: LifetimeBlockPool, table: AccessTable, reader: Reader | None, prefix: int, count: int) -> list[int]:
    """A request of `reader` that writes `count` blocks of `prefix` and ends. Its block ids."""
    blocks = pool.get_new_blocks(count)
    request: Any = SimpleNamespace(block_hashes=hashes_of(prefix))
    pool.cache_full_blocks(request, blocks, 0, count, BLOCK_SIZE, 0)
    table.write(Path(reader), blocks, count)
    pool.free_blocks(reversed(blocks))
    return [block.block_id for block in blocks]


def free_ids(pool: LifetimeBlockPool) -> list[int]:
    return [block.block_id for block in pool.free_list.get_all_free_blocks()]


@pytest.fixture
def pool() -> LifetimeBlockPool:
    return LifetimeBlockPool(1 + 12, True, BLOCK_SIZE)


@pytest.fixture
def table(pool: LifetimeBlockPool) -> AccessTable:
    return AccessTable([pool.free_list], lambda _hash: (), pool.twin_of)


def test_retired_blocks_go_before_older_cached_ones(pool: LifetimeBlockPool, table: AccessTable) -> None:
    kept, ended = Reader("kept"), Reader("ended")
    old = fill_and_free(pool, table, kept, 0, 4)
    young = fill_and_free(pool, table, ended, 1, 4)
    unknown = fill_and_free(pool, table, None, 2, 4)
    assert free_ids(pool) == old[::-1] + young[::-1] + unknown[::-1]
    assert table.end(ended) == [4]
    assert free_ids(pool) == young[::-1] + old[::-1] + unknown[::-1]
    assert pool.free_list.num_retired_blocks == 4
    # What was retired is handed out deepest first, and what is handed out has left its run.
    assert [block.block_id for block in pool.get_new_blocks(3)] == young[:0:-1]
    assert pool.free_list.num_retired_blocks == 1
    assert pool.free_list.run_of[young[0]] is not None
    assert [pool.free_list.run_of[i] for i in young[1:]] == [None] * 3


def test_evicting_blocks_with_a_run_empties_them(pool: LifetimeBlockPool, table: AccessTable) -> None:
    reader = Reader("w")
    ids = fill_and_free(pool, table, reader, 0, 4)
    (run,) = reader.runs
    held = pool.blocks[ids[0]]
    pool.touch([held])
    pool.evict_blocks({ids[0], ids[2]})
    assert run.num_blocks[HBM_TIER] == 2
    assert free_ids(pool)[0] == ids[2]
    pool.free_blocks([held])
    assert free_ids(pool)[0] == ids[0]
    assert pool.free_list.num_empty_blocks == 12 - 2


def test_reset_ends_all_runs(pool: LifetimeBlockPool, table: AccessTable) -> None:
    reader, ended = Reader("w"), Reader("ended")
    fill_and_free(pool, table, reader, 0, 4)
    fill_and_free(pool, table, ended, 1, 4)
    table.end(ended)
    order = free_ids(pool)
    assert pool.reset_prefix_cache()
    assert free_ids(pool) == order
    assert not reader.runs
    assert pool.free_list.num_empty_blocks == pool.free_list.num_free_blocks == 12
    assert pool.free_list.num_retired_blocks == 0
    # The pool and the same reader go on working.
    fill_and_free(pool, table, reader, 0, 4)
    assert len(reader.runs) == 1


def test_listener_sees_what_is_handed_out_with_its_hash(pool: LifetimeBlockPool, table: AccessTable) -> None:
    seen: list[tuple[int, bool]] = []

    class Listener(UnknownListener):
        def on_blocks_allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
            seen.extend((block.block_id, block.block_hash is not None) for block in blocks)

    fill_and_free(pool, table, Reader("w"), 0, 2)
    pool.listener = Listener(pool)
    handed_out = pool.get_new_blocks(12)
    assert [block_id for block_id, _ in seen] == [block.block_id for block in handed_out]
    assert sum(has_hash for _, has_hash in seen) == 2
    assert all(block.block_hash is None for block in handed_out)
