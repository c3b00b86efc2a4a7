# SPDX-License-Identifier: Apache-2.0
"""Requests without metadata beside the scorer, on vLLM's own scheduler."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from simulated_engine import SimulatedEngine, prompt, serve, tiers

from vllm_lifetime.hints import DEFAULT_PRIORITY
from vllm_lifetime.policy import shadow

NUM_BLOCKS = 96
SCORED = {"eviction_policy": "lifetime"}


def order_of(engine: SimulatedEngine) -> list[int]:
    """The blocks in the order in which they would be handed out."""
    return [block.block_id for block in engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()]


def test_the_scorer_changes_the_order_without_metadata(make_engine: Callable[..., SimulatedEngine]) -> None:
    """Block by block as stock vLLM, though the scorer is on."""
    engines = [make_engine(NUM_BLOCKS, SCORED), make_engine(NUM_BLOCKS)]
    assert engines[0].connector._scheduler_side.forecasting is not None
    for number in range(16):
        tokens = prompt(number % 5, 100 + 40 * number)
        cached = [serve(engine, f"r{number}", tokens) for engine in engines]
        assert cached[0] == cached[1]
        assert order_of(engines[0]) == order_of(engines[1])


def mixed_hit_rates(engine: SimulatedEngine) -> dict[str, float]:
    """Half of the requests are turns of chats without metadata, with one system prompt; the others steps of named workflows."""
    rng = random.Random(1)
    hits: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    chats: list[list[int]] = []
    # Agents and how much of its own context each has by now, per workflow.
    workflows: list[tuple[int, int]] = []
    for number in range(240):
        if number % 2:
            if not chats or (len(chats) < 5 and rng.random() < 0.3):
                chats.append(prompt(-1, 64))
            index = rng.randrange(len(chats))
            chats[index] = chats[index] + prompt(number, 40)
            kind, request, who = "unnamed", chats[index], {}
            if rng.random() < 0.2:
                del chats[index]
        else:
            if len(workflows) < 4:
                workflows.append((number, 0))
            index = rng.randrange(len(workflows))
            first, step = workflows[index]
            # Each plans once, and its writer goes on.
            agent = "writer" if step else "planner"
            kind, request = "named", prompt(-2 - bool(step), 48) + prompt(1000 + first + bool(step), 120 + 24 * step)
            who = {"session_id": f"s{first}", "metadata": {"agent": agent}}
            workflows[index] = (first, step + 1)
        hits[kind] += serve(engine, f"r{number}", request, max_tokens=1, **who)  # type: ignore[arg-type]
        tokens[kind] += len(request)
        if kind == "named" and workflows[index][1] == 6:
            engine.boundary("session_end", f"end {first}", session_id=f"s{first}")
            del workflows[index]
    engine.check_conservation()
    return {kind: hits[kind] / tokens[kind] for kind in tokens}


def test_a_server_without_metadata_in_half_of_its_requests_has_fewer_hits(make_engine: Callable[..., SimulatedEngine]) -> None:
    """`lifetime` gives the unnamed half what `lru` gives it, and the named half more."""
    lru = mixed_hit_rates(make_engine(NUM_BLOCKS, {"eviction_policy": "lru"}))
    lifetime = mixed_hit_rates(make_engine(NUM_BLOCKS, SCORED))
    for kind in lru:
        print(f"hit rate of the {kind} half: lru {lru[kind]:.3f}, lifetime {lifetime[kind]:.3f}")
    assert lifetime["unnamed"] > lru["unnamed"] - 0.02
    assert lifetime["named"] > lru["named"] + 0.03


def test_a_live_session_keeps_hbm_from_requests_without_metadata(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, counters: Callable[[SimulatedEngine], Counter[str]]
) -> None:
    """As in LRU, what was used least recently goes down, though it is named: it comes back from the host tier."""
    engine = make_engine(24, SCORED | tiers(tmp_path, host=64, flash=0))
    named = prompt(1, 160)
    serve(engine, "first", named, session_id="s")
    engine.settle()
    for number in range(4):
        serve(engine, f"filler {number}", prompt(10 + number, 160), max_tokens=1)
        engine.settle()
    # The latest filler is still in HBM.
    assert serve(engine, "filler again", prompt(13, 160), max_tokens=1) >= 144
    assert serve(engine, "second", named, session_id="s") == 144
    engine.settle()
    totals = counters(engine)
    assert totals["loads.done"] == 1 and totals["hit_blocks.host"] == 9
    engine.check_conservation()


def test_short_prompts_without_metadata_are_starved_in_a_large_pool(
    make_engine: Callable[..., SimulatedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool is sampled more coarsely the larger it is: 25 prompts of six blocks beside sessions that grow."""

    def hit_rate(policy: str, stride: int) -> float:
        monkeypatch.setattr(shadow, "MIN_SAMPLE", 512 // stride)
        engine = make_engine(512, {"eviction_policy": policy})
        rng = random.Random(5)
        hits = total = 0
        sessions: dict[int, list[int]] = {}
        for number in range(270):
            if number % 3 == 0:
                tokens = prompt(rng.randrange(25), 96) + prompt(9000 + number, 8)
                hits += serve(engine, f"unnamed {number}", tokens, max_tokens=1)
                total += len(tokens)
                continue
            index = rng.randrange(12)
            tokens = sessions.get(index, prompt(100 + index, 160)) + prompt(20_000 + number, 60)
            sessions[index] = tokens if len(tokens) < 1100 else prompt(100 + index, 160)
            serve(engine, f"named {number}", tokens, max_tokens=1, session_id=f"s{index}", metadata={"agent": "coder"})
        return hits / total

    assert hit_rate("lifetime", 16) > hit_rate("lru", 1) - 0.05


def test_what_is_kept_by_wish_with_a_high_priority_goes_before_the_rest(make_engine: Callable[..., SimulatedEngine]) -> None:
    engine = make_engine(NUM_BLOCKS, SCORED)
    serve(engine, "unnamed", prompt(9, 160), max_tokens=1)
    for name, priority in (("high", 100), ("usual", DEFAULT_PRIORITY)):
        serve(engine, name, prompt(len(name), 320), max_tokens=1, session_id=name)
        wish = {"session_id": name, "ttl_s": 600.0, "priority": priority}
        action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": wish}
        engine.connector.lifetime_call("hints", {"message_id": name, "actions": [action]})
        engine.boundary("session_end", f"end {name}", session_id=name)
    for number in range(3):
        serve(engine, f"other {number}", prompt(50 + number, 320), max_tokens=1)
    high, usual = (serve(engine, f"{name} again", prompt(len(name), 320), max_tokens=1) for name in ("high", "usual"))
    assert high == 304 > usual
    engine.check_conservation()
