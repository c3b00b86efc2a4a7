# SPDX-License-Identifier: Apache-2.0
"""The demo's report: its schema, its ratios and its verdict on tokens."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.report import (
    RequestRecord,
    RunRecord,
    build_report,
    counters_since,
    differing_requests,
    first_difference,
    flash_bytes_written,
    percentile,
    plot,
    rolling_hit_rate,
    table,
    usage_disagrees,
)
from benchmarks.server import parse_metrics

RUN_KEYS = {
    "name", "hit_rate", "ttft_mean_s", "ttft_p99_s", "workflow_latency_mean_s",
    "workflow_latency_p99_s", "prompt_tokens", "cached_tokens", "flash_bytes_written",
}  # fmt: skip


def request(index: int, cached: int, ttft_s: float = 0.5, tokens: tuple[int, ...] = (1, 2)) -> RequestRecord:
    return RequestRecord("wf", index, "coder", 100, cached, ttft_s, float(index), tokens)


def run(name: str, cached: int, ttft_s: float, latency_s: float) -> RunRecord:
    engine = {"vllm:prompt_tokens_total": 200.0, "vllm:prompt_tokens_cached_total": 2.0 * cached}
    requests = [request(i, cached, ttft_s) for i in range(2)]
    return RunRecord(name, requests, [latency_s, latency_s], wall_s=10.0, engine=engine)


def test_schema_and_ratios() -> None:
    report = build_report({"seed": 0}, [run("vllm", 30, 0.6, 9.0), run("lifetime", 60, 0.2, 6.0)], {"extra": 1})
    assert {"workload", "runs", "tokens_identical", "ratios"} <= report.keys()
    assert [set(r) for r in report["runs"]] == [RUN_KEYS, RUN_KEYS]
    assert [r["name"] for r in report["runs"]] == ["vllm", "lifetime"]
    assert report["runs"][1]["hit_rate"] == 0.6
    assert report["runs"][1]["prompt_tokens"] == 200
    assert report["tokens_identical"] is True
    assert report["ratios"] == {"hit_rate": 2.0, "ttft": 3.0, "workflow_latency": 1.5}
    assert report["extra"] == 1
    json.dumps(report, allow_nan=False)


def test_one_run_has_nothing_to_compare() -> None:
    report = build_report({}, [run("vllm", 30, 0.6, 9.0)], {})
    assert report["tokens_identical"] is None
    assert report["ratios"] is None


def test_no_hits_at_all_gives_no_ratio() -> None:
    report = build_report({}, [run("vllm", 0, 0.6, 9.0), run("lifetime", 60, 0.2, 6.0)], {})
    assert report["ratios"]["hit_rate"] is None


def test_first_difference_names_the_request() -> None:
    a = RunRecord("vllm", [request(0, 0), request(1, 0), request(2, 0)])
    b = RunRecord("lifetime", [request(0, 0), request(1, 0, tokens=(1, 3)), request(2, 0, tokens=(9, 9))])
    assert first_difference(a, a) is None
    difference = first_difference(a, b)
    assert difference is not None
    assert (difference["index"], difference["vllm"], difference["lifetime"]) == (1, [1, 2], [1, 3])
    assert differing_requests(a, b) == 2


def test_a_difference_of_the_run_in_between_is_not_seen() -> None:
    """Tokens are identical only if they are in all runs; `lifetime` is compared with each of the others."""
    runs = [run("vllm", 20, 0.6, 9.0), run("lifecycle", 40, 0.3, 8.0), run("lifetime", 60, 0.2, 6.0)]
    report = build_report({}, runs, {})
    assert report["tokens_identical"] is True
    assert report["ratios"]["hit_rate"] == 3.0
    assert report["ratios_over_lifecycle"] == {"hit_rate": 1.5, "ttft": 1.5, "workflow_latency": 1.3333}
    runs[1].requests[1] = request(1, 40, tokens=(7,))
    report = build_report({}, runs, {})
    assert report["tokens_identical"] is False and report["differing_requests"] == 1


def test_a_missing_request_is_a_difference() -> None:
    a = RunRecord("vllm", [request(0, 0), request(1, 0)])
    b = RunRecord("lifetime", [request(0, 0)])
    assert first_difference(a, b) is not None
    assert first_difference(b, a) is not None
    assert differing_requests(a, b) == 1


def test_usage_is_checked_against_the_engine() -> None:
    good = run("vllm", 30, 0.6, 9.0)
    assert usage_disagrees(good) is None
    good.engine["vllm:prompt_tokens_cached_total"] = 59.0
    assert "usage 60, engine 59" in (usage_disagrees(good) or "")


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (50, 50), (100, 99), (200, 198)])
def test_percentile_is_nearest_rank(count: int, expected: float) -> None:
    assert percentile(list(range(count, 0, -1)), 0.99) == expected


def test_rolling_hit_rate_weighs_by_tokens_and_time() -> None:
    record = RunRecord("vllm", [request(1, 100), request(0, 0), request(2, 50)])
    assert rolling_hit_rate(record, window=2) == ([0.0, 1.0, 2.0], [0.0, 0.5, 0.75])


METRICS = """\
# HELP vllm:prefix_cache_hits Hits.
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="model"} 64.0
vllm:prefix_cache_hits_total{engine="1",model_name="model"} 32.0
vllm:prefix_cache_hits_created{engine="0",model_name="model"} 1.7e+09
# HELP vllm:lifetime_bytes_written Bytes.
# TYPE vllm:lifetime_bytes_written counter
vllm:lifetime_bytes_written_total{engine="0",tier="flash"} 4096.0
vllm:lifetime_bytes_written_total{engine="0",tier="host"} 9999.0
vllm:lifetime_bytes_written_created{engine="0",tier="flash"} 1.7e+09
"""


def test_metrics_are_parsed_summed_and_subtracted() -> None:
    metrics = parse_metrics(METRICS)
    key = ("vllm:prefix_cache_hits_total", (("engine", "1"), ("model_name", "model")))
    assert metrics[key] == 32.0
    assert counters_since({}, metrics)["vllm:prefix_cache_hits_total"] == 96.0
    assert counters_since({}, metrics)["vllm:lifetime_bytes_written_total{tier=flash}"] == 4096.0
    assert set(counters_since(metrics, metrics).values()) == {0.0}


def test_only_flash_bytes_are_counted() -> None:
    assert flash_bytes_written(parse_metrics(METRICS)) == 4096
    named = 'vllm:lifetime_flash_bytes_written_total{engine="0"} 7.0\n'
    assert flash_bytes_written(parse_metrics(named)) == 7
    assert flash_bytes_written({}) == 0


@pytest.mark.parametrize("names", [["vllm"], ["vllm", "lifetime"], ["vllm", "lifecycle", "lifetime"]])
def test_table_and_plot(names: list[str], tmp_path: Path) -> None:
    runs = [run(name, 30 * (i + 1), 0.6 / (i + 1), 9.0) for i, name in enumerate(names)]
    report = build_report({}, runs, {})
    console = Console(record=True, width=120)
    console.print(table(report))
    text = console.export_text()
    assert "30.0%" in text
    assert ("2.00x" in text) == (len(names) == 2)
    assert ("3.00x" in text and "1.50x" in text) == (len(names) == 3)
    plot(report, runs, tmp_path / "plots" / "demo.png")
    assert (tmp_path / "plots" / "demo.png").read_bytes().startswith(b"\x89PNG")
