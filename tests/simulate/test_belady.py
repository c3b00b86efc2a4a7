# SPDX-License-Identifier: Apache-2.0
"""Belady's hits are the most that any choice of evictions has, by trying all of them on small cases."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from simulate_testing import Prefixes, contents

from vllm_lifetime.pool.runs import Reader
from vllm_lifetime.simulate.belady import BeladyCache
from vllm_lifetime.simulate.cache import RunCache
from vllm_lifetime.simulate.next_use_order import NEVER, next_use_steps

Moves = list[tuple[bool, int]]
"""(whether it is an end, number of the access)."""


def interleave(num: int, draws: list[int]) -> Moves:
    """Starts in order, each end some time after its start."""
    moves: Moves = []
    running: list[int] = []
    for access in range(num):
        moves.append((False, access))
        running.append(access)
        for draw in draws[2 * access : 2 * access + 2]:
            if running and draw:
                moves.append((True, running.pop(draw % len(running))))
    return moves + [(True, access) for access in running]


def most_hits(paths: list[NDArray[np.int64]], moves: Moves, capacity: int) -> int:
    """Tries every choice of what to keep, prefix closed or not, at every event. By cached set: the most hits so far."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    running: list[int] = []
    for is_end, access in moves:
        if is_end:
            running.remove(access)
        else:
            running.append(access)
        held = frozenset(int(block) for each in running for block in paths[each])
        after: dict[frozenset[int], int] = {}
        for cached, hits in states.items():
            if not is_end:
                for block in paths[access].tolist():
                    if block not in cached:
                        break
                    hits += 1
            free = (cached | held) - held
            num_kept = min(len(free), max(0, capacity - len(held)))
            for kept in combinations(sorted(free), num_kept):
                state = held | frozenset(kept)
                after[state] = max(after.get(state, 0), hits)
        states = after
    return max(states.values())


small = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.lists(small, min_size=1, max_size=7), st.lists(st.integers(0, 3), min_size=14, max_size=14), st.integers(1, 7))
def test_belady_hits_as_many_as_the_best_of_all_choices(prompts: list[tuple[int, ...]], draws: list[int], capacity: int) -> None:
    prefixes = Prefixes()
    paths = [prefixes.blocks(content) for content in prompts]
    moves = interleave(len(paths), draws)
    assert belady_hits(paths, moves, capacity) == most_hits(paths, moves, capacity)


def belady_hits(paths: list[NDArray[np.int64]], moves: Moves, capacity: int) -> int:
    cache = BeladyCache(capacity)
    next_uses = next_use_steps(paths)
    hits = 0
    running: list[int] = []
    for is_end, access in moves:
        if is_end:
            cache.finish(paths[access])
            running.remove(access)
        else:
            hits += cache.start(paths[access], next_uses[access])
            running.append(access)
        held = {int(block) for each in running for block in paths[each]}
        assert cache.num_blocks <= max(capacity, len(held))
    return hits


@settings(max_examples=100, deadline=None)
@given(st.lists(contents, min_size=1, max_size=20), st.lists(st.integers(0, 3), min_size=40, max_size=40), st.integers(1, 12))
def test_no_policy_hits_more_than_belady(prompts: list[tuple[int, ...]], draws: list[int], capacity: int) -> None:
    prefixes = Prefixes()
    paths = [prefixes.blocks(content) for content in prompts]
    moves = interleave(len(paths), draws)
    readers = [Reader("a"), Reader("b")]
    for named in (False, True):
        cache = RunCache(capacity)
        hits = 0
        for is_end, access in moves:
            if is_end:
                cache.finish(paths[access])
            else:
                hits += cache.start(paths[access], readers[access % 2] if named else None)
        assert hits <= belady_hits(paths, moves, capacity)
        overcommitted = {int(block) for path in paths for block in path}
        assert cache.num_blocks <= min(capacity, len(overcommitted))


@given(st.lists(contents, min_size=1, max_size=15))
def test_next_uses_are_those_found_block_by_block(prompts: list[tuple[int, ...]]) -> None:
    prefixes = Prefixes()
    paths = [prefixes.blocks(content) for content in prompts]
    for access, steps in enumerate(next_use_steps(paths)):
        expected = []
        for block in paths[access].tolist():
            later = (number for number in range(access + 1, len(paths)) if block in paths[number])
            expected.append(next(later, NEVER))
        found = []
        for end, read_by in steps:
            found += [read_by] * (end - len(found))
        assert found == expected
