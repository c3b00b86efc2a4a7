# SPDX-License-Identifier: Apache-2.0
"""How far ahead a next use counts, from how fast the cache is replaced.

In a small cache only what is read again within seconds can still be there; in a large one what is read within the hour, too.
So the horizon of the time discount is a share of the turnover: the capacity over the rate of evictions, smoothed. It is measured
with two numbers that every pool has, and not set by hand.

Scheduler thread, one per engine; the simulator has its own. O(1).
"""

import math

__all__ = ["HORIZON_SHARE", "Turnover"]

HORIZON_SHARE = 0.2
"""Horizon per turnover. Chosen on sessions that docs/replay.md learns from, by splitting them again."""

SMOOTHING_S = 3600.0
"""The rate of evictions of about so long ago and later counts."""

PRIOR_S = 30.0
"""At first the rate is the mean since the first eviction, and the horizon it started with counts as so many seconds of it."""

LEAST_CHANGE = 4 / 3
"""The horizon changes when it is off by this factor: worths by different horizons cannot be compared, so that all that waits is
then ranked anew."""

IDLE_S = 60.0
"""Of a longer time between two looks only so much counts: an idle engine takes no steps, and that says nothing of later load."""

SHORTEST_S, LONGEST_S = 5.0, 3600.0
"""Bounds of the horizon: a few requests, and `prediction.next_use.NEVER_S`."""


class Turnover:
    """See the module. `horizon_s` is in seconds; it starts as given and is measured from then on.

    Raises:
        ValueError: `capacity_blocks` is less than 1, or `horizon_s` is not positive.

    """

    def __init__(self, capacity_blocks: int, horizon_s: float, now: float = 0.0) -> None:
        if capacity_blocks < 1:
            raise ValueError(f"the capacity must be at least 1 block, it is {capacity_blocks}")
        if not horizon_s > 0.0:
            raise ValueError(f"horizon_s must be positive, it is {horizon_s}")
        self.horizon_s = horizon_s
        self._blocks = HORIZON_SHARE * capacity_blocks
        self._evicted_per_s = self._blocks / horizon_s
        self._num_evicted = 0
        self._measured_at = now
        self._began_at = now

    def observe(self, num_evicted: int, now: float) -> bool:
        """`num_evicted` blocks have been evicted so far, in all. Returns whether `horizon_s` has changed.

        May be called as often as one likes, at least once in `IDLE_S` while blocks are evicted; calls at one time are one.
        """
        elapsed_s = now - self._measured_at
        if elapsed_s <= 0.0:
            return False
        if not num_evicted:  # a cache that is being filled says nothing
            self._measured_at = self._began_at = now
            return False
        if elapsed_s > IDLE_S:
            self._began_at += elapsed_s - IDLE_S
            elapsed_s = IDLE_S
        rate = (num_evicted - self._num_evicted) / elapsed_s
        known_s = min(SMOOTHING_S, PRIOR_S + now - self._began_at)
        self._evicted_per_s += -math.expm1(-elapsed_s / known_s) * (rate - self._evicted_per_s)
        self._num_evicted = num_evicted
        self._measured_at = now
        horizon_s = min(LONGEST_S, max(SHORTEST_S, self._blocks / max(self._evicted_per_s, self._blocks / LONGEST_S)))
        if self.horizon_s / LEAST_CHANGE < horizon_s < self.horizon_s * LEAST_CHANGE:
            return False
        self.horizon_s = horizon_s
        return True
