# SPDX-License-Identifier: Apache-2.0
"""Who reads what others have read: rules, and what is learned."""

import pytest

from vllm_lifetime.policy.inheritance import EVERYONE, MAX_PAIRS, MIN_CHANGE, Inheritance


def test_without_evidence_nothing_is_inherited() -> None:
    assert Inheritance().access_set(frozenset({"coder"})) == {"coder": 1.0}


def test_evidence_grows_into_a_weight_and_fades() -> None:
    inheritance = Inheritance()
    weights = []
    for _ in range(40):
        inheritance.observe("coder", "tester", 1.0)
        weights.append(inheritance.weight("coder", "tester"))
    assert weights == sorted(weights)
    assert weights[0] == 0.5 and weights[-1] > 0.95
    assert inheritance.access_set(frozenset({"coder"})) == {"coder": 1.0, "tester": weights[-1]}
    assert inheritance.weight("tester", "coder") == 0.0
    for _ in range(150):
        inheritance.observe("coder", "tester", 0.0)
    assert inheritance.weight("coder", "tester") < 0.05 + MIN_CHANGE


def test_a_share_is_what_is_expected_to_be_read() -> None:
    inheritance = Inheritance()
    for _ in range(60):
        inheritance.observe("coder", "tester", 0.25)
    assert inheritance.weight("coder", "tester") == pytest.approx(0.25, abs=0.02)


def test_rules_override_what_is_learned() -> None:
    inheritance = Inheritance({"tester": ["coder"], "writer": EVERYONE, "critic": []})
    for heir in ("tester", "critic"):
        inheritance.observe("planner", heir, 1.0)
    assert inheritance.access_set(frozenset({"planner"})) == {"planner": 1.0, "writer": 1.0}
    assert inheritance.access_set(frozenset({"coder"})) == {"coder": 1.0, "writer": 1.0, "tester": 1.0}
    assert not len(inheritance)


def test_of_several_givers_the_surest_counts() -> None:
    inheritance = Inheritance()
    for _ in range(30):
        inheritance.observe("coder", "tester", 1.0)
        inheritance.observe("planner", "tester", 0.0)
    assert inheritance.access_set(frozenset({"coder", "planner"}))["tester"] == inheritance.weight("coder", "tester")


def test_pairs_are_bounded() -> None:
    inheritance = Inheritance()
    for number in range(3 * MAX_PAIRS):
        inheritance.observe(f"giver{number}", "tester", 1.0)
        inheritance.access_set(frozenset({f"giver{number}"}))
    assert len(inheritance) == MAX_PAIRS
    assert len(inheritance._access_sets) <= MAX_PAIRS
    assert inheritance.access_set(frozenset({"giver0"})) == {"giver0": 1.0}
