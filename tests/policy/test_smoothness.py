# SPDX-License-Identifier: Apache-2.0
"""Appendix G of PBKV over random forecasts: what the score means, and how far errors of a forecast carry.

A node is given by the agents O_w(c) that read it in each workflow; its score is Eq. 2. `EPSILON` allows for rounding alone.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.policy.scoring import AccessSet, agent_values, lipschitz_constant, one_step_values, score, survival
from vllm_lifetime.prediction.forecast import Forecast

AGENTS = ("planner", "coder", "tester", "critic")
EPSILON = 1e-9
SETTINGS = settings(max_examples=200, deadline=None)

Node = tuple[frozenset[str], ...]
"""The agents that read it, by workflow; none: the workflow does not."""


@st.composite
def cases(draw: st.DrawFn, num_nodes: int) -> tuple[float, list[Forecast], list[Forecast], list[Node]]:
    """gamma, the true forecasts and the predicted ones by workflow, and nodes. Rows with zeros and certainties are common."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    horizon, num_workflows = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    concentration = draw(st.sampled_from([0.02, 0.3, 3.0]))

    def forecast() -> Forecast:
        rows = rng.gamma(concentration, size=(horizon, len(AGENTS) + 1)) + 1e-300
        return Forecast(AGENTS, rows / rows.sum(axis=1, keepdims=True))

    true = [forecast() for _ in range(num_workflows)]
    predicted = [forecast() if rng.random() < 0.7 else each for each in true]
    nodes = [
        tuple(frozenset(agent for agent in AGENTS if rng.random() < 0.4) for _ in range(num_workflows)) for _ in range(num_nodes)
    ]
    return draw(st.floats(0.05, 0.95)), true, predicted, nodes


def score_of(node: Node, forecasts: list[Forecast], gamma: float) -> float:
    return score(
        (agent_values(forecast, gamma), dict.fromkeys(agents, 1.0)) for agents, forecast in zip(node, forecasts, strict=True)
    )


def error_of(node: Node, true: list[Forecast], predicted: list[Forecast], gamma: float) -> float:
    """epsilon_c^gamma (Eq. 7): over the workflows that read the node, of the discounted l1 distances of their forecasts."""
    return sum(
        gamma**k * float(np.abs(p.probabilities[k] - q.probabilities[k]).sum())
        for agents, p, q in zip(node, true, predicted, strict=True)
        if agents
        for k in range(len(p.probabilities))
    )


# ---------------------------------------------------------------------- equations 1 and 2


def test_survival_is_the_product_of_the_steps_not_ended() -> None:
    forecast = Forecast(("a",), np.array([[0.75, 0.25], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]]))
    assert survival(forecast).tolist() == [1.0, 0.75, 0.375, 0.0]


@SETTINGS
@given(cases(num_nodes=1))
def test_score_is_equation_2_term_by_term(case: tuple[float, list[Forecast], list[Forecast], list[Node]]) -> None:
    gamma, workflows, _, (node,) = case
    total = 0.0
    for agents, forecast in zip(node, workflows, strict=True):
        alive = 1.0
        for k, row in enumerate(forecast.probabilities):
            total += gamma**k * alive * sum(row[AGENTS.index(agent)] for agent in agents)
            alive *= 1.0 - row[-1]
    assert score_of(node, workflows, gamma) == pytest.approx(total, abs=EPSILON)
    first = score((one_step_values(f), dict.fromkeys(agents, 1.0)) for agents, f in zip(node, workflows, strict=True))
    assert first == pytest.approx(score_of(node, [Forecast(AGENTS, f.probabilities[:1]) for f in workflows], gamma), abs=EPSILON)


def test_a_shorter_horizon_ignores_the_later_steps() -> None:
    forecast = Forecast(("a",), np.array([[0.0, 1.0], [1.0, 0.0]]))
    assert agent_values(forecast, 0.7) == {}  # it has ended by then
    goes_on = Forecast(("a", "b"), np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]))
    assert agent_values(goes_on, 0.5) == {"a": 0.5, "b": 1.0}
    assert agent_values(goes_on, 0.5, horizon=1) == {"b": 1.0}


# ---------------------------------------------------------------------- lemma G.1


@pytest.mark.parametrize("seed", range(4))
def test_score_is_the_expected_number_of_discounted_misses(seed: int) -> None:
    """Lemma G.1: play the workflows, and count each invocation that reads the evicted node."""
    rng = np.random.default_rng(seed)
    gamma, horizon, num_plays = 0.7, 4, 40_000
    workflows = [Forecast(AGENTS, rng.dirichlet(np.ones(len(AGENTS) + 1), size=horizon)) for _ in range(3)]
    node = tuple(frozenset(rng.choice(AGENTS, size=2, replace=False).tolist()) for _ in workflows)
    misses = np.zeros(num_plays)
    for agents, forecast in zip(node, workflows, strict=True):
        is_active = np.ones(num_plays, bool)
        reads = np.array([agent in agents for agent in AGENTS] + [False])
        for k, row in enumerate(forecast.probabilities):
            invoked = rng.choice(len(row), size=num_plays, p=row)
            misses += gamma**k * (is_active & reads[invoked])
            is_active &= invoked != len(AGENTS)
    deviation = misses.std() / math.sqrt(num_plays)
    # Four standard errors: about 1 % of the score here. Without the survival factor it is off by tens of them.
    assert abs(misses.mean() - score_of(node, workflows, gamma)) < 4 * deviation
    immortal = [
        Forecast(AGENTS, np.column_stack((f.probabilities[:, :-1], np.zeros(horizon)))) for f in workflows
    ]
    assert abs(misses.mean() - score_of(node, immortal, gamma)) > 4 * deviation


# ---------------------------------------------------------------------- lemma G.2 and corollary G.3


@SETTINGS
@given(cases(num_nodes=1))
def test_score_error_is_bounded_by_the_forecasts_error(case: tuple[float, list[Forecast], list[Forecast], list[Node]]) -> None:
    """Lemma G.2, in its tight form."""
    gamma, true, predicted, (node,) = case
    bound = lipschitz_constant(gamma, len(true[0].probabilities)) * error_of(node, true, predicted, gamma)
    assert abs(score_of(node, true, gamma) - score_of(node, predicted, gamma)) <= bound + EPSILON
    assert lipschitz_constant(gamma, len(true[0].probabilities)) <= 1 / (2 * (1 - gamma))


def test_the_bound_is_reached_at_a_horizon_of_one() -> None:
    """So a smaller constant would be wrong."""
    true = [Forecast(("a",), np.array([[1.0, 0.0]]))]
    predicted = [Forecast(("a",), np.array([[0.0, 1.0]]))]
    node = (frozenset({"a"}),)
    difference = score_of(node, true, 0.7) - score_of(node, predicted, 0.7)
    assert difference == pytest.approx(lipschitz_constant(0.7, 1) * error_of(node, true, predicted, 0.7))


@SETTINGS
@given(cases(num_nodes=1))
def test_errors_about_workflows_that_do_not_read_a_node_leave_its_score(
    case: tuple[float, list[Forecast], list[Forecast], list[Node]],
) -> None:
    gamma, true, predicted, (node,) = case
    mixed = [q if not agents else p for agents, p, q in zip(node, true, predicted, strict=True)]
    assert score_of(node, mixed, gamma) == score_of(node, true, gamma)


@SETTINGS
@given(cases(num_nodes=2))
def test_small_errors_keep_the_order_of_two_nodes(case: tuple[float, list[Forecast], list[Forecast], list[Node]]) -> None:
    """Corollary G.3. The predicted forecasts are drawn towards the true ones until the condition holds."""
    gamma, true, predicted, nodes = case
    first, second = sorted(nodes, key=lambda node: score_of(node, true, gamma), reverse=True)
    gap = score_of(first, true, gamma) - score_of(second, true, gamma)
    constant = lipschitz_constant(gamma, len(true[0].probabilities))
    error = sum(error_of(node, true, predicted, gamma) for node in nodes)
    if gap <= EPSILON:
        return
    share = min(1.0, 0.99 * gap / (constant * error)) if error else 1.0
    near = [
        Forecast(AGENTS, (1 - share) * p.probabilities + share * q.probabilities) for p, q in zip(true, predicted, strict=True)
    ]
    assert constant * sum(error_of(node, true, near, gamma) for node in nodes) < gap
    assert score_of(first, near, gamma) > score_of(second, near, gamma)


# ---------------------------------------------------------------------- theorem G.4


@SETTINGS
@given(cases(num_nodes=6), st.integers(1, 5))
def test_regret_of_an_eviction_is_bounded(
    case: tuple[float, list[Forecast], list[Forecast], list[Node]], budget: int
) -> None:
    """Theorem G.4: of evicting the `budget` nodes of lowest predicted score; both of its bounds, and that it is no gain."""
    gamma, true, predicted, nodes = case
    scores = [score_of(node, true, gamma) for node in nodes]
    guesses = [score_of(node, predicted, gamma) for node in nodes]
    chosen = set(sorted(range(len(nodes)), key=lambda i: guesses[i])[:budget])
    best = set(min(itertools.combinations(range(len(nodes)), budget), key=lambda some: sum(scores[i] for i in some)))
    regret = sum(scores[i] for i in chosen) - sum(scores[i] for i in best)
    differing = chosen ^ best
    constant = lipschitz_constant(gamma, len(true[0].probabilities))
    assert regret >= -EPSILON
    assert regret <= sum(abs(scores[i] - guesses[i]) for i in differing) + EPSILON
    assert regret <= constant * sum(error_of(nodes[i], true, predicted, gamma) for i in differing) + EPSILON


def test_access_sets_weigh_inherited_access() -> None:
    inherited: AccessSet = {"coder": 1.0, "tester": 0.25}
    assert score([({"coder": 0.5, "tester": 0.4, "critic": 9.0}, inherited)]) == pytest.approx(0.6)


@pytest.mark.parametrize("gamma", [-0.1, 1.0, math.nan])
def test_lipschitz_constant_refuses_a_gamma_without_bound(gamma: float) -> None:
    with pytest.raises(ValueError, match="gamma"):
        lipschitz_constant(gamma, 3)
