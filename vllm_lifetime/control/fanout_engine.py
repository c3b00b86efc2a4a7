# SPDX-License-Identifier: Apache-2.0
"""One remote server of the fan-out: its HTTP client, its queue, its sender and its counters.

Everything that changes something goes through the queue, and one sender task per server sends it, one request at a time: so the
order is kept. Events that have gathered meanwhile share a request. A server that does not take them now (no connection, no answer
in time, 408, 425, 429 or 5xx) is tried again with exponential backoff and jitter; any other answer is final. Retries are safe
since the server counts each `message_id` once.

Runs in the process of `vllm-lifetime control`, on its event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from vllm_lifetime.boundaries import MAX_BATCH
from vllm_lifetime.control.fanout_queue import Delivery, DeliveryQueue, Refused, Ticket

__all__ = ["EngineUrlError", "FanoutOptions", "RemoteEngine", "RemoteError", "normalize_engine_url"]

logger = logging.getLogger("vllm_lifetime.control")

MAX_GROUP_BYTES = 1 << 20
"""Longest body sent, in bytes: what a server reads."""

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 10.0
"""Pause after the first failure in a row, doubled after each further one, up to the longest: so late is a server found again."""

KEEP_ALIVE_S = 2.0
"""Idle connections are closed by us before a server does (vLLM: after 5 seconds), lest an event meets a closing one."""

CONNECT_TIMEOUT_S = 5.0
MAX_REASON_LENGTH = 300
_TRY_AGAIN = frozenset({408, 425, 429})
_ONE_MAY_SPOIL_ALL = frozenset({400, 413, 422})
"""Statuses that a single event of a group can be the cause of."""


class EngineUrlError(ValueError):
    """The URL of an engine cannot be used; the message says why."""


class RemoteError(Exception):
    """A server did not answer, or not well. The message names the server and says why."""

    def __init__(self, reason: str, *, is_late: bool = False, pause_s: float = 0.0) -> None:
        """`is_late`: it did not answer in time. `pause_s`: how long it asks to be left alone, in seconds."""
        super().__init__(reason)
        self.is_late = is_late
        self.pause_s = pause_s


@dataclass(frozen=True, kw_only=True)
class FanoutOptions:
    """How patient the fan-out is."""

    answer_timeout_s: float = 1.0
    """Longest that an answer of ours waits for a server, in seconds."""

    request_timeout_s: float = 30.0
    """Longest that the sender waits for a server's answer before it sends the same again, in seconds."""

    queue_size: int = 10_000
    """Most events that wait for one server."""

    queue_bytes: int = 64 << 20
    """Most bytes that wait for one server."""

    max_age_s: float = 300.0
    """Events that have waited longer are dropped, in seconds."""


@dataclass
class Counters:
    """What became of the events for one server since the start."""

    delivered: int = 0
    rejected: int = 0
    """Refused by the server for good."""

    dropped: int = 0
    """Thrown away because the queue was full."""

    expired: int = 0
    """Thrown away because they had waited too long."""

    retries: int = 0
    """Requests that were not taken and sent again."""


@dataclass
class RemoteEngine:
    """One vLLM server with the lifetime connector, as the fan-out sees it. See the module."""

    url: str
    """The server's root, from `normalize_engine_url`."""

    token: str | None
    options: FanoutOptions
    counters: Counters = field(default_factory=Counters)
    last_error: str | None = None
    """Why the latest request was not taken, or an event was refused; kept after the server has come back."""

    def __post_init__(self) -> None:
        """Make the client; `start` makes the sender."""
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        limits = httpx.Limits(max_connections=16, keepalive_expiry=KEEP_ALIVE_S)
        # With a transport of its own the client asks no proxy of the environment: engines are reached directly.
        timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
        transport = httpx.AsyncHTTPTransport(limits=limits)
        self._client = httpx.AsyncClient(base_url=self.url, headers=headers, transport=transport, timeout=timeout)
        self._queue = DeliveryQueue(self.options.queue_size, self.options.queue_bytes, self.options.max_age_s)
        self._num_failures = 0
        self._slow_until_s = 0.0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closing = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ events

    def start(self) -> None:
        """Start to send. Needs a running event loop."""
        self._sender = asyncio.create_task(self._send_forever(), name=f"fan-out to {self.url}")

    def submit(self, path: str, bodies: list[bytes], *, method: str = "POST", can_share: bool = False) -> Ticket:
        """Queue a request per body, and return where their results arrive; never waits.

        `can_share`: the server takes a list of such bodies, too, and answers `{"outcomes": [one per body]}`.
        """
        ticket = Ticket(len(bodies))
        now_s = time.monotonic()
        if self._is_behind(now_s):
            ticket.let_go()
        for index, body in enumerate(bodies):
            delivery = Delivery(method, path, body, now_s, ticket, index, can_share)
            self._note_dropped(self._queue.put(delivery))
        self._idle.clear()
        self._wake.set()
        return ticket

    def _is_behind(self, now_s: float) -> bool:
        """Tell whether it is no use to wait for the server: it fails, was slow just now, or older events wait too long."""
        is_late = self._queue.oldest_age_s(now_s) > self.options.answer_timeout_s
        return self._num_failures > 0 or is_late or now_s < self._slow_until_s

    async def _send_forever(self) -> None:
        while True:
            self._note_expired(self._queue.pop_expired(time.monotonic()))
            group = self._queue.take(MAX_BATCH, MAX_GROUP_BYTES)
            if not group:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            try:
                await self._send(group)
            except Exception as error:
                unfinished = [delivery for delivery in group if delivery.ticket.results[delivery.index] is None]
                self._note_dropped(self._queue.put_back(unfinished))
                self._note_failure(error)
                await self._pause(error.pause_s if isinstance(error, RemoteError) else 0.0)
            else:
                self._queue.finish_group()
                if self._num_failures:
                    logger.warning("%s takes events again; %d wait for it", self.url, len(self._queue))
                self._num_failures = 0

    async def _send(self, group: list[Delivery]) -> None:
        """Send one group and hand in the results. Raises when it should be sent again."""
        first = group[0]
        body = first.body if len(group) == 1 else b"[" + b",".join(delivery.body for delivery in group) + b"]"
        began_s = time.monotonic()
        status, answer, pause_s = await self._request(first.method, first.path, body, self.options.request_timeout_s)
        if time.monotonic() - began_s > self.options.answer_timeout_s:
            self._slow_until_s = time.monotonic() + LONGEST_DELAY_S
        if 200 <= status < 300:
            results = self._read_results(first, answer, len(group))
            for delivery, result in zip(group, results, strict=True):
                delivery.finish(result)
            self._count_results(results)
            return
        reason = f"{self.url} answered {status}: {_describe(answer)}"
        if status in _TRY_AGAIN or status >= 500:
            raise RemoteError(reason, pause_s=pause_s)
        if status in _ONE_MAY_SPOIL_ALL and len(group) > 1:
            # The server has done nothing of the group: find the culprits.
            middle = len(group) // 2
            await self._send(group[:middle])
            await self._send(group[middle:])
            return
        results = [Refused(reason)] * len(group)
        for delivery in group:
            delivery.finish(Refused(reason))
        self._count_results(results)

    def _read_results(self, first: Delivery, answer: Any, count: int) -> list[Any | Refused]:
        if not first.can_share:
            if isinstance(answer, dict):
                return [answer]
        elif isinstance(answer, dict) and isinstance(answer.get("outcomes"), list) and len(answer["outcomes"]) == count:
            return list(answer["outcomes"])
        # It answered well, so it would answer the same again.
        return [Refused(f"{self.url} gave no valid answer to {first.path}: {_describe(answer)}")] * count

    async def _request(self, method: str, path: str, body: bytes | None, timeout_s: float, **more: Any) -> tuple[int, Any, float]:
        """Return status, JSON (or text) and the seconds of `Retry-After`. Raises `RemoteError` without an answer."""
        headers = {} if body is None else {"content-type": "application/json"}
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, content=body, headers=headers, **more)
        except TimeoutError:
            raise RemoteError(f"{self.url} did not answer within {timeout_s:g} s", is_late=True) from None
        except httpx.HTTPError as error:
            raise RemoteError(f"{self.url} cannot be reached: {str(error) or type(error).__name__}") from error
        try:
            answer = response.json()
        except ValueError:
            answer = response.text
        return response.status_code, answer, _retry_after_s(response.headers)

    async def _pause(self, at_least_s: float) -> None:
        """Wait before the next try; when we are closing, only briefly."""
        if self._closing.is_set():
            await asyncio.sleep(FIRST_DELAY_S)
            return
        delay_s = max(min(at_least_s, LONGEST_DELAY_S), retry_delay_s(self._num_failures))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._closing.wait()

    # ------------------------------------------------------------------ what became of them

    def _count_results(self, results: list[Any | Refused]) -> None:
        refused = [result for result in results if isinstance(result, Refused)]
        self.counters.delivered += len(results) - len(refused)
        if refused:
            if not self.counters.rejected:
                logger.warning("an event was refused; more of it is counted in /health: %s", refused[0].reason)
            self.counters.rejected += len(refused)
            self.last_error = refused[0].reason

    def _note_failure(self, error: Exception) -> None:
        self.last_error = str(error)
        self.counters.retries += 1
        self._num_failures += 1
        self._queue.let_callers_go()
        if not isinstance(error, RemoteError):
            logger.error("sending to %s failed", self.url, exc_info=error)
        elif self._num_failures == 1:
            logger.warning("%s; its events wait", error)

    def _note_dropped(self, dropped: list[Delivery]) -> None:
        if dropped and not self.counters.dropped:
            logger.warning("the queue for %s is full: the oldest events are dropped", self.url)
        self.counters.dropped += len(dropped)
        for delivery in dropped:
            delivery.finish(Refused(f"dropped: the queue for {self.url} is full"))

    def _note_expired(self, expired: list[Delivery]) -> None:
        if expired and not self.counters.expired:
            logger.warning("events for %s have waited longer than %g s and are dropped", self.url, self.options.max_age_s)
        self.counters.expired += len(expired)
        for delivery in expired:
            delivery.finish(Refused(f"dropped: it waited longer than {self.options.max_age_s:g} s for {self.url}"))

    def state(self) -> dict[str, Any]:
        """Return queue and counters, for `/health`."""
        now_s = time.monotonic()
        self._note_expired(self._queue.pop_expired(now_s))
        return {
            "queued": len(self._queue),
            "queued_bytes": self._queue.waiting_bytes,
            "oldest_queued_s": round(self._queue.oldest_age_s(now_s), 3),
            "delivered": self.counters.delivered,
            "rejected": self.counters.rejected,
            "dropped": self.counters.dropped,
            "expired": self.counters.expired,
            "retries": self.counters.retries,
            "last_error": self.last_error,
        }

    # ------------------------------------------------------------------ reads

    async def read(self, path: str, params: Mapping[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """GET `path` beside the queue; return status and JSON of whatever the server answers.

        Raises `RemoteError` when it does not answer within `answer_timeout_s`, or not with an object.
        """
        status, answer, _ = await self._request("GET", path, None, self.options.answer_timeout_s, params=params)
        if not isinstance(answer, dict):
            raise RemoteError(f"{self.url} answered {status}: {_describe(answer)}")
        return status, answer

    # ------------------------------------------------------------------ end

    async def aclose(self, drain_s: float) -> int:
        """Deliver what waits, for at most `drain_s` seconds, then give up; return how many deliveries are lost."""
        self._closing.set()
        if self._sender is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
            self._sender.cancel()
            await asyncio.wait([self._sender])
        # What is on its way counts as lost, though it may arrive.
        lost = [delivery for delivery in self._queue.clear() if delivery.ticket.results[delivery.index] is None]
        for delivery in lost:
            delivery.finish(Refused(f"lost: shut down before {self.url} took it"))
        await self._client.aclose()
        return len(lost)


def retry_delay_s(num_failures: int) -> float:
    """Return the seconds to wait after so many failures in a row: doubled each time, bounded, between half of it and all."""
    longest = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 30))
    return random.uniform(longest / 2, longest)


def normalize_engine_url(url: str) -> str:
    """Return the root of a vLLM server from what the user gave; a trailing `/` or `/v1` is taken off.

    Raises `EngineUrlError`.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise EngineUrlError(f"{url!r} is no URL: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise EngineUrlError(f"{url!r} is no http:// or https:// URL of a server, such as http://localhost:8000")
    if parsed.userinfo:
        raise EngineUrlError("an engine's URL must not hold a password: it is shown in logs; use --engine-token")
    if parsed.query or parsed.fragment:
        raise EngineUrlError(f"{url!r} has a query or a fragment: give the server's root, such as http://localhost:8000")
    return str(parsed).rstrip("/").removesuffix("/v1").rstrip("/")


def _describe(answer: Any) -> str:
    """Return what an answer says went wrong, in one line of bounded length."""
    if isinstance(answer, dict):
        error = answer.get("detail", answer.get("error", answer))
        if isinstance(error, dict):
            error = error.get("message", error)
        if isinstance(error, list) and error and isinstance(error[0], dict):
            error = f"{'.'.join(str(part) for part in error[0].get('loc', []))}: {error[0].get('msg')}"
        answer = error
    text = " ".join(str(answer).split()) or "an empty body"
    return text if len(text) <= MAX_REASON_LENGTH else text[: MAX_REASON_LENGTH - 3] + "..."


def _retry_after_s(headers: httpx.Headers) -> float:
    """Return the seconds that `Retry-After` asks for; 0 if it names none (or a date)."""
    value = headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0
