# SPDX-License-Identifier: Apache-2.0
"""Whether the order of workers' lifetimes can be told when they are spawned (Lachesis 3.5, figure 7).

A ridge regression on what every trace holds of a spawn: role, tokens of the first prompt, place among the session's sub-agents,
and the longest prompt of its session until then. The paper also reads the instruction's words, which traces of structure lack.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.analysis.statistics import kendall_tau
from vllm_lifetime.prediction.ridge import ridge

__all__ = ["MIN_WORKERS", "Spawn", "SpawnRank", "rank_spawns"]

MIN_WORKERS = 20
"""Fewer workers say nothing about an order."""
FOLDS = 5
PENALTY = 1.0


@dataclass(frozen=True, slots=True)
class Spawn:
    """One worker as it was spawned, and how long its segment lived (T_norm, seconds)."""

    session_id: str
    role: str
    prompt_tokens: int
    position: int
    """Sub-agents that its session had spawned before."""
    session_tokens: int
    """The longest prompt of its session until then."""
    lifetime_s: float


@dataclass(frozen=True, slots=True)
class SpawnRank:
    """Workers by predicted lifetime. `tau` is Kendall's, of predicted and true order."""

    predicted: NDArray[np.float64]
    lifetimes_s: NDArray[np.float64]
    tau: float | None


def rank_spawns(spawns: Sequence[Spawn]) -> SpawnRank | None:
    """Predict each worker's lifetime from the other folds; all workers of a session are in one fold, as in the paper.

    None with fewer than `MIN_WORKERS` workers or sessions than folds. O(workers x features^2).
    """
    sessions = list(dict.fromkeys(spawn.session_id for spawn in spawns))
    if len(spawns) < MIN_WORKERS or len(sessions) < FOLDS:
        return None
    roles = list(dict.fromkeys(spawn.role for spawn in spawns))
    fold_of = {session_id: number % FOLDS for number, session_id in enumerate(sessions)}
    folds = np.array([fold_of[spawn.session_id] for spawn in spawns])
    numbers = np.log1p([[s.prompt_tokens, s.position, s.session_tokens] for s in spawns])
    indicators = np.array([[float(spawn.role == role) for role in roles] for spawn in spawns])
    lifetimes = np.array([spawn.lifetime_s for spawn in spawns])
    target = np.log1p(lifetimes)
    predicted = np.zeros(len(spawns))
    for fold in range(FOLDS):
        train, test = folds != fold, folds == fold
        mean, scale = numbers[train].mean(axis=0), numbers[train].std(axis=0)
        scaled = (numbers - mean) / np.where(scale > 0, scale, 1.0)
        x = np.hstack([scaled, indicators])
        center = target[train].mean()
        predicted[test] = center + x[test] @ ridge(x[train], target[train] - center, PENALTY)
    return SpawnRank(predicted, lifetimes, kendall_tau(predicted, lifetimes))
