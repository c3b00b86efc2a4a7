# SPDX-License-Identifier: Apache-2.0
"""Flash in place on simulated engines: every KV byte that attention reads is checked, wherever its block lies."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_engine import BLOCK_BYTES, BLOCK_SIZE, LAYERS, SPEC, WrongKV, make_vllm_config, prompt, serve
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, SlidingWindowSpec

from vllm_lifetime.connectors.lifetime.in_place import InPlaceMemory, InPlacePlan
from vllm_lifetime.connectors.lifetime.options import LifetimeOptions, OptionsError, parse_options
from vllm_lifetime.flash import FlashError
from vllm_lifetime.flash.wear_file import read_wear_file

NUM_BLOCKS = 32
NUM_FLASH = 20
NUM_HBM = NUM_BLOCKS - NUM_FLASH
FLASH_BYTES = 3 * 4096 + NUM_FLASH * BLOCK_BYTES
"""Header, epoch and table take a page each."""


def in_place(path: Path, **options: Any) -> dict[str, Any]:
    """Options for `NUM_FLASH` blocks in flash."""
    return {
        "flash_mode": "in_place",
        "flash_path": str(path / "flash.kv"),
        "flash_bytes": FLASH_BYTES,
        "placement": "lachesis_no_predictive",
        **options,
    }


def ids_of(engine: Any, request_id: str) -> list[int]:
    """The blocks of a running request."""
    blocks: list[int] = engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
    return blocks


def in_flash(ids: list[int]) -> int:
    """How many lie in flash."""
    return sum(block_id >= NUM_HBM for block_id in ids)


def test_class_decides_the_tier(make_engine: Callable[..., Any], tmp_path: Path, counters: Callable[[Any], Counter[str]]) -> None:
    """A worker's blocks lie in HBM, a lead agent's in flash, and of a turn what it adds in HBM."""
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path))
    engine.add("lead", prompt(1, 64), 20, session_id="s", metadata={"agent": "lead", "segment_class": "lead"})
    worker = {"agent": "w", "agent_id": "w1", "parent_agent_id": "l", "segment_class": "worker"}
    engine.add("worker", prompt(2, 64), 20, session_id="s", metadata=worker)
    engine.add("turn", prompt(3, 64), 20, session_id="t", metadata={"agent": "solo"})
    engine.step()
    engine.step()
    lead, worker_ids, turn = (ids_of(engine, name) for name in ("lead", "worker", "turn"))
    assert [len(lead), in_flash(lead)] == [5, 5]
    assert [len(worker_ids), in_flash(worker_ids)] == [5, 0]
    assert [block_id >= NUM_HBM for block_id in turn] == [True] * 4 + [False]
    engine.run()
    engine.check_conservation()
    counts = counters(engine)
    assert (counts["placed_blocks.flash.lead"], counts["placed_blocks.hbm.worker"]) == (6, 6)
    assert (counts["placed_blocks.flash.reasoning_stripped"], counts["placed_blocks.hbm.reasoning_laden"]) == (4, 2)
    assert not [name for name in counts if name.startswith("spilled")]


def test_prefix_in_flash_is_read_in_place(
    make_engine: Callable[..., Any], tmp_path: Path, counters: Callable[[Any], Counter[str]]
) -> None:
    """A hit on blocks in flash shares them as they lie; nothing is copied."""
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path))
    tokens = prompt(1, 160)
    serve(engine, "first", tokens, session_id="s", metadata={"segment_class": "lead"})
    assert serve(engine, "second", tokens, session_id="s", metadata={"segment_class": "lead"}) == 144
    counts = counters(engine)
    assert (counts["hit_blocks.flash"], counts["hit_blocks.hbm"]) == (9, 0)
    engine.check_conservation()


def test_closed_segment_returns_to_its_own_list(make_engine: Callable[..., Any], tmp_path: Path) -> None:
    """A boundary retires what the segment held in both tiers, and both tiers count it as free."""
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path))
    serve(engine, "a", prompt(1, 96), max_tokens=40, session_id="s", metadata={"agent": "solo"})
    tiers = engine.connector.lifetime_call("tiers", {})["tiers"]
    assert (tiers["flash"]["used_blocks"], tiers["hbm"]["used_blocks"]) == (6, 2)
    assert (tiers["flash"]["capacity_blocks"], tiers["hbm"]["capacity_blocks"]) == (NUM_FLASH, NUM_HBM - 1)
    engine.boundary("session_end", "m", session_id="s")
    tiers = engine.connector.lifetime_call("tiers", {})["tiers"]
    assert [tiers[name]["used_blocks"] for name in ("hbm", "flash")] == [0, 0]
    assert [tiers[name]["retired_blocks"] for name in ("hbm", "flash")] == [2, 6]
    assert [tiers[name]["held_blocks"] for name in ("hbm", "flash")] == [0, 0]
    engine.check_conservation()


def test_full_tier_spills_and_is_counted(
    make_engine: Callable[..., Any], tmp_path: Path, counters: Callable[[Any], Counter[str]]
) -> None:
    """Workers that outgrow HBM go on in flash, and nothing that may be read is evicted for them meanwhile."""
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path))
    for index in range(2):
        worker = {"agent": "w", "agent_id": f"w{index}", "parent_agent_id": "l", "segment_class": "worker"}
        serve(engine, f"w{index}", prompt(index, 9 * BLOCK_SIZE), session_id="s", metadata=worker)
    counts = counters(engine)
    # The first one's last block, which is not whole, is handed out again.
    assert counts["placed_blocks.hbm.worker"] == NUM_HBM - 1 + 1
    assert counts["placed_blocks.flash.worker"] == counts["spilled_blocks.hbm.worker"] == 20 - NUM_HBM
    assert not [name for name in counts if name.startswith("evictions")]


def test_request_without_metadata_uses_both_tiers(make_engine: Callable[..., Any], tmp_path: Path) -> None:
    """Nobody has wishes: HBM first, then flash; and once both are full, both turn over."""
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path))
    seen: set[int] = set()
    for index in range(12):
        engine.add(f"r{index}", prompt(index, 10 * BLOCK_SIZE), 2)
        engine.step()
        if index >= 4:
            seen.update(ids_of(engine, f"r{index}"))
        engine.run()
    assert min(in_flash(list(seen)), len(seen) - in_flash(list(seen))) >= 8
    engine.check_conservation()


@pytest.mark.parametrize("placement", ["hbm_first", "lachesis_no_predictive", "lachesis"])
def test_wrong_kv_under_eviction_and_preemption(
    make_engine: Callable[..., Any], tmp_path: Path, placement: str, counters: Callable[[Any], Counter[str]]
) -> None:
    """Random sessions on a pool that is far too small, with boundaries and aborts: every prefix read is right."""
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path, placement=placement))
    preempt, preempted = engine.scheduler._preempt_request, []

    def note_preemption(request: Any, *arguments: Any, **more: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *arguments, **more)

    engine.scheduler._preempt_request = note_preemption
    rng = random.Random(5)
    classes = ["lead", "worker", "reviewer", "reasoning_laden", "reasoning_stripped", "shared", None]
    for index in range(60):
        session = f"s{rng.randrange(6)}"
        agent_id = rng.choice(["a", "b"])
        metadata: dict[str, Any] = {"agent": "x", "agent_id": agent_id}
        segment_class = rng.choice(classes)
        if segment_class is not None:
            metadata["segment_class"] = segment_class
        if segment_class in ("worker", "reviewer"):
            metadata["parent_agent_id"] = "a"
        named = rng.random() < 0.85
        tokens = prompt(rng.randrange(8), BLOCK_SIZE * rng.randrange(1, 12) + rng.randrange(BLOCK_SIZE))
        engine.add(
            f"r{index}", tokens, rng.randrange(1, 60), session_id=session if named else None, metadata=metadata if named else None
        )
        for _ in range(rng.randrange(4)):
            engine.step()
        if rng.random() < 0.2:
            kind = rng.choice(["turn_end", "subagent_return", "session_end", "compaction"])
            engine.boundary(kind, f"m{index}", session_id=session, agent_id=agent_id)
        if rng.random() < 0.1:
            engine.abort(f"r{index}")
        if index % 10 == 0:
            engine.check_conservation()
    engine.run()
    engine.check_conservation()
    tiers = engine.connector.lifetime_call("tiers", {})["tiers"]
    assert [tiers[name]["held_blocks"] for name in ("hbm", "flash")] == [0, 0]
    counts = counters(engine)
    assert preempted
    assert all(sum(counts[f"evictions.{tier}.{reason}"] for reason in ("retired", "lost")) for tier in ("hbm", "flash"))
    assert counts["hit_blocks.hbm"] and counts["hit_blocks.flash"]


def test_kv_really_lies_in_the_file(make_engine: Callable[..., Any], tmp_path: Path) -> None:
    """What lies in flash is gone when the file is zeroed from outside."""
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path))
    tokens = prompt(1, 160)
    serve(engine, "first", tokens, session_id="s", metadata={"segment_class": "lead"})
    path = tmp_path / "flash.kv"
    with path.open("r+b") as file:
        file.seek(3 * 4096)
        file.write(bytes(NUM_FLASH * BLOCK_BYTES))
    with pytest.raises(WrongKV):
        serve(engine, "second", tokens, session_id="s", metadata={"segment_class": "lead"})
    engine.shutdown()
    assert not path.exists()


# ---------------------------------------------------------------------- what a step does to flash


def test_ledger_knows_whose_every_byte_is(
    make_engine: Callable[..., Any], tmp_path: Path, counters: Callable[[Any], Counter[str]]
) -> None:
    """By class, in the counters, in the control API's figures and, after a restart, in the file beside the flash file."""
    token_bytes = BLOCK_BYTES // BLOCK_SIZE
    engine = make_engine(NUM_BLOCKS, in_place(tmp_path))
    for name, tokens, max_tokens in (("lead", 64, 20), ("shared", 40, 2), ("worker", 50, 4)):
        serve(engine, name, prompt(tokens, tokens), max_tokens=max_tokens, session_id=name, metadata={"segment_class": name})
    written = {"lead": {"in_place": 83 * token_bytes}, "shared": {"in_place": 41 * token_bytes}}
    engine.worker._worker_side.in_place.ledger.refresh()
    engine.add("last", prompt(99, 3), 1)  # the figures come with a step
    engine.run()
    (figures,) = engine.connector.lifetime_call("tiers", {})["wear"]
    assert {name: by for name, by in figures["written_bytes"].items() if name != "overhead"} == written
    assert figures["payload_bytes"] == counters(engine)["bytes_written.flash"] == 124 * token_bytes
    shown = {name: counters(engine)[f"flash_written_bytes.{name}.in_place"] for name in ("lead", "shared", "worker")}
    assert shown == {"lead": 83 * token_bytes, "shared": 41 * token_bytes, "worker": 0}
    assert figures["cycles"]["max"] > 0 and figures["rates_bytes_per_s"]["process"] > 0
    engine.shutdown()
    _, counts, _ = read_wear_file(str(tmp_path / "flash.kv.wear"))
    assert counts.payload_bytes == 124 * token_bytes
    again = make_engine(NUM_BLOCKS, in_place(tmp_path))
    (figures,) = again.connector.lifetime_call("tiers", {})["wear"]
    assert {name: by for name, by in figures["written_bytes"].items() if name != "overhead"} == written
    assert figures["rates_bytes_per_s"]["process"] == 0


def make_memory(model: Path, tmp_path: Path, **options: Any) -> InPlaceMemory:
    given = parse_options(in_place(tmp_path, **options), check_machine=False)
    config = make_vllm_config(model, NUM_BLOCKS, in_place(tmp_path, **options))
    return InPlaceMemory(InPlacePlan.of(config, kv_config(), given), given)


def kv_config(num_blocks: int = NUM_BLOCKS, spec: Any = SPEC, groups: int = 1) -> KVCacheConfig:
    page = SPEC.page_size_bytes
    tensor = KVCacheTensor(
        size=page * num_blocks * len(LAYERS), layers=list(LAYERS), layer_stride=page * num_blocks, block_stride=page
    )
    return KVCacheConfig(num_blocks, [tensor], [KVCacheGroupSpec(list(LAYERS), spec)] * groups)


def test_bytes_of_a_step_are_counted(model: Path, tmp_path: Path) -> None:
    """Reads by block and request, up to the request's length; writes by token."""
    memory = make_memory(model, tmp_path)
    step = SimpleNamespace(
        block_table=torch.tensor([[1, NUM_HBM, NUM_HBM + 1, 0], [NUM_HBM, 2, 0, 0]]),
        seq_lens=torch.tensor([33, 20]),
        slot_mapping=torch.tensor([NUM_HBM * BLOCK_SIZE + 16, 2 * BLOCK_SIZE + 3, -1]),
        num_actual_tokens=2,
    )
    memory.note_step({"layers.0": step, "layers.1": step})
    counts = memory.take_counts()
    assert counts == {"bytes_read": 3 * BLOCK_BYTES, "bytes_written": BLOCK_BYTES // BLOCK_SIZE}
    memory.note_step({})
    memory.note_step(None)
    assert not memory.take_counts()


def test_emulated_flash_delays_the_step(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its bandwidth and latency, in whole pages; a page is written when it is full."""
    slept: list[float] = []
    monkeypatch.setattr("vllm_lifetime.connectors.lifetime.in_place.time.sleep", slept.append)
    timing = {"read_bytes_per_s": 1e6, "write_bytes_per_s": 1e5, "read_latency_s": 0.5, "page_bytes": 4096}
    memory = make_memory(model, tmp_path, flash_emulation=timing)
    step = SimpleNamespace(
        block_table=torch.tensor([[NUM_HBM]]),
        seq_lens=torch.tensor([16]),
        slot_mapping=torch.arange(NUM_HBM * BLOCK_SIZE, (NUM_HBM + 1) * BLOCK_SIZE),
        num_actual_tokens=16,
    )
    memory.note_step({"layers.0": step})
    # Two layers' pages of 2 KiB take two of the device's; what is written, 4 KiB in all, fills one.
    assert slept == [pytest.approx(0.5 + 2 * 4096 / 1e6 + 4096 / 1e5)]
    assert memory.take_counts()["delay_us"] == round(slept[0] * 1e6)


def test_tiers_say_that_flash_is_emulated(make_engine: Callable[..., Any], tmp_path: Path) -> None:
    """Without emulation there is no such figure."""
    for number, (timing, expected) in enumerate((({}, None), ({"read_latency_s": 0.001}, 0))):
        path = tmp_path / str(number)
        path.mkdir()
        engine = make_engine(NUM_BLOCKS, in_place(path, flash_emulation=timing))
        tiers = engine.connector.lifetime_call("tiers", {})["tiers"]
        assert tiers["flash"].get("emulated_delay_us") == expected


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "change,sentence",
    [
        ({"flash_path": None, "flash_bytes": 0}, "name the file and its size"),
        ({"host_bytes": 4096}, "set host_bytes to 0"),
        ({"flash_persist": True}, "set flash_persist to false"),
        ({"placement": "lru_migrate"}, "choose hbm_first"),
        ({"placement": "nonsense"}, "there are hbm_first"),
        ({"eviction_policy": "lru"}, "choose another eviction_policy"),
        ({"flash_write_bytes_per_day": 10**9}, "no budget can hold them back. Set that, or leave it out"),
        ({"flash_mode": "staged", "flash_emulation": {"read_latency_s": 0.1}}, "set that, or leave it out"),
        ({"flash_emulation": {"page_bytes": 0}}, "flash_emulation.page_bytes = 0"),
    ],
)
def test_options_that_contradict_each_other(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(OptionsError, match=sentence):
        parse_options(in_place(tmp_path) | change, check_machine=False)


def test_hbm_first_needs_no_segments(tmp_path: Path) -> None:
    assert parse_options(in_place(tmp_path, eviction_policy="lru", placement="hbm_first"), check_machine=False).is_in_place


def plan(model: Path, options: dict[str, Any], config: KVCacheConfig | None = None, num_blocks: int = NUM_BLOCKS) -> InPlacePlan:
    parsed = LifetimeOptions.model_validate(options)
    return InPlacePlan.of(make_vllm_config(model, num_blocks, options), config or kv_config(num_blocks), parsed)


def test_start_without_hbm(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match=r"HBM would be left with none: lower flash_bytes to at most 135168"):
        plan(model, in_place(tmp_path, flash_bytes=FLASH_BYTES + 12 * BLOCK_BYTES))
    assert plan(model, in_place(tmp_path, flash_bytes=135168)).num_hbm_blocks == 2


def test_start_without_flash(model: Path, tmp_path: Path) -> None:
    with pytest.raises(FlashError, match="holds no slot"):
        plan(model, in_place(tmp_path, flash_bytes=4096))


def test_split_in_the_middle_of_a_page(model: Path, tmp_path: Path) -> None:
    with pytest.raises(OptionsError, match="use --block-size 32"):
        plan(model, in_place(tmp_path, flash_bytes=FLASH_BYTES + BLOCK_BYTES))


def test_model_that_cannot_lie_in_flash(model: Path, tmp_path: Path) -> None:
    sliding = SlidingWindowSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype=torch.float32, sliding_window=64)
    for config, reason in ((kv_config(groups=2), "2 KV cache groups"), (kv_config(spec=sliding), "SlidingWindowSpec")):
        with pytest.raises(OptionsError, match=f"{reason}.*use another model, or flash_mode = 'staged'"):
            plan(model, in_place(tmp_path), config)


def test_several_ranks(model: Path, tmp_path: Path) -> None:
    options = in_place(tmp_path)
    config = make_vllm_config(model, NUM_BLOCKS, options)
    config.parallel_config.world_size = 2
    with pytest.raises(OptionsError, match="set --tensor-parallel-size 1"):
        InPlacePlan.of(config, kv_config(), LifetimeOptions.model_validate(options))


def test_other_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(OptionsError, match=r"docs/in-place\.md describes the CUDA design"):
        parse_options(in_place(tmp_path), check_machine=True)


def test_kv_tensor_from_elsewhere(model: Path, tmp_path: Path) -> None:
    """A vLLM that allocates in another way would silently serve from RAM alone."""
    memory = make_memory(model, tmp_path)
    with pytest.raises(FlashError, match="does not lie in the flash file"):
        memory.register({"layers.0": torch.zeros(NUM_BLOCKS, 2, BLOCK_SIZE, 16)})
