# SPDX-License-Identifier: Apache-2.0
"""Playing sessions on a made-up server."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from benchmarks.placement_player import Answers, Player
from benchmarks.placement_workload import Workload, WorkloadConfig, generate
from benchmarks.server import ServerError


@pytest.fixture(scope="module")
def workload() -> Workload:
    return generate(WorkloadConfig(sessions=2, concurrency=2, turns=2))


class Server:
    """Answers with the prompt's checksum; `outcome` and `num_tokens` can be wrong."""

    def __init__(self, outcome: str = "accepted", num_tokens: int | None = None) -> None:
        self.outcome = outcome
        self.num_tokens = num_tokens
        self.calls: list[tuple[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            num = sum(path == "/v1/completions" for path, _ in self.calls)
            return httpx.Response(200, text=f"# TYPE vllm:lifetime_requests counter\nvllm:lifetime_requests_total {num}\n")
        if request.url.path == "/lifetime/v1/tiers":
            tiers = {"hbm": {"capacity_blocks": 3}, "flash": {"capacity_blocks": 9}}
            return httpx.Response(200, json={"tiers": tiers})
        body = json.loads(request.content)
        self.calls.append((request.url.path, body))
        if request.url.path == "/lifetime/v1/boundaries":
            outcomes = [{"message_id": event["message_id"], "status": self.outcome} for event in body]
            return httpx.Response(202, json={"outcomes": outcomes})
        count = body["max_tokens"] if self.num_tokens is None else self.num_tokens
        usage = {"prompt_tokens_details": {"cached_tokens": 1}}
        return httpx.Response(200, json={"choices": [{"token_ids": [sum(body["prompt"]) % 997] * count}], "usage": usage})


def play(server: Server, then: Callable[[Player], Any]) -> Any:
    async def run() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(server), base_url="http://server") as http:
            return await then(Player(http, "model"))

    return asyncio.run(run())


def test_rounds_in_order_boundaries_before_requests(workload: Workload) -> None:
    server = Server()
    rounds = Counter[str]()
    answers: Answers = play(server, lambda player: player.play(workload, lambda: rounds.update(["round"])))
    assert rounds["round"] == len(workload.rounds)
    assert len(answers) == workload.num_requests
    calls = iter(server.calls)
    for one in workload.rounds:
        if one.events:
            assert next(calls) == ("/lifetime/v1/boundaries", json.loads(json.dumps(one.events)))
        sent = [body["kv_transfer_params"]["lifetime"] for _, body in [next(calls) for _ in one.requests]]
        assert Counter(metadata["agent_id"] for metadata in sent) == Counter(r.agent.agent_id for r in one.requests)
    assert next(calls, None) is None


def test_prompts_hold_what_was_answered(workload: Workload) -> None:
    server = Server()
    answers: Answers = play(server, lambda player: player.play(workload, lambda: None))
    worker = workload.workers[0].agent.agent_id
    bodies = [body for path, body in server.calls if path == "/v1/completions"]
    first, second, *_ = [b["prompt"] for b in bodies if b["kv_transfer_params"]["lifetime"]["agent_id"] == worker]
    known = [*first, *answers[worker, 0]]
    assert second[: len(known)] == known
    assert len(second) > len(known)


@pytest.mark.parametrize(
    ("server", "message"), [(Server(outcome="ignored"), "not accepted"), (Server(num_tokens=1), "asked for 4 tokens, got 1")]
)
def test_what_the_server_does_wrong_ends_it(server: Server, message: str, workload: Workload) -> None:
    with pytest.raises(ServerError, match=message):
        play(server, lambda player: player.play(workload, lambda: None))


def test_metrics_are_read_when_they_count_all_requests(workload: Workload) -> None:
    server = Server()

    async def then(player: Player) -> tuple[float, int]:
        await player.play(workload, lambda: None)
        metrics = await player.settled_metrics()
        return metrics["vllm:lifetime_requests_total", ()], player.cached_tokens

    # One request more brings the metrics up to date.
    assert play(server, then) == (workload.num_requests + 1, workload.num_requests + 1)


def test_tiers_of_another_size_are_refused() -> None:
    play(Server(), lambda player: player.check_tiers({"hbm": 3, "flash": 9}))
    with pytest.raises(ServerError, match=r"'flash': 9.*'flash': 8"):
        play(Server(), lambda player: player.check_tiers({"hbm": 3, "flash": 8}))
