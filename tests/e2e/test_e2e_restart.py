# SPDX-License-Identifier: Apache-2.0
"""What a persistent flash file keeps over SIGTERM and kill -9, and the proof that these tests can fail.

One flash file, three servers: the first fills it and is told to end; the second serves from it and is killed while it writes;
before the third, one block of one prompt is forged.
"""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import pytest
from e2e_ahead import ahead
from e2e_client import BLOCK_BYTES, Answer, Api, Delta, tier_options
from e2e_flash_file import FlashFileKnife
from e2e_servers import Servers, Stock
from e2e_workload import BLOCK_TOKENS, KEPT, WRITING, filler

from benchmarks.server import metric_sum

FORGED, *WHOLE = KEPT

FLASH_BLOCKS = 1200
"""Room for everything that is ever written here: nothing that a test asks for later may be evicted, however late the kill."""

FILLERS_PER_WRITER = 5
"""Different prompts with which each writer goes on until the server is gone: ten blocks each."""


@dataclass
class History:
    """What the three servers answered."""

    forged_slots: list[int] = field(default_factory=list)
    """The slot of the first block of `FORGED`."""
    after_sigterm: dict[str, Answer] = field(default_factory=dict)
    hits_after_sigterm: float = 0
    written_before_the_kill: float = 0
    interrupted: int = 0
    after_kill: dict[str, Answer] = field(default_factory=dict)
    loads_after_kill: dict[str, float] = field(default_factory=dict)
    faults_after_kill: float = 0
    forged: Answer | None = None
    forged_loads_done: float = 0


@ahead(num_starts=3)
def history(servers: Servers, _: pytest.TempPathFactory) -> History:
    """The three servers' lives."""
    directory = servers.directory()
    path = directory / "flash.kv"
    options = tier_options("float32", path, 0, FLASH_BLOCKS, flash_persist=True, demote_ahead_blocks=64)
    told = History()

    with servers.start(directory, "float32", options) as api:
        api.complete(FORGED.tokens[: BLOCK_TOKENS + 1], 1)
        api.settle()
        told.forged_slots = sorted(FlashFileKnife(path).keys())
        for prompt in KEPT:
            api.ask(prompt)
            api.settle()

    with servers.start(directory, "float32", options) as api:
        delta = Delta(api)
        told.after_sigterm = {prompt.name: api.ask(prompt) for prompt in KEPT}
        told.hits_after_sigterm = delta("lifetime_hit_tokens_total", tier="flash")
        told.written_before_the_kill, told.interrupted = _kill_while_writing(api)

    FlashFileKnife(path).zero_and_forge(told.forged_slots[0])

    with servers.start(directory, "float32", options) as api:
        delta = Delta(api)
        told.forged = api.ask(FORGED)
        told.forged_loads_done = delta.await_growth("lifetime_loads_total", outcome="done")
        told.after_kill = {prompt.name: api.ask(prompt) for prompt in [*WHOLE, *WRITING]}
        api.settle()
        told.loads_after_kill = {o: delta("lifetime_loads_total", outcome=o) for o in ("done", "failed", "late")}
        told.faults_after_kill = delta("lifetime_flash_faults_total")
    return told


def _kill_while_writing(api: Api) -> tuple[float, int]:
    """Send requests, kill -9 everything once blocks are being written; returns bytes written and requests cut off."""
    cut_off = []

    def ask(number: int) -> None:
        try:
            api.ask(WRITING[number])
            for more in itertools.count():  # go on until the server is gone
                api.complete(filler(10_000 + 1000 * number + more % FILLERS_PER_WRITER), 1)
        except httpx.HTTPError:
            cut_off.append(number)

    before = metric_sum(api.metrics(), "vllm:lifetime_bytes_written_total", tier="flash")
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(WRITING))]
    for thread in threads:
        thread.start()
    written = 0.0
    deadline = time.monotonic() + 30
    while written < 10 * BLOCK_BYTES["float32"] and time.monotonic() < deadline:
        written = metric_sum(api.metrics(), "vllm:lifetime_bytes_written_total", tier="flash") - before
    api.server.kill_9()
    for thread in threads:
        thread.join()
    return written, len(cut_off)


def test_cache_is_cold_after_a_restart(history: History, same_as_stock: Callable[..., None]) -> None:
    """SIGTERM and the same file again: cached tokens come from flash, and the tokens are stock's."""
    for prompt in KEPT:
        answer = history.after_sigterm[prompt.name]
        assert answer.cached_tokens == prompt.reusable_tokens
        same_as_stock(prompt, answer)
    assert history.hits_after_sigterm == sum(prompt.reusable_tokens for prompt in KEPT)
    print(f"{history.hits_after_sigterm:.0f} tokens from flash after SIGTERM and a restart")


def test_wrong_tokens_after_kill_9(history: History, same_as_stock: Callable[..., None]) -> None:
    """Killed while it wrote: what was written is served, what was half written is a miss, and no token is wrong."""
    assert history.written_before_the_kill > 0
    assert history.interrupted == len(WRITING)
    for prompt in [*WHOLE, *WRITING]:
        same_as_stock(prompt, history.after_kill[prompt.name])
    for prompt in WHOLE:
        assert history.after_kill[prompt.name].cached_tokens == prompt.reusable_tokens
    writing = sum(history.after_kill[prompt.name].cached_tokens for prompt in WRITING)
    print(
        f"killed after {history.written_before_the_kill:.0f} bytes, {history.interrupted} requests cut off; {writing} of their "
        f"tokens served by the next server; loads {history.loads_after_kill}, faults {history.faults_after_kill:.0f}"
    )
    assert history.loads_after_kill["done"] >= len(KEPT)


def test_these_tests_cannot_fail(history: History, stock: dict[str, Stock]) -> None:
    """Negative control: one zeroed block with a forged checksum is loaded as if it were good, and changes the output."""
    assert len(history.forged_slots) == 1
    assert history.forged is not None
    assert history.forged_loads_done == 1
    assert history.forged.cached_tokens == FORGED.reusable_tokens
    expected = stock["float32"].cold[FORGED.name].tokens
    print(f"forged block: {history.forged.tokens} instead of {expected}")
    assert history.forged.tokens != expected
