# SPDX-License-Identifier: Apache-2.0
"""A token bucket. Runs in the API server, on its event loop."""

from __future__ import annotations

import time
from collections.abc import Callable

from vllm_lifetime.control.errors import RateLimited

__all__ = ["TokenBucket"]


class TokenBucket:
    """Lets `per_s` events pass per second, and up to `burst` at once after a pause."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Start full. `clock` gives seconds."""
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._left = float(burst)
        self._filled_at_s = clock()

    def take(self, count: int) -> None:
        """Let `count` events pass, or none of them. Raises `RateLimited`.

        More than fit into the bucket pass when it is full, and are paid off afterwards.
        """
        now_s = self._clock()
        self._left = min(self._burst, self._left + (now_s - self._filled_at_s) * self._per_s)
        self._filled_at_s = now_s
        missing = min(count, self._burst) - self._left
        if missing > 0:
            raise RateLimited(f"More than {self._per_s:g} events per second: send these again later.", missing / self._per_s)
        self._left -= count
