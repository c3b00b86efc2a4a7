# SPDX-License-Identifier: Apache-2.0
"""What to bring up to HBM before anybody asks for it (PBKV section 4.3).

The budget of a decision is S = min(S_a, S_bw): S_a is the space that can be had without giving up what an active workflow may
read (empty and retired blocks, less what running requests and loads are about to need), S_bw what the link carries in one decode
step. Candidates are ranked by their one-step value (Eq. 1) alone, since what is read two steps ahead can be fetched at the
next step, and taken greedily. A run is fetched from its front, and only behind a complete prefix: nothing else could be hit.

The aggressive variant (appendix E) may displace active blocks, too, lowest rank first, while at most `rho` of the capacity is
prefetched and not yet read.

A decision costs as much as there are audiences, not runs: whoever hands out HBM's blocks tells which runs lose some
(`PrefetchPlanner.note_lost`), these are kept by audience, an audience has one value, and only those are looked into that the
budget reaches.

Pure; scheduler process. The replay has the same budget.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, count, islice
from operator import attrgetter, itemgetter
from typing import Any

from vllm_lifetime.pool.access import HBM_TIER
from vllm_lifetime.pool.nodes import RunNode
from vllm_lifetime.pool.runs import RankGroup, Reader, Run

__all__ = [
    "MAX_AUDIENCES",
    "MAX_PREFIX_CHECKS",
    "MAX_WISHED_RUNS",
    "PrefetchBudget",
    "PrefetchPlanner",
    "TransferRates",
    "free_members",
]

MAX_AUDIENCES = 1024
"""Audiences ranked per decision; with more, each decision goes on where the last one stopped."""

MAX_PREFIX_CHECKS = 64
"""Candidates of which it is checked, per decision, whether they can be fetched at all; and as many wishes."""

MAX_NEWLY_LOST = 512
"""Runs that have lost blocks and are not yet sorted by audience, at most: if no decision does it, it is done at once."""

MIN_KEPT = 256
"""With fewer runs kept than this it is not worth looking for those that have left."""

MAX_WISHED_RUNS = 4096
"""Runs that are to be fetched by wish at a time."""

MAX_PREFIX_READERS = 4
"""Readers of a candidate that are asked for it: a wish may have read less than all of the prefix."""

FIRST_STEP_S = 0.01
"""What a decode step is taken to last before one has been timed."""

PROBE_BLOCKS = 8
"""Blocks fetched at a time from a tier whose speed is not known yet."""


class TransferRates:
    """Measured averages: how long a decode step takes, and a block from each tier. Exponentially weighted; O(1).

    Args:
        num_tiers: tiers, HBM included, as in `Run.num_blocks`.
        decay: weight that the past keeps at the next observation.

    """

    def __init__(self, num_tiers: int = 3, decay: float = 0.9) -> None:
        self._decay = decay
        self.step_s = FIRST_STEP_S
        """Mean seconds of a decode step; a guess before the first."""
        self._has_step = False
        self._blocks = [0.0] * num_tiers
        self._seconds = [0.0] * num_tiers

    def observe_step(self, seconds: float) -> None:
        """A step that only decoded took so long."""
        self.step_s = self._decay * self.step_s + (1 - self._decay) * seconds if self._has_step else seconds
        self._has_step = True

    def observe_transfer(self, tier: int, num_blocks: int, seconds: float) -> None:
        """So many blocks came up from `tier` in so long."""
        self._blocks[tier] = self._decay * self._blocks[tier] + num_blocks
        self._seconds[tier] = self._decay * self._seconds[tier] + seconds

    def block_s(self, tier: int) -> float | None:
        """Seconds per block from `tier`: 1 / bandwidth. None if nothing is known."""
        return self._seconds[tier] / self._blocks[tier] if self._blocks[tier] else None


@dataclass(slots=True)
class PrefetchBudget:
    """S of one decision, spent block by block.

    Attributes:
        blocks: space left, S_a (and what the aggressive variant may add).
        seconds: of the decode step that the transfer hides behind, what is left: S_bw, by time. The last block may overdraw it:
            what a step cannot carry takes several.

    """

    blocks: int
    seconds: float

    @classmethod
    def of(
        cls,
        rates: TransferRates,
        *,
        num_empty: int,
        num_retired: int,
        num_reserved: int,
        capacity_blocks: int = 0,
        rho: float = 0.0,
        num_unread: int = 0,
        debt_s: float = 0.0,
    ) -> "PrefetchBudget":
        """S = min(S_a, S_bw).

        `num_reserved`: blocks that running requests and loads need soon. `rho` > 0 is the aggressive variant: so large a share of
        `capacity_blocks` may hold what was prefetched and is not read yet (`num_unread`). `debt_s`: what the last decision has
        overdrawn.
        """
        space = num_empty + num_retired - num_reserved
        if rho > 0.0:
            space += max(0, int(rho * capacity_blocks) - num_unread)
        return cls(max(0, space), rates.step_s - debt_s)

    @property
    def is_spent(self) -> bool:
        """Whether there is no room, or no time."""
        return self.blocks <= 0 or self.seconds <= 0.0


def free_members(run: Run, tier: int, *, deepest_first: bool = True) -> Iterator[Any]:
    """The blocks of `run` in `tier` that no transfer holds, by depth. The tier must not change meanwhile."""
    node = run.nodes[tier]
    if not isinstance(node, RunNode):
        return
    end = node.chain
    block: Any = end.next_free_block if deepest_first else end.prev_free_block
    while block is not end:
        yield block
        block = block.next_free_block if deepest_first else block.prev_free_block


class _Coverage:
    """How much of what a reader reads is in HBM, or on its way, from the start on. For one decision.

    O(r log r) in the reader's runs to begin with, then O(r) for all of its life.
    """

    __slots__ = ("_behind", "_end", "_fetched")

    def __init__(self, reader: Reader, fetched: set[Run]) -> None:
        self._behind = sorted(reader.runs, key=_start, reverse=True)
        self._end = 0
        self._fetched = fetched

    def reaches(self, index: int) -> bool:
        """Whether all blocks before `index` are there, or in runs that are fetched."""
        end, behind = self._end, self._behind
        while end < index and behind and behind[-1].start <= end:
            run = behind.pop()
            if run.end > end and (run.num_blocks[HBM_TIER] >= run.end - run.start or run in self._fetched):
                end = run.end
        self._end = end
        return end >= index

    def note_fetched(self, run: Run) -> None:
        """`run` is in `fetched` from now on."""
        if run.start <= self._end < run.end:
            self._end = run.end


class _Shelf:
    """Runs of one audience of which HBM lacks blocks, and some of which that is over by now; or one run that has no audience.

    `start`: none of them starts before that block. `first`: one of them.
    """

    __slots__ = ("first", "key", "runs", "start")

    def __init__(self, key: RankGroup | Run, run: Run) -> None:
        self.key = key
        self.runs: dict[Run, None] = {}
        self.start = run.start
        self.first = run


class PrefetchPlanner:
    """Chooses what to fetch; one per engine.

    Args:
        value_of: Eq. 1, `Scorer.one_step_value`: the same for all runs of a `RankGroup`.
        is_in_hbm: whether HBM holds the content of a block of a lower tier.
        block_tokens: tokens per block, to tell a block's index from its depth.
        rates: how fast each tier is.
        tiers: numbers of the tiers to fetch from, the fastest first.

    """

    def __init__(
        self,
        value_of: Callable[[Run], float],
        is_in_hbm: Callable[[Any], bool],
        block_tokens: int,
        rates: TransferRates,
        tiers: tuple[int, ...] = (1, 2),
    ) -> None:
        self._value_of = value_of
        self._is_in_hbm = is_in_hbm
        self._block_tokens = block_tokens
        self._rates = rates
        self._tiers = tiers
        self._newly_lost: dict[Run, None] = {}
        self._shelves: dict[RankGroup | Run, _Shelf] = {}
        self._shelf_of: dict[Run, _Shelf] = {}
        self._max_kept = MIN_KEPT
        self._position = 0
        self._wished: dict[Run, None] = {}

    @property
    def num_wished(self) -> int:
        """Runs that are still to be fetched by wish, as far as is known."""
        return len(self._wished)

    def note_lost(self, runs: Iterable[Run]) -> None:
        """HBM is giving up blocks of these runs, and has done so before the next call here. O(1) per run, amortised; hot path.

        This is how a run becomes a candidate. Later it may be in HBM again, retired, or gone: nobody has to say so.
        """
        if len(self._newly_lost) > MAX_NEWLY_LOST:
            self._sort_newly_lost()
        self._newly_lost.update(dict.fromkeys(runs))

    def wish(self, runs: Iterable[Run]) -> tuple[int, bool]:
        """Fetch these before anything else. Returns how many blocks that is, and whether all were taken."""
        num_blocks = 0
        self._wished = {run: None for run in self._wished if self._num_missing(run)}
        for run in sorted(runs, key=_start):
            missing = self._num_missing(run)
            if not missing:
                continue
            if len(self._wished) >= MAX_WISHED_RUNS:
                return num_blocks, False
            self._wished[run] = None
            num_blocks += missing
        return num_blocks, True

    def choose(self, budget: PrefetchBudget) -> list[tuple[int, Any]]:
        """The (tier, block) pairs to fetch now, in order; `budget` is spent on them.

        O(audiences) to look; of what is looked into, O(r log r) in the runs of its audience and readers; O(1) per block fetched.
        """
        if budget.is_spent:
            return []
        chosen: list[tuple[int, Any]] = []
        tried: set[Run] = set()
        fetched: set[Run] = set()
        coverages: dict[Reader, _Coverage] = {}
        for run in chain(self._still_wished(), islice(self._ranked(), MAX_PREFIX_CHECKS)):
            if run in tried:
                continue
            if not self._has_prefix(run, fetched, coverages):
                # The wishes behind it have their turn, too.
                if run in self._wished:
                    self._wished[run] = self._wished.pop(run)
                continue
            tried.add(run)
            if self._fetch(run, budget, chosen):
                fetched.add(run)
                for reader in run.readers & coverages.keys():
                    coverages[reader].note_fetched(run)
            if budget.is_spent:
                break
        return chosen

    # ------------------------------------------------------------------ candidates

    def _num_missing(self, run: Run) -> int:
        """Blocks of `run` that HBM lacks and that can be fetched; 0 if it is retired."""
        counts = run.num_blocks
        missing = run.end - run.start - counts[HBM_TIER]
        return min(missing, sum(counts[tier] for tier in self._tiers)) if missing > 0 and not run.is_retired else 0

    def _still_wished(self) -> Iterator[Run]:
        """The first `MAX_PREFIX_CHECKS` wishes that are not fulfilled; those that are, are forgotten."""
        num_left = MAX_PREFIX_CHECKS
        for run in list(self._wished):
            if not self._num_missing(run):
                del self._wished[run]
            elif num_left:
                num_left -= 1
                yield run
            else:
                return

    def _ranked(self) -> Iterator[Run]:
        """Candidates by value; of equal ones, a prefix before what follows it."""
        value_of = self._value_of
        order = count()
        # (-value, start, number, shelf, its runs with the next one last); None: not opened yet, or a run that is on none.
        heap: list[tuple[float, int, int, _Shelf | None, list[Run] | None]] = []
        for shelf in self._in_turn():
            value = value_of(shelf.first)
            if value > 0.0:
                heap.append((-value, shelf.start, next(order), shelf, None))
        heapq.heapify(heap)
        while heap:
            negative_value, _, number, opened, runs = heapq.heappop(heap)
            if runs is None:
                runs = [] if opened is None else sorted(opened.runs, key=_start, reverse=True)
            else:
                run = runs.pop()
                if opened is None or self._belongs(run, opened):
                    if self._num_missing(run):
                        yield run
                elif run in self._newly_lost:
                    value = value_of(run)
                    if value > 0.0:
                        heapq.heappush(heap, (-value, run.start, next(order), None, [run]))
            if runs:
                heapq.heappush(heap, (negative_value, runs[-1].start, number, opened, runs))

    def _in_turn(self) -> list[_Shelf]:
        """Shelves, `MAX_AUDIENCES` at a time, of which the first run belongs there."""
        self._sort_newly_lost()
        shelves = list(self._shelves.values())
        if len(shelves) > MAX_AUDIENCES:
            start = self._position % len(shelves)
            self._position = start + MAX_AUDIENCES
            shelves = (shelves[start:] + shelves[:start])[:MAX_AUDIENCES]
        are_all_right = True
        for shelf in shelves:
            run = shelf.first
            if shelf.key is not (run if run.group is None else run.group):
                are_all_right = False
                next(self._belonging(shelf), None)
        if are_all_right:
            return shelves
        # The readers of some have changed since: they may be the first of their audience.
        return list(dict.fromkeys(shelf for shelf in chain(shelves, self._sort_newly_lost()) if shelf.runs))

    def _sort_newly_lost(self) -> list[_Shelf]:
        """Put runs that have lost blocks on their audience's shelf. Returns the shelves that got any. O(1) per run, amortised."""
        if not self._newly_lost:
            return []
        newly_lost, self._newly_lost = self._newly_lost, {}
        changed: dict[_Shelf, None] = {}
        for run in newly_lost:
            if not _is_lacking(run):
                continue
            key = run if run.group is None else run.group
            before = self._shelf_of.get(run)
            if before is not None:
                if before.key is key:
                    continue
                self._forget(run)
            shelf = self._shelves.get(key)
            if shelf is None:
                shelf = self._shelves[key] = _Shelf(key, run)
            shelf.runs[run] = None
            shelf.start = min(shelf.start, run.start)
            self._shelf_of[run] = shelf
            changed[shelf] = None
        if len(self._shelf_of) > self._max_kept:
            for shelf in list(self._shelves.values()):
                deque(self._belonging(shelf), 0)
            self._max_kept = 2 * len(self._shelf_of) + MIN_KEPT
        return [shelf for shelf in changed if shelf.runs]

    def _belongs(self, run: Run, shelf: _Shelf) -> bool:
        """Whether `run` is on the right shelf; else it is taken off. If only its readers have changed, it is sorted anew."""
        if _is_lacking(run):
            if shelf.key is (run if run.group is None else run.group):
                return True
            self._newly_lost[run] = None
        self._forget(run)
        return False

    def _belonging(self, shelf: _Shelf) -> Iterator[Run]:
        """Runs that belong on `shelf`; the others are taken off as they are met."""
        return (run for run in list(shelf.runs) if self._belongs(run, shelf))

    def _forget(self, run: Run) -> None:
        shelf = self._shelf_of.pop(run)
        del shelf.runs[run]
        if not shelf.runs:
            del self._shelves[shelf.key]
        elif shelf.first is run:
            shelf.first = next(iter(shelf.runs))

    # ------------------------------------------------------------------ one candidate

    def _has_prefix(self, run: Run, fetched: set[Run], coverages: dict[Reader, _Coverage]) -> bool:
        """Whether all that lies before `run` is in HBM, or is fetched with it. Any of its readers has read it all."""
        if run.start == 0:
            return True
        for reader in islice(run.readers, MAX_PREFIX_READERS):
            coverage = coverages.get(reader)
            if coverage is None:
                coverage = coverages[reader] = _Coverage(reader, fetched)
            if coverage.reaches(run.start):
                return True
        return False

    def _fetch(self, run: Run, budget: PrefetchBudget, chosen: list[tuple[int, Any]]) -> bool:
        """Add blocks of `run` to `chosen`, from the first missing one on. Returns whether HBM will have it all."""
        rates = self._rates
        probe_s = rates.step_s / PROBE_BLOCKS
        block_s = {tier: probe_s if (measured := rates.block_s(tier)) is None else measured for tier in self._tiers}
        num_left, seconds_left = budget.blocks, budget.seconds
        fastest_s = min(block_s.values())
        limit = num_left if fastest_s <= 0.0 else min(num_left, int(seconds_left / fastest_s) + 1)
        # What lies before and is not fetched has to be in HBM.
        reach = run.start + run.num_blocks[HBM_TIER]
        last = -1
        for index, tier, block in self._missing(run, limit):
            if index > reach or num_left <= 0 or seconds_left <= 0.0:
                break
            # Not if it is what a faster tier has, too.
            if index != last:
                last = index
                num_left -= 1
                seconds_left -= block_s[tier]
                chosen.append((tier, block))
                reach += 1
        budget.blocks, budget.seconds = num_left, seconds_left
        return reach >= run.end

    def _missing(self, run: Run, limit: int) -> list[tuple[int, int, Any]]:
        """(index, tier, block) of what HBM lacks of `run`, the first `limit` blocks and maybe more, from the front.

        O(limit, or the smaller part of the run).
        """
        num_in_hbm = run.num_blocks[HBM_TIER]
        num_missing = run.end - run.start - num_in_hbm
        # The deepest blocks are evicted first: where most are in HBM, what is missing is found from the end.
        deepest_first = num_missing <= num_in_hbm
        block_tokens, is_in_hbm = self._block_tokens, self._is_in_hbm
        found: list[tuple[int, int, Any]] = []
        for tier in self._tiers:
            num_left = num_missing if deepest_first else limit
            for block in free_members(run, tier, deepest_first=deepest_first):
                if not is_in_hbm(block):
                    found.append((block.block_hash_num_tokens // block_tokens - 1, tier, block))
                    num_left -= 1
                    if num_left <= 0 and not deepest_first:
                        break
                elif num_left <= 0:
                    # Not before: HBM may have some contents twice, and lack more than it seems.
                    break
        found.sort(key=_index_and_tier)
        return found


def _is_lacking(run: Run) -> bool:
    """Whether somebody who is known may still read `run`, and HBM does not have all of it."""
    return run.num_blocks[HBM_TIER] < run.end - run.start and bool(run.readers) and run.rank[0] != 0


_start = attrgetter("start")
_index_and_tier = itemgetter(0, 1)
