# SPDX-License-Identifier: Apache-2.0
"""What requests write and until when it is read, counted by hand; and that nothing is lost."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.analysis_testing import ask, stripping, trace_of
from vllm_lifetime.analysis.writes import BlockTable
from vllm_lifetime.traces.schema import Trace, TraceSession


def rows(trace: Trace, number: int = 0) -> list[tuple[int, int, float, float]]:
    written = BlockTable(trace).session_writes(number)
    return sorted((w.writer, w.last_reader, w.tokens, w.reads) for w in written.writes)


def test_prompts_and_outputs_are_written_once_and_read_by_decode_steps() -> None:
    assert rows(trace_of(stripping())) == [
        (0, 1, 5, 10 + 5 * 4),  # the first answer: 0 + 1 + 2 + 3 + 4 reads of its own, then 4 steps of request 1
        (0, 2, 10, 10 * (5 + 4 + 2)),
        (1, 1, 3, 3 * 4),
        (1, 1, 4, 6),  # its own answer is not in the next prompt
        (2, 2, 2, 1),
        (2, 2, 6, 6 * 2),
    ]
    assert BlockTable(trace_of(stripping())).session_writes(0).prefill_tokens == [10, 3, 6]


def test_an_answer_that_the_next_prompt_goes_on_from_is_not_written_again() -> None:
    session = TraceSession("s", (ask([0, 1], 3, -1), ask([0, 1, 2, 3, 4, 5], 1, 0)))
    written = BlockTable(trace_of(session)).session_writes(0)
    assert written.prefill_tokens == [2, 1]
    assert sum(write.tokens for write in written.writes) == 2 + 3 + 1 + 1


def test_less_than_a_block_is_counted_by_tokens() -> None:
    session = TraceSession("s", (ask([7], 3, -1, input_tokens=16), ask([7], 2, 0, input_tokens=25)))
    written = BlockTable(Trace("t", 16, (session,))).session_writes(0)
    assert written.prefill_tokens == [16, 6]
    assert sum(write.tokens for write in written.writes) == 16 + 6 + 3 + 2


def test_what_two_sessions_read_is_shared_and_belongs_to_the_first() -> None:
    one, other = (TraceSession(name, (ask([0, 1, 2, base], 1, -1),)) for name, base in (("a", 10), ("b", 20)))
    table = BlockTable(trace_of(one, other))
    first, second = table.session_writes(0), table.session_writes(1)
    assert (first.shared_tokens, second.shared_tokens) == (3, 0)
    assert (first.prefill_tokens, second.prefill_tokens) == ([1], [1])


def test_ids_that_are_far_apart_take_no_array_of_their_size() -> None:
    session = TraceSession("s", (ask([5, 1 << 60], 1, -1), ask([5, 1 << 60, 1 << 61], 1, 0)))
    assert rows(trace_of(session)) == [(0, 1, 1, 1), (0, 1, 2, 4), (1, 1, 1, 0)]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=12))
def test_every_token_is_written_by_exactly_one_request(choices: list[tuple[int, int, int]]) -> None:
    """Each prompt keeps a part of an earlier one and adds new tokens."""
    prompts: list[list[int]] = []
    requests = []
    fresh = 0
    for index, (back, keep, out) in enumerate(choices):
        base = prompts[max(0, index - 1 - back)][:keep] if prompts else []
        prompt = [*base, *range(fresh, fresh + 3)]
        fresh += 3
        prompts.append(prompt)
        requests.append(ask(prompt, out, index - 1))
    written = BlockTable(trace_of(TraceSession("s", tuple(requests)))).session_writes(0)
    distinct = len(np.unique(np.concatenate([request.blocks for request in requests])))
    generated = sum(request.output_tokens for request in requests)
    in_writes = sum(write.tokens for write in written.writes)
    assert abs(in_writes - sum(written.prefill_tokens) - generated) < 1e-6
    carried = distinct - sum(written.prefill_tokens)
    assert -1e-6 <= carried <= generated
    for write in written.writes:
        assert write.writer <= write.last_reader < len(requests)
        assert write.tokens > 0
        assert write.reads >= 0
