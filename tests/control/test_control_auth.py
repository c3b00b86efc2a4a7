# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import pytest
from control_fakes import API, TURN_END, FakeEngines, build_app, send

from vllm_lifetime.control import ControlSettings
from vllm_lifetime.control.auth import is_same_origin, is_this_machine
from vllm_lifetime.control.settings import TOKEN_VARIABLE

pytestmark = pytest.mark.usefixtures("way")

TIERS = f"{API}/tiers"
WITH_TOKENS = ControlSettings(tokens=("first", "sécond"))

GUARDED = [
    ("POST", "/boundaries"),
    ("POST", "/hints"),
    ("GET", "/sessions"),
    ("GET", "/sessions/s1"),
    ("DELETE", "/sessions/s1"),
    ("GET", "/tiers"),
    ("GET", "/health"),
    ("GET", "/events"),
    ("GET", "/openapi.json"),
]


def bearer(token: str) -> dict[str, bytes]:
    return {"authorization": b"Bearer " + token.encode()}


# ---------------------------------------------------------------------- tokens


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_every_route_needs_the_token_once_there_is_one(method: str, path: str) -> None:
    engines = FakeEngines()
    app = build_app(engines, settings=WITH_TOKENS)
    for headers in ({}, bearer("third"), bearer(""), bearer("firs"), bearer("first2"), {"authorization": b"Basic first"}):
        response = send(app, method, API + path, json=TURN_END, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert "oken" in response.json()["detail"]
    assert engines.calls == []


@pytest.mark.parametrize("header", [b"Bearer first", b"bearer first", b"BEARER  first ", "Bearer sécond".encode()])
def test_each_token_opens_from_anywhere(header: bytes) -> None:
    app = build_app(FakeEngines(), settings=WITH_TOKENS)
    response = send(app, "GET", TIERS, headers={"authorization": header, "host": "kv.example.org"}, client=("203.0.113.9", 5))
    assert response.status_code == 200


def test_a_body_is_not_read_for_a_stranger() -> None:
    async def body() -> Any:
        raise AssertionError("the body was read")
        yield b""

    response = send(build_app(FakeEngines(), settings=WITH_TOKENS), "POST", f"{API}/boundaries", content=body())
    assert response.status_code == 401


def test_the_own_token_stands_before_the_servers_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, " own\n")
    settings = ControlSettings.from_environment(["key"])
    assert [token.get_secret_value() for token in settings.tokens] == ["own"]
    assert "own" not in repr(settings)


@pytest.mark.parametrize("own", ["", "  "])
def test_without_an_own_token_every_key_of_the_server_is_one(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, own)
    settings = ControlSettings.from_environment(["a,b", "", None, "c"])
    assert [token.get_secret_value() for token in settings.tokens] == ["a,b", "c"]
    assert len(ControlSettings.from_environment("abc").tokens) == 1


def test_an_empty_token_does_not_open_a_server_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    app = build_app(FakeEngines(), settings=ControlSettings.from_environment([None]))
    assert send(app, "GET", TIERS, headers=bearer(""), client=("203.0.113.9", 5)).status_code == 401


# ---------------------------------------------------------------------- without a token


@pytest.mark.parametrize("address", ["203.0.113.9", "10.0.0.1", "2001:db8::1", "::ffff:10.0.0.1", "0.0.0.0", "testclient", ""])
def test_without_a_token_other_machines_are_told_what_to_do(address: str) -> None:
    response = send(build_app(FakeEngines()), "GET", TIERS, client=(address, 5))
    assert response.status_code == 401
    assert TOKEN_VARIABLE in response.json()["detail"]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"])
def test_without_a_token_this_machine_is_served(address: str) -> None:
    assert send(build_app(FakeEngines()), "GET", TIERS, client=(address, 5)).status_code == 200


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "x-real-ip", "via", "X-Forwarded-Host"])
def test_a_client_behind_a_proxy_on_this_machine_is_not_of_this_machine(name: str) -> None:
    response = send(build_app(FakeEngines()), "GET", TIERS, headers={name: "127.0.0.1"})
    assert response.status_code == 401


def test_a_unix_socket_is_of_this_machine_but_a_vanished_connection_is_not() -> None:
    assert is_this_machine(None, ("/run/vllm.sock", None))
    assert not is_this_machine(None, ("10.0.0.1", 8000))
    assert not is_this_machine(None, None)
    assert not is_this_machine(("127.0.0.1",), ("127.0.0.1", 8000))


@pytest.mark.parametrize("host", ["attacker.example:8000", "127.0.0.1.attacker.example", "localhost.attacker.example", "a.b"])
def test_a_name_pointed_at_this_machine_needs_a_token(host: str) -> None:
    assert send(build_app(FakeEngines()), "GET", TIERS, headers={"host": host}).status_code == 401


@pytest.mark.parametrize(
    "host", ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "vllm", "LOCALHOST", "vllm.localhost", "192.0.2.1"]
)
def test_names_that_nobody_else_can_own_are_fine(host: str) -> None:
    assert send(build_app(FakeEngines()), "GET", TIERS, headers={"host": host}).status_code == 200


# ---------------------------------------------------------------------- browsers


@pytest.mark.parametrize(
    "origin", ["http://attacker.example", "null", "file://", "http://localhost:3000", "https://localhost", "http://["]
)
@pytest.mark.parametrize("settings", [ControlSettings(), WITH_TOKENS])
def test_a_page_of_another_origin_is_403(origin: str, settings: ControlSettings) -> None:
    engines = FakeEngines()
    headers = bearer("first") | {"origin": origin, "host": "localhost:8000"}
    for method, path in GUARDED:
        response = send(build_app(engines, settings=settings), method, API + path, json=TURN_END, headers=headers)
        assert response.status_code == 403
    assert engines.calls == []


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://LOCALHOST:8000", "localhost:8000"),
        ("https://kv.example.org", "kv.example.org"),
        ("https://kv.example.org", "kv.example.org:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_our_own_page_is_served(origin: str, host: str) -> None:
    assert is_same_origin(origin, host)
    headers = bearer("first") | {"origin": origin, "host": host}
    assert send(build_app(FakeEngines(), settings=WITH_TOKENS), "GET", TIERS, headers=headers).status_code == 200


def test_the_dashboard_needs_no_token_since_it_holds_no_data() -> None:
    response = send(build_app(FakeEngines(), settings=WITH_TOKENS), "GET", f"{API}/dashboard")
    assert response.status_code == 200
