# SPDX-License-Identifier: Apache-2.0
"""Servers as the end-to-end tests start them, and a client that asks them."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
from e2e_workload import BLOCK_TOKENS, CHAT, CHAT_TOKENS, MAX_MODEL_LEN, POOL_BLOCKS, Prompt, filler

from benchmarks.server import Metrics, VllmServer, metric_sum, serve_arguments

BLOCK_BYTES = {"float32": 1 << 17, "bfloat16": 1 << 16}
"""Bytes of one KV block of the test model."""

SERVER_ENV = {
    # The CPU backend reserves one more core when it sees any connector; bf16 rounding depends on the number of threads.
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
}
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """What a completion returned."""

    tokens: tuple[int, ...]
    cached_tokens: int


def server_args(dtype: str, *more: str) -> list[str]:
    """Options of `vllm serve`: the same for stock vLLM and for ours."""
    shared = serve_arguments(
        dtype=dtype,
        block_size=BLOCK_TOKENS,
        blocks=POOL_BLOCKS,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=MAX_MODEL_LEN,
    )
    return [*shared, *more]


def tier_options(dtype: str, flash_path: Path | None, host_blocks: int, flash_blocks: int, **more: Any) -> dict[str, Any]:
    """Options of the connector for so many host and flash blocks.

    Whatever is found below is loaded, and nothing comes up before it is asked for: tests count which tier has what.
    """
    block = BLOCK_BYTES[dtype]
    options: dict[str, Any] = {"load_policy": "always", "prefetch": "off", **more}
    if host_blocks:
        options["host_bytes"] = host_blocks * block
    if flash_blocks:
        # Ten pages for the header, the epoch and the table of records.
        options |= {"flash_path": str(flash_path), "flash_bytes": flash_blocks * block + 10 * 4096}
        options.setdefault("flash_staging_bytes", 16 * block)
    return options


def make_server(
    model: Path, log_path: Path, dtype: str, connector: dict[str, Any] | None, *more_args: str, **options: Any
) -> VllmServer:
    """A server that has not been started."""
    return VllmServer(
        model, log_path=log_path, args=server_args(dtype, *more_args), env=SERVER_ENV, connector=connector, **options
    )


class Api:
    """Asks a running server. Every method fails loudly if the server does not answer well."""

    _message_ids = itertools.count()
    _fillers = itertools.count(1000)

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        limits = httpx.Limits(max_connections=64)
        self.http = httpx.Client(base_url=server.base_url, timeout=REQUEST_TIMEOUT_S, limits=limits)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the server, too."""
        self.server.stop()

    # -- requests --------------------------------------------------------------------------

    def body(self, tokens: Sequence[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        """A greedy completion of token ids."""
        return {
            "model": self.server.served_name,
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    def complete(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        session: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Answer:
        """One completion, to its end."""
        more = {} if metadata is None else {"kv_transfer_params": {"lifetime": metadata}}
        headers = {} if session is None else {"X-Session-ID": session}
        response = self.http.post("/v1/completions", json=self.body(tokens, max_tokens, **more), headers=headers)
        assert response.status_code == 200, f"{response.status_code} {response.text}\n{self.server.log_tail()}"
        answer = response.json()
        token_ids = answer["choices"][0]["token_ids"]
        assert len(token_ids) == max_tokens
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(tuple(token_ids), details.get("cached_tokens") or 0)

    def ask(self, prompt: Prompt, **who: Any) -> Answer:
        """One of the known prompts."""
        return self.complete(prompt.tokens, prompt.max_tokens, **who)

    def ask_together(self, prompts: Sequence[Prompt], **who: Any) -> list[Answer]:
        """All prompts at the same time."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.ask(prompt, **who), prompts))

    def chat(self, session: str) -> tuple[str, int]:
        """A chat completion through the official client, with everything a harness adds: its text and its cached tokens."""
        with self.server.openai(timeout=REQUEST_TIMEOUT_S) as client:
            answer = client.chat.completions.create(
                model=self.server.served_name,
                messages=CHAT,  # type: ignore[arg-type]
                max_tokens=CHAT_TOKENS,
                temperature=0,
                extra_headers={"X-Session-ID": session},
                extra_body={
                    "ignore_eos": True,
                    "kv_transfer_params": {"lifetime": {"workflow_id": session, "agent": "planner", "turn": 1}},
                },
            )
        details = answer.usage.prompt_tokens_details if answer.usage else None
        return answer.choices[0].message.content or "", (details.cached_tokens if details else None) or 0

    def fill(self, count: int) -> None:
        """So many requests of ten blocks that nobody has sent before; the copies down end in between."""
        for _ in range(count):
            self.complete(filler(next(self._fillers), 320), 1)
            self.settle()

    # -- state -----------------------------------------------------------------------------

    def tiers(self) -> dict[str, dict[str, int]]:
        """The tiers, added up over the engines."""
        response = self.http.get("/lifetime/v1/tiers")
        assert response.status_code == 200, response.text
        tiers: dict[str, dict[str, int]] = response.json()["tiers"]
        for name, tier in tiers.items():
            assert tier["used_blocks"] + tier["free_blocks"] == tier["capacity_blocks"], (name, tier)
        return tiers

    def settle(self, timeout_s: float = 10.0) -> dict[str, dict[str, int]]:
        """Wait until nothing is held or moves any more; returns the tiers."""
        deadline = time.monotonic() + timeout_s
        before: dict[str, dict[str, int]] = {}
        while time.monotonic() < deadline:
            now = self.tiers()
            if now == before and not any(tier["held_blocks"] for tier in now.values()):
                return now
            before = now
            time.sleep(0.05)
        raise AssertionError(f"blocks are still held or moved after {timeout_s} s: {now}")

    def metrics(self) -> Metrics:
        """What `/metrics` says now."""
        return self.server.metrics()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples."""
        return metric_sum(self.metrics(), f"vllm:{name}", **labels)

    def await_metric(self, holds: Callable[[Metrics], bool], what: str, timeout_s: float = 10.0) -> float:
        """Wait until the metrics say so; returns the seconds it took. They arrive with the engine's next step."""
        began = time.monotonic()
        while time.monotonic() < began + timeout_s:
            if holds(self.metrics()):
                return time.monotonic() - began
            time.sleep(0.05)
        shown = {k: v for k, v in self.metrics().items() if k[0].startswith("vllm:lifetime") and "_bucket" not in k[0]}
        raise AssertionError(f"{what}: not within {timeout_s} s\n" + "\n".join(f"{k} {v}" for k, v in shown.items()))

    def is_healthy(self) -> bool:
        """Whether the server says so."""
        self.server.check_alive()
        return self.http.get("/health").status_code == 200

    # -- control ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop the prefix cache; only possible while nothing is held."""
        self.settle()
        response = self.http.post("/reset_prefix_cache")
        assert response.status_code == 200 and response.json() == {"success": True}, response.text

    def post(self, event: Any) -> httpx.Response:
        """Post a boundary or several, as they are."""
        return self.http.post("/lifetime/v1/boundaries", json=event)

    def boundary(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Post one boundary under a fresh message id; returns its outcome."""
        response = self.post({"message_id": f"m{next(self._message_ids)}", "kind": kind, **fields})
        assert response.status_code == 202, response.text
        (outcome,) = response.json()["outcomes"]
        return dict(outcome)


class Delta:
    """How much metrics have grown since it was made."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._before = api.metrics()

    def __call__(self, name: str, **labels: str) -> float:
        return metric_sum(self.api.metrics(), f"vllm:{name}", **labels) - metric_sum(self._before, f"vllm:{name}", **labels)

    def await_growth(self, name: str, timeout_s: float = 10.0, **labels: str) -> float:
        """Wait for a metric to grow at all; returns by how much."""
        self.api.await_metric(lambda _: self(name, **labels) > 0, f"{name} {json.dumps(labels)} > 0", timeout_s)
        return self(name, **labels)
