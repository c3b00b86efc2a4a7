# SPDX-License-Identifier: Apache-2.0
"""Makes spawns up whose lifetimes are predictable to a stated degree: Kendall's tau of what a spawn shows with its lifetime.

The logarithms of lifetime, of written volume and of what the spawn shows are normal, with a correlation of sin(pi tau / 2): so it
is for two normal variables. Spreads and taus are those that Lachesis section 3.5 reports.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.spawn_schema import SpawnSample, SpawnSignal

__all__ = ["PAPER_TAU", "GeneratedSpawns", "correlation_of", "generate_spawns"]

PAPER_TAU = 0.53
"""Between the paper's predicted rank and the lifetimes of its workers."""

VOLUME_TAU = 0.6
"""Between lifetime and written volume: 0.51 to 0.72, by benchmark."""

MEDIAN_LIFETIME_S, LIFETIME_SIGMA = 60.0, 0.9
"""p90 is 10 times p10 (3.7 to 23.6 in the paper); the paper has no median, this is that of the recorded sessions."""

MEDIAN_WRITTEN_TOKENS, WRITTEN_SIGMA = 20_000, 0.75
"""p90 is 7 times p10 (2.8 to 22.5 in the paper); the median is assumed."""

MEAN_WORKERS = 8
"""Of a session; assumed."""

MEDIAN_INSTRUCTION_CHARS, INSTRUCTION_SIGMA = 1000, 0.7

_ROLES = (
    ("searcher", -1.0, ("grep", "read")),
    ("reader", -0.4, ("read", "fetch")),
    ("planner", 0.0, ("read",)),
    ("tester", 0.4, ("read", "bash")),
    ("coder", 1.0, ("read", "edit", "bash")),
)
_SHORT, _LONG = ("quickly", "list", "name", "check", "brief"), ("thoroughly", "implement", "every", "compare", "prove")
_NEUTRAL = tuple(f"word{number}" for number in range(200))
_HINTS = 6
_SHARES = (0.7, 0.6, 0.35)
"""Weights of instruction length, role and hints in what the spawn shows."""


@dataclass(frozen=True, slots=True)
class GeneratedSpawns:
    """`scores[i]` is what `samples[i]` shows: the best prediction there is, at the stated tau. Higher: lives longer."""

    samples: tuple[SpawnSample, ...]
    scores: NDArray[np.float64]


def correlation_of(tau: float) -> float:
    """The correlation of two normal variables whose Kendall's tau is `tau`."""
    return math.sin(math.pi * tau / 2)


def generate_spawns(number: int, seed: int = 0, tau: float = PAPER_TAU) -> GeneratedSpawns:
    """`number` spawns in sessions of one to fifteen. The same arguments give the same spawns.

    `tau` is that of the law; the one of a sample differs by chance.

    Raises ValueError: no spawns, or tau outside [0, 1].
    """
    if number < 1 or not 0.0 <= tau <= 1.0:
        raise ValueError(f"at least 1 spawn, and a tau from 0 to 1, not {number} and {tau}")
    rng = np.random.default_rng([seed, 7])
    roles = rng.integers(len(_ROLES), size=number)
    length = rng.standard_normal(number)
    hints = rng.binomial(_HINTS, 0.5, size=number)
    parts = (length, _standard(np.array([_ROLES[role][1] for role in roles])), _standard(hints.astype(np.float64)))
    shown = _normal_scores(np.sum([share * part for share, part in zip(_SHARES, parts, strict=True)], axis=0))
    life = _correlated(shown, correlation_of(tau), rng)
    volume = _correlated(life, correlation_of(VOLUME_TAU), rng)
    chars = np.exp(math.log(MEDIAN_INSTRUCTION_CHARS) + INSTRUCTION_SIGMA * length)
    samples: list[SpawnSample] = []
    session, position, left, at_s = -1, 0, 0, 0.0
    for i in range(number):
        if not left:
            session, position, left, at_s = session + 1, 0, int(rng.integers(1, 2 * MEAN_WORKERS)), 0.0
        role, _, tools = _ROLES[roles[i]]
        signal = SpawnSignal(
            instruction=_instruction(int(chars[i]), int(hints[i]), rng), tools=tools, agent=role, position=position
        )
        lifetime_s = MEDIAN_LIFETIME_S * math.exp(LIFETIME_SIGMA * life[i])
        tokens = round(MEDIAN_WRITTEN_TOKENS * math.exp(WRITTEN_SIGMA * volume[i]))
        samples.append(SpawnSample(f"session {session}", signal, at_s, lifetime_s, tokens))
        position, left, at_s = position + 1, left - 1, at_s + float(rng.exponential(MEDIAN_LIFETIME_S / 2))
    return GeneratedSpawns(tuple(samples), shown)


def _standard(values: NDArray[np.float64]) -> NDArray[np.float64]:
    deviation = float(values.std())
    return (values - values.mean()) / deviation if deviation else np.zeros_like(values)


def _normal_scores(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Standard normal values in the order of `values`: the relation of tau and correlation holds for no others."""
    quantile = NormalDist().inv_cdf
    scores = np.empty(len(values))
    scores[np.argsort(values, kind="stable")] = [quantile((i + 0.5) / len(values)) for i in range(len(values))]
    return scores


def _correlated(values: NDArray[np.float64], rho: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Standard normal variables whose correlation with `values` is `rho`."""
    return rho * values + math.sqrt(1.0 - rho * rho) * rng.standard_normal(len(values))


def _instruction(chars: int, hints: int, rng: np.random.Generator) -> str:
    """Words that hint at a long life, others at a short one, and such that say nothing; about `chars` characters."""
    words = [*rng.choice(_LONG, hints), *rng.choice(_SHORT, _HINTS - hints), *rng.choice(_NEUTRAL, max(0, chars // 8 - _HINTS))]
    return " ".join(words)[: max(1, chars)]
