# SPDX-License-Identifier: Apache-2.0
"""Boundaries from OpenTelemetry spans: what ended, seen in the traces that a harness exports anyway.

Roles, by the GenAI semantic conventions (`gen_ai.operation.name`), OpenInference (`openinference.span.kind`) and OpenLLMetry
(`traceloop.span.kind`), the first that says anything:

- *agent*: one invocation of a named agent (`invoke_agent`, `AGENT` with `agent.name`, `agent`);
- *workflow*: a run of several agents (`invoke_workflow`, `workflow`);
- *run*: a run that names neither (`CHAIN`, an `AGENT` without a name);
- *tool*: an agent calls something (`execute_tool`, `TOOL`, `tool`).

What a span says when it has ended, well or not, follows from the spans above it:

| span | above it | boundary |
|---|---|---|
| agent | a tool or an agent, of which the nearest is an agent of the same name | none: both tell of one invocation |
| agent | a tool or an agent | `subagent_return` of that agent |
| agent | only workflows and runs | `turn_end` of that agent |
| agent | none of these | `turn_end` of the session: of its agents that nobody spawned |
| workflow, run | any of these | none: the outer one speaks |
| workflow | none of these | `workflow_end` or `turn_end`, see `RUN_END_KEY` |
| run | none of these | `turn_end` of the session |

A span is exported when it ends, so before the spans above it. A tool ends with the sub-agent that it called, and is here one
export later; everything else above may run for an hour. So a span is **held** until a tool or an agent is found above it, or
the root of its trace. What is not decided within `HOLD_S` is taken for a root, since a tool would be here by then. If an agent
turns up above it after all, its `subagent_return` follows.

The order in which spans come, how they are spread over exports, and how often each comes make no difference, as long as all
spans of a trace come within `HOLD_S`. Links are not followed: between the agents of a team they lead to whoever spoke before,
not to the caller.

Memory is bounded by `MAX_SPANS`, `MAX_TRACE_SPANS` and `MAX_AGE_S`. One thread, no IO.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from vllm_lifetime.boundaries import Boundary, BoundaryKind
from vllm_lifetime.harness.otel_spans import (
    AGENT_ID_KEY,
    NAME_KEYS,
    RESOURCE_SESSION_KEY,
    RUN_END_KEY,
    SESSION_KEYS,
    WORKFLOW_KEY,
    Role,
    Span,
    first_of,
    role_of,
)

__all__ = [
    "HOLD_S",
    "MAX_AGE_S",
    "MAX_DEPTH",
    "MAX_SPANS",
    "MAX_TRACE_SPANS",
    "Report",
    "SpanOutcome",
    "SpanTable",
]

HOLD_S = 15.0
"""Seconds for which a span waits for those above it. Exporters send every 5 seconds by default."""

MAX_AGE_S = 900.0
"""Seconds after its last span when a trace is forgotten."""

MAX_SPANS = 50_000
"""Spans remembered, over all traces; the trace that was quiet for longest goes first."""

MAX_TRACE_SPANS = 10_000
"""Spans remembered of one trace; the oldest go first."""

MAX_DEPTH = 64
"""Most spans above one that are looked at, not counting those that say nothing: bounds what one export can cost."""


class SpanOutcome(StrEnum):
    """What became of a span."""

    BOUNDARY = "boundary"
    """It gave a boundary."""
    NESTED = "nested"
    """Another span speaks for it."""
    NO_SESSION = "no_session"
    """It would have given a boundary, but neither it nor a span above it nor the resource names a session."""
    NO_NAME = "no_name"
    """A sub-agent without a name: nobody could tell which one has returned."""
    OTHER = "other"
    """It is about something else."""
    DUPLICATE = "duplicate"
    """It was here before."""
    EXPIRED = "expired"
    """It was taken for a root when `HOLD_S` had passed; counted beside what it gave."""


@dataclass(slots=True)
class Report:
    """The boundaries that became known, and what became of the spans."""

    boundaries: list[Boundary] = field(default_factory=list)
    outcomes: Counter[SpanOutcome] = field(default_factory=Counter)


class _Known:
    """A span that says something to those below it."""

    __slots__ = ("name", "parent_id", "role", "session", "workflow_id")

    def __init__(self, span: Span, role: Role | None) -> None:
        attributes = span.attributes
        self.parent_id = span.parent_id
        self.role = role
        self.name = first_of(attributes, NAME_KEYS)
        self.session = first_of(attributes, SESSION_KEYS)
        self.workflow_id = attributes.get(WORKFLOW_KEY)


class _Held:
    """A span that has ended and whose meaning depends on the spans above it.

    `session` and `workflow_id` are its own, or else those of the nearest above; `caller` is the tool or agent found above it.
    """

    __slots__ = (
        "agent_id",
        "caller",
        "depth",
        "is_decided",
        "is_expired",
        "is_inside_run",
        "message_id",
        "name",
        "resource",
        "role",
        "sent_at_s",
        "session",
        "workflow_id",
    )

    def __init__(self, span: Span, known: _Known, role: Role) -> None:
        self.role = role
        self.name = known.name
        self.agent_id = span.attributes.get(AGENT_ID_KEY)
        self.session = known.session
        self.workflow_id = known.workflow_id
        self.resource = span.resource
        self.sent_at_s = span.ended_ns / 1e9
        self.message_id = _message_id(span)
        self.caller: _Known | None = None
        self.depth = 0
        self.is_decided = False
        self.is_expired = False
        self.is_inside_run = False


class _Trace:
    """The spans of one trace that are remembered: those that say nothing by their parent's id alone."""

    __slots__ = ("last_active", "num_held", "spans", "waiting")

    def __init__(self) -> None:
        self.spans: dict[bytes, _Known | bytes] = {}
        self.waiting: dict[bytes, list[_Held]] = {}
        """Held spans, by the id of the span above them that is not here yet."""
        self.num_held = 0
        """At least as many as are in `waiting`."""
        self.last_active = 0.0


class SpanTable:
    """The recent spans, and the boundaries in them; see the module.

    Args:
        clock: monotonic seconds.
        hold_s: seconds for which a span is held.
        max_age_s: seconds after its last span when a trace is forgotten.
        max_spans: spans remembered over all traces.
        max_trace_spans: spans remembered of one trace.

    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        hold_s: float = HOLD_S,
        max_age_s: float = MAX_AGE_S,
        max_spans: int = MAX_SPANS,
        max_trace_spans: int = MAX_TRACE_SPANS,
    ) -> None:
        self._clock = clock
        self._hold_s = hold_s
        self._max_age_s = max_age_s
        self._max_spans = max_spans
        self._max_trace_spans = max_trace_spans
        self._traces: OrderedDict[bytes, _Trace] = OrderedDict()
        self._num_spans = 0
        self._deadlines: deque[tuple[float, _Held]] = deque()
        self._report = Report()

    def __len__(self) -> int:
        """Spans remembered."""
        return self._num_spans

    @property
    def next_expiry_s(self) -> float | None:
        """Seconds until `expire` has something to do; None if nothing is held."""
        while self._deadlines and self._deadlines[0][1].is_decided:
            self._deadlines.popleft()
        return max(0.0, self._deadlines[0][0] - self._clock()) if self._deadlines else None

    def ingest(self, spans: Iterable[Span]) -> Report:
        """Take spans, in any order and however often each; return what has become known by them.

        O(1) for a span that says nothing, else O(spans above it), amortised.
        """
        now = self._clock()
        self._forget_old(now)
        for span in spans:
            self._take(span, now)
        return self._take_report()

    def expire(self) -> Report:
        """Decide what has been held for `hold_s`. Call it when `next_expiry_s` has passed."""
        now = self._clock()
        while self._deadlines and (self._deadlines[0][1].is_decided or self._deadlines[0][0] <= now):
            _, held = self._deadlines.popleft()
            if not held.is_decided:
                self._give_up(held)
        self._forget_old(now)
        return self._take_report()

    # ------------------------------------------------------------------ taking spans

    def _take(self, span: Span, now: float) -> None:
        trace = self._traces.get(span.trace_id)
        if trace is None:
            trace = self._traces[span.trace_id] = _Trace()
        else:
            self._traces.move_to_end(span.trace_id)
        trace.last_active = now
        if span.span_id in trace.spans:
            self._count(SpanOutcome.DUPLICATE)
            return
        for session_id, at_ns in span.session_ends:
            self._end_session(span, session_id, at_ns)
        role = role_of(span.attributes)
        held: list[_Held] = []
        known = _Known(span, role) if span.attributes else None
        if known is None or (role is None and known.session is None and known.workflow_id is None):
            trace.spans[span.span_id] = span.parent_id
        else:
            trace.spans[span.span_id] = known
            if role is not None and role is not Role.TOOL:
                held.append(_Held(span, known, role))
                self._deadlines.append((now + self._hold_s, held[0]))
                trace.num_held += 1
        if not held:
            self._count(SpanOutcome.OTHER)
        self._num_spans += 1
        below = [each for each in trace.waiting.pop(span.span_id, ()) if not each.is_decided]
        if below:
            self._climb(trace, below, span.span_id)
        if held:
            self._climb(trace, held, span.parent_id)
        self._make_room(trace)

    def _climb(self, trace: _Trace, group: list[_Held], above_id: bytes) -> None:
        """Take held spans up from `above_id` until they are decided, or wait for a span that is not here."""
        passed: dict[bytes, None] = {}
        while True:
            above = trace.spans.get(above_id) if above_id else None
            if not above_id:
                for held in group:
                    self._reach_root(held)
                break
            if above is None:
                self._wait(trace, group, above_id)
                break
            if isinstance(above, bytes):
                passed[above_id] = None
                # A trace that runs in a circle has no root: it waits for a span that cannot come.
                above_id = above if above not in passed else b"circle"
                continue
            self._pass_over(trace, passed, above_id)
            group = [held for held in group if not self._meet(held, above)]
            if not group:
                break
            above_id = above.parent_id
        self._pass_over(trace, passed, above_id)

    @staticmethod
    def _pass_over(trace: _Trace, passed: dict[bytes, None], above_id: bytes) -> None:
        """Spans that say nothing lead to `above_id` at once from now on, so that a long chain of them is walked once."""
        for span_id in passed:
            trace.spans[span_id] = above_id
        passed.clear()

    @staticmethod
    def _wait(trace: _Trace, group: list[_Held], above_id: bytes) -> None:
        # The smaller list goes into the larger: a held span is moved O(log) times while a long chain arrives from below.
        there = trace.waiting.get(above_id)
        if there is None:
            trace.waiting[above_id] = group
        elif len(there) >= len(group):
            there.extend(group)
        else:
            group.extend(there)
            trace.waiting[above_id] = group

    # ------------------------------------------------------------------ deciding

    def _meet(self, held: _Held, above: _Known) -> bool:
        """A held span meets one above it. Returns whether that decides it."""
        held.depth += 1
        if held.depth > MAX_DEPTH:
            self._reach_root(held)
            return True
        role = above.role
        if held.caller is not None:
            return above.session is not None and self._return(held, above.session)
        if role is Role.AGENT or role is Role.TOOL:
            if held.role is not Role.AGENT or (role is Role.AGENT and held.name is not None and held.name == above.name):
                return self._decide(held, SpanOutcome.NESTED)
            held.caller = above
            # A sub-agent may have a conversation of its own; its requests go by the session of whoever called it.
            session = above.session or held.session or held.resource.get(RESOURCE_SESSION_KEY)
            return session is not None and self._return(held, session)
        if role is not None:
            if held.role is not Role.AGENT:
                return self._decide(held, SpanOutcome.NESTED)
            held.is_inside_run = True
        held.session = held.session or above.session
        held.workflow_id = held.workflow_id or above.workflow_id
        return False

    def _return(self, held: _Held, session: str) -> bool:
        """A sub-agent has returned to its session."""
        if held.name is None and held.agent_id is None:
            return self._decide(held, SpanOutcome.NO_NAME)
        self._emit(held, BoundaryKind.SUBAGENT_RETURN, session, names_agent=True)
        return self._decide(held, SpanOutcome.BOUNDARY)

    def _reach_root(self, held: _Held) -> None:
        """There is nothing above a held span any more."""
        if held.caller is not None:
            self._decide(held, SpanOutcome.NO_SESSION)
        elif held.is_expired:
            held.is_decided = True
        else:
            self._decide(held, self._end_run(held))

    def _give_up(self, held: _Held) -> None:
        """What is above a held span does not come: take it for a root. It goes on waiting, since it may be a sub-agent yet."""
        self._count(SpanOutcome.EXPIRED)
        if held.caller is not None:
            self._decide(held, SpanOutcome.NO_SESSION)
            return
        self._count(self._end_run(held))
        held.is_expired = True

    def _end_run(self, held: _Held) -> SpanOutcome:
        """A root has ended."""
        resource_session = held.resource.get(RESOURCE_SESSION_KEY)
        workflow_id = held.workflow_id or held.resource.get(WORKFLOW_KEY)
        session = held.session or resource_session
        is_process = held.session is None and resource_session is not None
        run_end = held.resource.get(RUN_END_KEY)
        kind = BoundaryKind.TURN_END
        if not held.is_inside_run and run_end != BoundaryKind.TURN_END:
            is_own_workflow = held.role is Role.WORKFLOW and (workflow_id is not None or is_process)
            if is_own_workflow or run_end == BoundaryKind.WORKFLOW_END:
                kind = BoundaryKind.WORKFLOW_END
        if session is None and (kind is not BoundaryKind.WORKFLOW_END or workflow_id is None):
            return SpanOutcome.NO_SESSION
        held.workflow_id = workflow_id
        self._emit(held, kind, session, names_agent=held.is_inside_run)
        return SpanOutcome.BOUNDARY

    def _decide(self, held: _Held, outcome: SpanOutcome) -> bool:
        held.is_decided = True
        if not held.is_expired or outcome is SpanOutcome.BOUNDARY:
            self._count(outcome)
        return True

    def _end_session(self, span: Span, session_id: str | None, at_ns: int) -> None:
        session = session_id or first_of(span.attributes, SESSION_KEYS) or span.resource.get(RESOURCE_SESSION_KEY)
        if session is not None:
            self._report.boundaries.append(
                Boundary(
                    message_id=f"{_message_id(span)}:{BoundaryKind.SESSION_END}",
                    kind=BoundaryKind.SESSION_END,
                    session_id=session,
                    sent_at_s=at_ns / 1e9,
                )
            )

    def _emit(self, held: _Held, kind: BoundaryKind, session: str | None, *, names_agent: bool) -> None:
        self._report.boundaries.append(
            Boundary(
                message_id=f"{held.message_id}:{kind}",
                kind=kind,
                session_id=session,
                workflow_id=held.workflow_id,
                agent=held.name if names_agent else None,
                agent_id=held.agent_id if names_agent else None,
                sent_at_s=held.sent_at_s,
            )
        )

    # ------------------------------------------------------------------ forgetting

    def _make_room(self, trace: _Trace) -> None:
        if len(trace.spans) > self._max_trace_spans:
            del trace.spans[next(iter(trace.spans))]
            self._num_spans -= 1
        if trace.num_held > self._max_trace_spans:
            self._thin_out(trace)
        while self._num_spans > self._max_spans and len(self._traces) > 1:
            self._forget_oldest()

    def _thin_out(self, trace: _Trace) -> None:
        """Too much waits in one trace, as below a root that never ends: forget what was taken for a root, or else all of it."""
        waiting: dict[bytes, list[_Held]] = {}
        for above_id, group in trace.waiting.items():
            rest = [held for held in group if not held.is_decided and not held.is_expired]
            if rest:
                waiting[above_id] = rest
        num_held = sum(map(len, waiting.values()))
        if num_held > self._max_trace_spans // 2:
            self._give_up_all(waiting)
            num_held = 0
        trace.waiting = waiting if num_held else {}
        trace.num_held = num_held

    def _give_up_all(self, waiting: dict[bytes, list[_Held]]) -> None:
        for group in waiting.values():
            for held in group:
                if not held.is_decided and not held.is_expired:
                    self._give_up(held)
                held.is_decided = True

    def _forget_old(self, now: float) -> None:
        while self._traces and next(iter(self._traces.values())).last_active + self._max_age_s <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        _, trace = self._traces.popitem(last=False)
        self._num_spans -= len(trace.spans)
        self._give_up_all(trace.waiting)

    def _count(self, outcome: SpanOutcome) -> None:
        self._report.outcomes[outcome] += 1

    def _take_report(self) -> Report:
        report, self._report = self._report, Report()
        return report


def _message_id(span: Span) -> str:
    """The same for each copy of a span, so that a retried export counts once."""
    return f"otlp:{span.trace_id.hex()}:{span.span_id.hex()}"
