# SPDX-License-Identifier: Apache-2.0
"""The connector under a real scheduler and a model that checks every KV byte; see `simulated_engine.py`."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_engine import BLOCK_SIZE, SimulatedEngine, WrongKV, chain, damage_every_slot, prompt, serve, tiers

NUM_BLOCKS = 48


def fill(engine: SimulatedEngine, seeds: range, length: int = 320) -> None:
    """Serve one request per seed, one after the other, letting the copies down end in between."""
    for seed in seeds:
        engine.add(f"fill-{engine.num_steps}-{seed}", prompt(seed, length), max_tokens=1)
        engine.run()
        engine.settle()


def random_workload(engine: SimulatedEngine, seed: int, steps: int, abort: float = 0.03, reset: float = 0.005) -> None:
    """Workflows with shared prompts and growing histories; some are aborted, end early, or see the cache reset."""
    rng = random.Random(seed)
    shared = [prompt(1000 + i, 100) for i in range(3)]
    for i in range(steps):
        if rng.random() < 0.3 and len(engine.scheduler.requests) < 10:
            workflow = rng.randrange(12)
            tokens = shared[workflow % 3] + prompt(workflow, 500)[: rng.randrange(0, 400)]
            metadata = {"workflow_id": f"w{workflow}"} if rng.random() < 0.8 else None
            engine.add(f"r{i}", tokens, max_tokens=rng.randrange(1, 40), metadata=metadata)
        chance = rng.random()
        if chance < abort and engine.scheduler.requests:
            engine.abort(rng.choice(list(engine.scheduler.requests)))
        elif chance < abort + 0.03:
            engine.boundary("workflow_end", f"m{i}", workflow_id=f"w{rng.randrange(12)}")
        elif chance < abort + 0.03 + reset:
            engine.scheduler.reset_prefix_cache()
        engine.step()
        if i % 10 == 0:
            engine.check_conservation()
    engine.run()
    engine.settle()
    engine.check_conservation()


@pytest.mark.parametrize("host,flash", [(20, 250), (20, 0), (0, 250), (0, 0), (3, 5)])
@pytest.mark.parametrize("seed", range(3))
def test_no_wrong_kv_under_random_load(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, host: int, flash: int, seed: int
) -> None:
    """Concurrency, eviction, preemption, aborts, boundaries and resets at once."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host, flash))
    random_workload(engine, seed, 700)


def test_the_check_can_fail(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """Negative control: zeroed host slots are read as they are and found wrong."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=100, flash=0))
    fill(engine, range(6))
    engine.worker._worker_side._copies._engine.slots.fill(0)
    with pytest.raises(WrongKV):
        serve(engine, "again", prompt(0, 320))


@pytest.mark.parametrize("host,flash", [(100, 0), (0, 250), (8, 250)])
def test_evicted_blocks_come_back(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, host: int, flash: int
) -> None:
    """Host only, flash only, and through both: nearly all of an evicted prompt is loaded, not computed."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host, flash))
    fill(engine, range(5))
    assert serve(engine, "again", prompt(0, 320)) >= 19 * BLOCK_SIZE
    totals = counters(engine)
    assert totals["loads.done"] == 1
    assert totals["hit_blocks.host"] + totals["hit_blocks.flash"] >= 19
    assert totals["hit_blocks.flash"] > 0 if flash else totals["hit_blocks.host"] > 0


def test_eviction_only_without_lower_tiers(make_engine: Callable[..., SimulatedEngine]) -> None:
    """No host, no flash: an evicted prompt is computed again, and nothing breaks."""
    engine = make_engine(NUM_BLOCKS, {})
    fill(engine, range(8))
    assert serve(engine, "again", prompt(0, 320)) == 0


def test_pool_of_one_request_and_a_tenth_does_not_deadlock(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """R1: concurrent loads with a pool of 1.1 times one request; everybody finishes."""
    num_blocks = 23
    engine = make_engine(num_blocks, tiers(tmp_path, host=200, flash=0))
    prompts = [prompt(seed, 300) for seed in range(6)]
    for round_ in range(5):
        for i, tokens in enumerate(prompts):
            engine.add(f"r{round_}-{i}", tokens, max_tokens=18)
        engine.run()
        engine.check_conservation()
    engine.settle()
    engine.check_conservation()


def test_a_thousand_aborts_in_every_state(make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path) -> None:
    """R5, R15: aborted while waiting, loading, prefilling, decoding or preempted; nothing leaks, nothing dies."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=40, flash=250))
    rng = random.Random(0)
    states: dict[str, int] = {}
    aborted = 0
    for i in range(100_000):
        if aborted >= 1000:
            break
        while len(engine.scheduler.requests) < 8:
            seed = rng.randrange(15)
            engine.add(f"r{i}-{rng.random()}", prompt(seed, rng.randrange(40, 400)), max_tokens=rng.randrange(1, 60))
        for request_id in rng.sample(list(engine.scheduler.requests), rng.randrange(0, 3)):
            request = engine.scheduler.requests[request_id]
            if request.is_finished():
                continue
            state = request.status.name
            if request.num_preemptions:
                state += "_after_preemption"
            states[state] = states.get(state, 0) + 1
            engine.abort(request_id)
            aborted += 1
        engine.step()
    engine.run()
    engine.settle()
    engine.check_conservation()
    assert aborted >= 1000
    assert {"WAITING", "WAITING_FOR_REMOTE_KVS", "RUNNING"} <= set(states), states
    assert any(state.endswith("_after_preemption") for state in states), states
    assert not engine.connector._scheduler_side._requests
    assert counters(engine)["loads.done"] > 20


def test_a_damaged_flash_block_is_recomputed(make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path) -> None:
    """R4, R20: bit flips on the device cost a recomputation, not a token, and the block is not asked again."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=0, flash=250))
    fill(engine, range(8))
    damage_every_slot(tmp_path / "flash.kv")
    serve(engine, "again", prompt(0, 320))
    totals = counters(engine)
    assert totals["loads.failed"] == 1
    assert totals["recomputed_blocks"] > 0
    assert totals["flash_faults.checksum"] > 0
    assert engine.outputs["again"][0] == int(chain(prompt(0, 320))[-1] % 997)
    assert serve(engine, "third", prompt(0, 320)) >= 19 * BLOCK_SIZE
    # What was computed again is kept again.
    engine.settle()
    fill(engine, range(20, 24))
    assert serve(engine, "fourth", prompt(0, 320)) >= 19 * BLOCK_SIZE
    assert counters(engine)["loads.done"] == 1


def test_truncated_flash_file_is_survived(make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path) -> None:
    """A file cut from outside while the engine runs: loads fail, are counted and recomputed."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=0, flash=250))
    fill(engine, range(8))
    with (tmp_path / "flash.kv").open("r+b") as file:
        file.truncate(4096 * 8)
    serve(engine, "again", prompt(0, 320))
    assert counters(engine)["loads.failed"] == 1
    fill(engine, range(20, 26))
    random_workload(engine, 1, 200)


def test_a_load_that_hangs_is_given_up(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R3: past its deadline a load is recomputed; the late read writes nowhere near the request's blocks."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=0, flash=250, load_deadline_s=0.05))
    fill(engine, range(8))
    device = engine.worker._worker_side._device
    read = device.read

    def slow_read(slot: int, key: bytes, pages: Any) -> Any:
        time.sleep(0.1)
        return read(slot, key, pages)

    monkeypatch.setattr(device, "read", slow_read)
    engine.add("again", prompt(0, 320), max_tokens=50)
    deadline = time.monotonic() + 20
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        time.sleep(0.002)
        assert time.monotonic() < deadline
    assert counters(engine)["loads.late"] == 1
    monkeypatch.setattr(device, "read", read)
    transfers = engine.worker._worker_side._flash
    deadline = time.monotonic() + 20
    while transfers._abandoned:
        transfers.poll()
        time.sleep(0.01)
        assert time.monotonic() < deadline
    assert len(transfers._free_staging) == 8
    serve(engine, "third", prompt(1, 320))


def test_idle_engine_notices_the_end_of_its_copies(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """R10: with no request left, the engine goes on stepping until a fresh copy down has been noticed, and then stops."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path))
    engine.add("r", prompt(0, 700), max_tokens=1)
    engine.run()
    for _ in range(3000):
        if not engine.scheduler.has_requests():
            break
        engine.step()
        time.sleep(0.001)
    assert not engine.scheduler.has_requests()
    assert not len(engine.connector._scheduler_side.jobs)


def test_restart_with_a_persisted_file(make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path) -> None:
    """What flash held is found after a restart, and is right."""
    options = tiers(tmp_path, host=0, flash=250, flash_persist=True)
    engine = make_engine(NUM_BLOCKS, options)
    fill(engine, range(8))
    engine.shutdown()
    again = make_engine(NUM_BLOCKS, options)
    assert serve(again, "again", prompt(0, 320)) >= 19 * BLOCK_SIZE
    assert counters(again)["hit_blocks.flash"] >= 19


def test_prefix_cache_reset_clears_every_tier_and_the_file(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """R25: after a reset nothing is found anywhere, nor after a restart."""
    options = tiers(tmp_path, host=8, flash=250, flash_persist=True)
    engine = make_engine(NUM_BLOCKS, options)
    fill(engine, range(8))
    assert engine.scheduler.reset_prefix_cache()
    view = engine.connector.lifetime_call("tiers", {})["tiers"]
    assert all(view[tier]["used_blocks"] == 0 for tier in ("hbm", "host", "flash")), view
    engine.step()
    engine.check_conservation()
    assert serve(engine, "again", prompt(0, 320)) == 0
    engine.scheduler.reset_prefix_cache()
    engine.step()
    engine.shutdown()
    again = make_engine(NUM_BLOCKS, options)
    assert serve(again, "later", prompt(1, 320)) == 0


def test_reset_while_copies_are_in_flight(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """A copy that was under way at the reset must not become readable after it."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=100, flash=0))
    copies = engine.worker._worker_side._copies._engine
    copy = copies._copy_rows
    copies._copy_rows = lambda *arguments: (time.sleep(0.1), copy(*arguments))
    engine.add("r", prompt(0, 700), max_tokens=1)
    engine.run()
    for _ in range(3):
        if not len(engine.connector._scheduler_side.jobs):
            engine.step()
    assert len(engine.connector._scheduler_side.jobs)
    assert engine.scheduler.reset_prefix_cache()
    engine.settle()
    assert len(engine.connector._scheduler_side.host) == 0
    engine.check_conservation()


def test_workflow_end_retires_private_blocks_in_every_tier(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """Private blocks go back to the free lists at once; the prompt that a live workflow shares stays."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=30, flash=250))
    shared = prompt(7, 160)
    serve(engine, "a", shared + prompt(1, 320), metadata={"workflow_id": "a"}, max_tokens=1)
    serve(engine, "b", shared + prompt(2, 160), metadata={"workflow_id": "b"}, max_tokens=1)
    fill(engine, range(50, 55))
    side = engine.connector._scheduler_side
    before = side.usage()
    outcome = engine.boundary("workflow_end", "m1", workflow_id="a")
    after = side.usage()
    assert outcome["status"] == "accepted"
    assert outcome["blocks"] >= 20
    assert outcome["blocks"] == sum(after[t].retired - before[t].retired for t in after)
    assert sum(after[t].used for t in after) == sum(before[t].used for t in before) - outcome["blocks"]
    engine.check_conservation()
    assert engine.boundary("workflow_end", "m1", workflow_id="a")["status"] == "duplicate"
    assert engine.boundary("workflow_end", "m2", workflow_id="a")["status"] == "ignored"
    # The shared prompt is b's too.
    assert serve(engine, "b2", shared + prompt(2, 160), metadata={"workflow_id": "b"}) >= 160
    assert engine.boundary("workflow_end", "m3", workflow_id="b")["status"] == "accepted"
    engine.check_conservation()
    assert len(side.lifecycle) == 0


def test_session_end_retires_only_that_session(make_engine: Callable[..., SimulatedEngine]) -> None:
    """Two sessions of one workflow: the end of one leaves the other's blocks."""
    engine = make_engine(NUM_BLOCKS, {})
    for name in ("s1", "s2"):
        seed = int(name[1])
        serve(engine, name, prompt(seed, 160), session_id=name, metadata={"workflow_id": "w"}, max_tokens=1)
    assert engine.boundary("session_end", "m1", session_id="s1")["blocks"] == 10
    usage = engine.connector._scheduler_side.usage()["hbm"]
    assert (usage.retired, usage.used) == (10, 10)


def test_retired_blocks_are_evicted_first_and_never_copied_down(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path
) -> None:
    """An ended workflow's blocks make room, though they are more recent; not one of their bytes is written."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=100, flash=0, demote_ahead_blocks=10))
    serve(engine, "old", prompt(1, 160), metadata={"workflow_id": "old"}, max_tokens=1)
    serve(engine, "new", prompt(2, 480), metadata={"workflow_id": "new"}, max_tokens=1)
    engine.settle()
    engine.boundary("workflow_end", "m", workflow_id="new")
    written = counters(engine)["bytes_written.host"]
    serve(engine, "next", prompt(3, 480), metadata={"workflow_id": "next"}, max_tokens=1)
    assert counters(engine)["bytes_written.host"] == written
    assert counters(engine)["evictions.hbm.retired"] >= 20
    # vLLM's order would have evicted "old", the least recently used.
    assert serve(engine, "old again", prompt(1, 160), metadata={"workflow_id": "old"}) == 144


def test_a_boundary_waits_for_a_running_request(make_engine: Callable[..., SimulatedEngine]) -> None:
    """The end arrives while a request of the workflow runs: it goes on undisturbed; its blocks retire when it is over."""
    engine = make_engine(NUM_BLOCKS, {})
    engine.add("r", prompt(1, 320), max_tokens=60, metadata={"workflow_id": "w"})
    for _ in range(4):
        engine.step()
    assert engine.boundary("workflow_end", "m", workflow_id="w")["status"] == "accepted"
    engine.run()
    assert len(engine.outputs["r"]) == 60
    usage = engine.connector._scheduler_side.usage()["hbm"]
    assert usage.used == 0 and usage.retired >= 23
    engine.check_conservation()


def test_another_salt_never_hits(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """R23: equal tokens under another cache_salt share nothing, in no tier."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=100, flash=0))
    serve(engine, "a", prompt(1, 320), cache_salt="alice")
    fill(engine, range(50, 53))
    assert serve(engine, "b", prompt(1, 320), cache_salt="bob") == 0
    assert serve(engine, "a2", prompt(1, 320), cache_salt="alice") >= 300


def test_unusable_metadata_costs_only_the_hint(make_engine: Callable[..., SimulatedEngine], counters: Any) -> None:
    """A request with broken metadata is served as one without."""
    engine = make_engine(NUM_BLOCKS, {})
    serve(engine, "r", prompt(1, 100), metadata={"workflow_id": 17, "turn": -3})
    assert len(engine.outputs["r"]) == 4
    assert counters(engine)["bad_metadata"] == 1


def test_a_slow_tier_is_bypassed(
    make_engine: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R40: once loads are measured to take longer than recomputing, they are skipped."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=0, flash=250, load_policy="measured"))
    fill(engine, range(8))
    device = engine.worker._worker_side._device
    read = device.read

    def slow_read(slot: int, key: bytes, pages: Any) -> Any:
        time.sleep(0.05)
        return read(slot, key, pages)

    monkeypatch.setattr(device, "read", slow_read)
    serve(engine, "first", prompt(0, 320))
    fill(engine, range(20, 26))
    serve(engine, "second", prompt(0, 320))
    totals = counters(engine)
    assert totals["loads.done"] >= 1
    assert totals["loads.skipped_slower"] >= 1


def test_nothing_is_left_of_100_workflows(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """R15 and the registry's bound: after all workflows have ended, no lease, run or held block remains."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=20, flash=60))
    for i in range(100):
        engine.add(f"r{i}", prompt(i % 7, 100) + prompt(100 + i, 60), metadata={"workflow_id": f"w{i}"}, max_tokens=2)
        if i % 4 == 3:
            engine.run()
    engine.run()
    engine.settle()
    for i in range(100):
        engine.boundary("workflow_end", f"m{i}", workflow_id=f"w{i}")
    side = engine.connector._scheduler_side
    assert all(usage.used == 0 for usage in side.usage().values())
    assert len(side.lifecycle) == 0
    engine.check_conservation()
    assert np.all([b.ref_cnt == 0 for b in engine.scheduler.kv_cache_manager.block_pool.blocks if not b.is_null])


def answer_of(engine: SimulatedEngine, method: str, **payload: Any) -> dict[str, Any]:
    """One control call, as the API server makes it."""
    return engine.connector.lifetime_call(method, payload)


def test_the_time_of_events_is_measured_and_views_of_an_idle_engine_leave_nothing(
    make_engine: Callable[..., SimulatedEngine],
) -> None:
    engine = make_engine(NUM_BLOCKS, {})
    observations = engine.connector._scheduler_side.recorder.observations
    for _ in range(3):
        answer_of(engine, "tiers")
    assert observations == {}
    engine.boundary("turn_end", "m1", session_id="s")
    [spent_s] = observations["control_call_seconds", ("boundaries",)]
    assert 0 < spent_s < 1


def test_of_a_list_with_an_event_that_is_not_valid_none_is_acted_on(make_engine: Callable[..., SimulatedEngine]) -> None:
    engine = make_engine(NUM_BLOCKS, {})
    serve(engine, "r", prompt(1, 160), max_tokens=1, session_id="s")
    end = {"message_id": "m1", "kind": "session_end", "session_id": "s"}
    with pytest.raises(ValueError, match="kind"):
        answer_of(engine, "boundaries", events=[end, end | {"kind": "unheard_of"}])
    assert answer_of(engine, "session", session_id="s")["session"]["state"] == "active"


def serve_turn(engine: SimulatedEngine, name: str, head: list[int], tail: list[int], **who: Any) -> None:
    """A turn of two requests: the second goes on from the first one's prompt with `tail`."""
    serve(engine, f"{name}-1", head, max_tokens=1, **who)
    serve(engine, f"{name}-2", head + tail, max_tokens=1, **who)


def test_turn_end_frees_the_turn_in_every_tier(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """What the turn added is retired at once wherever it lies, and what the next turn begins with is not."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=30, flash=250))
    head, tail = prompt(1, 160), prompt(2, 320)
    serve_turn(engine, "t", head, tail, session_id="s")
    fill(engine, range(50, 55))
    side = engine.connector._scheduler_side
    before = side.usage()
    segments = answer_of(engine, "session", session_id="s")["session"]["agents"][0]["segments"]
    assert [segment["class"] for segment in segments] == ["reasoning_stripped", "reasoning_laden"]
    below = segments[1]["private_blocks"]
    assert below["host"] + below["flash"] > 0
    outcome = engine.boundary("turn_end", "m1", session_id="s")
    after = side.usage()
    assert outcome["status"] == "accepted"
    assert outcome["blocks"] == sum(after[t].retired - before[t].retired for t in after) == sum(below.values())
    for tier in ("hbm", "host", "flash"):
        assert after[tier].retired - before[tier].retired == below[tier]
    engine.check_conservation()
    assert serve(engine, "t3", head + prompt(3, 64), session_id="s") >= 160


def test_subagent_return_frees_the_parents_blocks(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """R32: private blocks only, in every tier; the lead reads on from the cache."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=30, flash=250))
    top = prompt(1, 96)
    lead = {"session_id": "s", "metadata": {"agent": "lead", "agent_id": "lead"}}
    worker = {"session_id": "s", "metadata": {"agent": "coder", "agent_id": "w1", "parent_agent_id": "lead"}}
    serve(engine, "lead", top + prompt(2, 64), max_tokens=1, **lead)
    serve(engine, "worker", top + prompt(3, 320), max_tokens=1, **worker)
    fill(engine, range(50, 54))
    agents = answer_of(engine, "session", session_id="s")["session"]["agents"]
    assert {agent["segments"][0]["class"] for agent in agents} == {"lead", "worker"}
    outcome = engine.boundary("subagent_return", "m1", session_id="s", agent_id="w1")
    assert outcome["blocks"] >= 20
    engine.check_conservation()
    assert serve(engine, "lead2", top + prompt(2, 64), **lead) >= 144
    assert len(answer_of(engine, "session", session_id="s")["session"]["agents"]) == 1


def test_a_boundary_during_a_request_changes_its_tokens(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """Every kind, at every step of a request, with pressure: the KV that the request reads is checked at each step."""
    kinds = ["turn_end", "compaction", "subagent_return", "workflow_end", "session_end", "subagent_spawn", "session_start"]
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=20, flash=60))
    for round_ in range(8):
        for i in range(3):
            agent = {"agent": "a", "agent_id": f"a{i}", "turn": round_ // 2}
            engine.add(f"r{round_}-{i}", prompt(i, 200) + prompt(10 + round_, 90), 6, session_id=f"s{i}", metadata=agent)
        for step in range(400):
            if not engine.scheduler.has_unfinished_requests():
                break
            kind = kinds[(step + round_) % len(kinds)]
            engine.boundary(kind, f"m{round_}-{step}", session_id=f"s{step % 3}", agent_id=f"a{step % 3}")
            engine.step()
            engine.check_conservation()
        engine.run()
    engine.settle()
    assert {len(tokens) for tokens in engine.outputs.values()} == {6}


def test_a_request_that_wished_it_is_retired_at_once(make_engine: Callable[..., SimulatedEngine]) -> None:
    """`retain_s` outlives the session; `kv.release` and `kv.demote` do what they say; a duplicate does nothing."""
    engine = make_engine(NUM_BLOCKS, {})
    serve(engine, "kept", prompt(1, 160), session_id="s", metadata={"retain_s": 60}, max_tokens=1)
    assert engine.boundary("session_end", "m1", session_id="s")["blocks"] == 0
    serve(engine, "two", prompt(2, 160), session_id="two", max_tokens=1)
    serve(engine, "three", prompt(3, 160), session_id="three", max_tokens=1)

    def hint(action_type: str, message_id: str = "h", **target: Any) -> dict[str, Any]:
        action = {"action_id": "a", "action_type": action_type, "action_version": "1.0", "payload": target}
        outcome: dict[str, Any] = answer_of(engine, "hints", message_id=message_id, actions=[action])["outcomes"][0]
        return outcome

    assert hint("kv.release", "h1", session_id="two")["blocks"] == 10
    assert hint("kv.release", "h1", session_id="three")["status"] == "duplicate"
    assert hint("kv.release", "h2", session_id="two")["status"] == "missing"
    retained = hint("kv.retain", "h3", session_id="three", ttl_s=60, priority=90)
    assert (retained["status"], retained["blocks"]) == ("accepted", 10)
    assert hint("kv.retain", "h31", session_id="three", ttl_s=0) | {"action_id": "a"} == {
        "action_id": "a",
        "status": "accepted",
        "reason": "wishes taken back",
        "blocks": 10,
        "bytes": retained["bytes"],
    }
    assert hint("kv.retain", "h32", session_id="three", ttl_s=60, priority=90)["blocks"] == 10
    assert engine.boundary("session_end", "m2", session_id="three")["blocks"] == 0
    serve(engine, "six", prompt(6, 64), session_id="six", max_tokens=1)
    assert hint("kv.retain", "h33", session_id="six", ttl_s=60)["blocks"] == 4
    assert answer_of(engine, "release", session_id="six", message_id="d")["outcome"]["blocks"] == 4
    serve(engine, "four", prompt(4, 160), session_id="four", max_tokens=1)
    serve(engine, "five", prompt(5, 160), session_id="five", max_tokens=1)
    assert hint("kv.demote", "h4", session_id="five")["blocks"] == 10
    pool = engine.scheduler.kv_cache_manager.block_pool
    first = next(pool.free_list.iter_cached_blocks())
    run = pool.free_list.run_of[first.block_id]
    assert run is not None and {reader.agent.lease.session.session_id for reader in run.readers} == {"five"}
    assert hint("kv.prefetch", "h5", session_id="five")["status"] == "rejected"
    boundary = hint("lifetime.boundary", "h6", kind="session_end", session_id="five")
    assert (boundary["status"], boundary["blocks"]) == ("accepted", 10)
    engine.check_conservation()


def test_session_end_frees_nothing_of_a_prompt_with_cache_control(make_engine: Callable[..., SimulatedEngine]) -> None:
    """A wish of the protocol keeps a lost session's blocks, and what a turn adds; a boundary ends it, but not others' wishes."""
    engine = make_engine(NUM_BLOCKS, {})
    who = {"session_id": "s", "metadata": {"cache_ttl_s": 300}}
    serve_turn(engine, "s", prompt(1, 96), prompt(2, 64), **who)
    serve(engine, "other", prompt(1, 96) + prompt(3, 32), session_id="t", metadata={"cache_ttl_s": 300}, max_tokens=1)
    assert engine.boundary("turn_end", "m1", session_id="s")["blocks"] == 4
    assert engine.boundary("session_end", "m2", session_id="s")["blocks"] == 0
    assert engine.boundary("session_end", "m3", session_id="t")["blocks"] == 8
    engine.check_conservation()


def test_views_disagree_with_the_tiers(make_engine: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """Classes, sessions and counters add up to what the tiers hold."""
    engine = make_engine(NUM_BLOCKS, tiers(tmp_path, host=30, flash=250))
    shared = prompt(9, 96)
    for i in range(4):
        serve_turn(engine, f"t{i}", shared + prompt(i, 64), prompt(20 + i, 64), session_id=f"s{i}")
    engine.settle()
    time.sleep(0.6)  # blocks are counted by class twice a second
    view = answer_of(engine, "tiers")
    sessions = answer_of(engine, "sessions", limit=3, segments=True)
    assert sessions["total"] == 4 and [s["session_id"] for s in sessions["sessions"]] == ["s0", "s1", "s2"]
    assert [s["session_id"] for s in answer_of(engine, "sessions", limit=3, after="s2")["sessions"]] == ["s3"]
    for tier in ("hbm", "host", "flash"):
        classes = view["classes"][tier]
        assert sum(classes.values()) == view["tiers"][tier]["used_blocks"] - view["tiers"][tier].get("held_blocks", 0)
    assert view["classes"]["hbm"]["shared"] == 6
    counters = view["counters"]
    assert counters["requests"] == 8
    assert counters["prompt_tokens"] == 4 * (160 + 224)
    assert counters["hit_tokens"]["hbm"] == sum(engine.cached_tokens.values())
    assert answer_of(engine, "health")["oldest_io_s"] == 0
    assert answer_of(engine, "session", session_id="never")["session"] is None
    outcome = answer_of(engine, "release", session_id="s0", message_id="r")["outcome"]
    assert outcome["blocks"] > 0
    ended = answer_of(engine, "session", session_id="s0")["session"]
    assert ended["state"] == "ended" and ended["held"]["hbm"]["blocks"] == 0
    with pytest.raises(ValueError, match="no call 'nonsense'"):
        answer_of(engine, "nonsense")
