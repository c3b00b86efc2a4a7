# SPDX-License-Identifier: Apache-2.0
"""When each block of each prompt is read next, for a known order of accesses.

Block by block that is millions of steps. But what one access reads is read next in a few stretches: the next request of the
session reads most of it again, later ones perhaps a part, and the rest is never read. So the prefix tree is walked from the last
access to the first, in pieces that have one answer each.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["NEVER", "Steps", "agreed_length", "next_use_steps"]

NEVER = 1 << 62
"""Later than any access."""

Steps = list[tuple[int, int]]
"""(end, next): blocks before index `end`, and not before an earlier entry's, are read next by access number `next`."""


def agreed_length(path: NDArray[np.int64], other: NDArray[np.int64], start: int, end: int) -> int:
    """Where, in `[start, end]`, two prompts that agree before `start` part. O(1) if not before `end`, else O(log n).

    An id stands for its block and all before it, so where two prompts agree they agree in all that comes before.
    """
    if path[end - 1] == other[end - 1]:
        return end
    low, high = start, end - 1
    while low < high:
        middle = (low + high) // 2
        if path[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


class _Piece:
    """Blocks `start <= index < end` of the prompt `path`, all read next by access `read_by`."""

    __slots__ = ("end", "path", "read_by", "start")

    def __init__(self, path: NDArray[np.int64], start: int, end: int, read_by: int) -> None:
        self.path = path
        self.start = start
        self.end = end
        self.read_by = read_by


def next_use_steps(paths: Sequence[NDArray[np.int64]]) -> list[Steps]:
    """For each access, which later access reads each block of its prompt next.

    O(pieces log n): each access leaves one piece more.
    """
    by_first: dict[int, _Piece] = {}
    result: list[Steps] = []
    for access in range(len(paths) - 1, -1, -1):
        path = paths[access]
        length = len(path)
        steps: Steps = []
        position = 0
        while position < length:
            piece = by_first.pop(int(path[position]), None)
            if piece is None:
                steps.append((length, NEVER))
                break
            end = agreed_length(path, piece.path, position, min(length, piece.end))
            if end < piece.end:
                piece.start = end
                by_first[int(piece.path[end])] = piece
            _add(steps, end, piece.read_by)
            position = end
        result.append(steps)
        if length:
            by_first[int(path[0])] = _Piece(path, 0, length, access)
    result.reverse()
    return result


def _add(steps: Steps, end: int, read_by: int) -> None:
    if steps and steps[-1][1] == read_by:
        steps[-1] = (end, read_by)
    else:
        steps.append((end, read_by))
