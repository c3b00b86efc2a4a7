# SPDX-License-Identifier: Apache-2.0
"""Mean and deviation of what comes in, the recent counting most. Plain arithmetic, so that compiled code gives the same bits."""

import math

__all__ = ["RunningMean"]


class RunningMean:
    """Exponential mean and variance; the plain ones until there are `1 / weight` values.

    Args:
        weight: of the newest value.

    """

    __slots__ = ("count", "mean", "variance", "weight")

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.count = 0
        self.mean = 0.0
        self.variance = 0.0

    def add(self, value: float) -> None:
        """Take one value. O(1)."""
        self.count += 1
        weight = max(self.weight, 1.0 / self.count)
        step = value - self.mean
        self.mean += weight * step
        self.variance = (1.0 - weight) * (self.variance + weight * step * step)

    @property
    def deviation(self) -> float:
        """Standard deviation."""
        return math.sqrt(self.variance)
