# SPDX-License-Identifier: Apache-2.0
"""`TierFreeList` against a naive model: every free block has a sort key, and the order is `sorted`.

Where the documented order leaves something open, the model takes:

* a run's place in its bucket is that of its last `append` or `set_rank`, whichever came later, even if that block has
  left since;
* `set_run` on a free block counts as an append to the new run (or as one block of none);
* blocks of one run at the same depth (the same content twice) may stand in either order;
* a block that lost its hash while free and without a run is neither empty nor retired: it counts as cached until it is
  handed out, as it keeps its turn.
"""

from collections.abc import Sequence

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

from tests.pool.pool_testing import BareBlock as Block
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.nodes import Bucket, RunNode
from vllm_lifetime.pool.runs import ACTIVE_RANK, Rank, RankGroup, Reader, Run, retired_rank

TIER = 1
NUM_TIERS = 2
SETTINGS = settings(max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
RANKS = (ACTIVE_RANK, (1, 0.0, -5.0), (1, 0.5, 0.0), (1, -1.0, 0.0), (0, 1), (0, 2), (0, 3))
GROUP_RANKS = ((ACTIVE_RANK, (1, 0.1, 0.0), (1, 0.7, 0.0)), (ACTIVE_RANK, (1, -2.0, 0.0), (1, 0.2, 0.0)))
"""Of each group; no two that differ are equal, since of equal ranks the order is by who got it first."""
COMMON_RANKS = (ACTIVE_RANK, (1, 0.3, 0.0), (1, float("inf"), 0.0))


def make_run(rank: Rank = ACTIVE_RANK) -> Run:
    run = Run(0, 1, NUM_TIERS)
    run.rank = rank
    return run


def ids(blocks: Sequence[Block]) -> list[int]:
    return [block.block_id for block in blocks]


class FreeListMachine(RuleBasedStateMachine):
    """All operations of the list. Held blocks get hashes and runs; free ones lose them."""

    @initialize(num_blocks=st.integers(0, 12), num_runs=st.integers(1, 4))
    def start(self, num_blocks: int, num_runs: int) -> None:
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.free_list: TierFreeList[Block] = TierFreeList(self.blocks, TIER)
        self.runs = [make_run() for _ in range(num_runs)]
        self.groups = [RankGroup(NUM_TIERS) for _ in GROUP_RANKS]
        self.run_of: list[Run | None] = [None] * num_blocks
        self.common_rank: Rank = ACTIVE_RANK
        self.time = 0
        self.front_time = 0
        self.empty_since: dict[int, int] = {}
        """Free blocks in the empty list; the higher the sooner."""
        self.single_since: dict[int, int] = {}
        """Free blocks of no run in the active bucket; the lower the sooner."""
        self.in_run: set[int] = set()
        """Free blocks of runs."""
        self.run_since: dict[Run, int] = {}
        self.model_prepend(range(num_blocks))

    # ------------------------------------------------------------------ model

    def tick(self) -> int:
        self.time += 1
        return self.time

    def model_prepend(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self.empty_since[block_id] = self.tick()

    def model_append(self, block_id: int) -> None:
        run = self.run_of[block_id]
        if run is None:
            self.single_since[block_id] = self.tick()
        else:
            self.in_run.add(block_id)
            self.run_since[run] = self.tick()

    def model_remove(self, block_id: int) -> None:
        self.empty_since.pop(block_id, None)
        self.single_since.pop(block_id, None)
        self.in_run.discard(block_id)

    def model_key(self, block_id: int) -> tuple[object, ...]:
        if block_id in self.empty_since:
            return (0, -self.empty_since[block_id])
        if block_id in self.single_since:
            return (1, self.common_rank, self.single_since[block_id])
        run = self.run_of[block_id]
        assert run is not None
        depth = self.blocks[block_id].block_hash_num_tokens
        assert depth is not None
        rank = self.common_rank if run.rank is ACTIVE_RANK else run.rank
        return (1, rank, self.run_since[run], -depth)

    def free_ids(self) -> list[int]:
        return [*self.empty_since, *self.single_since, *self.in_run]

    def held_ids(self) -> list[int]:
        free = set(self.free_ids())
        return [block.block_id for block in self.blocks if block.block_id not in free]

    def hashed_ids(self) -> list[int]:
        return [block.block_id for block in self.blocks if block.block_hash_num_tokens is not None]

    def draw(self, data: st.DataObject, block_ids: Sequence[int]) -> list[int]:
        if not block_ids:
            return []
        return data.draw(st.lists(st.sampled_from(block_ids), min_size=1, max_size=4, unique=True))

    # ------------------------------------------------------------------ held blocks

    @rule(data=st.data(), depth=st.integers(1, 6), number=st.integers(-1, 3), count=st.integers(1, 6))
    def give_hashes(self, data: st.DataObject, depth: int, number: int, count: int) -> None:
        """Held blocks without a hash get consecutive ones, in a run or in none."""
        held = [i for i in self.held_ids() if self.blocks[i].block_hash_num_tokens is None][:count]
        run = None if number < 0 else self.runs[number % len(self.runs)]
        for offset, block_id in enumerate(held):
            self.blocks[block_id].block_hash_num_tokens = 16 * (depth + offset)
            self.free_list.set_run(self.blocks[block_id], run)
            self.run_of[block_id] = run

    @rule(data=st.data(), count=st.integers(1, 4), depth=st.integers(1, 6), number=st.integers(-1, 3))
    def serve(self, data: st.DataObject, count: int, depth: int, number: int) -> None:
        """A request from its start to its end, so that lists are seldom just empty blocks."""
        self.popleft_n(min(count, len(self.free_ids())), False)
        self.give_hashes(data, depth, number, count)
        self.append_n_of(sorted(self.hashed_ids(), key=lambda i: -(self.blocks[i].block_hash_num_tokens or 0)))

    def append_n_of(self, block_ids: Sequence[int]) -> None:
        held = set(self.held_ids())
        block_ids = [i for i in block_ids if i in held and self.blocks[i].block_hash_num_tokens is not None]
        self.free_list.append_n([self.blocks[i] for i in block_ids])
        for block_id in block_ids:
            self.model_append(block_id)

    def lose_hash(self, block_id: int) -> None:
        self.free_list.forget_hash(self.blocks[block_id])
        self.blocks[block_id].block_hash_num_tokens = None
        if self.run_of[block_id] is not None:
            self.run_of[block_id] = None
            if block_id in self.in_run:
                self.model_remove(block_id)
                self.model_prepend([block_id])

    @rule(data=st.data())
    def forget_hash(self, data: st.DataObject) -> None:
        """Of any block that has one, free or held."""
        for block_id in self.draw(data, self.hashed_ids()):
            self.lose_hash(block_id)

    @rule(data=st.data(), number=st.integers(-1, 3))
    def set_run(self, data: st.DataObject, number: int) -> None:
        """Of any block with a hash, free or held."""
        run = None if number < 0 else self.runs[number % len(self.runs)]
        for block_id in self.draw(data, self.hashed_ids()):
            self.free_list.set_run(self.blocks[block_id], run)
            if self.run_of[block_id] is not run:
                is_free = block_id in self.single_since or block_id in self.in_run
                self.model_remove(block_id)
                self.run_of[block_id] = run
                if is_free:
                    self.model_append(block_id)

    # ------------------------------------------------------------------ in and out

    @rule(data=st.data(), is_ordered=st.booleans())
    def append_n(self, data: st.DataObject, is_ordered: bool) -> None:
        """Blocks of several runs and of none in one call; deepest first as vLLM frees, or in any order."""
        block_ids = self.draw(data, self.held_ids())
        if is_ordered:
            block_ids.sort(key=lambda i: -(self.blocks[i].block_hash_num_tokens or 0))
        self.append_n_of(block_ids)

    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        for block_id in self.draw(data, self.held_ids()):
            if self.blocks[block_id].block_hash_num_tokens is not None:
                self.free_list.append(self.blocks[block_id])
                self.model_append(block_id)

    @rule(data=st.data())
    def append_without_a_hash(self, data: st.DataObject) -> None:
        for block_id in self.draw(data, self.held_ids()):
            if self.blocks[block_id].block_hash_num_tokens is None:
                self.free_list.append(self.blocks[block_id])
                self.free_list.keep_turn(self.blocks[block_id])
                self.model_append(block_id)

    @rule(data=st.data())
    def prepend_n(self, data: st.DataObject) -> None:
        block_ids = [i for i in self.draw(data, self.held_ids()) if self.blocks[i].block_hash_num_tokens is None]
        self.free_list.prepend_n([self.blocks[i] for i in block_ids])
        self.model_prepend(block_ids)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        for block_id in self.draw(data, self.free_ids()):
            self.free_list.remove(self.blocks[block_id])
            self.model_remove(block_id)

    @rule(count=st.integers(0, 13), keep=st.booleans())
    def popleft_n(self, count: int, keep: bool) -> None:
        """What is handed out loses its hash, as in the pool; a caller that puts it back at once may keep it."""
        expected = ids(self.free_list.get_all_free_blocks())[:count]
        if count > len(self.free_ids()):
            with pytest.raises(ValueError):
                self.free_list.popleft_n(count)
            return
        taken = ids(self.free_list.popleft_n(count))
        assert taken == expected
        for block_id in taken:
            self.model_remove(block_id)
            if not keep:
                self.lose_hash(block_id)

    @rule()
    def popleft(self) -> None:
        order = ids(self.free_list.get_all_free_blocks())
        if not order:
            with pytest.raises(ValueError):
                self.free_list.popleft()
            return
        block_id = self.free_list.popleft().block_id
        assert block_id == order[0]
        self.model_remove(block_id)

    @rule(data=st.data())
    def remove_n(self, data: st.DataObject) -> None:
        block_ids = self.draw(data, self.free_ids())
        self.free_list.remove_n([self.blocks[i] for i in block_ids])
        for block_id in block_ids:
            self.model_remove(block_id)

    @rule(data=st.data())
    def remove_held(self, data: st.DataObject) -> None:
        held = self.held_ids()
        if held:
            with pytest.raises(RuntimeError):
                self.free_list.remove(self.blocks[data.draw(st.sampled_from(held))])
            with pytest.raises(RuntimeError):
                self.free_list.remove_n([self.blocks[data.draw(st.sampled_from(held))]])

    # ------------------------------------------------------------------ ranks

    @rule(data=st.data())
    def remove_from_the_middle(self, data: st.DataObject) -> None:
        """Of what is not simply empty: where the counts can go wrong."""
        for block_id in self.draw(data, [*self.single_since, *self.in_run]):
            self.free_list.remove(self.blocks[block_id])
            self.model_remove(block_id)

    @rule(number=st.integers(0, 3), rank=st.sampled_from(RANKS))
    def set_rank(self, number: int, rank: Rank) -> None:
        run = self.runs[number % len(self.runs)]
        run.rank = rank
        self.free_list.set_rank(run)
        self.run_since[run] = self.tick()

    @rule(number=st.integers(0, 3), group=st.integers(0, 1))
    def join_group(self, number: int, group: int) -> None:
        run = self.runs[number % len(self.runs)]
        run.join_group(self.groups[group])
        self.free_list.set_rank(run)
        self.run_since[run] = self.tick()

    @rule(group=st.integers(0, 1), rank=st.integers(0, 2))
    def set_group_rank(self, group: int, rank: int) -> None:
        """As `AccessTable.set_group_rank`: one by one to and from the common rank, else all at once, in the order they had."""
        runs = self.groups[group]
        old, runs.rank = runs.rank, GROUP_RANKS[group][rank]
        if runs.rank is not ACTIVE_RANK:
            self.free_list.set_group_rank(runs)
        if ACTIVE_RANK in (old, runs.rank) and old is not runs.rank:
            for run in self.runs:
                if run.group is runs:
                    self.free_list.set_rank(run)
                    self.run_since[run] = self.tick()

    @rule(rank=st.sampled_from(COMMON_RANKS))
    def set_common_rank(self, rank: Rank) -> None:
        self.common_rank = rank
        self.free_list.set_common_rank(rank)

    @precondition(lambda self: not self.held_ids())
    @rule()
    def forget_all_hashes(self) -> None:
        order = ids(self.free_list.get_all_free_blocks())
        self.free_list.forget_all_hashes()
        for block in self.blocks:
            block.block_hash_num_tokens = None
        for block_id in order:
            self.model_remove(block_id)
        self.run_of = [None] * len(self.blocks)
        self.model_prepend(order)

    @rule()
    def free_everything(self) -> None:
        held = self.held_ids()
        hashed = [i for i in held if self.blocks[i].block_hash_num_tokens is not None]
        empty = [i for i in held if self.blocks[i].block_hash_num_tokens is None]
        self.free_list.prepend_n([self.blocks[i] for i in empty])
        self.model_prepend(empty)
        self.free_list.append_n([self.blocks[i] for i in hashed])
        for block_id in hashed:
            self.model_append(block_id)

    # ------------------------------------------------------------------ invariants

    @invariant()
    def order_is_the_models(self) -> None:
        order = ids(self.free_list.get_all_free_blocks())
        keys = [self.model_key(i) for i in order]
        assert sorted(order) == sorted(self.free_ids())
        assert keys == sorted(keys)

    @invariant()
    def counts_are_a_walk(self) -> None:
        free_list = self.free_list
        retired = [i for i in self.in_run if self.run_of[i].is_retired]  # type: ignore[union-attr]
        assert free_list.num_free_blocks == len(self.free_ids())
        assert free_list.num_empty_blocks == len(self.empty_since)
        assert free_list.num_retired_blocks == len(retired)
        cached = ids(list(free_list.iter_cached_blocks()))
        assert free_list.num_cached_blocks == len(cached)
        # Cached blocks are what is neither empty nor retired, in the order of the whole.
        assert cached == ids(free_list.get_all_free_blocks())[len(self.empty_since) + len(retired) :]

    @invariant()
    def members_are_counted(self) -> None:
        assert self.free_list.run_of == self.run_of
        for run in self.runs:
            assert run.num_blocks == [0, sum(member is run for member in self.run_of)]

    @invariant()
    def links_are_consistent(self) -> None:
        free_list = self.free_list
        groups = [group.buckets[TIER] for group in self.groups]
        rings = [free_list._empty, *free_list._buckets.values(), *(bucket for bucket in groups if isinstance(bucket, Bucket))]
        linked: list[object] = []
        for run in self.runs:
            node = run.nodes[TIER]
            if not isinstance(node, RunNode):
                continue
            rings.append(node.chain)
            chain = list(free_list._iter_ring(node.chain))
            assert node.count == len(chain)
            assert (node.bucket is None) == (node.count == 0)
            assert node.hint is node.chain or node.hint in chain
            if node.bucket is not None:
                assert node.bucket.rank == self.free_list.rank_of(run)
                linked.append(node)
        for ring in rings:
            here: object = ring
            while True:
                after = here.next_free_block  # type: ignore[attr-defined]
                assert after.prev_free_block is here
                here = after
                if here is ring:
                    break
                if isinstance(here, RunNode):
                    linked.remove(here)
        assert not linked
        for block_id in self.held_ids():
            block = self.blocks[block_id]
            assert block.prev_free_block is None
            assert block.next_free_block is None

    @invariant()
    def buckets_are_queued_once(self) -> None:
        free_list = self.free_list
        groups = [group.buckets[TIER] for group in self.groups]
        buckets = [*free_list._buckets.values(), *(bucket for bucket in groups if isinstance(bucket, Bucket))]
        valid = [(rank, turn, bucket) for rank, turn, bucket in free_list._queue if bucket.turn == turn]
        assert sorted(valid) == sorted((bucket.rank, bucket.turn, bucket) for bucket in buckets if bucket.turn)
        for bucket in buckets:
            assert bucket.turn or bucket.is_empty()


def test_order_is_the_documented_one() -> None:
    run_state_machine_as_test(FreeListMachine, settings=SETTINGS)


# ---------------------------------------------------------------------- examples one can read


def hashed(free_list: TierFreeList[Block], depths: Sequence[int], run: Run | None) -> list[Block]:
    """Take blocks out and give them hashes of these depths, in `run`."""
    blocks = free_list.popleft_n(len(depths))
    for block, depth in zip(blocks, depths, strict=True):
        block.block_hash_num_tokens = 16 * depth
        free_list.set_run(block, run)
    return blocks


def test_empty_then_retired_by_workflows_then_active_by_recency() -> None:
    free_list = TierFreeList([Block(i) for i in range(11)], TIER)
    shared, private, live = make_run(), make_run(), make_run()
    first = hashed(free_list, [1, 2], shared)
    second = hashed(free_list, [1, 2], private)
    third = hashed(free_list, [1, 2], live)
    single = hashed(free_list, [1], None)
    for blocks in (third, single, first, second):
        free_list.append_n(blocks[::-1])
    empty = free_list.popleft_n(4)
    free_list.prepend_n(empty[:2])
    free_list.prepend_n(empty[2:])
    shared.rank = retired_rank(7)
    private.rank = retired_rank(1)
    free_list.set_rank(shared)
    free_list.set_rank(private)
    assert free_list.get_all_free_blocks() == [
        *empty[2:],
        *empty[:2],
        *second[::-1],
        *first[::-1],
        *third[::-1],
        *single,
    ]
    assert (free_list.num_empty_blocks, free_list.num_retired_blocks, free_list.num_cached_blocks) == (4, 4, 3)


@pytest.mark.parametrize("by_n", [False, True])
def test_a_block_that_lost_its_hash_in_its_turn_is_not_an_empty_one(by_n: bool) -> None:
    free_list = TierFreeList([Block(i) for i in range(4)], TIER)
    first, second = hashed(free_list, [1, 2], None)
    free_list.append_n([first, second])
    free_list.forget_hash(first)
    first.block_hash_num_tokens = None
    assert ids(free_list.get_all_free_blocks()) == [2, 3, 0, 1]
    assert free_list.num_empty_blocks == 2
    if by_n:
        free_list.remove_n([first, second])
    else:
        free_list.remove(first)
        free_list.remove(second)
    assert free_list.num_empty_blocks == 2
    free_list.prepend_n([first])
    assert free_list.num_empty_blocks == 3
    assert free_list.popleft() is first


def test_initial_order_is_by_block_id() -> None:
    free_list = TierFreeList([Block(i) for i in range(5)], TIER)
    assert ids(free_list.popleft_n(2)) == [0, 1]
    assert free_list.popleft().block_id == 2


def test_run_is_most_recent_with_its_last_block_freed() -> None:
    free_list = TierFreeList([Block(i) for i in range(4)], TIER)
    run = make_run()
    older = hashed(free_list, [1, 2], run)
    single = hashed(free_list, [1], None)
    free_list.append(older[1])
    free_list.append_n(single)
    free_list.append(older[0])
    free_list.popleft()  # the one that stayed empty
    assert free_list.get_all_free_blocks() == [*single, older[1], older[0]]


def test_refreshing_scores_leaves_no_buckets_behind() -> None:
    """Scores are floats, so nearly every refresh makes new ranks: those that were left must go."""
    free_list = TierFreeList([Block(i) for i in range(20)], TIER)
    runs = [make_run() for _ in range(10)]
    for run in runs:
        free_list.append_n(hashed(free_list, [1], run))
    free_list.popleft_n(10)
    for step in range(1000):
        for number, run in enumerate(runs):
            run.rank = (1, 1.0 + step / 7, float(number))
            free_list.set_rank(run)
    assert len(free_list._buckets) < 200
    assert len(free_list._queue) < 200
    assert [free_list.run_of[block.block_id] for block in free_list.get_all_free_blocks()] == runs


def test_one_block_is_taken_from_where_the_common_bucket_stood_before() -> None:
    """A single block is taken from the queue's first entry, which is void if that bucket was given a higher rank since."""
    free_list = TierFreeList([Block(i) for i in range(4)], TIER)
    scored = make_run((1, 0.5, 0.0))
    blocks = hashed(free_list, [1, 2], None) + hashed(free_list, [1, 2], scored)
    free_list.append_n(blocks)
    free_list.set_common_rank((1, float("inf"), 0.0))
    assert free_list.run_of[free_list.popleft_n(1)[0].block_id] is scored
    free_list.set_common_rank(ACTIVE_RANK)
    assert free_list.run_of[free_list.popleft_n(1)[0].block_id] is None


class CountingBlock(Block):
    """Counts how often its depth is asked for: the steps of a search."""

    num_looks = 0

    @property
    def block_hash_num_tokens(self) -> int | None:
        CountingBlock.num_looks += 1
        return self._depth

    @block_hash_num_tokens.setter
    def block_hash_num_tokens(self, depth: int | None) -> None:
        self._depth = depth


@pytest.mark.parametrize("is_evicted_between", [False, True])
def test_cost_per_block_does_not_depend_on_the_runs_length(is_evicted_between: bool) -> None:
    """A request that shares the front of a long run takes it out and gives it back, again and again."""
    looks = []
    for length in (100, 2000):
        free_list: TierFreeList[Block] = TierFreeList([CountingBlock(i) for i in range(length)], TIER)
        reader = Reader("w")
        run = make_run()
        run.add_reader(reader)
        blocks = hashed(free_list, range(1, length + 1), run)
        free_list.append_n(blocks[::-1])
        CountingBlock.num_looks = 0
        for _ in range(10):
            front = blocks[:8]
            for block in front:
                free_list.remove(block)
            if is_evicted_between:
                free_list.popleft()
            free_list.append_n(front[::-1])
        looks.append(CountingBlock.num_looks)
        assert free_list.get_all_free_blocks() == blocks[::-1][10 * is_evicted_between :]
    assert looks[1] <= 1.2 * looks[0]
