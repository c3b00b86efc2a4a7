# SPDX-License-Identifier: Apache-2.0
"""Wishes to keep: soft, expiring, capped."""

import pytest

from tests.pool.pool_testing import CountingReader, Tiers
from vllm_lifetime.policy.retention import MAX_RETENTIONS, RetentionTable
from vllm_lifetime.pool.runs import ACTIVE_RANK, Run

CAPACITY = 40


@pytest.fixture
def tiers() -> Tiers:
    """A pool of forty blocks."""
    return Tiers(CAPACITY, 0, 0)


def table_of(tiers: Tiers) -> RetentionTable:
    """Its wishes."""
    return RetentionTable(tiers.table, CAPACITY)


def read(tiers: Tiers, name: int, length: int = 3) -> tuple[CountingReader, list[Run]]:
    """A reader that has read a prefix of its own."""
    reader = CountingReader(f"w{name}")
    tiers.run(reader, tuple([name] * length))
    return reader, list(reader.runs)


def test_a_kept_block_is_retired_with_its_reader(tiers: Tiers) -> None:
    """Only when the wish's time is over."""
    table = table_of(tiers)
    reader, runs = read(tiers, 1)
    wish = table.new("w1")
    assert table.retain(wish, runs, ttl_s=10, now=100) == (3, True)
    assert sum(tiers.table.end(reader)) == 0
    assert table.expire(109.9) == 0 and tiers.hbm.num_retired_blocks == 0
    assert table.expire(110) == 3
    assert tiers.hbm.num_retired_blocks == 3
    assert len(table) == table.num_blocks == 0


def test_a_wish_blocks_an_allocation(tiers: Tiers) -> None:
    """R11, R13: everything can be had, kept or not."""
    table = table_of(tiers)
    _, runs = read(tiers, 1)
    table.retain(table.new("w1", priority=100), runs, ttl_s=1000, now=0)
    assert len(tiers.allocate(CAPACITY)) == CAPACITY


def test_priority_does_not_order_the_kept(tiers: Tiers) -> None:
    """Higher goes later, lower sooner, the usual one by recency; back to recency when the time is over."""
    table = table_of(tiers)
    for name, priority in ((1, 90), (2, 35), (3, 0)):
        _, runs = read(tiers, name, 1)
        table.retain(table.new(f"w{name}", priority), runs, ttl_s=10, now=0)
    cached = [block.block_hash for block in tiers.hbm.iter_cached_blocks()]
    assert cached == [bytes([2]), bytes([3]), bytes([1])] or cached == [bytes([3]), bytes([2]), bytes([1])]
    table.expire(10)
    assert {tiers.hbm.run_of[b.block_id].rank for b in tiers.hbm.iter_cached_blocks()} == {ACTIVE_RANK}  # type: ignore[union-attr]


def test_wishes_pin_the_whole_pool(tiers: Tiers) -> None:
    """At most half of all blocks: what is beyond is not kept, and the answer says so."""
    table = table_of(tiers)
    readers = [read(tiers, i, 6) for i in range(5)]
    kept = [table.retain(table.new(f"w{i}"), runs, ttl_s=10, now=0) for i, (_, runs) in enumerate(readers)]
    assert [blocks for blocks, _ in kept] == [6, 6, 6, 0, 0]
    assert [whole for _, whole in kept] == [True, True, True, False, False]
    assert table.num_blocks == 18 and len(table) == 3
    for run in readers[0][1]:
        for reader in list(run.readers):
            run.remove_reader(reader)
    assert table.retain(table.new("w4"), readers[4][1], ttl_s=10, now=0.5) == (0, False), "counted a moment ago"
    assert table.retain(table.new("w4"), readers[4][1], ttl_s=10, now=2) == (6, True), "another one's were released"


def test_wishes_pile_up(tiers: Tiers) -> None:
    """So many at a time."""
    table = table_of(tiers)
    _, runs = read(tiers, 1, 1)
    table._limit = 10 * MAX_RETENTIONS
    for _ in range(MAX_RETENTIONS):
        assert table.retain(table.new("w1"), runs, ttl_s=10, now=0) == (1, True)
    assert table.retain(table.new("w1"), runs, ttl_s=10, now=0) == (0, False)
    table.expire(10)
    assert len(table) == 0


def test_a_renewed_wish_ends_at_its_first_time(tiers: Tiers) -> None:
    """A conversation that renews its wish with each turn keeps everything as long as the last one says."""
    table = table_of(tiers)
    reader, runs = read(tiers, 1)
    wish = table.new("w1")
    table.retain(wish, runs, ttl_s=10, now=0)
    table.retain(wish, runs, ttl_s=10, now=5)
    table.retain(wish, runs, ttl_s=1, now=6)
    tiers.table.end(reader)
    assert len(table._heap) == 1, "one entry, however often it is renewed"
    assert table.expire(14) == 0
    assert table.expire(15) == 3 and not table._heap


def test_retired_blocks_cannot_be_kept(tiers: Tiers) -> None:
    """A wish that comes after the end brings them back to life for its time."""
    table = table_of(tiers)
    reader, runs = read(tiers, 1)
    tiers.table.end(reader)
    assert tiers.hbm.num_retired_blocks == 3
    table.retain(table.new("w1"), runs, ttl_s=10, now=0)
    assert tiers.hbm.num_retired_blocks == 0
    assert table.expire(10) == 3
