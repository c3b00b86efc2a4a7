# SPDX-License-Identifier: Apache-2.0
"""The simulated node's state, in arrays that compiled code can work on.

An **actor** is a program that runs: one slot in the arrays of `State`. Blocks are single tokens here: that is exact for shares
and rates, and spares rounding.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.policy.placement.contract import NUM_TIERS
from vllm_lifetime.policy.placement.output_length import NUM_BINS
from vllm_lifetime.simulate.hbf.replay_trace import CLASSES

__all__ = [
    "ADMITTED",
    "ADMITTED_TOKENS",
    "DEAD_HEAD",
    "DEAD_TAIL",
    "DECODING",
    "EVICTED",
    "FLUSH",
    "FREE",
    "FREE_ACTORS",
    "HEAP",
    "LOGGED",
    "LOG_CLOSE",
    "LOG_MOVE",
    "LOG_OPEN",
    "LOG_READ",
    "LOG_REQUEST",
    "LOG_WRITE",
    "LOST_HEAD",
    "LOST_TAIL",
    "NOW",
    "NUM_STEP_BINS",
    "NUM_UIDS",
    "OUTPUT_LIVE",
    "POLICY_NUMBERS",
    "RESERVE",
    "REVIEWER_COUNT",
    "REVIEWER_MEAN",
    "REVIEWER_VARIANCE",
    "SESSIONS_ENDED",
    "SESSIONS_STARTED",
    "SIZE_COUNT",
    "SIZE_MEAN",
    "SIZE_VARIANCE",
    "STEPS",
    "STEP_BIN_S",
    "TICK",
    "DecisionLog",
    "Node",
    "State",
    "make_state",
]

Records = NDArray[Any]
"""Structured arrays: compiled code takes far fewer of them than arrays of one field each, and compiles in seconds."""

POLICY_NUMBERS = {
    name: number
    for number, name in enumerate(
        (
            "hbm_first",
            "lachesis_no_predictive",
            "lachesis",
            "oracle",
            "read_write_ratio",
            "output_length",
            "lru_migrate",
            "hbm_first_freed",
            "hbm_first_lru_per_tier",
            "oracle_per_byte",
        )
    )
}
"""Number by which compiled code knows a policy."""

NUM_STEP_BINS = 20_000
STEP_BIN_S = 1e-4
"""Width of the bins of step times; the last takes all that is longer."""

# Indices of State.counts
DECODING, HEAP, FREE_ACTORS, DEAD_TAIL, STEPS, SESSIONS_STARTED, SESSIONS_ENDED, FLUSH, ADMITTED = range(9)
TICK, NUM_UIDS, REVIEWER_COUNT, SIZE_COUNT, OUTPUT_LIVE, EVICTED, LOGGED, LOST_HEAD, LOST_TAIL = range(9, 18)
FREE = 18
"""`FREE + tier`."""
ADMITTED_TOKENS = FREE + NUM_TIERS
"""`ADMITTED_TOKENS + tier`: of live workers that were admitted."""
DEAD_HEAD = ADMITTED_TOKENS + NUM_TIERS
"""`DEAD_HEAD + tier`: the oldest closed segment that still has its place in the tier."""
NUM_COUNTS = DEAD_HEAD + NUM_TIERS

# Indices of State.real
NOW, RESERVE, REVIEWER_MEAN, REVIEWER_VARIANCE, SIZE_MEAN, SIZE_VARIANCE = range(6)
NUM_REALS = 6

LOG_OPEN, LOG_WRITE, LOG_READ, LOG_REQUEST, LOG_CLOSE, LOG_MOVE = range(6)

_INTEGER, _REAL = np.int64, np.float64

ACTOR = np.dtype(
    [
        ("program", _INTEGER),
        ("row", _INTEGER),
        ("remaining", _INTEGER),
        ("ahead", _INTEGER),
        ("parent", _INTEGER),
        ("pending", _INTEGER),
        ("written", _INTEGER),
        ("reads", _REAL),
        ("last_read", _INTEGER),
        ("is_live", _INTEGER),
        ("admitted", _INTEGER),
        ("key", _REAL),
        ("request_tier", _INTEGER),
        ("request_bin", _INTEGER),
        ("uid", _INTEGER),
        # Not of this actor: lists that are never longer than there are actors.
        ("decoding", _INTEGER),
        ("free_actor", _INTEGER),
        ("heap_s", _REAL),
        ("heap_actor", _INTEGER),
        ("lost_actor", _INTEGER),
        ("lost_s", _REAL),
    ]
)
"""`remaining`: tokens that it still decodes; `ahead`: tokens that have a place and are not decoded yet;
`pending`: children that it waits for; `key`: what ranks it among workers."""

CLASS = np.dtype([("reads", _REAL), ("writes", _REAL), ("tier", _INTEGER)])
"""By class: what closed segments have read and written, for `read_write_ratio`; where the class alone goes."""

PLACE = np.dtype([("live", _INTEGER), ("written", _INTEGER), ("spilled", _INTEGER), ("live_s", _REAL)])
"""By class and tier, in tokens: live now; written and spilled (by wanted tier) since the warm-up; live, integrated over time."""


class Node(NamedTuple):
    """What does not change during a run. Capacities in tokens."""

    hbm_tokens: int
    flash_tokens: int
    step_s: float
    """Weights and fixed cost of one decode step."""
    read_s: float
    """Reading the KV of one token in all layers."""
    flush_s: float
    """Writing the KV of one token to all flash stacks together."""
    program_s: float
    """Once for each step that writes to flash."""
    full_share: float
    """Share of a context that is read in full; the rest is read up to `chunk_tokens`."""
    chunk_tokens: float
    policy: int
    frees_at_boundary: bool
    evicts_per_tier: bool
    """Dead segments go from the tier that is full, not from both when both are."""
    lease_s: float
    """After so long a segment is freed whose boundary was lost."""
    growth: float
    reserve_share: float
    reserve_deviations: float


class State(NamedTuple):
    """All that changes."""

    actors: Records
    """`ACTOR`. Of `lost_actor` and `lost_s`, a ring from `counts[LOST_HEAD]` to `counts[LOST_TAIL]` holds those whose boundary
    was lost, and when each is freed. Of `decoding`, the first `counts[DECODING]` are the actors that decode; of `heap_s` and
    `heap_actor`, the first `counts[HEAP]` are a heap of those that wait; of `free_actor`, the first `counts[FREE_ACTORS]` are
    idle."""
    tokens: NDArray[np.int64]
    """[actor, tier]: its segment."""
    classes: Records
    """`CLASS`"""
    places: Records
    """`PLACE`, [class, tier]"""
    dead: NDArray[np.int64]
    """[position in a ring, tier]: closed segments that stay cached, oldest at `counts[DEAD_HEAD + tier]`."""
    is_lost: NDArray[np.bool_]
    """[program]: the event of its end never arrives."""
    step_tokens: NDArray[np.int64]
    """Tokens decoded in steps of each duration."""
    output_written: NDArray[np.float64]
    """By bin of expected output, for `output_length`."""
    order: NDArray[np.int64]
    """Sessions in the order in which they start, again from the front when all have."""
    counts: NDArray[np.int64]
    real: NDArray[np.float64]


class DecisionLog(NamedTuple):
    """What happened, for the test that the Python policies decide alike. No rows: nothing is logged."""

    rows: NDArray[np.int64]
    """[event, (kind, uid, a, b)]"""


def make_state(
    num_actors: int,
    node: Node,
    order: NDArray[np.int64],
    tier_by_class: NDArray[np.int64],
    num_dead: int,
    is_lost: NDArray[np.bool_],
) -> State:
    """An empty node with room for `num_actors` programs at a time and `num_dead` closed segments."""
    classes = len(CLASSES)
    state = State(
        actors=np.zeros(num_actors, ACTOR),
        tokens=np.zeros((num_actors, NUM_TIERS), np.int64),
        classes=np.zeros(classes, CLASS),
        places=np.zeros((classes, NUM_TIERS), PLACE),
        dead=np.zeros((num_dead, NUM_TIERS), np.int64),
        is_lost=is_lost,
        step_tokens=np.zeros(NUM_STEP_BINS, np.int64),
        output_written=np.zeros(NUM_BINS, np.float64),
        order=order,
        counts=np.zeros(NUM_COUNTS, np.int64),
        real=np.zeros(NUM_REALS, np.float64),
    )
    state.actors["free_actor"] = np.arange(num_actors - 1, -1, -1)
    state.classes["tier"] = tier_by_class
    state.counts[FREE_ACTORS] = num_actors
    state.counts[FREE : FREE + NUM_TIERS] = node.hbm_tokens, node.flash_tokens
    return state
