# SPDX-License-Identifier: Apache-2.0
"""When a pausing workflow reads its cache again: learned online, by what it waits for and how long it has waited.

All private blocks of a workflow are next read together, by its next request; so what is estimated is one pause per workflow, not
one time per block. A pause ends with a request (a *return*) or with the workflow's end, whichever comes first: two competing
risks. Both are kept as hazards on a fixed grid of log-spaced bins, the Kaplan-Meier (actuarial) estimate: of the pauses that have
lasted until a bin, the share that returned, or ended, in it. A pause that is merely seen to last counts as being at risk until
then, and no longer. In a bin the rate is constant, so that every question has a closed form.

What a pause is like depends on agent, finish reason, tool and turn state, and most combinations are rare. Each has counts of its
own, and its hazards lean on those of the state one less specific with the weight of `BACKOFF_PAUSES` observations, in each bin: a
state that was seen often at short waits and hardly ever at long ones is its own at the former and like its kind at the latter.
The least specific one leans on a prior, so that there is an estimate from the first pause on. Old counts fade (`MEMORY_PAUSES`).

Sessions differ beyond that: one's tool calls are always slower than another's. `pace` (`pace.py`) stretches the law of a state
for one session.

Scheduler thread, or the simulator's; one per engine. No IO, no locks, deterministic. docs/next-use.md has what it is worth.
"""

import bisect
import json
import math
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["BIN_EDGES_S", "MAX_STATES", "NEVER_S", "NextUseError", "NextUseModel", "PauseState"]

BINS_PER_OCTAVE = 3
FIRST_EDGE_S = 0.25
NUM_EDGES = 57
BIN_EDGES_S: tuple[float, ...] = (0.0, *(FIRST_EDGE_S * 2 ** (index / BINS_PER_OCTAVE) for index in range(NUM_EDGES)))
"""Where the bins begin; the last one, from about 29 hours on, has no end."""

NUM_BINS = len(BIN_EDGES_S)

NEVER_S = 3600.0
"""What a pause that ends without a return counts in an expected time: an hour, after which hardly any cache has survived. Longer
waits count as much, too, so that one in a thousand that lasts for days does not outweigh all others."""

REFRESH_SHARE, REFRESH_LEAST_S = 0.05, 0.5
"""An estimate is made again when the time waited has grown by that share, and not within so many seconds. Every bin or two is too
coarse: on recorded sessions (docs/replay.md) it costs 1 to 3 % of the gap from LRU to Belady."""

MAX_STATES = 4096
"""States remembered; the one not observed for longest is forgotten, and then is like the less specific one."""

BACKOFF_PAUSES = 8.0
"""Pauses seen in a state after which, in a bin, its own count as much as those of the less specific state."""

MEMORY_PAUSES = 4000.0
"""Of its latest pauses, about so many decide a state's estimate."""

MAX_UNSEEN_PAUSES = 64
"""A state's estimate is made anew after so many pauses, at the latest (sooner as long as few were seen)."""

MAX_DISCOUNT_TABLES = 4
"""Horizons per state whose tables are kept."""

HORIZON_STEPS_PER_OCTAVE = 8
"""Horizons are rounded to this, so that a horizon that follows a measured time needs few tables."""

TOOL_CALL_S, TOOL_CALL_SHAPE, TOOL_CALL_ENDS = 8.0, 1.1, 0.01
TURN_END_S, TURN_END_SHAPE, TURN_END_ENDS = 188.0, 0.75, 0.12
"""Prior: median and shape of a log-logistic law, and the share of pauses without a return: fitted to the quartiles of the
kv-cache-tester sessions (tool calls 5, 8 and 19 s; turn ends 44, 182 and 792 s; 13 % of the turns were the last)."""

FORMAT, VERSION = "vllm-lifetime next use", 1
_MAX_WEIGHT = 1e9
_MAX_COUNT = 1e12
_BIN_TEXTS = frozenset(map(str, range(NUM_BINS)))


class NextUseError(ValueError):
    """A stored model cannot be read; the message says why."""


class PauseState(NamedTuple):
    """What is known of a pause. None: not known.

    `finish_reason` is of the request before it (`stop`, `length`, `tool_calls`), `tool` the tool that it called; `turn_is_over`:
    whether a `turn_end` boundary followed, so that what is waited for is the user.
    """

    agent: str | None = None
    finish_reason: str | None = None
    tool: str | None = None
    turn_is_over: bool | None = None


Key = tuple[str | bool | None, ...]
"""A state at one level of the hierarchy: see `_levels`."""


def _levels(state: PauseState) -> tuple[Key, ...]:
    """From the least specific to the most. Keys of different levels differ in length."""
    agent, finish_reason, tool, turn_is_over = state
    return (
        (turn_is_over,),
        (turn_is_over, finish_reason),
        (turn_is_over, finish_reason, tool),
        (turn_is_over, finish_reason, tool, agent),
    )


class _Counts:
    """Pauses of one state by the bin in which they returned, ended, or were last seen, times `weight`: the latest counts that."""

    __slots__ = ("ended", "returned", "seen", "weight")

    def __init__(self) -> None:
        self.returned = np.zeros(NUM_BINS)
        self.ended = np.zeros(NUM_BINS)
        self.seen = np.zeros(NUM_BINS)
        self.weight = 1.0

    def add(self, counts: NDArray[np.float64], index: int) -> None:
        self.weight *= 1.0 + 1.0 / MEMORY_PAUSES
        if self.weight > _MAX_WEIGHT:
            for each in (self.returned, self.ended, self.seen):
                each /= self.weight
            self.weight = 1.0
        counts[index] += self.weight

    def hazards(self, parent: NDArray[np.float64]) -> NDArray[np.float64]:
        """Share of those at risk in each bin that return and that end in it, shape (2, bins), leaning on `parent`'s."""
        both = self.returned + self.ended
        # Of those last seen in a bin, half were at risk in it (the actuarial estimate).
        at_risk = np.cumsum((both + self.seen)[::-1])[::-1] - 0.5 * self.seen
        events = np.stack((self.returned, self.ended)) / self.weight
        blended: NDArray[np.float64] = (events + BACKOFF_PAUSES * parent) / (at_risk / self.weight + BACKOFF_PAUSES)
        return blended


class _Law:
    """The law of a state's pauses, as rates per second by bin, and what follows from them."""

    __slots__ = ("discounts", "end_rates", "remaining", "return_rates", "survivals", "valid_until")

    def __init__(self, hazards: NDArray[np.float64], valid_until: int) -> None:
        self.valid_until = valid_until
        total = np.minimum(hazards.sum(axis=0), 1.0 - 1e-9)
        logs = np.log1p(-total)
        rates = -logs / _WIDTHS  # 0 in the last bin, which has no end
        share = hazards / np.maximum(hazards.sum(axis=0), 1e-300)
        self.return_rates: list[float] = (rates * share[0]).tolist()
        self.end_rates: list[float] = (rates * share[1]).tolist()
        self.survivals: list[float] = [1.0, *np.exp(np.cumsum(logs[:-1])).tolist()]
        """Probability of lasting until each bin's begin."""
        self.remaining = self._backward(None)
        self.discounts: OrderedDict[int, list[float]] = OrderedDict()

    def _backward(self, horizon_s: float | None) -> list[float]:
        """The expected time (or discount) at each bin's begin, given that the pause has lasted until then."""
        values = [NEVER_S if horizon_s is None else 0.0] * NUM_BINS
        for index in range(NUM_BINS - 2, -1, -1):
            values[index] = self.within(index, BIN_EDGES_S[index], values[index + 1], horizon_s)
        return values

    def within(self, index: int, waited_s: float, after: float, horizon_s: float | None) -> float:
        """As `_backward` for a wait in bin `index`, of which the next one's begin is worth `after`."""
        left_s = BIN_EDGES_S[index + 1] - waited_s
        returns, ends = self.return_rates[index], self.end_rates[index]
        rate = returns + ends + (0.0 if horizon_s is None else 1.0 / horizon_s)
        if rate * left_s < 1e-12:
            return after + (left_s if horizon_s is None else 0.0)
        stays = math.exp(-rate * left_s)
        gain = returns if horizon_s is not None else 1.0 + ends * NEVER_S
        value = gain / rate * (1.0 - stays) + stays * after
        return min(value, NEVER_S) if horizon_s is None else value

    def discount_table(self, step: int) -> list[float]:
        """Discounts at the bins' begins, for horizon number `step`."""
        table = self.discounts.get(step)
        if table is None:
            table = self.discounts[step] = self._backward(2.0 ** (step / HORIZON_STEPS_PER_OCTAVE))
            if len(self.discounts) > MAX_DISCOUNT_TABLES:
                self.discounts.popitem(last=False)
        return table


class NextUseModel:
    """See the module. Any state may be asked for, seen or not; times below 0 count as 0."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Key, _Counts] = OrderedDict()
        self._laws: dict[PauseState, _Law] = {}
        self.num_observed = 0
        """Pauses observed."""

    def __len__(self) -> int:
        """States remembered, over all levels."""
        return len(self._counts)

    # ------------------------------------------------------------------ learning

    def observe(self, state: PauseState, gap_s: float) -> None:
        """A pause in `state` ended with a request after `gap_s`. O(levels)."""
        self._observe(state, gap_s, "returned")

    def observe_end(self, state: PauseState, waited_s: float) -> None:
        """A pause in `state` ended with the workflow after `waited_s`. O(levels)."""
        self._observe(state, waited_s, "ended")

    def observe_waiting(self, state: PauseState, waited_s: float) -> None:
        """A pause in `state` has lasted `waited_s`, and no more will be heard of it, or it has changed its state. O(levels)."""
        self._observe(state, waited_s, "seen")

    def _observe(self, state: PauseState, time_s: float, what: str) -> None:
        index = _bin(time_s)
        for key in _levels(state):
            counts = self._counts.get(key)
            if counts is None:
                counts = self._counts[key] = _Counts()
            self._counts.move_to_end(key)
            counts.add(getattr(counts, what), index)
        while len(self._counts) > MAX_STATES:
            self._counts.popitem(last=False)
        self.num_observed += 1

    # ------------------------------------------------------------------ asking

    def expected_remaining_s(self, state: PauseState, waited_s: float, pace: float = 1.0) -> float:
        """Expected seconds until the pause's end, given that it has lasted `waited_s`; at most `NEVER_S`, as for no return.

        `pace` > 0 is how many times longer this session's pauses are than others'. A few microseconds; O(levels x bins) once per
        state and `MAX_UNSEEN_PAUSES` pauses.
        """
        law = self._law(state)
        waited_s = max(0.0, waited_s) / pace
        index = _bin(waited_s)
        if index == NUM_BINS - 1:
            return NEVER_S
        return min(NEVER_S, pace * law.within(index, waited_s, law.remaining[index + 1], None))

    def reuse_discount(self, state: PauseState, waited_s: float, horizon_s: float, pace: float = 1.0) -> float:
        """E[exp(-remaining / horizon_s)], given that the pause has lasted `waited_s`; no return counts 0. In [0, 1].

        What it is worth to keep a block for the return, against one that is read at once, if any block may be lost at a rate of
        1 / `horizon_s`. `horizon_s` is rounded to 1 part in 12. Cost and `pace` as for `expected_remaining_s`.

        Raises:
            ValueError: `horizon_s` is not positive.

        """
        if not horizon_s > 0.0:
            raise ValueError(f"horizon_s must be positive, it is {horizon_s}")
        law = self._law(state)
        waited_s = max(0.0, waited_s) / pace
        index = _bin(waited_s)
        if index == NUM_BINS - 1:
            return 0.0
        step = round(HORIZON_STEPS_PER_OCTAVE * math.log2(min(max(horizon_s / pace, 1e-3), 1e9)))
        table = law.discount_table(step)
        return law.within(index, waited_s, table[index + 1], 2.0 ** (step / HORIZON_STEPS_PER_OCTAVE))

    def survival(self, state: PauseState, waited_s: float) -> float:
        """Probability that a pause in `state` lasts longer than `waited_s`. A few microseconds."""
        waited_s = max(0.0, waited_s)
        index = _bin(waited_s)
        law = self._law(state)
        rate = law.return_rates[index] + law.end_rates[index]
        return law.survivals[index] * math.exp(-rate * (waited_s - BIN_EDGES_S[index]))

    def median_s(self, state: PauseState) -> float:
        """Half of the pauses in `state` are longer. O(log bins)."""
        survivals = self._law(state).survivals
        index = bisect.bisect_left(survivals, -0.5, key=lambda survival: -survival)
        if index == NUM_BINS:
            return BIN_EDGES_S[-1]
        before, after = survivals[index - 1], survivals[index]
        share = math.log(before / 0.5) / math.log(before / after)
        return BIN_EDGES_S[index - 1] + share * (BIN_EDGES_S[index] - BIN_EDGES_S[index - 1])

    def worthwhile_wait_s(self, state: PauseState, horizon_s: float) -> float:
        """How long it pays to keep a block for a pause in `state`, if keeping it for `horizon_s` costs as much as a miss.

        The t with the largest P(return within t) - E[min(pause, t)] / horizon_s, to a bin's begin. O(bins).
        """
        law = self._law(state)
        best_s = value = best = 0.0
        for index in range(NUM_BINS - 1):
            rate = law.return_rates[index] + law.end_rates[index]
            leaves = law.survivals[index] - law.survivals[index + 1]
            if rate > 0.0:
                value += leaves / rate * (law.return_rates[index] - 1.0 / horizon_s)
            if value > best:
                best, best_s = value, BIN_EDGES_S[index + 1]
        return best_s

    def next_refresh_s(self, waited_s: float) -> float:
        """The waited time at which an estimate made at `waited_s` should be made again: `REFRESH_SHARE` later."""
        return waited_s + max(REFRESH_LEAST_S, REFRESH_SHARE * waited_s)

    def _law(self, state: PauseState) -> _Law:
        law = self._laws.get(state)
        if law is not None and self.num_observed <= law.valid_until:
            return law
        hazards = _PRIORS[_is_turn_end(state)]
        for key in _levels(state):
            counts = self._counts.get(key)
            if counts is not None:
                hazards = counts.hazards(hazards)
        if law is None and len(self._laws) >= MAX_STATES:
            self._laws.pop(next(iter(self._laws)))
        law = self._laws[state] = _Law(hazards, self.num_observed + min(self.num_observed // 16, MAX_UNSEEN_PAUSES))
        return law

    # ------------------------------------------------------------------ storing

    def to_json(self) -> str:
        """What was learned, as text for `from_json`: a row of sparse counts per state."""
        rows = [
            {
                "state": list(key),
                **{name: _sparse(getattr(counts, name), counts.weight) for name in ("returned", "ended", "seen")},
            }
            for key, counts in self._counts.items()
        ]
        head = {"format": FORMAT, "version": VERSION, "bins_s": list(BIN_EDGES_S), "num_observed": self.num_observed}
        return json.dumps({**head, "states": rows})

    @classmethod
    def from_json(cls, text: str) -> "NextUseModel":
        """The model that `to_json` wrote. Raises NextUseError: not such a text, another version, or a damaged one."""
        try:
            stored = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise NextUseError(f"a stored next-use model must be JSON: {error}") from error
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise NextUseError(f"this is no next-use model: its 'format' must be {FORMAT!r}")
        if stored.get("version") != VERSION:
            raise NextUseError(f"a next-use model of version {stored.get('version')!r} was found; this reads version {VERSION}")
        bins_s, rows, num_observed = stored.get("bins_s"), stored.get("states"), stored.get("num_observed")
        if bins_s != list(BIN_EDGES_S):
            raise NextUseError(f"field 'bins_s' must be the {NUM_BINS} bins of this version")
        if not isinstance(rows, list) or len(rows) > MAX_STATES:
            raise NextUseError(f"field 'states' must be a list of at most {MAX_STATES} states")
        if type(num_observed) is not int or num_observed < 0:
            raise NextUseError(f"field 'num_observed' must be a whole number of at least 0, it is {num_observed!r}")
        model = cls()
        for index, row in enumerate(rows):
            key, counts = _read_row(row, f"states[{index}]")
            model._counts[key] = counts
        model.num_observed = num_observed
        return model


def _bin(time_s: float) -> int:
    return bisect.bisect_right(BIN_EDGES_S, max(0.0, time_s)) - 1


def _is_turn_end(state: PauseState) -> bool:
    """What a pause is by its state alone. Where turns are not known, an answer that calls no tool is taken for the end of one."""
    return state.finish_reason == "stop" if state.turn_is_over is None else state.turn_is_over


def _prior(median_s: float, shape: float, ends: float) -> NDArray[np.float64]:
    """Hazards of a log-logistic law of which the share `ends` does not return, shape (2, bins)."""
    survival = 1.0 / (1.0 + (np.array(BIN_EDGES_S) / median_s) ** shape)
    hazard = 1.0 - np.append(survival[1:], 0.5 * survival[-1]) / survival
    return np.stack(((1.0 - ends) * hazard, ends * hazard))


def _sparse(counts: NDArray[np.float64], weight: float) -> dict[str, float]:
    return {str(index): float(counts[index] / weight) for index in np.flatnonzero(counts)}


def _read_row(row: Any, where: str) -> tuple[Key, _Counts]:
    """A state and its counts. Raises NextUseError."""
    key = row.get("state") if isinstance(row, dict) else None
    if not isinstance(key, list) or not 1 <= len(key) <= len(PauseState._fields):
        raise NextUseError(f"{where}: field 'state' must be a list of 1 to {len(PauseState._fields)} values, it is {key!r}")
    is_sound = (key[0] is None or isinstance(key[0], bool)) and all(value is None or isinstance(value, str) for value in key[1:])
    if not is_sound:
        raise NextUseError(f"{where}: field 'state' must be true, false or null, then texts or nulls, it is {key!r}")
    counts = _Counts()
    for name in ("returned", "ended", "seen"):
        stored = row.get(name)
        if not isinstance(stored, dict):
            raise NextUseError(f"{where}: field {name!r} must be counts by bin, it is {stored!r}")
        for bin_text, count in stored.items():
            is_bin = bin_text in _BIN_TEXTS
            if not is_bin or type(count) not in (int, float) or not 0.0 <= count < _MAX_COUNT:
                raise NextUseError(f"{where}: field {name!r} must be counts of at least 0 by bin, it has {bin_text!r}: {count!r}")
            getattr(counts, name)[int(bin_text)] = count
    return tuple(key), counts


_WIDTHS = np.diff(np.append(BIN_EDGES_S, np.inf))
_PRIORS = {
    False: _prior(TOOL_CALL_S, TOOL_CALL_SHAPE, TOOL_CALL_ENDS),
    True: _prior(TURN_END_S, TURN_END_SHAPE, TURN_END_ENDS),
}
