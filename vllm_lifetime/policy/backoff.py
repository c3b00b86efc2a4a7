# SPDX-License-Identifier: Apache-2.0
"""When to try again what has failed. Pure; scheduler process."""

__all__ = ["Backoff"]


class Backoff:
    """Waits 1, 2, 4, ... seconds after failures in a row, `longest_s` at most; a success ends it."""

    __slots__ = ("_longest_s", "_num_failures", "_until")

    def __init__(self, longest_s: float = 60.0) -> None:
        self._longest_s = longest_s
        self._num_failures = 0
        self._until = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether the latest try failed."""
        return self._num_failures > 0

    def may_try(self, now: float) -> bool:
        """Whether the wait is over at `now` (a `time.monotonic` time)."""
        return now >= self._until

    def note(self, success: bool, now: float) -> None:
        """A try has ended."""
        if success:
            self._num_failures = 0
            self._until = 0.0
        else:
            self._until = now + min(self._longest_s, 2.0**self._num_failures)
            self._num_failures += 1
