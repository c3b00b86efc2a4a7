# SPDX-License-Identifier: Apache-2.0
"""What is fetched, in which order, and within which budget."""

import random
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool.pool_testing import FLASH, HBM, HOST, Block, Content, CountingReader, Tiers, key_of
from vllm_lifetime.policy import prefetch
from vllm_lifetime.policy.prefetch import (
    MAX_AUDIENCES,
    MAX_NEWLY_LOST,
    MAX_PREFIX_CHECKS,
    MIN_KEPT,
    PrefetchBudget,
    PrefetchPlanner,
    TransferRates,
    free_members,
)
from vllm_lifetime.pool.runs import RankGroup, Run

BLOCK_TOKENS = 16


class Values:
    """Eq. 1 of a run, from what each reader is worth."""

    def __init__(self) -> None:
        self.of_reader: dict[CountingReader, float] = {}

    def __call__(self, run: Run) -> float:
        return sum(self.of_reader[reader] for reader in self.of_reader if reader in run.readers)


def rates_of(step_s: float = 1.0, block_s: float = 0.01) -> TransferRates:
    """Measured: a decode step, and a block from each tier."""
    rates = TransferRates()
    rates.observe_step(step_s)
    for tier in (HOST, FLASH):
        rates.observe_transfer(tier, 10, 10 * block_s)
    return rates


def planner_of(tiers: Tiers, values: Values, rates: TransferRates | None = None) -> PrefetchPlanner:
    """A planner over `tiers`, which has been told of all that HBM lacks."""
    planner = PrefetchPlanner(values, lambda block: block.block_hash in tiers.by_hash, BLOCK_TOKENS, rates or rates_of())
    planner.note_lost({run: None for _, _, run in tiers.members()})
    return planner


def serve(tiers: Tiers, values: Values, name: int, length: int, value: float, shared: Content = ()) -> CountingReader:
    """A reader has read a prefix of its own behind `shared`, worth `value`, and all of it has been copied down."""
    reader = CountingReader(f"w{name}")
    content = (*shared, *([name] * length))
    for block in reversed(tiers.run(reader, content, max_hit=len(content))):
        tiers.copy_down(tiers.host, block)
    values.of_reader[reader] = value
    return reader


def evict(tiers: Tiers, contents: list[Content]) -> None:
    """HBM gives these blocks up."""
    for content in contents:
        for block in list(tiers.by_hash[key_of(content)]):
            tiers.hbm.remove(block)
            tiers.drop_hash(block)
            tiers.hbm.prepend_n([block])


def prefixes(content: Content, start: int = 0) -> list[Content]:
    """The contents of its blocks, from block `start` on."""
    return [content[:length] for length in range(start + 1, len(content) + 1)]


def keys(chosen: list[tuple[int, object]]) -> list[bytes]:
    """The hashes of what was chosen."""
    return [block.block_hash for _, block in chosen]  # type: ignore[attr-defined]


def test_the_most_valuable_run_is_fetched_last() -> None:
    """Ranked by Eq. 1, greedily, from the front of each run; what is worth nothing is not fetched."""
    tiers, values = Tiers(40, 40, 0), Values()
    readers = [serve(tiers, values, name, 4, value) for name, value in ((1, 0.2), (2, 0.9), (3, 0.0))]
    for name in (1, 2, 3):
        evict(tiers, prefixes((name,) * 4))
    chosen = planner_of(tiers, values).choose(PrefetchBudget(6, 1.0))
    assert keys(chosen) == [key_of(c) for c in (*prefixes((2,) * 4), *prefixes((1,) * 4)[:2])]
    values.of_reader[readers[0]] = values.of_reader[readers[1]] = 0.0
    assert planner_of(tiers, values).choose(PrefetchBudget(6, 1.0)) == []


def test_a_run_is_fetched_though_its_prefix_is_gone() -> None:
    """Behind a hole nothing can be hit; behind what is fetched with it, it can."""
    tiers, values = Tiers(40, 40, 0), Values()
    shared = (9, 9)
    for name, value in ((1, 0.5), (2, 0.9)):
        serve(tiers, values, name, 2, value, shared)
    everything = [*prefixes(shared), *prefixes((*shared, 1, 1), 2), *prefixes((*shared, 2, 2), 2)]
    evict(tiers, everything)
    planner = planner_of(tiers, values)
    chosen = planner.choose(PrefetchBudget(100, 100.0))
    assert keys(chosen) == [key_of(c) for c in (*prefixes(shared), *prefixes((*shared, 2, 2), 2), *prefixes((*shared, 1, 1), 2))]
    # The shared prefix cannot be had from below any more, nor what lies behind it.
    tiers.host.forget([slot for slot in tiers.host.slots if slot.block_hash in [key_of(c) for c in prefixes(shared)]])
    assert planner.choose(PrefetchBudget(100, 100.0)) == []


def test_a_run_with_a_hole_is_fetched_behind_it() -> None:
    """A block that is nowhere ends the fetch of its run."""
    tiers, values = Tiers(40, 40, 0), Values()
    serve(tiers, values, 1, 5, 1.0)
    evict(tiers, prefixes((1,) * 5, 1))
    tiers.host.forget([slot for slot in tiers.host.slots if slot.block_hash == key_of((1,) * 3)])
    assert keys(planner_of(tiers, values).choose(PrefetchBudget(9, 9.0))) == [key_of((1, 1))]


def test_a_wish_with_a_hole_is_fetched_twice() -> None:
    """What is wished and likely, too, is fetched once, also if the rest of it is nowhere."""
    tiers, values = Tiers(40, 40, 0), Values()
    reader = serve(tiers, values, 1, 5, 1.0)
    evict(tiers, prefixes((1,) * 5))
    tiers.host.forget([slot for slot in tiers.host.slots if slot.block_hash == key_of((1,) * 3)])
    planner = planner_of(tiers, values)
    planner.wish(reader.runs)
    assert keys(planner.choose(PrefetchBudget(9, 9.0))) == [key_of(c) for c in prefixes((1,) * 2)]


def test_a_block_that_hbm_holds_twice_hides_a_missing_one() -> None:
    """What was computed twice makes a run look fuller than it is: what is missing is fetched from its front all the same."""
    tiers, values = Tiers(40, 40, 0), Values()
    serve(tiers, values, 1, 4, 1.0)
    tiers.run(next(iter(values.of_reader)), (1,) * 4, max_hit=0)
    for content, count in (((1,) * 2, 1), ((1,) * 3, 2), ((1,) * 4, 2)):
        for block in tiers.by_hash[key_of(content)][:count]:
            tiers.hbm.remove(block)
            tiers.drop_hash(block)
            tiers.hbm.prepend_n([block])
    chosen = planner_of(tiers, values).choose(PrefetchBudget(9, 9.0))
    assert keys(chosen) == [key_of(c) for c in prefixes((1,) * 4, 2)]


def test_the_faster_tier_is_left_out() -> None:
    """A block that host and flash both have comes from host."""
    tiers, values = Tiers(40, 40, 40), Values()
    reader = CountingReader("w")
    values.of_reader[reader] = 1.0
    blocks = tiers.run(reader, (1, 1, 1))
    for block in blocks:
        tiers.copy_down(tiers.flash, block)
    tiers.copy_down(tiers.host, blocks[1])
    evict(tiers, prefixes((1, 1, 1)))
    chosen = planner_of(tiers, values).choose(PrefetchBudget(9, 9.0))
    assert [tier for tier, _ in chosen] == [FLASH, HOST, FLASH]


def test_the_budget_is_overdrawn() -> None:
    """S = min(S_a, S_bw), less what is reserved; what a step cannot carry is owed by the next one."""
    rates = rates_of(step_s=0.01, block_s=0.004)
    counts = {"num_empty": 3, "num_retired": 4, "num_reserved": 2}
    assert PrefetchBudget.of(rates, **counts) == PrefetchBudget(5, 0.01)
    assert PrefetchBudget.of(rates, num_empty=0, num_retired=0, num_reserved=1).is_spent
    assert PrefetchBudget.of(rates, **counts, capacity_blocks=100, rho=0.2, num_unread=15).blocks == 5 + 5
    assert PrefetchBudget.of(rates, **counts, capacity_blocks=100, rho=0.2, num_unread=50).blocks == 5
    tiers, values = Tiers(40, 40, 0), Values()
    serve(tiers, values, 1, 6, 1.0)
    evict(tiers, prefixes((1,) * 6))
    budget = PrefetchBudget.of(rates, **counts)
    assert len(planner_of(tiers, values, rates).choose(budget)) == 3
    assert budget.is_spent
    assert PrefetchBudget.of(rates, **counts, debt_s=0.002).seconds == pytest.approx(0.008)


def test_nothing_is_fetched_from_a_tier_of_unknown_speed() -> None:
    """Some blocks are, to find out, also before a decode step has been timed."""
    tiers, values = Tiers(80, 80, 0), Values()
    serve(tiers, values, 1, 40, 1.0)
    evict(tiers, prefixes((1,) * 40))
    rates = TransferRates()
    planner = planner_of(tiers, values, rates)
    assert rates.block_s(HOST) is None
    for _ in range(2):
        chosen = planner.choose(PrefetchBudget.of(rates, num_empty=40, num_retired=0, num_reserved=0))
        assert len(chosen) in (8, 9)
        rates.observe_step(0.1)
    assert rates.step_s == pytest.approx(0.1)


def test_a_wish_waits_for_its_turn() -> None:
    """What the harness asks for comes first, whatever it is thought to be worth, and is forgotten when it is there."""
    tiers, values = Tiers(40, 40, 0), Values()
    readers = [serve(tiers, values, name, 3, value) for name, value in ((1, 0.9), (2, 0.0))]
    for name in (1, 2):
        evict(tiers, prefixes((name,) * 3))
    planner = planner_of(tiers, values)
    assert planner.wish(readers[1].runs) == (3, True)
    chosen = planner.choose(PrefetchBudget(4, 9.0))
    assert keys(chosen) == [key_of(c) for c in (*prefixes((2,) * 3), (1,))]
    tiers.run(readers[1], (2, 2, 2))
    assert keys(planner.choose(PrefetchBudget(2, 9.0))) == [key_of(c) for c in prefixes((1,) * 3)[:2]]
    assert planner.num_wished == 0
    assert planner.wish(readers[1].runs) == (0, True)


def test_the_last_of_many_audiences_is_never_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more audiences than one decision looks at, the next one goes on where it stopped."""
    monkeypatch.setattr(prefetch, "MAX_AUDIENCES", 4)
    tiers, values = Tiers(40, 40, 0), Values()
    for name in range(1, 11):
        serve(tiers, values, name, 1, float(name == 6))
        evict(tiers, [(name,)])
    planner = planner_of(tiers, values)
    chosen = [planner.choose(PrefetchBudget(1, 1.0)) for _ in range(3)]
    assert sum(map(len, chosen)) == 1
    assert MAX_AUDIENCES >= 365, "the paper's 72 workflows of five agents, and the prompts that they share"


def test_a_wish_behind_wishes_that_cannot_be_fetched_waits_for_ever() -> None:
    """What is wished and lies behind a hole does not keep the others from being fetched."""
    count = MAX_PREFIX_CHECKS + 1
    tiers, values = Tiers(300, 300, 0), Values()
    shared = (99, 99)
    readers = [serve(tiers, values, name, 1, 0.0, shared) for name in range(1, count + 1)]
    last = serve(tiers, values, 98, 3, 0.0)
    evict(tiers, [*prefixes(shared), *((*shared, name) for name in range(1, count + 1)), *prefixes((98,) * 3)])
    tiers.host.forget([slot for slot in tiers.host.slots if slot.block_hash in [key_of(c) for c in prefixes(shared)]])
    planner = planner_of(tiers, values)
    assert planner.wish({run for reader in readers for run in reader.runs if run.start})[0] == count
    assert planner.wish(last.runs) == (3, True)
    chosen = [planner.choose(PrefetchBudget(9, 9.0)) for _ in range(2)]
    assert chosen[0] == [] and keys(chosen[1]) == [key_of(c) for c in prefixes((98,) * 3)]


def test_runs_that_are_gone_are_kept_for_ever() -> None:
    """Audiences that are never fetched from, and losses between which nothing is decided, do not pile up."""
    tiers, values = Tiers(4, 0, 0), Values()
    planner = planner_of(tiers, values)
    stays = CountingReader("w")
    for i in range(4 * (MAX_NEWLY_LOST + MIN_KEPT)):
        lost = tiers.run(stays, (i % 256, i // 256, 0))
        planner.note_lost([run for block in lost if (run := tiers.hbm.run_of[block.block_id]) is not None])
        evict(tiers, [(i % 256, i // 256, 0)])
        assert len(planner._newly_lost) <= MAX_NEWLY_LOST + 1
    assert len(planner._shelf_of) <= 2 * MIN_KEPT


@settings(max_examples=200, deadline=None)
@given(
    workload=st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(0, 3)),
        min_size=1,
        max_size=12,
    ),
    lost=st.lists(st.integers(0, 39), max_size=12),
    room=st.integers(0, 20),
    seconds=st.floats(0.0, 0.2),
)
def test_what_is_chosen_could_not_be_hit(
    workload: list[tuple[int, list[int], int]], lost: list[int], room: int, seconds: float
) -> None:
    """Whatever was read, evicted and lost: each block is below, missing in HBM, of a live run, chosen once, within budget."""
    tiers, values = Tiers(40, 40, 0), Values()
    readers = [CountingReader(f"w{i}") for i in range(6)]
    for name, content, num_evicted in workload:
        reader = readers[name]
        values.of_reader[reader] = 0.1 + name / 10
        blocks = tiers.run(reader, tuple(content), max_hit=len(content))
        for block in reversed(blocks):
            tiers.copy_down(tiers.host, block)
        evict(tiers, [tuple(content[: i + 1]) for i in range(len(content) - num_evicted, len(content)) if i >= 0])
    tiers.host.forget([tiers.host.slots[i] for i in lost])
    before = {run: list(run.num_blocks) for reader in readers for run in reader.runs}
    planner = planner_of(tiers, values)
    budget = PrefetchBudget(room, seconds)
    chosen = planner.choose(budget)
    assert len(chosen) == len(set(keys(chosen))) <= room
    assert len(chosen) * 0.01 <= seconds + 0.01
    assert budget.blocks == room - len(chosen)
    present = set(tiers.by_hash)
    for tier, block in chosen:
        run = tiers.host.run_of(block)
        assert tier == HOST and run is not None and run.readers
        assert block.block_hash not in present
        assert block in list(free_members(run, HOST))
        present.add(block.block_hash)
    assert {run: list(run.num_blocks) for reader in readers for run in reader.runs} == before


class Reference:
    """The same decision by sorting everything that anybody reads, block by block."""

    def __init__(self, tiers: Tiers, values: Values, readers: list[CountingReader]) -> None:
        self.tiers = tiers
        self.values = values
        self.runs = list({run: None for reader in readers for run in reader.runs})
        self.in_hbm = set(tiers.by_hash)

    def candidates(self) -> list[Run]:
        """What is worth something, active, not whole in HBM, and below, by value and start."""
        found = [
            run
            for run in self.runs
            if not run.is_retired and run.num_blocks[HBM] < run.end - run.start and any(run.num_blocks[HOST:])
        ]
        return sorted((run for run in found if self.values(run) > 0.0), key=self.key)[:MAX_PREFIX_CHECKS]

    def key(self, run: Run) -> tuple[float, int]:
        return -self.values(run), run.start

    def has_prefix(self, run: Run, fetched: set[Run]) -> bool:
        """One of its readers reads runs without a hole before it, and they are in HBM or fetched."""
        for reader in run.readers:
            there = {
                index
                for other in reader.runs
                if other in fetched or other.num_blocks[HBM] >= other.end - other.start
                for index in range(other.start, other.end)
            }
            if there.issuperset(range(run.start)):
                return True
        return False

    def choose(self, num_blocks: int) -> list[bytes]:
        """The hashes of the blocks to fetch."""
        chosen: list[bytes] = []
        fetched: set[Run] = set()
        for run in self.candidates():
            if not self.has_prefix(run, fetched):
                continue
            below = {
                (block.block_hash_num_tokens or 0) // BLOCK_TOKENS - 1: block.block_hash or b""
                for tier in (FLASH, HOST)
                for block in free_members(run, tier)
                if block.block_hash not in self.in_hbm
            }
            reach = run.start + run.num_blocks[HBM]
            for index in sorted(below):
                if index > reach or len(chosen) == num_blocks:
                    break
                chosen.append(below[index])
                reach += 1
            if reach >= run.end:
                fetched.add(run)
            if len(chosen) == num_blocks:
                break
        return chosen


class WorkflowValues(Values):
    """Eq. 1 of a run from what each workflow is worth that reads it, through however many segments."""

    def __init__(self) -> None:
        super().__init__()
        self.of_workflow: dict[str, float] = {}

    def __call__(self, run: Run) -> float:
        return sum(self.of_workflow.get(workflow, 0.0) for workflow in sorted({reader.workflow_id for reader in run.readers}))


class Audiences:
    """Keeps runs that the same workflows read in one group, as the scorer does."""

    def __init__(self, tiers: Tiers) -> None:
        self.tiers = tiers
        self.groups: dict[frozenset[str], RankGroup] = {}

    def regroup(self) -> None:
        for run in {run: None for _, _, run in self.tiers.members()}:
            if not run.is_retired:
                key = frozenset(reader.workflow_id for reader in run.readers)
                group = self.groups.setdefault(key, RankGroup(3)) if key else None
                self.tiers.table.set_group(run, group)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 60), grouped=st.booleans())
def test_another_run_than_the_best_is_fetched(seed: int, num_steps: int, grouped: bool) -> None:
    """Whatever was read, copied, evicted, lost, fetched and ended: what the planner chooses is what sorting everything gives."""
    rng = random.Random(seed)
    tiers, values = Tiers(16, 40, 40), WorkflowValues()
    values.of_workflow = {f"w{i}": rng.random() for i in range(3)}
    planner = planner_of(tiers, values)
    audiences = Audiences(tiers)
    readers = [CountingReader(f"w{i % 3}") for i in range(6)]
    allocate = tiers.allocate

    def allocate_and_note(count: int) -> list[Block]:
        first = islice(tiers.hbm.iter_blocks_after(None), count)
        planner.note_lost([run for block in first if (run := tiers.hbm.run_of[block.block_id]) is not None])
        return allocate(count)

    tiers.allocate = allocate_and_note  # type: ignore[method-assign]
    for _ in range(num_steps):
        index = rng.randrange(len(readers))
        kind = rng.choice("rrrrreeeefvvx")
        if kind == "r":
            content = tuple(rng.choice((0, 0, 1)) for _ in range(rng.randrange(1, 7)))
            for block in tiers.run(readers[index], content, max_hit=len(content)):
                if rng.random() < 0.9:
                    tiers.copy_down(rng.choice(tiers.below), block)
        elif kind == "e":
            blocks = tiers.allocate(rng.randrange(1, 17))
            for block in blocks:
                block.ref_cnt = 0
            tiers.hbm.prepend_n(blocks)
        elif kind == "f":
            tier = rng.choice(tiers.below)
            tier.forget([rng.choice(tier.slots)])
        elif kind == "v":
            values.of_workflow[readers[index].workflow_id] = rng.choice((0.0, 0.5, 0.5, rng.random()))
        else:
            tiers.table.end(readers[index])
            readers[index] = CountingReader(readers[index].workflow_id)
        if grouped:
            audiences.regroup()
        if rng.random() < 0.5:
            reference = Reference(tiers, values, readers)
            num_blocks = rng.randrange(1, 12)
            chosen = planner.choose(PrefetchBudget(num_blocks, 100.0))
            if max(Counter(map(reference.key, reference.candidates())).values(), default=0) <= 1:
                assert keys(chosen) == reference.choose(num_blocks)
