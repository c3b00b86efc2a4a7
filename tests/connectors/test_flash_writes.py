# SPDX-License-Identifier: Apache-2.0
"""What is written to flash behind HBM: by class, within the day's budget, and counted in the wear ledger."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import BLOCK_BYTES, SimulatedEngine, prompt, serve, tiers

from vllm_lifetime.connectors.lifetime import flash_writes
from vllm_lifetime.connectors.lifetime.options import OptionsError, parse_options
from vllm_lifetime.control.merging import merge_tiers
from vllm_lifetime.control.views import TiersOfEngine
from vllm_lifetime.flash.wear_file import read_wear_file
from vllm_lifetime.pool.access import FLASH_TIER

NUM_BLOCKS = 64


def feed(engine: SimulatedEngine, seeds: range, **metadata: Any) -> None:
    """Requests of different workflows, each with 20 blocks of its own, and the idle steps between."""
    for seed in seeds:
        serve(engine, f"r{engine.num_steps}-{seed}", prompt(seed), metadata={"workflow_id": f"w{seed}", **metadata})
        engine.settle()


def look(engine: SimulatedEngine) -> None:
    """Bring the ledger's latest counts to the scheduler side, as it happens within a second."""
    engine.worker._worker_side._device.wear.refresh()  # type: ignore[union-attr]
    engine.step()


def tiers_of(engine: SimulatedEngine) -> TiersOfEngine:
    """What the control API gets, through its schema."""
    return TiersOfEngine.model_validate(engine.connector.lifetime_call("tiers", {}))


@pytest.mark.parametrize("host", [0, 20])
def test_the_ledger_counts_what_the_device_counts(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, host: int
) -> None:
    """By class: the lead's blocks and the worker's; the reason says whether they came from HBM or from host."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host, 250))
    feed(engine, range(6), segment_class="lead")
    feed(engine, range(10, 16), segment_class="worker", agent="w", parent_agent_id="p")
    look(engine)
    state = tiers_of(engine)
    (wear,) = state.wear or []
    reason = "move" if host else "demotion"
    by_class = {name: by_reason.get(reason, 0) for name, by_reason in wear.written_bytes.items() if name != "overhead"}
    assert sum(by_class.values()) == wear.payload_bytes == state.tiers["flash"].bytes_written > 0
    assert set(by_class) == {"lead", "worker"}
    assert wear.written_bytes["overhead"]["record"] >= 64 * wear.payload_bytes // BLOCK_BYTES
    totals = counters(engine)
    assert totals[f"flash_written_bytes.lead.{reason}"] == by_class["lead"]
    assert totals[f"flash_written_bytes.worker.{reason}"] == by_class["worker"]
    merged = merge_tiers([state, state])
    assert [view.file for view in merged.wear or []] == ["flash.kv", "flash.kv"]
    assert merged.flash_writes is None and merged.engines[0].flash_writes == state.flash_writes
    engine.shutdown()
    assert read_wear_file(str(tmp_path / "flash.kv.wear"))[1].payload_bytes == wear.payload_bytes


@pytest.mark.parametrize("host", [0, 20])
@pytest.mark.parametrize("segment_class", ["reasoning_laden", "reviewer"])
def test_short_lived_classes_are_never_written(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, host: int, segment_class: str
) -> None:
    """Neither from HBM nor from host, whatever the pressure; each block is refused once, and host goes on taking blocks."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host, 250, placement="lachesis"))
    feed(engine, range(3), segment_class="lead")
    written = counters(engine)["bytes_written.flash"]
    feed(engine, range(10, 20), segment_class=segment_class)
    feed(engine, range(20, 24), segment_class="lead")
    look(engine)
    state = tiers_of(engine)
    assert set((state.wear or [])[0].written_bytes) == {"lead", "overhead"}
    assert counters(engine)["bytes_written.flash"] > written, "what may be written still is"
    refused = state.flash_writes.refused_blocks[segment_class]["placement"]  # type: ignore[union-attr]
    assert 20 <= refused <= 10 * 21
    if host:
        assert counters(engine)["bytes_written.host"] > 100 * BLOCK_BYTES
    engine.check_conservation()


def test_without_a_placement_every_class_may_be_written(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """The default, as before."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250))
    feed(engine, range(6), segment_class="reviewer")
    look(engine)
    state = tiers_of(engine)
    assert (state.wear or [])[0].written_bytes["reviewer"]["demotion"] > 0
    assert state.flash_writes is not None and state.flash_writes.placement == "hbm_first"
    assert not state.flash_writes.refused_blocks


@pytest.mark.parametrize("unknown", ["hbm", "flash"])
def test_blocks_of_nobody_known_go_by_configuration(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, unknown: str
) -> None:
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, placement="lachesis", placement_unknown=unknown))
    for seed in range(6):
        serve(engine, f"r{seed}", prompt(seed))
        engine.settle()
    assert (counters(engine)["bytes_written.flash"] > 0) == (unknown == "flash")


def test_of_workers_the_larger_half_is_written(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small workers and large ones, alive at the same time: blocks of the small ones are not written."""
    monkeypatch.setattr(flash_writes, "WORKERS_EVERY_S", 0.0)
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, placement="lachesis"))
    who = {"segment_class": "worker", "parent_agent_id": "p"}
    for seed in range(20):
        tokens = prompt(seed, 320 if seed < 10 or seed >= 17 else 64)
        serve(engine, f"r{seed}", tokens, metadata={"workflow_id": f"w{seed}", "agent": f"a{seed}", **who})
        engine.settle()
    in_flash: dict[int, int] = {}
    for segment in engine.connector._scheduler_side.lifecycle.segments:
        seed = int(segment.workflow_id.removeprefix("w"))
        in_flash[seed] = sum(run.num_blocks[FLASH_TIER] for run in segment.runs)
    assert not any(in_flash.get(seed) for seed in range(10, 17))
    assert sum(in_flash.get(seed, 0) > 10 for seed in range(10)) >= 4
    assert tiers_of(engine).flash_writes.refused_blocks["worker"]["placement"] >= 4  # type: ignore[union-attr]


def test_of_announced_workers_the_half_that_is_predicted_to_live_longer_is_written(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have the same size; with nothing learned, a longer instruction announces a longer life."""
    monkeypatch.setattr(flash_writes, "WORKERS_EVERY_S", 0.0)
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, placement="lachesis"))
    for seed in range(20):
        session, who = f"s{seed}", {"workflow_id": f"w{seed}", "agent": "a", "agent_id": "a1", "parent_agent_id": "p"}
        spawn = {"instruction": "go " * (10 if seed % 2 else 400)}
        assert engine.boundary("subagent_spawn", f"m{seed}", session_id=session, **who, spawn=spawn)["status"] == "accepted"
        serve(engine, f"r{seed}", prompt(seed), session_id=session, metadata={**who, "segment_class": "worker"})
        engine.settle()
    in_flash = {True: 0, False: 0}
    for segment in engine.connector._scheduler_side.lifecycle.segments:
        is_long = int(segment.workflow_id.removeprefix("w")) % 2 == 0
        in_flash[is_long] += sum(run.num_blocks[FLASH_TIER] for run in segment.runs)
    # The first worker has nobody to be compared with.
    assert in_flash[True] > 60 and in_flash[False] <= 20


@pytest.mark.parametrize("host", [0, 20])
def test_the_daily_budget_holds_writes_back_and_serving_goes_on(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, host: int
) -> None:
    """An eighth of the budget at once, no more; the engine does not spin on it; host goes on as if there were no flash."""
    budget = 8 * 30 * BLOCK_BYTES
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host, 250, flash_write_bytes_per_day=budget))
    feed(engine, range(12))
    totals = counters(engine)
    assert 25 * BLOCK_BYTES <= totals["bytes_written.flash"] <= 31 * BLOCK_BYTES
    assert totals["flash_throttles"] == 1
    state = tiers_of(engine).flash_writes
    assert state is not None and state.is_throttled
    assert (state.bytes_per_day, state.available_bytes) == (budget, 0)
    assert not engine.connector.has_pending_push_work(), "an idle engine does not spin on a budget that is used up"
    before = totals["bytes_written.host"]
    feed(engine, range(20, 24))
    if host:
        assert counters(engine)["bytes_written.host"] > before
    engine.check_conservation()


def test_writes_go_on_when_more_of_the_budget_has_come_in(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path
) -> None:
    """Two hours later."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, flash_write_bytes_per_day=8 * 20 * BLOCK_BYTES))
    feed(engine, range(8))
    written = counters(engine)["bytes_written.flash"]
    assert tiers_of(engine).flash_writes.is_throttled  # type: ignore[union-attr]
    budget = engine.connector._scheduler_side.flash_writes._budget
    budget._at -= 7200.0
    feed(engine, range(8, 12))
    assert counters(engine)["bytes_written.flash"] > written


def test_a_restart_does_not_renew_the_budget(make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path) -> None:
    """The ledger knows what was written before."""
    options = tiers(tmp_path, 0, 250, flash_write_bytes_per_day=8 * 20 * BLOCK_BYTES)
    engine = make_engine(NUM_BLOCKS, options)
    feed(engine, range(8))
    engine.shutdown()
    again = make_engine(NUM_BLOCKS, options)
    feed(again, range(8))
    assert counters(again)["bytes_written.flash"] <= 2 * BLOCK_BYTES
    assert tiers_of(again).flash_writes.is_throttled  # type: ignore[union-attr]


def test_failed_writes_do_not_use_up_the_budget(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, flash_write_bytes_per_day=8 * 20 * BLOCK_BYTES))
    engine.worker._worker_side._device.write = lambda *_: False
    feed(engine, range(6))
    available = tiers_of(engine).flash_writes.available_bytes  # type: ignore[union-attr]
    assert available == 20 * BLOCK_BYTES


def test_a_budget_that_no_block_fits_into_is_refused(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"flash_write_bytes_per_day: 100 bytes a day are too few .* at least"):
        make_engine(NUM_BLOCKS, tiers(tmp_path, 0, 250, flash_write_bytes_per_day=100))


def test_the_placement_that_is_automatic(tmp_path: Path) -> None:
    """By mode, and never instead of a name that was given."""
    flash = {"flash_path": str(tmp_path / "f"), "flash_bytes": 1 << 20}
    assert parse_options({}, check_machine=False).placement == "hbm_first"
    assert parse_options({"flash_mode": "in_place", **flash}, check_machine=False).placement == "lachesis"
    assert parse_options({"placement": "lachesis"}, check_machine=False).placement == "lachesis"
    with pytest.raises(OptionsError, match="placement"):
        parse_options({"placement": "nonsense"}, check_machine=False)
    with pytest.raises(OptionsError, match="flash_write_bytes_per_day"):
        parse_options({"flash_write_bytes_per_day": 0}, check_machine=False)
