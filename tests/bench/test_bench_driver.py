# SPDX-License-Identifier: Apache-2.0
"""The driver against a scripted server: what is sent, in which order and when, and what is left when the server fails."""

import signal
import socket
import time
from collections import Counter

import pytest
from bench_testing import chain, make_request, make_trace, run_on
from scripted_server import Call, ScriptedServer

from vllm_lifetime.bench.driver import MIN_FAILURES, Pace
from vllm_lifetime.bench.report import find_problems, latencies, summarize
from vllm_lifetime.bench.run import Outcome
from vllm_lifetime.bench.server import ServerError
from vllm_lifetime.traces.schema import TraceSession

SUB_AGENTS = TraceSession(
    "family",
    (
        make_request([0], agent_id="main"),
        make_request([10], 0, gap_s=0.05, agent="helper", agent_id="a", parent_agent_id="main", ends_agent=True),
        make_request([20], 0, gap_s=0.05, agent="helper", agent_id="b", parent_agent_id="main"),
        make_request([20, 21], 2, agent="helper", agent_id="b", parent_agent_id="main", ends_agent=True),
        make_request([0, 1], 3, agent_id="main", compacts=True, ends_turn=True),
    ),
)
"""A parent, two sub-agents in parallel, and the parent again after the second."""


def calls_of(server: ScriptedServer, session_id: str) -> list[Call]:
    return [call for call in server.calls if call.session_id == session_id]


def kinds_of(server: ScriptedServer, session_id: str) -> list[str]:
    return [event["kind"] for _, event in server.boundaries if event["session_id"] == session_id]


def test_requests_are_sent_as_dependencies_allow() -> None:
    """Nothing before what it waits for has been answered and its pause is over; sub-agents at the same time."""
    with ScriptedServer(latency_s=0.2) as server:
        outcome = run_on(server, make_trace(SUB_AGENTS))
    first, one, two, more, last = server.calls
    assert [call.metadata.get("agent_id") for call in (first, more, last)] == ["main", "b", "main"]
    assert {one.metadata["agent_id"], two.metadata["agent_id"]} == {"a", "b"}
    assert {call.metadata.get("parent_agent_id") for call in (one, two, more)} == {"main"}
    for call in (one, two):
        assert call.came_s >= first.answered_s + 0.049
    assert two.came_s < one.answered_s, "the second waited for the first"
    assert more.came_s >= max(call.answered_s for call in (one, two) if call.metadata["agent_id"] == "b")
    assert last.came_s >= more.answered_s
    assert outcome.record.stopped is None and outcome.record.num_errors == 0
    latency_s = outcome.record.sessions[0].latency_s
    assert latency_s is not None and last.answered_s - first.came_s <= latency_s <= outcome.record.wall_s


def test_boundaries_are_those_of_a_harness() -> None:
    with ScriptedServer() as server:
        outcome = run_on(server, make_trace(SUB_AGENTS, chain("other", 50)))
    kinds = kinds_of(server, "family")
    assert Counter(kinds) == {
        "subagent_spawn": 2,
        "subagent_return": 2,
        "compaction": 1,
        "turn_end": 1,
        "session_end": 1,
    }
    assert kinds[0] == "subagent_spawn" and kinds[-3:] == ["compaction", "turn_end", "session_end"]
    assert kinds_of(server, "other") == ["session_end"]
    spawned = [event for _, event in server.boundaries if event["kind"] == "subagent_spawn"]
    assert {(e["agent"], e["agent_id"], e["parent_agent_id"]) for e in spawned} == {
        ("helper", "a", "main"),
        ("helper", "b", "main"),
    }
    assert (outcome.boundaries_sent, outcome.boundaries_lost) == (8, 0)
    assert Counter(boundary.kind for boundary in outcome.record.boundaries) == Counter(kinds) + Counter(["session_end"])


def test_so_many_sessions_at_a_time() -> None:
    with ScriptedServer(latency_s=0.03) as server:
        run_on(server, make_trace(*(chain(f"s{n}", 10 * n) for n in range(6))), Pace(concurrency=2))
    spans = [(calls_of(server, f"s{n}")[0].came_s, calls_of(server, f"s{n}")[-1].answered_s) for n in range(6)]
    together = [sum(began <= at_s < ended for began, ended in spans) for at_s, _ in spans]
    assert max(together) == 2
    assert [call.session_id for call in server.calls][:2] == ["s0", "s1"]


def test_sessions_begin_at_their_arrivals() -> None:
    trace = make_trace(*(chain(f"s{n}", 10 * n, length=1, arrival_s=at_s) for n, at_s in enumerate((3.0, 1.0, 2.0))))
    with ScriptedServer() as server:
        began_s = [session.began_s for session in run_on(server, trace, Pace(time_scale=0.1)).record.sessions]
        open_loop, server.calls = server.calls, []
        run_on(server, trace, Pace(concurrency=1))
    assert [call.session_id for call in open_loop] == ["s1", "s2", "s0"]
    assert all(at_s >= due_s for at_s, due_s in zip(began_s, (0.1, 0.2, 0.3), strict=True)), began_s
    assert [call.session_id for call in server.calls] == ["s0", "s1", "s2"], "--concurrency does not look at arrivals"


def test_pauses_are_cut_then_scaled() -> None:
    pace = Pace(idle_cap_s=10.0, time_scale=0.01)
    assert [pace.gap_s(gap_s) for gap_s in (0.0, 5.0, 10.0, 3600.0)] == [0.0, 0.05, 0.1, 0.1]


def test_what_is_sent() -> None:
    with ScriptedServer() as server:
        run_on(server, make_trace(chain("named", 0, length=1), chain("unnamed", 10, length=1, names_session=False)))
        run_on(server, make_trace(chain("named", 20, length=1)), names_requests=False)
    named, unnamed, silent = server.calls
    assert named.session_id == "named" and named.metadata == {"agent": "agent"}
    for call in (unnamed, silent):
        assert call.session_id is None and "kv_transfer_params" not in call.body
    assert kinds_of(server, "named") == ["session_end"]
    assert len(server.boundaries) == 1
    assert len(named.prompt) == 6
    for key, value in {"max_tokens": 3, "ignore_eos": True, "stream": True, "model": "model"}.items():
        assert named.body[key] == value


@pytest.mark.parametrize(("mode", "takes", "posted"), [("auto", True, 1), ("auto", False, 0), ("on", True, 1), ("off", True, 0)])
def test_boundaries_auto_on_off(mode: str, takes: bool, posted: int) -> None:
    with ScriptedServer(takes_boundaries=takes) as server:
        run_on(server, make_trace(chain("s", 0)), boundaries=mode)
    assert len(server.boundaries) == posted
    assert len(server.calls) == 3


def test_boundaries_that_cannot_be_posted_are_refused() -> None:
    with ScriptedServer(takes_boundaries=False) as server:
        with pytest.raises(ServerError, match="takes no boundaries: is it started with --kv-connector lifetime"):
            run_on(server, make_trace(chain("s", 0)), boundaries="on")
        with pytest.raises(ServerError, match="needs --metadata"):
            run_on(server, make_trace(chain("s", 0)), boundaries="on", names_requests=False)
    assert not server.calls


# ---------------------------------------------------------------------- figures


def test_figures_of_a_run() -> None:
    """Two chains that share their first blocks: hits as counted by hand, and the server's counters agree."""
    with ScriptedServer(latency_s=0.06) as server:
        outcome = run_on(server, make_trace(chain("one", 0), chain("two", 0)), Pace(concurrency=1))
    record, counts = outcome.record, outcome.counts
    assert counts is not None
    summary = summarize(record, counts, 2)
    assert [request.cached_tokens for request in record.requests] == [0, 4, 8, 4, 8, 12]
    assert summary["prompt_tokens"] == 2 * (6 + 10 + 14)
    assert summary["hit_rate"] == pytest.approx(36 / 60, abs=1e-6)
    assert summary["hit_tokens_by_source"] == {"hbm": 36}
    assert summary["flash_bytes_written"] == 600
    assert summary["output_tokens"] == 18
    assert (summary["sessions_served"], summary["requests_served"], summary["requests_failed"]) == (2, 6, 0)
    assert summary["requests_per_s"] == pytest.approx(6 / record.wall_s, rel=1e-4)
    measured = latencies(record)
    assert [len(measured[name]) for name in ("ttft_s", "tpot_s", "itl_s", "workflow_latency_s")] == [6, 6, 12, 2]
    assert summary["ttft_p50_s"] > 0.015 and summary["tpot_p50_s"] > 0.015, "each token takes 20 ms"
    assert summary["workflow_latency_mean_s"] >= 0.18
    assert not [problem for problem in find_problems(record, counts) if "late" not in problem]


def test_counters_that_disagree_are_said_to() -> None:
    with ScriptedServer(others_tokens=40) as server:
        outcome = run_on(server, make_trace(chain("s", 0)))
    problems = " ".join(find_problems(outcome.record, outcome.counts))
    assert "looked 70 prompt tokens up, but 30 were sent" in problems
    assert "The hit rate of the answers is 40.00%, that of the server's counters 17.14%" in problems


def test_a_server_that_says_less() -> None:
    with ScriptedServer(has_metrics=False, says_cached=False, max_model_len=None) as server:
        outcome = run_on(server, make_trace(chain("s", 0)))
    summary = summarize(outcome.record, outcome.counts, 1)
    assert outcome.counts is None and outcome.info.max_model_len is None
    assert summary["hit_rate"] is None and summary["hit_tokens_by_source"] is None
    problems = " ".join(find_problems(outcome.record, outcome.counts))
    assert "no counters" in problems and "--enable-prompt-tokens-details" in problems


# ---------------------------------------------------------------------- failures


def served(outcome: Outcome) -> int:
    return sum(request.is_done for request in outcome.record.requests)


def test_an_error_ends_its_session_and_no_other() -> None:
    with ScriptedServer(lambda n: "500" if n == 1 else "ok") as server:
        outcome = run_on(server, make_trace(chain("one", 0), chain("two", 100)), Pace(concurrency=1))
    assert [call.session_id for call in server.calls] == ["one", "one", "two", "two", "two"]
    failed = outcome.record.requests[1]
    assert failed.error == '500 {"error": {"message": "it broke"}}'
    assert [session.has_failed for session in outcome.record.sessions] == [True, False]
    assert outcome.record.stopped is None and outcome.record.num_errors == 1
    assert kinds_of(server, "one") == ["session_end"], "the server goes on keeping what nobody reads"


def test_a_session_goes_on_beside_its_failed_part() -> None:
    """A sub-agent that is still to come is not sent when another of its session has failed."""
    requests = (make_request([0]), make_request([10], 0, gap_s=0.01), make_request([20], 0, gap_s=0.3))
    with ScriptedServer(lambda n: "500" if n == 1 else "ok") as server:
        run_on(server, make_trace(TraceSession("s", requests)))
    assert len(server.calls) == 2


def test_failures_that_are_not_in_a_row_end_the_run() -> None:
    trace = make_trace(*(chain(f"s{n}", 10 * n, length=1) for n in range(6 * MIN_FAILURES)))
    with ScriptedServer(lambda n: "500" if n % 3 else "ok") as server:
        outcome = run_on(server, trace, Pace(concurrency=1))
    assert outcome.record.stopped is None
    assert (served(outcome), outcome.record.num_errors) == (2 * MIN_FAILURES, 4 * MIN_FAILURES)


def test_an_answer_that_ends_early_counts_as_served() -> None:
    with ScriptedServer(lambda n: "cut" if n == 1 else "ok") as server:
        outcome = run_on(server, make_trace(chain("one", 0)))
    assert outcome.record.requests[1].error == "the answer ends before its end"
    assert served(outcome) == 1


def test_nothing_but_errors_ends_the_run() -> None:
    """As many failures in a row as there are ever requests together, and five at least."""
    with ScriptedServer(lambda n: "ok" if n < 3 else "500") as server:
        outcome = run_on(server, make_trace(*(chain(f"s{n}", 10 * n) for n in range(30))), Pace(concurrency=2))
    assert len(server.calls) <= 3 + MIN_FAILURES + 2 * 2
    assert served(outcome) == 3
    assert "requests in a row failed, the last with: 500" in str(outcome.record.stopped)


def test_a_server_that_hangs_holds_the_run_up() -> None:
    with ScriptedServer(lambda n: "hang" if n >= 2 else "ok") as server:
        began_s = time.perf_counter()
        outcome = run_on(
            server, make_trace(*(chain(f"s{n}", 10 * n) for n in range(30))), Pace(concurrency=3), request_timeout_s=0.2
        )
    assert time.perf_counter() - began_s < 20
    assert served(outcome) == 2
    assert "no end within 0.2 s (--request-timeout-s)" in str(outcome.record.stopped)


def test_a_server_that_dies_takes_the_results_along() -> None:
    with ScriptedServer(lambda n: "die" if n == 7 else "ok") as server:
        began_s = time.perf_counter()
        outcome = run_on(server, make_trace(*(chain(f"s{n}", 10 * n) for n in range(30))), Pace(concurrency=2))
    assert time.perf_counter() - began_s < 20
    assert 6 <= served(outcome) <= 7
    stopped = str(outcome.record.stopped)
    assert "does not answer any more" in stopped or "requests in a row failed" in stopped
    assert len(server.calls) <= 9


def test_a_death_in_the_last_requests_is_seen() -> None:
    """Too few are left for failures in a row: the server itself is asked."""
    with ScriptedServer(lambda n: "die" if n == 2 else "ok") as server:
        outcome = run_on(server, make_trace(chain("s", 0)))
    assert served(outcome) == 2
    assert "does not answer any more" in str(outcome.record.stopped)


def test_the_time_limit_ends_the_run() -> None:
    """What has been measured is kept, what was running is not counted as an error, and sessions are ended."""
    # The sixth request has no end, so that one is running when the limit comes, and not just between two.
    with ScriptedServer(lambda number: "ok" if number < 5 else "hang", latency_s=0.05) as server:
        outcome = run_on(server, make_trace(chain("s", 0, length=60)), Pace(time_limit_s=0.8))
    record = outcome.record
    assert "the time limit of 0.8 s was reached (--time-limit-s)" in str(record.stopped)
    assert 1 <= served(outcome) < 20 and record.num_errors == 0
    assert record.requests[-1].ended_s is None
    assert summarize(record, outcome.counts, 1)["requests_unfinished"] == 1
    assert record.sessions[0].latency_s is None
    assert kinds_of(server, "s") == ["session_end"]


def test_the_time_limit_did_not_cover_the_start() -> None:
    """A server that takes a connection and says nothing used to hold the run up for as long as our questions may take."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = ScriptedServer(url=f"http://127.0.0.1:{silent.getsockname()[1]}")
        began_s = time.monotonic()
        with pytest.raises(ServerError, match=r"did not answer within 0.3 s \(--time-limit-s\)"):
            run_on(server, make_trace(chain("s", 0)), Pace(time_limit_s=0.3))
        assert time.monotonic() - began_s < 10


def test_generated_tokens_are_recorded_where_they_are_asked_for() -> None:
    """And not asked for otherwise: a server that does not know the field may refuse it."""
    with ScriptedServer() as server:
        plain = run_on(server, make_trace(chain("s", 0)))
        kept = run_on(server, make_trace(chain("s", 0)), keeps_token_ids=True)
        assert ["return_token_ids" in call.body for call in server.calls] == [False] * 3 + [True] * 3
    assert [request.token_ids for request in plain.record.requests] == [[]] * 3
    assert [request.token_ids for request in kept.record.requests] == [[0, 1, 2]] * 3


def test_a_server_that_is_not_there() -> None:
    with ScriptedServer() as server:
        pass
    with pytest.raises(ServerError, match="does not answer: ConnectError"):
        run_on(server, make_trace(chain("s", 0)))


def test_a_model_that_is_not_served() -> None:
    with ScriptedServer() as server, pytest.raises(ServerError, match="does not serve 'other'; it serves model"):
        run_on(server, make_trace(chain("s", 0)), model="other")


def test_sigterm_killed_the_caller_after_a_run() -> None:
    """A run takes SIGTERM for itself, and left the default behind: whoever started servers could not stop them any more."""

    def handler(*_: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with ScriptedServer() as server:
            run_on(server, make_trace(chain("s", 0)))
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_line_separators_in_a_text_broke_its_event() -> None:
    """U+2028 and U+0085 may stand in JSON as they are, and end no line of a stream."""
    with ScriptedServer(event=lambda data: data.replace('"x"', '"\u2028\x85\x0b"'.replace("\x0b", "\\u000b"))) as server:
        record = run_on(server, make_trace(chain("one", 0))).record
    assert [request.error for request in record.requests] == [None] * 3


def test_each_request_paid_for_a_connection() -> None:
    with ScriptedServer() as server:
        record = run_on(server, make_trace(chain("one", 0, length=8)), boundaries="off").record
    assert len(record.requests) == 8 and record.num_errors == 0
    assert server.connections <= 4


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"cached_tokens": 0', '"cached_tokens": -50', "-50 of 6 tokens of prompt were cached"),
        ('"cached_tokens": 0', '"cached_tokens": 500', "500 of 6 tokens of prompt were cached"),
        ('"prompt_tokens": 6', '"prompt_tokens": 7', "counts 7 tokens of prompt, where 6 were sent"),
        ('"completion_tokens": 3', '"completion_tokens": 1e999', "cannot be read: OverflowError"),
        ('{"choices": [{"text": "x"}]}', "[" * 20_000, "cannot be read: RecursionError"),
        ('"usage"', '"used"', "does not say how many it has"),
        ('{"choices": [{"text": "x"}]}', '{"error": "out of words"}', "out of words"),
    ],
)
def test_answers_that_cannot_be_were_taken_or_broke_the_run(old: str, new: str, told: str) -> None:
    with ScriptedServer(event=lambda data: data.replace(old, new)) as server:
        record = run_on(server, make_trace(chain("one", 0, length=1))).record
    [request] = record.requests
    assert request.error is not None and told in request.error


def test_an_error_of_null_is_none() -> None:
    with ScriptedServer(event=lambda data: data.replace('{"choices"', '{"error": null, "choices"')) as server:
        assert run_on(server, make_trace(chain("one", 0))).record.num_errors == 0


def test_a_model_without_a_name_was_a_traceback() -> None:
    with ScriptedServer(model_ids=(5,)) as server, pytest.raises(ServerError, match="no OpenAI-compatible server"):
        run_on(server, make_trace(chain("one", 0)), model="q")


@pytest.mark.parametrize("variable", ["OPENAI_API_KEY", "VLLM_LIFETIME_TOKEN"])
def test_a_key_with_a_newline_was_printed(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be stripped is; else it is refused without its value."""
    monkeypatch.setenv(variable, "sk-secret\n")
    with ScriptedServer() as server:
        assert run_on(server, make_trace(chain("one", 0))).record.num_errors == 0
        monkeypatch.setenv(variable, "sk-\u6728-secret")
        with pytest.raises(ValueError, match=variable) as refused:
            run_on(server, make_trace(chain("one", 0)))
    assert "secret" not in str(refused.value)


def test_a_session_with_a_space_at_its_end_could_not_be_sent() -> None:
    with ScriptedServer() as server:
        assert run_on(server, make_trace(chain("one ", 0))).record.num_errors == 0
    assert server.calls[0].session_id is None and server.calls[0].body["session_id"] == "one "
