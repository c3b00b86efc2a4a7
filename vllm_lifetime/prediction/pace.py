# SPDX-License-Identifier: Apache-2.0
"""How slow one session's tools are: how many times longer its pauses are than those of others in the same state.

Two numbers per session, kept by whoever knows the session; `NextUseModel` takes the result. Only tool calls have one: a session
waits for its user seldom, and how long a user was away says little of the next time. One who answers at once is gone for lunch as
long as others are; a pace would change that, too. Scheduler thread or simulator; O(1) everything.
"""

import math

from vllm_lifetime.prediction.next_use import PauseState

__all__ = ["Pace"]

PRIOR_PAUSES = 10.0
"""Pauses of a session after which its own count as much as that others are like it."""

KEEP = 0.95
"""What a pause's weight is multiplied with at each later one: the latest 20 or so decide."""

SHORTEST_S = 0.5
"""Pauses are taken for at least this long: whether a tool takes 1 ms or 100 ms says nothing about longer waits."""

LIMIT = math.log(16.0)
"""No pause counts as more than so many times shorter or longer than usual."""


class Pace:
    """Pace of one session: the geometric mean of (pause / usual median), leaning on 1."""

    __slots__ = ("_logs", "_weights")

    def __init__(self) -> None:
        self._logs = 0.0
        self._weights = 0.0

    def observe(self, state: PauseState, gap_s: float, median_s: float) -> None:
        """A pause in `state`, which usually takes `median_s` (`NextUseModel.median_s`), has taken `gap_s`."""
        if state.turn_is_over:
            return
        log = math.log(max(SHORTEST_S, gap_s) / max(SHORTEST_S, median_s))
        self._logs = KEEP * self._logs + max(-LIMIT, min(LIMIT, log))
        self._weights = KEEP * self._weights + 1.0

    def of(self, state: PauseState) -> float:
        """How many times longer than usual this session's pauses in `state` are. 1 before the first; within [1/16, 16]."""
        return 1.0 if state.turn_is_over else math.exp(self._logs / (self._weights + PRIOR_PAUSES))
