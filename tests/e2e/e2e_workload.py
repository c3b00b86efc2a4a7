# SPDX-License-Identifier: Apache-2.0
"""The requests of the end-to-end tests. Every prompt is random token ids, so that none shares a prefix by accident."""

import random
from dataclasses import dataclass

BLOCK_TOKENS = 32
POOL_BLOCKS = 24
"""KV blocks of every server here; vLLM keeps one of them as its null block."""

USABLE_BLOCKS = POOL_BLOCKS - 1
MAX_MODEL_LEN = 21 * BLOCK_TOKENS
"""The pool holds 1.1 times the longest request."""


@dataclass(frozen=True)
class Prompt:
    """A request whose output on stock vLLM is known."""

    name: str
    tokens: tuple[int, ...]
    max_tokens: int

    @property
    def reusable_tokens(self) -> int:
        """What a second request with this prompt need not compute: whole blocks, without the last token."""
        return (len(self.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def random_tokens(seed: str, length: int) -> tuple[int, ...]:
    """Token ids without the tokenizer's special ones."""
    generator = random.Random(seed)
    return tuple(generator.randrange(3, 1000) for _ in range(length))


def _prompts(kind: str, lengths: list[int], max_tokens: int) -> list[Prompt]:
    return [Prompt(f"{kind}-{i}", random_tokens(f"{kind}-{i}", n), max_tokens) for i, n in enumerate(lengths)]


RELOAD = _prompts("reload", [320, 333, 600, 65, 450, 200], 24)
"""Various lengths: whole blocks, a part of one, several chunks of prefill."""

CROWD = _prompts("crowd", [600, 608, 590, 600, 580, 601], 48)
"""Each nearly fills the pool."""

GROWING = _prompts("growing", [120, 128, 100, 127, 110, 125], 120)
"""Many fit when they start, few when they end: vLLM must preempt."""

KEPT = _prompts("kept", [320, 300, 333, 288, 310, 350], 16)
"""Survive a restart in the flash file."""

WRITING = _prompts("writing", [400 + i for i in range(12)], 8)
"""Being written to flash when the server is killed."""

CHAT = [
    {"role": "system", "content": "You are a helpful agent. Use the tools below when you need them. " * 4},
    {"role": "user", "content": "Find the failing test, read the file, fix the function and run the tests again. " * 4},
]
CHAT_TOKENS = 16


def filler(number: int, length: int = 320) -> tuple[int, ...]:
    """A prompt that only takes space."""
    return random_tokens(f"filler-{number}", length)


def agents_sequence() -> list[Prompt]:
    """Requests of six agents with shared system prompts and growing histories, in a fixed random order.

    Together they need several times the pool, so that the order of eviction decides nearly every hit.
    """
    generator = random.Random("agents")
    turns = dict.fromkeys(range(6), 0)
    prompts = []
    for index in range(48):
        agent = generator.choice(list(turns))
        shared = random_tokens(f"system-{agent % 2}", 96)
        history = random_tokens(f"agent-{agent}", 480)[: 40 + 57 * turns[agent]]
        turns[agent] = turns[agent] + 1 if turns[agent] < 7 else 0
        prompts.append(Prompt(f"agents-{index}", shared + history, 3))
    return prompts
