# SPDX-License-Identifier: Apache-2.0
"""LangChain and LangGraph: names the requests of agents and graphs, and reports their boundaries.

Two things belong together: a `LifetimeCallbackHandler` among the callbacks of what is run, and for the requests either a
`LifetimeChatOpenAI` as the model, or a `LifetimeMiddleware` in an agent that `create_agent` makes.

| in LangChain | event |
|---|---|
| an outermost run without a session or thread id begins | `session_start` |
| it is over: result, error, cancelled, not read to its end | `workflow_end`; `session_end` if the workflow was named |
| an outermost run of a session or thread is over, in whatever way | `turn_end` |
| a graph runs inside a graph with messages of its own: from a tool, from a `Send`, from a node's code | `subagent_spawn` |
| it is over, in whatever way | `subagent_return`, its own sub-agents first |
| a node replaces all messages, such as `SummarizationMiddleware` | `compaction` |

A graph that stands as a node of another and reads on the same messages is no sub-agent: its context is the conversation's,
which goes on. A run that waits for a human (`interrupt`) is not over: it goes on when it is resumed. A request's `agent` is the
name of the `create_agent` graph that makes it, or of the node in a graph of one's own.

Who runs inside whom is what LangChain tells its callbacks (`run_id`, `parent_run_id`). Works from threads and from asyncio;
nothing here waits, or raises because of the server.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_lifetime.boundaries import MAX_ID_LENGTH, MAX_SPAWN_TEXT_LENGTH, BoundaryKind, Spawn
from vllm_lifetime.harness.client import AsyncLifetimeClient, LifetimeClient
from vllm_lifetime.harness.conversation import Conversation, Instance, clip_id
from vllm_lifetime.harness.naming import add_name

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest
    from langchain_core.callbacks import BaseCallbackHandler
    from langchain_openai import ChatOpenAI
    from langgraph.config import get_config
    from langgraph.errors import GraphInterrupt
    from langgraph.graph.message import REMOVE_ALL_MESSAGES
    from langgraph.types import Command
except ImportError as error:
    raise ImportError("the LangChain adapter needs LangChain 1.5 or later: pip install 'vllm-lifetime[langchain]'") from error

__all__ = ["LifetimeCallbackHandler", "LifetimeChatOpenAI", "LifetimeMiddleware"]

logger = logging.getLogger("vllm_lifetime.harness")

_NODE_TAG = "graph:step:"
"""How the tag of a node's run begins."""

_UNNAMED_GRAPH = "LangGraph"

_INNER_NODE = re.compile(r"agent|model|tools|.*\.(before|after)_(agent|model)|__.*")
"""Nodes that are parts of one agent rather than roles: those of `create_agent` and its like."""

_ASKING: ContextVar[tuple[LifetimeCallbackHandler, uuid.UUID] | None] = ContextVar("vllm_lifetime_langchain_asking", default=None)
"""The model's run that began last in this context."""


@dataclass(eq=False, slots=True)
class _Call:
    """One run in LangChain's sense: of a graph, a node, a tool, a chain, a model."""

    name: str
    outer: _Call | None
    conversation: Conversation
    instance: Instance
    """Who asks, if a request is made in it."""

    given: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    is_tool: bool = False
    is_node: bool = False
    is_graph: bool = False
    """Whether it has had a node, which is how a graph is known."""

    has_roles: bool = False
    """Whether its nodes are roles of their own; of graphs only."""

    is_paused: bool = False
    run_ids: set[uuid.UUID] = field(default_factory=set)
    """Every run inside it that is not over; of the outermost only."""

    opened: list[str] = field(default_factory=list)
    """Instances that were spawned in it, the oldest first, with its own at the beginning if it was spawned."""

    num_asked: int = 0
    num_named: int = 0
    """Requests to a model, and those of them that were named; of the outermost only."""

    @property
    def outermost(self) -> _Call:
        return self if self.outer is None else self.outer.outermost

    @property
    def graph(self) -> _Call:
        """The graph whose node it is, or itself."""
        return self.outer if self.is_node and self.outer is not None else self

    def become_node(self) -> None:
        """It runs as a node of the graph around it. Nothing has been asked in that graph before."""
        graph = self.outer
        if graph is None:
            return
        if not graph.is_graph:
            graph.become_graph()
        self.is_node = True
        self.instance = graph.instance
        if _INNER_NODE.fullmatch(self.name) is None:
            graph.has_roles = True
            self.instance = replace(graph.instance, agent=self.name[:MAX_ID_LENGTH])

    def become_graph(self) -> None:
        """It turns out to be a graph: a role in the conversation around it, or a sub-agent with one of its own."""
        self.is_graph = True
        enclosing = self._enclosing()
        role = self.name if self.name != _UNNAMED_GRAPH else enclosing.name if enclosing is not None else None
        role = role[:MAX_ID_LENGTH] if role else None
        if enclosing is None or _shares_messages(enclosing, self):
            self.instance = replace(self.instance, agent=role or self.instance.agent)
        else:
            self._spawn(role or "agent")

    def _enclosing(self) -> _Call | None:
        """Return the tool or node that it runs in; None if it is the outermost graph."""
        call = self.outer
        while call is not None and not (call.is_tool or call.is_node):
            call = call.outer
        return call

    def _spawn(self, role: str) -> None:
        parent = self.instance.agent_id or self.instance.agent
        task = self.metadata.get("langgraph_checkpoint_ns")
        agent_id = _make_id(role, parent, task)
        if self.conversation.find(agent_id) is not None:  # several in one tool or node
            agent_id = _make_id(role, parent, None)
        self.instance = Instance(role, agent_id, parent, is_spawned=True)
        call: _Call | None = self
        while call is not None:
            call.opened.append(agent_id)
            call = call.outer
        position = len(self.outermost.opened) - 1
        self.conversation.open(self.instance, Spawn(instruction=_last_text(self.given), position=position))

    def end(self) -> None:
        """It is over."""
        is_spawned = self.is_graph and self.instance.is_spawned and self.instance.agent_id in self.opened[:1]
        if is_spawned and not self.is_paused:
            self.conversation.close(self.opened)
        if self.outer is None:
            self._end_outermost()

    def _end_outermost(self) -> None:
        if self.conversation.is_started:
            self.conversation.end()
        elif not self.is_paused:
            self.conversation.close()
            self.conversation.say(BoundaryKind.TURN_END)
        if self.num_asked and not self.num_named:
            logger.warning("lifetime: no request of this run was named: use LifetimeChatOpenAI, or LifetimeMiddleware")


class LifetimeCallbackHandler(BaseCallbackHandler):
    """Reports the boundaries of every run that it is among the callbacks of.

        agent = create_agent(...).with_config(callbacks=[LifetimeCallbackHandler(client)])
        agent.invoke({"messages": [...]}, {"configurable": {"thread_id": "t-1"}})

    A graph's run with a thread id (or any with `session_id` in its config's metadata) is one turn of that session. Who keeps it
    ends it: `client.boundary("session_end", session_id="t-1")`. A run without is a session of its own. `workflow_id`, here or
    in the config's metadata, names a task that spans several sessions; report its `workflow_end` through the client.

    One handler serves any number of runs at the same time. Thread-safe.
    """

    run_inline = True
    """In asyncio: called on the loop, in order, rather than on threads."""

    def __init__(
        self,
        client: LifetimeClient | AsyncLifetimeClient,
        *,
        session_id: str | None = None,
        workflow_id: str | None = None,
    ) -> None:
        """Report through `client`, as the session and workflow given here, else in a run's config."""
        super().__init__()
        self._client = client
        self._session_id = session_id
        self._workflow_id = workflow_id
        self._calls: dict[uuid.UUID, _Call] = {}
        self._lock = threading.RLock()

    def request_fields(self, run_id: uuid.UUID | None) -> dict[str, Any] | None:
        """Return what names a request that is made in a run, as `client.request_fields` does; None for an unknown run."""
        with self._lock:
            call = self._calls.get(run_id) if run_id is not None else None
            if call is None:
                return None
            call.outermost.num_named += 1
            return call.conversation.request_fields(call.instance)

    # ------------------------------------------------------------------ begin

    def on_chain_start(self, serialized: Any, inputs: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A graph, a node or another chain begins."""
        self._begin(run_id, serialized, given=inputs, **kwargs)

    def on_tool_start(self, serialized: Any, input_str: str, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A tool begins."""
        self._begin(run_id, serialized, is_tool=True, **kwargs)

    def on_chat_model_start(self, serialized: Any, messages: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A model is asked."""
        self._begin(run_id, serialized, is_model=True, **kwargs)

    def on_llm_start(self, serialized: Any, prompts: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A model is asked."""
        self._begin(run_id, serialized, is_model=True, **kwargs)

    def _begin(
        self,
        run_id: uuid.UUID,
        serialized: Any,
        *,
        given: Any = None,
        is_tool: bool = False,
        is_model: bool = False,
        parent_run_id: uuid.UUID | None = None,
        tags: Sequence[str] | None = None,
        metadata: Mapping[str, Any] | None = None,
        name: str | None = None,
        **_: Any,
    ) -> None:
        name = name or (serialized.get("name") if isinstance(serialized, Mapping) else None) or ""
        with self._lock:
            outer = self._calls.get(parent_run_id) if parent_run_id is not None else None
            if outer is None:
                call = _Call(name, None, self._make_conversation(metadata or {}), Instance(None, None), given)
            else:
                call = _Call(name, outer, outer.conversation, outer.instance, given, metadata or {}, is_tool)
            if any(tag.startswith(_NODE_TAG) for tag in tags or ()):
                call.become_node()
            call.outermost.run_ids.add(run_id)
            if is_model:
                _ASKING.set((self, run_id))
            call.outermost.num_asked += is_model
            self._calls[run_id] = call

    def _make_conversation(self, metadata: Mapping[str, Any]) -> Conversation:
        session_id = self._session_id or metadata.get("session_id") or metadata.get("thread_id")
        workflow_id = self._workflow_id or metadata.get("workflow_id")
        conversation = Conversation(self._client, str(session_id) if session_id else None, workflow_id)
        if not session_id:
            conversation.start()
        return conversation

    # ------------------------------------------------------------------ end

    def on_chain_end(self, outputs: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A graph, a node or another chain is over."""
        call = self._calls.get(run_id)
        if call is not None and call.is_node and _replaces_messages(outputs):
            graph = call.graph
            whose = replace(graph.instance, agent=None) if graph.has_roles else graph.instance
            call.conversation.say(BoundaryKind.COMPACTION, whose)
        self._end(run_id)

    def on_chain_error(self, error: BaseException, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A graph, a node or another chain has raised, been cancelled, or waits for a human."""
        self._end(run_id, is_paused=isinstance(error, GraphInterrupt))

    def on_tool_end(self, output: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A tool is over."""
        self._end(run_id)

    def on_tool_error(self, error: BaseException, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A tool has raised."""
        self._end(run_id)

    def on_llm_end(self, response: Any, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A model has answered."""
        self._end(run_id)

    def on_llm_error(self, error: BaseException, *, run_id: uuid.UUID, **kwargs: Any) -> None:
        """A model has not answered."""
        self._end(run_id)

    def _end(self, run_id: uuid.UUID, *, is_paused: bool = False) -> None:
        with self._lock:
            call = self._calls.pop(run_id, None)
            if call is None:
                return
            if is_paused:
                call.is_paused = call.graph.is_paused = True
            call.outermost.run_ids.discard(run_id)
            call.end()
            if call.outer is None:
                for left in call.run_ids:  # such as threads that were not waited for
                    self._calls.pop(left, None)


class LifetimeChatOpenAI(ChatOpenAI):
    """A `ChatOpenAI` of a lifetime server, which names each request that it makes under a `LifetimeCallbackHandler`."""

    def _get_request_payload(self, input_: Any, *, stop: list[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        # Where every request passes, streamed or not; the callback that told of it ran in the same context just before.
        payload = super()._get_request_payload(input_, stop=stop, **kwargs)
        asking = _ASKING.get()
        return payload if asking is None else _add_name(payload, *asking)


class LifetimeMiddleware(AgentMiddleware[Any, Any, Any]):
    """Names the requests that an agent of `create_agent` makes under a `LifetimeCallbackHandler`, with any OpenAI-like model.

    For models of a lifetime server: others may refuse requests with fields that they do not know. What other middleware
    asks of a model, such as summaries, is named by `LifetimeChatOpenAI` only.
    """

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Any]) -> Any:
        """Name the request, and pass it on."""
        return handler(_name_request(request))

    async def awrap_model_call(self, request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], Awaitable[Any]]) -> Any:
        """Name the request, and pass it on."""
        return await handler(_name_request(request))


# ---------------------------------------------------------------------- naming


def _name_request(request: ModelRequest[Any]) -> ModelRequest[Any]:
    if isinstance(request.model, LifetimeChatOpenAI):
        return request
    callbacks = get_config().get("callbacks")
    handlers = getattr(callbacks, "handlers", None) or []
    handler = next((handler for handler in handlers if isinstance(handler, LifetimeCallbackHandler)), None)
    if handler is None:
        return request
    settings = dict(request.model_settings)
    body = {**(getattr(request.model, "extra_body", None) or {}), **(settings.get("extra_body") or {})}
    if body:  # a call's fields replace the model's own
        settings["extra_body"] = body
    return request.override(model_settings=_add_name(settings, handler, getattr(callbacks, "parent_run_id", None)))


def _add_name(settings: dict[str, Any], handler: LifetimeCallbackHandler, run_id: uuid.UUID | None) -> dict[str, Any]:
    """Return a call's settings with the name of a run in them."""
    try:
        name = handler.request_fields(run_id)
        if name is None:
            return settings
        named = add_name(name, settings.get("extra_headers"), settings.get("extra_body"))
        return settings if named is None else {**settings, "extra_headers": named[0], "extra_body": named[1]}
    except Exception:
        logger.exception("lifetime: a request goes without its name")
        return settings


def _make_id(role: str, parent: str | None, task: object) -> str:
    """Return an id for a graph inside another one: the same when the task is done again after an interrupt."""
    unique = hashlib.sha256(f"{parent}\n{task}".encode()).hexdigest() if task else uuid.uuid4().hex
    return clip_id(f"{role}-{unique[:8]}")


# ---------------------------------------------------------------------- messages


def _messages(state: Any) -> Sequence[Any]:
    """Return the messages of a graph's state, be it a dictionary or an object."""
    messages = state.get("messages") if isinstance(state, Mapping) else getattr(state, "messages", None)
    return messages if isinstance(messages, Sequence) else ()


def _shares_messages(node: _Call, graph: _Call) -> bool:
    """Whether a graph in a node reads on the messages of the graph around: from the first one, rather than a task of its own."""
    if node.is_tool or "__pregel_push" in (node.metadata.get("langgraph_path") or ()):
        return False
    first = next(iter(_messages(node.given)), None)
    first_id = getattr(first, "id", None)
    return first_id is not None and any(getattr(message, "id", None) == first_id for message in _messages(graph.given))


def _last_text(state: Any) -> str | None:
    """Return the last message's text, cut to what a spawn record holds."""
    last = next(reversed(_messages(state)), None)
    content = getattr(last, "content", None)
    if content is None and isinstance(last, Mapping):
        content = last.get("content")
    elif isinstance(last, tuple) and len(last) == 2:
        content = last[1]
    return content[:MAX_SPAWN_TEXT_LENGTH] if isinstance(content, str) else None


def _replaces_messages(outputs: Any) -> bool:
    """Whether a node's outputs take away all messages that were there."""
    for update in outputs if isinstance(outputs, list) else [outputs]:
        state = update.update if isinstance(update, Command) else update
        if any(getattr(message, "id", None) == REMOVE_ALL_MESSAGES for message in _messages(state)):
            return True
    return False
