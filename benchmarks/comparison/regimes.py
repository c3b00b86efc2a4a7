# SPDX-License-Identifier: Apache-2.0
"""The workloads of a comparison: one where keeping the right cache should pay, and some where it should not, or may even harm."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.comparison.settings import ServerSettings
from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.plan import Plan, make_plan
from vllm_lifetime.simulate.schedule import mean_final_context_blocks
from vllm_lifetime.traces.generate import generate_workload
from vllm_lifetime.traces.read import read_trace
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

__all__ = ["REGIMES", "Regime", "Work", "hostile", "uniform_reuse", "work_of"]

CONCURRENCY = 8
DYNAMIC = "hover-langchain"
PRESSURE = 1.7
"""HBM with which stock vLLM's hit rate is in the range of PBKV Table 1."""
LONGEST_TOKENS = 60_000
"""Of a recorded request that a short run can replay."""
PLENTY = 4.0
"""HBM with which nothing is evicted that is read again."""


@dataclass(frozen=True)
class Regime:
    """A kind of workload, and what it is about.

    `capacity`: HBM, as a multiple of what `concurrency` workflows' final contexts take; host memory and disk as shares of HBM.
    `goal`: what is asked of our `lifetime` beyond more than LMCache's: a "gain" over stock of the size that the paper reports,
    "parity" with stock where nothing is to be gained, or nothing ("").
    """

    name: str
    title: str
    capacity: float
    tokens_per_block: int
    systems: tuple[str, ...]
    names_requests: bool = True
    time_scale: float = 0.02
    host_share: float = 0.125
    disk_share: float = 0.125
    goal: Literal["gain", "parity", ""] = "parity"


_ALL = ("vllm", "lmcache", "offloading", "lru", "lifecycle", "hierarchical", "lifetime")
_LOSING = ("vllm", "lru", "lifetime")

REGIMES: dict[str, Regime] = {
    regime.name: regime
    for regime in (
        Regime("dynamic", "dynamic workflows (PBKV 6.1, HoVer), HBM under pressure", PRESSURE, 8, _ALL, goal="gain"),
        Regime(
            "large-tiers",
            "dynamic workflows, HBM under pressure, everything fits below",
            *(PRESSURE, 8, ("vllm", "lmcache", "lru", "lifetime")),
            host_share=2.0,
            disk_share=2.0,
            goal="",
        ),
        Regime("real", "recorded coding-agent sessions", 0.4, 3, _ALL, goal=""),
        Regime("fits", "dynamic workflows, everything fits into HBM", PLENTY, 8, _LOSING),
        Regime("no-metadata", "dynamic workflows, nothing said", PRESSURE, 8, _LOSING, names_requests=False),
        Regime("uniform", "every prompt as likely as any other", 3.0, 8, _LOSING),
        Regime("hostile", "dynamic workflows, wrong agents and wrong boundaries", PRESSURE, 8, _LOSING),
    )
}


@dataclass(frozen=True)
class Work:
    """What every system is sent, in the same order."""

    plan: Plan
    pace: Pace
    names_requests: bool
    working_set_tokens: float
    """What `concurrency` sessions' final contexts take together."""

    def again(self, turn: int) -> "Work":
        """The same sessions under other names and with other tokens, for a server that has seen those of other turns."""
        named = [
            replace(session, trace=replace(session.trace, session_id=f"{session.trace.session_id}-{turn}"))
            for session in self.plan.sessions
        ]
        tokens = replace(self.plan.tokens, seed=self.plan.tokens.seed + turn)
        return replace(self, plan=replace(self.plan, sessions=tuple(named), tokens=tokens))


def work_of(regime: Regime, *, workflows: int, seed: int, path: Path | None, format: str) -> Work:
    """The sessions of `regime`. `path`: of the recorded sessions, for `real`. Raises `TraceError`, `ValueError`, `OSError`."""
    if regime.name == "real":
        if path is None:
            raise ValueError("--regime real needs --trace, a file or folder of recorded sessions")
        trace = read_trace(path, format)
        # As long as the test model takes, the block that a prompt ends in included.
        longest_tokens = (ServerSettings.max_model_len // regime.tokens_per_block - 1) * trace.block_size_tokens
        trace = _short_sessions(trace, workflows, seed, longest_tokens=min(LONGEST_TOKENS, longest_tokens))
    elif regime.name == "uniform":
        trace = uniform_reuse(workflows, seed)
    else:
        trace = generate_workload(DYNAMIC, workflows, seed)
        if regime.name == "hostile":
            trace = hostile(trace, seed)
    plan = make_plan(trace, tokens_per_block=regime.tokens_per_block, seed=seed)
    at_a_time = min(CONCURRENCY, len(plan.sessions))
    pace = Pace(concurrency=at_a_time, time_scale=regime.time_scale, idle_cap_s=60.0)
    return Work(plan, pace, regime.names_requests, at_a_time * mean_final_context_blocks(trace) * regime.tokens_per_block)


def hostile(trace: Trace, seed: int) -> Trace:
    """The same requests, of which nothing that is said is true.

    Each names an agent at random, and is announced as a compaction and followed by the end of its turn.
    """
    roles = sorted({request.agent for session in trace.sessions for request in session.requests})
    draw = random.Random(seed)

    def lie(request: TraceRequest) -> TraceRequest:
        agent = draw.choice(roles)
        return replace(request, agent=agent, agent_id=agent, compacts=True, ends_turn=True)

    sessions = [replace(session, requests=tuple(lie(request) for request in session.requests)) for session in trace.sessions]
    return replace(trace, sessions=tuple(sessions))


def uniform_reuse(sessions: int, seed: int, *, prompts: int = 48, blocks: int = 96, requests: int = 20) -> Trace:
    """`sessions` agents that ask `requests` times, each time one of `prompts` prompts of `blocks` blocks, drawn anew.

    No past tells anything of the future, so no order of eviction is better than another.
    """
    draw = random.Random(seed)

    def ask(index: int) -> TraceRequest:
        first = draw.randrange(prompts) * blocks
        ids = np.arange(first, first + blocks, dtype=np.int64)
        return TraceRequest(ids, index - 1, 0.0, 1.0, blocks * 64 + 32, 128, agent_id="agent")

    made = [TraceSession(f"uniform-{number}", tuple(ask(index) for index in range(requests))) for number in range(sessions)]
    return Trace("uniform reuse", 64, tuple(made))


def _short_sessions(
    trace: Trace, count: int, seed: int, *, longest_tokens: int, fewest: int = 8, most: int = 40
) -> Trace:
    """`count` sessions of a length that a short run can replay, drawn at random."""
    fitting = [
        session
        for session in trace.sessions
        if fewest <= len(session.requests) <= most
        and max(r.input_tokens + r.output_tokens for r in session.requests) <= longest_tokens
    ]
    if not fitting:
        raise ValueError(f"{trace.name}: no session has {fewest} to {most} requests of at most {longest_tokens:,} tokens each")
    random.Random(seed).shuffle(fitting)
    return replace(trace, name=f"{trace.name}, {min(count, len(fitting))} sessions", sessions=tuple(fitting[:count]))
