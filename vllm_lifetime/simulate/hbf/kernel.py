# SPDX-License-Identifier: Apache-2.0
"""The step loop of the decode node: compiled, deterministic, no Python objects.

A request waits (tool or user), is prefilled elsewhere for the time to first token, lands, and decodes one token a step. It takes

    weights and fixed cost + KV read / read bandwidth + [anything written to flash] x (program latency + bytes / write bandwidth)

where what is written to flash is what was bound for it since the last step: decoded tokens and landed prefills (section 5.1).
"""

import numpy as np

from vllm_lifetime.simulate.hbf.compiled import called_from_compiled, compiled
from vllm_lifetime.simulate.hbf.compiled_policies import (
    begin_request,
    close_segment,
    count_admitted,
    next_to_migrate,
    open_segment,
    tier_for,
    touch,
)
from vllm_lifetime.simulate.hbf.replay_trace import CLASSES, NO_PROGRAM, ReplayTrace
from vllm_lifetime.simulate.hbf.state import (
    DEAD_HEAD,
    DEAD_TAIL,
    DECODING,
    EVICTED,
    FLUSH,
    FREE,
    FREE_ACTORS,
    HEAP,
    LOG_CLOSE,
    LOG_MOVE,
    LOG_OPEN,
    LOG_READ,
    LOG_REQUEST,
    LOG_WRITE,
    LOGGED,
    LOST_HEAD,
    LOST_TAIL,
    NOW,
    NUM_STEP_BINS,
    NUM_UIDS,
    OUTPUT_LIVE,
    POLICY_NUMBERS,
    SESSIONS_ENDED,
    SESSIONS_STARTED,
    STEP_BIN_S,
    STEPS,
    DecisionLog,
    Node,
    State,
)

__all__ = ["ERRORS", "NO_ROOM", "OK", "run_until", "start_sessions"]

HBM, FLASH = 0, 1
OUTPUT = POLICY_NUMBERS["output_length"]
LRU = POLICY_NUMBERS["lru_migrate"]
RATIO = POLICY_NUMBERS["read_write_ratio"]
NUM_CLASSES = len(CLASSES)

BLOCK_TOKENS = 16
"""Decoded tokens get their place in blocks of so many, the last of a request in a smaller one, so that totals are exact."""

OK, NO_ROOM, NO_ACTOR, NO_RING, IDLE, NOT_CONSERVED = range(6)
ERRORS = {
    NO_ROOM: "the live KV of so many sessions does not fit into HBM and flash together; take a shorter SLO or more stacks",
    NO_ACTOR: "more programs run at a time than the simulator has room for",
    NO_RING: "more closed segments stay cached than the simulator has room for",
    IDLE: "no session has anything left to do",
    NOT_CONSERVED: "tokens were lost or made up: free + live + dead is not the capacity",
}
"""What a code other than `OK` means."""


@called_from_compiled
def _log(state: State, log: DecisionLog, kind: int, uid: int, a: int, b: int) -> None:
    at = state.counts[LOGGED]
    if at < len(log.rows):
        log.rows[at, 0] = kind
        log.rows[at, 1] = uid
        log.rows[at, 2] = a
        log.rows[at, 3] = b
        state.counts[LOGGED] = at + 1


@called_from_compiled
def _push(state: State, at_s: float, actor: int) -> None:
    """Wake `actor` at that time. Equal times: in any, but always the same, order."""
    i = state.counts[HEAP]
    state.counts[HEAP] = i + 1
    while i > 0:
        above = (i - 1) // 2
        if state.actors[above].heap_s <= at_s:
            break
        state.actors[i].heap_s = state.actors[above].heap_s
        state.actors[i].heap_actor = state.actors[above].heap_actor
        i = above
    state.actors[i].heap_s = at_s
    state.actors[i].heap_actor = actor


@called_from_compiled
def _pop(state: State) -> int:
    """The actor that wakes first; the heap is not empty."""
    first = int(state.actors[0].heap_actor)
    size = state.counts[HEAP] - 1
    state.counts[HEAP] = size
    at_s = state.actors[size].heap_s
    actor = state.actors[size].heap_actor
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and state.actors[child + 1].heap_s < state.actors[child].heap_s:
            child += 1
        if state.actors[child].heap_s >= at_s:
            break
        state.actors[i].heap_s = state.actors[child].heap_s
        state.actors[i].heap_actor = state.actors[child].heap_actor
        i = child
    state.actors[i].heap_s = at_s
    state.actors[i].heap_actor = actor
    return first


@called_from_compiled
def _take(state: State, trace: ReplayTrace, actor: int, tier: int, number: int) -> None:
    """Give the actor's segment `number` tokens of `tier`, which has them."""
    segment_class = trace.programs[state.actors[actor].program].kind
    state.counts[FREE + tier] -= number
    state.tokens[actor, tier] += number
    state.places[segment_class, tier].live += number
    count_admitted(state, actor, tier, number)
    state.places[segment_class, tier].written += number
    if tier == FLASH:
        state.counts[FLUSH] += number


@called_from_compiled
def _evict_oldest_dead(state: State) -> bool:
    """Hand back the tokens of the segment that closed first; False: there is none."""
    if state.counts[DEAD_HEAD + HBM] == state.counts[DEAD_TAIL]:
        return False
    _evict_dead_of(state, HBM)
    _evict_dead_of(state, FLASH)
    state.counts[EVICTED] += 1
    return True


@called_from_compiled
def _evict_dead_of(state: State, tier: int) -> None:
    """Hand back what the oldest dead segment has in `tier`."""
    head = state.counts[DEAD_HEAD + tier]
    state.counts[FREE + tier] += state.dead[head, tier]
    state.counts[DEAD_HEAD + tier] = (head + 1) % len(state.dead)


@called_from_compiled
def _make_room(state: State, tier: int, number: int) -> None:
    """Where each tier has a queue of its own: evict its oldest dead segments until `number` tokens are free, or none is left."""
    while state.counts[FREE + tier] < number and state.counts[DEAD_HEAD + tier] != state.counts[DEAD_TAIL]:
        _evict_dead_of(state, tier)
        state.counts[EVICTED] += 1


@called_from_compiled
def _migrate(state: State, trace: ReplayTrace, log: DecisionLog, number: int) -> None:
    """Copy segments read longest ago to flash until `number` tokens fit into HBM."""
    while state.counts[FREE + HBM] < number:
        victim = next_to_migrate(state)
        if victim < 0:
            return
        moved = min(state.tokens[victim, HBM], state.counts[FREE + FLASH])
        if moved == 0:
            return
        segment_class = trace.programs[state.actors[victim].program].kind
        state.tokens[victim, HBM] -= moved
        state.places[segment_class, HBM].live -= moved
        state.counts[FREE + HBM] += moved
        _take(state, trace, victim, FLASH, moved)
        _log(state, log, LOG_MOVE, state.actors[victim].uid, moved, 0)


@called_from_compiled
def _write(state: State, trace: ReplayTrace, node: Node, log: DecisionLog, actor: int, number: int) -> int:
    """Allocate `number` tokens for the actor's segment where the policy wants them; what does not fit goes to the other tier."""
    if number == 0:
        return OK
    wanted = tier_for(state, trace, node, actor, number)
    _log(state, log, LOG_WRITE, state.actors[actor].uid, number, wanted)
    if node.policy == LRU:
        _migrate(state, trace, log, number)
    state.actors[actor].written += number
    if node.policy == OUTPUT:
        state.counts[OUTPUT_LIVE] += number
        state.output_written[state.actors[actor].request_bin] += number
    left = number
    while True:
        if node.evicts_per_tier:
            _make_room(state, wanted, left)
        given = min(left, state.counts[FREE + wanted])
        if given > 0:
            _take(state, trace, actor, wanted, given)
            left -= given
            if wanted == HBM:
                touch(state, node, actor)
        if left > 0:
            if node.evicts_per_tier:
                _make_room(state, 1 - wanted, left)
            given = min(left, state.counts[FREE + 1 - wanted])
            _take(state, trace, actor, 1 - wanted, given)
            state.places[trace.programs[state.actors[actor].program].kind, wanted].spilled += given
            left -= given
        if left == 0:
            return OK
        if state.counts[LOST_HEAD] != state.counts[LOST_TAIL]:
            code = _free_oldest_lost(state, trace, node, log)
            if code != OK:
                return code
        elif not _evict_oldest_dead(state):
            return NO_ROOM


@called_from_compiled
def _read(state: State, node: Node, log: DecisionLog, actor: int, number: int) -> None:
    """A decode step has read `number` tokens of the actor's segment."""
    state.actors[actor].reads += number
    touch(state, node, actor)
    _log(state, log, LOG_READ, state.actors[actor].uid, number, 0)


@called_from_compiled
def _begin(state: State, trace: ReplayTrace, node: Node, log: DecisionLog, actor: int, program: int, parent: int) -> None:
    """The actor runs `program` from its first row."""
    state.actors[actor].program = program
    state.actors[actor].row = trace.programs[program].first_row
    state.actors[actor].parent = parent
    state.actors[actor].pending = 0
    state.actors[actor].written = 0
    state.actors[actor].reads = 0.0
    state.actors[actor].request_tier = HBM
    state.actors[actor].is_live = 1
    state.actors[actor].uid = state.counts[NUM_UIDS]
    state.counts[NUM_UIDS] += 1
    _log(state, log, LOG_OPEN, state.actors[actor].uid, program, 0)
    open_segment(state, trace, node, actor)
    _wait(state, trace, actor)


@called_from_compiled
def _wait(state: State, trace: ReplayTrace, actor: int) -> None:
    """The actor's present row begins."""
    row = state.actors[actor].row
    _push(state, state.real[NOW] + trace.rows[row].wait_s + trace.rows[row].ttft_s, actor)


@called_from_compiled
def _close(state: State, trace: ReplayTrace, node: Node, log: DecisionLog, actor: int) -> int:
    """The actor's segment closes."""
    close_segment(state, trace, node, actor)
    _log(state, log, LOG_CLOSE, state.actors[actor].uid, 0, 0)
    segment_class = trace.programs[state.actors[actor].program].kind
    tail = state.counts[DEAD_TAIL]
    for tier in range(2):
        number = state.tokens[actor, tier]
        state.places[segment_class, tier].live -= number
        state.tokens[actor, tier] = 0
        if node.frees_at_boundary:
            state.counts[FREE + tier] += number
        else:
            state.dead[tail, tier] = number
        if node.policy == OUTPUT:
            state.counts[OUTPUT_LIVE] -= number
    state.actors[actor].is_live = 0
    if not node.frees_at_boundary:
        tail = (tail + 1) % len(state.dead)
        if tail == state.counts[DEAD_HEAD + HBM] or tail == state.counts[DEAD_HEAD + FLASH]:
            return NO_RING
        state.counts[DEAD_TAIL] = tail
    return OK


@called_from_compiled
def _free_oldest_lost(state: State, trace: ReplayTrace, node: Node, log: DecisionLog) -> int:
    """The lease of the segment is over that lost its boundary first, or its place is needed."""
    head = state.counts[LOST_HEAD]
    actor = state.actors[head].lost_actor
    state.counts[LOST_HEAD] = (head + 1) % len(state.actors)
    state.actors[state.counts[FREE_ACTORS]].free_actor = actor
    state.counts[FREE_ACTORS] += 1
    return _close(state, trace, node, log, actor)


@called_from_compiled
def _new_actor(state: State, trace: ReplayTrace, node: Node, log: DecisionLog) -> int:
    """An idle actor, if need be that of the segment that lost its boundary first; -1: there is none."""
    if state.counts[FREE_ACTORS] == 0:
        if state.counts[LOST_HEAD] == state.counts[LOST_TAIL]:
            return -1
        if _free_oldest_lost(state, trace, node, log) != OK:
            return -1
    state.counts[FREE_ACTORS] -= 1
    return int(state.actors[state.counts[FREE_ACTORS]].free_actor)


@called_from_compiled
def _lose(state: State, trace: ReplayTrace, node: Node, log: DecisionLog, actor: int) -> int:
    """The event of its end never arrives: the segment keeps its place and its actor until its lease is over.

    Returns the actor that goes on, or -1: there is none.
    """
    goes_on = _new_actor(state, trace, node, log)
    if goes_on >= 0:
        tail = state.counts[LOST_TAIL]
        state.actors[tail].lost_actor = actor
        state.actors[tail].lost_s = state.real[NOW] + node.lease_s
        state.counts[LOST_TAIL] = (tail + 1) % len(state.actors)
    return goes_on


@called_from_compiled
def _finish_request(state: State, trace: ReplayTrace, node: Node, log: DecisionLog, actor: int) -> int:
    """The actor's present request is over: start its children, or go on, up to whoever waits for it."""
    row = state.actors[actor].row
    children = trace.rows[row].num_children
    if children:
        state.actors[actor].pending = children
        for i in range(children):
            child = _new_actor(state, trace, node, log)
            if child < 0:
                return NO_ACTOR
            _begin(state, trace, node, log, child, trace.rows[row].first_child + i, actor)
        return OK
    while True:
        state.actors[actor].row += 1
        program = state.actors[actor].program
        if state.actors[actor].row < trace.programs[program].end_row:
            _wait(state, trace, actor)
            return OK
        parent = state.actors[actor].parent
        if state.is_lost[program]:
            actor = _lose(state, trace, node, log, actor)
            if actor < 0:
                return NO_ACTOR
        else:
            code = _close(state, trace, node, log, actor)
            if code != OK:
                return code
        if trace.programs[program].successor != NO_PROGRAM:
            _begin(state, trace, node, log, actor, trace.programs[program].successor, parent)
            return OK
        if parent < 0:
            state.counts[SESSIONS_ENDED] += 1
            _begin(state, trace, node, log, actor, _next_session(state, trace), -1)
            return OK
        state.actors[state.counts[FREE_ACTORS]].free_actor = actor
        state.counts[FREE_ACTORS] += 1
        state.actors[parent].pending -= 1
        if state.actors[parent].pending > 0:
            return OK
        actor = parent


@called_from_compiled
def _next_session(state: State, trace: ReplayTrace) -> int:
    number = state.counts[SESSIONS_STARTED]
    state.counts[SESSIONS_STARTED] += 1
    return int(trace.session_program[state.order[number % len(state.order)]])


@compiled
def start_sessions(
    state: State, trace: ReplayTrace, node: Node, log: DecisionLog, sessions: int, ramp_s: float, progress: np.ndarray
) -> int:
    """Start `sessions` sessions over `ramp_s`, each somewhere on its way (`progress`, 0 to 1, of its first program's rows).

    What it has written until there is already in flash: it belongs to the past.
    """
    for i in range(sessions):
        state.counts[FREE_ACTORS] -= 1
        actor = state.actors[state.counts[FREE_ACTORS]].free_actor
        program = _next_session(state, trace)
        state.real[NOW] = ramp_s * i / sessions
        _begin(state, trace, node, log, actor, program, -1)
        first = trace.programs[program].first_row
        state.actors[actor].row = first + int(progress[i] * (trace.programs[program].end_row - first))
        before = 0
        for row in range(first, state.actors[actor].row):
            before += trace.rows[row].prefill_tokens + trace.rows[row].decode_tokens
        if before > state.counts[FREE + FLASH]:
            return NO_ROOM
        state.actors[actor].written = before
        if before:
            _take(state, trace, actor, FLASH, before)
            if node.policy == OUTPUT:
                state.counts[OUTPUT_LIVE] += before
                state.output_written[0] += before
            _log(state, log, LOG_WRITE, state.actors[actor].uid, before, -1)
    state.counts[FLUSH] = 0
    state.real[NOW] = 0.0
    return OK


@called_from_compiled
def _is_conserved(state: State, node: Node) -> bool:
    for tier in range(2):
        capacity = node.hbm_tokens if tier == HBM else node.flash_tokens
        live = 0
        for actor in range(len(state.actors)):
            live += state.tokens[actor, tier]
        by_class = 0
        for segment_class in range(NUM_CLASSES):
            by_class += state.places[segment_class, tier].live
        dead = 0
        i = state.counts[DEAD_HEAD + tier]
        while i != state.counts[DEAD_TAIL]:
            dead += state.dead[i, tier]
            i = (i + 1) % len(state.dead)
        if live != by_class or state.counts[FREE + tier] < 0 or state.counts[FREE + tier] + live + dead != capacity:
            return False
    return True


@compiled
def run_until(
    state: State, trace: ReplayTrace, node: Node, log: DecisionLog, end_s: float, end_tokens: int, most_s: float, max_steps: int
) -> int:
    """Step until `end_s` has come and `end_tokens` are written since `written` was last cleared, or `most_s`, or `max_steps`.

    Returns `OK` or a key of `ERRORS`. O(decoding requests) a step.
    """
    counts_reads = node.policy == RATIO or node.policy == LRU
    for _ in range(max_steps):
        now = state.real[NOW]
        while state.counts[LOST_HEAD] != state.counts[LOST_TAIL] and state.actors[state.counts[LOST_HEAD]].lost_s <= now:
            code = _free_oldest_lost(state, trace, node, log)
            if code != OK:
                return code
        while state.counts[HEAP] and state.actors[0].heap_s <= now:
            actor = _pop(state)
            row = state.actors[actor].row
            begin_request(state, node, actor, trace.rows[row].decode_tokens)
            if node.policy == OUTPUT:
                _log(state, log, LOG_REQUEST, state.actors[actor].uid, trace.rows[row].decode_tokens, 0)
            code = _write(state, trace, node, log, actor, trace.rows[row].prefill_tokens)
            if code != OK:
                return code
            state.actors[actor].remaining = trace.rows[row].decode_tokens
            if state.actors[actor].remaining:
                state.actors[state.counts[DECODING]].decoding = actor
                state.counts[DECODING] += 1
            else:
                code = _finish_request(state, trace, node, log, actor)
                if code != OK:
                    return code
        decoding = state.counts[DECODING]
        if now >= most_s:
            return OK
        if now >= end_s and (state.counts[STEPS] & 255) == 0:
            written = 0
            for segment_class in range(NUM_CLASSES):
                written += state.places[segment_class, HBM].written + state.places[segment_class, FLASH].written
            if written >= end_tokens:
                return OK
        if decoding == 0:
            if state.counts[HEAP] == 0:
                return IDLE
            state.counts[STEPS] += 1
            state.real[NOW] = state.actors[0].heap_s
            for segment_class in range(NUM_CLASSES):
                for tier in range(2):
                    state.places[segment_class, tier].live_s += state.places[segment_class, tier].live * (state.real[NOW] - now)
            continue
        read_tokens = 0.0
        for i in range(decoding):
            actor = state.actors[i].decoding
            program = state.actors[actor].program
            if state.actors[actor].ahead == 0:
                number = min(BLOCK_TOKENS, state.actors[actor].remaining)
                code = _write(state, trace, node, log, actor, number)
                if code != OK:
                    return code
                state.actors[actor].ahead = number
            state.actors[actor].ahead -= 1
            state.actors[actor].remaining -= 1
            own = state.tokens[actor, HBM] + state.tokens[actor, FLASH] - state.actors[actor].ahead
            context = own + trace.programs[program].shared_tokens
            reads_parent = trace.programs[program].reads_parent
            if reads_parent:
                parent = state.actors[actor].parent
                inherited = state.tokens[parent, HBM] + state.tokens[parent, FLASH]
                context += inherited
            if counts_reads:
                _read(state, node, log, actor, own)
                if reads_parent:
                    _read(state, node, log, parent, inherited)
            read_tokens += node.full_share * context + (1.0 - node.full_share) * min(float(context), node.chunk_tokens)
        step_s = node.step_s + read_tokens * node.read_s
        if state.counts[FLUSH]:
            step_s += node.program_s + state.counts[FLUSH] * node.flush_s
            state.counts[FLUSH] = 0
        state.real[NOW] = now + step_s
        state.counts[STEPS] += 1
        state.step_tokens[min(NUM_STEP_BINS - 1, int(step_s / STEP_BIN_S))] += decoding
        for segment_class in range(NUM_CLASSES):
            for tier in range(2):
                state.places[segment_class, tier].live_s += state.places[segment_class, tier].live * step_s
        if (state.counts[STEPS] & 4095) == 0 and not _is_conserved(state, node):
            return NOT_CONSERVED
        i = 0
        while i < state.counts[DECODING]:
            actor = state.actors[i].decoding
            if state.actors[actor].remaining:
                i += 1
                continue
            state.counts[DECODING] -= 1
            state.actors[i].decoding = state.actors[state.counts[DECODING]].decoding
            code = _finish_request(state, trace, node, log, actor)
            if code != OK:
                return code
    return OK if _is_conserved(state, node) else NOT_CONSERVED
