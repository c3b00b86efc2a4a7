# SPDX-License-Identifier: Apache-2.0
"""The other processes of `benchmarks.boundary_load`: an open-loop generator of events, and a sink that answers them.

    python -m benchmarks.boundary_load_generator send --port 8000 --rate 1000 --seconds 60
    python -m benchmarks.boundary_load_generator sink

Both use the standard library only, and as little of it as they can: they share the cores with the server. `send` prepares every
request, connects, prints `ready`, waits for a line on its standard input, sends, and prints one line of JSON. `sink` prints its
port and answers 202 to everything until its standard input ends. Loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import sys
import time
from array import array
from collections import Counter, deque
from functools import lru_cache
from typing import Any, cast

PATH = "/lifetime/v1/boundaries"
HOST = "127.0.0.1"
MAX_EVENTS = 1_000_000
"""Most events of one run; all requests are held in memory."""

Event = dict[str, Any]

GRACE_S = 10.0
"""Seconds to wait for answers after the last event is due; what has no answer by then is counted as unanswered."""

RECONNECT_PAUSE_S = 0.05
MAX_RECONNECTS = 1000
"""Most connections opened again; after that a lost one stays lost."""

SESSION_SCRIPT: tuple[tuple[str, dict[str, Any]], ...] = (
    ("session_start", {}),
    ("turn_end", {"agent": "planner", "turn": 1}),
    ("subagent_spawn", {"agent": "worker", "agent_id": "worker-1", "parent_agent_id": "planner-1", "spawn": {"position": 0}}),
    ("turn_end", {"agent": "worker", "agent_id": "worker-1", "turn": 1}),
    ("subagent_spawn", {"agent": "reviewer", "agent_id": "reviewer-1", "parent_agent_id": "planner-1"}),
    ("subagent_return", {"agent": "worker", "agent_id": "worker-1"}),
    ("compaction", {"agent": "planner"}),
    ("subagent_return", {"agent": "reviewer", "agent_id": "reviewer-1"}),
    ("turn_end", {"agent": "planner", "turn": 2}),
    ("session_end", {}),
)
"""What each session goes through, again and again."""


def make_events(count: int, sessions: list[str], run: str, sent_at_s: float = 0.0, rate: float = 1000.0) -> list[Event]:
    """Return `count` events of mixed kinds: the sessions take turns, and start at different places of the script."""
    events = []
    for index in range(count):
        turn, number = divmod(index, len(sessions))
        kind, fields = SESSION_SCRIPT[(turn + number) % len(SESSION_SCRIPT)]
        event = {"message_id": f"{run}-{index}", "kind": kind, "session_id": sessions[number]}
        events.append(event | fields | {"sent_at_s": round(sent_at_s + index / rate, 3)})
    return events


def make_request(port: int, events: list[Event], *, respond_async: bool = True) -> bytes:
    """Return the HTTP/1.1 request that posts events over a connection that stays open; one alone is no list."""
    body = json.dumps(events[0] if len(events) == 1 else events, separators=(",", ":")).encode()
    lines = [f"POST {PATH} HTTP/1.1", f"Host: {HOST}:{port}", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    if respond_async:
        lines.append("Prefer: respond-async")
    return "\r\n".join([*lines, "", ""]).encode() + body


def split_events(events: list[Event], size: int) -> list[list[Event]]:
    """Return the events in groups of `size`, in order; the last may be smaller."""
    return [events[start : start + size] for start in range(0, len(events), size)]


def split_message(buffer: bytes) -> tuple[bytes, bytes, int] | None:
    """Return head, body and whole length of the first HTTP message with a `Content-Length`; None while it is not whole."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = buffer[:end].lower()
    _, found, rest = head.partition(b"\r\ncontent-length:")
    length = int(rest.partition(b"\r\n")[0]) if found else 0
    total = end + 4 + length
    if len(buffer) < total:
        return None
    return head, buffer[end + 4 : total], total


class Connection(asyncio.Protocol):
    """One keep-alive connection with at most one request on its way."""

    def __init__(self, generator: Generator) -> None:
        """Serve `generator` from when the connection stands."""
        self._generator = generator
        self._buffer = b""
        self._transport: asyncio.Transport | None = None
        self.index: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Be free."""
        self._transport = cast(asyncio.Transport, transport)
        self._generator.on_free(self)

    def send(self, index: int, request: bytes) -> None:
        """Send request number `index`."""
        assert self._transport is not None
        self.index = index
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Read the answer."""
        self._buffer += data
        message = split_message(self._buffer)
        if message is None:
            return
        head, body, total = message
        self._buffer = self._buffer[total:]
        index, self.index = self.index, None
        if index is not None:
            self._generator.on_answer(index, int(head[9:12]), body)
            self._generator.on_free(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Say so."""
        self._generator.on_lost(self, self.index)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    @property
    def is_open(self) -> bool:
        """Whether it can be sent on."""
        return self._transport is not None and not self._transport.is_closing()


class Generator:
    """Sends each request when the last of its events is due, whether or not earlier ones have been answered."""

    def __init__(self, port: int, requests: list[bytes], rate: float, num_events: int = 0, events_per_post: int = 1) -> None:
        """Send `requests` to `port`, `rate` events per second.

        They hold `num_events` events, `events_per_post` each but for the last; by default one each.
        """
        self._port = port
        self._requests = requests
        self._rate = rate
        self._num_events = num_events or len(requests)
        self._events_per_post = events_per_post
        self._free: deque[Connection] = deque()
        self._connections: set[Connection] = set()
        self._reconnects: set[asyncio.Task[None]] = set()
        self._next = 0
        self._began = float("inf")
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._done = self._loop.create_future()
        self.sent_s = array("d", bytes(8 * len(requests)))
        self.answered_s = array("d", bytes(8 * len(requests)))
        self.statuses: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.num_reconnects = 0

    async def connect(self, count: int) -> None:
        """Open `count` connections. Raises `OSError`."""
        for _ in range(count):
            await self._connect()

    async def _connect(self) -> None:
        _, connection = await self._loop.create_connection(lambda: Connection(self), HOST, self._port)
        self._connections.add(connection)

    async def run(self) -> None:
        """Send everything; return when all is answered, or the time is over."""
        self._began = self._loop.time()
        self._send_due()
        try:
            async with asyncio.timeout(self._num_events / self._rate + GRACE_S):
                await self._done
        except TimeoutError:
            self.statuses["unanswered"] = self._num_events - self.statuses.total()
        if self._timer is not None:
            self._timer.cancel()
        for connection in self._connections:
            connection.close()

    def _send_due(self) -> None:
        # From the timer, and whenever a connection becomes free while requests are overdue.
        now_s = self._loop.time()
        num_due = int((now_s - self._began) * self._rate) + 1
        last = len(self._requests) if num_due >= self._num_events else num_due // self._events_per_post
        while self._next < last and self._free:
            connection = self._free.popleft()
            if not connection.is_open:
                continue
            self.sent_s[self._next] = self._loop.time()
            connection.send(self._next, self._requests[self._next])
            self._next += 1
        if last <= self._next < len(self._requests):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(self._due_s(self._next), self._send_due)

    def _size(self, index: int) -> int:
        """How many events request `index` holds."""
        return min(self._events_per_post, self._num_events - index * self._events_per_post)

    def _due_s(self, index: int) -> float:
        """When the last event of request `index` is due."""
        return self._began + (index * self._events_per_post + self._size(index) - 1) / self._rate

    def on_free(self, connection: Connection) -> None:
        """`connection` can take a request."""
        # In turn, so that none is idle until the server closes it.
        self._free.append(connection)
        if self._next < len(self._requests) and self._due_s(self._next) <= self._loop.time():
            self._send_due()

    def on_answer(self, index: int, status: int, body: bytes) -> None:
        """Request `index` was answered."""
        self.answered_s[index] = self._loop.time()
        size = self._size(index)
        found = [part.partition(b'"')[0].decode(errors="replace") for part in body.split(b'"status":"')[1:]]
        self.outcomes.update(found or {"none": size})
        self._count(str(status), size)

    def on_lost(self, connection: Connection, index: int | None) -> None:
        """`connection` is gone, and with it the answer to request `index`."""
        self._connections.discard(connection)
        if index is not None:
            self._count("connection lost", self._size(index))
        if not self._done.done() and self.num_reconnects < MAX_RECONNECTS:
            self.num_reconnects += 1
            task = self._loop.create_task(self._reconnect())
            self._reconnects.add(task)
            task.add_done_callback(self._reconnects.discard)

    async def _reconnect(self) -> None:
        await asyncio.sleep(RECONNECT_PAUSE_S)
        with contextlib.suppress(OSError):
            await self._connect()

    def _count(self, status: str, num_events: int) -> None:
        self.statuses[status] += num_events
        if self.statuses.total() >= self._num_events and not self._done.done():
            self._done.set_result(None)

    def report(self) -> dict[str, Any]:
        """Return what happened: counts are of events; times in microseconds, of the answered requests only."""
        answered = [index for index, at_s in enumerate(self.answered_s) if at_s]
        due_s = [self._due_s(index) for index in answered]
        return {
            "events": self._num_events,
            "answered": sum(map(self._size, answered)),
            "statuses": dict(self.statuses),
            "outcomes": dict(self.outcomes),
            "reconnects": self.num_reconnects,
            "wall_s": max((self.answered_s[index] for index in answered), default=self._began) - self._began,
            "from_due_us": [round(1e6 * (self.answered_s[index] - due)) for index, due in zip(answered, due_s, strict=True)],
            "from_sent_us": [round(1e6 * (self.answered_s[index] - self.sent_s[index])) for index in answered],
        }


async def send(arguments: argparse.Namespace) -> None:
    """Be the generator."""
    count = round(arguments.rate * arguments.seconds)
    if not 1 <= count <= MAX_EVENTS:
        raise SystemExit(f"{count} events: one run sends 1 to {MAX_EVENTS}; change --rate or --seconds")
    sessions = [f"{arguments.session_prefix}{number}" for number in range(arguments.sessions)]
    events = make_events(count, sessions, arguments.run, time.time(), arguments.rate)
    posts = split_events(events, arguments.events_per_post)
    requests = [make_request(arguments.port, post, respond_async=arguments.respond_async) for post in posts]
    del events, posts
    generator = Generator(arguments.port, requests, arguments.rate, count, arguments.events_per_post)
    await generator.connect(arguments.connections)
    # A collection would stop the clock of the measurement.
    gc.collect()
    gc.disable()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    cpu_began = time.process_time()
    await generator.run()
    cpu_s = time.process_time() - cpu_began
    print(json.dumps(generator.report() | {"cpu_s": cpu_s}), flush=True)


@lru_cache
def make_answer(num_events: int = 1) -> bytes:
    """Return the sink's answer to so many events."""
    outcomes = b",".join([b'{"message_id":"0","status":"ignored","blocks":0,"bytes":0}'] * num_events)
    body = b'{"outcomes":[%s]}' % outcomes
    return b"HTTP/1.1 202 Accepted\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


class Sink(asyncio.Protocol):
    """Answers every request alike, at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        """Answer each whole request."""
        self._buffer += data
        while (message := split_message(self._buffer)) is not None:
            self._buffer = self._buffer[message[2] :]
            self._transport.write(make_answer(message[1].count(b'"message_id"')))


async def sink() -> None:
    """Be the sink."""
    server = await asyncio.get_running_loop().create_server(Sink, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    server.close()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sink", help="answer 202 to everything")
    sender = commands.add_parser("send", help="send events")
    sender.add_argument("--port", type=int, required=True, help="of the server, on the loopback interface")
    sender.add_argument("--rate", type=float, default=1000.0, help="events per second")
    sender.add_argument("--seconds", type=float, default=60.0)
    sender.add_argument("--events-per-post", type=int, default=1, help="a POST is due when its last event is")
    sender.add_argument("--respond-async", action=argparse.BooleanOptionalAction, default=True, help="ask for an answer at once")
    sender.add_argument("--connections", type=int, default=128)
    sender.add_argument("--sessions", type=int, default=200)
    sender.add_argument("--session-prefix", default="session-")
    sender.add_argument("--run", default="run", help="begins every message_id")
    return parser.parse_args()


def main() -> None:
    """Run the command line."""
    arguments = parse_arguments()
    asyncio.run(sink() if arguments.command == "sink" else send(arguments))


if __name__ == "__main__":
    main()
