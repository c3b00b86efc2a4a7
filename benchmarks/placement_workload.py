# SPDX-License-Identifier: Apache-2.0
"""Multi-agent sessions in rounds of a logical clock, for `benchmarks.placement`.

A lead takes a user's message, spawns workers that run side by side, has some of them reviewed, reads the results and answers. Its
reasoning is stripped when the next message comes; at the end the session is over (Lachesis sections 3.3 to 3.5). All is laid out
beforehand: which request is sent in which round, and which boundary is posted. A round's requests run together, and when all are
answered the next begins, so that what is alive at the same time depends neither on the server nor on its policy.

Workers are those of `vllm_lifetime.traces.generate_spawns`: what a spawn record shows orders the lifetimes with the paper's
Kendall's tau, and lifetime and volume go together as in the paper.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vllm_lifetime.boundaries import BoundaryKind
from vllm_lifetime.traces.generate_spawns import MEDIAN_LIFETIME_S, PAPER_TAU, generate_spawns
from vllm_lifetime.traces.spawn_schema import SpawnSample

__all__ = [
    "Agent",
    "Contexts",
    "Request",
    "Round",
    "Worker",
    "Workload",
    "WorkloadConfig",
    "generate",
    "lead_id",
    "lifetime_rounds",
    "mean_live_blocks",
    "num_written_blocks",
]

FIRST_TOKEN, LAST_TOKEN = 16, 999
"""Ids that every test model has and that mean nothing special."""

MEDIAN_LIFETIME_ROUNDS = 10
"""Of a worker, from its spawn to its return."""

MAX_LIFETIME_ROUNDS = 80
TRACE_TOKENS_PER_TOKEN = 64
"""A worker of 20,000 tokens, the median of the made-up trace, becomes one of 312."""

TOKENS_PER_REQUEST = 160
"""What one request adds to a worker's context, about."""

MAX_WORKER_TOKENS, MAX_WORKER_REQUESTS = 1200, 10


@dataclass(frozen=True)
class WorkloadConfig:
    """How much of what. Lengths are in tokens, times in rounds."""

    seed: int = 0
    sessions: int = 48
    concurrency: int = 36
    """Sessions at a time, closed loop."""

    turns: int = 2
    min_workers: int = 3
    max_workers: int = 5
    """Of a turn."""

    review_share: float = 0.3
    """Of the workers that a reviewer follows."""

    tau: float = PAPER_TAU
    output_tokens: int = 4
    """Of every answer."""

    task_tokens: int = 160
    message_tokens: int = 48
    instruction_tokens: int = 32
    """What a reviewer is told beside the context that it reads."""

    verdict_tokens: int = 16
    """What comes back to a reviewer from its tool."""

    reviewer_rounds: int = 3
    """From a reviewer's spawn to its return."""

    user_delay_rounds: int = 4


@dataclass(frozen=True)
class Agent:
    """Who sends a request: `parent_id` is None for a lead."""

    session_id: str
    agent_id: str
    role: str
    parent_id: str | None = None


@dataclass(frozen=True)
class Request:
    """One request. Its prompt is, in this order: what it keeps of the agent's context, `answers`, `adds`, what it `reads`."""

    agent: Agent
    turn: int
    index: int
    """Of the agent's requests."""

    adds: tuple[int, ...]
    keeps_tokens: int | None = None
    """Of the agent's own context; None: all."""

    reads: str | None = None
    """The agent whose whole context is copied in."""

    answers: tuple[str, ...] = ()
    """Agents whose latest answer is copied in."""


@dataclass(frozen=True)
class Worker:
    """One worker, as it was laid out."""

    agent: Agent
    sample: SpawnSample
    shown: float
    """What its spawn record shows of its lifetime; higher lives longer."""

    rounds: int
    """Its lifetime."""


@dataclass(frozen=True)
class Round:
    """Boundaries, in order, then requests that are sent together."""

    number: int
    events: tuple[dict[str, Any], ...]
    requests: tuple[Request, ...]


@dataclass(frozen=True)
class Workload:
    """What is sent, round by round; rounds in which nothing happens are left out."""

    config: WorkloadConfig
    rounds: tuple[Round, ...]
    workers: tuple[Worker, ...]

    @property
    def num_requests(self) -> int:
        """Of all rounds."""
        return sum(len(one.requests) for one in self.rounds)


class Contexts:
    """The agents' contexts while a workload is played: prompts are made of what was answered."""

    def __init__(self) -> None:
        self._contexts: dict[str, list[int]] = {}
        self._answers: dict[str, list[int]] = {}

    def prompt(self, request: Request) -> list[int]:
        """The tokens to send."""
        tokens = self._contexts.get(request.agent.agent_id, [])[: request.keeps_tokens]
        for agent_id in request.answers:
            tokens += self._answers[agent_id]
        tokens += request.adds
        return tokens if request.reads is None else tokens + self._contexts[request.reads]

    def record(self, request: Request, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The request was answered."""
        self._contexts[request.agent.agent_id] = [*prompt, *answer]
        self._answers[request.agent.agent_id] = list(answer)


def lifetime_rounds(sample: SpawnSample, num_requests: int = 1) -> int:
    """A worker's lifetime in rounds; each of its requests takes one."""
    rounds = round(sample.lifetime_s / MEDIAN_LIFETIME_S * MEDIAN_LIFETIME_ROUNDS)
    return max(num_requests, min(rounds, MAX_LIFETIME_ROUNDS))


def generate(config: WorkloadConfig, name: str = "session") -> Workload:
    """The workload of a seed; the same arguments give the same one. `name` begins the ids of its sessions."""
    rng = np.random.default_rng([config.seed, 11])
    fan_outs = rng.integers(config.min_workers, config.max_workers, size=(config.sessions, config.turns), endpoint=True)
    spawns = generate_spawns(int(fan_outs.sum()), config.seed, config.tau)
    layout = _Layout(config, rng, iter(zip(spawns.samples, spawns.scores.tolist(), strict=True)))
    # Slots begin one after the other, so that sessions are not all at the same place of their turn.
    stagger = 3 * MEDIAN_LIFETIME_ROUNDS / config.concurrency
    free_at = [round(slot * stagger) for slot in range(config.concurrency)]
    heapq.heapify(free_at)
    for number, fan_out in enumerate(fan_outs.tolist()):
        begins = heapq.heappop(free_at)
        heapq.heappush(free_at, 1 + layout.session(f"{name}-{config.seed}-{number}", begins, fan_out))
    return Workload(config, layout.rounds(), tuple(layout.workers))


def lead_id(session_id: str) -> str:
    """The id of a session's lead."""
    return f"{session_id}/lead"


_ENDS = {BoundaryKind.TURN_END, BoundaryKind.SUBAGENT_RETURN, BoundaryKind.SESSION_END}


@dataclass
class _Layout:
    """Puts sessions on the clock."""

    config: WorkloadConfig
    rng: np.random.Generator
    spawns: Iterator[tuple[SpawnSample, float]]
    workers: list[Worker] = field(default_factory=list)
    _events: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    _requests: dict[int, list[Request]] = field(default_factory=lambda: defaultdict(list))
    _num_requests: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def rounds(self) -> tuple[Round, ...]:
        """All that was laid out. What ends in a round does so before anything begins."""
        return tuple(
            Round(
                number,
                tuple(sorted(self._events.get(number, ()), key=lambda event: event["kind"] not in _ENDS)),
                tuple(self._requests.get(number, ())),
            )
            for number in sorted({*self._events, *self._requests})
        )

    def session(self, session_id: str, begins: int, fan_outs: Sequence[int]) -> int:
        """One session; returns the round in which it ends."""
        config = self.config
        lead = Agent(session_id, lead_id(session_id), "lead")
        base_tokens = 0
        num_spawned = 0
        at = begins
        for turn, fan_out in enumerate(fan_outs):
            num_added = config.message_tokens if turn else config.task_tokens
            # The reasoning of the turn before is gone; its answer stays.
            self._send(at, lead, turn, num_added, keeps_tokens=base_tokens, answers=(lead.agent_id,) if turn else ())
            base_tokens += num_added + (config.output_tokens if turn else 0)
            sub_agents: list[str] = []
            ends = at + 1
            for number in range(fan_out):
                spawned, returned = self._worker(at + 1 + number // 2, lead, turn, num_spawned)
                num_spawned += 1
                sub_agents.append(spawned.agent_id)
                if self.rng.random() < config.review_share:
                    reviewer, returned = self._reviewer(returned, lead, turn, spawned)
                    sub_agents.append(reviewer.agent_id)
                ends = max(ends, returned)
            self._send(ends, lead, turn, config.message_tokens, answers=tuple(sub_agents))
            at = ends + 1
            self._post(at, BoundaryKind.TURN_END, lead, turn=turn)
            at += int(self.rng.poisson(config.user_delay_rounds))
        self._post(at, BoundaryKind.SESSION_END, Agent(session_id, session_id, ""))
        return at

    def _worker(self, at: int, lead: Agent, turn: int, position: int) -> tuple[Agent, int]:
        """A worker that is spawned in round `at`, and the round in which it returns."""
        sample, shown = next(self.spawns)
        signal = sample.signal
        agent = Agent(lead.session_id, f"{lead.session_id}/worker-{position}", signal.agent or "worker", lead.agent_id)
        tokens = min(max(sample.written_tokens // TRACE_TOKENS_PER_TOKEN, 1), MAX_WORKER_TOKENS)
        num_requests = min(max(round(tokens / TOKENS_PER_REQUEST), 2), MAX_WORKER_REQUESTS)
        rounds = lifetime_rounds(sample, num_requests)
        self.workers.append(Worker(agent, replace(sample, signal=replace(signal, position=position)), shown, rounds))
        spawn = {"instruction": signal.instruction, "tools": list(signal.tools), "position": position}
        self._post(at, BoundaryKind.SUBAGENT_SPAWN, agent, spawn=spawn)
        num_added = max(tokens // num_requests - self.config.output_tokens, 1)
        for number in range(num_requests):
            self._send(at + number * rounds // num_requests, agent, turn, num_added)
        self._post(at + rounds, BoundaryKind.SUBAGENT_RETURN, agent)
        return agent, at + rounds

    def _reviewer(self, at: int, lead: Agent, turn: int, worker: Agent) -> tuple[Agent, int]:
        """The reviewer of a worker that has returned in round `at`: it reads the worker's whole context, and judges it."""
        agent = Agent(lead.session_id, f"{worker.agent_id}/reviewer", "reviewer", lead.agent_id)
        rounds = self.config.reviewer_rounds
        self._post(at, BoundaryKind.SUBAGENT_SPAWN, agent)
        self._send(at, agent, turn, self.config.instruction_tokens, reads=worker.agent_id)
        self._send(at + rounds - 1, agent, turn, self.config.verdict_tokens)
        self._post(at + rounds, BoundaryKind.SUBAGENT_RETURN, agent)
        return agent, at + rounds

    def _send(self, at: int, agent: Agent, turn: int, num_added: int, **more: Any) -> None:
        index = self._num_requests[agent.agent_id]
        self._num_requests[agent.agent_id] += 1
        adds = tuple(self.rng.integers(FIRST_TOKEN, LAST_TOKEN, size=num_added, endpoint=True).tolist())
        self._requests[at].append(Request(agent, turn, index, adds, **more))

    def _post(self, at: int, kind: BoundaryKind, agent: Agent, **more: Any) -> None:
        event = {"message_id": f"{agent.agent_id}/{kind}/{at}", "kind": str(kind), "session_id": agent.session_id, **more}
        if kind is not BoundaryKind.SESSION_END:
            event |= {"agent": agent.role, "agent_id": agent.agent_id}
        if agent.parent_id is not None:
            event["parent_agent_id"] = agent.parent_id
        self._events[at].append(event)


class _Played:
    """A workload played without a server: how long contexts get, whatever is answered."""

    def __init__(self, workload: Workload) -> None:
        self._contexts = Contexts()
        self._blank = [FIRST_TOKEN] * workload.config.output_tokens
        self._lengths: dict[str, int] = {}

    def tokens(self, request: Request) -> tuple[int, int, int]:
        """Of a request: what it keeps of its agent's context, its prompt, and both with the answer."""
        agent_id = request.agent.agent_id
        prompt = self._contexts.prompt(request)
        self._contexts.record(request, prompt, self._blank)
        kept = self._lengths.get(agent_id, 0) if request.keeps_tokens is None else request.keeps_tokens
        self._lengths[agent_id] = len(prompt) + len(self._blank)
        return kept, len(prompt), self._lengths[agent_id]


def num_written_blocks(workload: Workload, block_size: int) -> int:
    """Blocks that a workload writes, about: all tokens that are not kept."""
    played = _Played(workload)
    lengths = (played.tokens(request) for one in workload.rounds for request in one.requests)
    return sum(whole - kept for kept, _, whole in lengths) // block_size


def mean_live_blocks(workload: Workload, block_size: int) -> dict[str, float]:
    """Blocks that are alive, by class of segment, mean over the rounds from the first to the last.

    `lead`: what survives a lead's turns; `reasoning`: what a turn adds to it; `worker` and `reviewer`: their contexts.
    """
    played = _Played(workload)
    live: dict[str, dict[str, int]] = {name: {} for name in ("lead", "reasoning", "worker", "reviewer")}
    sums = dict.fromkeys(live, 0)
    before = workload.rounds[0].number
    for one in workload.rounds:
        for name, blocks in live.items():
            sums[name] += sum(blocks.values()) * (one.number - before)
        before = one.number
        for event in one.events:
            if event["kind"] == BoundaryKind.SESSION_END:
                live["lead"].pop(lead_id(event["session_id"]), None)
            elif event["kind"] == BoundaryKind.TURN_END:
                live["reasoning"].pop(event["agent_id"], None)
            elif event["kind"] == BoundaryKind.SUBAGENT_RETURN:
                live[_class_of(event["agent"])].pop(event["agent_id"], None)
        for request in one.requests:
            agent = request.agent
            _, prompt, whole = played.tokens(request)
            num_blocks = math.ceil(whole / block_size)
            if agent.parent_id is not None:
                live[_class_of(agent.role)][agent.agent_id] = num_blocks
                continue
            if request.keeps_tokens is not None:  # a turn begins
                live["lead"][agent.agent_id] = prompt // block_size
            live["reasoning"][agent.agent_id] = num_blocks - live["lead"][agent.agent_id]
    length = workload.rounds[-1].number - workload.rounds[0].number
    return {name: total / max(1, length) for name, total in sums.items()}


def _class_of(role: str) -> str:
    return "reviewer" if role == "reviewer" else "worker"
