# SPDX-License-Identifier: Apache-2.0
"""Prefetch under a real scheduler and a model that checks every KV byte."""

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from simulated_engine import BLOCK_SIZE, SimulatedEngine, damage_every_slot, prompt, tiers
from simulated_engine import serve as serve_request
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, get_block_hash, maybe_convert_block_hash

NUM_BLOCKS = 48


serve = partial(serve_request, max_tokens=1)


def step_while(engine: SimulatedEngine, condition: Callable[[], bool], limit: int = 3000) -> None:
    """Step until `condition` is over."""
    for _ in range(limit):
        if not condition():
            return
        engine.step()
        time.sleep(0.0005)
    raise AssertionError("it did not happen")


def prefetch_of(engine: SimulatedEngine) -> Any:
    """The engine's prefetch."""
    prefetch = engine.connector._scheduler_side.prefetch
    assert prefetch is not None
    return prefetch


def hint(engine: SimulatedEngine, message_id: str, **target: Any) -> dict[str, Any]:
    """Ask for a prefetch as the control API would."""
    action = {"action_id": "a", "action_type": "kv.prefetch", "action_version": "1.0", "payload": target}
    answer = engine.connector.lifetime_call("hints", {"message_id": message_id, "actions": [action]})
    outcome: dict[str, Any] = answer["outcomes"][0]
    return outcome


def evict_session(engine: SimulatedEngine, name: str = "s", length: int = 320) -> list[int]:
    """A session has read a prompt that now lies below HBM; HBM is full of blocks of a session that has ended."""
    tokens = prompt(hash(name) % 1000, length)
    serve(engine, name, tokens, session_id=name)
    for i in range(4):
        serve(engine, f"{name}-other-{i}", prompt(7000 + i, 300), session_id=f"{name}-other")
        engine.settle()
    engine.boundary("session_end", f"{name}-end", session_id=f"{name}-other")
    return tokens


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is worth prefetching by itself: only wishes are fetched."""
    monkeypatch.setattr(
        "vllm_lifetime.connectors.lifetime.scheduler.LifetimeScheduler._one_step_value", lambda self, run: 0.0
    )


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("host,flash", [(100, 0), (0, 250), (8, 250)])
def test_a_wish_is_loaded_when_the_request_comes(
    make_scored: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, host: int, flash: int
) -> None:
    """What was asked for is a local hit, byte for byte, when the request comes; an idle engine fetches it and then rests."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, host, flash))
    tokens = evict_session(engine)
    before = counters(engine)
    outcome = hint(engine, "h", session_id="s")
    assert outcome["status"] == "accepted" and outcome["blocks"] >= 10, outcome
    engine.settle(5000)
    engine.check_conservation()
    after = counters(engine)
    assert after["prefetched_blocks.issued"] >= outcome["blocks"] >= 10
    assert serve(engine, "again", tokens, session_id="s") >= 19 * BLOCK_SIZE
    engine.settle()
    totals = counters(engine)
    assert totals["hit_blocks.hbm"] - before["hit_blocks.hbm"] >= 19
    assert totals["loads.done"] == before["loads.done"]
    # The block of the last prompt token is always computed.
    assert totals["prefetched_blocks.used"] >= outcome["blocks"] - 1
    assert hint(engine, "h2", session_id="s") | {"action_id": "a"} == {
        "action_id": "a", "status": "accepted", "reason": "all of it is in HBM, or nowhere", "blocks": 0, "bytes": 0,
    }  # fmt: skip


def test_what_is_likely_next_is_not_fetched(make_scored: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path) -> None:
    """Without any wish: the agent that the forecast names is fetched into retired space, while another request decodes."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, 100, 0))
    for i in range(4):  # the online model learns that the writer follows the planner
        for agent in ("planner", "writer"):
            who = {"workflow_id": f"w{i}", "agent": agent, "agent_id": agent}
            serve(engine, f"{agent}-{i}", prompt(10 + i, 64), metadata=who)
        engine.boundary("workflow_end", f"end-{i}", workflow_id=f"w{i}")
    writer = prompt(99, 320)
    for agent, tokens in (("writer", writer), ("planner", prompt(98, 64))):
        serve(engine, agent, tokens, metadata={"workflow_id": "w", "agent": agent, "agent_id": agent})
        for i in range(3):
            serve(engine, f"{agent}-{i}-fill", prompt(50 + i, 320), session_id="fill")
            engine.settle()
    before = counters(engine)
    engine.boundary("session_end", "fill", session_id="fill")
    engine.add("other", prompt(3, 32), max_tokens=60)
    engine.run()
    engine.settle()
    who = {"workflow_id": "w", "agent": "writer", "agent_id": "writer"}
    assert serve(engine, "next", writer, metadata=who) >= 16 * BLOCK_SIZE
    engine.settle()
    totals = counters(engine)
    assert totals["prefetched_blocks.used"] - before["prefetched_blocks.used"] >= 10
    assert totals["loads.done"] == before["loads.done"]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("host,flash", [(100, 0), (0, 250)])
def test_an_allocation_waits_for_a_prefetch(
    make_scored: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, host: int, flash: int
) -> None:
    """A request that needs all of HBM is admitted at once: the transfer is ended and writes no block that was handed out."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, host, flash))
    tokens = evict_session(engine)
    pool = engine.scheduler.kv_cache_manager.block_pool
    copies = engine.worker._worker_side._copies
    if host:
        copy = copies._engine._copy_rows
        copies._engine._copy_rows = lambda *arguments: (time.sleep(0.05), copy(*arguments))
    else:
        device = engine.worker._worker_side._device
        read = device.read
        device.read = lambda *arguments: (time.sleep(0.05), read(*arguments))[1]
    hint(engine, "h", session_id="s")
    step_while(engine, lambda: pool.num_lent == 0)
    num_lent = pool.num_lent
    assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 > pool.free_list.num_free_blocks
    engine.add("large", prompt(5, (NUM_BLOCKS - 1) * BLOCK_SIZE - 20), max_tokens=4)
    engine.step()
    assert engine.scheduler.requests["large"].status.name == "RUNNING"
    engine.run()
    assert not engine.scheduler.requests
    engine.settle(5000)
    engine.check_conservation()
    totals = counters(engine)
    assert totals["prefetched_blocks.cancelled"] >= num_lent > 0
    assert serve(engine, "again", tokens, session_id="s") >= 16 * BLOCK_SIZE, "what was given up is still below"


@pytest.mark.usefixtures("quiet")
def test_a_reset_leaves_a_prefetched_block_readable(
    make_scored: Callable[..., SimulatedEngine], tmp_path: Path
) -> None:
    """R25: what was on its way up when the cache was reset is not hit after it."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, 100, 0))
    tokens = evict_session(engine)
    pool = engine.scheduler.kv_cache_manager.block_pool
    hint(engine, "h", session_id="s")
    step_while(engine, lambda: pool.num_lent == 0)
    assert engine.scheduler.reset_prefix_cache()
    engine.settle()
    engine.check_conservation()
    assert pool.num_lent == 0
    assert serve(engine, "again", tokens, session_id="s") == 0


@pytest.mark.usefixtures("quiet")
def test_whoever_follows_the_kv_events_does_not_see_a_prefetch(
    make_scored: Callable[..., SimulatedEngine], tmp_path: Path
) -> None:
    """What the events leave standing is what HBM holds, also after blocks have come up ahead of their request."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, 100, 0), kv_events_config=events)
    pool = engine.scheduler.kv_cache_manager.block_pool
    batches: list[KVEventBatch] = []
    engine.scheduler.kv_event_publisher.publish = batches.append  # type: ignore[method-assign]
    standing: set[ExternalBlockHash] = set()

    def follow() -> int:
        engine.step()
        num_bare = 0
        for event in (event for batch in batches for event in batch.events):
            if isinstance(event, BlockStored):
                standing.update(event.block_hashes)
                num_bare += not event.token_ids
            else:
                standing.difference_update(event.block_hashes)
        batches.clear()
        held = [get_block_hash(block.block_hash) for block in pool.blocks if block.block_hash is not None]
        assert standing == set(map(maybe_convert_block_hash, held))
        return num_bare

    evict_session(engine)
    assert follow() == 0
    blocks = hint(engine, "h", session_id="s")["blocks"]
    engine.settle(5000)
    assert follow() == blocks >= 10


@pytest.mark.usefixtures("quiet")
def test_a_damaged_block_is_prefetched(make_scored: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path) -> None:
    """A block that does not verify goes back empty, is counted, and is computed when it is asked for."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, 0, 250))
    tokens = evict_session(engine)
    damage_every_slot(tmp_path / "flash.kv")
    hint(engine, "h", session_id="s")
    engine.settle(5000)
    engine.check_conservation()
    assert counters(engine)["prefetched_blocks.failed"] > 0
    serve(engine, "again", tokens, session_id="s")


@pytest.mark.parametrize(
    "prefetch,host,flash,seed",
    [
        ("conservative", 60, 0, 0),
        ("conservative", 0, 250, 1),
        ("conservative", 20, 250, 2),
        ("aggressive", 60, 0, 3),
        ("aggressive", 20, 250, 1),
    ],
)
def test_no_wrong_kv_with_prefetch(
    make_scored: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, prefetch: str, host: int, flash: int, seed: int
) -> None:
    """Workflows with pauses, evictions, preemptions, aborts, ends, wishes and resets at once; every byte is checked."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, host, flash, prefetch=prefetch))
    rng = random.Random(seed)
    shared = [prompt(1000 + i, 100) for i in range(3)]
    for i in range(400):
        if rng.random() < 0.2 and len(engine.scheduler.requests) < 6:
            workflow, agent = rng.randrange(8), rng.choice(("planner", "writer"))
            tokens = shared[workflow % 3] + prompt(workflow, 400)[: rng.randrange(0, 300)]
            who = {"workflow_id": f"w{workflow}", "agent": agent, "agent_id": agent}
            engine.add(f"r{i}", tokens, max_tokens=rng.randrange(1, 40), metadata=who)
        chance = rng.random()
        if chance < 0.02 and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        elif chance < 0.06:
            engine.boundary("workflow_end", f"m{i}", workflow_id=f"w{rng.randrange(8)}")
        elif chance < 0.08:
            hint(engine, f"h{i}", workflow_id=f"w{rng.randrange(8)}")
        elif chance < 0.085:
            engine.scheduler.reset_prefix_cache()
        engine.step()
        if i % 10 == 0:
            engine.check_conservation()
    engine.run()
    engine.settle(5000)
    engine.check_conservation()
    totals = counters(engine)
    issued = totals["prefetched_blocks.issued"]
    ended = sum(totals[f"prefetched_blocks.{outcome}"] for outcome in ("used", "wasted", "cancelled", "failed"))
    assert issued > 0 and ended + len(prefetch_of(engine)._unread) == issued
    assert engine.scheduler.kv_cache_manager.block_pool.num_lent == 0


@pytest.mark.parametrize("options,reason", [({"prefetch": "off"}, "is off"), ({"eviction_policy": "lifecycle"}, "is off")])
def test_a_prefetch_is_accepted_though_it_is_off(
    make_scored: Callable[..., SimulatedEngine], tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    """It is refused with a reason."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, 20, 0, **options))
    serve(engine, "s", prompt(1, 64), session_id="s")
    outcome = hint(engine, "h", session_id="s")
    assert outcome["status"] == "rejected" and reason in outcome["reason"]
