# SPDX-License-Identifier: Apache-2.0
"""The eviction policies by name, for replays: the server's `Scorer` and models, and `belady`."""

import copy
from dataclasses import dataclass, replace

from vllm_lifetime.policy.eviction import EVICTION_POLICIES, EvictionPolicy, parse_policy
from vllm_lifetime.simulate.engine import ReplayPolicy, ReplayResult, replay, replay_belady
from vllm_lifetime.simulate.prefetch import DEFAULT_BANDWIDTH_BLOCKS_PER_S, PrefetchingPolicy
from vllm_lifetime.simulate.schedule import Schedule
from vllm_lifetime.simulate.scored import Models, NoisyPredictor, ScoredPolicy

__all__ = ["BELADY", "POLICY_NAMES", "Variant", "replay_policy", "train"]

BELADY = "belady"
POLICY_NAMES = (*EVICTION_POLICIES, BELADY)


class _Lru(ReplayPolicy):
    """vLLM without us: requests say nothing, blocks go in the order in which they were freed."""

    reads_metadata = False


@dataclass(frozen=True)
class Variant:
    """What a sweep changes of a policy; None is the policy's own.

    `horizon` is K (the predictor must look as far), `noise` lambda in PBKV Eq. 5. `has_host`: a host tier below, from which
    policies that prefetch do so, with `rho` (0: conservatively).
    """

    horizon: int | None = None
    gamma: float | None = None
    noise: float = 0.0
    has_host: bool = False
    rho: float = 0.0
    bandwidth_blocks_per_s: float = DEFAULT_BANDWIDTH_BLOCKS_PER_S


def replay_policy(
    schedule: Schedule, name: str, capacity_blocks: int, models: Models | None = None, variant: Variant | None = None
) -> ReplayResult:
    """Replay `schedule` with the policy `name` (see `POLICY_NAMES`).

    `models` is what the policy knows from before; it is copied. Raises ValueError for an unknown name or a parameter out of
    range.
    """
    if name == BELADY:
        return replay_belady(schedule, capacity_blocks)
    variant = Variant() if variant is None else variant
    policy = parse_policy(name)
    if variant.horizon is not None:
        policy = replace(policy, horizon=variant.horizon)
    if variant.gamma is not None:
        policy = replace(policy, gamma=variant.gamma)
    models = Models() if models is None else copy.deepcopy(models)
    if variant.noise:
        models.predictor = NoisyPredictor(models.predictor, variant.noise)
    return replay(schedule, _make(policy, models, variant), capacity_blocks)


def _make(policy: EvictionPolicy, models: Models, variant: Variant) -> ReplayPolicy:
    if policy.prefetches and variant.has_host:
        return PrefetchingPolicy(policy, models, variant.bandwidth_blocks_per_s, variant.rho)
    if policy.needs_scorer:
        return ScoredPolicy(policy, models)
    return ReplayPolicy(policy.name) if policy.acts_on_boundaries else _Lru(policy.name)


def train(schedule: Schedule, models: Models) -> Models:
    """A copy of `models` that has seen `schedule`. What is learned of agents and pauses does not depend on the capacity."""
    models = copy.deepcopy(models)
    # Learns all that any policy uses: who is next, and when.
    replay(schedule, ScoredPolicy(parse_policy("lifetime"), models), capacity_blocks=1 << 40)
    return models
