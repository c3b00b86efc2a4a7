# SPDX-License-Identifier: Apache-2.0
"""What the scorer keeps: the state of each workflow, and the audiences, runs that the same agents of the same workflows read.

Scheduler process, one thread.
"""

import math
from collections import deque
from typing import NamedTuple

from vllm_lifetime.pool.runs import Rank, RankGroup, Reader, Run
from vllm_lifetime.prediction.next_use import PauseState
from vllm_lifetime.prediction.pace import Pace

__all__ = ["MAX_HISTORY", "Audience", "AudienceKey", "Succession", "WorkflowKey", "WorkflowState"]

MAX_HISTORY = 128
"""Latest invocations of a workflow that a predictor is shown."""

WorkflowKey = tuple[object, str]
"""Session and workflow id: the same workflow id in two sessions is two workflows."""


class WorkflowState:
    """What is known of one workflow. `values` is None while there is no forecast."""

    __slots__ = (
        "audiences",
        "due_at",
        "history",
        "key",
        "next_use_at",
        "next_values",
        "num_running",
        "pace",
        "pause",
        "paused_at",
        "pinned_until",
        "readers",
        "succession",
        "tool",
        "values",
        "weight",
    )

    def __init__(self, key: WorkflowKey, now: float) -> None:
        self.key = key
        self.history: deque[str] = deque(maxlen=MAX_HISTORY)
        self.num_running = 0
        self.values: dict[str, float] | None = None
        self.next_values: dict[str, float] = {}
        self.weight = 1.0
        self.next_use_at = now
        self.pace = Pace()
        self.pause: PauseState | None = None
        self.paused_at = now
        self.tool: str | None = None
        self.pinned_until = -math.inf
        self.due_at = math.inf
        self.readers: dict[Reader, str] = {}
        """Its segments, and the role of each one's agent."""
        self.audiences: dict[Audience, None] = {}
        """Those that it is part of."""
        self.succession: Succession | None = None
        """The running request, if it came right after another agent's."""


class Succession(NamedTuple):
    """`heir` was invoked right after `giver`; `only_givers`: runs that only `giver` had read by then, and the blocks of each."""

    giver: str
    heir: str
    only_givers: list[tuple[Run, int, int]]


class Audience(RankGroup):
    """Runs with one access set. `access`: O_w(c) without inheritance, by workflow; `floor`: the rank of what keeps them by wish.

    `terms` are the workflows' parts of the score and `total` their sum, which is taken anew once in as many changes as there are
    terms: a prompt that thousands of workflows share then costs O(1) per change, and rounding errors do not pile up.
    """

    __slots__ = ("access", "floor", "key", "next_value", "num_changes", "terms", "total")

    def __init__(
        self, num_tiers: int, key: "AudienceKey", access: dict[WorkflowState, frozenset[str]], floor: Rank | None
    ) -> None:
        super().__init__(num_tiers)
        self.key = key
        self.access = access
        self.floor = floor
        self.terms: dict[WorkflowState, float] = {}
        self.total = 0.0
        self.num_changes = 0
        self.next_value: float | None = None
        """Eq. 1, as far as it has been asked for since the last change."""

    def set_term(self, workflow: WorkflowState, term: float | None) -> None:
        """The workflow's part has changed; None: nothing is known of it."""
        self.total -= self.terms.pop(workflow, 0.0)
        if term is not None:
            self.terms[workflow] = term
            self.total += term
        self.next_value = None
        self.num_changes += 1
        if self.num_changes >= len(self.terms):
            self.num_changes = 0
            self.total = math.fsum(self.terms.values())


AudienceKey = tuple[frozenset[tuple[WorkflowState, frozenset[str]]], Rank | None]
"""The access set and the floor of an audience."""
