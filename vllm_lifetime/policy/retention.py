# SPDX-License-Identifier: Apache-2.0
"""Wishes to keep something for a time after its readers have gone: soft, expiring and capped (R11, R13, R29).

A wish is a reader of the runs that it covers, so that their other readers' end does not retire them; what is kept is evicted in
turn like anything else that is live. A priority other than the usual one orders it before or after the rest. When its time is
over it ends like any reader. Allocation never waits for it.

Scheduler process, one thread, no IO.
"""

import heapq
import itertools
import math
from collections.abc import Iterable

from vllm_lifetime.hints import DEFAULT_PRIORITY
from vllm_lifetime.pool.access import AccessTable
from vllm_lifetime.pool.runs import ACTIVE_RANK, Rank, Reader, Run

__all__ = ["MAX_RETAINED_SHARE", "MAX_RETENTIONS", "Retention", "RetentionTable"]

MAX_RETAINED_SHARE = 0.5
"""Largest share of all tiers' blocks that may be kept by wish at a time."""

MAX_RETENTIONS = 4096
"""Most wishes at a time."""

RECOUNT_S = 1.0
"""How often, at most, it is counted again what is really kept, before a wish is refused."""


class Retention(Reader):
    """One wish. `expires_at` is in seconds of the caller's monotonic clock."""

    __slots__ = ("expires_at", "rank", "table")

    def __init__(self, table: "RetentionTable", workflow_id: str, rank: Rank) -> None:
        super().__init__(workflow_id)
        self.table = table
        self.rank = rank
        self.expires_at = 0.0

    def on_last_run_gone(self) -> None:
        """It covers nothing any more: it is over, whatever its time."""
        self.table.forget(self)


class RetentionTable:
    """All wishes. `capacity_blocks` is what all tiers hold together."""

    def __init__(self, access: AccessTable, capacity_blocks: int) -> None:
        self._access = access
        self._limit = int(capacity_blocks * MAX_RETAINED_SHARE)
        self._num_blocks = 0
        self._counted_at = float("-inf")
        self._live: set[Retention] = set()
        self._heap: list[tuple[float, int, Retention]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        """Wishes whose time is not over."""
        return len(self._live)

    @property
    def num_blocks(self) -> int:
        """At least the blocks kept, all tiers: those when last counted, and those covered since."""
        return self._num_blocks

    def new(self, workflow_id: str, priority: int = DEFAULT_PRIORITY) -> Retention:
        """A wish that covers nothing yet."""
        score = (priority - DEFAULT_PRIORITY) / 100
        # After all the rest, whatever that is worth, or before it.
        rank = ACTIVE_RANK if not score else (1, math.inf, score) if score > 0 else (1, score, 0.0)
        return Retention(self, workflow_id, rank)

    def forget(self, retention: Retention) -> None:
        """A wish that covers nothing makes room for others."""
        retention.is_live = False
        self._live.discard(retention)

    def renew(self, old: Reader | None, workflow_id: str, runs: Iterable[Run], ttl_s: float, now: float) -> Retention:
        """Let `old`, or a new wish if it is over, cover `runs`, too; returns it. As `retain`."""
        retention = old if isinstance(old, Retention) and old.is_live else self.new(workflow_id)
        self.retain(retention, runs, ttl_s, now)
        return retention

    def retain(self, retention: Retention, runs: Iterable[Run], ttl_s: float, now: float) -> tuple[int, bool]:
        """Let `retention` cover `runs` for at least `ttl_s` seconds from now; what it covered before is kept as long.

        Returns the blocks newly covered, and whether all were: beyond the caps nothing is. O(log wishes) and O(1) per run.
        """
        is_new = retention not in self._live
        if is_new and len(self._live) >= MAX_RETENTIONS:
            return 0, False
        covered = 0
        is_whole = True
        for run in sorted(runs, key=lambda run: run.start):
            if retention in run.readers:
                continue
            size = sum(run.num_blocks)
            if self._num_blocks + size > self._limit and not self._recount(size, now):
                is_whole = False
                continue
            self._access.join(run, retention)
            if run.is_retired or retention.rank > run.rank:
                self._access.set_rank(run, retention.rank)
            self._num_blocks += size
            covered += size
        if covered or not is_new:
            retention.expires_at = max(retention.expires_at, now + ttl_s)
            if is_new:
                # Once: a wish that has been prolonged by then is put back, see `expire`.
                self._live.add(retention)
                heapq.heappush(self._heap, (retention.expires_at, next(self._order), retention))
        return covered, is_whole

    def expire(self, now: float) -> int:
        """End the wishes whose time is over. Returns the blocks retired. O(1) if there are none."""
        retired = 0
        while self._heap and self._heap[0][0] <= now:
            _, _, retention = heapq.heappop(self._heap)
            if not retention.is_live:
                continue
            if retention.expires_at > now:
                heapq.heappush(self._heap, (retention.expires_at, next(self._order), retention))
                continue
            if retention.rank is not ACTIVE_RANK:
                for run in retention.runs:
                    if run.rank == retention.rank:
                        self._access.set_rank(run, ACTIVE_RANK)
            retired += sum(self._access.end(retention))
            self._live.discard(retention)
        if not self._live:
            self._num_blocks = 0
            self._heap.clear()
        return retired

    def _recount(self, size: int, now: float) -> bool:
        """Whether there is room for `size` blocks after all: what was covered may be evicted or released. O(runs kept)."""
        if now - self._counted_at < RECOUNT_S:
            return False
        self._counted_at = now
        runs = {run for retention in self._live for run in retention.runs}
        self._num_blocks = sum(sum(run.num_blocks) for run in runs)
        return self._num_blocks + size <= self._limit
