# SPDX-License-Identifier: Apache-2.0
"""Segments recovered from made-up sessions."""

import numpy as np
import pytest

from tests.analysis.analysis_testing import ask, delegating, stripping, trace_of
from vllm_lifetime.analysis.clock import Delays, reference_times, trace_times
from vllm_lifetime.analysis.segmentation import Segment, session_segments
from vllm_lifetime.analysis.structure import read_structure
from vllm_lifetime.analysis.writes import BlockTable
from vllm_lifetime.boundaries import BoundaryKind, SegmentClass
from vllm_lifetime.traces.schema import TraceSession


def segments_of(session: TraceSession, *others: TraceSession) -> list[Segment]:
    structure = read_structure(session)
    times = reference_times(structure, Delays(), np.random.default_rng(0))
    return session_segments(structure, BlockTable(trace_of(session, *others)).session_writes(0), times, trace_times(session))


def test_what_a_turn_drops_is_laden_and_what_it_keeps_lives_on() -> None:
    laden, first, second = segments_of(stripping())
    assert (laden.segment_class, laden.turn, laden.closed_by) == (SegmentClass.REASONING_LADEN, 0, BoundaryKind.TURN_END)
    assert (laden.written_tokens, laden.read_tokens, laden.within_turn_tokens) == (5 + 3 + 4, 30 + 12 + 6, 0)
    assert laden.lifetime_s == pytest.approx(7.8)
    assert (laden.opened_s, laden.closed_s) == (0.0, 7.0)  # the trace's own clock: 1 s a request
    for segment, turn, tokens, lifetime_s in ((first, 0, 10, 108.2), (second, 1, 8, 0.4)):
        assert (segment.segment_class, segment.turn) == (SegmentClass.REASONING_STRIPPED, turn)
        assert (segment.written_tokens, segment.closed_by) == (tokens, BoundaryKind.SESSION_END)
        assert segment.lifetime_s == pytest.approx(lifetime_s)
    assert first.reads_per_write == 11


def test_a_harness_that_keeps_its_turns_has_no_laden_segment() -> None:
    session = TraceSession("s", (ask([0, 1], 2, -1, ends_turn=True), ask([0, 1, 2, 3, 4], 1, 0, 9.0, ends_turn=True)))
    assert {s.segment_class for s in segments_of(session)} == {SegmentClass.REASONING_STRIPPED}


def test_what_is_read_only_in_a_part_of_its_turn_is_said_apart() -> None:
    requests = (
        ask([0, 1, 2], 1, -1),
        ask([0, 9], 0, 0),  # tokens 1 and 2 and the answer are gone before the turn is over
        ask([0, 9, 8], 0, 1, ends_turn=True),
        ask([0, 9, 8, 7], 0, 2, ends_turn=True),
    )
    laden = segments_of(TraceSession("s", requests))[0]
    assert (laden.segment_class, laden.written_tokens, laden.within_turn_tokens) == (SegmentClass.REASONING_LADEN, 3, 3)


def test_a_sub_agents_context_closes_when_it_returns_and_its_leads_with_the_session() -> None:
    lead, worker = segments_of(delegating())
    assert (lead.segment_class, lead.closed_by, lead.written_tokens) == (SegmentClass.LEAD, BoundaryKind.SESSION_END, 33 + 1)
    assert (worker.segment_class, worker.closed_by) == (SegmentClass.WORKER, BoundaryKind.SUBAGENT_RETURN)
    assert worker.written_tokens == 8 + 10 + 2 + 10
    # Lead 1 s; worker 0.5 s, 2 s, 0.5 s, 1 + 2 s; lead 1 + 0.2 s.
    assert worker.lifetime_s == pytest.approx(2 + 0.5 + 3)
    assert lead.lifetime_s == pytest.approx(1 + 0.5 + 5.5 + 1.2)


def test_a_compaction_closes_what_it_drops() -> None:
    requests = (
        ask([0, 1, 2], 1, -1, ends_turn=True),
        ask([0, 1, 2, 3, 4], 1, 0, 9.0, ends_turn=True),
        ask([0, 7, 8], 1, 1, 5.0, compacts=True, ends_turn=True),
    )
    rows = [(s.turn, s.written_tokens, s.closed_by) for s in segments_of(TraceSession("s", requests))]
    # Token 0 is read after it; the rest of both turns is not, the answers included.
    assert sorted(rows) == [
        (0, 1, BoundaryKind.SESSION_END),
        (0, 3, BoundaryKind.COMPACTION),
        (1, 2, BoundaryKind.COMPACTION),
        (2, 3, BoundaryKind.SESSION_END),
    ]


def test_a_turn_whose_tokens_do_not_close_together_closes_with_most_of_them() -> None:
    def session(dropped: int) -> TraceSession:
        first = list(range(10))
        requests = (
            ask(first, 0, -1, ends_turn=True),
            ask([*first, 20], 0, 0, ends_turn=True),
            ask([*first[: 10 - dropped], 30], 0, 1, ends_turn=True),
        )
        return TraceSession("s", requests)

    for dropped, closed_by in ((4, BoundaryKind.SESSION_END), (6, BoundaryKind.TURN_END)):
        first = next(s for s in segments_of(session(dropped)) if s.turn == 0)
        assert (first.written_tokens, first.closed_by) == (10, closed_by)
        assert first.closed_s == (3.0 if closed_by is BoundaryKind.SESSION_END else 2.0)


def test_what_is_shared_has_tokens_and_no_lifetime() -> None:
    other = TraceSession("o", (ask([0, 1], 1, -1),))
    shared = segments_of(stripping(), other)[0]
    assert (shared.segment_class, shared.written_tokens, shared.lifetime_s) == (SegmentClass.SHARED, 2, None)
    assert shared.reads_per_write is None
