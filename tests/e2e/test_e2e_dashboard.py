# SPDX-License-Identifier: Apache-2.0
"""The dashboard of a real server in a real browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_client import Api
from e2e_workload import BLOCK_TOKENS, random_tokens

pytest.importorskip("selenium", reason="selenium is not installed: see requirements/dev.txt")
sys.path.insert(0, str(Path(__file__).parents[1] / "control"))

from dashboard_browser import CHROMIUM, DRIVER, MISSING, Page, open_browser

needs_browser = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Page]:
    with open_browser(tmp_path / "profile") as page:
        yield page
        assert page.complaints() == []


def number(page: Page, tier: str, segment_class: str) -> int:
    """Blocks of a class in a tier's legend."""
    return int(page.text(f'.tier[data-tier="{tier}"] tr[data-class="{segment_class}"] .num').replace(",", "") or "-1")


@needs_browser
def test_a_session_does_not_appear_or_does_not_retire(tiers_server: Api, page: Page) -> None:
    """Request, segment, boundary, retirement: each is seen on the page, with the numbers that the server gives."""
    api = tiers_server
    page.open(f"{api.server.base_url}/lifetime/v1/dashboard")
    page.wait_for_text("#connection", "Live")
    assert [card.get_attribute("data-tier") for card in page.all(".tier")] == ["hbm", "host", "flash"]
    session = "seen <b>in</b> the browser"
    prompt = random_tokens("dashboard", 5 * BLOCK_TOKENS)
    api.complete(prompt, 8, session=session, metadata={"workflow_id": "w", "agent": "planner", "turn": 1})
    # Other tests' sessions may stand beside it.
    row = page.row(session)
    page.wait(lambda: bool(row.find_elements("css selector", "rect")), "no segment is shown")
    assert row.get_attribute("data-state") == "active"
    row.find_element("css selector", "button.name").click()
    page.wait(lambda: "planner" in row.find_element("css selector", ".inside").text, "the agent is not shown")
    used = api.settle()["hbm"]["used_blocks"]
    assert used >= 5
    shown = ("shared", "lead", "worker", "reviewer", "reasoning_laden", "reasoning_stripped", "unknown")
    page.wait(lambda: sum(number(page, "hbm", each) for each in shown) == used, "the classes do not add up to what is used")
    outcome = api.boundary("session_end", session_id=session)
    assert outcome["status"] == "accepted"
    page.wait(lambda: row.get_attribute("data-state") == "retired", "the row does not retire")
    retired = api.tiers()["hbm"]["retired_blocks"]
    page.wait(lambda: number(page, "hbm", "retired") == retired > 0, "the retired blocks are not shown")
    assert sum(number(page, "hbm", each) for each in shown) == 0
    assert row.find_elements("css selector", '.mark[data-kind="session_end"]')
    listed = page.all('#boundaries tr[data-kind="session_end"]')
    [mine] = [line for line in listed if session in line.text]
    cells = [cell.text for cell in mine.find_elements("css selector", "td")]
    assert cells[2:] == [session, "accepted", f"{outcome['blocks']}"]
    assert page.text("#health") == "ok"


def test_top_shows_something_else(tiers_server: Api) -> None:
    """`vllm-lifetime top --once` against the same server."""
    api = tiers_server
    api.complete(random_tokens("top", 3 * BLOCK_TOKENS), 1, session="seen in the terminal")
    used = api.settle()["hbm"]["used_blocks"]
    code = "import typer; from vllm_lifetime.cli import top; app = typer.Typer(); top.add_to(app); app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--once", "--url", api.server.base_url], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "seen in the terminal" in done.stdout
    assert f"hbm   {used} of" in done.stdout
