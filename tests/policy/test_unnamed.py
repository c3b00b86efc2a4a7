# SPDX-License-Identifier: Apache-2.0
"""`lifetime` and requests without metadata: never worse off than in LRU, beside those who name themselves and alone."""

import heapq
import itertools
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.simulate.simulate_testing import BlockCache, Prefixes, contents
from vllm_lifetime.agents import Reading
from vllm_lifetime.boundaries import Boundary, BoundaryKind, RequestMetadata
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.policy.eviction import EVICTION_POLICIES
from vllm_lifetime.policy.ranking import LAST_RANK
from vllm_lifetime.policy.scorer import Scorer
from vllm_lifetime.policy.shadow import ShadowLru, sample_stride
from vllm_lifetime.pool.access import Path
from vllm_lifetime.pool.runs import ACTIVE_RANK
from vllm_lifetime.prediction.next_use import NextUseModel
from vllm_lifetime.prediction.online import OnlineMarkov

Blocks = NDArray[np.int64]


def keys_of(path: Blocks) -> list[bytes]:
    return [number.to_bytes(8, "little") for number in path.tolist()]


class Server:
    """The real pool of one tier with the real lifecycle and scorer, in simulated time. `lru` knows nobody's name."""

    def __init__(self, policy: str, num_blocks: int) -> None:
        self.now = 0.0
        self.cache = BlockCache(num_blocks)
        self.knows_names = policy != "lru"
        self.lifecycle = Lifecycle(
            lambda reader: sum(self.cache.access.end(reader)), block_bytes=1, hash_tokens=16, clock=lambda: self.now
        )
        self.scorer = None
        if EVICTION_POLICIES[policy].needs_scorer:
            self.scorer = Scorer(
                self.cache.access,
                EVICTION_POLICIES[policy],
                OnlineMarkov(),
                NextUseModel(),
                lambda: self.now,
                slow_prediction_s=math.inf,
            )
        self._ids = itertools.count()

    def start(self, path: Blocks, session: str | None = None, agent: str | None = None) -> tuple[int, Any]:
        """Returns how many blocks were hit, and what `finish` wants."""
        reading = None
        if session is not None and self.knows_names:
            reading = self.lifecycle.start_request(session, RequestMetadata(agent=agent), keys_of(path))
        access_path = Path(None)
        if reading is not None:
            boundary = len(path) if reading.boundary_blocks is None else reading.boundary_blocks
            access_path = Path(reading.prompt, reading.output, boundary)
        if self.scorer is not None:
            if reading is None:
                self.scorer.ranking.start_unnamed()
            else:
                self.scorer.start_request(reading)
            self.use(path)
            self.scorer.advance()
        hit, blocks = self.cache.start(path, access_path)
        if reading is not None:
            self.lifecycle.has_read(reading)
        return hit, (path, reading, blocks)

    def use(self, path: Blocks) -> None:
        if self.scorer is not None:
            self.scorer.ranking.use(self.scorer.ranking.sample(keys_of(path)))

    def finish(self, request: tuple[Blocks, Reading | None, list[Any]]) -> None:
        path, reading, blocks = request
        self.use(path)
        if reading is not None:
            if self.scorer is not None:
                self.scorer.finish_request(reading, None, "stop")
            self.lifecycle.finish_request(reading, keys_of(path))
        self.cache.finish(blocks)

    def end(self, session: str) -> None:
        if not self.knows_names:
            return
        if self.scorer is not None:
            self.scorer.end_workflow(session, (session, None))
        event = Boundary(message_id=str(next(self._ids)), kind=BoundaryKind.SESSION_END, session_id=session)
        self.lifecycle.apply(event)


Session = tuple[float, str | None, list[tuple[float, str | None, Blocks]]]
"""When it begins, its name, and per request: the pause before it, its agent, its prompt."""


def mixed_load(seed: int, until_s: float, chats_per_s: float, workflows_per_s: float, named_chats: float) -> list[Session]:
    """Chats with one system prompt, of which so large a share is named (but never ended); workflows of three agents."""
    rng = random.Random(seed)
    ids = itertools.count()

    def new(count: int) -> Blocks:
        return np.array([next(ids) for _ in range(count)], np.int64)

    def arrivals(rate: float) -> list[float]:
        times = itertools.accumulate(iter(lambda: rng.expovariate(rate), None))
        return list(itertools.takewhile(lambda at: at < until_s, times))

    sessions: list[Session] = []
    system = new(12)
    for number, at in enumerate(arrivals(chats_per_s)):
        path, turns = system, []
        for turn in range(1 + min(40, int(rng.expovariate(1 / 7)))):
            path = np.concatenate([path, new(rng.randint(3, 9))])
            turns.append((rng.lognormvariate(math.log(40.0), 0.8) if turn else 0.0, None, path))
        sessions.append((at, f"chat {number}" if rng.random() < named_chats else None, turns))
    prompts = {agent: new(8) for agent in ("planner", "coder", "tester")}
    for number, at in enumerate(arrivals(workflows_per_s)):
        contexts: dict[str, Blocks] = {}
        steps, agent = [], "planner"
        for step in range(8):
            context = contexts.get(agent)
            if context is None:
                context = np.concatenate([prompts[agent], new(6)])
            contexts[agent] = context = np.concatenate([context, new(rng.randint(4, 12))])
            steps.append((rng.lognormvariate(math.log(6.0), 0.8) if step else 0.0, agent, context))
            again = rng.random()
            agent = {"planner": "coder", "coder": "tester" if again < 0.6 else "coder"}.get(agent) or (
                "coder" if again < 0.8 else "planner"
            )
        sessions.append((at, f"workflow {number}", steps))
    return sorted(sessions, key=lambda session: session[0])


def hit_rates(sessions: list[Session], policy: str, num_blocks: int) -> dict[str, float]:
    """Of what is unnamed, of named chats and of workflows; requests take two seconds each."""
    server = Server(policy, num_blocks)
    hits: Counter[str] = Counter()
    blocks: Counter[str] = Counter()
    order = itertools.count()
    events: list[tuple[float, int, int, int, Any]] = [(at, next(order), i, 0, None) for i, (at, _, _) in enumerate(sessions)]
    heapq.heapify(events)
    while events:
        server.now, _, index, step, running = heapq.heappop(events)
        _, name, requests = sessions[index]
        _, agent, path = requests[step]
        if running is None:
            if not server.cache.fits(path):
                heapq.heappush(events, (server.now + 1.0, next(order), index, step, None))
                continue
            hit, running = server.start(path, name, agent)
            kind = "unnamed" if name is None else name.split()[0]
            hits[kind] += hit
            blocks[kind] += len(path)
            heapq.heappush(events, (server.now + 2.0, next(order), index, step, running))
            continue
        server.finish(running)
        if step + 1 < len(requests):
            heapq.heappush(events, (server.now + requests[step + 1][0], next(order), index, step + 1, None))
        elif name is not None and name.startswith("workflow"):
            server.end(name)
    return {kind: hits[kind] / blocks[kind] for kind in blocks}


@pytest.mark.parametrize("named_chats", [0.0, 0.5])
def test_traffic_without_metadata_starves_beside_named_traffic(named_chats: float) -> None:
    """Unnamed chats keep what LRU gives them, though named workflows, or named chats that are never ended, have scores."""
    rates = (0.2, 0.4) if not named_chats else (0.3, 0.2)
    sessions = mixed_load(1, 300.0, *rates, named_chats)
    lru, lifetime = (hit_rates(sessions, policy, 1500) for policy in ("lru", "lifetime"))
    for kind in lru:
        print(f"named chats {named_chats:.0%}: hit rate of {kind}: lru {lru[kind]:.3f}, lifetime {lifetime[kind]:.3f}")
    assert lifetime["unnamed"] > lru["unnamed"] - 0.02
    named = "chat" if named_chats else "workflow"
    assert lifetime[named] > lru[named] + 0.05


@settings(max_examples=50, deadline=None)
@given(data=st.data(), num_blocks=st.integers(6, 16))
def test_requests_without_metadata_alone_are_not_plain_lru(data: st.DataObject, num_blocks: int) -> None:
    """Hits and evictions are LRU's, block for block."""
    prefixes = Prefixes()
    servers = (Server("lru", num_blocks), Server("lifetime", num_blocks))
    running: list[tuple[Any, Any]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        for server in servers:
            server.now += 1.0
        if running and data.draw(st.booleans()):
            for server, request in zip(servers, running.pop(data.draw(st.integers(0, len(running) - 1))), strict=True):
                server.finish(request)
            continue
        path = prefixes.blocks(data.draw(contents))
        if servers[0].cache.fits(path):
            (hits, one), (expected, other) = (server.start(path) for server in servers)
            running.append((one, other))
            assert hits == expected
        assert servers[0].cache.evicted == servers[1].cache.evicted
        assert servers[0].cache.by_id.keys() == servers[1].cache.by_id.keys()


def test_named_traffic_alone_is_ranked_otherwise_than_before() -> None:
    """Before the first request without metadata nothing is simulated, and what has no score stays below what has one."""
    server = Server("lifetime", 16)
    for number in range(8):
        server.finish(server.start(np.arange(number * 4, number * 4 + 4), f"session {number}", "planner")[1])
    assert server.scorer is not None
    assert server.scorer.ranking.sample(keys_of(np.arange(4))) == ()
    assert server.cache.free_list.common_rank is ACTIVE_RANK


def test_what_is_unnamed_goes_last_until_lru_would_have_evicted_it() -> None:
    server = Server("lifetime", 16)
    free_list = server.cache.free_list

    def serve(first: int, session: str | None) -> None:
        server.finish(server.start(np.arange(first, first + 4), session, "planner")[1])

    for first, session in ((4, "one"), (0, None), (8, "two"), (12, "three")):
        serve(first, session)
    serve(16, "four")
    # LRU would have made room with the first session's.
    assert free_list.common_rank is LAST_RANK
    assert len(server.cache.evicted) == 4 and set(server.cache.evicted).isdisjoint(range(4))
    serve(20, "five")
    # LRU would have evicted what was unnamed now.
    assert set(server.cache.evicted[4:]) == set(range(4))
    serve(0, None)
    assert free_list.common_rank is LAST_RANK


@given(limit=st.integers(1, 8), prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True), max_size=20))
def test_the_shadow_is_not_lru(limit: int, prompts: list[list[int]]) -> None:
    shadow = ShadowLru(limit, 1)
    used: list[bytes] = []
    for prompt in prompts:
        keys = [bytes([number]) for number in prompt]
        shadow.use(keys)
        for key in reversed(keys):
            used = [other for other in used if other != key] + [key]
        used = used[-limit:]
        assert len(shadow) == len(used) and all(key in shadow for key in used)


def test_the_sample_of_a_large_cache_grows_without_bound() -> None:
    assert [sample_stride(num_blocks) for num_blocks in (1, 4000, 8192, 30_000, 10_000_000)] == [1, 1, 4, 14, 16]
