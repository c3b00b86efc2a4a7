# SPDX-License-Identifier: Apache-2.0
"""CrewAI: names the requests of crews, flows and agents, and reports their boundaries.

Two things belong together: a `LifetimeListener`, one per process, and a `LifetimeInterceptor` in each `LLM`.

| in CrewAI | event |
|---|---|
| `kickoff()` of a crew, a flow or a lone agent, outside of any other | `session_start` |
| an agent begins a task (a delegated one too), or is kicked off inside a crew or flow | `subagent_spawn` |
| it is done, or raises | `subagent_return` |
| its conversation was summarised to fit the context window | `compaction` |
| a task goes to a remote agent (A2A), and comes back | `subagent_spawn`, `subagent_return` |
| the outermost kickoff is over: completed, failed, paused, its asyncio task done or cancelled | `workflow_end` |
| the same inside `LifetimeListener.session()` | `turn_end` |
| `LifetimeListener.session()` is left | `workflow_end`; `session_end` if the workflow was named |

Which kickoff and which agent something belongs to travels in context variables, which CrewAI carries into its threads
and tasks: CrewAI's interception hooks set them, in the context of whoever acts. Events are reported by handlers of
CrewAI's event bus, which run one after another on the bus's own thread, so nothing here holds up an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from vllm_lifetime.boundaries import (
    MAX_ID_LENGTH,
    MAX_SPAWN_TEXT_LENGTH,
    MAX_SPAWN_TOOLS,
    BoundaryKind,
    Spawn,
)
from vllm_lifetime.harness.client import LifetimeClient
from vllm_lifetime.harness.conversation import Conversation, Instance
from vllm_lifetime.harness.naming import fill_body

try:
    from crewai.events import (
        AgentExecutionCompletedEvent,
        AgentExecutionErrorEvent,
        AgentExecutionStartedEvent,
        BaseEventListener,
        ContextWindowSummarizationCompletedEvent,
        CrewKickoffCompletedEvent,
        CrewKickoffFailedEvent,
        FlowFinishedEvent,
        LiteAgentExecutionCompletedEvent,
        LiteAgentExecutionErrorEvent,
        LiteAgentExecutionStartedEvent,
        ToolUsageStartedEvent,
        crewai_event_bus,
    )
    from crewai.events.base_events import BaseEvent
    from crewai.events.event_bus import CrewAIEventsBus, is_replaying
    from crewai.events.types.a2a_events import A2ADelegationCompletedEvent, A2ADelegationStartedEvent
    from crewai.events.types.flow_events import FlowFailedEvent, FlowPausedEvent
    from crewai.flow.flow_context import current_flow_defer_trace_finalization
    from crewai.hooks import InterceptionPoint, LLMCallHookContext, register_hook, unregister_hook
    from crewai.hooks.contexts import InterceptionContext
    from crewai.llms.hooks import BaseInterceptor
except ImportError as error:
    raise ImportError("the CrewAI adapter needs CrewAI 1.15 or later: pip install 'vllm-lifetime[crewai]'") from error

__all__ = ["LifetimeInterceptor", "LifetimeListener"]

logger = logging.getLogger("vllm_lifetime.harness")

EXIT_WAIT_S = 1.0
"""Longest wait, at the end, for what CrewAI has emitted and its handlers have not seen yet, in seconds."""

TAGGED_PATHS = ("/chat/completions", "/completions", "/responses")


@dataclass(frozen=True, slots=True)
class _Kickoff:
    """A crew, a flow or a lone agent that runs, and the asyncio task that it runs in, if any."""

    source: Any
    task: asyncio.Task[Any] | None
    on_task_done: Callable[[asyncio.Task[Any]], None]


class _Session:
    """What runs in one session: a kickoff with all that it starts, or all kickoffs of `LifetimeListener.session()`.

    `enter` and `leave` are called by whoever kicks off, the rest by the handlers of CrewAI's bus, in the order of events.
    """

    def __init__(self, conversation: Conversation, is_explicit: bool) -> None:
        self.conversation = conversation
        self.is_explicit = is_explicit
        self.instances: dict[str, str] = {}
        """The instance that an agent has been last, by the agent's id."""

        self.callers: dict[str, str] = {}
        """The instance that uses a tool, by the id of the event that says so."""

        self.num_spawned = 0
        self._lock = threading.Lock()
        self._kickoffs: dict[int, _Kickoff] = {}
        self._over: list[int] = []
        """Kickoffs, by identity, that were the last of a turn, until their event is handled."""

    def runs(self, source: object = None) -> bool:
        """Whether this crew, flow or lone agent (None: any) is running."""
        return id(source) in self._kickoffs if source is not None else bool(self._kickoffs)

    def enter(self, source: object) -> None:
        """A crew, a flow or a lone agent begins."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs here
            task = None

        def on_task_done(task: asyncio.Task[Any]) -> None:
            # It has not left by itself: it was cancelled, and CrewAI's bus was told nothing.
            if self.leave(source):
                self.report(source)

        if task is not None:
            task.add_done_callback(on_task_done)
        with self._lock:
            self._kickoffs[id(source)] = _Kickoff(source, task, on_task_done)
        self.conversation.start()

    def leave(self, source: object) -> bool:
        """It is over; return whether it was the last that ran, and the turn is over with it."""
        with self._lock:
            kickoff = self._kickoffs.pop(id(source), None)
            is_last = kickoff is not None and not self._kickoffs
            if is_last:
                self._over.append(id(source))
        if kickoff is not None and kickoff.task is not None:
            kickoff.task.remove_done_callback(kickoff.on_task_done)
        return is_last

    def report(self, source: object) -> None:
        """Report the end of the turn, or session, that `source` was the last of."""
        with self._lock:
            if id(source) not in self._over:
                return
            self._over.remove(id(source))
        if not self.conversation.is_started:
            return
        self.conversation.close()  # those that were cancelled, or stopped by a hook, have said nothing
        self.instances.clear()
        self.callers.clear()
        if self.is_explicit:
            self.conversation.say(BoundaryKind.TURN_END)
        else:
            self.conversation.end()


_SESSION: ContextVar[_Session | None] = ContextVar("vllm_lifetime_crewai_session", default=None)
_SPEAKER: ContextVar[Instance | None] = ContextVar("vllm_lifetime_crewai_speaker", default=None)


class LifetimeListener(BaseEventListener):
    """Reports what CrewAI's crews, flows and agents do to a lifetime server.

        listener = LifetimeListener(LifetimeClient("http://localhost:8000"))
        llm = LLM(model="hosted_vllm/MODEL", base_url="http://localhost:8000/v1", interceptor=LifetimeInterceptor())

    Make one, before the first kickoff, and keep it for the life of the process; close it, or leave its `with` block, before
    the client. Each outermost kickoff is a session of its own, with an id that is made up, unless it runs inside `session()`.
    """

    def __init__(self, client: LifetimeClient) -> None:
        """Report through `client`; listens from now on."""
        self._client = client
        self._handlers: list[tuple[type[BaseEvent], Callable[[Any, Any], Coroutine[Any, Any, None]]]] = [
            (AgentExecutionStartedEvent, self._on_agent_started),
            (AgentExecutionCompletedEvent, self._on_agent_over),
            (AgentExecutionErrorEvent, self._on_agent_over),
            (LiteAgentExecutionStartedEvent, self._on_lone_agent_started),
            (LiteAgentExecutionCompletedEvent, self._on_lone_agent_over),
            (LiteAgentExecutionErrorEvent, self._on_lone_agent_over),
            (ContextWindowSummarizationCompletedEvent, self._on_compaction),
            (ToolUsageStartedEvent, self._on_tool_started),
            (A2ADelegationStartedEvent, self._on_remote_started),
            (A2ADelegationCompletedEvent, self._on_remote_over),
            (CrewKickoffCompletedEvent, self._on_kickoff_over),
            (CrewKickoffFailedEvent, self._on_kickoff_over),
            (FlowFinishedEvent, self._on_kickoff_over),
            (FlowFailedEvent, self._on_kickoff_over),
            (FlowPausedEvent, self._on_pause),
        ]
        self._hooks: list[tuple[InterceptionPoint, Callable[[Any], None]]] = [
            (InterceptionPoint.EXECUTION_START, self._before_kickoff),
            (InterceptionPoint.EXECUTION_END, self._after_kickoff),
            (InterceptionPoint.PRE_MODEL_CALL, self._before_llm_call),
        ]
        super().__init__()
        for point, hook in self._hooks:
            register_hook(point, hook)

    def setup_listeners(self, crewai_event_bus: CrewAIEventsBus) -> None:
        """Listen to the events of CrewAI's bus; called by CrewAI."""
        for event_type, handler in self._handlers:
            crewai_event_bus.register_handler(event_type, handler)

    def close(self) -> None:
        """Stop listening, once what CrewAI has emitted is reported (a second at most). The client stays open."""
        crewai_event_bus.flush(EXIT_WAIT_S)
        for event_type, handler in self._handlers:
            crewai_event_bus.off(event_type, handler)
        for point, hook in self._hooks:
            unregister_hook(point, hook)

    def __enter__(self) -> Self:
        """Return the listener."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop listening."""
        self.close()

    @contextlib.contextmanager
    def session(self, session_id: str | None = None, *, workflow_id: str | None = None) -> Iterator[str]:
        """Put all kickoffs inside, each a turn, into one session; yields its id, which is made up unless given.

        Ends the session when it is left, also by an exception or a cancellation. A workflow that is named may be shared
        by several sessions and does not end with one of them: report its `workflow_end` through the client. Waits at the
        end for CrewAI's own event handlers, for a second at most.
        """
        session = _Session(Conversation(self._client, session_id, workflow_id), is_explicit=True)
        token = _SESSION.set(session)
        session.conversation.start()
        try:
            yield session.conversation.session_id
        finally:
            _SESSION.reset(token)
            crewai_event_bus.flush(EXIT_WAIT_S)
            session.conversation.end()

    # ------------------------------------------------------------------ hooks, in the context of whoever acts

    def _before_kickoff(self, context: InterceptionContext) -> None:
        kickoff = context.crew if context.crew is not None else context.flow
        session = _SESSION.get()
        if session is not None and not session.is_explicit and session.runs(kickoff):
            # It was interrupted, with no event to say so, and is started again.
            if session.leave(kickoff):
                session.report(kickoff)
            session = None
        if session is None or not (session.is_explicit or session.runs()):
            session = _Session(Conversation(self._client), is_explicit=False)
            _SESSION.set(session)
        session.enter(kickoff)

    def _after_kickoff(self, context: InterceptionContext) -> None:
        kickoff = context.crew if context.crew is not None else context.flow
        session = _SESSION.get()
        if session is None or not session.leave(kickoff):
            return
        # No event follows, at least not in this context, of a lone agent and of a flow that puts its end off.
        is_lone_agent = getattr(kickoff, "is_crewai_internal", False)
        if is_lone_agent or (context.flow is not None and current_flow_defer_trace_finalization.get()):
            session.report(kickoff)

    def _before_llm_call(self, context: LLMCallHookContext) -> None:
        session, agent = _SESSION.get(), context.agent
        speaker = None
        if session is not None and agent is not None:
            agent_key = str(getattr(agent, "id", ""))
            agent_id = str(context.task.id) if context.task is not None else session.instances.get(agent_key, agent_key)
            speaker = session.conversation.find(agent_id) or Instance(_role_of(agent), agent_id or None)
        _SPEAKER.set(speaker)

    # ------------------------------------------------------------------ handlers, on the thread of CrewAI's bus

    async def _on_agent_started(self, source: Any, event: AgentExecutionStartedEvent) -> None:
        self._spawn(
            event,
            event.agent,
            str(event.task.id),
            instruction=event.task.description,
            context=event.task_prompt,
            tools=[tool.name for tool in event.tools or ()],
        )

    async def _on_agent_over(self, source: Any, event: AgentExecutionCompletedEvent | AgentExecutionErrorEvent) -> None:
        self._return(str(event.task.id))

    async def _on_lone_agent_started(self, source: Any, event: LiteAgentExecutionStartedEvent) -> None:
        if event.parent_event_id is None:
            return  # it is what was kicked off, not somebody's sub-agent
        instruction = event.messages if isinstance(event.messages, str) else None
        tools = [tool.name for tool in event.tools or ()]
        self._spawn(event, source, str(event.agent_info.get("id")), instruction=instruction, context=None, tools=tools)

    async def _on_lone_agent_over(
        self, source: Any, event: LiteAgentExecutionCompletedEvent | LiteAgentExecutionErrorEvent
    ) -> None:
        self._return(str(event.agent_info.get("id")))

    async def _on_compaction(self, source: Any, event: ContextWindowSummarizationCompletedEvent) -> None:
        session = _listening()
        if session is not None:
            agent_id = event.task_id or session.instances.get(event.agent_id or "", event.agent_id)
            # The next request may be faster than this event, so it is that request that closes the old context.
            instance = Instance(_clip_role(event.agent_role), agent_id)
            session.conversation.say(BoundaryKind.COMPACTION, instance, expected_return_s=0.0)

    async def _on_tool_started(self, source: Any, event: ToolUsageStartedEvent) -> None:
        session = _listening()
        if session is not None and (caller := event.task_id or event.agent_id):
            session.callers[event.event_id] = caller

    async def _on_remote_started(self, source: Any, event: A2ADelegationStartedEvent) -> None:
        session = _listening()
        if session is not None:
            agent_id = _remote_id(event.context_id, event.endpoint)
            instance = Instance(_clip_role(event.a2a_agent_name), agent_id, event.task_id, is_spawned=True)
            session.conversation.open(instance, _record(session, event.task_description, None, [], None))

    async def _on_remote_over(self, source: Any, event: A2ADelegationCompletedEvent) -> None:
        self._return(_remote_id(event.context_id, event.endpoint or ""))

    async def _on_pause(self, source: Any, event: FlowPausedEvent) -> None:
        session = _listening()
        if session is not None:
            session.leave(source)  # CrewAI's hooks are not told
            session.report(source)

    async def _on_kickoff_over(self, source: Any, event: BaseEvent) -> None:
        session = _listening()
        if session is not None:
            session.report(source)

    def _spawn(
        self, event: BaseEvent, agent: Any, agent_id: str, *, instruction: str | None, context: str | None, tools: list[str]
    ) -> None:
        session = _listening()
        if session is None:
            return
        parent_agent_id = session.callers.get(event.parent_event_id or "")
        instance = Instance(_role_of(agent), agent_id, parent_agent_id, is_spawned=True)
        model = getattr(getattr(agent, "llm", None), "model", None)
        session.instances[str(getattr(agent, "id", agent_id))] = agent_id
        session.conversation.open(instance, _record(session, instruction, context, tools, model))

    def _return(self, agent_id: str) -> None:
        session = _listening()
        if session is not None:
            session.conversation.close([agent_id])


class LifetimeInterceptor(BaseInterceptor[httpx.Request, httpx.Response]):
    """Names the requests of an `LLM`: pass one as `interceptor`.

    Works for CrewAI's own OpenAI-compatible providers (`hosted_vllm/...`, `openai/...`), not for LiteLLM. A request
    outside of any kickoff or `LifetimeListener.session()` is sent as it is. To intercept more, subclass it.
    """

    def on_outbound(self, message: httpx.Request) -> httpx.Request:
        """Return the request with its name."""
        return _name_request(message)

    def on_inbound(self, message: httpx.Response) -> httpx.Response:
        """Return the response."""
        return message

    async def aon_outbound(self, message: httpx.Request) -> httpx.Request:
        """Return the request with its name."""
        return _name_request(message)

    async def aon_inbound(self, message: httpx.Response) -> httpx.Response:
        """Return the response."""
        return message


def _name_request(request: httpx.Request) -> httpx.Request:
    session = _SESSION.get()
    if (
        session is None
        or not session.conversation.is_started
        or request.method != "POST"
        or not request.url.path.endswith(TAGGED_PATHS)
    ):
        return request
    try:
        body = json.loads(request.content)
        fields = session.conversation.request_fields(_SPEAKER.get())
        body = fill_body(fields["extra_body"], body)
        headers = httpx.Headers(request.headers)
        del headers["content-length"]
        for key, value in fields["extra_headers"].items():
            headers.setdefault(key, value)
        return httpx.Request(
            request.method, request.url, headers=headers, content=json.dumps(body), extensions=request.extensions
        )
    except Exception as error:  # the request must go on
        logger.warning("lifetime: a request goes without its name: %s", error)
        return request


def _listening() -> _Session | None:
    """The session that an event belongs to; None if that is over, or the event only repeats what was recorded."""
    session = _SESSION.get()
    return session if session is not None and session.conversation.is_started and not is_replaying() else None


def _record(session: _Session, instruction: str | None, context: str | None, tools: list[str], model: str | None) -> Spawn:
    position = session.num_spawned
    session.num_spawned += 1
    return Spawn(
        instruction=instruction[:MAX_SPAWN_TEXT_LENGTH] if instruction else None,
        context=context[:MAX_SPAWN_TEXT_LENGTH] if context else None,
        tools=tuple(name[:MAX_ID_LENGTH] for name in tools[:MAX_SPAWN_TOOLS] if name),
        model=model[:MAX_ID_LENGTH] if model else None,
        position=position,
    )


def _role_of(agent: Any) -> str | None:
    return _clip_role(getattr(agent, "role", None))


def _clip_role(role: str | None) -> str | None:
    """CrewAI's roles are free text, often with line breaks."""
    return " ".join(role.split())[:MAX_ID_LENGTH] or None if role else None


def _remote_id(context_id: str | None, endpoint: str) -> str:
    return f"a2a:{context_id or endpoint}"[:MAX_ID_LENGTH]
