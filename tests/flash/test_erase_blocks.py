# SPDX-License-Identifier: Apache-2.0
"""Cycles per erase block, against a model that keeps every page; the history of a day; endurance."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.flash.endurance import device_years, drive_writes_per_day, endurance_used
from vllm_lifetime.flash.erase_blocks import NAND_PAGE_BYTES, EraseBlocks
from vllm_lifetime.flash.write_history import INTERVAL_S, NUM_INTERVALS, WriteHistory

PAGES = 4
BLOCK = PAGES * NAND_PAGE_BYTES
NUM_BLOCKS = 5


@given(st.lists(st.tuples(st.integers(0, 22 * NAND_PAGE_BYTES), st.integers(1, 6 * NAND_PAGE_BYTES)), max_size=40))
def test_cycles_are_those_of_a_model_that_keeps_every_page(writes: list[tuple[int, int]]) -> None:
    blocks = EraseBlocks(NUM_BLOCKS * BLOCK, BLOCK)
    programmed = [set[int]() for _ in range(NUM_BLOCKS)]
    pages, erases, moved = [0] * NUM_BLOCKS, [0] * NUM_BLOCKS, 0
    for offset, length in writes:
        touched = range(offset // NAND_PAGE_BYTES, -(-(offset + length) // NAND_PAGE_BYTES))
        inside = [page for page in touched if page < NUM_BLOCKS * PAGES]
        assert blocks.program(offset, length) == len(inside)
        for block in {page // PAGES for page in inside}:
            new = {page for page in inside if page // PAGES == block}
            pages[block] += len(new)
            if new & programmed[block]:
                erases[block] += 1
                moved += len(programmed[block] - new)
            programmed[block] |= new
    summary = blocks.summary()
    assert list(blocks.pages_programmed) == pages
    assert list(blocks.erases) == erases
    assert summary.moved_pages == moved
    assert summary.max_cycles == max(pages) / PAGES
    assert math.isclose(summary.mean_cycles, sum(pages) / PAGES / NUM_BLOCKS)
    assert (summary.in_place_erases, summary.max_in_place_erases) == (sum(erases), max(erases))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10 * NAND_PAGE_BYTES), st.integers(1, 6 * NAND_PAGE_BYTES), st.integers(1, 4), st.integers(0, 4)
        ),
        max_size=20,
    )
)
def test_several_writes_at_once_are_as_many_one_by_one(writes: list[tuple[int, int, int, int]]) -> None:
    """In place; of the levelled pages there are as many as were programmed."""
    at_once, one_by_one, levelled = (EraseBlocks(NUM_BLOCKS * BLOCK, BLOCK) for _ in range(3))
    for offset, length, times, programs in writes:
        programs = min(programs, times)
        num_pages = sum(levelled.program(offset, length) for _ in range(programs))
        assert at_once.program(offset, length, times, programs) == num_pages
        for _ in range(times):
            one_by_one.program(offset, length)
    assert at_once.pages_programmed == levelled.pages_programmed
    assert at_once.erases == one_by_one.erases
    in_place = [sum(each.pages_programmed) + each.moved_pages for each in (at_once, one_by_one)]
    assert in_place[0] == in_place[1]


def test_a_restart_counts_written_blocks_as_full() -> None:
    blocks = EraseBlocks(2 * BLOCK, BLOCK)
    blocks.program(0, NAND_PAGE_BYTES)
    again = EraseBlocks(2 * BLOCK, BLOCK, blocks.pages_programmed, blocks.erases, blocks.moved_pages)
    again.program(NAND_PAGE_BYTES, NAND_PAGE_BYTES)
    again.program(BLOCK, NAND_PAGE_BYTES)
    assert list(again.erases) == [1, 0]
    assert again.moved_pages == PAGES - 1


@given(
    st.lists(st.tuples(st.integers(0, 3 * NUM_INTERVALS * INTERVAL_S), st.integers(1, 100)), min_size=1, max_size=30),
    st.integers(1, NUM_INTERVALS),
)
def test_the_history_is_the_sum_of_the_window(writes: list[tuple[int, int]], intervals: int) -> None:
    """Clock in order; a window of whole intervals."""
    history = WriteHistory()
    writes = sorted(writes)
    for at, length in writes:
        history.add(length, at)
    now = writes[-1][0]
    last = now // INTERVAL_S
    expected = sum(length for at, length in writes if last - at // INTERVAL_S < intervals)
    assert history.written_since(intervals * INTERVAL_S, now) == expected
    copy = WriteHistory(history.last, history.counts)
    assert copy.written_since(intervals * INTERVAL_S, now) == expected


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    history = WriteHistory()
    history.add(5, 10 * INTERVAL_S)
    history.add(7, 3 * INTERVAL_S)
    assert history.written_since(3600, 10 * INTERVAL_S) == 12


def test_rates_count_pauses_and_a_young_ledger() -> None:
    history = WriteHistory()
    history.add(6000, 1000.0)
    assert history.rate(3600, 900.0, 1100.0) == pytest.approx(6000 / 200)
    # 12 intervals back from 4000 begin at 600; the ledger is older.
    assert history.rate(3600, 0.0, 4000.0) == pytest.approx(6000 / 3400)
    assert history.rate(3600, 0.0, 1e6) == 0


def test_lachesis_lifetime() -> None:
    """Section 5: seven stacks of 512 GB, 100,000 cycles, WA 1.02, at 2.34 GB/s."""
    years = device_years(7 * 512 * 10**9, 100_000, 2.34e9)
    assert years == pytest.approx(7 * 512e9 * 1e5 / (1.02 * 2.34e9 * 3.15576e7))
    assert years == pytest.approx(4.76, abs=0.01)
    assert device_years(1, 1, 0) is None
    assert drive_writes_per_day(86_400, 2.0) == 2.0
    assert endurance_used(1000, 10, 5000) == pytest.approx(0.51)
