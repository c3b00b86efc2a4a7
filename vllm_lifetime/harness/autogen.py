# SPDX-License-Identifier: Apache-2.0
"""AutoGen (AgentChat): names the requests of agents and teams, and reports their boundaries.

AutoGen has no hooks, so a `LifetimeSession` wraps two things: the model client that the agents share, and the team or
agent that is run. Who asks is known from AutoGen's own message handler (`autogen_core.MessageHandlerContext`), so one
wrapped client serves all participants of a team.

| in AutoGen | event |
|---|---|
| the session's first run or request | `session_start` |
| the outermost run is over: result, error, cancelled, not read to its end | `turn_end`, for each agent that has asked in it |
| a watched team or agent starts inside a run (a team's participant, SocietyOfMindAgent, AgentTool, TeamTool) | `subagent_spawn` |
| an agent of a team inside a run asks for the first time | `subagent_spawn` |
| a watched team or agent inside a run is over, however it ended | `subagent_return`, its agents first |
| `reset()`, and the session's end | `subagent_return` for what is left |
| `LifetimeSession.end()` | `workflow_end`; `session_end` if the workflow was named |

A handoff and the choice of a speaker are no boundaries: everybody's context lives on, and the next request says whose
turn it is. Everything runs on the loop of the agents; nothing here waits or raises because of the server.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self, TypeAlias, overload

from vllm_lifetime.boundaries import BoundaryKind
from vllm_lifetime.harness.client import AsyncLifetimeClient, LifetimeClient
from vllm_lifetime.harness.conversation import Conversation, Instance, clip_id
from vllm_lifetime.harness.naming import fill_body

try:
    from autogen_agentchat.base import ChatAgent, Response, TaskResult, Team
    from autogen_agentchat.messages import BaseAgentEvent, BaseChatMessage
    from autogen_core import AgentId, CancellationToken, ComponentModel, MessageHandlerContext
    from autogen_core.models import ChatCompletionClient, CreateResult, LLMMessage, ModelInfo, RequestUsage
except ImportError as error:
    raise ImportError("the AutoGen adapter needs AutoGen: pip install 'vllm-lifetime[autogen]'") from error

__all__ = ["LifetimeAgent", "LifetimeModelClient", "LifetimeSession", "LifetimeTeam"]

logger = logging.getLogger("vllm_lifetime.harness")

Task: TypeAlias = str | BaseChatMessage | Sequence[BaseChatMessage] | None
Item: TypeAlias = BaseAgentEvent | BaseChatMessage | TaskResult


@dataclass(eq=False, slots=True)
class _Run:
    """One run of a watched team or agent, until its result or its end."""

    session: LifetimeSession
    watched: _Watched
    handler: AgentId | None
    """The message handler that the run was started in."""

    instance: Instance
    """What the team or agent is in this run."""

    outer: _Run | None = None
    keeps_context: bool = True
    members: list[str] = field(default_factory=list)
    """Instances whose contexts began in this run, the oldest first."""

    asked: dict[str, Instance] = field(default_factory=dict)
    """Who has asked in this run; of the outermost only."""

    @property
    def outermost(self) -> _Run:
        return self if self.outer is None else self.outer.outermost

    def open(self, instance: Instance) -> None:
        """Note that an instance acts in this run."""
        if self.session._conversation.open(instance) and instance.agent_id is not None:
            self.members.append(instance.agent_id)


_RUN: ContextVar[_Run | None] = ContextVar("vllm_lifetime_autogen_run", default=None)


class LifetimeSession:
    """One conversation of an AutoGen team or agent, on a lifetime server.

    Wrap the model client before it goes into the agents and the team before it is run:

        with LifetimeSession(client) as session:
            model_client = session.model_client(OpenAIChatCompletionClient(...))
            team = session.watch(RoundRobinGroupChat([AssistantAgent("writer", model_client), ...]))
            await team.run(task="...")

    AutoGen's agents remember their conversation, so agents belong to one session; any number of sessions may run at
    the same time. Not thread-safe: use a session where its agents run.
    """

    def __init__(
        self,
        client: LifetimeClient | AsyncLifetimeClient,
        session_id: str | None = None,
        *,
        workflow_id: str | None = None,
    ) -> None:
        """Report through `client`. The session's id is made up unless given; its workflow is by default its own.

        A workflow that is named may be shared by several sessions and does not end with one of them: report its
        `workflow_end` through the client.
        """
        self._conversation = Conversation(client, session_id, workflow_id)
        self._numbers = itertools.count(1)
        self._open_runs: list[_Run] = []
        self._asked_outside: dict[str, Instance] = {}

    @property
    def session_id(self) -> str:
        """The session's id."""
        return self._conversation.session_id

    # ------------------------------------------------------------------ wrapping

    def model_client(self, client: ChatCompletionClient, *, agent: str | None = None) -> LifetimeModelClient:
        """Return `client` with each request named; it can be shared by all agents of the session.

        `agent` is the role that is told: by default the name of the team's participant or of the watched agent.
        """
        return LifetimeModelClient(client, self, agent)

    @overload
    def watch(self, runner: Team, *, keeps_context: bool = False) -> LifetimeTeam: ...
    @overload
    def watch(self, runner: ChatAgent, *, keeps_context: bool = False) -> LifetimeAgent: ...
    def watch(self, runner: Team | ChatAgent, *, keeps_context: bool = False) -> LifetimeTeam | LifetimeAgent:
        """Return a team or agent that reports its boundaries and else does what `runner` does.

        Inside the run of another one it is a sub-agent, whose context is over when its run is. `keeps_context` says
        that it goes on where it was in its next run, as the agent of an AgentTool does: then its context is over when it
        is reset or the session ends. A team that is a participant of a team always does. Raises `TypeError` for
        anything but a team or an agent.
        """
        if isinstance(runner, Team):
            return LifetimeTeam(runner, self, keeps_context)
        if isinstance(runner, ChatAgent):
            return LifetimeAgent(runner, self, keeps_context)
        raise TypeError(f"watch() takes an AgentChat team or agent, not a {type(runner).__name__}")

    def end(self) -> None:
        """Report that the session is over, and everything in it. A later run begins it anew."""
        for run in reversed(self._open_runs):
            self._close(run)
        if self._asked_outside:
            self._end_turn(self._asked_outside)
        self._conversation.end()

    def __enter__(self) -> Self:
        """Return the session."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the session."""
        self.end()

    # ------------------------------------------------------------------ runs

    def _open(self, watched: _Watched) -> _Run:
        outer, handler = self._running(), _handler()
        self._conversation.start()
        if watched.agent_id is None or (outer is not None and self._conversation.find(watched.agent_id) is None):
            watched.agent_id = clip_id(f"{watched.name}#{next(self._numbers)}")
        if outer is None:
            run = _Run(self, watched, handler, Instance(watched.name, watched.agent_id))
        else:
            # A team's participant runs in its own message handler; a tool, in that of the agent who calls it.
            is_participant = handler != outer.handler and _name_of(handler) == watched.name
            parent = outer.instance if is_participant else self._speaker(None)
            instance = Instance(watched.name, watched.agent_id, parent.agent_id, is_spawned=True)
            keeps_context = watched.keeps_context or is_participant
            run = _Run(self, watched, handler, instance, outer, keeps_context)
            run.open(instance)
        self._open_runs.append(run)
        return run

    def _close(self, run: _Run) -> None:
        """The run is over, however it ended. May be called again."""
        if run not in self._open_runs:
            return
        self._open_runs.remove(run)
        if run.outer is None:
            self._end_turn(self._asked_outside | run.asked)
            run.watched.members += run.members
        elif run.keeps_context:
            run.watched.members += run.members
            run.outer.members += run.members
        else:
            self._conversation.close(run.members)

    def _end_turn(self, asked: Mapping[str, Instance]) -> None:
        """The turn is over for all who have asked in it and are still open; for the session if nobody is."""
        still_open = [instance for agent_id, instance in asked.items() if self._conversation.find(agent_id) is not None]
        for instance in still_open:
            self._conversation.say(BoundaryKind.TURN_END, instance)
        if not still_open:
            self._conversation.say(BoundaryKind.TURN_END)
        self._asked_outside = {}

    # ------------------------------------------------------------------ requests

    def _running(self) -> _Run | None:
        run = _RUN.get()
        return run if run is not None and run.session is self else None

    def _speaker(self, agent: str | None) -> Instance:
        """Who asks here and now; `agent` overrides the role."""
        run, handler = self._running(), _handler()
        participant = _name_of(handler)
        if run is None:  # not watched, or a team on a runtime of its user's
            name = agent or participant
            return Instance(name, name)
        if participant is None or handler == run.handler:
            return replace(run.instance, agent=agent or run.watched.name)
        name = agent or participant
        agent_id = clip_id(f"{run.instance.agent_id}/{name}")
        is_spawned = run.outer is not None
        return Instance(name, agent_id, run.instance.agent_id if is_spawned else None, is_spawned)

    def _name_request(self, agent: str | None) -> dict[str, Any]:
        """Register the request that is about to be made; return what names it, for its body."""
        run, speaker = self._running(), self._speaker(agent)
        self._conversation.start()
        if run is not None:
            run.open(speaker)
        else:
            self._conversation.open(speaker)
        if speaker.agent_id is not None:
            asked = run.outermost.asked if run is not None else self._asked_outside
            asked[speaker.agent_id] = speaker
        fields = self._conversation.request_fields(speaker)
        # AutoGen's clients refuse extra_headers; vLLM reads the session's id from the body as well.
        return {"session_id": self.session_id, **fields["extra_body"]}


class _Watched:
    """What a watched team and a watched agent have in common: the runs."""

    _runner: Team | ChatAgent

    def __init__(self, session: LifetimeSession, keeps_context: bool) -> None:
        self.keeps_context = keeps_context
        self.agent_id: str | None = None
        """The instance that it is, or was in its last run."""

        self.members: list[str] = []
        """Instances that live on between its runs."""

        self._session = session

    @property
    def name(self) -> str:
        """The name of the team or agent."""
        return str(self._runner.name)

    @property
    def description(self) -> str:
        """Its description."""
        return str(self._runner.description)

    async def run(
        self, *, task: Task = None, cancellation_token: CancellationToken | None = None, output_task_messages: bool = True
    ) -> TaskResult:
        """Run the task to its result."""
        with self._as_run():
            return await self._runner.run(
                task=task, cancellation_token=cancellation_token, output_task_messages=output_task_messages
            )

    async def run_stream(
        self, *, task: Task = None, cancellation_token: CancellationToken | None = None, output_task_messages: bool = True
    ) -> AsyncGenerator[Item, None]:
        """Run the task; yield what happens, and its result at last."""
        run = self._session._open(self)
        try:
            stream = self._runner.run_stream(
                task=task, cancellation_token=cancellation_token, output_task_messages=output_task_messages
            )
            async with aclosing(stream):
                while True:
                    # Around each step, since between two of them the code of the consumer runs in the same context.
                    token = _RUN.set(run)
                    try:
                        item = await anext(stream, None)
                    finally:
                        _RUN.reset(token)
                    if item is None:
                        return
                    if isinstance(item, TaskResult):  # a consumer may read no further
                        self._session._close(run)
                    yield item
        finally:
            self._session._close(run)

    def dump_component(self) -> ComponentModel:
        """Return the component that is watched."""
        return self._runner.dump_component()

    async def save_state(self) -> Mapping[str, Any]:
        """Return its state."""
        return await self._runner.save_state()

    async def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore its state."""
        await self._runner.load_state(state)

    def __getattr__(self, name: str) -> Any:
        """Whatever else the team or agent has."""
        if name.startswith("_"):  # such as those that copying looks for before there is a runner
            raise AttributeError(name)
        return getattr(self._runner, name)

    @contextmanager
    def _as_run(self) -> Iterator[None]:
        run = self._session._open(self)
        token = _RUN.set(run)
        try:
            yield
        finally:
            _RUN.reset(token)
            self._session._close(run)

    def _forget(self) -> None:
        """It has been reset: what lived on is over."""
        members, self.members = self.members, []
        self._session._conversation.close(members, also_unspawned=True)


class LifetimeTeam(_Watched, Team):
    """A team whose runs are reported; made by `LifetimeSession.watch`."""

    def __init__(self, team: Team, session: LifetimeSession, keeps_context: bool = False) -> None:
        """Watch `team` for `session`."""
        super().__init__(session, keeps_context)
        self._runner: Team = team

    async def reset(self) -> None:
        """Reset the team: the contexts of its participants are over."""
        await self._runner.reset()
        self._forget()

    async def pause(self) -> None:
        """Pause the team."""
        await self._runner.pause()

    async def resume(self) -> None:
        """Resume the team."""
        await self._runner.resume()


class LifetimeAgent(_Watched, ChatAgent):
    """An agent whose runs are reported; made by `LifetimeSession.watch`.

    As a participant of a team it is asked for messages, not run, and has nothing to report: watch the team.
    """

    def __init__(self, agent: ChatAgent, session: LifetimeSession, keeps_context: bool = False) -> None:
        """Watch `agent` for `session`."""
        super().__init__(session, keeps_context)
        self._runner: ChatAgent = agent

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        """The types of its messages."""
        return self._runner.produced_message_types

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        """Answer messages."""
        return await self._runner.on_messages(messages, cancellation_token)

    def on_messages_stream(
        self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken
    ) -> AsyncGenerator[BaseAgentEvent | BaseChatMessage | Response, None]:
        """Answer messages; yield what happens, and the answer at last."""
        return self._runner.on_messages_stream(messages, cancellation_token)

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """Reset the agent: its context is over."""
        await self._runner.on_reset(cancellation_token)
        self._forget()

    async def on_pause(self, cancellation_token: CancellationToken) -> None:
        """Pause the agent."""
        await self._runner.on_pause(cancellation_token)

    async def on_resume(self, cancellation_token: CancellationToken) -> None:
        """Resume the agent."""
        await self._runner.on_resume(cancellation_token)

    async def close(self) -> None:
        """Release what the agent holds."""
        await self._runner.close()


class LifetimeModelClient(ChatCompletionClient):
    """A model client whose requests say who asks; made by `LifetimeSession.model_client`.

    Wraps any client that passes on `extra_body`, as `OpenAIChatCompletionClient` does.
    """

    def __init__(self, client: ChatCompletionClient, session: LifetimeSession, agent: str | None = None) -> None:
        """Name the requests of `client` for `session`, as those of `agent` or of who is found to ask."""
        self._wrapped = client
        self._session = session
        self._agent = agent

    async def create(
        self, messages: Sequence[LLMMessage], *, extra_create_args: Mapping[str, Any] | None = None, **options: Any
    ) -> CreateResult:
        """Ask the model."""
        return await self._wrapped.create(messages, extra_create_args=self._name(extra_create_args), **options)

    def create_stream(
        self, messages: Sequence[LLMMessage], *, extra_create_args: Mapping[str, Any] | None = None, **options: Any
    ) -> AsyncGenerator[str | CreateResult, None]:
        """Ask the model; yield its answer in pieces, and as a whole at last."""
        return self._wrapped.create_stream(messages, extra_create_args=self._name(extra_create_args), **options)

    def _name(self, extra_create_args: Mapping[str, Any] | None) -> dict[str, Any]:
        extra = dict(extra_create_args or {})
        try:
            # What is passed to `create` replaces what the client was made with, so that has to be passed again.
            configured = getattr(self._wrapped, "_create_args", None) or {}
            body = {**(configured.get("extra_body") or {}), **(extra.get("extra_body") or {})}
            name = self._session._name_request(self._agent)
            return {**extra, "extra_body": fill_body(name, body)}
        except Exception as error:  # the request must go on
            logger.warning("lifetime: a request goes without its name: %s", error)
            return extra

    async def close(self) -> None:
        """Close the client that is wrapped."""
        await self._wrapped.close()

    def actual_usage(self) -> RequestUsage:
        """Tokens used."""
        return self._wrapped.actual_usage()

    def total_usage(self) -> RequestUsage:
        """Tokens used, with those served from a cache of the client's."""
        return self._wrapped.total_usage()

    def count_tokens(self, messages: Sequence[LLMMessage], **options: Any) -> int:
        """Count the tokens of a prompt."""
        return self._wrapped.count_tokens(messages, **options)

    def remaining_tokens(self, messages: Sequence[LLMMessage], **options: Any) -> int:
        """Count the tokens that a prompt leaves free."""
        return self._wrapped.remaining_tokens(messages, **options)

    @property
    def capabilities(self) -> Any:
        """What the model can do, in AutoGen's older words."""
        return self._wrapped.capabilities

    @property
    def model_info(self) -> ModelInfo:
        """What the model can do."""
        return self._wrapped.model_info

    def dump_component(self) -> ComponentModel:
        """Return the client that is wrapped, as a component."""
        return self._wrapped.dump_component()


def _handler() -> AgentId | None:
    """The agent of AutoGen's runtime whose message is being handled here."""
    try:
        return MessageHandlerContext.agent_id()
    except RuntimeError:  # none is
        return None


def _name_of(handler: AgentId | None) -> str | None:
    """The participant's name: a team registers it as `<name>_<team's id>`, with the team's id as key."""
    return None if handler is None else str(handler.type).removesuffix(f"_{handler.key}")
