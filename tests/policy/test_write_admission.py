# SPDX-License-Identifier: Apache-2.0
"""Which segment classes may be written to flash behind HBM."""

import pytest

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement.contract import PlacementConfig, Tier
from vllm_lifetime.policy.placement.registry import PLACEMENTS, parse_placement
from vllm_lifetime.policy.write_admission import WriteAdmission

ALWAYS = {SegmentClass.SHARED, SegmentClass.LEAD, SegmentClass.REASONING_STRIPPED}
NEVER = {SegmentClass.REASONING_LADEN, SegmentClass.REVIEWER}


def admission(name: str, unknown: Tier = Tier.HBM) -> WriteAdmission:
    return WriteAdmission(parse_placement(name), PlacementConfig(unknown_tier=unknown))


@pytest.mark.parametrize("name", ["lachesis", "lachesis_no_predictive"])
@pytest.mark.parametrize("unknown", list(Tier))
def test_classes_go_where_placement_has_them(name: str, unknown: Tier) -> None:
    rule = admission(name, unknown)
    assert {c for c in SegmentClass if rule.admits(c)} == (
        ALWAYS | {SegmentClass.WORKER} | ({SegmentClass.UNKNOWN} if unknown is Tier.FLASH else set())
    )
    assert not any(rule.admits(c, 10**9) for c in NEVER)


def test_lachesis_writes_the_larger_half_of_the_workers() -> None:
    rule = admission("lachesis")
    rule.set_workers([5, 1, 9, 3])
    assert [size for size in (1, 3, 5, 9) if rule.admits(SegmentClass.WORKER, size)] == [5, 9]
    rule.set_workers([4])
    assert rule.admits(SegmentClass.WORKER, 4), "one worker is as good as another"
    rule.set_workers([])
    assert rule.admits(SegmentClass.WORKER, 0)
    assert rule.admits(SegmentClass.LEAD, 0), "size is nothing to other classes"


def test_lachesis_writes_the_half_that_is_predicted_to_live_longer() -> None:
    """Whatever its size; those without a score have a half of their own."""
    rule = admission("lachesis")
    rule.set_workers([3, 7], [-2.0, 0.5, -1.0, 4.0])
    written = [score for score in (-2.0, -1.0, 0.5, 4.0) if rule.admits(SegmentClass.WORKER, 1, score)]
    assert written == [0.5, 4.0]
    assert [size for size in (3, 7) if rule.admits(SegmentClass.WORKER, size)] == [7]
    rule.set_workers([3, 7])
    assert rule.admits(SegmentClass.WORKER, 1, -9.0), "the only one that has a score"
    assert not rule.admits(SegmentClass.REVIEWER, 9, 9.0)


def test_without_the_predictive_path_size_does_not_count() -> None:
    rule = admission("lachesis_no_predictive")
    rule.set_workers([5, 1, 9, 3])
    assert rule.admits(SegmentClass.WORKER, 1) and not rule.ranks_workers


def test_policies_that_do_not_go_by_class_admit_all() -> None:
    names = [name for name, policy in PLACEMENTS.items() if not name.startswith(("lachesis", "oracle"))]
    assert names
    for name in names:
        assert admission(name).admits_all
        assert all(admission(name).admits(segment_class) for segment_class in SegmentClass)
