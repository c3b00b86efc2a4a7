# SPDX-License-Identifier: Apache-2.0
"""Which blocks to copy down before they are evicted, so that evicting them costs nothing.

Pure; scheduler process. Retired blocks are never candidates: nobody will read them.
"""

from collections.abc import Callable
from itertools import islice
from typing import TypeVar

from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.nodes import FreeBlock

__all__ = ["next_to_demote"]

Block = TypeVar("Block", bound=FreeBlock)


def next_to_demote(free_list: TierFreeList[Block], ahead: int, limit: int, needs_copy: Callable[[Block], bool]) -> list[Block]:
    """At most `limit` of the free blocks within `ahead` evictions that still need a copy, the next victim first.

    Empty and retired blocks go before any of them, and so shorten the way. O(ahead) at worst, nothing if they cover `ahead`.
    """
    reach = ahead - free_list.num_empty_blocks - free_list.num_retired_blocks
    if reach <= 0 or limit <= 0:
        return []
    candidates = filter(needs_copy, islice(free_list.iter_cached_blocks(), reach))
    return list(islice(candidates, limit))
