# SPDX-License-Identifier: Apache-2.0
"""Tells a lifetime server about boundaries without ever getting into the agent's way.

`boundary()` puts an event into a bounded queue and returns; a daemon thread (`LifetimeClient`) or an asyncio task
(`AsyncLifetimeClient`) sends what is queued in batches. Events wait while the server is away, up to the queue's
bound, and are sent again until it takes them: each has a `message_id`, and counts once however often it arrives.

What goes wrong is counted in `stats` and logged once to the logger `vllm_lifetime.harness`; nothing is raised.
"""

from __future__ import annotations

import asyncio
import contextvars
import encodings.idna  # noqa: F401  looking up a host needs it: not to be imported while the process forks
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from functools import lru_cache
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Self

import httpx

from vllm_lifetime.boundaries import METADATA_KEY, BoundaryKind, SegmentClass, Spawn, parse_request_metadata
from vllm_lifetime.harness.outbox import ClientStats, Outbox, encode

__all__ = [
    "DEFAULT_URL",
    "TOKEN_VARIABLE",
    "URL_VARIABLE",
    "AsyncLifetimeClient",
    "LifetimeClient",
    "read_server_url",
    "request_fields",
]

logger = logging.getLogger("vllm_lifetime.harness")

URL_VARIABLE = "VLLM_LIFETIME_URL"
TOKEN_VARIABLE = "VLLM_LIFETIME_TOKEN"
DEFAULT_URL = "http://localhost:8000"

BOUNDARIES_PATH = "/lifetime/v1/boundaries"

EXIT_TIMEOUT_S = 2.0
"""Longest time that sending what is left may hold up the interpreter's exit, in seconds."""

CLOSING_ATTEMPTS = 2
"""Attempts at a batch once the client is being closed: the second is for a connection that had gone stale."""

_clients: weakref.WeakSet[_Client] = weakref.WeakSet()

_no_fork = threading.Lock()
"""Held while an HTTP client is made, some 30 ms: that imports modules and takes locks of OpenSSL, which nobody would ever
release in a child that was forked meanwhile."""


class _Client:
    """What both clients are: an outbox, and where and how it is sent."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        token: str | None = None,
        queue_size: int = 1024,
        timeout_s: float = 2.0,
        batch_size: int = 100,
    ) -> None:
        """Send to the server at `base_url`, its root (a trailing `/v1` is left out).

        `base_url` is by default the environment's VLLM_LIFETIME_URL or http://localhost:8000, `token` its
        VLLM_LIFETIME_TOKEN or none. `timeout_s` is the longest wait for each step of a request: connecting,
        sending, the answer. Nothing is started or sent before the first event. Raises `ValueError` for a URL that
        is not http or https, for a token that no header can hold, and for sizes that are not positive.
        """
        url = read_server_url(base_url or os.environ.get(URL_VARIABLE) or DEFAULT_URL)
        token = (token or os.environ.get(TOKEN_VARIABLE) or "").strip()
        if not (token.isascii() and token.isprintable()):
            raise ValueError(f"the token, of token=... or {TOKEN_VARIABLE}, has characters that a header cannot hold")
        self._url = f"{url}{BOUNDARIES_PATH}"
        # Nobody here looks at outcomes. A server that does not know the preference answers when the engines have acted.
        self._headers = {"content-type": "application/json", "prefer": "respond-async"}
        if token:
            self._headers["authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._outbox = Outbox(f"{url.scheme}://{url.netloc.decode()}{url.path.rstrip('/')}", queue_size, batch_size)
        self._closing = False
        self._hurry = False
        self._exit: Finalize | None = None
        _clients.add(self)

    @property
    def stats(self) -> ClientStats:
        """Return how many events are queued, sent, dropped, failed and refused, at this moment."""
        return self._outbox.stats

    def boundary(
        self,
        kind: BoundaryKind | str,
        *,
        session_id: str | None = None,
        workflow_id: str | None = None,
        agent: str | None = None,
        agent_id: str | None = None,
        parent_agent_id: str | None = None,
        spawn: Spawn | Mapping[str, Any] | None = None,
        expected_return_s: float | None = None,
        turn: int | None = None,
        message_id: str | None = None,
    ) -> None:
        """Report an event; the fields are those of `boundaries.Boundary`. Returns at once and raises nothing.

        An event that is not valid is counted as refused, one that finds the queue full as dropped, each with a line
        in the log. `message_id` is made up unless given. May be called from any thread.
        """
        queued = self._outbox.put(
            {
                "message_id": uuid.uuid4().hex if message_id is None else message_id,
                "kind": kind,
                "session_id": session_id,
                "workflow_id": workflow_id,
                "agent": agent,
                "agent_id": agent_id,
                "parent_agent_id": parent_agent_id,
                "spawn": spawn,
                "expected_return_s": expected_return_s,
                "turn": turn,
                "sent_at_s": time.time(),
            }
        )
        if queued:
            try:
                if self._exit is None:
                    # Rather than atexit, which forked children of multiprocessing do not run.
                    self._exit = Finalize(None, self._at_exit, exitpriority=10)
                self._start()
            except Exception as error:  # such as no more threads; the next event tries again, and so does close()
                logger.warning("lifetime: boundaries wait: nothing could be started to send them: %s", error)

    def _start(self) -> None:
        """See to it that somebody sends what is queued."""
        raise NotImplementedError

    def _at_exit(self) -> None:
        """Send what is left when the process ends."""
        raise NotImplementedError

    def _begin_closing(self) -> None:
        self._closing = True
        self._outbox.close()
        if self._exit is not None:
            self._exit.cancel()

    def _after_fork(self) -> None:
        """Forget, in a forked child, what is the parent's: its events, its locks, whoever sends them."""
        self._outbox.reset()
        if self._closing:
            self._outbox.close()
        self._hurry = False
        self._exit = None

    def _send_rest(self, timeout_s: float) -> None:
        """Send on this thread what is queued, for some `timeout_s` seconds at most."""
        deadline_s = time.monotonic() + timeout_s
        attempts = 0
        sender = _Sender(self._url, self._headers, min(self._timeout_s, timeout_s), self._outbox)
        while len(self._outbox) and attempts < CLOSING_ATTEMPTS and time.monotonic() < deadline_s:
            attempts = attempts + 1 if sender.send() else 0
        sender.close()


class _Sender:
    """Sends batches of an outbox over one HTTP client, which is made when the first is sent."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, outbox: Outbox) -> None:
        self._url = url
        self._headers = headers
        self._timeout_s = timeout_s
        self._outbox = outbox
        self._http: httpx.Client | None = None

    def send(self) -> float:
        """Send one batch; return the seconds to wait before the next, as `Outbox.settle` does."""
        batch = self._outbox.take()
        answer: httpx.Response | Exception
        try:
            if self._http is None:
                with _no_fork:
                    self._http = httpx.Client(headers=self._headers, timeout=self._timeout_s)
            answer = self._http.post(self._url, content=encode(batch))
        except Exception as error:
            answer = error
        return self._outbox.settle(batch, answer)

    def close(self) -> None:
        """Close the connections."""
        if self._http is not None:
            self._http.close()


class LifetimeClient(_Client):
    """Sends boundaries from a daemon thread. For threads and for asyncio alike; a context manager."""

    _thread: threading.Thread | None = None

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Block until the server has taken what is queued, for at most `timeout_s` seconds; return whether nothing is.

        The engines act between two of their steps, which may be a little later.
        """
        self._hurry = True
        self._outbox.notify()
        return self._outbox.wait_until_empty(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, for at most `timeout_s` seconds, and end the thread. Further events are dropped.

        Does not wait for a server that is away.
        """
        self._begin_closing()
        if self._thread is not None:
            self._thread.join(timeout_s)
        else:
            self._send_rest(timeout_s)
        self._outbox.give_up()

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the client."""
        self.close()

    def _start(self) -> None:
        with self._outbox.changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="vllm-lifetime", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        """Send what is queued until the client is closed. Runs on the client's own thread."""
        outbox = self._outbox
        sender = _Sender(self._url, self._headers, self._timeout_s, outbox)
        attempts = 0
        while attempts < CLOSING_ATTEMPTS:
            outbox.wait(lambda: len(outbox) > 0 or self._closing)
            if not len(outbox):
                break
            delay_s = sender.send()
            if self._closing:
                attempts = attempts + 1 if delay_s else 0
            elif delay_s:
                outbox.wait(lambda: self._hurry or self._closing, delay_s)
            self._hurry = False
        sender.close()

    def _at_exit(self) -> None:
        self.close(EXIT_TIMEOUT_S)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._thread = None


class AsyncLifetimeClient(_Client):
    """Sends boundaries from an asyncio task of the loop that reports the first. An async context manager.

    `boundary()` is a plain call. One that is called where no loop runs is sent with the next that is, by `flush()`,
    or at exit. For trio take `LifetimeClient`.
    """

    _task: asyncio.Task[None] | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _wake: asyncio.Event

    async def flush(self, timeout_s: float = 5.0) -> bool:
        """Wait until the server has taken what is queued, for at most `timeout_s` seconds; return whether nothing is.

        The engines act between two of their steps, which may be a little later.
        """
        deadline_s = time.monotonic() + timeout_s
        self._hurry = True
        self._start()
        while len(self._outbox) and (left_s := deadline_s - time.monotonic()) > 0:
            await asyncio.sleep(min(0.01, left_s))
        return not len(self._outbox)

    async def aclose(self, timeout_s: float = 5.0) -> None:
        """Send what is queued, for at most `timeout_s` seconds, and end the task. Further events are dropped.

        Does not wait for a server that is away.
        """
        self._begin_closing()
        self._start()
        try:
            if self._task is not None and self._loop is asyncio.get_running_loop():
                await asyncio.wait({self._task}, timeout=timeout_s)
                self._task.cancel()
        finally:
            self._outbox.give_up()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the client."""
        await self.aclose()

    def _start(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        with self._outbox.changed:
            if self._loop is not None and self._task is not None and not self._loop.is_closed() and not self._task.done():
                if self._loop is running:
                    self._wake.set()
                else:
                    self._loop.call_soon_threadsafe(self._wake.set)
            elif running is not None and len(self._outbox):
                self._loop = running
                self._wake = asyncio.Event()
                # In a context of its own: what traces HTTP must not take this for the caller's work.
                self._task = running.create_task(self._run(), name="vllm-lifetime", context=contextvars.Context())

    async def _run(self) -> None:
        """Send what is queued until the client is closed."""
        outbox, wake = self._outbox, self._wake
        http: httpx.AsyncClient | None = None
        attempts = 0
        try:
            while attempts < CLOSING_ATTEMPTS:
                wake.clear()
                if not len(outbox):
                    if self._closing:
                        break
                    await wake.wait()
                    continue
                batch = outbox.take()
                try:
                    if http is None:  # on a thread, since it reads the certificates
                        http = await asyncio.to_thread(self._make_http)
                    delay_s = outbox.settle(batch, await http.post(self._url, content=encode(batch)))
                except Exception as error:
                    delay_s = outbox.settle(batch, error)
                if self._closing:
                    attempts = attempts + 1 if delay_s else 0
                elif delay_s:
                    await self._back_off(delay_s)
                self._hurry = False
        finally:
            if http is not None:
                await http.aclose()

    def _make_http(self) -> httpx.AsyncClient:
        with _no_fork:
            return httpx.AsyncClient(headers=self._headers, timeout=self._timeout_s)

    async def _back_off(self, delay_s: float) -> None:
        """Wait `delay_s` seconds, or until the client is being flushed or closed."""
        deadline_s = time.monotonic() + delay_s
        while not (self._hurry or self._closing) and (left_s := deadline_s - time.monotonic()) > 0:
            self._wake.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _after_fork(self) -> None:
        super()._after_fork()
        self._task = self._loop = None

    def _at_exit(self) -> None:
        self._begin_closing()
        self._send_rest(EXIT_TIMEOUT_S)
        self._outbox.give_up()


def request_fields(
    *,
    session_id: str | None = None,
    workflow_id: str | None = None,
    agent: str | None = None,
    agent_id: str | None = None,
    parent_agent_id: str | None = None,
    segment_class: SegmentClass | str | None = None,
    turn: int | None = None,
    retain_s: float | None = None,
) -> dict[str, Any]:
    """Return what names a request, as arguments of an OpenAI client's `create`: `extra_headers` and `extra_body`.

    `retain_s` is a soft wish to keep what this request reads, for so many seconds after it. Raises nothing: a value
    that the server would not take is left out with a line in the log.
    """
    values = {
        "workflow_id": workflow_id,
        "agent": agent,
        "agent_id": agent_id,
        "parent_agent_id": parent_agent_id,
        "segment_class": str(segment_class) if segment_class is not None else None,
        "turn": turn,
        "retain_s": retain_s,
    }
    metadata = {key: value for key, value in values.items() if value is not None}
    _, reason = parse_request_metadata({METADATA_KEY: metadata})
    if reason is not None:
        _warn_once(f"a request goes without its name: {reason}")
        metadata = {}
    headers: dict[str, str] = {}
    body: dict[str, Any] = {"kv_transfer_params": {METADATA_KEY: metadata}} if metadata else {}
    if not isinstance(session_id, str | None):
        _warn_once(f"a request goes without its session: the id is a {type(session_id).__name__}, not a string")
    elif session_id:
        if session_id.isascii() and session_id.isprintable() and session_id == session_id.strip():
            headers["X-Session-ID"] = session_id
        else:  # a header cannot say it
            body["session_id"] = session_id
    return {"extra_headers": headers, "extra_body": body}


@lru_cache(maxsize=100)
def _warn_once(text: str) -> None:
    logger.warning("lifetime: %s", text)


def read_server_url(text: str) -> httpx.URL:
    """Return the server's root from what a user may call its URL. Raises `ValueError` unless it is http or https."""
    trimmed = text.strip().rstrip("/").removesuffix("/lifetime/v1").removesuffix("/v1").rstrip("/")
    try:
        url = httpx.URL(trimmed)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"not a URL of a server: {text!r}: {error}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"not a URL of a server: {text!r}; it looks like {DEFAULT_URL}")
    return url


def _after_fork_in_child() -> None:
    _no_fork.release()
    for client in list(_clients):
        client._after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_no_fork.acquire, after_in_parent=_no_fork.release, after_in_child=_after_fork_in_child)
