# SPDX-License-Identifier: Apache-2.0
"""The offline optimum for prefix caches: what is read next furthest in the future goes first (Belady), the deepest block first.

Under the rules of `RunCache`: a running request holds its whole prompt, hits are the contiguous cached prefix, a block may be
dropped as soon as nobody holds it. What a policy then chooses is which blocks to keep, each from the end of its last reader to
its next access; keeping it saves one miss, and at any time all that is kept must fit beside what is held. Dropping whichever of
them would have to be kept longest is optimal for that (interval scheduling with a capacity that changes in time; Faigle and
Nawijn 1995), and so for caches that need no prefix. It is prefix closed by itself: a block's next access is also one of all
blocks before it, so of what is kept beneath one another the deepest is kept longest, and where both are read next by the same
access the deepest goes first. Hence it is optimal for prefix caches, too (checked against all choices,
tests/simulate/test_belady.py). It is a bound for demand caching: what is fetched before it is asked for is no miss.
"""

import heapq
import itertools

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.simulate.next_use_order import Steps, agreed_length

__all__ = ["BeladyCache"]


class _Piece:
    """Cached blocks `start <= index < end` of the prompt `path`: read next by one access, held by the same number of requests."""

    __slots__ = ("end", "num_holders", "path", "read_by", "start", "turn")

    def __init__(self, path: NDArray[np.int64], start: int, end: int, read_by: int, num_holders: int) -> None:
        self.path = path
        self.start = start
        self.end = end
        self.read_by = read_by
        self.num_holders = num_holders
        self.turn = 0


class BeladyCache:
    """A cache of which the future is known. As `RunCache`, with `next_uses` instead of readers."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.num_blocks = 0
        self.num_overcommitted = 0
        self.num_evicted = 0
        self._by_first: dict[int, _Piece] = {}
        self._queue: list[tuple[int, int, int, _Piece]] = []
        self._turns = itertools.count(1)

    def start(self, path: NDArray[np.int64], next_uses: Steps) -> int:
        """A request with the prompt `path` starts, of which `next_uses` says when it is read next.

        Returns the blocks that were hit.
        """
        length = len(path)
        pieces = self._pieces(path)
        hit = pieces[-1].end if pieces else 0
        for piece in pieces:
            piece.num_holders += 1
        if hit < length:
            missing = self.num_blocks + length - hit - self.capacity_blocks
            if missing > 0:
                self.num_overcommitted += not self._evict(missing)
            self.num_blocks += length - hit
            new = _Piece(path, hit, length, 0, 1)
            self._by_first[int(path[hit])] = new
            pieces.append(new)
        self._merge(path, self._label(pieces, next_uses))
        return hit

    def finish(self, path: NDArray[np.int64]) -> None:
        """The request with the prompt `path` gives its blocks back."""
        pieces = self._pieces(path)
        for piece in pieces:
            piece.num_holders -= 1
        for piece in self._merge(path, pieces):
            self._enqueue(piece)
        if self.num_blocks > self.capacity_blocks:
            self._evict(self.num_blocks - self.capacity_blocks)

    def _pieces(self, path: NDArray[np.int64]) -> list[_Piece]:
        """The pieces that hold the cached prefix of `path`; the last one is split where the path leaves it."""
        pieces: list[_Piece] = []
        position = 0
        while position < len(path):
            piece = self._by_first.get(int(path[position]))
            if piece is None:
                break
            position = agreed_length(path, piece.path, position, min(len(path), piece.end))
            if position < piece.end:
                piece = self._split(piece, position)
            pieces.append(piece)
        return pieces

    def _split(self, piece: _Piece, index: int) -> _Piece:
        """Cut the blocks before `index` off `piece`; they form the returned piece."""
        front = _Piece(piece.path, piece.start, index, piece.read_by, piece.num_holders)
        self._by_first[int(piece.path[piece.start])] = front
        piece.start = index
        self._by_first[int(piece.path[index])] = piece
        self._enqueue(piece)
        return front

    def _label(self, pieces: list[_Piece], next_uses: Steps) -> list[_Piece]:
        """Let `pieces`, one after another and all held, be read next as `next_uses` says.

        Returns them, split where that changes.
        """
        labelled: list[_Piece] = []
        steps = iter(next_uses)
        end, read_by = next(steps, (0, 0))
        for piece in pieces:
            while piece.end > end:
                if piece.start < end:
                    front = self._split(piece, end)
                    front.read_by = read_by
                    labelled.append(front)
                end, read_by = next(steps)
            piece.read_by = read_by
            labelled.append(piece)
        return labelled

    def _merge(self, path: NDArray[np.int64], pieces: list[_Piece]) -> list[_Piece]:
        """Make one piece of neighbours that are alike, so that a prefix never has many. Returns what is left."""
        merged: list[_Piece] = []
        for piece in pieces:
            last = merged[-1] if merged else piece
            if last is not piece and last.read_by == piece.read_by and last.num_holders == piece.num_holders:
                last.end = piece.end
                last.path = path
                del self._by_first[int(path[piece.start])]
                piece.turn = 0
            else:
                merged.append(piece)
        return merged

    def _enqueue(self, piece: _Piece) -> None:
        if not piece.num_holders:
            piece.turn = next(self._turns)
            heapq.heappush(self._queue, (-piece.read_by, -piece.start, piece.turn, piece))

    def _evict(self, count: int) -> bool:
        queue = self._queue
        while count and queue:
            _, _, turn, piece = queue[0]
            if turn != piece.turn or piece.num_holders:
                heapq.heappop(queue)
                continue
            taken = min(count, piece.end - piece.start)
            count -= taken
            self.num_blocks -= taken
            self.num_evicted += taken
            piece.end -= taken
            if piece.end == piece.start:
                heapq.heappop(queue)
                del self._by_first[int(piece.path[piece.start])]
                piece.turn = 0
        return not count
