# SPDX-License-Identifier: Apache-2.0
"""What the control API does: forward events and hints to every engine, and put their answers together.

Runs in the API server, on its event loop. Knows neither HTTP nor vLLM: engines are reached through an
`EnginePort`.

Each engine answers the utility call `lifetime_call(method, payload)` with a dictionary, which is
`{"error": message}` when the call failed:

| method | payload | answer |
|---|---|---|
| `boundaries` | `{"events": [Boundary, ...]}`, at most `MAX_BATCH` | `{"outcomes": [Outcome, ...]}`, in the same order |
| `hints` | `{"message_id", "actions": [KvHintAction, ...]}` | `{"outcomes": [HintOutcome, ...]}`, in the same order |
| `release` | `{"session_id", "message_id"}` | `{"outcome": Outcome}` |
| `tiers` | `{}` | a `TiersOfEngine` |
| `sessions` | `{"limit", "after", "segments"}` | `{"sessions": [SessionView, ...], "total"}` |
| `session` | `{"session_id"}` | `{"session": SessionView or null}` |
| `health` | `{}` | an `EngineHealth` |

An engine acts once on each `message_id`, and once on each `action_id` of a `message_id`: an envelope may
reach it in several calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from functools import cache
from itertools import groupby
from typing import Any, Protocol, TypeVar

from prometheus_client import Counter
from pydantic import BaseModel, TypeAdapter, ValidationError

from vllm_lifetime.boundaries import MAX_BATCH, Boundary, Outcome, OutcomeStatus, merge_outcomes
from vllm_lifetime.control.batcher import Batcher
from vllm_lifetime.control.errors import ControlError, EngineUnavailable, SessionUnknown
from vllm_lifetime.control.event_log import EventLog
from vllm_lifetime.control.merging import merge_health, merge_sessions, merge_tiers, page_sessions
from vllm_lifetime.control.rate_limit import TokenBucket
from vllm_lifetime.control.settings import ControlSettings
from vllm_lifetime.control.views import EngineHealth, EventsPage, HealthView, SessionsPage, SessionView, TiersOfEngine, TiersView
from vllm_lifetime.hints import (
    HintOutcome,
    KvHintAction,
    KvHintsEnvelope,
    check_actions,
    merge_hint_outcomes,
    outcome_of_boundary,
)

__all__ = ["CALL_TIMEOUT_S", "HEALTH_TIMEOUT_S", "MAX_WAITING_EVENTS", "ControlService", "EnginePort"]

logger = logging.getLogger("vllm_lifetime.control")

CALL_TIMEOUT_S = 60.0
"""Seconds to wait for the engines. An engine answers between two of its steps."""

HEALTH_TIMEOUT_S = 5.0
"""Seconds after which an engine that does not answer counts as stalled."""

MAX_WAITING_EVENTS = 10_000
"""Most events that wait for a call to the engines."""

SPACING_S = 0.05
"""Seconds from one call with events that nobody waits for to the next, where nothing can overtake them by it: see `hurry`. At
1,000 events per second, calls of 10 would take the thread that schedules half as long again as calls of 50: each begins with cold
caches."""


class _Outcomes(BaseModel):
    outcomes: list[Outcome]


class _HintOutcomes(BaseModel):
    outcomes: list[HintOutcome]


class _Released(BaseModel):
    outcome: Outcome


class _Session(BaseModel):
    session: SessionView | None


_Answer = TypeVar("_Answer", bound=BaseModel)
_EVENTS = TypeAdapter(list[Boundary])


class EnginePort(Protocol):
    """The way to the engines of this server."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call the EngineCore utility `method` on every engine; return one result per engine.

        Raises any exception when one of the engines is dead or fails.
        """
        ...


class ControlService:
    """Operations of the control API. All raise `EngineUnavailable`; those that change something raise `RateLimited`."""

    def __init__(
        self,
        engine: EnginePort,
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        settings: ControlSettings | None = None,
        spacing_s: float = 0.0,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
    ) -> None:
        """Reach the engines through `engine`, and give up on them after `timeout_s` seconds.

        Of `settings` the rate limit is used; its default is that of `ControlSettings`. `spacing_s` above 0 needs somebody who
        calls `hurry`.
        """
        settings = settings or ControlSettings()
        self._engine = engine
        self._timeout_s = timeout_s
        self._health_timeout_s = health_timeout_s
        self._limit = TokenBucket(settings.events_per_s, settings.events_burst)
        self._log = EventLog()
        self._boundaries = Batcher(
            self._send_boundaries,
            max_batch=MAX_BATCH,
            max_waiting=MAX_WAITING_EVENTS,
            timeout_s=timeout_s,
            spacing_s=spacing_s,
            on_lost=self._note_lost,
        )
        self._is_losing = False
        self._lost_counter = _lost_counter()
        # However many look at once, an engine is interrupted by one of them at a time.
        self._reading = asyncio.Semaphore(1)
        self._hinting = asyncio.Semaphore(1)

    # ------------------------------------------------------------------ what changes something

    async def apply_boundaries(self, events: list[Boundary]) -> list[Outcome]:
        """Send the events to every engine; return the merged outcome of each, in the same order.

        When it raises `EngineUnavailable`, engines that are well may have carried the events out; sending
        them again is safe, since each counts once by its `message_id`.
        """
        self._limit.take(len(events))
        return await self._apply(events)

    def queue_boundaries(self, events: list[Boundary]) -> None:
        """Have the events sent to every engine, after those that came before, and return at once.

        Raises as `apply_boundaries` does, but not for what becomes of them later: that stands in `read_events`.
        """
        self._limit.take(len(events))
        self._boundaries.put(_received_now(events))

    def hurry(self) -> None:
        """A request that may read what queued events are about has come: they go first."""
        self._boundaries.hurry()

    async def drain(self, timeout_s: float) -> None:
        """Wait until no event waits for a call to the engines, for at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._boundaries.drain()

    async def _apply(self, events: list[Boundary]) -> list[Outcome]:
        try:
            return await self._boundaries.submit(_received_now(events))
        except TimeoutError:
            raise self._too_late(self._timeout_s) from None

    async def _send_boundaries(self, events: list[tuple[float, Boundary]]) -> list[Outcome]:
        """Make one engine call of the events of many requests."""
        payload = {"events": _EVENTS.dump_python([event for _, event in events], mode="json", exclude_none=True)}
        by_engine = [answer.outcomes for answer in await self._call("boundaries", payload, _Outcomes)]
        _check_counts(by_engine, len(events), "boundaries")
        outcomes = by_engine[0] if len(by_engine) == 1 else [merge_outcomes(list(same)) for same in zip(*by_engine, strict=True)]
        self._log.add(events, outcomes)
        self._is_losing = False
        return outcomes

    def note_lost(self, events: list[Boundary], error: ControlError) -> None:
        """Say what became of events that nobody waits for: they could not be queued."""
        self._note_lost(_received_now(events), error)

    def _note_lost(self, events: list[tuple[float, Boundary]], error: ControlError) -> None:
        """Say what became of events that were `queued` when the engines could not be told: nobody else is."""
        reason = str(error.detail)
        self._lost_counter.inc(len(events))
        if not self._is_losing:
            logger.warning("lifetime: queued boundaries are lost, until the engines answer again: %s", reason)
        self._is_losing = True
        rejected = OutcomeStatus.REJECTED
        self._log.add(events, [Outcome(message_id=event.message_id, status=rejected, reason=reason) for _, event in events])

    async def apply_hints(self, envelope: KvHintsEnvelope) -> list[HintOutcome]:
        """Carry out the actions of the envelope, in order; return the outcome of each.

        Raises as `apply_boundaries` does, and may be repeated like it.
        """
        checked = check_actions(envelope)
        self._limit.take(sum(not isinstance(action, HintOutcome) for action in checked))
        outcomes: list[HintOutcome] = []
        numbered = zip(envelope.actions, checked, strict=True)
        for kind, group in groupby(numbered, key=lambda pair: type(pair[1])):
            actions, todo = zip(*group, strict=True)
            if kind is Boundary:
                done = await self._apply(list(todo))
                outcomes += [outcome_of_boundary(action.action_id, one) for action, one in zip(actions, done, strict=True)]
            elif kind is KvHintAction:
                outcomes += await self._send_hints(envelope.message_id, list(todo))
            else:
                outcomes += todo
        return outcomes

    async def _send_hints(self, message_id: str, actions: list[KvHintAction]) -> list[HintOutcome]:
        payload = {"message_id": message_id, "actions": [action.model_dump(mode="json") for action in actions]}
        answers = await self._call_after_events("hints", payload, _HintOutcomes)
        by_engine = [answer.outcomes for answer in answers]
        _check_counts(by_engine, len(actions), "hints")
        return [merge_hint_outcomes(list(same)) for same in zip(*by_engine, strict=True)]

    async def release_session(self, session_id: str) -> Outcome:
        """Retire what only this session can read; return what that did. The session goes on."""
        self._limit.take(1)
        payload = {"session_id": session_id, "message_id": uuid.uuid4().hex}
        answers = await self._call_after_events("release", payload, _Released)
        return merge_outcomes([answer.outcome for answer in answers])

    # ------------------------------------------------------------------ what looks

    async def read_tiers(self) -> TiersView:
        """Return the state of the tiers, of all engines together and of each."""
        return merge_tiers(await self._call_in_turn(self._reading, "tiers", {}, TiersOfEngine))

    async def read_sessions(self, limit: int, after: str | None = None, *, segments: bool = False) -> SessionsPage:
        """Return the first `limit` sessions whose names come after `after`, with their segments if asked for."""
        # One more than wanted tells whether there are more.
        payload = {"limit": limit + 1, "after": after, "segments": segments}
        return page_sessions(await self._call_in_turn(self._reading, "sessions", payload, SessionsPage), limit)

    async def read_session(self, session_id: str) -> SessionView:
        """Return one session with its agents and segments. Raises `SessionUnknown`."""
        answers = await self._call_in_turn(self._reading, "session", {"session_id": session_id}, _Session)
        views = [answer.session for answer in answers if answer.session is not None]
        if not views:
            raise SessionUnknown(f"No engine knows the session {session_id!r}.")
        return merge_sessions(views)

    def read_events(self, after: int | None, limit: int) -> EventsPage:
        """Return events that this API server took; see `EventLog.read`. Asks no engine."""
        return self._log.read(after, limit)

    async def read_health(self) -> HealthView:
        """Return whether the engines answer soon and their transfers come to an end. Never raises."""
        try:
            async with asyncio.timeout(self._health_timeout_s):
                return merge_health(await self._call("health", {}, EngineHealth))
        except TimeoutError:
            return HealthView(status="stalled", detail=self._too_late(self._health_timeout_s).args[0])
        except EngineUnavailable as error:
            return HealthView(status="dead", detail=str(error.detail))

    # ------------------------------------------------------------------ the engines

    async def _call_after_events(self, method: str, payload: dict[str, Any], answer: type[_Answer]) -> list[_Answer]:
        """Do `_call` when the events that came before have been sent, those too that nobody waits for; one at a time."""
        try:
            await self._boundaries.settle()
        except TimeoutError:
            raise self._too_late(self._timeout_s) from None
        return await self._call_in_turn(self._hinting, method, payload, answer)

    async def _call_in_turn(
        self, turn: asyncio.Semaphore, method: str, payload: dict[str, Any], answer: type[_Answer]
    ) -> list[_Answer]:
        """Do `_call` when no other call waits in this line."""
        try:
            async with asyncio.timeout(self._timeout_s), turn:
                return await self._call(method, payload, answer)
        except TimeoutError:
            raise self._too_late(self._timeout_s) from None

    async def _call(self, method: str, payload: dict[str, Any], answer: type[_Answer]) -> list[_Answer]:
        """Call `method` on every engine; raise `EngineUnavailable` unless all answer well and in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._engine.call("lifetime_call", method, payload)
        except TimeoutError:
            raise self._too_late(self._timeout_s) from None
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(f"An engine is not available: {reason}") from error
        if not answers:
            raise EngineUnavailable("This server has no engine.")
        for given in answers:
            if isinstance(given, dict) and "error" in given:
                raise EngineUnavailable(f"An engine could not do {method}: {given['error']}")
        try:
            return [answer.model_validate(given) for given in answers]
        except ValidationError as error:
            logger.error("An engine's answer to %s is not valid: %s", method, error)
            raise EngineUnavailable(f"An engine gave no valid answer to {method}.") from error

    @staticmethod
    def _too_late(timeout_s: float) -> EngineUnavailable:
        return EngineUnavailable(f"An engine did not answer within {timeout_s:g} seconds.")


def _received_now(events: list[Boundary]) -> list[tuple[float, Boundary]]:
    """The events with the time at which they came."""
    now_s = time.time()
    return [(now_s, event) for event in events]


def _check_counts(by_engine: list[list[Any]], expected: int, method: str) -> None:
    """Raise `EngineUnavailable` unless every engine gave an outcome for each of what it was asked for."""
    for outcomes in by_engine:
        if len(outcomes) != expected:
            raise EngineUnavailable(f"An engine answered {len(outcomes)} of {expected} {method}.")


@cache
def _lost_counter() -> Counter:
    # Made with the first service, and not on import: vLLM removes the metrics that it finds when it makes its own.
    return Counter(
        "vllm:lifetime_lost_boundaries",
        "Boundary events that were answered `queued`, and then could not be delivered to every engine.",
    )
