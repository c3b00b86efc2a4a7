# SPDX-License-Identifier: Apache-2.0
"""For how long the cache of a workflow that calls a tool is pinned: the `ttl` policy (Continuum's time-to-live), to compare with.

Continuum pins by tool: as long as the chance that the tool returns soon outweighs what the space is worth to others. Here that is
`NextUseModel.worthwhile_wait_s`, on hazards learned as everywhere here. Scheduler thread or simulator.
"""

from vllm_lifetime.prediction.next_use import NextUseModel, PauseState

__all__ = ["PIN_COST_S", "TimeToLive"]

PIN_COST_S = 300.0
"""Keeping a block for so long costs as much as a miss."""


class TimeToLive:
    """Learned times to live, by tool; a tool that was never seen has that of all of them, and the first of all a prior."""

    def __init__(self, pin_cost_s: float = PIN_COST_S) -> None:
        if not pin_cost_s > 0.0:
            raise ValueError(f"pin_cost_s must be positive, it is {pin_cost_s}")
        self._model = NextUseModel()
        self._pin_cost_s = pin_cost_s

    def observe(self, tool: str | None, gap_s: float) -> None:
        """A call of `tool` has taken `gap_s`, until the next request. O(1)."""
        self._model.observe(_state(tool), gap_s)

    def time_to_live_s(self, tool: str | None) -> float:
        """For how long to pin from the call of `tool` on. O(bins)."""
        return self._model.worthwhile_wait_s(_state(tool), self._pin_cost_s)


def _state(tool: str | None) -> PauseState:
    return PauseState(finish_reason="tool_calls", tool=tool, turn_is_over=False)
