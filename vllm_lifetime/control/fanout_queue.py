# SPDX-License-Identifier: Apache-2.0
"""What still has to reach one remote server: a bounded queue in the order of arrival. Pure; no IO, no clock.

A **delivery** is one event (or one envelope of hints, or one release of a session) for one server; a **ticket** is what the
caller that brought it waits for. Every delivery ends in exactly one way: answered by the server, or refused with a reason (by the
server, because it was too old, because the queue was full, because we are shutting down).

When the queue is full the oldest deliveries go first. An old end is about blocks that have aged towards eviction by themselves;
the newest one is about the blocks that recency would keep longest, so it is the one worth delivering.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Delivery", "DeliveryQueue", "Refused", "Ticket"]


@dataclass(frozen=True, slots=True)
class Refused:
    """A delivery that will never be answered, and why, in one line."""

    reason: str


class Ticket:
    """The results of the deliveries that one caller brought for one server."""

    __slots__ = ("_missing", "done", "results")

    def __init__(self, count: int) -> None:
        """`count` results are to come. Needs a running event loop."""
        self.results: list[Any | Refused | None] = [None] * count
        """Per delivery: the server's answer, why there is none, or None while it waits."""

        self._missing = count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when there is nothing (more) to wait for: all results are in, or the server is known not to take them now."""

    def put(self, index: int, result: Any | Refused) -> None:
        """Take the result of one delivery."""
        self.results[index] = result
        self._missing -= 1
        if self._missing == 0:
            self.let_go()

    def let_go(self) -> None:
        """Do not make the caller wait any longer."""
        if not self.done.done():
            self.done.set_result(None)


@dataclass(slots=True, eq=False)
class Delivery:
    """One thing to tell a server."""

    method: str
    """HTTP method."""

    path: str
    body: bytes
    queued_at_s: float
    """By the clock that the queue is asked with."""

    ticket: Ticket
    index: int
    """Which result of the ticket is this one's."""

    can_share: bool = False
    """Whether it may go out in one request with its like: the server takes a list of such bodies."""

    def finish(self, result: Any | Refused) -> None:
        """Hand in the result."""
        self.ticket.put(self.index, result)


@dataclass(slots=True)
class DeliveryQueue:
    """Deliveries that wait, oldest first, and the group that is on its way.

    The bounds are on what waits; a group on its way (`take`) is bounded by its own arguments and never dropped, since it may have
    arrived already.
    """

    max_items: int
    max_bytes: int
    max_age_s: float
    waiting_bytes: int = 0
    _waiting: deque[Delivery] = field(default_factory=deque)
    _on_its_way: list[Delivery] = field(default_factory=list)

    def __len__(self) -> int:
        """Deliveries that have no result yet."""
        return len(self._waiting) + len(self._on_its_way)

    def oldest_age_s(self, now_s: float) -> float:
        """Seconds that the oldest delivery has been waiting; 0 if there is none."""
        oldest = self._on_its_way[0] if self._on_its_way else self._waiting[0] if self._waiting else None
        return 0.0 if oldest is None else now_s - oldest.queued_at_s

    def put(self, delivery: Delivery) -> list[Delivery]:
        """Let `delivery` wait. Returns those that had to go for it (possibly itself), oldest first."""
        self._waiting.append(delivery)
        self.waiting_bytes += len(delivery.body)
        return self._drop_over_bounds()

    def take(self, max_items: int, max_bytes: int) -> list[Delivery]:
        """Return the next group to send: deliveries of one request, oldest first; empty if none waits.

        It is on its way until `finish_group` or `put_back`. Raises `RuntimeError` if another one is.
        """
        if self._on_its_way:
            raise RuntimeError("a group is on its way already")
        size = 2  # brackets
        while self._waiting and len(self._on_its_way) < max_items:
            delivery = self._waiting[0]
            first = self._on_its_way[0] if self._on_its_way else None
            size += len(delivery.body) + 1
            if first is not None and (size > max_bytes or not (first.can_share and delivery.can_share)):
                break
            self._waiting.popleft()
            self.waiting_bytes -= len(delivery.body)
            self._on_its_way.append(delivery)
        return list(self._on_its_way)

    def finish_group(self) -> None:
        """All of the group that is on its way have their results."""
        self._on_its_way = []

    def put_back(self, unfinished: list[Delivery]) -> list[Delivery]:
        """The group could not be sent: those without a result wait again, in front. Returns those dropped for it."""
        self._on_its_way = []
        self._waiting.extendleft(reversed(unfinished))
        self.waiting_bytes += sum(len(delivery.body) for delivery in unfinished)
        return self._drop_over_bounds()

    def pop_expired(self, now_s: float) -> list[Delivery]:
        """Take out what has waited longer than the maximum age, oldest first."""
        expired = []
        while self._waiting and now_s - self._waiting[0].queued_at_s > self.max_age_s:
            expired.append(self._pop_oldest())
        return expired

    def clear(self) -> list[Delivery]:
        """Take out everything that has no result, oldest first."""
        rest = [*self._on_its_way, *self._waiting]
        self._on_its_way = []
        self._waiting.clear()
        self.waiting_bytes = 0
        return rest

    def let_callers_go(self) -> None:
        """Let nobody wait for what waits here."""
        for delivery in self._waiting:
            delivery.ticket.let_go()

    def _pop_oldest(self) -> Delivery:
        delivery = self._waiting.popleft()
        self.waiting_bytes -= len(delivery.body)
        return delivery

    def _drop_over_bounds(self) -> list[Delivery]:
        dropped = []
        while len(self._waiting) > self.max_items or self.waiting_bytes > self.max_bytes:
            dropped.append(self._pop_oldest())
        return dropped
