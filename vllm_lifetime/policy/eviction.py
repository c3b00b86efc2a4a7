# SPDX-License-Identifier: Apache-2.0
"""The eviction policies by name, as data: what each one knows and uses. The live engine and the simulator read the same table.

| name | retired first | score | time | what it is |
|---|---|---|---|---|
| `lru` | no | - | - | vLLM's own order |
| `lifecycle` | yes | - | - | PBKV-LAE (section 4.2.1): retired first, then LRU |
| `hierarchical` | yes | Eq. 2 | - | PBKV-HE (section 4.2.3): retired first, then by score; no prefetch |
| `lifetime` | yes | Eq. 2 | discounts | the full policy: `hierarchical`, time to next use, prefetch |
| `lifetime_ordered` | yes | Eq. 2 | orders | as `lifetime`, but time only orders what scores (nearly) alike |
| `pbkv` | yes | Eq. 2 | - | the paper's full policy: `hierarchical` and prefetch |
| `kvflow` | no | steps to execution | - | KVFlow: longest way to go in a static call graph first, LRU inside |
| `ttl` | no | - | - | Continuum: pinned for a learned time after a tool call, else LRU |
| `time` | no | - | orders | latest expected next use first, and nothing else |
"""

from dataclasses import dataclass
from enum import StrEnum

from vllm_lifetime.policy.scoring import DEFAULT_GAMMA
from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON

__all__ = [
    "DEFAULT_TIME_HORIZON_S",
    "EVICTION_POLICIES",
    "EvictionPolicy",
    "ScoreKind",
    "TimeUse",
    "parse_policy",
]

DEFAULT_TIME_HORIZON_S = 300.0
"""How far ahead a next use still counts much: a run that is read after this many seconds counts 1/e of one that is read now."""

NEARLY_EQUAL = 1 / 16
"""Scores that differ by less than this are equal, where time orders equal scores: forecasts are not more exact than that, and
exact scores are hardly ever equal."""


class ScoreKind(StrEnum):
    """What orders active runs."""

    NONE = "none"
    LOOKAHEAD = "lookahead"
    """Eq. 2, summed over workflows."""
    STEPS_TO_EXECUTION = "steps_to_execution"
    """Minus the fewest invocations until an agent that reads the run, over all its workflows."""


class TimeUse(StrEnum):
    """What the expected time of the next use does."""

    NONE = "none"
    ORDER = "order"
    """Orders runs of equal score: the latest next use goes first."""
    DISCOUNT = "discount"
    """Multiplies each workflow's part of the score with E[exp(-time to next use / time_horizon_s)]."""


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """One policy. `acts_on_boundaries`: whether the end of a segment retires what only it reads; if not, the caller keeps
    boundaries from the pool. `guards_unnamed`: whether blocks of requests without metadata are kept as long as LRU over all
    requests would keep them (`ranking.py`); if not, they are the first of the active to go.

    `horizon` is K and `gamma` the confidence that a step further ahead keeps (Eq. 2); `score_step` is what scores are rounded to
    (0: not at all).
    """

    name: str
    acts_on_boundaries: bool = True
    scores: ScoreKind = ScoreKind.NONE
    uses_time: TimeUse = TimeUse.NONE
    pins_ttl: bool = False
    prefetches: bool = False
    guards_unnamed: bool = False
    horizon: int = DEFAULT_HORIZON
    gamma: float = DEFAULT_GAMMA
    time_horizon_s: float = DEFAULT_TIME_HORIZON_S
    score_step: float = 0.0

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"the horizon K must be at least 1, it is {self.horizon}")
        if not 0.0 <= self.gamma <= 1.0:
            raise ValueError(f"gamma must be in [0, 1], it is {self.gamma}")
        if not self.time_horizon_s > 0.0:
            raise ValueError(f"time_horizon_s must be positive, it is {self.time_horizon_s}")
        if self.score_step < 0.0:
            raise ValueError(f"score_step must not be negative, it is {self.score_step}")

    @property
    def needs_scorer(self) -> bool:
        """Whether active runs have any order but recency; if not, no `Scorer` is needed."""
        return self.scores is not ScoreKind.NONE or self.uses_time is not TimeUse.NONE or self.pins_ttl or self.prefetches


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    policy.name: policy
    for policy in (
        EvictionPolicy("lru", acts_on_boundaries=False),
        EvictionPolicy("lifecycle"),
        EvictionPolicy("hierarchical", scores=ScoreKind.LOOKAHEAD),
        EvictionPolicy("lifetime", scores=ScoreKind.LOOKAHEAD, uses_time=TimeUse.DISCOUNT, prefetches=True, guards_unnamed=True),
        EvictionPolicy(
            "lifetime_ordered",
            scores=ScoreKind.LOOKAHEAD,
            uses_time=TimeUse.ORDER,
            prefetches=True,
            score_step=NEARLY_EQUAL,
        ),
        EvictionPolicy("pbkv", scores=ScoreKind.LOOKAHEAD, prefetches=True),
        EvictionPolicy("kvflow", acts_on_boundaries=False, scores=ScoreKind.STEPS_TO_EXECUTION),
        EvictionPolicy("ttl", acts_on_boundaries=False, pins_ttl=True),
        EvictionPolicy("time", acts_on_boundaries=False, uses_time=TimeUse.ORDER),
    )
}
"""By name."""


def parse_policy(name: str) -> EvictionPolicy:
    """The policy called `name`.

    Raises:
        ValueError: there is none; the message names those that there are.

    """
    policy = EVICTION_POLICIES.get(name.strip())
    if policy is None:
        raise ValueError(f"unknown eviction policy {name!r}; the policies are {', '.join(EVICTION_POLICIES)}")
    return policy
