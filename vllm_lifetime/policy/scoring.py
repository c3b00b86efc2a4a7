# SPDX-License-Identifier: Apache-2.0
"""What a forecast makes of a cache node: survival, agent values, and the sums over workflows (PBKV equations 1 and 2).

Pure functions. For a workflow w with forecast P_w, the score of a node c is

    Score(c) = sum_w sum_{k=1..K} gamma^(k-1) s_w(k) sum_a A_w(c)[a] P_w^(k)(a)

The sums over k do not depend on c, so they are taken once per forecast: v_w[a] = sum_k gamma^(k-1) s_w(k) P_w^(k)(a), and
Score(c) = sum_w sum_a A_w(c)[a] v_w[a]. It is the expected discounted number of misses that evicting c causes (lemma G.1), per
unit of space: the node's size does not enter (appendix G.1).
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.prediction.forecast import Forecast

__all__ = [
    "DEFAULT_GAMMA",
    "AccessSet",
    "Values",
    "agent_values",
    "lipschitz_constant",
    "one_step_values",
    "score",
    "survival",
    "workflow_score",
]

DEFAULT_GAMMA = 0.7
"""Confidence that a step further ahead keeps (PBKV section 6.2 and appendix D)."""

Values = Mapping[str, float]
"""v_w: by agent, what reading a node costs or gains if that agent reads it. Agents that are not in it count 0."""

AccessSet = Mapping[str, float]
"""A_w(c): by agent, how surely it reads the node when it is invoked, in (0, 1]; agents that have read it themselves: 1."""


def survival(forecast: Forecast) -> NDArray[np.float64]:
    """s_w(k) for k = 1..K: the probability that the workflow has not ended before invocation k (section 4.2.2). Shape (K,)."""
    goes_on = 1.0 - forecast.probabilities[:-1, -1]
    return np.concatenate(([1.0], np.cumprod(goes_on)))


def agent_values(forecast: Forecast, gamma: float = DEFAULT_GAMMA, horizon: int | None = None) -> dict[str, float]:
    """v_w[a] = sum_{k=1..K} gamma^(k-1) s_w(k) P_w^(k)(a), for each agent of the forecast with v_w[a] > 0.

    `horizon` is K, if less than the forecast's own. O(K * agents).
    """
    num_steps = len(forecast.probabilities) if horizon is None else min(horizon, len(forecast.probabilities))
    weights = survival(forecast)[:num_steps] * gamma ** np.arange(num_steps)
    values = (weights @ forecast.probabilities[:num_steps, :-1]).tolist()
    return {agent: value for agent, value in zip(forecast.agents, values, strict=True) if value > 0.0}


def one_step_values(forecast: Forecast) -> dict[str, float]:
    """P_w^(1)(a) for each agent that may be next: what Eq. 1 sums, to rank what to prefetch."""
    values = forecast.probabilities[0, :-1].tolist()
    return {agent: value for agent, value in zip(forecast.agents, values, strict=True) if value > 0.0}


def workflow_score(values: Values, access_set: AccessSet) -> float:
    """One workflow's term of Eq. 1 or 2: sum_a A_w(c)[a] v_w[a]. O(agents of the access set)."""
    return sum(weight * values.get(agent, 0.0) for agent, weight in access_set.items())


def score(terms: Iterable[tuple[Values, AccessSet]]) -> float:
    """Eq. 2 with v_w from `agent_values`, or Eq. 1 with those from `one_step_values`: one (v_w, A_w(c)) per active workflow."""
    return sum(workflow_score(values, access_set) for values, access_set in terms)


def lipschitz_constant(gamma: float, horizon: int) -> float:
    """(1 - gamma^K) / (2 (1 - gamma)): how far a score may move per unit of forecast error (lemma G.2). 0 <= gamma < 1."""
    if not 0.0 <= gamma < 1.0:
        raise ValueError(f"gamma must be in [0, 1), it is {gamma}")
    return (1.0 - gamma**horizon) / (2.0 * (1.0 - gamma))
