# SPDX-License-Identifier: Apache-2.0
"""Whether a trace's block ids name whole prefixes, as the schema has them: a block always comes after the same block."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.source import TraceError

__all__ = ["check_prefixes", "find_misnamed", "number_prefixes"]

_BATCH_BLOCKS = 1 << 20
_NONE = -1
"""What comes before a prompt's first block."""


def check_prefixes(prompts: Sequence[tuple[str, NDArray[np.int64]]], field: str) -> None:
    """See that every block of the `(where, block ids)` comes after the same block in all prompts. O(n log n).

    Raises TraceError, which names where it does not.
    """
    block = find_misnamed(blocks for _, blocks in prompts)
    if block is None:
        return
    first: tuple[str, int] | None = None
    for where, blocks in prompts:
        for place in np.flatnonzero(blocks == block):
            before = int(blocks[place - 1]) if place else _NONE
            if first is None:
                first = where, before
            elif before != first[1]:
                raise TraceError(
                    where,
                    f"field {field!r}: block {block} comes {_after(before)} here and {_after(first[1])} in {first[0]}; "
                    "an id must name its block and all before it, so give each prefix ids of its own",
                )


def find_misnamed(prompts: Iterable[NDArray[np.int64]]) -> int | None:
    """A block that comes after different blocks; None if there is none."""
    known = known_before = np.empty(0, np.int64)
    batch: list[NDArray[np.int64]] = []
    size = 0

    def take_up() -> int | None:
        nonlocal known, known_before, size
        ids = np.concatenate([known, *batch])
        before = np.concatenate([known_before, *(np.concatenate([[_NONE], prompt[:-1]]) for prompt in batch)])
        known, at = np.unique(ids, return_inverse=True)
        known_before = np.empty(len(known), np.int64)
        known_before[at] = before
        wrong = np.flatnonzero(known_before[at] != before)
        batch.clear()
        size = 0
        return int(ids[wrong[0]]) if len(wrong) else None

    for prompt in prompts:
        if len(prompt):
            batch.append(prompt)
            size += len(prompt)
        if size >= max(_BATCH_BLOCKS, len(known)) and (block := take_up()) is not None:
            return block
    return take_up()


def number_prefixes(prompts: Iterable[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    """The same prompts with new ids, one for each prefix."""
    numbers: dict[tuple[int, int], int] = {}
    renumbered = []
    for prompt in prompts:
        before, ids = _NONE, []
        for block in prompt.tolist():
            before = numbers.setdefault((before, block), len(numbers))
            ids.append(before)
        renumbered.append(np.array(ids, np.int64))
    return renumbered


def _after(block: int) -> str:
    return "first" if block == _NONE else f"after block {block}"
