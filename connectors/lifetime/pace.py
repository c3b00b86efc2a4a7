# SPDX-License-Identifier: Apache-2.0
"""How fast this engine is: what its steps and transfers take, measured. EngineCore process, scheduler thread. O(1) per step."""

from vllm_lifetime.connectors.lifetime.jobs import LoadJob
from vllm_lifetime.policy.cost import LoadPolicy
from vllm_lifetime.policy.prefetch import TransferRates
from vllm_lifetime.pool.access import FLASH_TIER, HOST_TIER

__all__ = ["Pace"]


class Pace:
    """See the module.

    Args:
        block_size: tokens per block.
        deadline_s: what a load that was given up has taken at least.
        always_load: whether loads are made however long they take.

    """

    def __init__(self, block_size: int, block_bytes: int, deadline_s: float, *, always_load: bool) -> None:
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._deadline_s = deadline_s
        self.load_policy = LoadPolicy(always=always_load)
        self.rates = TransferRates()
        # Step number -> (start, tokens, whether it only decodes); the worker echoes the number.
        self._steps: dict[int, tuple[float, int, bool]] = {}
        self._step = 0
        self._last_step_end = 0.0

    def begin_step(self, num_tokens: int, *, only_decodes: bool, now: float) -> int:
        """A step is scheduled. Returns its number, 0 if it computes nothing."""
        self._step += 1
        if not num_tokens:
            return 0
        self._steps[self._step] = (now, num_tokens, only_decodes)
        return self._step

    def end_step(self, step: int, now: float) -> None:
        """The workers have done step number `step`."""
        started = self._steps.pop(step, None)
        if started is None:
            return
        for old in [number for number in self._steps if number < step]:
            del self._steps[old]
        start, num_tokens, only_decodes = started
        # With several steps in flight a step begins, for the device, when the one before it ended.
        seconds = now - max(start, self._last_step_end)
        self._last_step_end = now
        if only_decodes:
            self.rates.observe_step(seconds)
        if num_tokens >= 2 * self._block_size:
            self.load_policy.observe_prefill(num_tokens, seconds)

    def note_transfer(self, job: LoadJob) -> None:
        """What a load or prefetch says of its tier's speed: nothing if it came from two tiers, or was not whole."""
        is_late = job.result.is_late
        if job.is_cancelled or (not is_late and (job.result.failed or (job.host and job.flash))):
            return
        # A late one took at least this long; how long, nobody waited to see.
        seconds = max(job.result.seconds, self._deadline_s) if is_late else job.result.seconds
        num_blocks = len(job.host) + len(job.flash)
        self.rates.observe_transfer(FLASH_TIER if job.flash else HOST_TIER, num_blocks, seconds)
        if job.request_id is not None:
            self.load_policy.observe_load("flash" if job.flash else "host", num_blocks * self._block_bytes, seconds)
