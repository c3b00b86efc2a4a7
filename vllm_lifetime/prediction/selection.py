# SPDX-License-Identifier: Apache-2.0
"""What the workers that are predicted to be the shortest-lived consist of (Lachesis section 3.5, figure 7(b))."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Shares", "selection_shares"]

Scores = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the k shortest-predicted workers, k being `percent` of all: shares from 0 to 1."""

    percent: int
    among_shortest: float
    """Among the k shortest-lived."""
    among_shortest_2k: float
    avoids_longest: float
    """Not among the k longest-lived."""


def selection_shares(scores: Scores, lifetimes: Scores, percent: int, seed: int = 0) -> Shares:
    """What the k shortest-predicted hold. Workers with equal scores are taken in random order. O(n log n)."""
    number = len(scores)
    k = max(1, round(percent * number / 100))
    chosen = np.lexsort((np.random.default_rng(seed).random(number), scores))[:k]
    place = np.empty(number, dtype=np.int64)
    place[np.argsort(lifetimes, kind="stable")] = np.arange(number)
    places = place[chosen]
    return Shares(percent, float((places < k).mean()), float((places < 2 * k).mean()), float((places < number - k).mean()))
