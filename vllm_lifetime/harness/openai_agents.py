# SPDX-License-Identifier: Apache-2.0
"""OpenAI Agents SDK: names the requests of agents, and reports their boundaries.

Two things belong together: a `LifetimeModel` around each model that a lifetime server serves, and a `LifetimeRunner` in
place of the SDK's `Runner`.

| in the SDK | event |
|---|---|
| a run without a session id begins | `session_start` |
| it is over: result, error, too many turns, cancelled | `workflow_end`; `session_end` if the workflow was named |
| a run of a session is over, in whatever way | `turn_end` |
| a run begins inside a run (`Agent.as_tool`, or `Runner.run` in a tool) | `subagent_spawn` |
| it is over, in whatever way | `subagent_return`, its own sub-agents first |

A handoff is no boundary: the next agent reads the conversation on, the last one may get it back, and the next request says
whose turn it is. Neither is a run that waits for an approval (`interruptions`): it goes on when it is resumed.

Which run something belongs to travels in a context variable. Everything runs on the agents' own loop; nothing here waits, or
raises because of the server.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from vllm_lifetime.boundaries import MAX_ID_LENGTH, MAX_SPAWN_TEXT_LENGTH, MAX_SPAWN_TOOLS, BoundaryKind, Spawn
from vllm_lifetime.harness.client import AsyncLifetimeClient, LifetimeClient
from vllm_lifetime.harness.conversation import Conversation, Instance, clip_id
from vllm_lifetime.harness.naming import add_name

try:
    from agents import Agent, Model, ModelProvider, ModelResponse, ModelSettings, RunHooks, Runner, RunResult, RunResultStreaming
    from agents.items import TResponseStreamEvent
    from agents.lifecycle import RunHooksBase
    from agents.run import get_default_agent_runner, set_default_agent_runner
except ImportError as error:
    raise ImportError(
        "the OpenAI Agents adapter needs the SDK, 0.24 or later: pip install 'vllm-lifetime[openai-agents]'"
    ) from error

__all__ = ["LifetimeModel", "LifetimeModelProvider", "LifetimeRunner"]

logger = logging.getLogger("vllm_lifetime.harness")

_HOOKS = [name for name in vars(RunHooksBase) if name.startswith("on_")]

_RUN: ContextVar[_Run | None] = ContextVar("vllm_lifetime_openai_agents_run", default=None)


@dataclass(eq=False, slots=True)
class _Run:
    """One run of the SDK's loop: one agent instance, whatever roles it is handed to."""

    conversation: Conversation
    instance: Instance
    outer: _Run | None = None
    opened: list[str] = field(default_factory=list)
    """Instances that were spawned in this run, the oldest first, with its own at the beginning if it was spawned."""

    is_over: bool = False
    num_asked: int = 0
    num_named: int = 0
    """Requests to a model, and those of them that went through a `LifetimeModel`; of the outermost run only."""

    @property
    def outermost(self) -> _Run:
        return self if self.outer is None else self.outer.outermost

    def spawn(self, agent: Agent[Any], given: object, context: object) -> _Run:
        """Begin a run inside this one."""
        role = _role(agent)
        parent = self.instance.agent_id or self.instance.agent
        instance = Instance(role, _make_id(role, parent, context), parent, is_spawned=True)
        if self.conversation.find(instance.agent_id) is not None:  # a call id that is not unique
            instance = replace(instance, agent_id=_make_id(role, parent, None))
        inner = _Run(self.conversation, instance, self)
        run: _Run | None = inner
        while run is not None and instance.agent_id is not None:
            run.opened.append(instance.agent_id)
            run = run.outer
        position = len(self.outermost.opened) - 1
        self.conversation.open(instance, _describe(agent, given, position))
        return inner

    def end(self, *, is_paused: bool = False) -> None:
        """The run is over; `is_paused`: to be resumed later."""
        if self.is_over:
            return
        self.is_over = True
        if is_paused:
            return
        self.conversation.close(self.opened)
        if self.outer is not None:
            return
        if self.conversation.is_started:
            self.conversation.end()
        else:
            self.conversation.say(BoundaryKind.TURN_END)
        if self.num_asked and not self.num_named:
            logger.warning("lifetime: no request of this run was named: wrap the agents' models in LifetimeModel")


class LifetimeRunner:
    """The SDK's `Runner` for agents on a lifetime server: the same methods, with the same arguments and two more.

        runner = LifetimeRunner(client)
        result = await runner.run(agent, "...", session_id="s-42")

    A run with a `session_id`, or with one of the SDK's sessions (`session=...`), is one turn of that session. Who keeps the
    session ends it: `client.boundary("session_end", session_id="s-42")`. A run without is a session of its own.
    `workflow_id` names a task that spans several runs; report its `workflow_end` through the client.

    Runs inside a run are its sub-agents: `Agent.as_tool`, and `Runner` used in a tool. For these the SDK's default runner is
    replaced by one that watches them, process-wide; outside of a run of ours it does nothing. Thread-safe.
    """

    def __init__(self, client: LifetimeClient | AsyncLifetimeClient) -> None:
        """Report through `client`."""
        self._client = client

    async def run(
        self,
        starting_agent: Agent[Any],
        input: Any,
        *,
        session_id: str | None = None,
        workflow_id: str | None = None,
        **options: Any,
    ) -> RunResult:
        """Run the agent as `Runner.run` does, with its `options`; returns and raises what that does."""
        run = self._begin(starting_agent, options, session_id, workflow_id)
        return await _watch(run, Runner.run(starting_agent, input, **options))

    def run_sync(
        self,
        starting_agent: Agent[Any],
        input: Any,
        *,
        session_id: str | None = None,
        workflow_id: str | None = None,
        **options: Any,
    ) -> RunResult:
        """Run the agent as `Runner.run_sync` does, with its `options`; returns and raises what that does."""
        run = self._begin(starting_agent, options, session_id, workflow_id)
        return _watch_sync(run, lambda: Runner.run_sync(starting_agent, input, **options))

    def run_streamed(
        self,
        starting_agent: Agent[Any],
        input: Any,
        *,
        session_id: str | None = None,
        workflow_id: str | None = None,
        **options: Any,
    ) -> RunResultStreaming:
        """Run the agent as `Runner.run_streamed` does, with its `options`; returns and raises what that does."""
        run = self._begin(starting_agent, options, session_id, workflow_id)
        return _watch_streamed(run, lambda: Runner.run_streamed(starting_agent, input, **options))

    def _begin(self, agent: Agent[Any], options: dict[str, Any], session_id: str | None, workflow_id: str | None) -> _Run | None:
        """Begin an outermost run; None if it is to be a sub-agent of the present one."""
        _watch_inner_runs()
        session_id = session_id or getattr(options.get("session"), "session_id", None)
        outer = _RUN.get()
        if outer is not None and not outer.is_over and session_id is None:
            return None
        conversation = Conversation(self._client, session_id, workflow_id)
        if session_id is None:
            conversation.start()
        run = _Run(conversation, Instance(_role(agent), None))
        options["hooks"] = _watch_hooks(run, options.get("hooks"))
        return run


class LifetimeModel(Model):
    """A model of a lifetime server: names each request that a `LifetimeRunner` makes of it. Otherwise the model it wraps.

    Do not wrap models of other servers: they may refuse requests with fields that they do not know.
    """

    def __init__(self, model: Model) -> None:
        """Pass everything on to `model`."""
        self.wrapped = model

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped model."""
        if name == "wrapped":  # not there yet: the object is being copied
            raise AttributeError(name)
        return getattr(self.wrapped, name)

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """Ask the wrapped model, with the request named."""
        args, kwargs = _name_call(args, kwargs)
        return await self.wrapped.get_response(*args, **kwargs)

    def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[TResponseStreamEvent]:
        """Ask the wrapped model, with the request named."""
        args, kwargs = _name_call(args, kwargs)
        return self.wrapped.stream_response(*args, **kwargs)

    def get_retry_advice(self, *args: Any, **kwargs: Any) -> Any:
        """Return the wrapped model's advice."""
        return self.wrapped.get_retry_advice(*args, **kwargs)

    async def close(self) -> None:
        """Close the wrapped model."""
        await self.wrapped.close()

    async def _cleanup_on_run_end(self, *args: Any) -> None:
        # The SDK calls it of every model; it is no part of the interface.
        await self.wrapped._cleanup_on_run_end(*args)


class LifetimeModelProvider(ModelProvider):
    """For agents that name their models, in `RunConfig(model_provider=...)`: all its models are a lifetime server's."""

    def __init__(self, provider: ModelProvider) -> None:
        """Take the models from `provider`."""
        self.wrapped = provider

    def get_model(self, model_name: str | None) -> Model:
        """Return the model of this name, as a `LifetimeModel`."""
        return LifetimeModel(self.wrapped.get_model(model_name))

    async def aclose(self) -> None:
        """Close the wrapped provider."""
        await self.wrapped.aclose()


# ---------------------------------------------------------------------- watching


@contextmanager
def _presently(run: _Run) -> Iterator[Callable[[RunResult], RunResult]]:
    """Make `run` the present one, and end it; what is yielded takes the result, which says whether it is only paused."""
    is_paused = False

    def note(result: RunResult) -> RunResult:
        nonlocal is_paused
        is_paused = bool(result.interruptions)
        return result

    token = _RUN.set(run)
    try:
        yield note
    finally:
        _RUN.reset(token)
        run.end(is_paused=is_paused)


async def _watch(run: _Run | None, result_of: Awaitable[RunResult]) -> RunResult:
    """Await the SDK's run as `run`, and end that with it."""
    if run is None:
        return await result_of
    with _presently(run) as note:
        return note(await result_of)


def _watch_sync(run: _Run | None, start: Callable[[], RunResult]) -> RunResult:
    """Do the SDK's run as `run`, and end that with it."""
    if run is None:
        return start()
    with _presently(run) as note:
        return note(start())


def _watch_streamed(run: _Run | None, start: Callable[[], RunResultStreaming]) -> RunResultStreaming:
    """Start the SDK's run as `run`, which ends when the SDK's loop does, read or not."""
    if run is None:
        return start()
    task = None
    token = _RUN.set(run)
    try:
        result = start()
        task = result.run_loop_task
    finally:
        _RUN.reset(token)
        if task is None:
            run.end()
    if task is not None:
        task.add_done_callback(lambda _: run.end(is_paused=bool(result.interruptions)))
    return result


class _WatchedRunner:
    """The SDK's default runner, with runs inside a run of ours watched as its sub-agents."""

    def __init__(self, runner: Any) -> None:
        self.wrapped = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    async def run(self, starting_agent: Agent[Any], input: Any, **options: Any) -> RunResult:
        run = _begin_inner(starting_agent, input, options)
        return await _watch(run, self.wrapped.run(starting_agent, input, **options))

    def run_sync(self, starting_agent: Agent[Any], input: Any, **options: Any) -> RunResult:
        run = _begin_inner(starting_agent, input, options)
        return _watch_sync(run, lambda: self.wrapped.run_sync(starting_agent, input, **options))

    def run_streamed(self, starting_agent: Agent[Any], input: Any, **options: Any) -> RunResultStreaming:
        run = _begin_inner(starting_agent, input, options)
        return _watch_streamed(run, lambda: self.wrapped.run_streamed(starting_agent, input, **options))


def _watch_inner_runs() -> None:
    """Put a `_WatchedRunner` in front of whatever is the SDK's default runner, unless there is one."""
    runner: Any = get_default_agent_runner()
    if not isinstance(runner, _WatchedRunner):
        watched: Any = _WatchedRunner(runner)
        set_default_agent_runner(watched)


def _begin_inner(agent: Agent[Any], given: object, options: dict[str, Any]) -> _Run | None:
    """Begin a run inside the present one; None if there is none, or this is the present one itself."""
    outer = _RUN.get()
    hooks = options.get("hooks")
    if outer is None or outer.is_over or (isinstance(hooks, _Hooks) and hooks.run is outer):
        return None
    try:
        run = outer.spawn(agent, given, options.get("context"))
        options["hooks"] = _watch_hooks(run, hooks)
    except Exception:
        logger.exception("lifetime: a run is not watched")
        return None
    return run


class _Hooks(RunHooks[Any]):
    """The hooks of one run: learns whose turn it is, and passes everything on to the hooks that the user gave."""

    def __init__(self, run: _Run, given: RunHooks[Any] | None) -> None:
        self.run = run
        self._given = given
        for name in _HOOKS:
            if given is not None and name != "on_llm_start":
                setattr(self, name, getattr(given, name))

    async def on_llm_start(self, context: Any, agent: Agent[Any], *args: Any) -> None:
        self.run.instance = replace(self.run.instance, agent=_role(agent))
        self.run.outermost.num_asked += 1
        if self._given is not None:
            await self._given.on_llm_start(context, agent, *args)


def _watch_hooks(run: _Run, given: Any) -> Any:
    """Return the run's hooks in front of the `given` ones; what is none is left for the SDK to refuse."""
    return _Hooks(run, given) if given is None or isinstance(given, RunHooksBase) else given


# ---------------------------------------------------------------------- naming


def _name_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Name the request in the model settings among a model's arguments (third, or by keyword)."""
    run = _RUN.get()
    if run is None or run.is_over:
        return args, kwargs
    try:
        if "model_settings" in kwargs:
            kwargs = {**kwargs, "model_settings": _name_settings(kwargs["model_settings"], run)}
        else:
            args = (*args[:2], _name_settings(args[2], run), *args[3:])
        run.outermost.num_named += 1
    except Exception:
        logger.exception("lifetime: a request goes without its name")
    return args, kwargs


def _name_settings(settings: ModelSettings, run: _Run) -> ModelSettings:
    """Return the settings with the run's name in them."""
    named = add_name(run.conversation.request_fields(run.instance), settings.extra_headers, settings.extra_body)
    return settings if named is None else replace(settings, extra_headers=named[0], extra_body=named[1])


def _role(agent: Agent[Any]) -> str:
    return agent.name[:MAX_ID_LENGTH]


def _make_id(role: str, parent: str | None, context: object) -> str:
    """Return an id for a run inside another one: the same when the same tool call is resumed after an approval."""
    call_id = getattr(context, "tool_call_id", None)
    unique = hashlib.sha256(f"{parent}\n{call_id}".encode()).hexdigest() if call_id else uuid.uuid4().hex
    return clip_id(f"{role}-{unique[:8]}")


def _describe(agent: Agent[Any], given: object, position: int) -> Spawn:
    """Return what the agent was built from, cut to what a spawn record holds."""
    model = agent.model if isinstance(agent.model, str) else getattr(agent.model, "model", None)
    tools = [tool.name for tool in agent.tools if 0 < len(tool.name) <= MAX_ID_LENGTH]
    return Spawn(
        instruction=given[:MAX_SPAWN_TEXT_LENGTH] if isinstance(given, str) else None,
        tools=tuple(tools[:MAX_SPAWN_TOOLS]),
        model=model[:MAX_ID_LENGTH] if isinstance(model, str) and model else None,
        position=position,
    )
