# SPDX-License-Identifier: Apache-2.0
import math
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from placement_testing import Allocator

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement import PLACEMENTS, PlacedSegment, PlacementConfig, Tier, parse_placement
from vllm_lifetime.policy.placement.lachesis import Lachesis
from vllm_lifetime.policy.placement.lachesis_no_predictive import LONG_LIVED, SHORT_LIVED, LachesisNoPredictive
from vllm_lifetime.policy.placement.lru_migrate import LruMigrate
from vllm_lifetime.policy.placement.output_length import OutputLength
from vllm_lifetime.policy.placement.read_write_ratio import ReadWriteRatio
from vllm_lifetime.policy.placement.worker_ranks import WorkerRanks

WORKER = SegmentClass.WORKER
REVIEWER = SegmentClass.REVIEWER
LEAD = SegmentClass.LEAD


def worker(score: float | None = None, **more: float) -> PlacedSegment:
    return PlacedSegment(WORKER, score=score, **more)


# ------------------------------------------------------------------------------------------------ names


def test_every_name_is_parsed_and_the_oracle_is_refused_to_a_server():
    for name, policy in PLACEMENTS.items():
        assert parse_placement(name, is_live=False) is policy
        assert policy.name == name
    with pytest.raises(ValueError, match="knows the future"):
        parse_placement("oracle")
    with pytest.raises(ValueError, match=r"unknown placement 'lifo'; there are hbm_first, .*lru_migrate$"):
        parse_placement("lifo")


@pytest.mark.parametrize(
    "wrong", [{"growth": 0.0}, {"growth": math.nan}, {"max_reserve_share": 1.1}, {"reserve_deviations": -1.0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PlacementConfig(**wrong)


# ------------------------------------------------------------------------------------------------ deterministic path


def test_classes_that_end_with_the_turn_or_sub_agent_go_to_hbm_and_the_rest_to_flash():
    assert {SegmentClass.UNKNOWN} == set(SegmentClass) - SHORT_LIVED - LONG_LIVED
    for unknown in Tier:
        policy = Allocator(LachesisNoPredictive, 10, 100, config=PlacementConfig(unknown_tier=unknown)).policy
        for segment_class in SegmentClass:
            tier = policy.tier_for(PlacedSegment(segment_class), 1)
            wanted = unknown if segment_class is SegmentClass.UNKNOWN else Tier(segment_class in LONG_LIVED)
            assert tier is wanted


def test_a_full_hbm_spills_what_does_not_fit():
    allocator = Allocator(LachesisNoPredictive, 10, 100)
    first = allocator.open(worker())
    allocator.write(first, 14)
    assert first.blocks == [10, 4]
    assert allocator.spilled == {(WORKER, Tier.HBM, Tier.FLASH): 4}


def test_only_hbm_first_keeps_what_is_dead():
    assert [name for name, policy in PLACEMENTS.items() if not policy.frees_at_boundary] == ["hbm_first"]


# ------------------------------------------------------------------------------------------------ predictive path


@given(st.lists(st.floats(-5, 5), max_size=30), st.floats(-5, 5))
def test_rank_counts_the_shorter_lived(keys: list[float], key: float):
    ranks = WorkerRanks()
    for other in keys:
        ranks.add(other, is_score=True)
    rank = ranks.add(key, is_score=True)
    assert sum(other < key for other in keys) < rank <= 1 + sum(other <= key for other in keys)
    for other in (*keys, key):
        ranks.remove(other, is_score=True)
    assert len(ranks) == 0


def test_a_rank_among_workers_without_a_score_counts_as_a_share_of_all():
    ranks = WorkerRanks()
    for score in range(6):
        ranks.add(score, is_score=True)
    ranks.add(100, is_score=False)
    assert ranks.add(200, is_score=False) == 2 * 8 / 2
    assert ranks.add(-1, is_score=True) == 1 * 9 / 7


def test_the_shortest_lived_are_admitted_and_as_many_as_there_is_room_for():
    # Sizes are known from the first worker that closes: 10 blocks; each counts 2 x 10 of 100 free.
    allocator = Allocator(Lachesis, 100, 1000, config=PlacementConfig(growth=2.0))
    first = allocator.open(worker(0.0, expected_blocks=10))
    allocator.write(first, 10)
    allocator.close(first)
    admitted = [allocator.open(worker(float(score))).is_admitted for score in range(20, 0, -1)]
    # None has written yet: each newcomer ranks first, and there is room for five more.
    assert admitted == [True] * 20
    assert allocator.open(worker(30.0)).is_admitted  # rank 21 <= 20 + 5
    for segment in list(allocator.live):
        allocator.write(segment, 5)
    assert allocator.tiers.free == [0, 995]
    assert not allocator.open(worker(40.0)).is_admitted  # rank 22 > 21 + 0
    assert allocator.open(worker(5.5)).is_admitted  # rank 6


def test_workers_that_have_spilled_do_not_keep_the_door_open():
    """If they counted, k would never fall below the number of workers, and a full HBM would admit the longest-lived."""
    allocator = Allocator(Lachesis, 100, 1000)
    for score in range(10):
        allocator.open(worker(float(score), expected_blocks=10))
    for segment in allocator.live:
        allocator.write(segment, 30)
    assert all(segment.is_admitted for segment in allocator.live)
    assert (allocator.policy.num_admitted, allocator.tiers.free[Tier.HBM]) == (10, 10)  # 90 of 300 blocks in HBM: k is 3 + 1
    assert not allocator.open(worker(9.5, expected_blocks=10)).is_admitted
    assert allocator.open(worker(0.5, expected_blocks=10)).is_admitted


def test_without_a_model_the_expected_size_orders_workers():
    allocator = Allocator(Lachesis, 10, 1000)
    for size in (50, 2, 60, 1):
        segment = allocator.open(worker(expected_blocks=size))
        allocator.write(segment, 4)
    assert [segment.is_admitted for segment in allocator.live] == [False, True, False, True]


def test_a_score_that_is_no_number_counts_as_none():
    allocator = Allocator(Lachesis, 10, 1000)
    segment = allocator.open(worker(math.nan, expected_blocks=1))
    allocator.close(segment)
    assert allocator.policy.num_workers == 0


def test_workers_do_not_write_into_the_reviewers_reserve():
    allocator = Allocator(Lachesis, 100, 1000)
    first = allocator.open(worker(1.0, expected_blocks=5))
    reviewer = allocator.open(PlacedSegment(REVIEWER))
    allocator.write(reviewer, 40)
    for score in range(200):
        allocator.close(allocator.open(worker(float(score), expected_blocks=5)))
    allocator.close(reviewer)
    assert allocator.policy.reserve_blocks == pytest.approx(40, rel=0.1)
    free = allocator.tiers.free[Tier.HBM]
    number = math.floor(free - allocator.policy.reserve_blocks)
    assert allocator.policy.tier_for(first, number) is Tier.HBM
    assert allocator.policy.tier_for(first, number + 1) is Tier.FLASH
    # A reviewer may use it, and what it uses is no longer kept.
    reviewer = allocator.open(PlacedSegment(REVIEWER))
    allocator.write(reviewer, 30)
    assert reviewer.blocks == [30, 0]
    assert allocator.policy.reserve_blocks == pytest.approx(10, rel=0.3)


def test_a_share_of_zero_keeps_no_reserve():
    allocator = Allocator(Lachesis, 100, 1000, config=PlacementConfig(max_reserve_share=0.0))
    allocator.write(allocator.open(PlacedSegment(REVIEWER)), 40)
    allocator.open(worker(1.0))
    assert allocator.policy.reserve_blocks == 0


def test_the_oracle_ranks_by_true_lifetime_and_says_if_it_lacks_it():
    allocator = Allocator(parse_placement("oracle", is_live=False), 10, 1000)
    for lifetime_s, score in ((50, -1.0), (2, 9.0), (60, -1.0), (1, 9.0)):
        allocator.write(allocator.open(worker(score, lifetime_s=lifetime_s, expected_blocks=lifetime_s)), 4)
    assert [segment.is_admitted for segment in allocator.live] == [False, True, False, True]
    with pytest.raises(ValueError, match="lifetime_s"):
        allocator.open(worker(1.0))


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 40), st.booleans()), min_size=1, max_size=60), st.integers(20, 200))
@settings(max_examples=60)
def test_admission_is_exactly_the_rank_against_k_and_the_reserve_holds(
    workers: list[tuple[float, int, bool]],
    hbm_blocks: int,
):
    """Recomputes rank, reserve and k from what is visible from outside."""
    allocator = Allocator(Lachesis, hbm_blocks, 10_000)
    policy = allocator.policy
    for score, size, is_review in workers:
        scores = sorted(other.score for other in allocator.live if other.segment_class is WORKER)
        admitted = [other for other in allocator.live if other.is_admitted]
        held = [sum(other.blocks[tier] for other in admitted) for tier in Tier]
        in_hbm = len(admitted) * (held[0] / sum(held) if sum(held) else 1)
        segment = allocator.open(worker(score, expected_blocks=size))
        equal = scores.count(score)
        rank = 1 + bisect_left(scores, score) + equal // 2
        mean = policy._final_size.mean if policy._final_size.count else size
        k = math.floor(in_hbm + (allocator.tiers.free[Tier.HBM] - policy.reserve_blocks) / (2.0 * max(1.0, mean)))
        assert segment.is_admitted == (rank <= k)
        assert policy.reserve_blocks <= 0.9 * hbm_blocks
        before = segment.blocks[Tier.HBM]
        allocator.write(segment, size)
        if segment.blocks[Tier.HBM] > before:
            assert segment.is_admitted
            assert allocator.tiers.free[Tier.HBM] >= policy.reserve_blocks - 1e-9
        if is_review:
            review = allocator.open(PlacedSegment(REVIEWER))
            allocator.write(review, size)
            allocator.close(segment)
            if len(allocator.live) > 8:
                allocator.close(allocator.live[0])
        allocator.check()


# ------------------------------------------------------------------------------------------------ baselines


def test_lru_migrate_copies_what_was_read_longest_ago():
    allocator = Allocator(LruMigrate, 10, 100)
    old, read = (allocator.open(worker()) for _ in range(2))
    allocator.write(old, 5)
    allocator.write(read, 5)
    allocator.policy.on_read(old, 5.0)
    new = allocator.open(worker())
    allocator.write(new, 3)
    assert read.blocks == [0, 5]
    assert (old.blocks, new.blocks, allocator.copied) == ([5, 0], [3, 0], 5)
    allocator.close(old)
    assert allocator.policy.next_to_migrate() is new


def test_read_write_ratio_sends_the_much_read_class_to_flash_once_hbm_is_full_of_the_others():
    allocator = Allocator(ReadWriteRatio, 10, 1000)
    for segment_class, reads in ((WORKER, 10.0), (LEAD, 100.0)):
        segment = allocator.open(PlacedSegment(segment_class))
        allocator.write(segment, 2)
        allocator.policy.on_read(segment, 2 * reads)
        allocator.close(segment)
        assert allocator.policy.ratio(segment_class) == reads
    lead = allocator.open(PlacedSegment(LEAD))
    assert allocator.policy.tier_for(lead, 1) is Tier.HBM
    allocator.write(allocator.open(worker()), 10)
    assert allocator.policy.tier_for(lead, 1) is Tier.FLASH
    assert allocator.policy.tier_for(allocator.live[-1], 1) is Tier.HBM


def test_output_length_sends_long_outputs_to_flash_once_all_do_not_fit():
    allocator = Allocator(OutputLength, 100, 100_000)
    segments = []
    for i in range(200):
        segment = allocator.open(worker())
        allocator.policy.on_request(segment, 100 if i % 2 else 2000)
        allocator.write(segment, 2)
        segments.append(segment)
    assert [segment.tier for segment in segments[-2:]] == [Tier.FLASH, Tier.HBM]


# ------------------------------------------------------------------------------------------------ conservation

CLASSES = st.sampled_from([LEAD, WORKER, REVIEWER, SegmentClass.REASONING_LADEN, SegmentClass.UNKNOWN])


class AnyPolicy(RuleBasedStateMachine):
    """Any order of calls, every policy: blocks are conserved in each tier, and nothing is left when all is closed."""

    @initialize(name=st.sampled_from(sorted(PLACEMENTS)), hbm=st.integers(0, 60))
    def start(self, name: str, hbm: int) -> None:
        self.allocator = Allocator(PLACEMENTS[name], hbm, 400)

    @rule(segment_class=CLASSES, score=st.none() | st.floats(-3, 3), size=st.none() | st.floats(0, 50))
    def open(self, segment_class: SegmentClass, score: float | None, size: float | None) -> None:
        self.allocator.open(PlacedSegment(segment_class, score=score, expected_blocks=size, lifetime_s=1.0))

    def _pick(self, index: int) -> PlacedSegment | None:
        return self.allocator.live[index % len(self.allocator.live)] if self.allocator.live else None

    @rule(index=st.integers(0, 99), number=st.integers(1, 20), output=st.floats(0, 1e7), reads=st.floats(0, 100))
    def write(self, index: int, number: int, output: float, reads: float) -> None:
        if (segment := self._pick(index)) is not None:
            self.allocator.policy.on_request(segment, output)
            self.allocator.write(segment, number)
            self.allocator.policy.on_read(segment, reads)

    @rule(index=st.integers(0, 99), tier=st.sampled_from(Tier))
    def lose(self, index: int, tier: Tier) -> None:
        if (segment := self._pick(index)) is not None:
            self.allocator.free(segment, tier, segment.blocks[tier])

    @rule(index=st.integers(0, 99), tier=st.sampled_from(Tier))
    def lose_too_much(self, index: int, tier: Tier) -> None:
        if (segment := self._pick(index)) is not None:
            with pytest.raises(ValueError, match="cannot lose"):
                self.allocator.policy.on_freed(segment, tier, segment.blocks[tier] + 1)

    @rule(index=st.integers(0, 99))
    def close(self, index: int) -> None:
        if (segment := self._pick(index)) is not None:
            self.allocator.close(segment)

    @invariant()
    def conserved(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check()

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for segment in list(self.allocator.live):
            self.allocator.close(segment)
        policy = self.allocator.policy
        if isinstance(policy, Lachesis):
            assert (policy.num_workers, policy.num_admitted, policy._reviewer_blocks) == (0, 0, [0, 0])
            assert policy._admitted_blocks == [0, 0]
        assert policy.next_to_migrate() is None


AnyPolicy.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestAnyPolicy = AnyPolicy.TestCase
