# SPDX-License-Identifier: Apache-2.0
"""Flash in place: a server whose KV blocks lie for two thirds in the flash file answers as one that has them all in HBM.

Tokens and log probabilities, in float32 and bfloat16, also under eviction and preemption; and what lies in the file is really
read there. In bfloat16 the rounding depends on how a prompt was cut into steps, so that answers are compared where as many tokens
were cached.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e_ahead import ahead
from e2e_client import BLOCK_BYTES, Api
from e2e_mounts import small_tmpfs
from e2e_refusal import Refusal, early_refusals, refusal
from e2e_servers import Servers
from e2e_workload import GROWING, RELOAD, Prompt, agents_sequence

from benchmarks.server import VllmServer, metric_sum

FLASH_BLOCKS = 16
"""Of the 24 that every server here has."""

HEADER_BYTES = 3 * 4096
"""Header, epoch and table of a file with so few blocks."""

CLASSES = ("lead", "worker", "reasoning_stripped", "reasoning_laden")
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@dataclass(frozen=True)
class Reply:
    """What a completion returned."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    cached_tokens: int


@dataclass
class Run:
    """What one server answered."""

    cold: list[Reply] = field(default_factory=list)
    """`RELOAD`, one after the other, each on an empty cache, and then again."""
    warm: list[Reply] = field(default_factory=list)
    sequence: list[Reply] = field(default_factory=list)
    """`agents_sequence()`, which needs several times the pool."""
    growing: list[Reply] = field(default_factory=list)
    """`GROWING`, all at the same time, twice; float32 only."""
    num_preemptions: float = 0
    placed: dict[tuple[str, str], float] = field(default_factory=dict)
    """Blocks by tier and class."""
    flash: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    before_zeroing: Reply | None = None
    after_zeroing: Reply | None = None
    after_reset: Reply | None = None
    is_file_left: bool = True


def ask(api: Api, prompt: Prompt, segment_class: str, session: str) -> Reply:
    """One completion with log probabilities, of a session's segment of that class."""
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


def ask_everything(api: Api, *, is_full: bool) -> Run:
    """The workload, in a fixed order."""
    run = Run()
    for index, prompt in enumerate(RELOAD):
        api.reset()
        segment_class = CLASSES[index % len(CLASSES)]
        run.cold.append(ask(api, prompt, segment_class, f"reload-{index}"))
        run.warm.append(ask(api, prompt, segment_class, f"reload-{index}"))
    api.reset()
    for index, prompt in enumerate(agents_sequence()):
        run.sequence.append(ask(api, prompt, CLASSES[index % len(CLASSES)], f"agents-{index % 5}"))
    if is_full:
        for turn in range(2):
            with ThreadPoolExecutor(len(GROWING)) as threads:
                asked = [
                    threads.submit(ask, api, prompt, CLASSES[index % len(CLASSES)], f"growing-{turn}-{index}")
                    for index, prompt in enumerate(GROWING)
                ]
                run.growing += [one.result() for one in asked]
        run.num_preemptions = api.metric("num_preemptions_total")
    run.tiers = api.settle()
    return run


def all_hbm(servers: Servers, dtype: str) -> Run:
    """The same connector, with all blocks in memory."""
    with servers.start(servers.directory(), dtype, {}) as api:
        return ask_everything(api, is_full=dtype == "float32")


def in_place(servers: Servers, dtype: str) -> Run:
    """Flash in place; at the end the file is zeroed from outside."""
    directory = servers.directory()
    path = directory / "flash.kv"
    options = in_place_options(path, dtype) | {"placement": "lachesis_no_predictive"}
    # Without it vLLM kills its engine at SIGTERM, and whether a worker ends before that is a race.
    with servers.start(directory, dtype, options, "--shutdown-timeout", "60") as api:
        run = ask_everything(api, is_full=dtype == "float32")
        metrics = api.metrics()
        run.placed = {
            (tier, name): metric_sum(metrics, "vllm:lifetime_placed_blocks_total", tier=tier, **{"class": name})
            for tier in ("hbm", "flash")
            for name in CLASSES
        }
        run.flash = {
            name: metric_sum(metrics, f"vllm:lifetime_{name}_total", tier="flash")
            for name in ("bytes_read", "bytes_written", "hit_blocks")
        }
        prompt = RELOAD[0]
        api.reset()
        ask(api, prompt, "lead", "zeroed")
        run.before_zeroing = ask(api, prompt, "lead", "zeroed")
        with path.open("r+b", buffering=0) as file:
            file.seek(HEADER_BYTES)
            file.write(bytes(FLASH_BLOCKS * BLOCK_BYTES[dtype]))
        run.after_zeroing = ask(api, prompt, "lead", "zeroed")
        api.reset()
        run.after_reset = ask(api, prompt, "lead", "zeroed")
    run.is_file_left = path.exists()
    return run


def in_place_options(path: Path, dtype: str = "float32", flash_blocks: int = FLASH_BLOCKS) -> dict[str, Any]:
    """Options of the connector."""
    flash_bytes = flash_blocks * BLOCK_BYTES[dtype] + HEADER_BYTES
    return {"flash_mode": "in_place", "flash_path": str(path), "flash_bytes": flash_bytes}


@ahead(num_starts=2)
def float32_runs(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """All in HBM, and in place."""
    return all_hbm(servers, "float32"), in_place(servers, "float32")


@ahead(num_starts=2)
def bfloat16_runs(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """All in HBM, and in place."""
    return all_hbm(servers, "bfloat16"), in_place(servers, "bfloat16")


@pytest.fixture
def runs(dtype: str, float32_runs: tuple[Run, Run], bfloat16_runs: tuple[Run, Run]) -> tuple[Run, Run]:
    """Both servers' answers."""
    return float32_runs if dtype == "float32" else bfloat16_runs


def assert_same(expected: Sequence[Reply], got: Sequence[Reply], *, tolerance: float) -> None:
    """Equal tokens, and log probabilities that differ by no more than `tolerance`."""
    for index, (one, other) in enumerate(zip(expected, got, strict=True)):
        assert other.tokens == one.tokens, f"answer {index}, {other.cached_tokens} tokens cached"
        difference = max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))
        assert difference <= tolerance, f"answer {index}: log probabilities differ by {difference}"


@both_dtypes
def test_same_tokens_and_logprobs(runs: tuple[Run, Run]) -> None:
    """Cold and warm, whatever tier the class belongs in."""
    expected, got = runs
    for one, other, prompt in zip(expected.warm, got.warm, RELOAD, strict=True):
        assert one.cached_tokens == other.cached_tokens == prompt.reusable_tokens
    assert all(reply.cached_tokens == 0 for reply in got.cold)
    assert_same(expected.cold, got.cold, tolerance=0.0)
    assert_same(expected.warm, got.warm, tolerance=0.0)


@both_dtypes
def test_same_tokens_under_eviction(runs: tuple[Run, Run], dtype: str) -> None:
    """Agents whose contexts do not fit together."""
    expected, got = runs
    if dtype == "float32":
        assert_same(expected.sequence, got.sequence, tolerance=1e-3)
        return
    pairs = [(a, b) for a, b in zip(expected.sequence, got.sequence, strict=True) if a.cached_tokens == b.cached_tokens]
    assert len(pairs) >= 10
    assert_same(*zip(*pairs, strict=True), tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32"])
def test_same_tokens_under_preemption(runs: tuple[Run, Run]) -> None:
    """Requests that outgrow both tiers together."""
    expected, got = runs
    assert min(expected.num_preemptions, got.num_preemptions) > 0
    assert_same(expected.growing, got.growing, tolerance=1e-3)


@both_dtypes
def test_class_decides_where_blocks_lie(runs: tuple[Run, Run], dtype: str) -> None:
    """Long-lived classes in flash, short-lived ones in HBM; both tiers work, and nothing leaks."""
    _, got = runs
    # Six prompts in turn, of which those with short-lived classes do not fit into HBM.
    assert got.placed["flash", "lead"] > got.placed["hbm", "lead"]
    assert got.placed["flash", "reasoning_stripped"] > got.placed["hbm", "reasoning_stripped"]
    assert got.placed["hbm", "worker"] > 0 and got.placed["hbm", "reasoning_laden"] > 0
    assert got.flash["hit_blocks"] > 0
    assert got.flash["bytes_read"] > got.flash["bytes_written"] > FLASH_BLOCKS * BLOCK_BYTES[dtype]
    assert got.tiers["flash"]["capacity_blocks"] == FLASH_BLOCKS
    assert got.tiers["hbm"]["capacity_blocks"] == 24 - FLASH_BLOCKS - 1
    assert [tier["held_blocks"] for tier in got.tiers.values()] == [0, 0, 0]


@both_dtypes
def test_tokens_come_from_the_file(runs: tuple[Run, Run]) -> None:
    """Zeroing it from outside changes the answer; computing it again mends it."""
    _, got = runs
    before, after, again = got.before_zeroing, got.after_zeroing, got.after_reset
    assert before is not None and after is not None and again is not None
    assert before.cached_tokens == after.cached_tokens == RELOAD[0].reusable_tokens
    assert before.tokens == got.warm[0].tokens
    assert after.tokens != before.tokens
    assert again.tokens == got.cold[0].tokens


@both_dtypes
def test_file_stays_after_an_orderly_stop(runs: tuple[Run, Run]) -> None:
    """It holds nothing that a later server could use."""
    _, got = runs
    assert not got.is_file_left


# ---------------------------------------------------------------------- refusals

CASES: dict[str, str] = {
    "full file system": "Lower flash_bytes",
    "read-only file system": "cannot be written by this user. Give write permission or another path",
    "host tier": "set host_bytes to 0",
    "no HBM": "HBM would be left with none: lower flash_bytes to at most",
}
FOUND_BY_THE_WORKER = {"no HBM"}
"""Only the worker knows how many blocks there are."""


@ahead(num_starts=1)
def in_place_refusals(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Refusal | None]:
    """How each start ended."""
    base = tmp_path_factory.mktemp("in-place")

    def make(options: dict[str, Any]) -> VllmServer:
        return servers.make(servers.directory(), "float32", options, start_timeout_s=150)

    with ExitStack() as mounts:
        options = {
            "host tier": in_place_options(base / "flash.kv") | {"host_bytes": 1 << 20},
            "no HBM": in_place_options(base / "flash.kv", flash_blocks=24),
        }
        try:
            full = mounts.enter_context(small_tmpfs(base / "small", 1))
            read_only = mounts.enter_context(small_tmpfs(base / "read-only", 8, is_read_only=True))
            options["full file system"] = in_place_options(full / "flash.kv")
            options["read-only file system"] = in_place_options(read_only / "flash.kv")
        except pytest.skip.Exception:
            pass
        late = {case: refusal(make(options.pop(case))) for case in FOUND_BY_THE_WORKER}
        return early_refusals({case: make(chosen) for case, chosen in options.items()}) | late


@pytest.mark.parametrize("case", CASES)
def test_start_in_place_fails_in_riddles(in_place_refusals: dict[str, Refusal | None], case: str) -> None:
    """One sentence says what to do."""
    if case not in in_place_refusals:
        pytest.skip("no such file system here")
    refused = in_place_refusals[case]
    assert refused is not None, "the start goes on"
    assert refused.exit_code != 0
    assert refused.says(CASES[case]), refused
