# SPDX-License-Identifier: Apache-2.0
"""Bytes written in the last day, by five minutes of wall-clock time. Pure; the caller holds a lock.

Wall-clock time, because the history outlives the process. A clock that is set back adds to the latest interval.
"""

from collections import deque
from collections.abc import Iterable

__all__ = ["INTERVAL_S", "NUM_INTERVALS", "WriteHistory"]

INTERVAL_S = 300
NUM_INTERVALS = 288
"""A day."""


class WriteHistory:
    """Bytes by interval; `last` is the number of the newest interval (Unix seconds / `INTERVAL_S`)."""

    def __init__(self, last: int = 0, counts: Iterable[int] = ()) -> None:
        self.last = last
        self._counts = deque(counts, NUM_INTERVALS)
        """Oldest first; the newest is that of `last`."""

    @property
    def counts(self) -> list[int]:
        """Oldest first, at most a day of them."""
        return list(self._counts)

    def add(self, length: int, now_s: float) -> None:
        """`length` bytes were written at `now_s`, in Unix seconds. O(1) but after a pause."""
        interval = int(now_s // INTERVAL_S)
        if not self._counts:
            self.last = interval
            self._counts.append(0)
        elif interval > self.last:
            self._counts.extend([0] * min(interval - self.last, NUM_INTERVALS))
            self.last = interval
        self._counts[-1] += length

    def written_since(self, window_s: float, now_s: float) -> int:
        """Bytes of the intervals that lie, in part or whole, in the last `window_s` seconds. O(intervals)."""
        first = int((now_s - window_s) // INTERVAL_S)
        skip = max(0, first + 1 - (self.last - len(self._counts) + 1))
        return sum(list(self._counts)[skip:])

    def rate(self, window_s: float, known_since_s: float, now_s: float) -> float:
        """Mean bytes/s over the last `window_s` seconds, or since `known_since_s` if that is later; pauses count."""
        first_start = max((now_s - window_s) // INTERVAL_S * INTERVAL_S + INTERVAL_S, known_since_s)
        return self.written_since(window_s, now_s) / max(1.0, now_s - first_start)
