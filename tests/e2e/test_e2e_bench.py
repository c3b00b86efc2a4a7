# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime bench` on a real server: what the client measures is what the engine counted."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from e2e_client import Api
from e2e_workload import BLOCK_TOKENS, MAX_MODEL_LEN

from benchmarks.server import metric_sum
from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.plan import PlanError, make_plan
from vllm_lifetime.bench.report import find_problems, summarize
from vllm_lifetime.bench.run import Outcome, run_bench
from vllm_lifetime.traces.jsonl import write_jsonl
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

SHARED_BLOCKS = 3
TRACE_BLOCK_TOKENS = 64
TURNS = 4
SESSIONS = 4


def request(blocks: list[int], after: int, agent_id: str, **more: bool | str) -> TraceRequest:
    """Half a block more than whole ones; a pause of a hundredth of a second."""
    input_tokens = len(blocks) * TRACE_BLOCK_TOKENS + TRACE_BLOCK_TOKENS // 2
    return TraceRequest(np.array(blocks), after, 0.01, 1.0, input_tokens, 8, agent_id=agent_id, **more)  # type: ignore[arg-type]


def session(number: int) -> TraceSession:
    """A system prompt that all share, then an agent that grows by a block a turn; a sub-agent runs beside its second turn."""
    own = 1000 * (number + 1)
    requests = [
        request([*range(SHARED_BLOCKS), *range(own, own + turn + 1)], turn - 1, "main", ends_turn=turn == TURNS - 1)
        for turn in range(TURNS)
    ]
    requests.append(request([own + 500, own + 501], 0, "helper", parent_agent_id="main", ends_agent=True))
    return TraceSession(f"bench-{number}", tuple(requests))


TRACE = Trace("growing agents", TRACE_BLOCK_TOKENS, tuple(session(number) for number in range(SESSIONS)))


def run(api: Api, seed: int, concurrency: int) -> Outcome:
    """Replay the trace with the server's blocks."""
    plan = make_plan(TRACE, tokens_per_block=BLOCK_TOKENS, seed=seed)
    outcome, was_interrupted = run_bench(
        plan,
        api.server.base_url,
        Pace(concurrency),
        model=None,
        names_requests=True,
        boundaries="auto",
        request_timeout_s=60.0,
    )
    assert not was_interrupted
    return outcome


def test_the_client_and_the_engine_count_different_hits(tiers_server: Api) -> None:
    """Token by token: usage, vLLM's counters and ours. One session at a time, so that hits can be counted by hand."""
    outcome = run(tiers_server, seed=1, concurrency=1)
    record, counts = outcome.record, outcome.counts
    assert record.stopped is None and record.num_errors == 0
    assert counts is not None and counts.prefix_hit_tokens is not None
    assert find_problems(record, counts) == [] or "late" in find_problems(record, counts)[0]
    cached = {(r.session_id, r.index): r.cached_tokens for r in record.requests}
    for number in range(SESSIONS):
        # A request finds what the one before it has read; the first of a session what sessions share; a sub-agent nothing.
        whole = [SHARED_BLOCKS if number else 0, *(SHARED_BLOCKS + turn for turn in range(1, TURNS)), 0]
        assert [cached[f"bench-{number}", index] for index in range(TURNS + 1)] == [BLOCK_TOKENS * blocks for blocks in whole]
    assert counts.prefix_queries_tokens == counts.prompt_tokens == record.prompt_tokens
    assert counts.prefix_hit_tokens + (counts.external_hit_tokens or 0) == record.cached_tokens
    assert sum(counts.hit_tokens_by_tier.values()) == record.cached_tokens
    assert counts.hit_rate == pytest.approx(record.hit_rate)
    summary = summarize(record, counts, SESSIONS)
    print({key: summary[key] for key in ("hit_rate", "hit_tokens_by_source", "ttft_p50_s", "workflow_latency_p99_s")})
    assert summary["sessions_served"] == SESSIONS
    assert all(len(request.chunk_s) <= request.output_tokens == 4 for request in record.requests)


def test_boundaries_do_not_reach_the_engine(tiers_server: Api) -> None:
    """Each that was posted is accepted and counted by the engine; after the run nothing is kept as live."""
    outcome = run(tiers_server, seed=2, concurrency=3)
    assert outcome.boundaries_lost == 0
    assert outcome.counts is not None
    posted = {"subagent_spawn": SESSIONS, "subagent_return": SESSIONS, "turn_end": SESSIONS, "session_end": SESSIONS}
    summary = summarize(outcome.record, outcome.counts, SESSIONS)
    assert summary["boundaries"] == posted and outcome.boundaries_sent == sum(posted.values())
    counted = {
        kind: outcome.counts.lifetime.get(f"vllm:lifetime_boundaries_total{{kind={kind},status=accepted}}") for kind in posted
    }
    assert counted == posted
    assert sum(tier["used_blocks"] for tier in tiers_server.settle().values()) == 0


def test_a_prompt_that_the_server_would_refuse_is_sent(tiers_server: Api) -> None:
    with pytest.raises(PlanError, match=rf"the server takes {MAX_MODEL_LEN} together \(max_model_len\). Try --tokens-per-block "):
        plan = make_plan(TRACE, tokens_per_block=10 * BLOCK_TOKENS)
        run_bench(
            plan,
            tiers_server.server.base_url,
            Pace(1),
            model=None,
            names_requests=True,
            boundaries="off",
            request_timeout_s=60.0,
        )


def test_vllm_bench_serve_does_not_know_agent_traces(tiers_server: Api, tmp_path: Path) -> None:
    """`--dataset-name agent_trace`: all is served at the trace's lengths, hit as by hand, and the engine knows whose it was."""
    write_jsonl(TRACE, tmp_path / "trace.jsonl")
    server = tiers_server.server
    before = server.metrics()
    finished = subprocess.run(
        [
            *(Path(sys.executable).parent / "vllm", "bench", "serve", "--base-url", server.base_url, "--model", server.model),
            *("--served-model-name", server.served_name, "--temperature", "0", "--disable-tqdm", "--max-concurrency", "1"),
            *("--dataset-name", "agent_trace", "--dataset-path", tmp_path / "trace.jsonl"),
            *("--agent-trace-tokens-per-block", str(BLOCK_TOKENS), "--agent-trace-time-scale", "0", "--seed", "7"),
            *("--save-result", "--result-dir", tmp_path, "--result-filename", "result.json"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    num_requests = SESSIONS * (TURNS + 1)
    assert (result["completed"], result["failed"]) == (num_requests, 0), result
    plan = make_plan(TRACE, tokens_per_block=BLOCK_TOKENS, seed=7)
    planned = [request for session in plan.sessions for request in session.requests]
    assert result["total_input_tokens"] == sum(request.prompt_tokens for request in planned)
    assert result["total_output_tokens"] == sum(request.output_tokens for request in planned)
    after = server.metrics()
    hits = metric_sum(after, "vllm:prefix_cache_hits_total") - metric_sum(before, "vllm:prefix_cache_hits_total")
    found = BLOCK_TOKENS * (sum(SHARED_BLOCKS + turn for turn in range(1, TURNS)) * SESSIONS + SHARED_BLOCKS * (SESSIONS - 1))
    assert hits == found
    sessions = {each["session_id"] for each in tiers_server.http.get("/lifetime/v1/sessions").json()["sessions"]}
    assert {session.session_id for session in TRACE.sessions} <= sessions
