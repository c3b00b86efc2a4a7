# SPDX-License-Identifier: Apache-2.0
"""What to bring up to HBM before anybody asks for it (PBKV section 4.3).

The budget of a decision is S = min(S_a, S_bw): S_a is the space that can be had without giving up what an active workflow may
read (empty and retired blocks, less what running requests and loads are about to need), S_bw what the link carries in one decode
step. Candidates are ranked by their one-step value (Eq. 1) alone, since what is read two steps ahead can be fetched at the
next step, and taken greedily. A run is fetched from its front, and only behind a complete prefix: nothing else could be hit.

The aggressive variant (appendix E) may displace active blocks, too, lowest rank first, while at most `rho` of the capacity is
prefetched and not yet read.

Pure; scheduler process. The simulator uses the same objects.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Protocol

from vllm_lifetime.pool.access import HBM_TIER
from vllm_lifetime.pool.nodes import RunNode
from vllm_lifetime.pool.runs import Reader, Run

__all__ = ["MAX_WISHED_RUNS", "PrefetchBudget", "PrefetchPlanner", "Readers", "TransferRates", "free_members"]

MAX_READERS = 192
"""Readers looked at per decision; with more, each decision goes on where the last one stopped."""

MAX_PREFIX_CHECKS = 64
"""Candidates of which it is checked, per decision, whether they can be fetched at all."""

MAX_WISHED_RUNS = 4096
"""Runs that are to be fetched by wish at a time."""

MAX_PREFIX_READERS = 4
"""Readers of a candidate that are asked for it: a wish may have read less than all of the prefix."""

FIRST_STEP_S = 0.01
"""What a decode step is taken to last before one has been timed."""

PROBE_BLOCKS = 8
"""Blocks fetched at a time from a tier whose speed is not known yet."""


class Readers(Protocol):
    """Some readers that can be gone through in an order, such as `SegmentTable`."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Reader]: ...


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
        seconds: of the decode step that the transfer hides behind, what is left: S_bw, by time.

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
        overdrawn, see `spend`.
        """
        space = num_empty + num_retired - num_reserved
        if rho > 0.0:
            space += max(0, int(rho * capacity_blocks) - num_unread)
        return cls(max(0, space), rates.step_s - debt_s)

    @property
    def is_spent(self) -> bool:
        """Whether there is no room, or no time."""
        return self.blocks <= 0 or self.seconds <= 0.0

    def spend(self, block_s: float) -> None:
        """One block is fetched. The last one may overdraw the time: what a step cannot carry takes several."""
        self.blocks -= 1
        self.seconds -= block_s


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


class PrefetchPlanner:
    """Chooses what to fetch; one per engine.

    Args:
        value_of: Eq. 1, `Scorer.one_step_value`.
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
        self._position = 0
        self._wished: dict[Run, None] = {}

    @property
    def num_wished(self) -> int:
        """Runs that are still to be fetched by wish."""
        return len(self._wished)

    def wish(self, runs: Iterable[Run]) -> tuple[int, bool]:
        """Fetch these before anything else. Returns how many blocks that is, and whether all were taken."""
        num_blocks = 0
        for run in sorted(runs, key=lambda run: run.start):
            missing = self._num_missing(run)
            if not missing or run.is_retired:
                continue
            if len(self._wished) >= MAX_WISHED_RUNS:
                return num_blocks, False
            self._wished[run] = None
            num_blocks += missing
        return num_blocks, True

    def choose(self, readers: Readers, budget: PrefetchBudget) -> list[tuple[int, Any]]:
        """The (tier, block) pairs to fetch now, in order; `budget` is spent on them.

        `readers`: the live segments. O(runs of the readers) to look, O(log candidates) per run fetched, O(length) of those.
        """
        if budget.is_spent:
            return []
        chosen: list[tuple[int, Any]] = []
        fetched: set[Run] = set()
        for run in chain(self._still_wished(), self._ranked(readers)):
            if run in fetched or not self._has_prefix(run, fetched):
                continue
            if self._fetch(run, budget, chosen):
                fetched.add(run)
            if budget.is_spent:
                break
        return chosen

    # ------------------------------------------------------------------ candidates

    def _num_missing(self, run: Run) -> int:
        """Blocks of `run` that HBM lacks, if they are below at all."""
        counts = run.num_blocks
        missing = run.end - run.start - counts[HBM_TIER]
        return min(missing, sum(counts[tier] for tier in self._tiers)) if missing > 0 else 0

    def _still_wished(self) -> list[Run]:
        if self._wished:
            self._wished = {run: None for run in self._wished if not run.is_retired and self._num_missing(run)}
        return list(self._wished)

    def _ranked(self, readers: Readers) -> Iterator[Run]:
        """Runs that lack blocks in HBM, by value; a prefix before what follows it."""
        first, last = self._tiers[0], self._tiers[-1]
        seen: set[Run] = set()
        ranked: list[tuple[float, int, int, Run]] = []
        for reader in self._in_turn(readers):
            for run in reader.runs:
                counts = run.num_blocks
                if counts[HBM_TIER] >= run.end - run.start or run in seen:
                    continue
                seen.add(run)
                if run.rank[0] != 0 and (counts[first] or counts[last]):
                    value = self._value_of(run)
                    if value > 0.0:
                        ranked.append((-value, run.start, len(ranked), run))
        ranked.sort()
        return (entry[3] for entry in ranked[:MAX_PREFIX_CHECKS])

    def _in_turn(self, readers: Readers) -> Iterable[Reader]:
        count = len(readers)
        if count <= MAX_READERS:
            return readers
        start = self._position % count
        self._position = start + MAX_READERS
        return islice(chain(islice(readers, start, None), readers), MAX_READERS)

    def _has_prefix(self, run: Run, fetched: set[Run]) -> bool:
        """Whether all that lies before `run` is in HBM, or is fetched with it. Any of its readers has read it all."""
        if run.start == 0:
            return True
        for reader in islice(run.readers, MAX_PREFIX_READERS):
            end = 0
            for other in sorted((other for other in reader.runs if other.start < run.start), key=_start):
                if other.start > end:
                    break
                if other.num_blocks[HBM_TIER] >= other.end - other.start or other in fetched:
                    end = max(end, other.end)
            if end >= run.start:
                return True
        return False

    def _fetch(self, run: Run, budget: PrefetchBudget, chosen: list[tuple[int, Any]]) -> bool:
        """Add blocks of `run` to `chosen`, from the first missing one on. Returns whether HBM will have it all."""
        num_in_hbm = run.num_blocks[HBM_TIER]
        length = run.end - run.start
        count = 0
        for index, tier, block in self._missing(run):
            # What lies before and is not fetched has to be in HBM.
            if index - run.start - count > num_in_hbm or budget.is_spent:
                return False
            seconds = self._rates.block_s(tier)
            budget.spend(self._rates.step_s / PROBE_BLOCKS if seconds is None else seconds)
            chosen.append((tier, block))
            count += 1
        return count + num_in_hbm >= length

    def _missing(self, run: Run) -> Iterable[tuple[int, int, Any]]:
        """(index, tier, block) of what HBM lacks of `run`, from the front. O(blocks fetched + the smaller part of the run)."""
        num_in_hbm = run.num_blocks[HBM_TIER]
        num_missing = run.end - run.start - num_in_hbm
        from_front = num_missing > num_in_hbm
        block_tokens, is_in_hbm = self._block_tokens, self._is_in_hbm

        def of_tier(tier: int) -> Iterator[tuple[int, int, Any]]:
            # The deepest blocks are evicted first: where most are in HBM, what is missing is found from the end.
            for block in free_members(run, tier, deepest_first=not from_front):
                if not is_in_hbm(block):
                    yield (block.block_hash_num_tokens or 0) // block_tokens - 1, tier, block

        parts = [of_tier(tier) for tier in self._tiers if run.num_blocks[tier]]
        if from_front:
            missing = parts[0] if len(parts) == 1 else heapq.merge(*parts, key=_index_and_tier)
        else:
            missing = iter(sorted((entry for part in parts for entry in islice(part, num_missing)), key=_index_and_tier))
        last = -1
        for entry in missing:
            if entry[0] != last:
                yield entry
            last = entry[0]


def _index_and_tier(entry: tuple[int, int, Any]) -> tuple[int, int]:
    return entry[0], entry[1]


def _start(run: Run) -> int:
    return run.start
