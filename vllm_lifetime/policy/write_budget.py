# SPDX-License-Identifier: Apache-2.0
"""How many bytes may be written to flash now, so that no day's writes exceed a budget. Pure; scheduler process.

A token bucket: an eighth of the budget may be written at once, the rest comes in evenly over the day. So no 24 hours see more
than the budget, and a burst does not use up the whole day's.
"""

from collections.abc import Sequence

__all__ = ["WriteBudget"]

DAY_S = 86_400.0
BURST_SHARE = 8
RESUME_SHARE = 4
"""Once it is used up, a quarter of the burst must have come in before the next write; else every block would be written alone."""


class WriteBudget:
    """Bytes to be written. Times are `time.monotonic` times.

    Args:
        bytes_per_day: the budget.
        smallest: bytes of the smallest write, a block.
        now: the present.

    Raises:
        ValueError: not even one block fits into the burst, so nothing could ever be written.

    """

    def __init__(self, bytes_per_day: int, smallest: int, now: float) -> None:
        self._burst = bytes_per_day / BURST_SHARE
        if smallest > self._burst:
            raise ValueError(
                f"{bytes_per_day} bytes a day are too few to write one block of {smallest} bytes at a time: at least "
                f"{smallest * BURST_SHARE} are needed"
            )
        self._rate = (bytes_per_day - self._burst) / DAY_S
        self._level = self._burst
        self._smallest = smallest
        self._at = now
        self._is_used_up = False

    def replay(self, written: Sequence[int], interval_s: float) -> None:
        """Take what earlier processes wrote in the intervals before now, oldest first; before them the bucket was full."""
        self._level = self._burst
        for length in written:
            self._level = min(self._burst, self._level + self._rate * interval_s) - length
        self._is_used_up = self._level < self._smallest

    def available(self, now: float) -> int:
        """Bytes that may be written at `now`; 0 while it is used up. O(1)."""
        self._level = min(self._burst, self._level + self._rate * (now - self._at))
        self._at = now
        if self._is_used_up and self._level >= max(self._smallest, self._burst / RESUME_SHARE):
            self._is_used_up = False
        return 0 if self._is_used_up else int(self._level)

    def spend(self, length: int) -> None:
        """So many bytes are to be written."""
        self._level -= length
        self._is_used_up |= self._level < self._smallest

    def give_back(self, length: int) -> None:
        """So many bytes were not written after all."""
        self._level = min(self._burst, self._level + length)

    @property
    def is_used_up(self) -> bool:
        """Whether the latest look, or the latest write, found too little for another block."""
        return self._is_used_up
