# SPDX-License-Identifier: Apache-2.0
"""Figures, counters and the line that is shown meanwhile."""

import io

import pytest
from rich.console import Console

from vllm_lifetime.bench.counters import counts_between, parse_counters
from vllm_lifetime.bench.plots import rolling_hit_rate
from vllm_lifetime.bench.progress import RunProgress
from vllm_lifetime.bench.records import RequestRecord, RunRecord, SessionRecord
from vllm_lifetime.bench.report import LATE_S, find_problems, hits_by_source, latencies, summarize


def answered(index: int, prompt: int, cached: int | None, sent_s: float, chunk_s: list[float]) -> RequestRecord:
    return RequestRecord("s", index, "agent", prompt, sent_s, sent_s, chunk_s, chunk_s[-1], len(chunk_s), cached)


def recorded(*requests: RequestRecord) -> RunRecord:
    record = RunRecord(list(requests), wall_s=10.0)
    for request in requests:
        record.end_request(request)
    return record


def counters(queries: int, hits: int, tiers: dict[str, int], engine: int = 0) -> str:
    lines = [
        "# TYPE vllm:prefix_cache_queries counter",
        f'vllm:prefix_cache_queries_total{{engine="{engine}"}} {queries}',
        "# TYPE vllm:prefix_cache_hits counter",
        f'vllm:prefix_cache_hits_total{{engine="{engine}"}} {hits}',
        "# TYPE vllm:lifetime_hit_tokens counter",
        *(f'vllm:lifetime_hit_tokens_total{{engine="{engine}",tier="{tier}"}} {value}' for tier, value in tiers.items()),
    ]
    return "\n".join(lines) + "\n"


def test_counters_of_all_engines_add_up_and_new_ones_begin_at_zero() -> None:
    before = parse_counters(counters(100, 10, {"hbm": 10}) + counters(50, 0, {}, engine=1))
    after = parse_counters(counters(300, 110, {"flash": 2, "hbm": 80, "host": 30}) + counters(150, 20, {"hbm": 20}, engine=1))
    assert before is not None and after is not None
    counts = counts_between(before, after)
    assert (counts.prefix_queries_tokens, counts.prefix_hit_tokens) == (300, 120)
    assert counts.hit_tokens_by_tier == {"flash": 2, "hbm": 90, "host": 30}
    assert list((hits_by_source(counts) or {}).items()) == [("hbm", 90), ("host", 30), ("flash", 2)]
    assert counts.hit_rate == pytest.approx(120 / 300)
    assert counts.lifetime == {
        f"vllm:lifetime_hit_tokens_total{{tier={tier}}}": n for tier, n in counts.hit_tokens_by_tier.items()
    }
    assert counts.flash_bytes_written == 0 and counts.preemptions is None


def test_flash_that_was_not_written_to_was_not_known() -> None:
    """The connector's counter of bytes has no sample before the first; a server without it has none of our counters."""
    stock = parse_counters(counters(100, 10, {}))
    assert stock is not None and counts_between(stock, stock).flash_bytes_written is None
    ours = parse_counters(counters(100, 10, {"hbm": 10}))
    assert ours is not None and counts_between(ours, ours).flash_bytes_written == 0


@pytest.mark.parametrize("text", ["", "<html>nothing here</html>", "# TYPE other counter\nother_total 3\n"])
def test_a_page_that_has_no_counters(text: str) -> None:
    assert parse_counters(text) is None


def test_counters_that_went_back_were_figures() -> None:
    before, after = parse_counters(counters(300, 100, {"hbm": 100})), parse_counters(counters(20, 0, {"hbm": 0}))
    assert before is not None and after is not None
    counts = counts_between(before, after)
    record = recorded(answered(0, 20, 0, 1.0, [1.5]))
    assert counts.went_back and summarize(record, counts, 1)["hit_tokens_by_source"] is None
    assert ["went back" in problem for problem in find_problems(record, counts)] == [True]


def test_numbers_that_are_none_are_no_counters() -> None:
    text = "# TYPE vllm:a counter\nvllm:a_total NaN\n# TYPE vllm:b counter\nvllm:b_total +Inf\n"
    assert parse_counters(text) is None
    assert parse_counters(text + counters(10, 0, {})) == parse_counters(counters(10, 0, {}))


def test_latencies_by_hand() -> None:
    record = recorded(answered(0, 10, 0, 1.0, [1.5, 1.6, 1.8]), answered(1, 10, 5, 2.0, [2.1]))
    record.requests.append(RequestRecord("s", 2, "agent", 10, 3.0, 3.0, [3.2, 3.3], 3.5, error="500"))
    record.requests.append(RequestRecord("s", 3, "agent", 10, 3.0, 3.0, [3.2]))
    record.sessions = [SessionRecord("s", 1.0, 2.5), SessionRecord("t", 1.0, 9.0, has_failed=True), SessionRecord("u", 1.0)]
    measured = latencies(record)
    assert measured["ttft_s"] == pytest.approx([0.5, 0.1])
    assert measured["tpot_s"] == pytest.approx([0.15])
    assert measured["itl_s"] == pytest.approx([0.1, 0.2])
    assert measured["workflow_latency_s"] == pytest.approx([1.5])
    summary = summarize(record, None, 5)
    assert (summary["sessions"], summary["sessions_served"], summary["sessions_failed"]) == (5, 1, 1)
    assert (summary["requests_sent"], summary["requests_served"], summary["requests_unfinished"]) == (4, 2, 1)
    assert summary["hit_rate"] == 0.25 and summary["output_tokens_per_s"] == pytest.approx(0.4)


def test_a_client_that_is_late_says_so() -> None:
    record = recorded(answered(0, 10, 0, 1.0, [1.5]))
    assert not [problem for problem in find_problems(record, None) if "late" in problem]
    record.requests[0].sent_s += 2 * LATE_S
    assert [problem for problem in find_problems(record, None) if "The client was late" in problem]


def test_a_moment_s_lateness_in_a_long_run_made_it_doubtful() -> None:
    """One request of fifty by 0.2 s, of the 50 s that all of them took together."""
    record = recorded(*(answered(n, 10, 0, 1.0 + n, [2.0 + n]) for n in range(50)))
    record.requests[7].due_s -= 2 * LATE_S
    assert not [problem for problem in find_problems(record, None) if "late" in problem]
    for request in record.requests:
        request.due_s -= LATE_S
    assert [problem for problem in find_problems(record, None) if "10.4% of the time" in problem]


def test_the_hit_rate_over_time_is_of_the_last_requests_that_ended() -> None:
    requests = [answered(n, 10, 10 if n >= 3 else 0, n, [n + 0.5]) for n in range(6)]
    at_s, rates = rolling_hit_rate(recorded(*reversed(requests)), window=2)
    assert at_s == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]
    assert rates == pytest.approx([0, 0, 0, 0.5, 1, 1])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_shown_where_a_terminal_is(is_terminal: bool) -> None:
    shown = io.StringIO()
    record = recorded(answered(0, 10, 5, 1.0, [1.5]))
    record.num_sessions_ended, record.num_errors = 3, 2
    with RunProgress(Console(file=shown, force_terminal=is_terminal, width=120), 7) as progress:
        progress.update(record)
    text = shown.getvalue()
    assert ("1/7" in text and "50.0%" in text and "sessions 3" in text and "errors 2" in text) is is_terminal
    assert bool(text) is is_terminal
