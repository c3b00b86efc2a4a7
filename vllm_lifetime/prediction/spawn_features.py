# SPDX-License-Identifier: Apache-2.0
"""A spawn signal as the vector that the lifetime rank reads (Lachesis section 3.5): lengths, an indicator per tool, role and
model, the session position, and a hashed bag of the words of instruction and context.

Training and serving use the same code, so that a word has the same place in both; no scikit-learn. Pure; any thread. The texts
may have any length: their heads are read for words.
"""

import math
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.boundaries import Boundary
from vllm_lifetime.traces.spawn_schema import SpawnSignal

__all__ = ["EXPECTED_SIZE", "FEATURES_VERSION", "NUM_FEATURES", "features", "signal_of"]

FEATURES_VERSION = 1
"""Changes with the meaning of any feature; weights of another version mean something else."""

MAX_INSTRUCTION_CHARS, MAX_CONTEXT_CHARS = 1024, 512
"""Read for words. The task stands at the begin, and a score must stay under 0.2 ms of processor time."""

MAX_READ_TOOLS = 256
"""More tools than a boundary may name are left out."""

_NUM_AGENTS, _NUM_TOOLS, _NUM_MODELS = 32, 64, 16
_NUM_INSTRUCTION_WORDS, _NUM_CONTEXT_WORDS = 128, 64

BIAS, HAS_INSTRUCTION, INSTRUCTION_LENGTH, HAS_CONTEXT, CONTEXT_LENGTH, EXPECTED_SIZE, TOOLS, HAS_POSITION, POSITION = range(9)
"""Places of the features that are not hashed. `EXPECTED_SIZE`: of instruction and context together."""

_AGENTS = 9
_TOOLS = _AGENTS + _NUM_AGENTS
_MODELS = _TOOLS + _NUM_TOOLS
_INSTRUCTION_WORDS = _MODELS + _NUM_MODELS
_CONTEXT_WORDS = _INSTRUCTION_WORDS + _NUM_INSTRUCTION_WORDS

NUM_FEATURES = _CONTEXT_WORDS + _NUM_CONTEXT_WORDS

_TYPICAL_LOG_CHARS, _LOG_CHARS_SCALE = 7.0, 1.5
"""About 1,100 characters is an ordinary instruction; a factor of 4.5 counts 1, so that lengths weigh as much as indicators."""

_WORD_BYTES = bytes(byte if byte >= 0x80 or chr(byte).isalnum() or byte == ord("_") else ord(" ") for byte in range(256))
"""For `bytes.translate`: what is between words of UTF-8 becomes a space. Several times as fast as a regular expression."""

_MAX_NAME_CHARS = 256
_MAX_COUNT = 1 << 40


def signal_of(event: Boundary) -> SpawnSignal:
    """The signal of a `subagent_spawn`, with or without a spawn record; of its texts, their heads and lengths."""
    spawn = event.spawn
    if spawn is None:
        return SpawnSignal(agent=event.agent)
    instruction, context = spawn.instruction, spawn.context
    return SpawnSignal(
        instruction=None if instruction is None else instruction[:MAX_INSTRUCTION_CHARS],
        context=None if context is None else context[:MAX_CONTEXT_CHARS],
        instruction_chars=None if instruction is None else len(instruction),
        context_chars=None if context is None else len(context),
        tools=spawn.tools,
        agent=event.agent,
        model=spawn.model,
        position=spawn.position,
    )


def features(signal: SpawnSignal) -> NDArray[np.float64]:
    """The vector of a signal, of `NUM_FEATURES` finite numbers, whatever the signal holds.

    Under 0.2 ms of processor time for texts of any length (docs/lifetime-rank.md).
    """
    x = np.zeros(NUM_FEATURES)
    x[BIAS] = 1.0
    instruction = _num_chars(signal.instruction, signal.instruction_chars)
    context = _num_chars(signal.context, signal.context_chars)
    if instruction is not None:
        x[HAS_INSTRUCTION], x[INSTRUCTION_LENGTH] = 1.0, _scaled_length(instruction)
    if context is not None:
        x[HAS_CONTEXT], x[CONTEXT_LENGTH] = 1.0, _scaled_length(context)
    if instruction is not None or context is not None:
        x[EXPECTED_SIZE] = _scaled_length((instruction or 0) + (context or 0))
    x[TOOLS] = math.log1p(len(signal.tools))
    if signal.position is not None:
        x[HAS_POSITION], x[POSITION] = 1.0, math.log1p(_bounded(signal.position))
    if signal.agent:
        x[_AGENTS + _hash(signal.agent) % _NUM_AGENTS] = 1.0
    if signal.model:
        x[_MODELS + _hash(signal.model) % _NUM_MODELS] = 1.0
    if signal.tools:
        # All names at once: one by one they would cost as much as the words.
        names = _encode("\0".join(signal.tools[:MAX_READ_TOOLS])).split(b"\0")
        x[_TOOLS + np.array(list(map(crc32, names))) % _NUM_TOOLS] = 1.0
    if signal.instruction:
        x[_INSTRUCTION_WORDS:_CONTEXT_WORDS] = _bag(signal.instruction[:MAX_INSTRUCTION_CHARS], _NUM_INSTRUCTION_WORDS)
    if signal.context:
        x[_CONTEXT_WORDS:] = _bag(signal.context[:MAX_CONTEXT_CHARS], _NUM_CONTEXT_WORDS)
    return x


def _num_chars(text: str | None, chars: int | None) -> int | None:
    if chars is not None:
        return _bounded(chars)
    return None if text is None else len(text)


def _bounded(count: int) -> int:
    return min(max(0, count), _MAX_COUNT)


def _scaled_length(chars: int) -> float:
    return (math.log1p(chars) - _TYPICAL_LOG_CHARS) / _LOG_CHARS_SCALE


def _bag(text: str, size: int) -> NDArray[np.float64]:
    """Counts of a text's words by hash, with a sign so that words which meet cancel on average; of length 1."""
    hashes = list(map(crc32, _encode(text.lower()).translate(_WORD_BYTES).split()))
    if not hashes:
        return np.zeros(size)
    counts = np.bincount(np.array(hashes) % (2 * size), minlength=2 * size)
    bag: NDArray[np.float64] = (counts[:size] - counts[size:]).astype(np.float64)
    norm = math.sqrt(bag @ bag)
    return bag / norm if norm else bag


def _hash(name: str) -> int:
    return crc32(_encode(name[:_MAX_NAME_CHARS]))


def _encode(text: str) -> bytes:
    # A lone surrogate, as a broken client sends it, has no UTF-8.
    return text.encode("utf-8", "surrogatepass")
