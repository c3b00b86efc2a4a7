# SPDX-License-Identifier: Apache-2.0
"""The latest events of this API server, for people who look. Runs in the API server, on its event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from vllm_lifetime.boundaries import Boundary, Outcome
from vllm_lifetime.control.views import EventRecord, EventsPage

__all__ = ["MAX_EVENTS", "EventLog"]

MAX_EVENTS = 1000
"""Events kept."""

MAX_TEXT_LENGTH = 200
"""Characters kept of a spawn record's texts, which may be long."""

MAX_TOOLS = 16
"""Tools kept of a spawn record."""


class EventLog:
    """A ring of the latest events and their outcomes."""

    def __init__(self, size: int = MAX_EVENTS) -> None:
        """Keep `size` events."""
        self._records: deque[tuple[float, Boundary, Outcome]] = deque(maxlen=size)
        self._latest = 0

    def add(self, events: Iterable[tuple[float, Boundary]], outcomes: Iterable[Outcome]) -> None:
        """Add events, each with the Unix seconds at which it came, and their outcomes. O(events)."""
        for (received_at_s, event), outcome in zip(events, outcomes, strict=True):
            self._records.append((received_at_s, _shorten(event), outcome))
            self._latest += 1

    def read(self, after: int | None, limit: int) -> EventsPage:
        """Return the first `limit` events after the one of that number; without a number, the latest.

        A number that was never given out is one of an earlier life of the server: the oldest events follow it.
        """
        oldest = self._latest - len(self._records) + 1
        if after is None:
            start = max(0, len(self._records) - limit)
        elif after > self._latest:
            start = 0
        else:
            start = max(0, after + 1 - oldest)
        events = [
            EventRecord(sequence=oldest + start + index, received_at_s=received_at_s, event=event, outcome=outcome)
            for index, (received_at_s, event, outcome) in enumerate(islice(self._records, start, start + limit))
        ]
        return EventsPage(events=events, next=events[-1].sequence if events else self._latest)


def _shorten(event: Boundary) -> Boundary:
    spawn = event.spawn
    if spawn is None:
        return event
    texts = (spawn.instruction or "", spawn.context or "")
    if len(spawn.tools) <= MAX_TOOLS and max(map(len, texts)) <= MAX_TEXT_LENGTH:
        return event
    shorter = {"instruction": _cut(spawn.instruction), "context": _cut(spawn.context), "tools": spawn.tools[:MAX_TOOLS]}
    return event.model_copy(update={"spawn": spawn.model_copy(update=shorter)})


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_TEXT_LENGTH else text[: MAX_TEXT_LENGTH - 1] + "…"
