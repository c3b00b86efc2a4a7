# SPDX-License-Identifier: Apache-2.0
"""The scorer on a real server: what is prefetched is a local hit with stock's tokens, and a bad predictor file is a warning."""

import time
from pathlib import Path
from typing import Any

import pytest
from e2e_client import Api, Delta
from e2e_servers import SCORED, Servers, Stock
from e2e_workload import BLOCK_TOKENS, RELOAD, filler

from benchmarks.server import metric_sum

PROMPT = RELOAD[0]


@pytest.fixture(scope="module")
def server(servers: Servers) -> tuple[Api, Path]:
    """A server with a host tier whose predictor file is not there, and the file in which it keeps what it learns."""
    api = servers.get(SCORED)
    return api, api.server.log_path.parent / "state.json"


def push_out(api: Api, victim: str, session: str) -> None:
    """Fill HBM with sessions that then end: their blocks are retired, and what `victim` had lies below."""
    assert hint(api, f"{session} demotes", "kv.demote", session_id=victim)["status"] == "accepted"
    # Little by little: what is evicted at once was never near enough to its eviction to be copied down.
    for number in range(5):
        api.complete(filler(number, 10 * BLOCK_TOKENS), 1, session=f"{session} {number}")
        api.settle()
    assert sum(api.boundary("session_end", session_id=f"{session} {number}")["blocks"] for number in range(5)) > 0


def hint(api: Api, message_id: str, action_type: str, **target: Any) -> dict[str, Any]:
    """A hint of one action; its outcome."""
    action = {"action_id": "a", "action_type": action_type, "action_version": "1.0", "payload": target}
    envelope = {"protocol_version": "0.1", "message_id": message_id, "actions": [action]}
    response = api.http.post("/lifetime/v1/hints", json=envelope)
    assert response.status_code in (200, 202), response.text
    outcome: dict[str, Any] = response.json()["outcomes"][0]
    return outcome


def test_a_prefetched_prompt_is_loaded_or_computed(server: tuple[Api, Path], stock: dict[str, Stock]) -> None:
    """A session's blocks come up into retired space while the server is idle: vLLM's own hit, no load, stock's tokens."""
    api, _ = server
    assert api.ask(PROMPT, session="s").tokens == stock["float32"].cold[PROMPT.name].tokens
    api.settle()
    delta = Delta(api)
    push_out(api, "s", "other")
    # The forecast may have been faster: then there is nothing left to wish for.
    outcome = hint(api, "h1", "kv.prefetch", session_id="s")
    assert outcome["status"] == "accepted", outcome
    delta.await_growth("lifetime_prefetched_blocks_total", outcome="issued")
    api.settle()
    answer = api.ask(PROMPT, session="s")
    assert answer.tokens == stock["float32"].cold[PROMPT.name].tokens
    assert answer.cached_tokens == PROMPT.reusable_tokens
    delta.await_growth("lifetime_prefetched_blocks_total", outcome="used")
    assert delta("prefix_cache_hits_total") == PROMPT.reusable_tokens
    assert delta("external_prefix_cache_hits_total") == delta("lifetime_loads_total") == 0
    assert delta("lifetime_hit_tokens_total", tier="hbm") == PROMPT.reusable_tokens
    print({name: delta("lifetime_prefetched_blocks_total", outcome=name) for name in ("issued", "used", "wasted", "cancelled")})


def test_who_is_next_is_not_prefetched(server: tuple[Api, Path], stock: dict[str, Stock]) -> None:
    """Nobody asks: the agent that the forecast names is brought up into retired space."""
    api, _ = server
    api.reset()
    planner, writer = filler(50, 64), RELOAD[1]
    for i in range(4):
        for agent, tokens in (("planner", filler(60 + i, 64)), ("writer", filler(70 + i, 64))):
            api.complete(tokens, 1, session=f"w{i}", metadata={"agent": agent})
        api.boundary("session_end", session_id=f"w{i}")
    api.ask(writer, session="w", metadata={"agent": "writer"})
    api.settle()
    delta = Delta(api)
    push_out(api, "w", "other two")
    # The planner has planned: the writer is next.
    api.complete(planner, 1, session="w", metadata={"agent": "planner"})
    delta.await_growth("lifetime_prefetched_blocks_total", outcome="issued")
    api.settle()
    answer = api.ask(writer, session="w", metadata={"agent": "writer"})
    assert answer.tokens == stock["float32"].cold[writer.name].tokens
    assert answer.cached_tokens == writer.reusable_tokens
    assert delta.await_growth("lifetime_prefetched_blocks_total", outcome="used") >= 5
    assert delta("external_prefix_cache_hits_total") == 0


def test_a_missing_predictor_file_is_not_said_once(server: tuple[Api, Path]) -> None:
    """One warning that names the file; the online model serves, and the metrics say so."""
    api, state = server
    warnings = [line for line in api.server.log_path.read_text().splitlines() if "predictor_path" in line and "WARNING" in line]
    assert len(warnings) == 1 and "missing.npz" in warnings[0] and "learns while serving" in warnings[0]
    metrics = api.metrics()
    assert metric_sum(metrics, "vllm:lifetime_predictor_in_use", predictor="online") == 1
    assert metric_sum(metrics, "vllm:lifetime_predictor_in_use", predictor="trained") == 0
    made, judged, correct = (
        metric_sum(metrics, "vllm:lifetime_predictions_total", predictor="online", outcome=outcome)
        for outcome in ("made", "judged", "correct")
    )
    assert made > 0 and 0 < correct <= judged
    assert metric_sum(metrics, "vllm:lifetime_scorer_seconds_count", part="refresh") > 0
    print(f"online model: {correct:.0f} of {judged:.0f} right")
    # Written every ten seconds: vLLM kills its engine without waiting for it.
    deadline = time.monotonic() + 12
    while not state.exists() or "planner" not in state.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.2)
