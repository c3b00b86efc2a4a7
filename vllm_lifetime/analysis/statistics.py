# SPDX-License-Identifier: Apache-2.0
"""The statistics of Lachesis section 3: separability, overlap, spread and Kendall's tau."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["kendall_tau", "median_ratio", "overlap", "separability", "spread"]

Values = Sequence[float] | NDArray[np.float64]


def separability(long: Values, short: Values) -> float | None:
    """The probability that a random value of `long` exceeds a random one of `short`, ties counted half (Lachesis 3.3).

    None if one of them is empty. O(n log n).
    """
    if not len(long) or not len(short):
        return None
    ordered = np.sort(np.asarray(short, float))
    below = np.searchsorted(ordered, long, "left")
    up_to = np.searchsorted(ordered, long, "right")
    return float((below + up_to).mean() / 2 / len(ordered))


def overlap(one: Values, other: Values) -> float | None:
    """How little two distributions differ: 1 if either exceeds the other as often as not, 0 if one always does.

    Twice the smaller of the two separabilities. The paper gives an overlap and does not say of which kind.
    """
    exceeds = separability(one, other)
    return None if exceeds is None else 2 * min(exceeds, 1 - exceeds)


def median_ratio(long: Values, short: Values) -> float | None:
    """The median of `long` over that of `short`; None if one of them is empty or the latter 0."""
    if not len(long) or not len(short):
        return None
    below = float(np.median(short))
    return float(np.median(long)) / below if below else None


def spread(values: Values) -> float | None:
    """The 90th percentile over the 10th (Lachesis 3.5); None without values or if that is 0."""
    if not len(values):
        return None
    low, high = np.percentile(values, [10, 90])
    return float(high / low) if low else None


def kendall_tau(one: Values, other: Values) -> float | None:
    """Kendall's tau-b of two equally long series; None if one of them is constant or has less than two values. O(n^2)."""
    x, y = np.asarray(one, float), np.asarray(other, float)
    balance = x_differs = y_differs = 0.0
    for place in range(len(x) - 1):
        dx, dy = np.sign(x[place + 1 :] - x[place]), np.sign(y[place + 1 :] - y[place])
        balance += float(dx @ dy)
        x_differs += float(dx @ dx)
        y_differs += float(dy @ dy)
    return balance / float(np.sqrt(x_differs * y_differs)) if x_differs and y_differs else None
