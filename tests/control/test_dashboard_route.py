# SPDX-License-Identifier: Apache-2.0
"""The dashboard's route: what is served, to whom, and with which policy."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files

import httpx
import pytest
from dashboard_engines import MovingEngines
from dashboard_server import DashboardServer

from vllm_lifetime.control.dashboard import content_security_policy

PAGE = files("vllm_lifetime.control").joinpath("dashboard.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[DashboardServer]:
    with DashboardServer(MovingEngines(), token="secret") as running:
        yield running


def test_the_page_needs_a_token_or_the_data_does_not(server: DashboardServer) -> None:
    page = httpx.get(server.page_url)
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text == PAGE
    for path in ("tiers", "sessions", "events", "health"):
        assert httpx.get(f"{server.base_url}/lifetime/v1/{path}").status_code == 401


def test_the_page_is_sent_again_unchanged(server: DashboardServer) -> None:
    first = httpx.get(server.page_url)
    again = httpx.get(server.page_url, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"
    assert httpx.get(server.page_url, headers={"If-None-Match": '"other"'}).status_code == 200


def test_the_policy_allows_more_than_the_page_holds(server: DashboardServer) -> None:
    headers = httpx.get(server.page_url).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy.pop(directive) == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"


def test_a_changed_script_keeps_its_hash() -> None:
    assert content_security_policy(PAGE) != content_security_policy(PAGE.replace('"use strict";', '"use strict"; alert(1);'))


class Collector(HTMLParser):
    """Every attribute of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[tuple[str, str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]


def test_the_page_needs_something_from_elsewhere() -> None:
    collector = Collector()
    collector.feed(PAGE)
    names = {name for _, name, _ in collector.attributes}
    assert not {name for name in names if name.startswith("on") or name in ("style", "src", "action", "srcdoc")}
    assert [value for _, name, value in collector.attributes if name == "href"] == ["data:,"]
    # The only address is the name of a markup language.
    assert re.findall(r"https?://[^\s\"']+", PAGE) == ["http://www.w3.org/2000/svg"]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage"):
        assert way not in PAGE
