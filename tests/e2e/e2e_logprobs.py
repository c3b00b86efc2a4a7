# SPDX-License-Identifier: Apache-2.0
"""What servers answer with log probabilities, to requests whose segments have every class: for comparing two servers closely."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from e2e_client import Api
from e2e_workload import GROWING, RELOAD, Prompt, agents_sequence

CLASSES = ("lead", "worker", "reasoning_stripped", "reasoning_laden")


@dataclass(frozen=True)
class Reply:
    """What a completion returned."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass
class Replies:
    """What one server answered."""

    cold: list[Reply] = field(default_factory=list)
    """`RELOAD`, one after the other, each on an empty cache, and then again."""
    warm: list[Reply] = field(default_factory=list)
    sequence: list[Reply] = field(default_factory=list)
    """`agents_sequence()`, which needs several times the pool."""
    growing: list[Reply] = field(default_factory=list)
    """`GROWING`, all at the same time, twice; float32 only."""
    num_preemptions: float = 0


def ask(api: Api, prompt: Prompt, segment_class: str, session: str) -> Reply:
    """One completion with log probabilities, of a session's segment of that class. Stock vLLM takes no notice of the class."""
    metadata: dict[str, Any] = {"segment_class": segment_class, "agent": segment_class, "agent_id": segment_class}
    if segment_class == "worker":
        metadata["parent_agent_id"] = "lead"
    body = api.body(prompt.tokens, prompt.max_tokens, logprobs=1, kv_transfer_params={"lifetime": metadata})
    response = api.http.post("/v1/completions", json=body, headers={"X-Session-ID": session})
    assert response.status_code == 200, f"{response.status_code} {response.text}\n{api.server.log_tail()}"
    answer = response.json()
    choice = answer["choices"][0]
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Reply(tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"]), details.get("cached_tokens") or 0)


def _reset(api: Api) -> None:
    """Drop the prefix cache of any server; the last request's blocks may be held for a moment."""
    deadline = time.monotonic() + 10.0
    while api.http.post("/reset_prefix_cache").json() != {"success": True}:
        assert time.monotonic() < deadline, "blocks are still held"
        time.sleep(0.05)


def ask_everything(api: Api, *, is_full: bool) -> Replies:
    """The workload, in a fixed order, on an idle server."""
    replies = Replies()
    preempted_before = api.metric("num_preemptions_total")
    for index, prompt in enumerate(RELOAD):
        _reset(api)
        segment_class = CLASSES[index % len(CLASSES)]
        replies.cold.append(ask(api, prompt, segment_class, f"reload-{index}"))
        replies.warm.append(ask(api, prompt, segment_class, f"reload-{index}"))
    _reset(api)
    for index, prompt in enumerate(agents_sequence()):
        replies.sequence.append(ask(api, prompt, CLASSES[index % len(CLASSES)], f"agents-{index % 5}"))
    if is_full:
        for turn in range(2):
            with ThreadPoolExecutor(len(GROWING)) as threads:
                asked = [
                    threads.submit(ask, api, prompt, CLASSES[index % len(CLASSES)], f"growing-{turn}-{index}")
                    for index, prompt in enumerate(GROWING)
                ]
                replies.growing += [one.result() for one in asked]
        replies.num_preemptions = api.metric("num_preemptions_total") - preempted_before
    return replies


def assert_same(expected: Sequence[Reply], got: Sequence[Reply], *, tolerance: float) -> None:
    """Equal tokens, and log probabilities that differ by no more than `tolerance`."""
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert other.tokens == one.tokens, f"answer {index}, {other.cached_tokens} tokens cached"
        difference = max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        assert difference <= tolerance, f"answer {index}: log probabilities differ by {difference}"
