# SPDX-License-Identifier: Apache-2.0
"""`AccessTable` over three tiers against a model that remembers, block by block, who read it.

The model knows no runs: every content has a record with the readers that are still live, and each physical block points
to one. HBM may hold the same content twice (vLLM does not merge blocks). A reader hits only one of such duplicates, so
for them the model gives two bounds: those who read this very block, and those who read its content anywhere.
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
from pool_testing import MAX_BLOCKS, Block, CountingReader, Request, Tiers, key_of

from vllm_lifetime.pool.access import Path
from vllm_lifetime.pool.runs import ACTIVE_RANK, Run, retired_rank
from vllm_lifetime.pool.tiers import Slot

SETTINGS = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    # The same examples in every run: a counterexample found by chance takes minutes to shrink, and belongs in a test of its own.
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


class Record:
    """Who may still read a content. `has_twins`: HBM held it twice at some time."""

    def __init__(self) -> None:
        self.readers: set[CountingReader] = set()
        self.is_unknown = False
        self.has_twins = False

    def add(self, reader: CountingReader | None) -> None:
        if reader is None:
            self.is_unknown = True
        elif reader.is_live:
            self.readers.add(reader)


class AccessMachine(RuleBasedStateMachine):
    """Requests of several workflows come, grow and end; blocks are copied down and evicted; readers end in any order.

    `start` and `grow` are the scheduler, `end` the boundary, the others the workers and other requests.
    """

    @initialize(num_hbm=st.integers(4, 16), num_host=st.integers(0, 8), num_flash=st.integers(0, 8))
    def make(self, num_hbm: int, num_host: int, num_flash: int) -> None:
        self.tiers = Tiers(num_hbm, num_host, num_flash)
        # Two readers of one workflow: what they share counts once.
        self.readers = [CountingReader(workflow, str(i)) for i, workflow in enumerate(("a", "a", "b", "c"))]
        self.running: list[Request] = []
        self.records: dict[Slot, Record] = {}
        """Of each physical block that was written with or joined to known content."""
        self.read_by: dict[Slot, Record] = {}
        """What is sure of each physical block, as opposed to its content."""
        self.read_anywhere: dict[bytes, Record] = {}
        """By hash, whichever block it was read from."""
        self.runs: set[Run] = set()

    def reader(self, number: int) -> CountingReader | None:
        """The last one is nobody known."""
        number %= len(self.readers) + 1
        return None if number == len(self.readers) else self.readers[number]

    def members(self) -> list[tuple[int, Block | Slot, Run]]:
        members = list(self.tiers.members())
        self.runs.update(run for _, _, run in members)
        return members

    # ------------------------------------------------------------------ model

    def model_prune(self) -> None:
        """Blocks that have lost their hash have lost their record."""
        for block in [block for block in self.records if block.block_hash is None]:
            del self.records[block], self.read_by[block]

    def model_read(self, block: Block, reader: CountingReader | None) -> None:
        assert block.block_hash is not None
        self.read_anywhere.setdefault(block.block_hash, Record()).add(reader)
        if block in self.records:
            self.records[block].add(reader)
            self.read_by[block].add(reader)

    def model_write(self, block: Block, reader: CountingReader | None) -> None:
        assert block.block_hash is not None
        self.read_anywhere.setdefault(block.block_hash, Record()).add(reader)
        below = [slot for _, slot in self.tiers.copies_of(block.block_hash) if slot in self.records]
        twin = self.tiers.twin_of(block)
        record = None
        if below:
            record = self.records[below[0]]
        elif twin is not None:
            record = self.records.get(twin)
        if record is None:
            if reader is None:
                return
            record = Record()
        record.add(reader)
        record.has_twins |= twin is not None
        self.records[block] = record
        self.read_by[block] = Record()
        self.read_by[block].add(reader)

    # ------------------------------------------------------------------ requests

    @rule(
        number=st.integers(0, 9),
        content=st.lists(st.integers(0, 1), min_size=1, max_size=MAX_BLOCKS),
        max_hit=st.sampled_from([MAX_BLOCKS, MAX_BLOCKS, 2, 0]),
        count=st.integers(0, MAX_BLOCKS),
    )
    def start(self, number: int, content: list[int], max_hit: int, count: int) -> None:
        """A request of a reader, live or ended, or of nobody known."""
        request = self.tiers.start(self.reader(number), tuple(content), max_hit)
        self.running.append(request)
        for block in request.blocks:
            self.model_read(block, request.path.reader)
        self.grow_request(request, count)

    def grow_request(self, request: Request, count: int) -> None:
        count = min(count, self.tiers.hbm.num_free_blocks)
        start = len(request.blocks)
        new = [block.block_id for block in self.tiers.hbm.get_all_free_blocks()[: min(count, len(request.content) - start)]]
        # The model has to see the state before each write: what is evicted first, then block by block.
        evicted = [self.tiers.blocks[i] for i in new]
        for block in evicted:
            self.records.pop(block, None)
            self.read_by.pop(block, None)
        blocks = self.tiers.grow(request, count)
        assert blocks == evicted
        for block in blocks:
            self.model_write(block, request.path.reader)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99), count=st.integers(1, 3))
    def grow(self, number: int, count: int) -> None:
        self.grow_request(self.running[number % len(self.running)], count)

    @precondition(lambda self: self.running)
    @rule(number=st.integers(0, 99))
    def finish(self, number: int) -> None:
        self.tiers.finish(self.running.pop(number % len(self.running)))

    @rule(number=st.integers(0, 3))
    def end(self, number: int) -> None:
        """A boundary; a second one of the same reader changes nothing."""
        reader = self.readers[number]
        before = {block: bool(record.readers) or record.is_unknown for block, record in self.records.items()}
        was_live = reader.is_live
        exact = [0, 0, 0]
        for record in (*self.records.values(), *self.read_by.values(), *self.read_anywhere.values()):
            record.readers.discard(reader)
        has_twins = False
        for tier, block, _ in self.tiers.members():
            record = self.records[block]
            exact[tier] += before[block] and not record.readers and not record.is_unknown
            has_twins |= record.has_twins
        retired = self.tiers.table.end(reader)
        assert not reader.is_live
        if not was_live:
            assert retired == [0, 0, 0]
        if not has_twins:
            assert retired == exact

    @rule(number=st.integers(0, 3))
    def replace_reader(self, number: int) -> None:
        """The next session of the workflow."""
        old = self.readers[number]
        if not old.is_live:
            self.readers[number] = CountingReader(old.workflow_id, old.name + "+")

    @rule(data=st.data(), score=st.sampled_from([0.0, 1.0, 2.5]))
    def score(self, data: st.DataObject, score: float) -> None:
        runs = list(dict.fromkeys(run for _, _, run in self.tiers.members() if not run.is_retired))
        if runs:
            self.tiers.table.set_rank(data.draw(st.sampled_from(runs)), (1, score, 0.0))

    # ------------------------------------------------------------------ copies and evictions

    @rule(data=st.data(), below=st.integers(0, 1))
    def copy_down(self, data: st.DataObject, below: int) -> None:
        sources = [block for block in self.tiers.blocks if block.block_hash is not None]
        if below:
            sources += [slot for slot in self.tiers.host.slots if slot.block_hash is not None]  # type: ignore[misc]
        if sources:
            for source in data.draw(st.lists(st.sampled_from(sources), max_size=4, unique=True)):
                if source.block_hash is None:
                    continue
                slot = self.tiers.copy_down(self.tiers.below[below], source)
                self.model_prune()
                if slot is not None:
                    self.records.pop(slot, None)
                    if source in self.records:
                        self.records[slot] = self.records[source]
                        self.read_by[slot] = Record()

    @rule(data=st.data())
    def evict_anything(self, data: st.DataObject) -> None:
        """As after a failed load, or a failed read from flash: free or held, in the middle of a prefix."""
        for block in data.draw(st.lists(st.sampled_from(self.tiers.blocks), max_size=3)):
            self.tiers.drop_hash(block)
        for tier in self.tiers.below:
            if tier.slots:
                tier.forget(data.draw(st.lists(st.sampled_from(tier.slots), max_size=3)))
        self.model_prune()

    @rule(count=st.integers(1, 16))
    def pressure(self, count: int) -> None:
        """Somebody takes the blocks that go first, and gives them back empty."""
        blocks = self.tiers.allocate(min(count, self.tiers.hbm.num_free_blocks))
        for block in blocks:
            block.ref_cnt = 0
        self.tiers.hbm.prepend_n(blocks)
        self.model_prune()

    # ------------------------------------------------------------------ invariants

    @invariant()
    def who_may_read_is_the_models(self) -> None:
        members = self.members()
        assert {block for _, block, _ in members} == set(self.records)
        for _, block, run in members:
            record, sure = self.records[block], self.read_by[block]
            readers, is_unknown = run.readers, run.has_unknown_reader
            assert block.block_hash is not None
            possible = self.read_anywhere[block.block_hash]
            assert sure.readers <= readers <= possible.readers
            assert sure.is_unknown <= is_unknown <= possible.is_unknown
            if not record.has_twins:
                assert readers == record.readers
                assert is_unknown == record.is_unknown
            assert run.is_retired == (not readers and not is_unknown)

    @invariant()
    def runs_are_consecutive(self) -> None:
        by_run: dict[Run, dict[int, bytes]] = {}
        for _, block, run in self.tiers.members():
            assert block.block_hash is not None
            index = len(block.block_hash) - 1
            # One content at each place, and each a prefix of the deeper ones.
            assert by_run.setdefault(run, {}).setdefault(index, block.block_hash) == block.block_hash
            if not self.records[block].has_twins:
                assert run.start <= index < run.end
        for hashes in by_run.values():
            deepest = hashes[max(hashes)]
            assert all(deepest.startswith(block_hash) for block_hash in hashes.values())

    @invariant()
    def members_are_counted(self) -> None:
        members = self.members()
        counts = {run: [0, 0, 0] for run in self.runs}
        for tier, _, run in members:
            counts[run][tier] += 1
        for run, count in counts.items():
            assert run.num_blocks == count
            if not any(count):
                assert not run.readers
        for reader in self.readers:
            for run in reader.runs:
                assert any(run.num_blocks)
                assert reader in run.readers
            assert reader.is_live or not reader.runs
        for run in self.runs:
            for reader in run.readers:
                assert run in reader.runs

    @invariant()
    def ranks_are_what_lists_go_by(self) -> None:
        for free_list in self.tiers.free_lists:
            order = [free_list.run_of[block.block_id] for block in free_list.get_all_free_blocks()]
            order = order[free_list.num_empty_blocks :]
            ranks = [ACTIVE_RANK if run is None else run.rank for run in order]
            assert ranks == sorted(ranks)
            assert free_list.num_retired_blocks == sum(rank[0] == 0 for rank in ranks)

    def teardown(self) -> None:
        """All requests end and all blocks go: nothing is left, of readers that live and of those that do not."""
        if not hasattr(self, "tiers"):
            return
        for request in self.running:
            self.tiers.finish(request)
        for reader in self.readers[::2]:
            self.tiers.table.end(reader)
        assert self.tiers.hbm.num_free_blocks == len(self.tiers.blocks)
        self.tiers.allocate(len(self.tiers.blocks))
        for tier in self.tiers.below:
            assert len(tier.allocate(len(tier.slots))) == len(tier.slots)
        for reader in self.readers:
            assert not reader.runs
        for run in self.runs:
            assert run.num_blocks == [0, 0, 0]
            assert not run.readers
        assert self.tiers.hbm.num_retired_blocks == 0


def test_access_sets_are_the_models() -> None:
    run_state_machine_as_test(AccessMachine, settings=SETTINGS)


# ---------------------------------------------------------------------- examples one can read


@pytest.fixture
def tiers() -> Tiers:
    return Tiers(32, 16, 16)


def run_of(tiers: Tiers, block: Block) -> Run:
    run = tiers.hbm.run_of[block.block_id]
    assert run is not None
    return run


def readers_of(tiers: Tiers, blocks: Sequence[Block]) -> list[str]:
    """For each block, the names of its readers."""
    return ["".join(sorted(reader.name for reader in run_of(tiers, block).readers)) for block in blocks]  # type: ignore[attr-defined]


@pytest.fixture
def a() -> CountingReader:
    return CountingReader("a", "a")


@pytest.fixture
def b() -> CountingReader:
    return CountingReader("b", "b")


@pytest.fixture
def c() -> CountingReader:
    return CountingReader("c", "c")


def test_a_request_that_grows_stays_one_run(tiers: Tiers, a: CountingReader) -> None:
    request = tiers.start(a, (0, 1, 0, 1, 0))
    for _ in range(5):
        tiers.grow(request, 1)
    (run,) = a.runs
    assert (run.start, run.end, run.num_blocks) == (0, 5, [5, 0, 0])
    # The next turn hits all of it and goes on.
    tiers.finish(request)
    tiers.run(a, (0, 1, 0, 1, 0, 1))
    assert a.runs == {run}
    assert run.num_blocks == [6, 0, 0]


def test_a_shared_front_splits_and_takes_its_copies_along(tiers: Tiers, a: CountingReader, b: CountingReader) -> None:
    blocks = tiers.run(a, (0, 0, 0, 0))
    slots = [tiers.copy_down(tiers.host, block) for block in blocks]
    deep = [tiers.copy_down(tiers.flash, slot) for slot in slots if slot is not None]
    tiers.run(b, (0, 0, 1))
    assert readers_of(tiers, blocks) == ["ab", "ab", "a", "a"]
    front, back = run_of(tiers, blocks[0]), run_of(tiers, blocks[3])
    assert (front.start, front.end, front.num_blocks) == (0, 2, [2, 2, 2])
    assert (back.start, back.end, back.num_blocks) == (2, 4, [2, 2, 2])
    assert [tiers.host.run_of(slot) for slot in slots if slot] == [front, front, back, back]
    assert [tiers.flash.run_of(slot) for slot in deep if slot] == [front, front, back, back]


def test_end_retires_in_every_tier_what_nobody_else_reads(tiers: Tiers, a: CountingReader, b: CountingReader) -> None:
    blocks = tiers.run(a, (0, 0, 0, 0))
    for block in blocks:
        tiers.copy_down(tiers.host, block)
    tiers.run(b, (0, 0, 1))
    assert tiers.table.end(a) == [2, 2, 0]
    assert [run_of(tiers, block).is_retired for block in blocks] == [False, False, True, True]
    assert (tiers.hbm.num_retired_blocks, tiers.host.free_list.num_retired_blocks) == (2, 2)
    assert tiers.table.end(b) == [3, 2, 0]
    assert run_of(tiers, blocks[0]).rank == retired_rank(2)
    assert run_of(tiers, blocks[2]).rank == retired_rank(1)
    # Deepest first, the shared front last.
    order = tiers.hbm.get_all_free_blocks()[tiers.hbm.num_empty_blocks :]
    assert order[:2] == [blocks[3], blocks[2]]
    assert order[-2:] == [blocks[1], blocks[0]]


def test_reading_what_was_retired_makes_it_live_again(tiers: Tiers, a: CountingReader, b: CountingReader) -> None:
    blocks = tiers.run(a, (0, 0, 0))
    tiers.table.end(a)
    tiers.run(b, (0, 0))
    assert [run_of(tiers, block).is_retired for block in blocks] == [False, False, True]
    assert tiers.hbm.num_retired_blocks == 1


def test_what_nobody_known_reads_is_never_retired(tiers: Tiers, a: CountingReader) -> None:
    blocks = tiers.run(a, (0, 0, 0))
    tiers.run(None, (0, 0, 1))
    assert tiers.table.end(a) == [1, 0, 0]
    assert [run_of(tiers, block).is_retired for block in blocks] == [False, False, True]
    assert not tiers.hbm.run_of[tiers.by_hash[key_of((0, 0, 1))][0].block_id]


def test_what_an_ended_reader_still_writes_is_retired_from_birth(tiers: Tiers, a: CountingReader) -> None:
    request = tiers.start(a, (0, 0, 0, 0))
    tiers.grow(request, 2)
    assert tiers.table.end(a) == [2, 0, 0]
    tiers.grow(request, 2)
    assert all(run_of(tiers, block).is_retired for block in request.blocks)
    assert len({run_of(tiers, block) for block in request.blocks}) == 1
    tiers.finish(request)
    assert tiers.hbm.num_retired_blocks == 4
    assert not a.runs


def test_an_ended_reader_does_not_extend_a_run_that_is_gone(tiers: Tiers, a: CountingReader) -> None:
    """A failed load evicts the tail while the request holds it; then the boundary comes, then the request goes on."""
    request = tiers.start(a, (0, 0))
    tiers.grow(request, 1)
    tiers.drop_hash(request.blocks[0])
    tiers.table.end(a)
    tiers.grow(request, 1)
    assert run_of(tiers, request.blocks[1]).is_retired


def test_a_fork_of_one_readers_own_prefix(tiers: Tiers, a: CountingReader, b: CountingReader) -> None:
    """Both branches lie behind the same front; a reader of one of them must not get, or miss, blocks of the other."""
    left = tiers.run(a, (0, 0, 0, 0))
    right = tiers.run(a, (0, 0, 1, 1))
    tiers.run(b, (0, 0, 0))
    assert readers_of(tiers, left) == ["ab", "ab", "ab", "a"]
    assert readers_of(tiers, right[2:]) == ["a", "a"]
    assert tiers.table.end(a) == [3, 0, 0]


def test_parallel_requests_of_one_reader_that_part(tiers: Tiers, a: CountingReader, b: CountingReader) -> None:
    tiers.run(a, (0, 0))
    first, second = tiers.start(a, (0, 0, 0, 0)), tiers.start(a, (0, 0, 1, 1))
    tiers.grow(first, 2)
    tiers.grow(second, 2)
    tiers.run(b, (0, 0, 1, 1))
    assert readers_of(tiers, second.blocks) == ["ab"] * 4
    assert readers_of(tiers, first.blocks[2:]) == ["a", "a"]


def test_computing_a_front_twice_does_not_join_what_lies_behind_it(
    tiers: Tiers, a: CountingReader, b: CountingReader, c: CountingReader
) -> None:
    """Two workflows start at once with the same system prompt: neither hits, and vLLM computes it twice."""
    first, second = tiers.start(a, (0, 0, 0, 0)), tiers.start(b, (0, 0, 1, 1))
    tiers.grow(first, 4)
    tiers.grow(second, 4)
    assert readers_of(tiers, first.blocks) == ["ab", "ab", "a", "a"]
    assert readers_of(tiers, second.blocks) == ["ab", "ab", "b", "b"]
    tiers.finish(first)
    tiers.finish(second)
    tiers.run(c, (0, 0, 1, 1))
    assert readers_of(tiers, second.blocks[2:]) == ["bc", "bc"]
    assert tiers.table.end(a) == [2, 0, 0]


def test_loading_a_front_does_not_join_what_lies_behind_it(tiers: Tiers, a: CountingReader, b: CountingReader) -> None:
    """Host still has all of `a`'s prefix, HBM nothing; `b` loads the front."""
    for block in tiers.run(a, (0, 0, 0, 0)):
        tiers.copy_down(tiers.host, block)
        tiers.drop_hash(block)
    blocks = tiers.run(b, (0, 0, 1))
    assert readers_of(tiers, blocks) == ["ab", "ab", "b"]
    deep = tiers.host.get(key_of((0, 0, 0)))
    assert deep is not None
    run = tiers.host.run_of(deep)
    assert run is not None
    assert run.readers == {a}


def test_loading_ones_own_prefix_keeps_it_one_run(tiers: Tiers, a: CountingReader) -> None:
    for block in tiers.run(a, (0, 0, 0, 0)):
        tiers.copy_down(tiers.host, block)
        tiers.drop_hash(block)
    request = tiers.start(a, (0, 0, 0, 0, 0))
    for _ in range(5):
        tiers.grow(request, 1)
    (run,) = a.runs
    assert run.num_blocks == [5, 4, 0]


def test_last_run_gone_is_told_once_it_is_so(tiers: Tiers, a: CountingReader) -> None:
    blocks = tiers.run(a, (0, 0))
    tiers.copy_down(tiers.host, blocks[0])
    for block in blocks:
        tiers.drop_hash(block)
    assert a.num_times_gone == 0
    tiers.host.clear()
    assert a.num_times_gone == 1
    assert not a.runs


def test_ending_costs_by_runs_not_by_blocks(tiers: Tiers) -> None:
    """The boundary touches no block."""
    big = Tiers(2000, 0, 0)
    reader = CountingReader("w", "w")
    request = Request(Path(reader), tuple([0] * 1500))
    big.grow(request, 1500)
    big.finish(request)
    (run,) = reader.runs
    untouched = [(block.prev_free_block, block.next_free_block) for block in big.blocks]
    assert big.table.end(reader) == [1500, 0, 0]
    assert [(block.prev_free_block, block.next_free_block) for block in big.blocks] == untouched
    assert run.is_retired


def test_a_run_without_blocks_keeps_its_readers_for_ever(tiers: Tiers) -> None:
    """A content that HBM holds three times, a split that finds two of them, and the third one read later."""
    first, second = CountingReader("w1"), CountingReader("w2")
    for _ in range(3):
        tiers.run(first, (0, 0, 0), max_hit=0)
    tiers.finish(tiers.start(second, (0,)))
    for block in list(tiers.by_hash[key_of((0,))][:2]):
        tiers.hbm.remove(block)
        tiers.drop_hash(block)
        tiers.hbm.prepend_n((block,))
    third = CountingReader("w3")
    tiers.finish(tiers.start(third, (0,)))
    for reader in (first, second, third):
        assert all(any(run.num_blocks) and run.start < run.end for run in reader.runs)
    blocks = tiers.by_hash[key_of((0,))]
    run = tiers.hbm.run_of[blocks[0].block_id]
    assert run is not None and third in run.readers and (run.start, run.end) == (0, 1)
    for reader in (first, second, third):
        tiers.table.end(reader)
    tiers.hbm.append_n(tiers.hbm.popleft_n(0))
    for block in tiers.allocate(tiers.hbm.num_free_blocks):
        assert block.block_hash is None
    assert not first.runs and not second.runs and not third.runs
