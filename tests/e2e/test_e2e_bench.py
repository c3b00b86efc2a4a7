# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime bench` on a real server: what the client measures is what the engine counted."""

import numpy as np
import pytest
from e2e_client import Api
from e2e_workload import BLOCK_TOKENS, MAX_MODEL_LEN

from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.plan import PlanError, make_plan
from vllm_lifetime.bench.report import find_problems, summarize
from vllm_lifetime.bench.run import Outcome, run_bench
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
