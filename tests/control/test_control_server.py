# SPDX-License-Identifier: Apache-2.0
"""The control API on a real server, with real connections."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest
from control_fakes import API, TURN_END, FakeEngines, build_app, serve, session_view

from vllm_lifetime.control import ControlSettings

pytestmark = pytest.mark.usefixtures("way")

BOUNDARIES = f"{API}/boundaries"
NUM_POSTS = 150


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


def post_head(content_length: int) -> bytes:
    lines = ["host: localhost", "content-type: application/json", f"content-length: {content_length}"]
    return "\r\n".join([f"POST {BOUNDARIES} HTTP/1.1", *lines, "\r\n"]).encode()


class EnginesThatWait(FakeEngines):
    """Engines whose first call takes until so many POSTs have come."""

    def __init__(self, num_posts: int) -> None:
        super().__init__()
        self._num_missing = num_posts

    def count_posts(self, app: Any) -> Any:
        """`app`, each of whose requests counts once its body has come."""

        async def counting_app(scope: Any, receive: Any, send: Any) -> None:
            async def counting_receive() -> Any:
                message = await receive()
                if message["type"] == "http.request" and not message.get("more_body"):
                    self._num_missing -= 1
                return message

            await app(scope, counting_receive if scope["type"] == "http" else receive, send)

        return counting_app

    async def work(self) -> None:
        while self._num_missing > 0:
            await asyncio.sleep(0.01)


@pytest.fixture
def engines() -> FakeEngines:
    return FakeEngines(delay_s=0.005)


@pytest.fixture
def url(engines: FakeEngines) -> Iterator[str]:
    with serve(build_app(engines)) as url:
        yield url


def test_ten_megabytes_are_413_declared_or_not(url: str) -> None:
    block = b" " * (1 << 16)

    def blocks() -> Iterator[bytes]:
        for _ in range(160):
            yield block

    for content in (block * 160, blocks()):
        response = httpx.post(url + BOUNDARIES, content=content, headers={"content-type": "application/json"}, timeout=30)
        assert response.status_code == 413
    assert httpx.post(url + BOUNDARIES, json=TURN_END).status_code == 202


def test_many_posts_at_once_are_few_engine_calls_each_with_its_own_outcome() -> None:
    engines = EnginesThatWait(NUM_POSTS)

    async def main(url: str) -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=NUM_POSTS)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
            posts = [client.post(BOUNDARIES, json=TURN_END | {"message_id": f"m{number}"}) for number in range(NUM_POSTS)]
            return await asyncio.gather(*posts)

    with serve(engines.count_posts(build_app(engines, timeout_s=120))) as url:
        responses = asyncio.run(main(url))
    assert {response.status_code for response in responses} == {202}
    told = [response.json()["outcomes"][0]["message_id"] for response in responses]
    assert told == [f"m{number}" for number in range(NUM_POSTS)]
    assert engines.max_running == 1
    # The first, which waited, and what had gathered; perhaps some that were still being read.
    assert len(engines.calls) < 10


def test_clients_that_are_gone_change_nothing_for_others(engines: FakeEngines, url: str) -> None:
    engines.delay_s = 0.3
    for number in range(5):
        body = json.dumps(TURN_END | {"message_id": f"gone{number}"}).encode()
        with connect(url) as connection:
            connection.sendall(post_head(len(body)) + body)
            time.sleep(0.02)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    response = httpx.post(url + BOUNDARIES, json=TURN_END)
    assert response.json()["outcomes"][0]["message_id"] == "m1"
    assert [event["message_id"] for event in engines.events()] == [*(f"gone{number}" for number in range(5)), "m1"]


def test_a_body_that_never_ends_fills_no_log(engines: FakeEngines, url: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with connect(url) as connection:
            connection.sendall(post_head(1000) + b'{"message_id":')
            time.sleep(0.05)
        assert httpx.get(url + f"{API}/health").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]
    assert engines.events() == []


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_unix_socket_needs_no_token(tmp_path: Path, loop: str) -> None:
    path = tmp_path / "vllm.sock"
    transport = httpx.HTTPTransport(uds=str(path))
    with (
        serve(build_app(FakeEngines()), unix_socket=path, loop=loop) as url,
        httpx.Client(transport=transport, base_url=url) as client,
    ):
        assert client.post(BOUNDARIES, json=TURN_END).status_code == 202


def test_nobody_comes_from_this_machine_by_saying_so(url: str) -> None:
    """uvicorn believes in the address that a proxy on this machine names."""
    for name in ("x-forwarded-for", "x-real-ip"):
        assert httpx.get(url + f"{API}/tiers", headers={name: "127.0.0.1"}).status_code == 401
    assert httpx.get(url + f"{API}/tiers").status_code == 200


def test_a_token_is_asked_for_over_the_wire() -> None:
    with serve(build_app(FakeEngines(), settings=ControlSettings(tokens=("secret",)))) as url:
        response = httpx.post(url + BOUNDARIES, json=TURN_END)
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert httpx.post(url + BOUNDARIES, json=TURN_END, headers={"authorization": "Bearer secret"}).status_code == 202


@pytest.mark.parametrize("session_id", ["a/b", "a%2Fb", "a b", "a?b#c", "line\nbreak\n", "日本/…", "x" * 256])
def test_a_session_with_a_strange_id_is_reached_over_the_wire(engines: FakeEngines, url: str, session_id: str) -> None:
    engines.sessions[0][session_id] = session_view(session_id)
    path = f"{API}/sessions/{quote(session_id, safe='')}"
    assert httpx.get(url + path).json()["session_id"] == session_id
    assert httpx.delete(url + path).status_code == 200
    assert engines.calls[-1][1]["session_id"] == session_id
