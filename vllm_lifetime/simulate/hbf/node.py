# SPDX-License-Identifier: Apache-2.0
"""One run: a model on a configuration, a number of sessions, a policy; and how many sessions an SLO admits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.policy.placement import PlacementConfig
from vllm_lifetime.policy.placement.lachesis_no_predictive import tier_of_class
from vllm_lifetime.simulate.hbf.ablations import POLICIES
from vllm_lifetime.simulate.hbf.hardware import Device, Model
from vllm_lifetime.simulate.hbf.kernel import ERRORS, NO_ROOM, OK, run_until, start_sessions
from vllm_lifetime.simulate.hbf.replay_trace import CLASSES, ReplayTrace
from vllm_lifetime.simulate.hbf.state import (
    EVICTED,
    NOW,
    POLICY_NUMBERS,
    SESSIONS_ENDED,
    STEP_BIN_S,
    STEPS,
    DecisionLog,
    Node,
    State,
    make_state,
)

__all__ = ["ADMISSION_POLICY", "DEFAULT_LEASE_S", "Measurement", "NodeRun", "SimulationError", "admit_sessions", "make_node"]

ADMISSION_POLICY = "hbm_first"
"""The policy under which sessions are admitted; all others then serve as many."""

MOST_LIVE = 0.7
"""Part of both tiers that live KV may take on average when sessions are admitted; the rest is for its swings. No cell of the
paper comes near it."""

MAX_SESSIONS = 4096
MAX_DEAD_SEGMENTS = 1 << 18
NO_LOG = DecisionLog(np.zeros((0, 4), np.int64))
MAX_STEPS = 20_000_000
MOST_LOST = 1 << 14
"""Segments whose boundary was lost that are remembered at a time; beyond that, the oldest is freed before its lease is over."""

DEFAULT_LEASE_S = 600.0
NUM_ROUNDS = 16
"""How often the sessions are shuffled anew before the order repeats."""


class SimulationError(ValueError):
    """A run cannot be made or has broken its own rules; says why."""


def make_node(
    device: Device,
    configuration: str,
    model: Model,
    policy: str,
    config: PlacementConfig,
    *,
    lease_s: float = DEFAULT_LEASE_S,
) -> Node:
    """What the compiled loop needs. `lease_s`: when a segment is freed whose boundary was lost. Raises ValueError."""
    if policy not in POLICY_NUMBERS:
        raise SimulationError(f"unknown policy {policy!r}; there are {', '.join(POLICY_NUMBERS)}")
    split = device.configuration(configuration)
    kv_bytes = model.kv_per_token.value
    hbm = device.hbm_kv_bytes(split)
    flash = device.flash_kv_bytes(split, model)
    if hbm < kv_bytes or flash < kv_bytes:
        raise SimulationError(f"{model.name} leaves no room for KV in {configuration!r} of {device.name}; take more stacks")
    read = device.gpu.read_bandwidth.value
    return Node(
        hbm_tokens=int(hbm // kv_bytes),
        flash_tokens=int(flash // kv_bytes),
        step_s=model.weights_read.value / read + device.gpu.step_overhead.value,
        read_s=kv_bytes / read,
        flush_s=kv_bytes / (split.hbf_stacks * device.hbf_stack.write_bandwidth.value),
        program_s=device.hbf_stack.program_time.value,
        full_share=model.full_attention_share.value,
        chunk_tokens=model.attention_chunk.value,
        policy=POLICY_NUMBERS[policy],
        frees_at_boundary=POLICIES[policy].frees_at_boundary,
        evicts_per_tier=getattr(POLICIES[policy], "evicts_per_tier", False),
        lease_s=lease_s,
        growth=config.growth,
        reserve_share=config.max_reserve_share,
        reserve_deviations=config.reserve_deviations,
    )


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one run measured after its warm-up. Tokens by class (as `CLASSES`) and tier; times in seconds."""

    measured_s: float
    written: NDArray[np.int64]
    spilled: NDArray[np.int64]
    live: NDArray[np.float64]
    """Mean tokens live."""
    tpot_p99_s: float
    tpot_mean_s: float
    sessions_ended: int
    evicted_segments: int
    steps: int

    @property
    def total(self) -> int:
        """Tokens written."""
        return int(self.written.sum())

    @property
    def flash_tokens_per_s(self) -> float:
        """Tokens written to flash."""
        return float(self.written[:, 1].sum()) / self.measured_s

    @property
    def hbm_write_share(self) -> float:
        """Part of the tokens written that HBM took."""
        return float(self.written[:, 0].sum()) / max(1, self.total)


class NodeRun:
    """A node with its sessions.

    Args:
        node: what does not change.
        trace: what the sessions do.
        sessions: how many run at a time.
        seed: order of the sessions, and how far the first ones are.
        config: of the policy; its `unknown_tier` is used here.
        log: where decisions are kept.
        ramp_s: over which the sessions start.
        boundary_loss: part of the segments whose end the policy never hears of; 0 under one that frees nothing at a boundary.

    """

    def __init__(
        self,
        node: Node,
        trace: ReplayTrace,
        sessions: int,
        seed: int,
        config: PlacementConfig,
        log: DecisionLog = NO_LOG,
        ramp_s: float = 300.0,
        boundary_loss: float = 0.0,
    ) -> None:
        if not 1 <= sessions <= MAX_SESSIONS:
            raise SimulationError(f"sessions must be from 1 to {MAX_SESSIONS}; it is {sessions}")
        random = np.random.default_rng([seed, 3])
        order = np.concatenate([random.permutation(len(trace.session_program)) for _ in range(NUM_ROUNDS)]).astype(np.int64)
        tiers = np.array([tier_of_class(segment_class, config) for segment_class in CLASSES], np.int64)
        # The same segments at each loss below: results for two losses differ by the loss, not by which segments met it.
        lost = boundary_loss if node.frees_at_boundary else 0.0
        is_lost = np.random.default_rng([seed, 4]).random(len(trace.programs)) < lost
        num_actors = sessions * trace.most_actors + (MOST_LOST if lost else 0)
        num_dead = 2 if node.frees_at_boundary else MAX_DEAD_SEGMENTS
        self.node = node
        self.trace = trace
        self.sessions = sessions
        self.log = log
        self.state: State = make_state(num_actors, node, order, tiers, num_dead, is_lost)
        self._check(start_sessions(self.state, trace, node, log, sessions, ramp_s, random.random(sessions)))

    def _check(self, code: int) -> None:
        if code != OK:
            raise SimulationError(ERRORS[code])

    def run(self, duration_s: float, *, least_tokens: int = 0, most_s: float = math.inf, max_steps: int = MAX_STEPS) -> None:
        """Go on for `duration_s`, and until `least_tokens` are written since the last `clear`, but no longer than `most_s`."""
        now_s = float(self.state.real[NOW])
        code = run_until(
            self.state,
            self.trace,
            self.node,
            self.log,
            now_s + duration_s,
            least_tokens,
            now_s + most_s,
            max_steps,
        )
        self._check(code)

    def clear(self) -> None:
        """Forget what was measured so far."""
        state = self.state
        for name in ("written", "spilled", "live_s"):
            state.places[name] = 0
        state.step_tokens[:] = 0
        state.counts[[SESSIONS_ENDED, EVICTED, STEPS]] = 0
        self._cleared_s = float(state.real[NOW])

    def measure(self) -> Measurement:
        """What has been measured since the last `clear`."""
        state = self.state
        measured_s = float(state.real[NOW]) - self._cleared_s
        tokens = state.step_tokens
        cumulated = np.cumsum(tokens)
        durations = (np.arange(len(tokens)) + 1) * STEP_BIN_S
        return Measurement(
            measured_s=measured_s,
            written=state.places["written"].copy(),
            spilled=state.places["spilled"].copy(),
            live=state.places["live_s"] / measured_s,
            tpot_p99_s=float(durations[np.searchsorted(cumulated, 0.99 * cumulated[-1])]) if cumulated[-1] else 0.0,
            tpot_mean_s=float((durations * tokens).sum() / max(1, cumulated[-1])),
            sessions_ended=int(state.counts[SESSIONS_ENDED]),
            evicted_segments=int(state.counts[EVICTED]),
            steps=int(state.counts[STEPS]),
        )


def admit_sessions(
    node: Node,
    trace: ReplayTrace,
    slo_s: float,
    seed: int,
    config: PlacementConfig,
    *,
    warmup_s: float = 600.0,
    measure_s: float = 1800.0,
) -> int:
    """Most sessions whose KV fits and whose token-weighted 99th-percentile step stays within `slo_s`.

    Bisection, first with runs a quarter as long. Raises SimulationError if not even one session does, or as many as the simulator
    takes.
    """

    def is_within(sessions: int, part: float = 1.0) -> bool:
        try:
            run = NodeRun(node, trace, sessions, seed, config, ramp_s=part * warmup_s / 2)
            run.run(part * warmup_s)
            run.clear()
            run.run(part * measure_s)
        except SimulationError as error:
            if str(error) == ERRORS[NO_ROOM]:
                return False
            raise
        measured = run.measure()
        fits = measured.live.sum() <= MOST_LIVE * (node.hbm_tokens + node.flash_tokens)
        return bool(fits) and measured.tpot_p99_s <= slo_s

    if not is_within(1):
        raise SimulationError(
            f"not even one session keeps its 99th percentile of {1000 * slo_s:g} ms, or fits; take a longer SLO or more stacks"
        )
    rough = _largest(lambda sessions: is_within(sessions, 0.25), 64, 64, 25)
    found = _largest(is_within, rough, max(1, rough // 25), 200)
    if found == MAX_SESSIONS:
        raise SimulationError(f"{found} sessions still keep {1000 * slo_s:g} ms; take a shorter SLO")
    return found


def _largest(is_within: Callable[[int], bool], start: int, step: int, parts: int) -> int:
    """The largest number from 1 to `MAX_SESSIONS` for which that holds, to one part in `parts`; 1 is taken to do.

    Steps that double lead from `start` to where it changes, bisection from there.
    """
    if is_within(start):
        low, high = start, min(MAX_SESSIONS, start + step)
        while low < MAX_SESSIONS and is_within(high):
            step *= 2
            low, high = high, min(MAX_SESSIONS, high + step)
    else:
        low, high = max(1, start - step), start
        while low > 1 and not is_within(low):
            step *= 2
            low, high = max(1, low - step), low
    while high - low > max(1, low // parts):
        middle = (low + high) // 2
        if is_within(middle):
            low = middle
        else:
            high = middle
    return low
