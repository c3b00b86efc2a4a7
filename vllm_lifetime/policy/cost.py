# SPDX-License-Identifier: Apache-2.0
"""What a transfer or a prefill costs, learned while serving; and whether to load or to recompute.

Scheduler process, one thread. O(1) per observation and per decision.
"""

from collections.abc import Mapping

__all__ = ["LinearCost", "LoadPolicy"]


class LinearCost:
    """`seconds = fixed + per_unit * size`, fitted by exponentially weighted least squares.

    Args:
        decay: weight that an observation keeps when the next one arrives; 0.98 forgets half of the past in about 34.

    """

    __slots__ = ("_decay", "_sum_x", "_sum_xx", "_sum_xy", "_sum_y", "_weight")

    def __init__(self, decay: float = 0.98) -> None:
        self._decay = decay
        self._weight = self._sum_x = self._sum_y = self._sum_xx = self._sum_xy = 0.0

    @property
    def is_known(self) -> bool:
        """Whether anything has been observed."""
        return self._weight > 0

    def observe(self, size: float, seconds: float) -> None:
        """Something of `size` units took `seconds`."""
        d = self._decay
        self._weight = self._weight * d + 1
        self._sum_x = self._sum_x * d + size
        self._sum_y = self._sum_y * d + seconds
        self._sum_xx = self._sum_xx * d + size * size
        self._sum_xy = self._sum_xy * d + size * seconds

    def predict(self, size: float) -> float:
        """Expected seconds for `size` units; 0 if nothing is known. Neither coefficient is taken negative."""
        if not self._weight:
            return 0.0
        mean_x = self._sum_x / self._weight
        mean_y = self._sum_y / self._weight
        variance = self._sum_xx / self._weight - mean_x * mean_x
        covariance = self._sum_xy / self._weight - mean_x * mean_y
        # With sizes all (nearly) alike the slope is noise: charge everything per unit.
        per_unit = covariance / variance if variance > 1e-9 * mean_x * mean_x else -1.0
        fixed = mean_y - per_unit * mean_x
        if per_unit < 0 or fixed < 0:
            return mean_y * size / mean_x if mean_x else mean_y
        return fixed + per_unit * size


class LoadPolicy:
    """Loads what is expected to arrive sooner than it could be recomputed ("never worse", R40).

    A tier or a prefill rate of which nothing is known yet is given the benefit of the doubt. A tier that was found slow is
    tried again once in `RETRY_EVERY` refusals, since only a load can show that it has become fast.
    """

    RETRY_EVERY = 32

    def __init__(self, *, always: bool = False) -> None:
        self._always = always
        self._num_refusals = 0
        self.prefill = LinearCost()
        self.load: dict[str, LinearCost] = {}

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """A step that computed `tokens` tokens took `seconds`."""
        self.prefill.observe(tokens, seconds)

    def observe_load(self, tier: str, num_bytes: int, seconds: float) -> None:
        """A load of `num_bytes` from `tier` took `seconds` on the worker, queueing included."""
        self.load.setdefault(tier, LinearCost()).observe(num_bytes, seconds)

    def should_load(self, tokens: int, bytes_by_tier: Mapping[str, int], queued_bytes_by_tier: Mapping[str, int]) -> bool:
        """Whether to load `tokens` tokens, behind the transfers that are queued already, rather than compute them."""
        if self._always:
            return True
        if not self.prefill.is_known:
            return True
        seconds = 0.0
        for tier, num_bytes in bytes_by_tier.items():
            cost = self.load.get(tier)
            if num_bytes and cost is not None:
                seconds += cost.predict(num_bytes + queued_bytes_by_tier.get(tier, 0))
        if seconds <= self.prefill.predict(tokens):
            return True
        self._num_refusals += 1
        return self._num_refusals % self.RETRY_EVERY == 0
