# SPDX-License-Identifier: Apache-2.0
"""Sub-agents are scored when they are spawned, and learned from when they return; files of either kind never break a start."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_lifetime.agents import Agent
from vllm_lifetime.boundaries import Boundary, Outcome
from vllm_lifetime.connectors.lifetime import spawn_ranks
from vllm_lifetime.connectors.lifetime.spawn_ranks import SpawnRanks
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.prediction.lifetime_rank import save_base
from vllm_lifetime.prediction.spawn_features import NUM_FEATURES, POSITION


class World:
    """A lifecycle, and ranks beside it, on one clock."""

    def __init__(self, rank_path: Path | None = None, state_path: Path | None = None) -> None:
        self.now_s = 0.0
        self.lifecycle = Lifecycle(lambda _: 0, 1, clock=lambda: self.now_s)
        self.ranks = SpawnRanks(self.lifecycle, rank_path, state_path, clock=lambda: self.now_s)
        self._count = 0

    def send(self, kind: str, agent_id: str, **fields: Any) -> Outcome:
        self._count += 1
        event = Boundary.model_validate(
            {"message_id": f"m{self._count}", "kind": kind, "session_id": "s", "agent": "worker", "agent_id": agent_id} | fields
        )
        return self.ranks.apply(event, self.lifecycle.apply)

    def spawn(self, agent_id: str, length: int = 10, **record: Any) -> float:
        self.send("subagent_spawn", agent_id, spawn={"instruction": "x" * length} | record)
        score = self.ranks.score_of(self.agent(agent_id))
        assert score is not None
        return score

    def agent(self, agent_id: str) -> Agent:
        (agent,) = self.lifecycle.find_agents("s", None, agent_id)
        return agent


def test_with_nothing_learned_the_larger_instruction_is_taken_to_live_longer() -> None:
    world = World()
    assert world.spawn("a", 100) < world.spawn("b", 10_000)


def test_a_worker_that_was_not_announced_has_no_score() -> None:
    world = World()
    event = Boundary(message_id="m", kind="session_start", session_id="s")
    assert world.ranks.apply(event, world.lifecycle.apply).status == "accepted"
    (agent,) = world.lifecycle.find_agents("s", None, None)
    assert world.ranks.score_of(agent) is None
    assert world.send("subagent_return", "nobody").status == "ignored"


def test_what_returned_is_learned_from() -> None:
    world = World()
    for number in range(40):
        short, long = f"short-{number}", f"long-{number}"
        world.spawn(short, 500, tools=["grep"])
        world.spawn(long, 500, tools=["bash"])
        world.now_s += 5.0
        world.send("subagent_return", short)
        world.now_s += 300.0
        world.send("subagent_return", long)
    assert world.ranks.rank.num_observed == 80 and len(world.ranks) == 0
    assert world.spawn("a", 500, tools=["grep"]) < world.spawn("b", 500, tools=["bash"])


def test_a_spawn_that_is_told_twice_keeps_its_first_time_and_score() -> None:
    world = World()
    score = world.spawn("a", 100)
    world.now_s = 50.0
    assert world.spawn("a", 9000) == score
    world.now_s = 60.0
    world.send("subagent_return", "a")
    ((_, target),) = world.ranks.rank._kept
    assert np.exp(target) == pytest.approx(60.0)


def test_spawns_that_never_return_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn_ranks, "MAX_SPAWNED", 3)
    world = World()
    for number in range(10):
        world.spawn(f"w{number}")
    assert len(world.ranks) == 3
    assert world.ranks.score_of(world.agent("w0")) is None and world.ranks.score_of(world.agent("w9")) is not None


def test_a_trained_file_is_used_and_a_wrong_one_is_a_warning(tmp_path: Path) -> None:
    weights = np.zeros(NUM_FEATURES)
    weights[POSITION] = -1.0
    save_base(tmp_path / "rank.npz", weights, {})
    world = World(rank_path=tmp_path / "rank.npz")
    assert world.spawn("a", 100, position=9) < world.spawn("b", 100, position=1)
    (tmp_path / "rank.npz").write_text("no")
    for path in (tmp_path / "rank.npz", tmp_path / "missing.npz"):
        world = World(rank_path=path)
        assert world.spawn("a", 100) < world.spawn("b", 10_000)


def test_what_was_learned_is_there_after_a_restart(tmp_path: Path) -> None:
    world = World(state_path=tmp_path / "state.json")
    world.spawn("a")
    world.now_s = 7.0
    world.send("subagent_return", "a")
    world.ranks.shutdown()
    again = World(state_path=tmp_path / "state.json")
    assert again.ranks.rank.num_observed == 1
    assert (again.ranks.rank.weights == world.ranks.rank.weights).all()
    again.ranks.shutdown()
    (tmp_path / "state.json.rank").write_text('{"format": "vllm-lifetime learned state", "version": 1, "parts": {"rank": "{}"}}')
    damaged = World(state_path=tmp_path / "state.json")
    assert damaged.ranks.rank.num_observed == 0
    damaged.ranks.shutdown()
