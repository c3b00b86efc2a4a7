# SPDX-License-Identifier: Apache-2.0
"""A small OpenAI-compatible server that does as a test says: answers, fails, hangs or dies, and remembers what it was sent.

It runs on a thread of its own. Its prefix cache is exact and never evicts: what was sent once is cached, in whole blocks.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

__all__ = ["BLOCK_TOKENS", "Call", "ScriptedServer"]

BLOCK_TOKENS = 4


@dataclass
class Call:
    """One completion that was sent. Times by `time.perf_counter`."""

    session_id: str | None
    body: dict[str, Any]
    came_s: float
    answered_s: float = 0.0

    @property
    def prompt(self) -> list[int]:
        """Its token ids."""
        return list(self.body["prompt"])

    @property
    def metadata(self) -> dict[str, Any]:
        """Its `kv_transfer_params.lifetime`."""
        return dict(self.body.get("kv_transfer_params", {}).get("lifetime", {}))


@dataclass
class ScriptedServer:
    """See the module. `script(n)` says what becomes of the nth completion: ok, 500, hang, cut (the stream ends early) or die.

    `event(data)` changes the data of each event of a stream.
    """

    script: Callable[[int], str] = lambda _: "ok"
    max_model_len: int | None = 1000
    takes_boundaries: bool = True
    has_metrics: bool = True
    says_cached: bool = True
    others_tokens: int = 0
    """Prompt tokens that somebody else has looked up between two looks at the counters."""
    latency_s: float = 0.0
    event: Callable[[str], str] = lambda data: data
    model_ids: tuple[Any, ...] = ("model",)
    connections: int = 0
    calls: list[Call] = field(default_factory=list)
    boundaries: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> Self:
        """Listen."""
        self._queries = self._hits = 0
        self._seen: set[tuple[int, ...]] = set()
        self._is_dead = False
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop listening."""
        if not self._is_dead:
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._end.wait()
        self._is_dead = True
        server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
                names = dict(line.split(": ", 1) for line in head[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                session_id = next((value for name, value in names.items() if name.lower() == "x-session-id"), None)
                await self._answer(writer, f"{method} {path}", json.loads(body) if body else None, session_id)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, what: str, body: Any, session_id: str | None) -> None:
        if what == "POST /v1/completions":
            await self._complete(writer, Call(session_id, body, time.perf_counter()))
        elif what == "POST /lifetime/v1/boundaries" and self.takes_boundaries:
            events = body if isinstance(body, list) else [body]
            self.boundaries += [(time.perf_counter(), event) for event in events]
            outcomes = [{"message_id": event["message_id"], "status": "queued"} for event in events]
            await self._send(writer, 202, {"outcomes": outcomes})
        elif what == "GET /v1/models":
            cards = [{"id": name, "max_model_len": self.max_model_len} for name in self.model_ids]
            await self._send(writer, 200, {"data": cards})
        elif what == "GET /version":
            await self._send(writer, 200, {"version": "0.32.0"})
        elif what == "GET /lifetime/v1/health" and self.takes_boundaries:
            await self._send(writer, 200, {"status": "ok"})
        elif what == "GET /health":
            await self._send(writer, 200, {})
        elif what == "GET /metrics" and self.has_metrics:
            await self._send(writer, 200, self._metrics())
        else:
            await self._send(writer, 404, {"detail": "Not Found"})

    async def _send(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        content = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(content)) + content)
        await writer.drain()

    async def _complete(self, writer: asyncio.StreamWriter, call: Call) -> None:
        self.calls.append(call)
        fate = self.script(len(self.calls) - 1)
        if fate == "die":
            self._end.set()
            return
        if fate == "hang":
            await self._end.wait()
            return
        if fate == "500":
            await self._send(writer, 500, {"error": {"message": "it broke"}})
            return
        cached = self._look_up(call.prompt)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        tokens = call.body["max_tokens"]
        for number in range(tokens):
            if fate == "cut" and number == tokens // 2:
                writer.write(b"0\r\n\r\n")
                return
            await asyncio.sleep(self.latency_s / tokens)
            choice = {"text": "x"} | ({"token_ids": [number]} if call.body.get("return_token_ids") else {})
            await self._event(writer, json.dumps({"choices": [choice]}))
        usage: dict[str, Any] = {"prompt_tokens": len(call.prompt), "completion_tokens": tokens}
        if self.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        call.answered_s = time.perf_counter()
        await self._event(writer, json.dumps({"choices": [], "usage": usage}))
        await self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _event(self, writer: asyncio.StreamWriter, data: str) -> None:
        content = f"data: {self.event(data)}\n\n".encode()
        writer.write(b"%x\r\n" % len(content) + content + b"\r\n")
        await writer.drain()

    def _look_up(self, prompt: list[int]) -> int:
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)]
        cached = BLOCK_TOKENS * sum(prefix in self._seen for prefix in prefixes[: (len(prompt) - 1) // BLOCK_TOKENS])
        self._seen.update(prefixes)
        self._queries += len(prompt)
        self._hits += cached
        return cached

    def _metrics(self) -> str:
        others = self.others_tokens if self.calls else 0
        return (
            "# TYPE vllm:prefix_cache_queries counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {self._queries + others}\n'
            "# TYPE vllm:prefix_cache_hits counter\n"
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self._hits}\n'
            "# TYPE vllm:lifetime_hit_tokens counter\n"
            f'vllm:lifetime_hit_tokens_total{{engine="0",tier="hbm"}} {self._hits}\n'
            "# TYPE vllm:lifetime_bytes_written counter\n"
            f'vllm:lifetime_bytes_written_total{{engine="0",tier="flash"}} {100 * len(self.calls)}\n'
        )
