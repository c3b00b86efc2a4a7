# SPDX-License-Identifier: Apache-2.0
"""A session's turns and sub-agents on a real server: what a boundary frees, where it can be seen, and that no token changes."""

from collections.abc import Callable
from typing import Any

from e2e_client import BLOCK_BYTES, Api, Delta
from e2e_workload import BLOCK_TOKENS, GROWING, RELOAD, random_tokens

from benchmarks.server import metric_sum

TIERS = ("hbm", "host", "flash")


def session(api: Api, name: str) -> dict[str, Any]:
    """One session as the server shows it."""
    response = api.http.get(f"/lifetime/v1/sessions/{name}")
    assert response.status_code == 200, response.text
    return dict(response.json())


def segments(api: Api, name: str) -> dict[str, dict[str, Any]]:
    """A session's segments by class."""
    return {segment["class"]: segment for agent in session(api, name)["agents"] for segment in agent["segments"]}


def retired(tiers: dict[str, dict[str, int]]) -> dict[str, int]:
    """Retired blocks by tier."""
    return {tier: tiers[tier]["retired_blocks"] for tier in TIERS}


def assert_freed(api: Api, outcome: dict[str, Any], expected: dict[str, int], before: dict[str, dict[str, int]]) -> None:
    """The answer, `/tiers` at once and `/metrics` within two seconds agree on the blocks that a boundary has freed."""
    after = api.tiers()
    freed = {tier: retired(after)[tier] - retired(before)[tier] for tier in TIERS}
    print(f"{outcome}: freed {freed}")
    assert freed == expected
    assert outcome["status"] == "accepted"
    assert outcome["blocks"] == sum(expected.values()) > 0
    assert outcome["bytes"] == outcome["blocks"] * BLOCK_BYTES["float32"]
    for tier in TIERS:
        assert before[tier]["used_blocks"] - after[tier]["used_blocks"] == expected[tier]
        api.await_metric(
            lambda m, tier=tier: metric_sum(m, "vllm:lifetime_tier_blocks", tier=tier, state="retired") == retired(after)[tier],
            f"retired blocks of {tier} in the gauges",
            timeout_s=2.0,
        )


def test_turn_end_frees_nothing(tiers_server: Api, same_as_stock: Callable[..., None]) -> None:
    """The turn's answer goes, in every tier and within the answer's own step; the prompt stays and is read on."""
    api = tiers_server
    delta = Delta(api)
    for prompt in GROWING[:2]:
        same_as_stock(prompt, api.ask(prompt, session="the session", metadata={"agent": prompt.name, "turn": 1}))
    api.fill(3)
    before = api.settle()
    shown = segments(api, "the session")
    assert shown["reasoning_stripped"]["closes_at"] == "workflow_end" and shown["reasoning_laden"]["closes_at"] == "turn_end"
    held = session(api, "the session")["held"]
    expected = dict.fromkeys(TIERS, 0)
    for agent in session(api, "the session")["agents"]:
        for segment in agent["segments"]:
            if segment["class"] == "reasoning_laden":
                for tier in TIERS:
                    expected[tier] += segment["private_blocks"][tier]
    assert expected["host"] > 0, "nothing was pushed down"
    outcome = api.boundary("turn_end", session_id="the session", turn=1)
    assert_freed(api, outcome, expected, before)
    assert delta("lifetime_boundaries_total", kind="turn_end", status="accepted") == 1
    assert "reasoning_laden" not in segments(api, "the session")
    left = session(api, "the session")["held"]
    assert sum(held[t]["blocks"] - left[t]["blocks"] for t in TIERS) == outcome["blocks"]
    for prompt in GROWING[:2]:
        again = api.ask(prompt, session="the session", metadata={"agent": prompt.name, "turn": 2})
        same_as_stock(prompt, again)
        assert again.cached_tokens == prompt.reusable_tokens
    assert api.boundary("turn_end", session_id="the session", turn=1)["status"] == "ignored"


def test_subagent_return_frees_its_parent(tiers_server: Api, same_as_stock: Callable[..., None]) -> None:
    """R32: the worker's private blocks go in every tier; the lead's stay, and hit."""
    api = tiers_server
    lead, worker = RELOAD[0], RELOAD[2]
    spawn = {"instruction": "read the file", "tools": ["read"], "position": 0}
    same_as_stock(lead, api.ask(lead, session="the session", metadata={"agent": "lead", "agent_id": "lead"}))
    api.boundary(
        "subagent_spawn", session_id="the session", agent="coder", agent_id="w1", parent_agent_id="lead", spawn=spawn
    )
    same_as_stock(worker, api.ask(worker, session="the session", metadata={"agent": "coder", "agent_id": "w1"}))
    api.fill(1)
    before = api.settle()
    shown = segments(api, "the session")
    assert shown["lead"]["closes_at"] == "workflow_end" and shown["worker"]["closes_at"] == "subagent_return"
    outcome = api.boundary("subagent_return", session_id="the session", agent_id="w1")
    assert_freed(api, outcome, shown["worker"]["private_blocks"], before)
    assert set(segments(api, "the session")) == {"lead"}
    again = api.ask(lead, session="the session", metadata={"agent": "lead", "agent_id": "lead"})
    same_as_stock(lead, again)
    assert again.cached_tokens == lead.reusable_tokens
    same_as_stock(worker, api.ask(worker, session="the session", metadata={"agent": "coder", "agent_id": "w2"}))


def test_a_boundary_takes_blocks_from_a_running_request(tiers_server: Api, same_as_stock: Callable[..., None]) -> None:
    """Events about requests that run: they are answered at once, wait, and change no token."""
    api = tiers_server
    outcomes: list[dict[str, Any]] = []

    def end_everything() -> None:
        for kind in ("turn_end", "compaction", "workflow_end", "session_end") * 6:
            outcomes.append(api.boundary(kind, session_id="the session"))

    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread:
        ending = thread.submit(end_everything)
        answers = api.ask_together(GROWING, session="the session")
        ending.result()
    for prompt, answer in zip(GROWING, answers, strict=True):
        same_as_stock(prompt, answer)
    assert any(outcome["status"] == "accepted" for outcome in outcomes)
    print([outcome.get("reason") or outcome["status"] for outcome in outcomes])


def test_delete_ends_a_session_of_another(tiers_server: Api) -> None:
    """`DELETE /sessions/{id}` retires what only that session reads; any characters may be in an id."""
    api = tiers_server
    shared, name = random_tokens("system", 4 * BLOCK_TOKENS), "a/b c?ü"
    encoded = "a%2Fb%20c%3F%C3%BC"
    for session_id, own in (("one", "x"), (name, "y")):
        # A header holds Latin letters only; the body takes any.
        body = api.body(shared + random_tokens(own, 3 * BLOCK_TOKENS), 1, session_id=session_id)
        assert api.http.post("/v1/completions", json=body).status_code == 200
    before = api.settle()
    listed = api.http.get("/lifetime/v1/sessions").json()
    assert {item["session_id"] for item in listed["sessions"]} >= {"one", name}
    response = api.http.delete(f"/lifetime/v1/sessions/{encoded}")
    assert response.status_code == 200, response.text
    assert sum(retired(api.tiers()).values()) - sum(retired(before).values()) >= 3
    assert session(api, encoded)["state"] == "ended"
    assert session(api, "one")["held"]["hbm"]["blocks"] == 7
    assert api.http.get("/lifetime/v1/sessions/never").status_code == 404
