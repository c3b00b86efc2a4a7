# SPDX-License-Identifier: Apache-2.0
"""The table of policies."""

from dataclasses import replace

import pytest

from vllm_lifetime.policy.call_graph import CallGraph
from vllm_lifetime.policy.eviction import EVICTION_POLICIES, EvictionPolicy, parse_policy


def test_policies_are_found_by_name() -> None:
    assert all(parse_policy(f" {name} ").name == name for name in EVICTION_POLICIES)
    assert {"lru", "lifecycle", "hierarchical", "lifetime", "kvflow", "ttl", "time"} <= set(EVICTION_POLICIES)


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'lfu'.*lru, lifecycle, hierarchical, lifetime"):
        parse_policy("lfu")


@pytest.mark.parametrize(
    ("name", "value"), [("horizon", 0), ("gamma", 1.5), ("gamma", -0.1), ("time_horizon_s", 0.0), ("score_step", -1.0)]
)
def test_parameters_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(parse_policy("lifetime"), **{name: value})


def test_what_needs_no_scorer() -> None:
    assert [name for name, policy in EVICTION_POLICIES.items() if not policy.needs_scorer] == ["lru", "lifecycle"]
    assert not EvictionPolicy("mine").needs_scorer


def test_the_call_graph_follows_the_most_frequent_successor() -> None:
    graph = CallGraph()
    for agent, successor in [("a", "b"), ("a", "c"), ("a", "c"), ("c", "d"), ("d", "a")]:
        graph.observe(agent, successor)
    assert graph.steps_from("a") == {"c": 1, "d": 2, "a": 3}
    assert graph.steps_from("b") == {}
    assert CallGraph({"a": "b"}).steps_from("a") == {"b": 1}
