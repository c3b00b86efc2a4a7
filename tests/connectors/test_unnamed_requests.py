# SPDX-License-Identifier: Apache-2.0
"""Requests without metadata under the default policy, on vLLM's own scheduler."""

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from simulated_engine import SimulatedEngine, prompt, serve, tiers

NUM_BLOCKS = 96


def order_of(engine: SimulatedEngine) -> list[int]:
    """The blocks in the order in which they would be handed out."""
    return [block.block_id for block in engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()]


def test_the_default_policy_changes_the_order_without_metadata(make_engine: Callable[..., SimulatedEngine]) -> None:
    """Block by block as stock vLLM, though the scorer is on."""
    engines = [make_engine(NUM_BLOCKS, {}), make_engine(NUM_BLOCKS)]
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
    lifetime = mixed_hit_rates(make_engine(NUM_BLOCKS, {"eviction_policy": "lifetime"}))
    for kind in lru:
        print(f"hit rate of the {kind} half: lru {lru[kind]:.3f}, lifetime {lifetime[kind]:.3f}")
    assert lifetime["unnamed"] > lru["unnamed"] - 0.02
    assert lifetime["named"] > lru["named"] + 0.03


def test_a_live_session_keeps_hbm_from_requests_without_metadata(
    make_engine: Callable[..., SimulatedEngine], tmp_path: Path, counters: Callable[[SimulatedEngine], Counter[str]]
) -> None:
    """As in LRU, what was used least recently goes down, though it is named: it comes back from the host tier."""
    engine = make_engine(24, tiers(tmp_path, host=64, flash=0))
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
