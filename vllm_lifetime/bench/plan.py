# SPDX-License-Identifier: Apache-2.0
"""What a run is to send: the sessions of a trace, scaled to the model's context."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.bench.tokens import FIRST_TOKEN, VOCABULARY_SIZE, TokenSource
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

__all__ = ["Plan", "PlanError", "PlannedRequest", "PlannedSession", "make_plan"]


MAX_TOKENS = 1 << 24
"""Of one request: more than any model takes, and few enough to be held in memory."""


class PlanError(ValueError):
    """A trace cannot be replayed as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: the trace's, and how many tokens are sent and asked for."""

    trace: TraceRequest
    index: int
    prompt_tokens: int
    output_tokens: int
    spawns: bool
    """Whether it is the first request of a sub-agent."""

    @property
    def tokens(self) -> int:
        """Of prompt and output together."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class PlannedSession:
    """One session. `followers[i]` are the requests that wait for request i, `followers[-1]` those that wait for nothing."""

    trace: TraceSession
    index: int
    requests: Sequence[PlannedRequest]
    followers: dict[int, list[PlannedRequest]] = field(repr=False)


@dataclass(frozen=True)
class Plan:
    """The sessions of a run, and the tokens of their prompts."""

    name: str
    sessions: Sequence[PlannedSession]
    tokens: TokenSource
    block_size_tokens: int
    """Of the trace."""

    @property
    def num_requests(self) -> int:
        """Requests of all sessions."""
        return sum(len(session.requests) for session in self.sessions)

    def prompt(self, session: PlannedSession, request: PlannedRequest) -> NDArray[np.int64]:
        """The token ids of a request's prompt. O(tokens)."""
        blocks = self.tokens.block_tokens(request.trace.blocks)
        tail = self.tokens.tail_tokens(session.index, request.index, request.prompt_tokens - len(blocks))
        return np.concatenate([blocks, tail])

    def check_fits(
        self,
        max_model_len: int | None,
        sent: Sequence[tuple[PlannedSession, PlannedRequest]] | None = None,
        *,
        option: str = "--tokens-per-block",
    ) -> None:
        """Raise `PlanError` if a prompt with its output is longer than the server takes. None: the server does not say.

        `sent`: the requests that are asked about, at least one; None: all. `option`: what the scale is called where it is given.
        """
        pairs = sent or [(session, request) for session in self.sessions for request in session.requests]
        session, request = max(pairs, key=lambda pair: pair[1].tokens)
        if max_model_len is None or request.tokens <= max_model_len:
            return
        fitting = self.tokens.tokens_per_block * max_model_len // request.tokens
        lowest = self.tokens.id_tokens
        while fitting >= lowest and self._longest_with(fitting, pairs) > max_model_len:
            fitting -= 1
        advice = f"{option} {fitting}" if fitting >= lowest else "a model with a longer context"
        raise PlanError(
            f"request {request.index} of session {session.trace.session_id!r} has {request.prompt_tokens:,} tokens of prompt and "
            f"{request.output_tokens:,} of output; the server takes {max_model_len:,} together (max_model_len). Try {advice}"
        )

    def _longest_with(self, tokens_per_block: int, pairs: Sequence[tuple[PlannedSession, PlannedRequest]]) -> int:
        return max(sum(_scaled(request.trace, tokens_per_block, self.block_size_tokens)) for _, request in pairs)


def make_plan(
    trace: Trace,
    *,
    tokens_per_block: int | None = None,
    num_sessions: int | None = None,
    first_token: int = FIRST_TOKEN,
    vocabulary_size: int = VOCABULARY_SIZE,
    seed: int = 0,
) -> Plan:
    """Scale the first `num_sessions` sessions of `trace` (None: all) so that a block has `tokens_per_block` (None: as in the
    trace). O(blocks).

    Raises:
        PlanError: nothing to send, or a request that waits for one that comes after it.
        ValueError: blocks cannot be told apart with so few tokens.

    """
    chosen = [session for session in trace.sessions if session.requests][:num_sessions]
    if not chosen:
        raise PlanError(f"{trace.name}: no session has a request")
    size = trace.block_size_tokens if tokens_per_block is None else tokens_per_block
    largest = max((int(r.blocks.max()) for s in chosen for r in s.requests if len(r.blocks)), default=0)
    if min((int(r.blocks.min()) for s in chosen for r in s.requests if len(r.blocks)), default=0) < 0:
        raise PlanError(f"{trace.name}: a block id is negative")
    tokens = TokenSource(size, largest, first_token, vocabulary_size, seed)
    sessions = tuple(_plan_session(session, index, size, trace.block_size_tokens) for index, session in enumerate(chosen))
    for session in sessions:
        for request in session.requests:
            if request.tokens > MAX_TOKENS:
                raise PlanError(
                    f"request {request.index} of session {session.trace.session_id!r} has {request.prompt_tokens:,} tokens of "
                    f"prompt and {request.output_tokens:,} of output; no more than {MAX_TOKENS:,} can be sent. Scale them down"
                )
    return Plan(trace.name, sessions, tokens, trace.block_size_tokens)


def _plan_session(session: TraceSession, index: int, tokens_per_block: int, block_size: int) -> PlannedSession:
    requests: list[PlannedRequest] = []
    followers: dict[int, list[PlannedRequest]] = {}
    known: set[str] = set()
    for number, request in enumerate(session.requests):
        if not -1 <= request.after < number:
            raise PlanError(
                f"request {number} of session {session.session_id!r} waits for request {request.after}, which is not before it"
            )
        is_new = request.agent_id is not None and request.agent_id not in known
        if request.agent_id is not None:
            known.add(request.agent_id)
        prompt, output = _scaled(request, tokens_per_block, block_size)
        planned = PlannedRequest(request, number, prompt, output, spawns=is_new and request.parent_agent_id is not None)
        requests.append(planned)
        followers.setdefault(request.after, []).append(planned)
    return PlannedSession(session, index, tuple(requests), followers)


def _scaled(request: TraceRequest, tokens_per_block: int, block_size: int) -> tuple[int, int]:
    """Tokens of prompt and output, at least one of each."""
    scale = tokens_per_block / block_size
    tail = max(0, request.input_tokens - len(request.blocks) * block_size)
    prompt = len(request.blocks) * tokens_per_block + round(tail * scale)
    return max(1, prompt), max(1, round(request.output_tokens * scale))
