# SPDX-License-Identifier: Apache-2.0
"""What stripping reasoning would do to a session that keeps it."""

import numpy as np
import pytest

from tests.analysis.analysis_testing import ask, stripping, trace_of
from vllm_lifetime.analysis.clock import Delays, reference_times
from vllm_lifetime.analysis.reasoning import Output
from vllm_lifetime.analysis.report import Stripping, analyze
from vllm_lifetime.analysis.stripping import StrippedTurn, strip_session, turn_reasoning
from vllm_lifetime.analysis.structure import read_structure
from vllm_lifetime.analysis.writes import BlockTable
from vllm_lifetime.traces.schema import TraceSession


def keeping(name: str = "k", base: int = 0) -> TraceSession:
    """Prompt 10, answer 10, observation 5, answer 5, message 4, answer 2: all of it is kept."""
    tokens = [base + token for token in range(40)]
    return TraceSession(
        name,
        (
            ask(tokens[:10], 10, -1),
            ask(tokens[:25], 5, 0, ends_turn=True),
            ask(tokens[:34], 2, 1, 50.0, ends_turn=True),
        ),
    )


def turns_of(session: TraceSession, outputs: list[Output]) -> list[StrippedTurn]:
    structure = read_structure(session)
    times = reference_times(structure, Delays(), np.random.default_rng(0))
    return strip_session(structure, BlockTable(trace_of(session)).session_writes(0), times, outputs)


def test_a_turn_is_written_again_without_its_reasoning() -> None:
    (turn,) = turns_of(keeping(), [(6, 10), (1, 5), (0, 2)])
    assert (turn.laden_tokens, turn.reasoning_tokens) == (20, 7)  # both answers and the observation
    assert (turn.stripped_tokens, turn.kept_tokens) == (13 + 4, 4)
    assert turn.laden_lifetime_s == pytest.approx(2 + 1 + 1)
    assert turn.stripped_lifetime_s == pytest.approx(0.4)


def test_reasoning_is_a_share_of_what_was_generated_whatever_the_unit() -> None:
    (turn,) = turns_of(keeping(), [(60, 100), (4, 20), (0, 8)])
    assert turn.reasoning_tokens == pytest.approx(7)


def test_without_reasoning_nothing_is_written_again() -> None:
    (turn,) = turns_of(keeping(), [(0, 10), (0, 5), (0, 2)])
    assert turn.stripped_tokens == turn.kept_tokens == 4


def test_a_turn_that_the_harness_has_cut_itself_is_left_out() -> None:
    assert turns_of(stripping(), [(1, 5), (1, 4), (1, 2)]) == []


def test_reasoning_shares_are_by_turn() -> None:
    assert turn_reasoning(read_structure(keeping()), [(6, 10), (1, 5), (0, 2)]) == [7 / 15, 0.0]


def test_what_stripping_saves_and_costs() -> None:
    trace = trace_of(keeping(), keeping("m", 100))
    outputs: dict[str, list[Output]] = {"k": [(6, 10), (1, 5), (0, 2)], "m": [(0, 10), (0, 5), (0, 2)]}
    temporal = analyze(trace, outputs=outputs).temporal
    assert temporal is not None
    assert temporal.median_reasoning_share == 0.0  # of four turns only one has any
    assert (temporal.turn_ends, temporal.dropped_turn_ends, temporal.written_share) == (2, 0, 0.0)
    # Now both write 20 + 4. Stripped, k writes 20 and then 17, of which 17 live on; in m nothing changes.
    assert temporal.stripping == Stripping(
        turns=2,
        reasoning_share=pytest.approx(7 / 40),
        laden_share=pytest.approx(20 / (20 + 17 + 20 + 4)),
        lifetime_ratio=pytest.approx(0.4 / 4),
        separability=0.0,
        long_lived_saved=pytest.approx(1 - (17 + 24) / 48),
        written_more=pytest.approx((20 + 17 + 24) / 48 - 1),
    )
