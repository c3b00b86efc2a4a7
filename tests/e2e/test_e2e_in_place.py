# SPDX-License-Identifier: Apache-2.0
"""Flash in place: a server whose KV blocks lie for two thirds in the flash file answers as stock vLLM, which has them all in HBM.

Tokens and log probabilities, in float32 and bfloat16, also under eviction and preemption; and what lies in the file is really
read there. In bfloat16 the rounding depends on how a prompt was cut into steps, so that answers are compared where as many tokens
were cached.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from e2e_ahead import ahead
from e2e_client import BLOCK_BYTES, Api
from e2e_flash_file import FlashFileKnife
from e2e_logprobs import CLASSES, Replies, Reply, ask, ask_everything, assert_same
from e2e_mounts import small_tmpfs
from e2e_refusal import Refusal, early_refusals, refusal
from e2e_servers import Servers, Stock
from e2e_workload import BLOCK_TOKENS, RELOAD, Prompt, filler

from benchmarks.server import Metrics, VllmServer, metric_sum
from vllm_lifetime.flash import WearOptions
from vllm_lifetime.flash.ledger_of_file import open_ledger
from vllm_lifetime.flash.storage import open_flash_file
from vllm_lifetime.flash.wear_figures import WearSnapshot
from vllm_lifetime.flash.wear_file import read_wear_file

FLASH_BLOCKS = 16
"""Of the 24 that every server here has."""

HEADER_BYTES = 3 * 4096
"""Header, epoch and table of a file with so few blocks."""

both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@dataclass(frozen=True)
class Killed:
    """What kill -9 right after an answer leaves."""

    prompt: Prompt
    """Asked for last, of a class that belongs in flash."""
    found: WearSnapshot
    """The ledger as the next start finds it."""
    nonzero_bytes: int
    """In the flash file, which was zeroed before."""


@dataclass
class Run:
    """What was seen of one server."""

    replies: Replies = field(default_factory=Replies)
    placed: dict[tuple[str, str], float] = field(default_factory=dict)
    """Blocks by tier and class."""
    flash: dict[str, float] = field(default_factory=dict)
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    before_zeroing: Reply | None = None
    after_zeroing: Reply | None = None
    after_reset: Reply | None = None
    wear: dict[str, Any] = field(default_factory=dict)
    """The ledger, by the control API, once it has what the metrics have."""
    ledger_bytes: int = 0
    """KV bytes, as its file has them after the server's end; float32, which is stopped in an orderly way."""
    killed: Killed | None = None
    """bfloat16."""
    is_file_left: bool = True


def in_place(servers: Servers, dtype: str) -> Run:
    """Flash in place; at the end the file is zeroed from outside."""
    directory = servers.directory()
    path = directory / "flash.kv"
    options = in_place_options(path, dtype) | {"placement": "lachesis_no_predictive"}
    # Without it vLLM kills its engine at SIGTERM, and whether a worker ends before that is a race.
    with servers.start(directory, dtype, options, "--shutdown-timeout", "60") as api:
        run = Run(ask_everything(api, is_full=dtype == "float32"), tiers=api.settle())
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
        run.wear = settled_wear(api)
        if dtype == "bfloat16":
            ask(api, RELOAD[3], "lead", "killed")
            api.server.kill_9()
            run.killed = left_behind(path, RELOAD[3])
            return run
    run.is_file_left = path.exists()
    run.ledger_bytes = read_wear_file(f"{path}.wear")[1].payload_bytes
    return run


def settled_wear(api: Api) -> dict[str, Any]:
    """The ledger's figures when they have all that was written: they are up to a second old, and come with a step."""
    figures: dict[str, Any] = {}

    def is_settled(metrics: Metrics) -> bool:
        nonlocal figures
        api.complete(filler(1, 20), 1)  # a block in HBM
        (figures,) = api.http.get("/lifetime/v1/tiers").json()["wear"]
        return figures["payload_bytes"] == metric_sum(metrics, "vllm:lifetime_bytes_written_total", tier="flash") > 0

    api.await_metric(is_settled, "the wear ledger has all that was written")
    return figures


def left_behind(path: Path, prompt: Prompt) -> Killed:
    """Look at the file, and open it as the next start does."""
    nonzero = path.stat().st_size - path.read_bytes().count(0)
    layout = FlashFileKnife(path).layout
    file = open_flash_file(str(path), layout.geometry, size_bytes=layout.size_bytes, persist=False)
    return Killed(prompt, open_ledger(str(path), file, WearOptions()).snapshot, nonzero)


def in_place_options(path: Path, dtype: str = "float32", flash_blocks: int = FLASH_BLOCKS) -> dict[str, Any]:
    """Options of the connector."""
    flash_bytes = flash_blocks * BLOCK_BYTES[dtype] + HEADER_BYTES
    return {"flash_mode": "in_place", "flash_path": str(path), "flash_bytes": flash_bytes}


@ahead(num_starts=1)
def float32_in_place(servers: Servers, _: pytest.TempPathFactory) -> Run:
    """See `in_place`."""
    return in_place(servers, "float32")


@ahead(num_starts=1)
def bfloat16_in_place(servers: Servers, _: pytest.TempPathFactory) -> Run:
    """See `in_place`."""
    return in_place(servers, "bfloat16")


@pytest.fixture
def run(dtype: str, float32_in_place: Run, bfloat16_in_place: Run) -> Run:
    """The server with flash in place."""
    return float32_in_place if dtype == "float32" else bfloat16_in_place


@pytest.fixture
def expected(dtype: str, stock: dict[str, Stock]) -> Replies:
    """Stock vLLM's, all blocks in HBM."""
    return stock[dtype].replies


@both_dtypes
def test_same_tokens_and_logprobs(expected: Replies, run: Run) -> None:
    """Cold and warm, whatever tier the class belongs in."""
    got = run.replies
    for one, other, prompt in zip(expected.warm, got.warm, RELOAD, strict=True):
        assert one.cached_tokens == other.cached_tokens == prompt.reusable_tokens
    assert all(reply.cached_tokens == 0 for reply in got.cold)
    assert_same(expected.cold, got.cold, tolerance=0.0)
    assert_same(expected.warm, got.warm, tolerance=0.0)


@both_dtypes
def test_same_tokens_under_eviction(expected: Replies, run: Run, dtype: str) -> None:
    """Agents whose contexts do not fit together."""
    got = run.replies
    if dtype == "float32":
        assert_same(expected.sequence, got.sequence, tolerance=1e-3)
        return
    pairs = [(a, b) for a, b in zip(expected.sequence, got.sequence, strict=True) if a.cached_tokens == b.cached_tokens]
    assert len(pairs) >= 10
    assert_same(*zip(*pairs, strict=True), tolerance=0.0)


@pytest.mark.parametrize("dtype", ["float32"])
def test_same_tokens_under_preemption(expected: Replies, run: Run) -> None:
    """Requests that outgrow both tiers together."""
    got = run.replies
    assert min(expected.num_preemptions, got.num_preemptions) > 0
    assert_same(expected.growing, got.growing, tolerance=1e-3)


@both_dtypes
def test_class_decides_where_blocks_lie(run: Run, dtype: str) -> None:
    """Long-lived classes in flash, short-lived ones in HBM; both tiers work, and nothing leaks."""
    # Six prompts in turn, of which those with short-lived classes do not fit into HBM.
    assert run.placed["flash", "lead"] > run.placed["hbm", "lead"]
    assert run.placed["flash", "reasoning_stripped"] > run.placed["hbm", "reasoning_stripped"]
    assert run.placed["hbm", "worker"] > 0 and run.placed["hbm", "reasoning_laden"] > 0
    assert run.flash["hit_blocks"] > 0
    assert run.flash["bytes_read"] > run.flash["bytes_written"] > FLASH_BLOCKS * BLOCK_BYTES[dtype]
    assert run.tiers["flash"]["capacity_blocks"] == FLASH_BLOCKS
    assert run.tiers["hbm"]["capacity_blocks"] == 24 - FLASH_BLOCKS - 1
    assert [tier["held_blocks"] for tier in run.tiers.values()] == [0, 0, 0]


@both_dtypes
def test_tokens_come_from_the_file(run: Run) -> None:
    """Zeroing it from outside changes the answer; computing it again mends it."""
    before, after, again = run.before_zeroing, run.after_zeroing, run.after_reset
    assert before is not None and after is not None and again is not None
    assert before.cached_tokens == after.cached_tokens == RELOAD[0].reusable_tokens
    assert before.tokens == run.replies.warm[0].tokens
    assert after.tokens != before.tokens
    assert again.tokens == run.replies.cold[0].tokens


@pytest.mark.parametrize("dtype", ["float32"])
def test_file_stays_after_an_orderly_stop(run: Run) -> None:
    """It holds nothing that a later server could use. Its ledger stays, with every byte."""
    assert not run.is_file_left
    assert run.ledger_bytes == run.wear["payload_bytes"]


@both_dtypes
def test_wear_ledger_has_every_byte_by_class(run: Run, dtype: str) -> None:
    """As many as the metrics, which the figures were waited for; and erase blocks have been cycled for them."""
    by_class = {name: reasons for name, reasons in run.wear["written_bytes"].items() if name != "overhead"}
    assert all(list(reasons) == ["in_place"] for reasons in by_class.values())
    assert sum(reasons["in_place"] for reasons in by_class.values()) == run.wear["payload_bytes"] > run.flash["bytes_written"]
    assert by_class["lead"]["in_place"] > by_class["reasoning_laden"]["in_place"] > 0
    assert 0.8 < run.wear["write_amplification"] < 1.5 < run.wear["in_place_write_amplification"]
    assert run.wear["cycles"]["max"] > 1 and run.wear["device_years"]["process"] > 0
    assert run.wear["ledger"]["is_kept"] and not run.wear["ledger"]["errors"]


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_wear_ledger_loses_no_byte_by_kill_9(run: Run, dtype: str) -> None:
    """The next start finds what the last request wrote, whenever the last flush was, and the file shows that it is there."""
    killed = run.killed
    assert killed is not None
    tokens = len(killed.prompt.tokens) + killed.prompt.max_tokens - 1
    assert killed.found.payload_bytes == run.wear["payload_bytes"] + tokens * BLOCK_BYTES[dtype] // BLOCK_TOKENS
    assert killed.found.header.wear_id == run.wear["wear_id"]
    # Since the file was zeroed; hardly any byte of KV is zero.
    assert 0.9 * tokens * BLOCK_BYTES[dtype] / BLOCK_TOKENS < killed.nonzero_bytes
    assert killed.nonzero_bytes < killed.found.payload_bytes - run.flash["bytes_written"] + HEADER_BYTES


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
        return servers.make(servers.directory(), "float32", options)

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
