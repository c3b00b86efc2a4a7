# SPDX-License-Identifier: Apache-2.0
"""Token ids in the place of a trace's blocks: equal blocks have equal tokens, different ones differ."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["FIRST_TOKEN", "VOCABULARY_SIZE", "TokenSource", "smallest_tokens_per_block"]

FIRST_TOKEN = 16
"""First token id that prompts are made of, unless told otherwise: below it most tokenizers have their special tokens."""

VOCABULARY_SIZE = 1000
"""Token ids below this are used, unless told otherwise: every model has them."""

MAX_VOCABULARY_SIZE = 1 << 31

_GAMMA, _MULTIPLY_1, _MULTIPLY_2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BLOCK_STREAM, _TAIL_STREAM, _SHIFT_STREAM = range(3)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64: numbers that look random, each from its own counter."""
    values = values + _GAMMA
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLY_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLY_2
    return values ^ (values >> np.uint64(31))


@dataclass(frozen=True)
class TokenSource:
    """Makes tokens from block ids. Deterministic in its fields and the id.

    The first tokens of a block spell its id out in base `vocabulary size`, each digit shifted by what the seed says, so that
    two ids never have the same tokens; the rest is random.
    """

    tokens_per_block: int
    largest_block: int
    """The largest block id that is asked for."""
    first_token: int = FIRST_TOKEN
    vocabulary_size: int = VOCABULARY_SIZE
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `ValueError` if ids cannot be told apart: too few tokens a block, or too few in the vocabulary."""
        if self.vocabulary_size > MAX_VOCABULARY_SIZE:
            raise ValueError(f"--vocabulary-size {self.vocabulary_size} is more than the {MAX_VOCABULARY_SIZE:,} there can be")
        if not 0 <= self.first_token <= self.vocabulary_size - 2:
            raise ValueError(
                f"--first-token {self.first_token} and --vocabulary-size {self.vocabulary_size} leave fewer than two token ids"
            )
        if self.tokens_per_block < self.id_tokens:
            raise ValueError(
                f"--tokens-per-block {self.tokens_per_block} cannot tell this trace's blocks apart: with "
                f"--vocabulary-size {self.vocabulary_size} it must be at least {self.id_tokens}"
            )

    @property
    def id_tokens(self) -> int:
        """How many tokens spell a block id out."""
        return smallest_tokens_per_block(self.largest_block, self.vocabulary_size - self.first_token)

    def block_tokens(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of all `blocks`, one after the other. O(tokens)."""
        width = np.uint64(self.vocabulary_size - self.first_token)
        ids = blocks.astype(np.uint64)
        tokens: NDArray[np.uint64] = self._random(ids, _BLOCK_STREAM, self.tokens_per_block) % width
        shifts = self._random(np.zeros(1, np.uint64), _SHIFT_STREAM, self.id_tokens)[0] % width
        for position in range(self.id_tokens):  # the digit that changes fastest first: neighbours differ at once
            tokens[:, position] = (ids % width + shifts[position]) % width
            ids = ids // width
        found: NDArray[np.int64] = tokens.reshape(-1).astype(np.int64) + self.first_token
        return found

    def tail_tokens(self, session: int, request: int, count: int) -> NDArray[np.int64]:
        """`count` tokens that only this request has: what its prompt holds beyond whole blocks."""
        name = _mix(np.array([session], np.uint64)) + np.uint64(request)
        width = np.uint64(self.vocabulary_size - self.first_token)
        tokens: NDArray[np.uint64] = self._random(name, _TAIL_STREAM, count)[0] % width
        found: NDArray[np.int64] = tokens.astype(np.int64) + self.first_token
        return found

    def _random(self, names: NDArray[np.uint64], stream: int, count: int) -> NDArray[np.uint64]:
        """`count` numbers for each name; streams are independent of each other."""
        key = _mix(np.array([self.seed & 0xFFFFFFFFFFFFFFFF, stream], np.uint64))
        begin = _mix(_mix(names ^ key[0]) ^ key[1])
        return _mix(begin[:, None] + np.arange(count, dtype=np.uint64)[None, :] * _GAMMA)


def smallest_tokens_per_block(largest_block: int, width: int) -> int:
    """How many digits in base `width` the ids up to `largest_block` need."""
    digits, numbers = 1, width
    while numbers <= largest_block:
        digits, numbers = digits + 1, numbers * width
    return digits
