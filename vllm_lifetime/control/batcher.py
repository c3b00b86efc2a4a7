# SPDX-License-Identifier: Apache-2.0
"""Makes one call of many: while a call is under way, what arrives waits and goes together in the next.

Without it, a thousand requests per second would be a thousand interruptions of the thread that schedules. Order is kept: the
items of a request stay together, and those of a later request come after them, whether or not anybody waits for results. What
nobody waits for is sent in calls that begin a while apart: a call costs the thread that schedules as much as several events do.

Runs in the API server, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Generic, NamedTuple, TypeVar

from vllm_lifetime.control.errors import ControlError, EngineUnavailable

__all__ = ["Batcher"]

logger = logging.getLogger("vllm_lifetime.control")

Item = TypeVar("Item")
Result = TypeVar("Result")


class _Waiting(NamedTuple, Generic[Item, Result]):
    """Some items of one request, and where their results go."""

    items: list[Item]
    results: asyncio.Future[list[Result]] | None
    """None if nobody waits for them."""

    deadline_s: float
    """On the event loop's clock; of no meaning if nobody waits."""


class Batcher(Generic[Item, Result]):
    """Sends items by `send`, which returns a result per item, with at most one call of it under way.

    A request that is given up on changes nothing for others; its items are sent all the same.
    """

    def __init__(
        self,
        send: Callable[[list[Item]], Awaitable[list[Result]]],
        *,
        max_batch: int,
        max_waiting: int,
        timeout_s: float,
        spacing_s: float = 0.0,
        on_lost: Callable[[list[Item], ControlError], None] | None = None,
    ) -> None:
        """At most `max_batch` items go in one call; at most `max_waiting` wait for theirs.

        Nobody waits for results longer than `timeout_s`. While nobody waits for any, and no call is full, a call begins
        `spacing_s` after the last one or later. `on_lost` is told of items that were `put` and could not be sent.
        """
        self._send = send
        self._on_lost = on_lost
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._spacing_s = spacing_s
        self._began_s = float("-inf")
        self._is_urgent = asyncio.Event()
        self._waiting: deque[_Waiting[Item, Result]] = deque()
        self._sent: list[_Waiting[Item, Result]] = []
        self._num_waiting = 0
        self._sender: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def submit(self, items: list[Item]) -> list[Result]:
        """Return the result of each item, in order.

        Raises `EngineUnavailable` when too many items wait already, `TimeoutError`, and what `send` raises.
        """
        self._check_room(len(items))
        if len(items) <= self._max_batch:
            return await self._enqueue_with_results(items)
        parts = await asyncio.gather(*[self._enqueue_with_results(part) for part in self._split(items)])
        return [result for part in parts for result in part]

    def put(self, items: list[Item]) -> None:
        """Have the items sent in their turn, while nobody waits for the results. Raises `EngineUnavailable` as `submit` does."""
        self._check_room(len(items))
        for part in self._split(items):
            self._enqueue(_Waiting(part, None, 0.0))

    async def settle(self) -> None:
        """Return when what was given before this call has been sent, or could not be. Raises `TimeoutError`."""
        if self._waiting or self._sent:
            with contextlib.suppress(ControlError):
                await self._enqueue_with_results([])

    def hurry(self) -> None:
        """Do not keep back what was given before this call: somebody comes who may have to find it done."""
        if self._waiting:
            self._is_urgent.set()

    async def drain(self) -> None:
        """Return when nothing waits or is on its way."""
        self._is_urgent.set()
        while self._sender is not None and not self._sender.done():
            await asyncio.wait([self._sender])

    def _check_room(self, count: int) -> None:
        if self._num_waiting and self._num_waiting + count > self._max_waiting:
            raise EngineUnavailable(f"The engines do not keep up: {self._num_waiting} events wait for them already.")

    def _split(self, items: list[Item]) -> list[list[Item]]:
        if len(items) <= self._max_batch:
            return [items]
        return [items[start : start + self._max_batch] for start in range(0, len(items), self._max_batch)]

    def _enqueue_with_results(self, items: list[Item]) -> asyncio.Future[list[Result]]:
        loop = asyncio.get_running_loop()
        results: asyncio.Future[list[Result]] = loop.create_future()
        deadline_s = loop.time() + self._timeout_s
        self._enqueue(_Waiting(items, results, deadline_s))
        if self._timer is None:
            self._timer = loop.call_at(deadline_s, self._expire)
        return results

    def _enqueue(self, waiting: _Waiting[Item, Result]) -> None:
        self._waiting.append(waiting)
        self._num_waiting += len(waiting.items)
        if waiting.results is not None or self._num_waiting >= self._max_batch:
            self._is_urgent.set()
        if self._sender is None or self._sender.done():
            # A task of its own, so that it outlives the request that came first.
            self._sender = asyncio.create_task(self._send_waiting(), name="lifetime-boundaries")

    def _expire(self) -> None:
        """Give up on what is over its deadline, and wake up at the next. One timer for all: each costs as much as an event."""
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        self._timer = None
        for waiting in chain(self._sent, self._waiting):  # in the order of their deadlines
            if waiting.results is None or waiting.results.done():
                continue
            if waiting.deadline_s > now_s:
                self._timer = loop.call_at(waiting.deadline_s, self._expire)
                return
            waiting.results.set_exception(TimeoutError())

    def _take(self) -> list[_Waiting[Item, Result]]:
        """Take what goes in the next call off the queue."""
        batch = [self._waiting.popleft()]
        size = len(batch[0].items)
        while self._waiting and size + len(self._waiting[0].items) <= self._max_batch:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].items)
        self._num_waiting -= size
        if not self._waiting:
            self._is_urgent.clear()
        return batch

    async def _keep_apart(self) -> None:
        """Let more items come together, unless somebody waits for results or a call is full."""
        wait_s = self._began_s + self._spacing_s - asyncio.get_running_loop().time()
        if wait_s > 0 and not self._is_urgent.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_urgent.wait()

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                await self._keep_apart()
                self._began_s = asyncio.get_running_loop().time()
                self._sent = self._take()
                await self._send_batch(self._sent)
        finally:
            self._sent = []
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    async def _send_batch(self, batch: list[_Waiting[Item, Result]]) -> None:
        items = [item for waiting in batch for item in waiting.items]
        try:
            results = await self._send(items) if items else []
        except Exception as error:
            if not isinstance(error, ControlError):
                logger.exception("Sending %d requests failed", len(batch))
            lost: list[Item] = []
            for waiting in batch:
                if waiting.results is None:
                    lost += waiting.items
                elif not waiting.results.done():
                    waiting.results.set_exception(_copy(error))
            if lost and self._on_lost is not None:
                self._on_lost(lost, _copy(error))
            return
        start = 0
        for waiting in batch:
            end = start + len(waiting.items)
            if waiting.results is not None and not waiting.results.done():
                waiting.results.set_result(results[start:end])
            start = end


def _copy(error: Exception) -> ControlError:
    """Return an error that can be raised in another task: one error would collect the traces of all."""
    if isinstance(error, ControlError):
        return type(error)(error.detail)
    return EngineUnavailable(f"An engine is not available: {error or type(error).__name__}")
