# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler with the CPU time of each step noted down; started with `--scheduler-cls`, by the benchmark only."""

import os
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from benchmarks.comparison.settings import SCHEDULER_TIMES

__all__ = ["TimedScheduler"]

_FLUSHED_STEPS = 20


class TimedScheduler(AsyncScheduler):
    """Measures `schedule` and `update_from_output`, in which a connector's scheduler side runs, by the thread's CPU time.

    So what other processes do meanwhile does not count. The note itself is written outside of what is measured: a line with the
    time in seconds since the epoch, CPU time in ns, and how many tokens and requests were in the step.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        """Open the file."""
        super().__init__(*arguments, **more)
        self._times = open(os.environ[SCHEDULER_TIMES], "a")  # noqa: SIM115  open as long as the engine lives
        self._steps = 0
        self._scheduled_ns = 0

    def schedule(self, *arguments: Any, **more: Any) -> Any:
        """As vLLM does, timed."""
        began_ns = time.thread_time_ns()
        output = super().schedule(*arguments, **more)
        self._scheduled_ns += time.thread_time_ns() - began_ns
        return output

    def update_from_output(self, scheduler_output: Any, *arguments: Any, **more: Any) -> Any:
        """As vLLM does, timed; then the step is noted down."""
        began_ns = time.thread_time_ns()
        outputs = super().update_from_output(scheduler_output, *arguments, **more)
        spent_ns = self._scheduled_ns + time.thread_time_ns() - began_ns
        self._scheduled_ns = 0
        tokens = scheduler_output.total_num_scheduled_tokens
        self._times.write(f"{time.time():.6f} {spent_ns} {tokens} {len(scheduler_output.num_scheduled_tokens)}\n")
        self._steps += 1
        if self._steps % _FLUSHED_STEPS == 0:
            self._times.flush()
        return outputs
