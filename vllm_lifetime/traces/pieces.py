# SPDX-License-Identifier: Apache-2.0
"""Prompts that are put together from named pieces: two of them share their blocks up to the first piece that differs."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.run_lengths import check_count

__all__ = ["Piece", "PiecedPrompts"]

Piece: TypeAlias = tuple[Hashable, int]
"""A name, and how many tokens it stands for. A name that is used again must mean the same tokens."""


@dataclass(slots=True)
class _Node:
    """A piece after the pieces before it: where it ends, and the ids of the blocks whose last token lies in it."""

    end_token: int
    blocks: NDArray[np.int64]
    after: dict[Hashable, "_Node"] = field(default_factory=dict)


class PiecedPrompts:
    """All prompts of a trace as a tree of pieces. Blocks are numbered as their piece is first seen."""

    def __init__(self, block_size_tokens: int) -> None:
        self._block_size = block_size_tokens
        self._root = _Node(0, np.empty(0, np.int64))
        self._next_block = 0

    def blocks(self, pieces: Iterable[Piece]) -> tuple[NDArray[np.int64], int]:
        """The whole blocks of a prompt, and its tokens. O(pieces + blocks). Raises ValueError if they are too many."""
        node, parts = self._root, [self._root.blocks]
        for name, tokens in pieces:
            found = node.after.get(name)
            if found is None:
                end_token = node.end_token + tokens
                count = end_token // self._block_size - node.end_token // self._block_size
                check_count(count)
                found = _Node(end_token, np.arange(self._next_block, self._next_block + count, dtype=np.int64))
                self._next_block += count
                node.after[name] = found
            node = found
            parts.append(node.blocks)
        return np.concatenate(parts), node.end_token
