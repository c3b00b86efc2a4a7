# SPDX-License-Identifier: Apache-2.0
"""What a plain LRU cache of the same size would hold now: a simulation in miniature, of a sample of the blocks.

It tells whether traffic that says nothing of itself is treated worse than by stock vLLM (`ranking.py`). Kept are hashes, of one
block in `stride`, chosen by its hash, in order of their last use, at most as many as there is room for (miniature simulation:
Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations", USENIX ATC 2017).

Scheduler thread, or the simulator's; one per tier. No IO, no locks, deterministic.
"""

from collections import OrderedDict
from collections.abc import Sequence

__all__ = ["ShadowLru", "sample_stride"]

MIN_SAMPLE = 2048
"""Blocks that a sample of a whole tier should have at least; a tier with fewer is simulated exactly."""

MAX_STRIDE = 16
"""The coarsest sample is one block of so many."""


def sample_stride(num_blocks: int) -> int:
    """One block of how many is in the sample, for a cache of `num_blocks`."""
    return max(1, min(MAX_STRIDE, num_blocks // MIN_SAMPLE))


class ShadowLru:
    """See the module. `num_blocks`: what the cache holds; `stride`: see `sample_stride`."""

    def __init__(self, num_blocks: int, stride: int) -> None:
        self._limit = max(1, num_blocks // stride)
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        """Least recently used first."""

    def __len__(self) -> int:
        """Blocks of the sample that are in it."""
        return len(self._keys)

    def __contains__(self, key: bytes | None) -> bool:
        return key in self._keys

    def use(self, keys: Sequence[bytes]) -> None:
        """A request reads, or gives back, the blocks of which `keys` are the sample, from the prompt's first one on.

        As in vLLM the first block is the last to go. O(1) per key.
        """
        held = self._keys
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > self._limit:
            held.popitem(last=False)
