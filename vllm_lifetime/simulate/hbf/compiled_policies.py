# SPDX-License-Identifier: Apache-2.0
"""The placement policies once more, for compiled code: line by line what `policy/placement/` does, on arrays.

A test replays the decisions of a run through the Python policies and finds the same ones.
"""

import math

import numpy as np

from vllm_lifetime.boundaries import SegmentClass
from vllm_lifetime.policy.placement.lachesis import REVIEWER_WEIGHT, SIZE_WEIGHT
from vllm_lifetime.policy.placement.output_length import BINS_PER_OCTAVE, NUM_BINS
from vllm_lifetime.policy.placement.output_length import FORGETTING as OUTPUT_FORGETTING
from vllm_lifetime.policy.placement.read_write_ratio import FORGETTING as RATIO_FORGETTING
from vllm_lifetime.simulate.hbf.compiled import called_from_compiled
from vllm_lifetime.simulate.hbf.replay_trace import CLASSES, ReplayTrace
from vllm_lifetime.simulate.hbf.state import (
    ADMITTED,
    ADMITTED_TOKENS,
    FREE,
    OUTPUT_LIVE,
    POLICY_NUMBERS,
    RESERVE,
    REVIEWER_COUNT,
    REVIEWER_MEAN,
    REVIEWER_VARIANCE,
    SIZE_COUNT,
    SIZE_MEAN,
    SIZE_VARIANCE,
    TICK,
    Node,
    State,
)

__all__ = ["begin_request", "close_segment", "count_admitted", "next_to_migrate", "open_segment", "tier_for", "touch"]

HBM, FLASH = 0, 1
WORKER = CLASSES.index(SegmentClass.WORKER)
REVIEWER = CLASSES.index(SegmentClass.REVIEWER)
NUM_CLASSES = len(CLASSES)
HBM_FIRST = POLICY_NUMBERS["hbm_first"]
HBM_FIRST_FREED = POLICY_NUMBERS["hbm_first_freed"]
HBM_FIRST_LRU_PER_TIER = POLICY_NUMBERS["hbm_first_lru_per_tier"]
LACHESIS = POLICY_NUMBERS["lachesis"]
ORACLE = POLICY_NUMBERS["oracle"]
ORACLE_PER_BYTE = POLICY_NUMBERS["oracle_per_byte"]
RATIO = POLICY_NUMBERS["read_write_ratio"]
OUTPUT = POLICY_NUMBERS["output_length"]
LRU = POLICY_NUMBERS["lru_migrate"]


@called_from_compiled
def _reserve_left(state: State) -> float:
    return max(0.0, float(state.real[RESERVE] - state.places[REVIEWER, HBM].live))


@called_from_compiled
def _ranks_workers(node: Node) -> bool:
    return node.policy == LACHESIS or node.policy == ORACLE or node.policy == ORACLE_PER_BYTE


@called_from_compiled
def _final_tokens(trace: ReplayTrace, program: int) -> int:
    """`SizedSegment.final_blocks`."""
    total = 0
    for row in range(trace.programs[program].first_row, trace.programs[program].end_row):
        total += trace.rows[row].prefill_tokens + trace.rows[row].decode_tokens
    return max(1, total)


@called_from_compiled
def open_segment(state: State, trace: ReplayTrace, node: Node, actor: int) -> None:
    """`Lachesis.open`, `Oracle.open` and `OraclePerByte.open`."""
    program = state.actors[actor].program
    if trace.programs[program].kind != WORKER or not _ranks_workers(node):
        return
    key = trace.programs[program].score if node.policy == LACHESIS else trace.programs[program].lifetime_s
    if node.policy == ORACLE_PER_BYTE:
        key /= _final_tokens(trace, program)
    expected = trace.programs[program].expected_tokens
    is_score = 1
    if math.isnan(key):
        key = expected
        is_score = 0
    below = 0
    equal = 0
    same_kind = 1
    workers = 1
    for other in range(len(state.actors)):
        if state.actors[other].is_live and other != actor and trace.programs[state.actors[other].program].kind == WORKER:
            workers += 1
            other_program = state.actors[other].program
            other_is_score = node.policy != LACHESIS or not math.isnan(trace.programs[other_program].score)
            if other_is_score == (is_score == 1):
                same_kind += 1
                below += state.actors[other].key < key
                equal += state.actors[other].key == key
    state.actors[actor].key = key
    rank = float(1 + below + equal // 2)
    if same_kind != workers:
        rank = rank * workers / same_kind
    state.counts[REVIEWER_COUNT] += 1
    weight = max(REVIEWER_WEIGHT, 1.0 / state.counts[REVIEWER_COUNT])
    step = (state.places[REVIEWER, HBM].live + state.places[REVIEWER, FLASH].live) - state.real[REVIEWER_MEAN]
    state.real[REVIEWER_MEAN] += weight * step
    state.real[REVIEWER_VARIANCE] = (1.0 - weight) * (state.real[REVIEWER_VARIANCE] + weight * step * step)
    target = state.real[REVIEWER_MEAN] + node.reserve_deviations * math.sqrt(state.real[REVIEWER_VARIANCE])
    state.real[RESERVE] = min(target, node.reserve_share * node.hbm_tokens)
    size = max(1.0, state.real[SIZE_MEAN] if state.counts[SIZE_COUNT] else expected)
    room = state.counts[FREE + HBM] - _reserve_left(state)
    in_hbm = float(state.counts[ADMITTED])
    held = state.counts[ADMITTED_TOKENS + HBM] + state.counts[ADMITTED_TOKENS + FLASH]
    if held:
        in_hbm *= state.counts[ADMITTED_TOKENS + HBM] / held
    if rank <= math.floor(in_hbm + room / (node.growth * size)):
        state.actors[actor].admitted = 1
        state.counts[ADMITTED] += 1


@called_from_compiled
def _ratio(state: State, segment_class: int) -> float:
    writes = state.classes[segment_class].writes
    return state.classes[segment_class].reads / writes if writes > 0.0 else 0.0


@called_from_compiled
def tier_for(state: State, trace: ReplayTrace, node: Node, actor: int, num_tokens: int) -> int:
    """`Placement.tier_for` of every policy."""
    if node.policy == HBM_FIRST or node.policy == LRU or node.policy == HBM_FIRST_FREED or node.policy == HBM_FIRST_LRU_PER_TIER:
        return HBM
    if node.policy == OUTPUT:
        return int(state.actors[actor].request_tier)
    segment_class = trace.programs[state.actors[actor].program].kind
    if node.policy == RATIO:
        own = _ratio(state, segment_class)
        lower = 0
        for other in range(NUM_CLASSES):
            if _ratio(state, other) < own:
                lower += state.places[other, HBM].live + state.places[other, FLASH].live
        return HBM if lower < node.hbm_tokens else FLASH
    if segment_class == WORKER and _ranks_workers(node):
        if not state.actors[actor].admitted:
            return FLASH
        return FLASH if state.counts[FREE + HBM] - _reserve_left(state) < num_tokens else HBM
    return int(state.classes[segment_class].tier)


@called_from_compiled
def begin_request(state: State, node: Node, actor: int, output_tokens: int) -> None:
    """`OutputLength.on_request`."""
    if node.policy != OUTPUT:
        return
    total = 0.0
    below = 0.0
    own = min(NUM_BINS - 1, int(BINS_PER_OCTAVE * math.log2(max(1.0, float(output_tokens)))))
    for i in range(NUM_BINS):
        state.output_written[i] *= 1.0 - OUTPUT_FORGETTING
        if i < own:
            below += state.output_written[i]
    for i in range(NUM_BINS):
        total += state.output_written[i]
    state.actors[actor].request_bin = own
    share = min(1.0, node.hbm_tokens / max(1, state.counts[OUTPUT_LIVE]))
    state.actors[actor].request_tier = HBM if below <= share * total else FLASH


@called_from_compiled
def touch(state: State, node: Node, actor: int) -> None:
    """`LruMigrate` orders by it: the actor's segment was read or written last."""
    if node.policy == LRU:
        state.counts[TICK] += 1
        state.actors[actor].last_read = state.counts[TICK]


@called_from_compiled
def next_to_migrate(state: State) -> int:
    """`LruMigrate.next_to_migrate`; -1: none."""
    victim = -1
    oldest = np.iinfo(np.int64).max
    for actor in range(len(state.actors)):
        if state.actors[actor].is_live and state.tokens[actor, HBM] > 0 and state.actors[actor].last_read < oldest:
            oldest = state.actors[actor].last_read
            victim = actor
    return victim


@called_from_compiled
def count_admitted(state: State, actor: int, tier: int, number: int) -> None:
    """`Lachesis.on_allocated`."""
    if state.actors[actor].admitted:
        state.counts[ADMITTED_TOKENS + tier] += number


@called_from_compiled
def close_segment(state: State, trace: ReplayTrace, node: Node, actor: int) -> None:
    """`Placement.close`; call it while the segment's tokens are still counted as its own."""
    segment_class = trace.programs[state.actors[actor].program].kind
    if state.actors[actor].admitted:
        state.counts[ADMITTED] -= 1
        for tier in range(2):
            state.counts[ADMITTED_TOKENS + tier] -= state.tokens[actor, tier]
        state.actors[actor].admitted = 0
        state.counts[SIZE_COUNT] += 1
        weight = max(SIZE_WEIGHT, 1.0 / state.counts[SIZE_COUNT])
        step = state.actors[actor].written - state.real[SIZE_MEAN]
        state.real[SIZE_MEAN] += weight * step
        state.real[SIZE_VARIANCE] = (1.0 - weight) * (state.real[SIZE_VARIANCE] + weight * step * step)
    if node.policy == RATIO:
        state.classes[segment_class].reads += state.actors[actor].reads - RATIO_FORGETTING * state.classes[segment_class].reads
        state.classes[segment_class].writes += (
            state.actors[actor].written - RATIO_FORGETTING * state.classes[segment_class].writes
        )
    state.actors[actor].request_bin = 0
