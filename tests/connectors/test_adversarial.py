# SPDX-License-Identifier: Apache-2.0
"""What hung, failed or lied once under attack; each test is named after the symptom."""

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import BLOCK_BYTES, BLOCK_SIZE, SimulatedEngine, prompt, tiers
from simulated_engine import serve as serve_request
from vllm.logger import _print_warning_once

from vllm_lifetime.connectors.lifetime.options import OptionsError
from vllm_lifetime.flash import FlashError
from vllm_lifetime.flash import device as flash_device

NUM_BLOCKS = 48


serve = partial(serve_request, max_tokens=1)


def fill(engine: SimulatedEngine, seeds: range) -> None:
    """Serve one request per seed, one after the other, with some idle time in between."""
    for seed in seeds:
        serve(engine, f"fill-{engine.num_steps}-{seed}", prompt(seed))
        for _ in range(2000):
            if not engine.scheduler.has_requests():
                break
            engine.step()
            time.sleep(0.001)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs in a test waits for this; opened at its end."""
    event = threading.Event()
    yield event
    event.set()


def hang_reads(engine: SimulatedEngine, gate: threading.Event) -> None:
    """From now on the flash device's reads hang until the gate opens."""
    device = engine.worker._worker_side._device
    read = device.read
    device.read = lambda *arguments: (gate.wait(30), read(*arguments))[1]


def test_a_reset_forgets_what_is_on_its_way_to_the_device(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, gate: threading.Event
) -> None:
    """R25: blocks from before a reset must not come back after a restart (they may be of other weights)."""
    options = tiers(tmp_path, 0, 250, flash_persist=True)
    engine = make_engine(NUM_BLOCKS, options)
    copies = engine.worker._worker_side._copies._engine
    copy = copies._copy_rows
    copies._copy_rows = lambda *arguments: (gate.wait(30), copy(*arguments))[1]
    serve(engine, "r", prompt(0, 700))
    while not len(engine.connector._scheduler_side.jobs):
        engine.step()
    assert engine.scheduler.reset_prefix_cache()
    engine.step()  # brings the clear to the worker
    gate.set()
    engine.settle()
    engine.shutdown()
    again = make_engine(NUM_BLOCKS, options)
    assert len(again.connector._scheduler_side.flash) == 0


def test_blocks_of_another_rope_are_not_reused(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """The same model under --hf-overrides computes other KV for the same tokens, hence the same hashes."""
    options = tiers(tmp_path, 0, 250, flash_persist=True)
    engine = make_engine(NUM_BLOCKS, options)
    fill(engine, range(8))
    engine.shutdown()
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
    try:
        again = make_engine(NUM_BLOCKS, options, hf_overrides=rope)
    except (FlashError, OptionsError):
        return  # refusing is right too
    assert len(again.connector._scheduler_side.flash) == 0


@pytest.mark.parametrize("host", [0, 8])
def test_an_idle_engine_rests_though_the_device_refuses_writes(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, host: int
) -> None:
    """A full or broken device must not keep an idle engine stepping."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host, 250, demote_batch_bytes=4 * BLOCK_BYTES))
    engine.worker._worker_side._device.write = lambda *_: False
    for seed in range(4):
        serve(engine, f"r{seed}", prompt(seed, 600))
    deadline = time.monotonic() + 5  # transfers may take up to FRESH_S
    while engine.scheduler.has_requests() and time.monotonic() < deadline:
        engine.step()
    assert not engine.scheduler.has_requests()


def test_the_host_tier_goes_on_when_flash_fails(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path
) -> None:
    """Host plus a broken flash must not be worse than host alone, which keeps the latest blocks."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 30, 250))
    engine.worker._worker_side._device.write = lambda *_: False

    def feed(seeds: range) -> None:
        for seed in seeds:
            serve(engine, f"r{seed}", prompt(seed))
            for _ in range(20):
                engine.step()
                time.sleep(0.001)

    feed(range(8))
    before = counters(engine)["bytes_written.host"]
    feed(range(8, 16))
    assert counters(engine)["bytes_written.host"] > before


def test_a_device_that_hangs_is_bypassed(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, gate: threading.Event
) -> None:
    """R40: after loads that missed their deadline the next request is recomputed at once, not after another deadline."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, load_policy="measured", load_deadline_s=0.2))
    fill(engine, range(8))
    hang_reads(engine, gate)
    for seed in range(3):
        serve(engine, f"r{seed}", prompt(seed))
    totals = counters(engine)
    assert totals["loads.late"] == 1
    assert totals["loads.skipped_slower"] == 2


def test_copies_to_host_go_on_while_a_flash_load_hangs(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, gate: threading.Event
) -> None:
    """One load that hangs, or one at a time that overlap, must not make every eviction a loss."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 60, 600, load_deadline_s=20))
    fill(engine, range(14))
    hang_reads(engine, gate)
    engine.add("hung", prompt(0), max_tokens=1)
    engine.step()
    assert engine.scheduler.requests["hung"].status.name == "WAITING_FOR_REMOTE_KVS"
    before = counters(engine)
    for seed in range(100, 110):
        engine.add(f"r{seed}", prompt(seed), max_tokens=1)
    while len(engine.scheduler.requests) > 1:
        engine.step()
        time.sleep(0.001)
    stored = (counters(engine)["bytes_written.host"] - before["bytes_written.host"]) // BLOCK_BYTES
    gate.set()
    engine.run()
    assert stored > 0


def test_a_reset_does_not_wait_for_the_device(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that hangs in the synchronous epoch write must not hang the engine's step."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250))
    fill(engine, range(4))
    monkeypatch.setattr(flash_device, "write_epoch", lambda *_: time.sleep(1.5))
    assert engine.scheduler.reset_prefix_cache()
    start = time.monotonic()
    engine.step()
    assert time.monotonic() - start < 1


def test_oldest_io_shows_a_read_that_hangs(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, gate: threading.Event
) -> None:
    """R16: `oldest_io_s` is what health checks look at; a device that hangs must show there."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, load_deadline_s=0.1))
    fill(engine, range(8))
    hang_reads(engine, gate)
    serve(engine, "r", prompt(0))
    time.sleep(0.2)
    serve(engine, "next", prompt(50, 40))
    assert engine.connector.lifetime_call("tiers", {})["tiers"]["flash"]["oldest_io_s"] > 0.2


def test_shutdown_gives_a_hung_read_up(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`FlashDevice.close` gives hung IO up after 30 s; the connector's shutdown must get that far."""
    monkeypatch.setattr(flash_device, "_CLOSE_TIMEOUT_SECONDS", 0.1)
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, load_deadline_s=0.1))
    fill(engine, range(8))
    hang_reads(engine, gate)
    serve(engine, "r", prompt(0))
    closing = threading.Thread(target=engine.shutdown, daemon=True)
    closing.start()
    closing.join(2)
    is_closed = not closing.is_alive()
    gate.set()
    closing.join()
    assert is_closed


def test_unusable_metadata_is_logged_once(make_engine: Callable[..., SimulatedEngine]) -> None:
    """A client that always sends broken metadata must not write a log line per request."""
    engine = make_engine(NUM_BLOCKS, {})
    before = _print_warning_once.cache_info().misses
    for i in range(5):
        serve(engine, f"r{i}", prompt(1, BLOCK_SIZE), metadata={"workflow_id": 17})
    assert _print_warning_once.cache_info().misses - before <= 1
