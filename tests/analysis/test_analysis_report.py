# SPDX-License-Identifier: Apache-2.0
"""The report on a made-up trace, and what cannot be analysed."""

import pytest

from tests.analysis.analysis_testing import ask, delegating, made_up_trace, stripping, trace_of
from vllm_lifetime.analysis.report import AnalysisError, analyze
from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.traces.schema import Trace, TraceSession


def test_every_written_token_is_in_one_class() -> None:
    analysis = analyze(made_up_trace())
    tokens = {row.segment_class: row.written_tokens for row in analysis.classes}
    assert tokens == {
        SegmentClass.REASONING_LADEN: 2 * 12,
        SegmentClass.REASONING_STRIPPED: 2 * 18,
        SegmentClass.LEAD: 3 * 34,
        SegmentClass.WORKER: 30 + 42,
        SegmentClass.REVIEWER: 18,
    }
    assert sum(row.written_share for row in analysis.classes) == pytest.approx(1)
    assert len(analysis.segments) == 2 * 3 + 3 * 2


def test_the_axes_by_hand() -> None:
    analysis = analyze(made_up_trace())
    temporal, structural, workers = analysis.temporal, analysis.structural, analysis.inter_worker
    assert temporal is not None
    assert structural is not None
    assert workers is not None
    assert (temporal.turn_ends, temporal.shrunk_turn_ends, temporal.dropped_turn_ends) == (2, 2, 2)
    assert temporal.written_share == pytest.approx(24 / 252)
    assert temporal.turn_share == pytest.approx(24 / 162)
    # Laden lives 7.8 s; stripped 108.2 s and 0.4 s, as often.
    assert temporal.comparison.lifetime_ratio == pytest.approx(((108.2 + 0.4) / 2) / 7.8)
    assert temporal.comparison.separability == 0.5
    assert structural.sessions == 3
    assert structural.written_share == pytest.approx(90 / 252)
    assert structural.written_share_in_sessions == pytest.approx(90 / 192)
    worker, reviewer = structural.comparisons
    # Leads live 8.2, 11.7 and 4.7 s, workers 5.5 and 9 s, the reviewer 2 s.
    assert worker.lifetime_ratio == pytest.approx(8.2 / 7.25)
    assert worker.separability == pytest.approx((1 + 0 + 1 + 1 + 0 + 0) / 6)
    assert (reviewer.short, reviewer.separability) == (SegmentClass.REVIEWER, 1.0)
    assert structural.waiting_share == pytest.approx(5.5 / 8.2)
    assert workers.workers == 2
    assert workers.lifetime_volume_tau == 1.0
    assert workers.predicted_tau is None
    assert analysis.verdict.startswith("The structural axis pays little: sub-agents write 35.7% of all tokens")


def test_an_axis_that_pays_is_named_first() -> None:
    sessions = [delegating(f"d{number}", 10_000 * (number + 1)) for number in range(3)]
    verdict = analyze(trace_of(*sessions, stripping())).verdict
    first, second = verdict.split(". ")
    assert first == (
        "The structural axis pays most: sub-agents write 40.5% of all tokens, and their lead's context lives 1.5x as long as a "
        "worker's (separability 1.00)"
    )
    assert second == (
        "The temporal axis pays little: 5.4% of all written tokens are dropped within their turn or at its end (1 of 1 turn ends "
        "dropped a tenth of the context or more), and what is kept lives 7.0x as long (separability 0.50)."
    )


def test_a_users_pause_is_taken_out_of_a_leads_life_beside_it() -> None:
    sessions = []
    for base, name in ((0, "a"), (10_000, "b")):
        session = delegating(name, base)
        lead = session.requests[-1].blocks.tolist()
        message = ask([*lead, base + 900], 0, 3, 91.8, agent="lead", ends_turn=True)
        sessions.append(TraceSession(name, (*session.requests, message)))
    structural = analyze(trace_of(*sessions)).structural
    assert structural is not None
    assert structural.waiting_share == pytest.approx(5.5 / 100)
    assert structural.waiting_share_without_user == pytest.approx(5.5 / 8.2)


def test_an_axis_that_the_trace_cannot_show_is_a_sentence() -> None:
    one = analyze(trace_of(stripping(), stripping("t", 500)))
    assert (one.structural, one.inter_worker) == (None, None)
    assert "No structural and no inter-worker axis: this trace holds no requests of sub-agents." in one.remarks
    other = analyze(trace_of(delegating(), delegating("e", 5000)))
    assert other.temporal is None
    assert "No temporal axis: no session of this trace goes on after a turn's end." in other.remarks


@pytest.mark.parametrize(
    ("trace", "says"),
    [
        (trace_of(), "the trace has no requests"),
        (trace_of(TraceSession("s", ())), "the trace has no requests"),
        (trace_of(stripping()), "the trace has one session"),
        (trace_of(TraceSession("a", (ask([0], 1, -1, ends_turn=True),)), TraceSession("b", (ask([1], 1, -1),))), "no boundaries"),
    ],
)
def test_what_cannot_be_analysed_is_one_sentence(trace: Trace, says: str) -> None:
    with pytest.raises(AnalysisError, match=says):
        analyze(trace)


def test_a_trace_that_writes_nothing_is_said_to() -> None:
    empty = [TraceSession(name, (ask([], 0, -1, ends_turn=True), ask([], 0, 0, ends_turn=True))) for name in "ab"]
    with pytest.raises(AnalysisError, match="write no tokens"):
        analyze(trace_of(*empty))
