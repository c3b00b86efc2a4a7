# SPDX-License-Identifier: Apache-2.0
"""What the control API does: forward events to every engine, and put their answers together.

Runs in the API server, on its event loop. Knows neither HTTP nor vLLM: engines are reached through an
`EnginePort`.

Each engine answers the utility call `lifetime_call(method, payload)` with a dictionary, which is
`{"error": message}` when the call failed:

| method | payload | answer |
|---|---|---|
| `boundaries` | `{"events": [Boundary, ...]}` | `{"outcomes": [Outcome, ...]}`, in the same order |
| `tiers` | `{}` | `{"tiers": {name: {counter: number, ...}}}` |
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from vllm_lifetime.boundaries import Boundary, Outcome, merge_outcomes
from vllm_lifetime.control.errors import EngineUnavailable

__all__ = ["CALL_TIMEOUT_S", "ControlService", "EnginePort"]

CALL_TIMEOUT_S = 60.0
"""Seconds to wait for the engines. An engine answers between two of its steps."""

_OUTCOMES = TypeAdapter(list[Outcome])


class EnginePort(Protocol):
    """The way to the engines of this server."""

    async def call(self, method: str, *args: Any) -> list[Any]:
        """Call the EngineCore utility `method` on every engine; return one result per engine.

        Raises any exception when one of the engines is dead or fails.
        """
        ...


class ControlService:
    """Operations of the control API."""

    def __init__(self, engine: EnginePort, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Reach the engines through `engine`, and give up on them after `timeout_s` seconds."""
        self._engine = engine
        self._timeout_s = timeout_s

    async def apply_boundaries(self, events: list[Boundary]) -> list[Outcome]:
        """Send the events to every engine; return the merged outcome of each, in the same order.

        Raises `EngineUnavailable`. Engines that are well may have carried the events out by then;
        sending them again is safe, since each counts once by its `message_id`.
        """
        payload = {"events": [event.model_dump(mode="json", exclude_none=True) for event in events]}
        answers = await self._call("boundaries", payload)
        by_engine = [self._read_outcomes(answer, len(events)) for answer in answers]
        return [merge_outcomes(list(outcomes)) for outcomes in zip(*by_engine, strict=True)]

    async def read_tiers(self) -> dict[str, Any]:
        """Return the state of the tiers: `{"tiers": merged, "engines": [state of each engine]}`.

        Every integer of a tier is a count, and counts add up; what is no integer stands in the state
        of its engine only. Raises `EngineUnavailable`.
        """
        answers = await self._call("tiers", {})
        return {"tiers": _add_up_tiers(answers), "engines": answers}

    async def _call(self, method: str, payload: dict[str, Any]) -> list[dict[str, Any]]:
        """Call `method` on every engine; raise `EngineUnavailable` unless all answer well."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await self._engine.call("lifetime_call", method, payload)
        except TimeoutError:
            raise EngineUnavailable(f"An engine did not answer within {self._timeout_s:g} seconds.") from None
        except Exception as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(f"An engine is not available: {reason}") from error
        if not answers:
            raise EngineUnavailable("This server has no engine.")
        for answer in answers:
            if not isinstance(answer, dict):
                raise EngineUnavailable(f"An engine gave no valid answer to {method}.")
            if "error" in answer:
                raise EngineUnavailable(f"An engine could not do {method}: {answer['error']}")
        return answers

    @staticmethod
    def _read_outcomes(answer: dict[str, Any], expected: int) -> list[Outcome]:
        """Return an engine's outcomes; raise `EngineUnavailable` unless there are `expected`."""
        try:
            outcomes = _OUTCOMES.validate_python(answer.get("outcomes"))
        except ValidationError as error:
            raise EngineUnavailable("An engine gave no valid answer to boundaries.") from error
        if len(outcomes) != expected:
            raise EngineUnavailable(f"An engine answered {len(outcomes)} of {expected} boundaries.")
        return outcomes


def _add_up_tiers(answers: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the sum of every integer counter, by tier, over the engines."""
    totals: dict[str, dict[str, int]] = {}
    for answer in answers:
        for tier, state in answer.get("tiers", {}).items():
            total = totals.setdefault(tier, {})
            for counter, value in state.items():
                if isinstance(value, int) and not isinstance(value, bool):
                    total[counter] = total.get(counter, 0) + value
    return totals
