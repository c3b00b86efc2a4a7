# SPDX-License-Identifier: Apache-2.0
"""Prompts as block ids that share memory: a prompt that another one begins with is a view of it.

A coding session asks again and again with the same context and a little more; written out, its prompts would take as many ids as
there are block references, and most of reading them would be parsing the same digits again.
"""

import re
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.run_lengths import check_count

__all__ = ["GlobalIds", "IdSource", "PromptTexts", "common_prefix", "cut_out_ids", "ids_text"]

_ID_LISTS = re.compile(rb'"hash_ids"\s*:\s*\[([\d,\s]*)\]')


def cut_out_ids(document: bytes) -> tuple[bytes, list[bytes]]:
    """A JSON document with every `"hash_ids": [1, 2, ...]` replaced by `"hash_ids": [n]`, and the n-th list's text.

    What is no list of whole numbers stays as it is. A quote inside a JSON string is escaped, so no string can be taken for one.
    """
    texts: list[bytes] = []

    def cut_out(match: re.Match[bytes]) -> bytes:
        texts.append(match[1].strip())
        return b'"hash_ids":[%d]' % (len(texts) - 1)

    return _ID_LISTS.sub(cut_out, document), texts


def ids_text(value: object, texts: Sequence[bytes]) -> bytes | None:
    """The text of the list that `value` stands for since `cut_out_ids`; None if it stands for none."""
    if isinstance(value, list) and len(value) == 1 and type(value[0]) is int and 0 <= value[0] < len(texts):
        return texts[value[0]]
    return None


def common_prefix(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """How many leading blocks two prompts share. O(shorter prompt)."""
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if len(differs) else shorter


@dataclass(slots=True)
class PromptTexts:
    """Prompts of one id space, taken up as text. A prompt that goes on from the one before it costs only what it adds."""

    _chains: list[list[NDArray[np.int64]]] = field(default_factory=list)
    _longest: bytes = b""
    _length: int = 0
    _places: list[tuple[int, int]] = field(default_factory=list)

    def add(self, text: bytes) -> int:
        """Take up one prompt, ids apart by commas; its number among those taken up. Raises ValueError."""
        if self._chains and _goes_on(self._longest, text):
            added = _parse(text[len(self._longest) :].lstrip().removeprefix(b","))
            self._chains[-1].append(added)
            self._longest, self._length = text, self._length + len(added)
            self._places.append((len(self._chains) - 1, self._length))
        elif self._chains and _goes_on(text, self._longest):
            self._places.append((len(self._chains) - 1, text.count(b",") + 1 if text else 0))
        else:
            ids = _parse(text)
            self._chains.append([ids])
            self._longest, self._length = text, len(ids)
            self._places.append((len(self._chains) - 1, self._length))
        return len(self._places) - 1

    def local_ids(self) -> tuple[NDArray[np.int64], list[slice]]:
        """All chains after one another, and where in them each prompt lies."""
        chains = [np.concatenate(parts) for parts in self._chains]
        starts = [0, *accumulate(len(chain) for chain in chains)]
        ids = np.concatenate(chains) if chains else np.empty(0, np.int64)
        return ids, [slice(starts[chain], starts[chain] + length) for chain, length in self._places]


@dataclass(slots=True)
class IdSource:
    """Gives out block ids, each once."""

    _next: int = 0

    def take(self, count: int) -> NDArray[np.int64]:
        """The next `count` ids. Raises ValueError if they are more than a prompt can have."""
        check_count(count)
        first, self._next = self._next, self._next + count
        return np.arange(first, self._next, dtype=np.int64)


@dataclass(slots=True)
class GlobalIds:
    """Gives the ids of many id spaces one numbering, in which named prefixes are common to all spaces that have them."""

    _ids: IdSource = field(default_factory=IdSource)
    _shared: dict[Hashable, NDArray[np.int64]] = field(default_factory=dict)

    def shared(self, name: Hashable, count: int) -> NDArray[np.int64]:
        """The ids of the prefix part `name`, `count` blocks: the same ones whenever it is named. Raises ValueError, as `take`."""
        ids = self._shared.get(name)
        if ids is None:
            ids = self._shared[name] = self._ids.take(count)
        return ids

    def number(
        self, ids: NDArray[np.int64], prompts: Sequence[slice], prefixes: Sequence[tuple[int, NDArray[np.int64]]]
    ) -> list[NDArray[np.int64]]:
        """The prompts of one space, as views of one array of global ids.

        `ids` and `prompts` are those of `PromptTexts.local_ids`. `prefixes`: number of a prompt, and the shared ids that its
        leading blocks get. Raises ValueError if two prompts give a block different blocks before it. O(n log n).
        """
        local, at = np.unique(ids, return_inverse=True)
        _check_chained(local, at, prompts)
        numbers = np.full(len(local), -1, np.int64)
        for prompt, shared in prefixes:
            place = at[prompts[prompt]][: len(shared)]
            numbers[place] = shared[: len(place)]
        own = numbers == -1
        numbers[own] = self._ids.take(int(own.sum()))
        blocks = numbers[at]
        blocks.flags.writeable = False
        return [blocks[prompt] for prompt in prompts]


def _check_chained(local: NDArray[np.int64], at: NDArray[np.intp], prompts: Sequence[slice]) -> None:
    before = np.concatenate([[-1], at[:-1]])
    before[np.unique([prompt.start for prompt in prompts if prompt.stop > prompt.start])] = -1
    expected = np.full(len(local), -2, np.int64)
    expected[at] = before
    wrong = np.flatnonzero(expected[at] != before)
    if len(wrong):
        raise ValueError(f"block {local[at[wrong[0]]]} comes after different blocks in two prompts; ids must name a whole prefix")


def _goes_on(shorter: bytes, longer: bytes) -> bool:
    """Whether the list `longer` begins with the list `shorter`."""
    if not longer.startswith(shorter):
        return False
    rest = longer[len(shorter) : len(shorter) + 16].lstrip()
    return not shorter or not rest or rest.startswith(b",")


def _parse(text: bytes) -> NDArray[np.int64]:
    text = text.strip()
    if not text:
        return np.empty(0, np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        ids = np.fromstring(text, dtype=np.int64, sep=",")
    if len(ids) != text.count(b",") + 1:
        raise ValueError("expected whole numbers with commas between them")
    return ids
