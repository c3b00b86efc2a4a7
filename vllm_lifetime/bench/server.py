# SPDX-License-Identifier: Apache-2.0
"""The server under test: what it says of itself, its counters, and one streamed completion."""

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import httpx
import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.bench.counters import Counters, parse_counters
from vllm_lifetime.bench.records import RequestRecord
from vllm_lifetime.harness.client import TOKEN_VARIABLE, read_server_url

__all__ = ["API_KEY_VARIABLE", "BenchServer", "ServerError", "ServerInfo"]

API_KEY_VARIABLE = "OPENAI_API_KEY"
KEEP_ALIVE_S = 1.0
"""vLLM closes a connection that is idle for 5 s: none may be used again just then."""
ANSWER_TIMEOUT_S = 30.0
"""For everything but completions."""
PROBE_TIMEOUT_S = 5.0
METRICS_TIMEOUT_S = 10.0
END_TIMEOUT_S = 1.0
"""For the end of an answer after its last event."""
SETTLING_S = 0.25
"""Counters that have not moved for so long have settled."""
SHOWN_CHARACTERS = 200
"""Of an error's text."""


class ServerError(Exception):
    """The server cannot be measured, or does not answer; the message says why."""


@dataclass(frozen=True)
class ServerInfo:
    """What the server says of itself. None: it does not."""

    model: str
    max_model_len: int | None
    version: str | None
    has_lifetime: bool


class BenchServer:
    """Asks one server. An async context manager; one event loop."""

    def __init__(self, base_url: str, request_timeout_s: float, *, keeps_token_ids: bool = False) -> None:
        """Use the server at `base_url`, its root. A request may take `request_timeout_s` in all.

        Raises `ValueError`: no URL, or a key or token in the environment that no header can hold.

        `keeps_token_ids`: ask for the ids of the generated tokens (vLLM's `return_token_ids`), and record them.
        """
        self.url = str(read_server_url(base_url)).rstrip("/")
        self._keeps_token_ids = keeps_token_ids
        self._request_timeout_s = request_timeout_s
        key = _secret(API_KEY_VARIABLE)
        self._http = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=min(request_timeout_s, ANSWER_TIMEOUT_S)),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        )

    async def __aenter__(self) -> Self:
        """Return the server."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connections."""
        await self._http.aclose()

    # ------------------------------------------------------------------ what it says of itself

    async def ask(self, model: str | None, *, needs_boundaries: bool) -> ServerInfo:
        """What the server says of itself; `model` None: its first. Raises `ServerError`.

        Whether it takes boundaries is asked only if `needs_boundaries`.
        """
        answer = await self._get("/v1/models")
        if answer.status_code in (401, 403):
            raise ServerError(f"{self.url} does not let us in: set {API_KEY_VARIABLE} to its API key")
        if answer.is_redirect:
            raise ServerError(f"{self.url} sends us on to {_short(answer.headers.get('location', ''))}: give that server's URL")
        try:
            models = {card["id"]: card.get("max_model_len") for card in answer.json()["data"]}
            if not all(isinstance(name, str) for name in models):
                raise TypeError("a model's id is not text")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ServerError(
                f"{self.url} is no OpenAI-compatible server: /v1/models answers {answer.status_code} {_short(answer.text)}"
            ) from None
        if not models or (model is not None and model not in models):
            wanted = "any model" if model is None else repr(model)
            raise ServerError(f"{self.url} does not serve {wanted}; it serves {', '.join(models) or 'none'}")
        name = model or next(iter(models))
        length = models[name]
        return ServerInfo(
            model=name,
            max_model_len=length if isinstance(length, int) else None,
            version=await self._version(),
            has_lifetime=needs_boundaries and await self._has_lifetime(),
        )

    async def counters(self) -> Counters | None:
        """The server's counters at this moment; None where it has none, or does not answer."""
        try:
            answer = await self._get("/metrics", timeout_s=METRICS_TIMEOUT_S)
        except ServerError:
            return None
        return parse_counters(answer.text) if answer.status_code == 200 else None

    async def settled_counters(self, timeout_s: float = 3.0) -> Counters | None:
        """The same once they no longer move, or after `timeout_s`: they reach `/metrics` some time after the answers."""
        deadline_s = time.monotonic() + timeout_s
        before = await self.counters()
        while before is not None and time.monotonic() < deadline_s:
            await asyncio.sleep(SETTLING_S)
            now = await self.counters()
            if now == before:
                break
            before = now
        return before

    async def why_dead(self) -> str | None:
        """Why the server answers no more; None if it does. Asks `/health`, twice at most."""
        reason = None
        for pause_s in (0.0, 1.0):
            await asyncio.sleep(pause_s)
            try:
                answer = await self._http.get(f"{self.url}/health", timeout=PROBE_TIMEOUT_S)
            except httpx.HTTPError as error:
                reason = f"{self.url} does not answer any more: {describe(error)}"
            else:
                if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                    return None
                reason = f"{self.url} says that it is not healthy any more"
        return reason

    async def _version(self) -> str | None:
        try:
            answer = await self._get("/version")
            return str(answer.json()["version"])
        except (ServerError, ValueError, KeyError, TypeError):
            return None

    async def _has_lifetime(self) -> bool:
        token = _secret(TOKEN_VARIABLE)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = await self._get("/lifetime/v1/health", headers)
        if answer.status_code in (401, 403):
            raise ServerError(
                f"{self.url} does not take our boundaries: set {TOKEN_VARIABLE} to its token, or use --boundaries off"
            )
        try:
            return answer.status_code == httpx.codes.OK and "status" in answer.json()
        except (ValueError, TypeError):
            return False

    async def _get(
        self, path: str, headers: Mapping[str, str] | None = None, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> httpx.Response:
        try:
            return await self._http.get(f"{self.url}{path}", timeout=timeout_s, headers=headers)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url} does not answer: {describe(error)}") from None

    # ------------------------------------------------------------------ completions

    def encode(self, model: str, prompt: NDArray[np.int64], output_tokens: int, more: Mapping[str, Any]) -> bytes:
        """The body of a completion of token ids that writes exactly `output_tokens`."""
        body = {
            "model": model,
            "prompt": prompt.tolist(),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"return_token_ids": True} if self._keeps_token_ids else {}),
            **more,
        }
        return json.dumps(body, separators=(",", ":")).encode()

    async def complete(
        self, body: bytes, headers: Mapping[str, str], record: RequestRecord, clock: Callable[[], float]
    ) -> httpx.HTTPError | TimeoutError | None:
        """Send one completion and fill in its record, to its end or its error.

        Returns the error if the server did not answer at all or stopped in between, so that it may be dead.
        """
        lost: httpx.HTTPError | TimeoutError | None = None
        record.sent_s = clock()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                await self._stream(body, headers, record, clock)
        except TimeoutError as error:
            lost = error
            record.error = f"no end within {self._request_timeout_s:g} s (--request-timeout-s)"
        except httpx.HTTPError as error:
            lost = error
            record.error = describe(error)
        record.ended_s = clock()
        return lost

    async def _stream(self, body: bytes, headers: Mapping[str, str], record: RequestRecord, clock: Callable[[], float]) -> None:
        sent = {"content-type": "application/json", **headers}
        async with self._http.stream("POST", f"{self.url}/v1/completions", content=body, headers=sent) as answer:
            if answer.status_code != httpx.codes.OK:
                await answer.aread()
                record.error = f"{answer.status_code} {_short(answer.text)}".strip()
                return
            is_complete = False
            other = ""
            lines = _lines(answer)
            async for line in lines:
                if not line.startswith("data:"):
                    other = (other + " " + line)[:SHOWN_CHARACTERS] if line else other
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    is_complete = True
                    await _read_on(lines)
                    break
                self._read_event(data, record, clock())
            if record.error is None and not is_complete:
                told = f"; it is no stream of events: {_short(other)}" if other else ""
                record.error = f"the answer ends before its end{told}"

    def _read_event(self, data: str, record: RequestRecord, now_s: float) -> None:
        try:
            event = json.loads(data)
            error = event.get("error")
            if error is not None:
                record.error = _short(str((error.get("message") if isinstance(error, dict) else None) or error))
                return
            if event.get("choices"):
                record.chunk_s.append(now_s)
                if self._keeps_token_ids:
                    record.token_ids += event["choices"][0].get("token_ids") or ()
            usage = event.get("usage")
            if usage:
                record.output_tokens = int(usage["completion_tokens"])
                record.has_usage = True
                counted = usage.get("prompt_tokens")
                if counted is not None and int(counted) != record.prompt_tokens:
                    record.error = f"the server counts {int(counted)} tokens of prompt, where {record.prompt_tokens} were sent"
                details = usage.get("prompt_tokens_details")
                if details is not None and details.get("cached_tokens") is not None:
                    cached = int(details["cached_tokens"])
                    if 0 <= cached <= record.prompt_tokens:
                        record.cached_tokens = cached
                    else:
                        record.error = f"the server says that {cached} of {record.prompt_tokens} tokens of prompt were cached"
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
            record.error = f"an event of the stream cannot be read: {type(problem).__name__} in {_short(data)}"


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """The lines of an answer. Only a line feed ends one: JSON may hold U+2028 and others that `str.splitlines` splits at."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
    if rest:
        yield rest.decode(errors="replace")


async def _read_on(lines: AsyncIterator[str]) -> None:
    """Read what follows the last event: a connection is used again only after its answer's end."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_TIMEOUT_S):
            async for _ in lines:
                pass


def _secret(variable: str) -> str | None:
    """What the environment has under this name. Raises `ValueError`, without its value, where no header can hold it."""
    value = (os.environ.get(variable) or "").strip()
    if not (value.isascii() and value.isprintable()):
        raise ValueError(f"{variable} has characters that a header cannot hold; set it to the key alone")
    return value or None


def describe(error: Exception) -> str:
    """An error of HTTP in a few words; many have no text of their own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _short(text: str) -> str:
    return " ".join(text.split())[:SHOWN_CHARACTERS]
