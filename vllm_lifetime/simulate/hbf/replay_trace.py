# SPDX-License-Identifier: Apache-2.0
"""What the decode node replays: sessions as programs of requests, in flat arrays.

A **program** is one segment and the requests that extend it, one after the other. After a request, it may start other programs
and wait for all of them. So a lead agent starts workers, and a single agent's session (`reasoning_stripped`) starts turns
(`reasoning_laden`). A worker's reviewer follows it in its place. A segment closes when its program ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.boundaries import SegmentClass

__all__ = ["CLASSES", "NO_PROGRAM", "PROGRAM", "ROW", "Program", "ReplayTrace", "Request", "all_programs", "build_trace"]

CLASSES = tuple(SegmentClass)
"""Segment classes in the order of their numbers in arrays."""

NO_PROGRAM = -1

PROGRAM = np.dtype(
    [
        ("kind", np.int64),
        ("first_row", np.int64),
        ("end_row", np.int64),
        ("successor", np.int64),
        ("shared_tokens", np.int64),
        ("reads_parent", np.int64),
        ("score", np.float64),
        ("lifetime_s", np.float64),
        ("expected_tokens", np.float64),
    ]
)
"""As `Program`; `kind`: index of its class in `CLASSES`; `successor`: its number or `NO_PROGRAM`."""

ROW = np.dtype(
    [
        ("wait_s", np.float64),
        ("ttft_s", np.float64),
        ("prefill_tokens", np.int64),
        ("decode_tokens", np.int64),
        ("first_child", np.int64),
        ("num_children", np.int64),
    ]
)
"""As `Request`; its children's numbers follow each other."""


class ReplayTrace(NamedTuple):
    """Sessions by their first program, programs (`PROGRAM`) and requests (`ROW`).

    `most_actors`: most programs of one session that can run at a time, those that wait included.
    """

    session_program: NDArray[np.int64]
    programs: NDArray[Any]
    rows: NDArray[Any]
    most_actors: int


@dataclass(slots=True)
class Request:
    """A request, and the programs that it starts when it is over.

    `wait_s`: tool call or user's delay before it, the user's if `answers_user`. `prefill_tokens`: what is new in its prompt; it
    lands on the node when prefill, which takes `ttft_s`, is over.
    """

    prefill_tokens: int
    decode_tokens: int
    wait_s: float = 0.0
    ttft_s: float = 0.0
    children: "list[Program]" = field(default_factory=list)
    answers_user: bool = False


@dataclass(slots=True)
class Program:
    """One segment and its requests.

    `shared_tokens`: a prefix that its requests read, and that is neither written nor owned by it. `reads_parent`: they read the
    segment of the program that started it as well. `score`: predicted rank of its lifetime, higher = lives longer; nan: none.
    """

    segment_class: SegmentClass
    requests: list[Request] = field(default_factory=list)
    shared_tokens: int = 0
    reads_parent: bool = False
    score: float = float("nan")
    expected_tokens: float = 0.0
    successor: "Program | None" = None

    @property
    def tokens(self) -> int:
        """What it writes itself."""
        return sum(request.prefill_tokens + request.decode_tokens for request in self.requests)

    def lifetime_s(self, tpot_s: float) -> float:
        """Normalized lifetime (Lachesis Eq. 1), first request to end of its program; the initial prefill does not count."""
        total = 0.0
        for number, request in enumerate(self.requests):
            total += tpot_s * request.decode_tokens
            if number:
                total += request.wait_s + request.ttft_s
            total += max((child.chain_s(tpot_s) for child in request.children), default=0.0)
        return total

    def chain_s(self, tpot_s: float) -> float:
        """From its start until whoever waits for it goes on."""
        first = self.requests[0]
        own = first.wait_s + first.ttft_s + self.lifetime_s(tpot_s)
        return own + (self.successor.chain_s(tpot_s) if self.successor is not None else 0.0)


def all_programs(root: Program) -> list[Program]:
    """A program and all that it starts or that follows it, each after the one before it. O(requests)."""
    found = [root]
    for program in found:  # grows while it is walked
        found.extend(child for request in program.requests for child in request.children)
        if program.successor is not None:
            found.append(program.successor)
    return found


def build_trace(sessions: Sequence[Program], tpot_s: float) -> ReplayTrace:
    """The arrays of these sessions, each given by its first program.

    `tpot_s`: reference time per output token for the programs' lifetimes. O(requests), however deep programs nest.
    Raises ValueError: nothing to replay, or an empty program.
    """
    if not sessions:
        raise ValueError("the trace has no session")
    programs = list(sessions)
    rows: list[Request] = []
    bounds: list[tuple[int, int]] = []
    successors: list[int] = []
    first_children: list[int] = []
    for program in programs:  # grows while it is walked
        if not program.requests:
            raise ValueError("a program of the trace has no request")
        start = len(rows)
        for request in program.requests:
            rows.append(request)
            first_children.append(len(programs) if request.children else NO_PROGRAM)
            programs.extend(request.children)
        bounds.append((start, len(rows)))
        successors.append(NO_PROGRAM if program.successor is None else len(programs))
        if program.successor is not None:
            programs.append(program.successor)
    lifetimes_s, most_actors = _walk_back(programs, rows, bounds, first_children, successors, tpot_s)
    program_array = np.zeros(len(programs), PROGRAM)
    program_array["kind"] = [CLASSES.index(program.segment_class) for program in programs]
    program_array["first_row"] = [first for first, _ in bounds]
    program_array["end_row"] = [end for _, end in bounds]
    program_array["successor"] = successors
    program_array["lifetime_s"] = lifetimes_s
    for name in ("shared_tokens", "reads_parent", "score", "expected_tokens"):
        program_array[name] = [getattr(program, name) for program in programs]
    row_array = np.zeros(len(rows), ROW)
    for name in ("wait_s", "ttft_s", "prefill_tokens", "decode_tokens"):
        row_array[name] = [getattr(row, name) for row in rows]
    row_array["first_child"] = first_children
    row_array["num_children"] = [len(row.children) for row in rows]
    return ReplayTrace(np.arange(len(sessions), dtype=np.int64), program_array, row_array, max(most_actors[: len(sessions)]))


def _walk_back(
    programs: Sequence[Program],
    rows: Sequence[Request],
    bounds: Sequence[tuple[int, int]],
    first_children: Sequence[int],
    successors: Sequence[int],
    tpot_s: float,
) -> tuple[list[float], list[int]]:
    """`Program.lifetime_s` of each program, and how many actors it and what it starts need: children come after their parents."""
    lifetimes_s = [0.0] * len(programs)
    chains_s = [0.0] * len(programs)
    most_actors = [1] * len(programs)
    for number in range(len(programs) - 1, -1, -1):
        first, end = bounds[number]
        for row in range(first, end):
            request, child = rows[row], first_children[row]
            children = range(child, child + len(request.children))
            lifetimes_s[number] += tpot_s * request.decode_tokens + max((chains_s[i] for i in children), default=0.0)
            if row > first:
                lifetimes_s[number] += request.wait_s + request.ttft_s
            most_actors[number] = max(most_actors[number], 1 + sum(most_actors[i] for i in children))
        chains_s[number] = rows[first].wait_s + rows[first].ttft_s + lifetimes_s[number]
        if successors[number] != NO_PROGRAM:
            chains_s[number] += chains_s[successors[number]]
            most_actors[number] = max(most_actors[number], most_actors[successors[number]])
    return lifetimes_s, most_actors
