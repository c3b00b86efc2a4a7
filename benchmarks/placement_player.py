# SPDX-License-Identifier: Apache-2.0
"""Plays the sessions of `benchmarks.placement_workload` on a server, round by round, as a harness would."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from benchmarks.placement_workload import Contexts, Request, Workload
from benchmarks.server import Metrics, ServerError, metric_sum, parse_metrics
from vllm_lifetime.harness.client import request_fields

__all__ = ["Answers", "Player"]

STATS_TIMEOUT_S = 15.0

Answers = dict[tuple[str, int], tuple[int, ...]]
"""Generated tokens by agent and the number of its request."""


class Player:
    """Plays workloads on one server, as a harness would. Raises ServerError and httpx.HTTPError."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self._num_sent = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0

    async def play(self, workload: Workload, on_round: Callable[[], None]) -> Answers:
        """Every round of a workload; returns what was generated."""
        contexts = Contexts()
        answers: Answers = {}
        for one in workload.rounds:
            if one.events:
                await self._post(one.events)
            prompts = [contexts.prompt(request) for request in one.requests]
            sent = [
                self._complete(prompt, workload.config.output_tokens, request)
                for request, prompt in zip(one.requests, prompts, strict=True)
            ]
            for request, prompt, answer in zip(one.requests, prompts, await asyncio.gather(*sent), strict=True):
                contexts.record(request, prompt, answer)
                answers[request.agent.agent_id, request.index] = answer
            on_round()
        return answers

    async def check_tiers(self, capacities: dict[str, int]) -> None:
        """Raise ServerError unless the server's tiers have so many blocks."""
        response = await self._http.get("/lifetime/v1/tiers")
        response.raise_for_status()
        found = {name: response.json()["tiers"][name]["capacity_blocks"] for name in capacities}
        if found != capacities:
            raise ServerError(f"the server's tiers have {found} blocks, not {capacities}")

    async def _post(self, events: Sequence[dict[str, Any]]) -> None:
        response = await self._http.post("/lifetime/v1/boundaries", json=list(events))
        if response.status_code != 202:
            raise ServerError(f"POST /lifetime/v1/boundaries: {response.status_code} {response.text}")
        for outcome in response.json()["outcomes"]:
            if outcome["status"] != "accepted":
                raise ServerError(f"a boundary was not accepted: {outcome}")

    async def _complete(self, prompt: list[int], max_tokens: int, request: Request | None) -> tuple[int, ...]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers: dict[str, str] = {}
        if request is not None:
            agent = request.agent
            fields = request_fields(
                session_id=agent.session_id,
                agent=agent.role,
                agent_id=agent.agent_id,
                parent_agent_id=agent.parent_id,
                turn=request.turn,
            )
            body |= fields["extra_body"]
            headers = fields["extra_headers"]
        response = await self._http.post("/v1/completions", json=body, headers=headers)
        if response.status_code != 200:
            raise ServerError(f"POST /v1/completions: {response.status_code} {response.text[:500]}")
        answer = response.json()
        tokens = tuple(answer["choices"][0]["token_ids"])
        if len(tokens) != max_tokens:
            raise ServerError(f"asked for {max_tokens} tokens, got {len(tokens)}")
        self._num_sent += 1
        self.prompt_tokens += len(prompt)
        self.cached_tokens += (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return tokens

    async def settled_metrics(self) -> Metrics:
        """The metrics, when they count all that was sent: they arrive with the engine's next step, of one more request."""
        await self._complete([1], 1, None)
        deadline = time.monotonic() + STATS_TIMEOUT_S
        while time.monotonic() < deadline:
            response = await self._http.get("/metrics")
            response.raise_for_status()
            metrics = parse_metrics(response.text)
            if metric_sum(metrics, "vllm:lifetime_requests_total") >= self._num_sent:
                return metrics
            await asyncio.sleep(0.05)
        raise ServerError(f"after {STATS_TIMEOUT_S:g} s the server's metrics do not count the {self._num_sent} requests sent")
