# SPDX-License-Identifier: Apache-2.0
"""The order of all live workers by predicted lifetime (Lachesis section 3.5: only the order is used)."""

from bisect import bisect_left, bisect_right, insort

__all__ = ["WorkerRanks"]


class WorkerRanks:
    """Keys of the live workers: those that a model scored, and those that are ordered by size as there was none.

    The two kinds cannot be compared. A rank among one kind counts as the same share of all workers.
    """

    __slots__ = ("_by_score", "_by_size")

    def __init__(self) -> None:
        self._by_score: list[float] = []
        self._by_size: list[float] = []

    def __len__(self) -> int:
        """Live workers."""
        return len(self._by_score) + len(self._by_size)

    def add(self, key: float, *, is_score: bool) -> float:
        """Add a worker; its rank from 1 (shortest-lived) to the number of workers. In the middle of those that equal it."""
        keys = self._by_score if is_score else self._by_size
        below = bisect_left(keys, key)
        equal = bisect_right(keys, key) - below
        insort(keys, key)
        rank = 1 + below + equal // 2
        return rank if len(keys) == len(self) else rank * len(self) / len(keys)

    def remove(self, key: float, *, is_score: bool) -> None:
        """Take a worker out."""
        keys = self._by_score if is_score else self._by_size
        del keys[bisect_left(keys, key)]
