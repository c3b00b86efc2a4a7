# SPDX-License-Identifier: Apache-2.0
"""What is fetched, in which order, and within which budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pool.pool_testing import FLASH, HOST, Content, CountingReader, Tiers, key_of
from vllm_lifetime.policy.prefetch import MAX_READERS, PrefetchBudget, PrefetchPlanner, TransferRates, free_members
from vllm_lifetime.pool.runs import Run

BLOCK_TOKENS = 16


class Values:
    """Eq. 1 of a run, from what each reader is worth."""

    def __init__(self) -> None:
        self.of_reader: dict[CountingReader, float] = {}

    def __call__(self, run: Run) -> float:
        return sum(self.of_reader.get(reader, 0.0) for reader in run.readers)


def rates_of(step_s: float = 1.0, block_s: float = 0.01) -> TransferRates:
    """Measured: a decode step, and a block from each tier."""
    rates = TransferRates()
    rates.observe_step(step_s)
    for tier in (HOST, FLASH):
        rates.observe_transfer(tier, 10, 10 * block_s)
    return rates


def planner_of(tiers: Tiers, values: Values, rates: TransferRates | None = None) -> PrefetchPlanner:
    """A planner over `tiers`."""
    return PrefetchPlanner(values, lambda block: block.block_hash in tiers.by_hash, BLOCK_TOKENS, rates or rates_of())


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
    chosen = planner_of(tiers, values).choose(readers, PrefetchBudget(6, 1.0))
    assert keys(chosen) == [key_of(c) for c in (*prefixes((2,) * 4), *prefixes((1,) * 4)[:2])]
    assert planner_of(tiers, values).choose(readers[2:], PrefetchBudget(6, 1.0)) == []


def test_a_run_is_fetched_though_its_prefix_is_gone() -> None:
    """Behind a hole nothing can be hit; behind what is fetched with it, it can."""
    tiers, values = Tiers(40, 40, 0), Values()
    shared = (9, 9)
    readers = [serve(tiers, values, name, 2, value, shared) for name, value in ((1, 0.5), (2, 0.9))]
    everything = [*prefixes(shared), *prefixes((*shared, 1, 1), 2), *prefixes((*shared, 2, 2), 2)]
    evict(tiers, everything)
    planner = planner_of(tiers, values)
    chosen = planner.choose(readers, PrefetchBudget(100, 100.0))
    assert keys(chosen) == [key_of(c) for c in (*prefixes(shared), *prefixes((*shared, 2, 2), 2), *prefixes((*shared, 1, 1), 2))]
    # The shared prefix cannot be had from below any more, nor what lies behind it.
    tiers.host.forget([slot for slot in tiers.host.slots if slot.block_hash in map(key_of, prefixes(shared))])
    assert planner.choose(readers, PrefetchBudget(100, 100.0)) == []


def test_a_run_with_a_hole_is_fetched_behind_it() -> None:
    """A block that is nowhere ends the fetch of its run."""
    tiers, values = Tiers(40, 40, 0), Values()
    reader = serve(tiers, values, 1, 5, 1.0)
    evict(tiers, prefixes((1,) * 5, 1))
    tiers.host.forget([slot for slot in tiers.host.slots if slot.block_hash == key_of((1,) * 3)])
    assert keys(planner_of(tiers, values).choose([reader], PrefetchBudget(9, 9.0))) == [key_of((1, 1))]


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
    chosen = planner_of(tiers, values).choose([reader], PrefetchBudget(9, 9.0))
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
    reader = serve(tiers, values, 1, 6, 1.0)
    evict(tiers, prefixes((1,) * 6))
    budget = PrefetchBudget.of(rates, **counts)
    assert len(planner_of(tiers, values, rates).choose([reader], budget)) == 3
    assert budget.is_spent
    assert PrefetchBudget.of(rates, **counts, debt_s=0.002).seconds == pytest.approx(0.008)


def test_nothing_is_fetched_from_a_tier_of_unknown_speed() -> None:
    """Some blocks are, to find out, also before a decode step has been timed."""
    tiers, values = Tiers(80, 80, 0), Values()
    reader = serve(tiers, values, 1, 40, 1.0)
    evict(tiers, prefixes((1,) * 40))
    rates = TransferRates()
    planner = planner_of(tiers, values, rates)
    assert rates.block_s(HOST) is None
    for _ in range(2):
        chosen = planner.choose([reader], PrefetchBudget.of(rates, num_empty=40, num_retired=0, num_reserved=0))
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
    chosen = planner.choose(readers, PrefetchBudget(4, 9.0))
    assert keys(chosen) == [key_of(c) for c in (*prefixes((2,) * 3), (1,))]
    tiers.run(readers[1], (2, 2, 2))
    assert keys(planner.choose(readers, PrefetchBudget(2, 9.0))) == [key_of(c) for c in prefixes((1,) * 3)[:2]]
    assert planner.num_wished == 0
    assert planner.wish(readers[1].runs) == (0, True)


def test_the_last_of_many_readers_is_never_looked_at() -> None:
    """With more readers than one decision looks at, the next one goes on where it stopped."""
    count = MAX_READERS + 5
    tiers, values = Tiers(count + 5, count + 5, 0), Values()
    others = [CountingReader(f"o{i}") for i in range(count)]
    reader = serve(tiers, values, 1, 2, 1.0)
    evict(tiers, prefixes((1, 1)))
    planner = planner_of(tiers, values)
    readers = [*others, reader]
    assert planner.choose(readers, PrefetchBudget(2, 1.0)) == []
    assert len(planner.choose(readers, PrefetchBudget(2, 1.0))) == 2


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
    chosen = planner.choose(readers, budget)
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
