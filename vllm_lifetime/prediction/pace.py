# SPDX-License-Identifier: Apache-2.0
"""How slow one session is: how many times longer its pauses are than those of others in the same state.

A few numbers per session, kept by whoever knows the session; `NextUseModel` takes the result. Waiting for a tool and waiting for
the user are two different things of a session, so there is a pace for each. Scheduler thread or simulator; O(1) everything.
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
    """Paces of one session: geometric means of (pause / usual median), leaning on 1."""

    __slots__ = ("_logs", "_weights")

    def __init__(self) -> None:
        self._logs = [0.0, 0.0]
        self._weights = [0.0, 0.0]

    def observe(self, state: PauseState, gap_s: float, median_s: float) -> None:
        """A pause in `state`, which usually takes `median_s` (`NextUseModel.median_s`), has taken `gap_s`."""
        which = int(bool(state.turn_is_over))
        log = math.log(max(SHORTEST_S, gap_s) / max(SHORTEST_S, median_s))
        self._logs[which] = KEEP * self._logs[which] + max(-LIMIT, min(LIMIT, log))
        self._weights[which] = KEEP * self._weights[which] + 1.0

    def of(self, state: PauseState) -> float:
        """How many times longer than usual this session's pauses in `state` are. 1 before the first; within [1/16, 16]."""
        which = int(bool(state.turn_is_over))
        return math.exp(self._logs[which] / (self._weights[which] + PRIOR_PAUSES))
