# SPDX-License-Identifier: Apache-2.0
"""What each request writes, and until when and how often that is read (Lachesis 3.2 and appendix B).

A request writes the part of its prompt that no request of its session had before, and what it generates. If the next prompt goes
on from there, the generated tokens are the first of what is new in it, and are not written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.schema import Trace, TraceSession

__all__ = ["BlockTable", "SessionWrites", "Write"]


@dataclass(frozen=True, slots=True)
class Write:
    """Tokens that one request of a session wrote and that the session read for the last time in the same request.

    `writer` and `last_reader` are indices of requests; a request reads what it writes. `reads` is the number of token reads by
    decode steps (the sum in Eq. 3, in tokens).
    """

    writer: int
    last_reader: int
    tokens: float
    reads: float


@dataclass(frozen=True, slots=True)
class SessionWrites:
    """All that a session wrote. `prefill_tokens` is by request, without what is shared with other sessions.

    `shared_tokens` is what this session, of all sessions that read it, wrote first; it is in no `Write`.
    """

    writes: Sequence[Write]
    prefill_tokens: Sequence[float]
    shared_tokens: int


class BlockTable:
    """Which blocks are read by more than one session, and which session had them first.

    Holds some 25 bytes for each distinct block of the trace.
    """

    def __init__(self, trace: Trace) -> None:
        """Look through all prompts. O(blocks of all prompts), and with sparse ids a logarithm more."""
        self._trace = trace
        self._ids = _sparse_ids(trace)
        size = len(self._ids) if self._ids is not None else 1 + _largest_id(trace)
        self._first_session = np.full(size, -1, np.int32)
        self._is_shared = np.zeros(size, bool)
        self._seen_by = np.full(size, -1, np.int32)
        self._last_reader = np.zeros(size, np.int32)
        self._reads = np.zeros(size, np.int64)
        for number, session in enumerate(trace.sessions):
            for request in session.requests:
                blocks = self._dense(request.blocks)
                new = blocks[self._known(blocks, number) :]
                self._seen_by[new] = number
                has_owner = self._first_session[new] >= 0
                self._is_shared[new[has_owner]] = True
                self._first_session[new[~has_owner]] = number
        self._seen_by.fill(-1)

    def session_writes(self, number: int) -> SessionWrites:
        """What session `number` of the trace writes. Ask once for each session. O(blocks of all its prompts)."""
        session = self._trace.sessions[number]
        size = self._trace.block_size_tokens
        prompts = [self._dense(request.blocks) for request in session.requests]
        known: list[int] = []
        for index, (request, blocks) in enumerate(zip(session.requests, prompts, strict=True)):
            known.append(self._known(blocks, number))
            new = blocks[known[-1] :]
            self._seen_by[new] = number
            self._last_reader[blocks] = index
            self._reads[blocks] += request.output_tokens
        writes: list[Write] = []
        prefills: list[float] = []
        carried = [0.0] * len(prompts)
        ending_with: dict[int, int] = {}
        shared_tokens = 0
        for index, (request, blocks) in enumerate(zip(session.requests, prompts, strict=True)):
            new = blocks[known[index] :]
            is_shared = self._is_shared[new]
            shared_tokens += size * int(np.count_nonzero(is_shared & (self._first_session[new] == number)))
            own = new[~is_shared]
            continued = ending_with.get(int(blocks[known[index] - 1])) if known[index] else None
            start = session.requests[continued].input_tokens if continued is not None else known[index] * size
            tokens = max(0.0, float(request.input_tokens - start - size * (len(new) - len(own))))
            carry = 0.0
            if continued is not None and not carried[continued]:
                carry = carried[continued] = min(float(session.requests[continued].output_tokens), tokens)
            prefills.append(tokens - carry)
            for last, part, reads in self._parts(own, blocks, index, request.output_tokens):
                amount = tokens * part
                generated = min(amount, carry)
                if generated and continued is not None:
                    steps = (session.requests[continued].output_tokens - 1) / 2
                    writes.append(Write(continued, last, generated, generated * (reads + steps)))
                if amount > generated:
                    writes.append(Write(index, last, amount - generated, (amount - generated) * reads))
                carry -= generated
            if len(blocks):
                ending_with[int(blocks[-1])] = index
        for index, request in enumerate(session.requests):
            left = request.output_tokens - carried[index]
            if left > 0:
                writes.append(Write(index, index, left, left * (request.output_tokens - 1) / 2))
        return SessionWrites(writes, prefills, shared_tokens)

    def _parts(
        self, own: NDArray[np.int64], blocks: NDArray[np.int64], index: int, output_tokens: int
    ) -> list[tuple[int, float, float]]:
        """New blocks by their last reader, in prompt order: that one, which part of them, and how often each token is read."""
        if not len(own):
            # Less than a block is new: it is read as long as the block before it.
            if not len(blocks):
                return [(index, 1.0, float(output_tokens))]
            return [(int(self._last_reader[blocks[-1]]), 1.0, float(output_tokens))]
        last = self._last_reader[own]
        cuts = [0, *(np.flatnonzero(np.diff(last)) + 1).tolist(), len(own)]
        return [
            (int(last[begin]), (end - begin) / len(own), float(self._reads[own[begin:end]].mean()))
            for begin, end in pairwise(cuts)
        ]

    def _known(self, blocks: NDArray[np.int64], number: int) -> int:
        """How many leading blocks session `number` has read before: with a block it has read all before it, so bisect."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if self._seen_by[blocks[middle]] == number:
                low = middle + 1
            else:
                high = middle
        return low

    def _dense(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        return blocks if self._ids is None else np.searchsorted(self._ids, blocks)


def _largest_id(trace: Trace) -> int:
    return max((int(r.blocks.max()) for s in trace.sessions for r in s.requests if len(r.blocks)), default=0)


def _sparse_ids(trace: Trace) -> NDArray[np.int64] | None:
    """All distinct ids in order, where they are too far apart to be indices of an array; else None."""
    references = sum(len(r.blocks) for s in trace.sessions for r in s.requests)
    if _largest_id(trace) <= references:
        return None
    return np.unique(np.concatenate([np.unique(np.concatenate([r.blocks for r in s.requests])) for s in _asking(trace.sessions)]))


def _asking(sessions: Sequence[TraceSession]) -> list[TraceSession]:
    return [session for session in sessions if session.requests]
