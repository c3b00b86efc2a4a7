# SPDX-License-Identifier: Apache-2.0
"""A change that makes the block pool much dearer is told.

Both pools get the same calls in turns, and the thread's CPU time is what counts: neither a slow nor a busy machine matters much.
"""

import pytest

from benchmarks.block_pool import measure_calls

LIMITS = {0: 2.0, 100: 2.0}
"""By runs that the blocks are spread over (0: no metadata): at most so many times what stock vLLM's pool costs."""


@pytest.mark.parametrize("num_runs", LIMITS)
def test_the_pool_costs_much_more_than_stock(num_runs: int) -> None:
    """A block handed out, hit once and given back."""
    [cycle] = [row["ratio"] for row in measure_calls(4000, num_runs, [16], 9) if row["operation"] == "cycle"]
    assert 0.1 < cycle < LIMITS[num_runs]
