# SPDX-License-Identifier: Apache-2.0
"""`TieredFreeList` against two lists of their own, one per tier, that get the same blocks: same order in each, for ever apart."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.pool.pool_testing import BareBlock as Block
from vllm_lifetime.pool.access import FLASH_TIER, HBM_TIER
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import ACTIVE_RANK, Rank, RankGroup, Run, retired_rank
from vllm_lifetime.pool.tiered import CoveredTier, TieredFreeList

SETTINGS = settings(max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TIERS = (HBM_TIER, FLASH_TIER)
NUM_RUNS = 4
RANKS: tuple[Rank, ...] = (ACTIVE_RANK, (1, 0.5, 0.0), (1, -1.0, 0.0), (0, 1), (0, 2))


def new_runs() -> list[Run]:
    return [Run(0, 1, 3) for _ in range(NUM_RUNS)]


def ids(blocks: Sequence[Block]) -> list[int]:
    return [block.block_id for block in blocks]


class Lockstep(RuleBasedStateMachine):
    """World 0 is the tiered list, worlds 1 and 2 a plain list of HBM and one of flash, each with blocks and runs of its own."""

    @initialize(num_hbm=st.integers(1, 8), num_flash=st.integers(1, 8))
    def start(self, num_hbm: int, num_flash: int) -> None:
        self.first, self.total = num_hbm, num_hbm + num_flash
        self.worlds = [[Block(i) for i in range(self.total)] for _ in range(3)]
        self.runs = [new_runs() for _ in range(3)]
        self.tiered: TieredFreeList[Block] = TieredFreeList(self.worlds[0], self.first)
        self.plain = {}
        for world, tier in ((1, HBM_TIER), (2, FLASH_TIER)):
            plain: TierFreeList[Block] = TierFreeList(self.worlds[world], tier)
            plain.remove_n([b for b in self.worlds[world] if self.tier_of(b.block_id) != tier])
            self.plain[tier] = plain
        self.held: list[int] = []

    def tier_of(self, block_id: int) -> int:
        return HBM_TIER if block_id < self.first else FLASH_TIER

    def same(self, tier: int, block_ids: Sequence[int]) -> list[Block]:
        """The plain list's blocks of these ids that are its own."""
        world = self.worlds[1 + TIERS.index(tier)]
        return [world[i] for i in block_ids if self.tier_of(i) == tier]

    def room(self, tier: int, uses_retired: bool) -> int:
        plain = self.plain[tier]
        return plain.num_empty_blocks + (plain.num_retired_blocks if uses_retired else 0)

    # ------------------------------------------------------------------ operations

    @rule(count=st.integers(0, 8), wanted=st.sampled_from([HBM_TIER, FLASH_TIER, None]), uses_retired=st.booleans())
    def take(self, count: int, wanted: int | None, uses_retired: bool) -> None:
        count = min(count, self.tiered.num_free_blocks)
        room = {tier: self.room(tier, uses_retired) for tier in TIERS}
        free = {tier: self.plain[tier].num_free_blocks for tier in TIERS}
        blocks = self.tiered.take(count, wanted, uses_retired=uses_retired)
        taken = {tier: [i for i in ids(blocks) if self.tier_of(i) == tier] for tier in TIERS}
        assert sum(map(len, taken.values())) == count == len(set(ids(blocks)))
        for tier in TIERS:
            assert ids(self.plain[tier].popleft_n(len(taken[tier]))) == taken[tier]
        first = HBM_TIER if wanted is None else wanted
        second = FLASH_TIER if first == HBM_TIER else HBM_TIER
        if taken[second]:
            assert len(taken[first]) >= room[first], "spilled though there was room"
        evicted = {tier: max(0, len(taken[tier]) - room[tier]) for tier in TIERS}
        if any(evicted.values()):
            assert all(len(taken[tier]) >= room[tier] for tier in TIERS), "evicted though there was room"
        if wanted is not None and evicted[second]:
            assert len(taken[first]) == free[first], "the other tier's was evicted first"
        self.forget(ids(blocks))
        self.held += ids(blocks)

    def forget(self, block_ids: Sequence[int]) -> None:
        """Held blocks lose their content."""
        for block_id in block_ids:
            for blocks, owner in self.owners(block_id):
                if owner.run_of[block_id] is not None:
                    owner.forget_hash(blocks[block_id])
                blocks[block_id].block_hash_num_tokens = None

    def owners(self, block_id: int) -> list[tuple[list[Block], TierFreeList[Block]]]:
        tier = self.tier_of(block_id)
        return [(self.worlds[0], self.tiered), (self.worlds[1 + TIERS.index(tier)], self.plain[tier])]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), with_hash=st.booleans(), run=st.none() | st.integers(0, NUM_RUNS - 1), is_reversed=st.booleans())
    def free(self, data: st.DataObject, with_hash: bool, run: int | None, is_reversed: bool) -> None:
        """A request ends, or is preempted: its blocks of both tiers, mixed, come back at once."""
        chosen = data.draw(st.lists(st.sampled_from(self.held), min_size=1, unique=True))
        self.held = [i for i in self.held if i not in chosen]
        if not with_hash:
            self.forget(chosen)  # those that were hit lose theirs
        for depth, block_id in enumerate(chosen):
            for world, (blocks, owner) in zip((0, 1 + TIERS.index(self.tier_of(block_id))), self.owners(block_id), strict=True):
                if with_hash:
                    blocks[block_id].block_hash_num_tokens = 16 * (depth + 1)
                    owner.set_run(blocks[block_id], None if run is None else self.runs[world][run])
        ordered = chosen[::-1] if is_reversed else chosen
        mixed = [self.worlds[0][i] for i in ordered]
        if with_hash:
            self.tiered.append_n(mixed)
        else:
            self.tiered.prepend_n(mixed)
        for tier in TIERS:
            own = self.same(tier, ordered)
            if own and with_hash:
                self.plain[tier].append_n(own)
            elif own:
                self.plain[tier].prepend_n(own)

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Readable blocks are held again, wherever they lie."""
        hits = [b.block_id for b in self.tiered.get_all_free_blocks() if b.block_hash_num_tokens is not None]
        if not hits:
            return
        chosen = data.draw(st.lists(st.sampled_from(hits), min_size=1, unique=True))
        self.tiered.remove_n([self.worlds[0][i] for i in chosen])
        for tier in TIERS:
            self.plain[tier].remove_n(self.same(tier, chosen))
        self.held += chosen

    @rule(run=st.integers(0, NUM_RUNS - 1), rank=st.sampled_from(RANKS))
    def rank(self, run: int, rank: Rank) -> None:
        """A boundary, or a new score."""
        for world, runs in enumerate(self.runs):
            runs[run].rank = rank
            ([self.tiered, *self.plain.values()])[world].set_rank(runs[run])

    @rule(rank=st.sampled_from([ACTIVE_RANK, (1, 0.3, 0.0)]))
    def common_rank(self, rank: Rank) -> None:
        for owner in (self.tiered, *self.plain.values()):
            owner.set_common_rank(rank)

    @rule(data=st.data())
    def evict_hash(self, data: st.DataObject) -> None:
        """A free block stops being a hit."""
        hits = [b.block_id for b in self.tiered.get_all_free_blocks() if b.block_hash_num_tokens is not None]
        if hits:
            block_id = data.draw(st.sampled_from(hits))
            for blocks, owner in self.owners(block_id):
                owner.forget_hash(blocks[block_id])
                blocks[block_id].block_hash_num_tokens = None

    @precondition(lambda self: not self.held)
    @rule()
    def reset(self) -> None:
        for owner in (self.tiered, *self.plain.values()):
            owner.forget_all_hashes()
        for blocks in self.worlds:
            for block in blocks:
                block.block_hash_num_tokens = None

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def agree(self) -> None:
        tiered = self.tiered
        for tier, part in ((HBM_TIER, tiered.hbm), (FLASH_TIER, tiered.flash)):
            order = ids(part.get_all_free_blocks())
            assert all(self.tier_of(i) == tier for i in order), "a block has changed its tier"
            assert order == ids(self.plain[tier].get_all_free_blocks())
            num_held = sum(self.tier_of(i) == tier for i in self.held)
            size = self.first if tier == HBM_TIER else self.total - self.first
            assert part.num_free_blocks + num_held == size
            for name in ("num_free_blocks", "num_empty_blocks", "num_retired_blocks", "num_cached_blocks"):
                assert getattr(part, name) == getattr(self.plain[tier], name), name
            counts = [run.num_blocks[tier] for run in self.runs[0]]
            assert counts == [run.num_blocks[tier] for run in self.runs[1 + TIERS.index(tier)]]
        everything = ids(tiered.get_all_free_blocks())
        assert everything == ids(tiered.hbm.get_all_free_blocks()) + ids(tiered.flash.get_all_free_blocks())
        assert len(everything) == tiered.num_free_blocks
        if everything:
            middle = len(everything) // 2
            after = tiered.iter_blocks_after(self.worlds[0][everything[middle]])
            assert ids(list(after)) == everything[middle + 1 :]


def test_block_leaves_its_tier() -> None:
    run_state_machine_as_test(Lockstep, settings=SETTINGS)


def fill(tiered: TieredFreeList[Block], run: Run | None = None) -> None:
    """All blocks are readable, by `run`."""
    blocks = tiered.take(tiered.num_free_blocks, None)
    for block in blocks:
        block.block_hash_num_tokens = 16
        tiered.set_run(block, run)
    tiered.append_n(blocks)


def test_cache_of_unnamed_requests_freezes_in_flash() -> None:
    """What nobody has wishes for is evicted from both tiers, by their sizes."""
    tiered: TieredFreeList[Block] = TieredFreeList([Block(i) for i in range(100)], 25)
    fill(tiered)
    from_flash = 0
    for _ in range(40):
        (block,) = tiered.take(1, None)
        from_flash += block.block_id >= 25
        tiered.append_n([block])
    assert from_flash == 30


def test_recency_across_tiers() -> None:
    """`last_freed` compares what was given back to different tiers."""
    tiered: TieredFreeList[Block] = TieredFreeList([Block(i) for i in range(4)], 2)
    runs = [Run(0, 1, 3) for _ in range(4)]
    blocks = tiered.take(4, None)
    for block, run in zip(blocks, runs, strict=True):
        block.block_hash_num_tokens = 16
        tiered.set_run(block, run)
    order = [3, 0, 2, 1]
    for index in order:
        tiered.append_n([blocks[index]])
    assert sorted(range(4), key=lambda i: tiered.last_freed(runs[i])) == order


def test_retired_run_is_room_in_both_tiers() -> None:
    tiered: TieredFreeList[Block] = TieredFreeList([Block(i) for i in range(6)], 2)
    run = Run(0, 1, 3)
    fill(tiered, run)
    assert (tiered.num_retired_blocks, tiered.num_cached_blocks) == (0, 6)
    run.rank = retired_rank(1)
    tiered.set_rank(run)
    assert (tiered.hbm.num_retired_blocks, tiered.flash.num_retired_blocks) == (2, 4)
    assert sorted(ids(tiered.take(3, FLASH_TIER))) == [2, 3, 4]


def test_group_moves_in_both_tiers() -> None:
    """A rank group has a bucket in each."""
    tiered: TieredFreeList[Block] = TieredFreeList([Block(i) for i in range(4)], 2)
    group, run = RankGroup(3), Run(0, 1, 3)
    group.rank = (1, 0.5, 0.0)
    run.join_group(group)
    blocks = tiered.take(4, None)
    for index, block in enumerate(blocks):
        block.block_hash_num_tokens = 16
        tiered.set_run(block, run if index % 2 else None)
    tiered.append_n(blocks)
    assert [i % 2 for i in ids(tiered.get_all_free_blocks())] == [0, 1, 0, 1]
    group.rank = (1, -0.5, 0.0)
    tiered.set_group_rank(group)
    CoveredTier[Block](FLASH_TIER).set_group_rank(group)
    assert [i % 2 for i in ids(tiered.get_all_free_blocks())] == [1, 0, 1, 0]


@pytest.mark.parametrize("first", [0, 4])
def test_tier_without_blocks(first: int) -> None:
    with pytest.raises(ValueError, match="from 1 to 3"):
        TieredFreeList([Block(i) for i in range(4)], first)


def test_more_than_there_is() -> None:
    tiered: TieredFreeList[Block] = TieredFreeList([Block(i) for i in range(4)], 2)
    with pytest.raises(ValueError, match="5 blocks were asked for, 4 are free"):
        tiered.take(5, FLASH_TIER)
    assert tiered.num_free_blocks == 4
