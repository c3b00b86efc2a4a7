# SPDX-License-Identifier: Apache-2.0
"""Block ids in a file: runs of consecutive ids as [first, count] pairs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.source import Row

__all__ = ["check_count", "expand", "run_lengths"]

MAX_BLOCKS = 1 << 24
"""Blocks that one pair, or one part of a prompt, may stand for: a mistyped count must not take the memory of the machine."""


def check_count(count: int) -> None:
    """Raises ValueError if a prompt cannot have `count` blocks."""
    if count >= MAX_BLOCKS:
        raise ValueError(
            f"a prompt must have fewer than {MAX_BLOCKS} blocks, this one has {count} or more; check its token counts"
        )


def run_lengths(blocks: NDArray[np.int64]) -> list[list[int]]:
    """Block ids as [first, count] of consecutive ids."""
    if not len(blocks):
        return []
    starts = np.concatenate([[0], np.flatnonzero(np.diff(blocks) != 1) + 1])
    counts = np.diff(np.append(starts, len(blocks)))
    return [[int(first), int(count)] for first, count in zip(blocks[starts], counts, strict=True)]


def expand(row: Row, name: str) -> NDArray[np.int64]:
    """The block ids of a field that holds ids, [first, count] pairs, or both. Raises TraceError."""
    parts: list[NDArray[np.int64]] = []
    for item in row.items(name):
        pair = [item, 1] if type(item) is int else item
        if not _is_pair(pair):
            raise row.error(name, "block ids of at least 0, or [first, count] pairs")
        parts.append(np.arange(pair[0], pair[0] + pair[1], dtype=np.int64))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _is_pair(pair: Any) -> bool:
    is_pair = isinstance(pair, list) and len(pair) == 2 and all(type(number) is int and number >= 0 for number in pair)
    return is_pair and pair[0] + pair[1] < 1 << 62 and pair[1] < MAX_BLOCKS
