# SPDX-License-Identifier: Apache-2.0
"""How much of the gap from LRU to the offline optimum each source of knowledge about the next use closes, and an oracle for it.

    python -m benchmarks.next_use_sources TRACES [--seed 0] [--json OUT]

TRACES: kv-cache-tester sessions. Half of them, drawn by `--seed`, are learned from, the others replayed at 24 sessions at a time
with pauses of at most 1800 s. Prints a table of gap closed in % by capacity (a fraction of 24 x mean final context), and writes
it as JSON. docs/next-use.md discusses it.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_lifetime.prediction.next_use import NextUseModel, PauseState
from vllm_lifetime.prediction.pace import Pace
from vllm_lifetime.simulate.engine import ReplayPolicy, replay
from vllm_lifetime.simulate.policies import BELADY, replay_policy, train
from vllm_lifetime.simulate.schedule import EventKind, Schedule, make_schedule, mean_final_context_blocks, split_trace
from vllm_lifetime.simulate.scored import Models
from vllm_lifetime.simulate.session_score import SessionScore, SessionScorePolicy, SessionState
from vllm_lifetime.traces.read import read_trace

CAPACITIES = (0.1, 0.2, 0.35, 0.5, 0.7)
CONCURRENCY = 24
IDLE_CAP_S = 1800.0
REFRESH_S = 5.0
"""Simulated seconds between two looks at all waiting sessions."""

HORIZON_S = 300.0
"""As `policy.eviction.DEFAULT_TIME_HORIZON_S`; only `policy lifetime` measures its own."""

LONG_S = 60.0
"""An oracle row knows whether a pause is longer."""

Next = dict[tuple[int, int], float]
"""By session and request that ended last: when its session asks again, whether or not there is room for it then."""


def next_starts(schedule: Schedule) -> Next:
    """Only pauses that a request of the same session ends."""
    found: Next = {}
    upcoming: dict[int, float] = {}
    for event in reversed(schedule.events):
        if event.kind is EventKind.ARRIVAL:
            upcoming[event.session] = event.at_s
        elif event.kind is EventKind.END and event.session in upcoming:
            found[event.session, event.request] = upcoming[event.session]
    return found


def known_state(state: SessionState) -> PauseState:
    """All that the trace tells of a pause."""
    last = state.last
    assert last is not None
    return PauseState(last.agent, last.finish_reason, last.tool, last.ends_turn)


def finish_only(state: SessionState) -> PauseState:
    """Without agent."""
    return known_state(state)._replace(agent=None)


def nothing(state: SessionState) -> PauseState:
    """That it pauses."""
    return PauseState()


def learn(schedule: Schedule, state_of: Callable[[SessionState], PauseState]) -> NextUseModel:
    """A model that has seen each pause of `schedule`."""
    model = NextUseModel()
    upcoming = next_starts(schedule)
    for event in schedule.events:
        at_s = upcoming.get((event.session, event.request)) if event.kind is EventKind.END else None
        if at_s is not None:
            session = schedule.trace.sessions[event.session]
            state = SessionState(event.session, session, 0, session.requests[event.request], event.request, event.at_s)
            model.observe(state_of(state), at_s - event.at_s)
    return model


class PacedScore:
    """Discount with the session's own pace. `knows_all`: an oracle, which has the session's later pauses, too."""

    def __init__(self, model: NextUseModel, schedule: Schedule, *, knows_all: bool = False) -> None:
        self._model = model
        self._next = next_starts(schedule)
        self._paces: dict[int, Pace] = {}
        self._seen: dict[int, int] = {}
        self._ends: dict[int, list[tuple[float, int]]] = {}
        for event in schedule.events:
            if event.kind is EventKind.END:
                self._ends.setdefault(event.session, []).append((event.at_s, event.request))
        self._knows_all = knows_all

    def __call__(self, state: SessionState, now: float) -> float:
        """A `SessionScore`."""
        pace = self._paces.setdefault(state.index, Pace())
        ends = self._ends[state.index]
        seen = self._seen.get(state.index, 0)
        while seen < len(ends):
            ended_at_s, request = ends[seen]
            at_s = self._next.get((state.index, request))
            if not self._knows_all and (at_s is None or at_s > now or ended_at_s >= state.ended_at_s):
                break
            if at_s is not None:
                last = SessionState(state.index, state.session, 0, state.session.requests[request], request, ended_at_s)
                pause = known_state(last)
                pace.observe(pause, at_s - ended_at_s, self._model.median_s(pause))
            seen += 1
        self._seen[state.index] = seen
        pause = known_state(state)
        return self._model.reuse_discount(pause, now - state.ended_at_s, HORIZON_S, pace.of(pause))


def discount(model: NextUseModel, state_of: Callable[[SessionState], PauseState], *, waits: bool = True) -> SessionScore:
    """E[exp(-time to next use / horizon)] by `state_of`, and by the time waited if it `waits`."""

    def score(state: SessionState, now: float) -> float:
        return model.reuse_discount(state_of(state), now - state.ended_at_s if waits else 0.0, HORIZON_S)

    return score


def oracle_pause(upcoming: Next) -> SessionScore:
    """When the session asks again."""
    return lambda state, now: now - upcoming.get((state.index, state.last_index), float("inf"))


def oracle_long(upcoming: Next, model: NextUseModel) -> SessionScore:
    """Whether the pause is longer than `LONG_S`; apart from that, as known."""
    known = discount(model, known_state)

    def score(state: SessionState, now: float) -> float:
        is_long = upcoming.get((state.index, state.last_index), float("inf")) - state.ended_at_s > LONG_S
        return known(state, now) - is_long

    return score


def policies(learned: Schedule, schedule: Schedule) -> list[ReplayPolicy]:
    """The rows of the table, but LRU, the server's own policies and the optimum."""
    upcoming = next_starts(schedule)
    blind, finish, full = learn(learned, nothing), learn(learned, finish_only), learn(learned, known_state)
    rows: Sequence[tuple[str, SessionScore]] = (
        ("retired, finish reason", discount(finish, finish_only, waits=False)),
        ("retired, time waited", discount(blind, nothing)),
        ("retired, finish reason, time waited", discount(finish, finish_only)),
        ("... and agent", discount(full, known_state)),
        ("... and agent, and the session's own pace", PacedScore(full, schedule)),
        ("oracle: the session's pace", PacedScore(full, schedule, knows_all=True)),
        (f"oracle: whether longer than {LONG_S:.0f} s", oracle_long(upcoming, full)),
        ("oracle: the time of the next request", oracle_pause(upcoming)),
    )
    alone = SessionScorePolicy(
        "finish reason alone", discount(finish, finish_only, waits=False), acts_on_boundaries=False, refresh_s=REFRESH_S
    )
    return [
        alone,
        ReplayPolicy("retired"),
        *(SessionScorePolicy(name, score, refresh_s=REFRESH_S) for name, score in rows),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--capacity", default=",".join(map(str, CAPACITIES)))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    capacities = [float(part) for part in options.capacity.split(",")]
    learned_from, replayed = split_trace(read_trace(options.traces, "kv-cache-tester"), 0.5, seed=options.seed)
    learned = make_schedule(learned_from, CONCURRENCY, IDLE_CAP_S)
    models = train(learned, Models())
    per_fraction = CONCURRENCY * mean_final_context_blocks(replayed)
    table: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for fraction in capacities:
        blocks = int(fraction * per_fraction)
        schedule = make_schedule(replayed, CONCURRENCY, IDLE_CAP_S, capacity_blocks=blocks)
        lru = replay_policy(schedule, "lru", blocks).hit_rate
        best = replay_policy(schedule, BELADY, blocks).hit_rate
        results = {policy.name: replay(schedule, policy, blocks).hit_rate for policy in policies(learned, schedule)}
        for name in ("time", "lifetime"):
            results[f"policy {name}"] = replay_policy(schedule, name, blocks, models).hit_rate
        for name, hit_rate in {"lru": lru, "belady": best, **results}.items():
            rates.setdefault(name, []).append(hit_rate)
            table.setdefault(name, []).append(100.0 * (hit_rate - lru) / (best - lru))
        print(f"capacity {fraction:g}:", {name: round(row[-1], 1) for name, row in table.items()}, file=sys.stderr, flush=True)
    print("| gap closed, % | " + " | ".join(f"{fraction:g}" for fraction in capacities) + " |")
    print("|---|" + "---|" * len(capacities))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in row) + " |")
    if options.json is not None:
        rows = {"seed": options.seed, "capacities": capacities, "gap_closed_percent": table, "hit_rate": rates}
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
