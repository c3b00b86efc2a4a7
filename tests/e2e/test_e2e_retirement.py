# SPDX-License-Identifier: Apache-2.0
"""Boundaries retire dead context at once, and the server's own numbers say so."""

import time
from typing import Any

import pytest
from e2e_client import BLOCK_BYTES, Api, Delta
from e2e_workload import BLOCK_TOKENS, USABLE_BLOCKS, filler, random_tokens

from benchmarks.server import Metrics, metric_sum

TIERS = ("hbm", "host", "flash")
SHARED = random_tokens("shared system prompt", 4 * BLOCK_TOKENS)


def add_up(tiers: dict[str, dict[str, int]], state: str) -> int:
    """A count over all tiers."""
    return sum(tier[f"{state}_blocks"] for tier in tiers.values())


def gauge(metrics: Metrics, tier: str, state: str) -> float:
    """Blocks of a tier by state, as scraped."""
    return metric_sum(metrics, "vllm:lifetime_tier_blocks", tier=tier, state=state)


def serve_two_workflows(api: Api, session: str | None = None) -> None:
    """`one` and `two` share a system prompt of four blocks; each has private blocks, `one` five of them."""
    one, two = SHARED + random_tokens("one", 160), SHARED + random_tokens("two", 100)
    api.complete(one, 8, session=session or "session one", metadata={"workflow_id": "one", "agent": "planner"})
    api.complete(two, 8, session=session or "session two", metadata={"workflow_id": "two", "agent": "worker"})


def test_dead_context_keeps_its_space(tiers_server: Api) -> None:
    """workflow_end: private blocks are retired in the answer's own step; the shared prompt of a live workflow still hits."""
    api = tiers_server
    serve_two_workflows(api)
    before = api.settle()
    assert add_up(before, "retired") == 0
    outcome = api.boundary("workflow_end", workflow_id="one", session_id="session one")
    after = api.tiers()
    print(f"workflow_end: {outcome}; hbm {before['hbm']} -> {after['hbm']}")
    assert outcome["status"] == "accepted"
    assert outcome["bytes"] == outcome["blocks"] * BLOCK_BYTES["float32"]
    assert after["hbm"]["retired_blocks"] == 5
    assert outcome["blocks"] >= 5
    assert add_up(before, "used") - add_up(after, "used") == outcome["blocks"]
    assert add_up(after, "retired") == outcome["blocks"]
    again = api.complete(SHARED + random_tokens("more of two", 40), 2, session="session two", metadata={"workflow_id": "two"})
    assert again.cached_tokens == len(SHARED)


def test_session_end_forgets_a_workflow(tiers_server: Api) -> None:
    """session_end: all workflows of the session at once, the shared prompt too when nobody else reads it."""
    api = tiers_server
    serve_two_workflows(api, session="the session")
    before = api.settle()
    outcome = api.boundary("session_end", session_id="the session")
    after = api.tiers()
    assert outcome["status"] == "accepted"
    assert add_up(before, "used") == outcome["blocks"] > 0
    assert add_up(after, "used") == 0
    assert add_up(after, "retired") == outcome["blocks"]
    # Retired is still readable until somebody needs the space.
    assert api.complete(SHARED, 1, session="another").cached_tokens == len(SHARED) - BLOCK_TOKENS


def test_retired_blocks_appear_only_with_the_next_request(tiers_server: Api) -> None:
    """An idle engine reports at once: /metrics shows the retired blocks within two seconds, without another request."""
    api = tiers_server
    serve_two_workflows(api)
    api.settle()
    time.sleep(0.5)
    delta = Delta(api)
    outcome = api.boundary("workflow_end", workflow_id="one", session_id="session one")

    def shows_it(metrics: Metrics) -> bool:
        return sum(gauge(metrics, tier, "retired") for tier in TIERS) == outcome["blocks"]

    seconds = api.await_metric(shows_it, "retired blocks in the gauges", timeout_s=2.0)
    print(f"/metrics showed {outcome['blocks']} retired blocks after {seconds:.2f} s")
    assert delta("lifetime_retired_blocks_total") == outcome["blocks"]
    assert delta("lifetime_boundaries_total", kind="workflow_end", status="accepted") == 1


def test_a_retry_counts_twice(tiers_server: Api) -> None:
    """The same message id again is a duplicate and changes nothing, also after its workflow has come back to life."""
    api = tiers_server
    serve_two_workflows(api)
    event = {"message_id": "retried", "kind": "workflow_end", "workflow_id": "one"}
    first = api.post(event).json()["outcomes"][0]
    assert first["status"] == "accepted"
    serve_two_workflows(api)
    before = api.settle()
    second = api.post(event)
    assert second.status_code == 202
    assert second.json()["outcomes"][0] == {
        "message_id": "retried",
        "status": "duplicate",
        "reason": "already accepted",
        "blocks": 0,
        "bytes": 0,
    }
    assert api.tiers() == before


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"kind": "workflow_end", "workflow_id": "one"}, "message_id"),
        ({"message_id": "", "kind": "workflow_end", "workflow_id": "one"}, "message_id"),
        ({"message_id": "m", "workflow_id": "one"}, "kind"),
        ({"message_id": "m", "kind": "the_end", "workflow_id": "one"}, "kind"),
        ({"message_id": "m", "kind": "session_end", "workflow_id": "one"}, "session_id"),
        ({"message_id": "m", "kind": "workflow_end", "workflow_id": 1}, "workflow_id"),
        ({"message_id": "m", "kind": "workflow_end", "workflow_id": "one", "force": True}, "force"),
        ({"message_id": "m", "kind": "workflow_end", "workflow_id": "one", "expected_return_s": -1}, "expected_return_s"),
        (
            [{"message_id": "good", "kind": "workflow_end", "workflow_id": "one"}, {"message_id": "bad", "kind": "workflow_end"}],
            "session_id",
        ),
        ([], "body"),
        ("workflow_end", "body"),
    ],
)
def test_malformed_event_changes_something(tiers_server: Api, event: Any, field: str) -> None:
    """422 that names the field, also for a batch of which only one event is wrong; nothing is applied."""
    api = tiers_server
    serve_two_workflows(api)
    before = api.settle()
    answer = api.post(event)
    assert answer.status_code == 422, answer.text
    assert field in [part for error in answer.json()["detail"] for part in error["loc"]], answer.text
    assert api.tiers() == before
    assert api.boundary("workflow_end", workflow_id="one")["blocks"] > 0


def test_batch_is_answered_in_order(tiers_server: Api) -> None:
    """A list is answered one by one, and what is unknown is ignored with a reason."""
    api = tiers_server
    serve_two_workflows(api)
    api.settle()
    events = [
        {"message_id": "b1", "kind": "session_end", "session_id": "nobody"},
        {"message_id": "b2", "kind": "workflow_end", "workflow_id": "one"},
        {"message_id": "b3", "kind": "turn_end", "session_id": "session two"},
        {"message_id": "b2", "kind": "workflow_end", "workflow_id": "one"},
        {"message_id": "b4", "kind": "workflow_end", "workflow_id": "two"},
    ]
    answer = api.post(events)
    assert answer.status_code == 202
    outcomes = answer.json()["outcomes"]
    assert [(o["message_id"], o["status"]) for o in outcomes] == [
        ("b1", "ignored"),
        ("b2", "accepted"),
        ("b3", "accepted"),
        ("b2", "duplicate"),
        ("b4", "accepted"),
    ]
    assert "'nobody' holds nothing here" in outcomes[0]["reason"]
    assert add_up(api.tiers(), "used") == 0


def test_metrics_disagree_with_themselves(tiers_server: Api) -> None:
    """Every number that is promised is there, adds up, and equals what GET /lifetime/v1/tiers says."""
    api = tiers_server
    delta = Delta(api)
    # Retired blocks go first, the others travel down, are evicted there, and come back.
    api.complete(filler(100, 640), 1, session="short lived")
    api.settle()
    assert api.boundary("session_end", session_id="short lived")["status"] == "accepted"
    api.complete(filler(101), 1, session="long lived")
    api.settle()
    api.fill(8)
    assert api.complete(filler(101), 1, session="long lived").cached_tokens == 288
    tiers = api.settle()
    api.await_metric(lambda m: gauge(m, "hbm", "used") == tiers["hbm"]["used_blocks"], "the gauges have caught up")
    metrics = api.metrics()
    for tier, capacity in zip(TIERS, (USABLE_BLOCKS, 64, 200), strict=True):
        shown = {state: gauge(metrics, tier, state) for state in ("capacity", "used", "free", "retired")}
        print(tier, shown)
        assert shown == {state: tiers[tier][f"{state}_blocks"] for state in shown}
        assert shown["used"] + shown["free"] == shown["capacity"] >= capacity
        assert shown["retired"] <= shown["free"]
    block = BLOCK_BYTES["float32"]
    for tier in ("host", "flash"):
        assert delta("lifetime_bytes_written_total", tier=tier) >= block
        assert delta("lifetime_bytes_written_total", tier=tier) % block == 0
    loaded = delta("lifetime_hit_blocks_total", tier="host") + delta("lifetime_hit_blocks_total", tier="flash")
    read = delta("lifetime_bytes_read_total", tier="host") + delta("lifetime_bytes_read_total", tier="flash")
    assert loaded == 9 and read == 9 * block
    for tier in TIERS:
        assert delta("lifetime_hit_tokens_total", tier=tier) == BLOCK_TOKENS * delta("lifetime_hit_blocks_total", tier=tier)
    assert delta("lifetime_loads_total", outcome="done") == delta("lifetime_loads_total") == 1
    assert delta("lifetime_evictions_total", tier="hbm", reason="retired") >= 10
    assert delta("lifetime_evictions_total", tier="hbm", reason="demoted") > 0
    assert delta("lifetime_retired_blocks_total") >= 19
    assert delta("lifetime_eviction_to_reuse_seconds_count", outcome="reloaded") == 9
    assert delta("lifetime_eviction_to_reuse_seconds_bucket", outcome="reloaded", le="+Inf") == 9
    assert delta("lifetime_recomputed_blocks_total") == 0
    families = api.http.get("/metrics").text
    for name in ("recomputed_blocks_total", "flash_faults_total", "sessions", "segments", "class_blocks", "bad_metadata_total"):
        assert f"# TYPE vllm:lifetime_{name}" in families
