# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.boundaries import Boundary, BoundaryKind
from vllm_lifetime.harness.otel import HOLD_S, MAX_AGE_S, MAX_DEPTH, Report, SpanOutcome, SpanTable
from vllm_lifetime.harness.otel_spans import RUN_END_KEY, WORKFLOW_KEY, Span

TRACE = bytes(15) + b"\x01"
BASE_NS = 1_700_000_000 * 10**9

AGENT = {"gen_ai.operation.name": "invoke_agent"}
WORKFLOW = {"gen_ai.operation.name": "invoke_workflow"}
TOOL = {"gen_ai.operation.name": "execute_tool"}
CHAT = {"gen_ai.operation.name": "chat"}
SESSION = {"gen_ai.conversation.id": "s1"}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def agent(name: str, **more: str) -> dict[str, str]:
    return AGENT | {"gen_ai.agent.name": name} | more


def span(
    number: int,
    parent: int = 0,
    attributes: Mapping[str, str] | None = None,
    *,
    trace: bytes = TRACE,
    resource: Mapping[str, str] | None = None,
    **more: object,
) -> Span:
    return Span(trace, id_of(number), id_of(parent), BASE_NS + number * 10**9, attributes or {}, resource or {}, **more)  # type: ignore[arg-type]


def id_of(number: int) -> bytes:
    return number.to_bytes(8, "big") if number else b""


def said(report: Report) -> list[tuple[str, str | None, str | None]]:
    return [(event.kind.value, event.session_id, event.agent) for event in report.boundaries]


def tell(*spans: Span) -> list[tuple[str, str | None, str | None]]:
    return said(SpanTable().ingest(spans))


# ---------------------------------------------------------------------- what a span says


def test_a_root_agent_that_ended_ends_the_turn_of_the_sessions_own_agents() -> None:
    (event,) = SpanTable().ingest([span(1, 0, agent("lead") | SESSION)]).boundaries
    assert event == Boundary(
        message_id=f"otlp:{TRACE.hex()}:{id_of(1).hex()}:turn_end",
        kind=BoundaryKind.TURN_END,
        session_id="s1",
        sent_at_s=1_700_000_001.0,
    )


def test_a_sub_agent_returns_when_its_tool_is_known_while_its_lead_still_runs() -> None:
    table = SpanTable()
    assert said(table.ingest([span(3, 2, agent("researcher", **{"gen_ai.agent.id": "r-1"}) | SESSION)])) == []
    (event,) = table.ingest([span(2, 1, TOOL)]).boundaries
    assert (event.kind, event.agent, event.agent_id, event.session_id) == ("subagent_return", "researcher", "r-1", "s1")
    assert said(table.ingest([span(1, 0, agent("lead") | SESSION)])) == [("turn_end", "s1", None)]


def test_an_agent_directly_below_another_is_a_sub_agent() -> None:
    assert tell(span(2, 1, agent("b")), span(1, 0, agent("a") | SESSION)) == [
        ("subagent_return", "s1", "b"),
        ("turn_end", "s1", None),
    ]


def test_an_agent_below_a_web_request_is_no_sub_agent() -> None:
    table = SpanTable()
    assert said(table.ingest([span(2, 1, agent("a") | SESSION)])) == []
    assert said(table.ingest([span(1)])) == [("turn_end", "s1", None)]


def test_the_client_and_the_server_span_of_one_invocation_are_one_turn() -> None:
    assert tell(span(3, 2, agent("a") | SESSION), span(2, 1), span(1, 0, agent("a") | SESSION)) == [("turn_end", "s1", None)]


def test_an_agent_that_calls_itself_by_a_tool_is_a_sub_agent() -> None:
    spans = [span(3, 2, agent("a")), span(2, 1, TOOL), span(1, 0, agent("a") | SESSION)]
    assert tell(*spans) == [("subagent_return", "s1", "a"), ("turn_end", "s1", None)]


def test_agents_of_a_workflow_end_their_own_turns() -> None:
    spans = [span(2, 1, agent("writer")), span(3, 1, agent("critic")), span(1, 0, WORKFLOW | SESSION)]
    assert tell(*spans) == [("turn_end", "s1", "writer"), ("turn_end", "s1", "critic"), ("turn_end", "s1", None)]


@pytest.mark.parametrize(
    ("attributes", "resource", "expected"),
    [
        (SESSION, {}, ("turn_end", "s1", None)),
        ({}, {"session.id": "p"}, ("workflow_end", "p", None)),
        (SESSION, {"session.id": "p"}, ("turn_end", "s1", None)),
        (SESSION | {WORKFLOW_KEY: "w"}, {}, ("workflow_end", "s1", "w")),
        (SESSION, {WORKFLOW_KEY: "w"}, ("workflow_end", "s1", "w")),
        ({WORKFLOW_KEY: "w"}, {}, ("workflow_end", None, "w")),
        (SESSION, {RUN_END_KEY: "workflow_end"}, ("workflow_end", "s1", None)),
        ({}, {"session.id": "p", RUN_END_KEY: "turn_end"}, ("turn_end", "p", None)),
    ],
)
def test_the_end_of_a_workflow_span_ends_the_workflow_unless_the_conversation_may_go_on(
    attributes: dict[str, str], resource: dict[str, str], expected: tuple[str, str | None, str | None]
) -> None:
    (event,) = SpanTable().ingest([span(1, 0, WORKFLOW | attributes, resource=resource)]).boundaries
    assert (event.kind, event.session_id, event.workflow_id) == expected


def test_a_process_of_one_task_ends_its_workflow_with_its_root_agent() -> None:
    resource = {"session.id": "p", RUN_END_KEY: "workflow_end"}
    spans = [
        span(3, 2, agent("sub"), resource=resource),
        span(2, 1, TOOL, resource=resource),
        span(1, 0, agent("a"), resource=resource),
    ]
    assert tell(*spans) == [("subagent_return", "p", "sub"), ("workflow_end", "p", None)]


def test_a_workflow_below_an_agent_or_a_workflow_says_nothing() -> None:
    spans = [span(3, 2, WORKFLOW | SESSION), span(2, 1, WORKFLOW | SESSION), span(1, 0, agent("a") | SESSION)]
    report = SpanTable().ingest(spans)
    assert said(report) == [("turn_end", "s1", None)]
    assert report.outcomes[SpanOutcome.NESTED] == 2


def test_creating_an_agent_and_talking_to_a_model_are_no_boundaries() -> None:
    report = SpanTable().ingest([span(1, 0, {"gen_ai.operation.name": "create_agent"} | SESSION), span(2, 0, CHAT | SESSION)])
    assert report.boundaries == []
    assert report.outcomes == Counter({SpanOutcome.OTHER: 2})


# ---------------------------------------------------------------------- whose session


def test_a_sub_agents_own_conversation_gives_way_to_its_callers() -> None:
    # Pydantic AI gives each run of an agent a conversation of its own.
    own = {"gen_ai.conversation.id": "s2"}
    assert tell(span(3, 2, agent("sub") | own), span(2, 1, TOOL | SESSION)) == [("subagent_return", "s1", "sub")]
    assert tell(span(3, 2, agent("sub") | own), span(2, 1, TOOL)) == [("subagent_return", "s2", "sub")]


def test_a_session_is_taken_from_the_nearest_span_above() -> None:
    spans = [
        span(3, 2, agent("a")),
        span(2, 1, {"session.id": "near"}),
        span(1, 0, {"session.id": "far"}, resource={"session.id": "p"}),
    ]
    assert tell(*spans) == [("turn_end", "near", None)]


def test_a_sub_agent_of_a_process_of_one_session_does_not_wait_for_its_lead() -> None:
    resource = {"session.id": "p"}
    spans = [span(3, 2, agent("sub"), resource=resource), span(2, 1, TOOL, resource=resource)]
    assert tell(*spans) == [("subagent_return", "p", "sub")]


def test_a_sub_agents_session_is_looked_for_above_its_caller() -> None:
    table = SpanTable()
    assert said(table.ingest([span(3, 2, agent("sub")), span(2, 1, TOOL)])) == []
    assert said(table.ingest([span(1, 0, agent("lead") | SESSION)])) == [
        ("subagent_return", "s1", "sub"),
        ("turn_end", "s1", None),
    ]


def test_an_agent_without_a_session_is_counted_and_nothing_else() -> None:
    report = SpanTable().ingest([span(3, 2, agent("sub")), span(2, 1, TOOL), span(1, 0, agent("lead")), span(4, 0, WORKFLOW)])
    assert report.boundaries == []
    assert report.outcomes == Counter({SpanOutcome.NO_SESSION: 3, SpanOutcome.OTHER: 1})


def test_a_sub_agent_without_a_name_is_counted_and_nothing_else() -> None:
    report = SpanTable().ingest([span(2, 1, AGENT | SESSION), span(1, 0, TOOL | SESSION)])
    assert report.boundaries == []
    assert report.outcomes[SpanOutcome.NO_NAME] == 1


def test_a_session_end_event_ends_the_session_it_names() -> None:
    (named, own) = SpanTable().ingest([span(1, 0, SESSION, session_ends=(("s9", BASE_NS), (None, BASE_NS)))]).boundaries
    assert (named.kind, named.session_id, named.sent_at_s) == ("session_end", "s9", 1_700_000_000.0)
    assert (own.kind, own.session_id) == ("session_end", "s1")


# ---------------------------------------------------------------------- other conventions


def test_openinference_langgraph_ends_the_turn_with_the_root_chain() -> None:
    chain = {"openinference.span.kind": "CHAIN", "session.id": "s1"}
    spans = [
        span(7, 6, chain),
        span(6, 5, {"openinference.span.kind": "TOOL", "session.id": "s1"}),
        span(5, 1, chain),
        span(3, 2, {"openinference.span.kind": "LLM", "session.id": "s1"}),
        span(2, 1, {"openinference.span.kind": "AGENT", "session.id": "s1"}),
        span(1, 0, chain),
    ]
    assert tell(*spans) == [("turn_end", "s1", None)]


def test_openinference_openai_agents_wrapper_does_not_make_the_lead_a_sub_agent() -> None:
    kind, session = "openinference.span.kind", {"session.id": "s1"}
    spans = [
        span(6, 5, {kind: "AGENT", "agent.name": "researcher"} | session),
        span(5, 4, {kind: "CHAIN"} | session),
        span(4, 3, {kind: "TOOL"} | session),
        span(3, 2, {kind: "AGENT", "agent.name": "lead"} | session),
        span(2, 1, {kind: "CHAIN"} | session),
        span(1, 0, {kind: "AGENT"} | session),
    ]
    assert tell(*spans) == [("subagent_return", "s1", "researcher"), ("turn_end", "s1", "lead"), ("turn_end", "s1", None)]


def test_openllmetry_kinds_and_association_properties() -> None:
    kind, session = "traceloop.span.kind", {"traceloop.association.properties.session_id": "s1"}
    spans = [
        span(4, 3, {kind: "agent", "traceloop.entity.name": "sub"} | session),
        span(3, 2, {kind: "tool"} | session),
        span(2, 1, {kind: "agent", "traceloop.entity.name": "lead"} | session),
        span(5, 1, {kind: "task"} | session),
        span(1, 0, {kind: "workflow"} | session),
    ]
    assert tell(*spans) == [("subagent_return", "s1", "sub"), ("turn_end", "s1", "lead"), ("turn_end", "s1", None)]


def test_openllmetry_langgraph_reports_one_invocation_twice() -> None:
    thread = {"traceloop.association.properties.thread_id": "t", "traceloop.association.properties.session_id": "other"}
    spans = [
        span(4, 3, agent("researcher")),
        span(3, 2, TOOL | {"traceloop.span.kind": "tool"} | thread),
        span(2, 1, agent("lead") | {"traceloop.span.kind": "workflow"} | thread),
        span(1, 0, agent("lead") | {"gen_ai.conversation.id": "t"}),
    ]
    assert tell(*spans) == [("subagent_return", "t", "researcher"), ("turn_end", "t", None)]


# ---------------------------------------------------------------------- retries, time and space


def test_a_retried_export_says_nothing_new() -> None:
    table = SpanTable()
    spans = [span(3, 2, agent("sub") | SESSION), span(2, 1, TOOL), span(1, 0, agent("lead") | SESSION)]
    assert len(table.ingest(spans).boundaries) == 2
    report = table.ingest(spans)
    assert report.boundaries == []
    assert report.outcomes == Counter({SpanOutcome.DUPLICATE: 3})


def test_a_copy_of_a_forgotten_span_has_the_same_message_id() -> None:
    clock = Clock()
    table = SpanTable(clock)
    (first,) = table.ingest([span(1, 0, agent("a") | SESSION)]).boundaries
    clock.now = MAX_AGE_S
    assert table.ingest([span(1, 0, agent("a") | SESSION)]).boundaries == [first]


def test_an_agent_whose_parent_is_never_exported_is_taken_for_a_root_in_time() -> None:
    clock = Clock()
    table = SpanTable(clock)
    assert said(table.ingest([span(2, 1, agent("a") | SESSION)])) == []
    assert table.next_expiry_s == HOLD_S
    clock.now = HOLD_S - 0.1
    assert said(table.expire()) == []
    clock.now = HOLD_S
    report = table.expire()
    assert said(report) == [("turn_end", "s1", None)]
    assert report.outcomes == Counter({SpanOutcome.EXPIRED: 1, SpanOutcome.BOUNDARY: 1})
    assert table.next_expiry_s is None


def test_an_agent_taken_for_a_root_returns_when_its_lead_has_ended_after_all() -> None:
    clock = Clock()
    table = SpanTable(clock)
    table.ingest([span(2, 1, agent("sub") | SESSION)])
    clock.now = HOLD_S
    assert said(table.expire()) == [("turn_end", "s1", None)]
    assert said(table.ingest([span(1, 0, agent("lead") | SESSION)])) == [
        ("subagent_return", "s1", "sub"),
        ("turn_end", "s1", None),
    ]


def test_an_agent_taken_for_a_root_says_nothing_more_when_it_is_one() -> None:
    clock = Clock()
    table = SpanTable(clock)
    table.ingest([span(2, 1, agent("a") | SESSION)])
    clock.now = HOLD_S
    table.expire()
    assert said(table.ingest([span(1)])) == []


def test_a_sub_agent_whose_session_does_not_come_is_counted() -> None:
    clock = Clock()
    table = SpanTable(clock)
    table.ingest([span(3, 2, agent("sub")), span(2, 1, TOOL)])
    clock.now = HOLD_S
    assert table.expire().outcomes == Counter({SpanOutcome.EXPIRED: 1, SpanOutcome.NO_SESSION: 1})
    assert said(table.ingest([span(1, 0, agent("lead") | SESSION)])) == [("turn_end", "s1", None)]


def test_a_forgotten_trace_decides_what_it_held() -> None:
    clock = Clock()
    table = SpanTable(clock, hold_s=10 * MAX_AGE_S)
    table.ingest([span(2, 1, agent("a") | SESSION)])
    clock.now = MAX_AGE_S
    assert said(table.expire()) == [("turn_end", "s1", None)]
    assert len(table) == 0


def test_space_is_bounded_over_traces_and_in_a_trace() -> None:
    table = SpanTable(max_spans=100, max_trace_spans=20)
    held = table.ingest([span(1, 99, agent("a") | SESSION, trace=bytes(16))])
    assert held.boundaries == []
    said_later = []
    for number in range(1, 50):
        trace = number.to_bytes(16, "big")
        report = table.ingest(span(i, i + 1, CHAT, trace=trace) for i in range(1, 50))
        said_later += report.boundaries
        assert len(table) <= 100 + 20
    assert [event.kind for event in said_later] == ["turn_end"]
    assert table._traces.keys() == {number.to_bytes(16, "big") for number in range(45, 50)}


@pytest.mark.parametrize("turn_s", [0.0, HOLD_S])
def test_what_waits_for_a_root_that_never_ends_is_bounded(turn_s: float) -> None:
    clock = Clock()
    table = SpanTable(clock, max_trace_spans=100)
    events = []
    for number in range(2, 1002):
        events += table.ingest([span(number, 1, agent("a") | SESSION)]).boundaries
        clock.now += turn_s
        events += table.expire().boundaries
        assert sum(len(group) for trace in table._traces.values() for group in trace.waiting.values()) <= 100
        assert len(table) <= 100
    clock.now += MAX_AGE_S
    events += table.expire().boundaries
    assert {event.message_id for event in events} == {f"otlp:{TRACE.hex()}:{id_of(n).hex()}:turn_end" for n in range(2, 1002)}
    assert len(events) == 1000


@pytest.mark.parametrize("says_something", [False, True])
def test_a_trace_that_runs_in_a_circle_ends(says_something: bool) -> None:
    clock = Clock()
    table = SpanTable(clock)
    attributes = {"session.id": "s1"} if says_something else {}
    report = table.ingest(
        [span(1, 1, attributes), span(2, 3, attributes), span(3, 2, attributes)]
        + [span(i, 1 + i % 3, agent("a") | SESSION) for i in range(10, 40)]
    )
    clock.now = HOLD_S
    assert len(report.boundaries) + len(table.expire().boundaries) == 30


def test_a_tower_of_spans_ends_the_search() -> None:
    tower = [span(i, i + 1, {"session.id": "s1"}) for i in range(1, 10 * MAX_DEPTH)]
    assert tell(*tower, span(10_000, 1, agent("a") | SESSION)) == [("turn_end", "s1", None)]


# ---------------------------------------------------------------------- any order

ROLES: list[Mapping[str, str]] = [
    {},
    {},
    CHAT,
    TOOL,
    AGENT,
    AGENT,
    WORKFLOW,
    {"openinference.span.kind": "CHAIN"},
    {"openinference.span.kind": "AGENT", "agent.name": "b"},
    {"traceloop.span.kind": "workflow"},
]


@st.composite
def traces(draw: st.DrawFn) -> list[Span]:
    """One or two traces, each a tree (or several, where a parent is never exported)."""
    spans = []
    for trace in range(1, draw(st.integers(1, 2)) + 1):
        resource = draw(st.sampled_from([{}, {}, {"session.id": "p"}, {RUN_END_KEY: "workflow_end"}]))
        for number in range(1, draw(st.integers(1, 12)) + 1):
            attributes = dict(draw(st.sampled_from(ROLES)))
            if draw(st.booleans()):
                attributes["gen_ai.agent.name"] = draw(st.sampled_from(["a", "b"]))
            if draw(st.integers(0, 2)) == 0:
                attributes["gen_ai.conversation.id"] = draw(st.sampled_from(["s1", "s2"]))
            if draw(st.integers(0, 9)) == 0:
                attributes[WORKFLOW_KEY] = "w"
            parent = draw(st.integers(0, number - 1))
            spans.append(span(number, parent, attributes, trace=trace.to_bytes(16, "big"), resource=resource))
    return spans


def expected_of(spans: list[Span]) -> set[tuple[str, str | None, str | None]]:
    """What the module's table says, read off whole traces: (kind, session, agent) by span."""
    by_id = {(each.trace_id, each.span_id): each for each in spans}
    result = set()
    for each in spans:
        above: list[Span] = []
        parent = each.parent_id
        while parent:
            above.append(by_id[each.trace_id, parent])
            parent = above[-1].parent_id
        outcome = expected_of_one(each, above)
        if outcome is not None:
            result.add((f"{each.trace_id.hex()}:{each.span_id.hex()}", *outcome))
    return result  # type: ignore[return-value]


def role_name(each: Span) -> str | None:
    attributes = each.attributes
    operation = attributes.get("gen_ai.operation.name")
    if operation in ("invoke_agent", "invoke_workflow", "execute_tool"):
        return operation
    if attributes.get("openinference.span.kind") == "CHAIN":
        return "run"
    if attributes.get("openinference.span.kind") == "AGENT":
        return "invoke_agent"
    return "invoke_workflow" if "traceloop.span.kind" in attributes else None


def name_of(each: Span) -> str | None:
    return each.attributes.get("gen_ai.agent.name") or each.attributes.get("agent.name")


def session_in(spans: Iterable[Span]) -> str | None:
    return next((s for s in (each.attributes.get("gen_ai.conversation.id") for each in spans) if s), None)


def expected_of_one(each: Span, above: list[Span]) -> tuple[str, str | None, str | None] | None:
    role = role_name(each)
    if role not in ("invoke_agent", "invoke_workflow", "run"):
        return None
    speakers = [other for other in above if role_name(other)]
    process = each.resource.get("session.id")
    if role != "invoke_agent":
        if speakers:
            return None
        names = False
    else:
        caller = next((other for other in speakers if role_name(other) in ("invoke_agent", "execute_tool")), None)
        if caller is not None:
            if role_name(caller) == "invoke_agent" and name_of(caller) == name_of(each) is not None:
                return None
            at = above.index(caller)
            session = session_in([caller, each, *above[:at]]) or process or session_in(above[at:])
            return ("subagent_return", session, name_of(each)) if session and name_of(each) else None
        names = bool(speakers)
    session = session_in([each, *above])
    workflow = next((w for w in (other.attributes.get(WORKFLOW_KEY) for other in [each, *above]) if w), None)
    ends = role == "invoke_workflow" and (workflow or (process and not session))
    if not names and (ends or RUN_END_KEY in each.resource):
        return ("workflow_end", session or process, None) if session or process or workflow else None
    session = session or process
    return ("turn_end", session, name_of(each) if names else None) if session else None


def test_the_second_agent_below_a_silent_span_misses_the_session_above_it() -> None:
    """The first one's way up is remembered only as far as the next span that says something."""
    trace, agent = b"\0" * 15 + b"\1", {"gen_ai.operation.name": "invoke_agent"}

    def make(number: int, parent: int, attributes: dict[str, str]) -> Span:
        parent_id = parent.to_bytes(8, "big") if parent else b""
        return Span(trace, number.to_bytes(8, "big"), parent_id, number * 10**9, attributes, {}, ())

    table = SpanTable(Clock())
    table.ingest([make(1, 0, {"gen_ai.conversation.id": "s1"}), make(2, 1, {})])
    for number in (3, 4):
        [event] = table.ingest([make(number, 2, agent)]).boundaries
        assert (event.kind, event.session_id) == ("turn_end", "s1")


@settings(max_examples=400, deadline=None)
@given(traces(), st.randoms(use_true_random=False))
def test_any_order_any_batches_and_any_retries_give_the_same_boundaries(spans: list[Span], random: random.Random) -> None:
    deliveries = [each for each in spans for _ in range(random.choice([1, 1, 1, 2, 3]))]
    random.shuffle(deliveries)
    table = SpanTable(Clock())
    events: list[Boundary] = []
    outcomes: Counter[SpanOutcome] = Counter()
    while deliveries:
        size = random.randint(1, 6)
        report = table.ingest(deliveries[:size])
        events += report.boundaries
        outcomes += report.outcomes
        del deliveries[:size]
    ids = [event.message_id for event in events]
    assert len(ids) == len(set(ids))
    got = {(event.message_id[5:].rpartition(":")[0], event.kind.value, event.session_id, event.agent) for event in events}
    assert got == expected_of(spans)
    assert sum(outcomes.values()) - outcomes[SpanOutcome.DUPLICATE] == len(spans)
    assert table.next_expiry_s is None
