# SPDX-License-Identifier: Apache-2.0
"""A small node and small sessions, so that a run takes milliseconds."""

import numpy as np

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement import PlacementConfig
from vllm_lifetime.simulate.hbf.ablations import POLICIES
from vllm_lifetime.simulate.hbf.node import NO_LOG, NodeRun
from vllm_lifetime.simulate.hbf.replay_trace import Program, ReplayTrace, Request, build_trace
from vllm_lifetime.simulate.hbf.state import POLICY_NUMBERS, DecisionLog, Node

CONFIG = PlacementConfig()


def node(policy: str = "hbm_first", hbm: int = 20_000, flash: int = 200_000, **changes: object) -> Node:
    """Steps of about 10 ms."""
    values: dict[str, object] = {
        "hbm_tokens": hbm,
        "flash_tokens": flash,
        "step_s": 0.01,
        "read_s": 1e-9,
        "flush_s": 1e-7,
        "program_s": 1e-4,
        "full_share": 1.0,
        "chunk_tokens": 8192.0,
        "policy": POLICY_NUMBERS[policy],
        "frees_at_boundary": POLICIES[policy].frees_at_boundary,
        "evicts_per_tier": getattr(POLICIES[policy], "evicts_per_tier", False),
        "lease_s": 20.0,
        "growth": CONFIG.growth,
        "reserve_share": CONFIG.max_reserve_share,
        "reserve_deviations": CONFIG.reserve_deviations,
    }
    return Node(**(values | changes))


def worker(prefill: int, decode: int, rounds: int = 1, **more: object) -> Program:
    requests = [Request(prefill, decode, wait_s=0.1 if i else 0.0, ttft_s=0.1) for i in range(rounds)]
    return Program(SegmentClass.WORKER, requests, **more)


def multi_agent(random: np.random.Generator, sessions: int = 40) -> ReplayTrace:
    """Leads with one to three workers at a time, each with a reviewer."""
    roots = []
    for _ in range(sessions):
        lead = Program(SegmentClass.LEAD)
        for _ in range(int(random.integers(1, 4))):
            children = []
            for _ in range(int(random.integers(1, 4))):
                rounds = int(random.integers(1, 6))
                child = worker(int(random.integers(1, 400)), int(random.integers(1, 120)), rounds, shared_tokens=50)
                child.score = float("nan") if random.random() < 0.1 else rounds + float(random.normal())
                child.expected_tokens = 600.0
                child.successor = Program(SegmentClass.REVIEWER, [Request(child.tokens // 3 + 1, 20, ttft_s=0.1)])
                children.append(child)
            lead.requests.append(Request(60, 30, ttft_s=0.1, children=children))
        lead.requests.append(Request(60, 30, ttft_s=0.1))
        roots.append(lead)
    return build_trace(roots, 0.2)


def dialogues(random: np.random.Generator, sessions: int = 40) -> ReplayTrace:
    """Single agents: turns that die, and what stays of them."""
    roots = []
    for _ in range(sessions):
        session = Program(SegmentClass.REASONING_STRIPPED, shared_tokens=100)
        for _ in range(int(random.integers(1, 6))):
            turn = Program(SegmentClass.REASONING_LADEN, shared_tokens=100, reads_parent=True)
            turn.requests = [Request(int(random.integers(1, 200)), int(random.integers(1, 90)), ttft_s=0.1) for _ in range(3)]
            session.requests.append(
                Request(int(random.integers(1, 150)), 0, wait_s=float(random.exponential(2.0)), children=[turn])
            )
        roots.append(session)
    return build_trace(roots, 0.2)


def started(setup: Node, trace: ReplayTrace, sessions: int, log: DecisionLog = NO_LOG, boundary_loss: float = 0.0) -> NodeRun:
    return NodeRun(setup, trace, sessions, 0, CONFIG, log, ramp_s=1.0, boundary_loss=boundary_loss)
