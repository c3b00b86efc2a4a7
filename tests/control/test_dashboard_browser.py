# SPDX-License-Identifier: Apache-2.0
"""The dashboard in a real browser, on the real control API, with engines that the test moves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("selenium", reason="selenium is not installed: see requirements/dev.txt")

from dashboard_browser import CHROMIUM, DRIVER, MISSING, Page, open_browser
from dashboard_engines import BLOCK_BYTES, MovingEngines
from dashboard_server import DashboardServer
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)

BAR_ENDS = """
    const end = (bar) => bar.x.baseVal.value + bar.width.baseVal.value;
    return [...document.querySelectorAll('rect')].map((bar) => [bar.dataset.class, end(bar)]);
"""
"""Class and right end of every bar; 1000 is now."""

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>"\'&amp;</td>\u202e\n\x1b[31m'


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    browser.resize(1280, 800)
    yield browser
    complaints = browser.complaints()
    browser.open("about:blank")
    assert complaints == []


@pytest.fixture
def engines() -> MovingEngines:
    return MovingEngines()


@pytest.fixture
def server(engines: MovingEngines) -> Iterator[DashboardServer]:
    with DashboardServer(engines) as running:
        yield running


def test_data_is_invented_before_the_first_answer(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.is_open.clear()
    page.open(server.page_url)
    time.sleep(1.5)
    assert page.find("#waiting").is_displayed()
    assert "Waiting for the first answer" in page.text("#connection")
    assert page.text("#health") in ("no answer yet", "stalled")
    assert page.all(".tier") == []
    for hidden in ("#rates", "#bytes", "#sessions-card", "#boundaries-card"):
        assert not page.find(hidden).is_displayed()
    engines.is_open.set()
    page.wait_for_text("#connection", "Live")
    assert not page.find("#waiting").is_displayed()
    assert [card.get_attribute("data-tier") for card in page.all(".tier")] == ["hbm", "host", "flash"]
    page.wait_for_text("#health", "ok")
    assert page.find("#no-sessions").is_displayed()


def test_a_session_does_not_appear_or_does_not_retire(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    page.open(server.page_url)
    page.wait_for_text("#connection", "Live")
    engines.request("the-session", agent="lead", segment_class="lead", blocks=12)
    row = page.row("the-session")
    assert row.get_attribute("data-state") == "active"
    page.find('.row rect.fill-lead[data-class="lead"]')
    assert "hbm 12" in row.text
    assert page.text('.tier[data-tier="hbm"] tr[data-class="lead"] .num') == "12"
    outcome = server.boundary("session_end", "the-session")
    assert outcome["status"] == "accepted"
    page.wait(lambda: row.get_attribute("data-state") == "retired", "the row does not retire")
    assert row.is_displayed()
    assert float(row.value_of_css_property("opacity")) < 1
    assert "retired" in row.text
    page.find('.row .mark[data-kind="session_end"]')
    assert page.text('.tier[data-tier="hbm"] tr[data-class="retired"] .num') == "12"
    assert page.text('.tier[data-tier="hbm"] tr[data-class="lead"] .num') == "0"
    cells = [cell.text for cell in page.all('#boundaries tr[data-kind="session_end"] td')]
    assert cells[1:] == ["session_end", "the-session", "accepted", "12"]


def test_a_returned_sub_agent_stays_open(page: Page, server: DashboardServer) -> None:
    server.boundary("session_start", "s")
    server.boundary("subagent_spawn", "s", agent="worker", agent_id="w-1")
    page.open(server.page_url)
    page.find('.row rect[data-class="worker"]')
    button = page.find(".row button.name")
    assert button.get_attribute("aria-expanded") == "false"
    button.send_keys(Keys.ENTER)
    page.wait_for_text(".row .inside", "w-1:worker")
    server.boundary("subagent_return", "s", agent_id="w-1")
    inside = page.wait_for_text(".row .inside", "no segment")
    assert "returned" in inside
    Select(page.find("#window")).select_by_value("60")
    page.wait(lambda: dict(page.run(BAR_ENDS))["worker"] < 970, "the bar of the worker grows on")
    assert dict(page.run(BAR_ENDS))["shared"] > 970
    page.find(".row button.name").send_keys(Keys.SPACE)
    page.wait(lambda: not page.find(".row .inside").is_displayed(), "the row does not fold")
    assert [mark.text for mark in page.all(".row .mark")] == ["S", "+", "\u2212"]


def test_of_segments_that_look_alike_one_seems_closed(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("s", agent="lead", segment_class="lead", blocks=3)
    engines.request("s", agent="lead", segment_class="worker", blocks=4)
    first, second = engines.sessions["s"].segments()
    first.segment_id = second.segment_id = None
    first.segment_class = second.segment_class = "lead"
    first.opened_s -= 60  # far apart, so that one could be taken for a younger other
    page.open(server.page_url)
    page.find('.row rect[data-class="lead"]')
    Select(page.find("#window")).select_by_value("60")
    time.sleep(3.5)
    ends = page.run(BAR_ENDS)
    assert len(ends) == 2 and min(end for _, end in ends) > 970


def test_an_id_becomes_markup(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request(HOSTILE, workflow_id=HOSTILE + "w", agent=HOSTILE, agent_id=HOSTILE, segment_class="lead")
    engines.sessions[HOSTILE].agents[HOSTILE].segments[f"{HOSTILE}:lead"].segment_id = HOSTILE
    server.boundary("turn_end", HOSTILE, agent=HOSTILE, agent_id=HOSTILE, workflow_id=HOSTILE + "w")
    engines.oldest_io_s = 3.0
    page.open(server.page_url)
    page.find("#boundaries tr")
    page.find(".row button.name").click()
    page.find(".row .inside td")
    shown = HOSTILE.translate(dict.fromkeys(map(ord, "\u202e\n\x1b"), "\ufffd"))
    assert page.text(".row .name .id") == shown
    assert page.text("#boundaries td.id") == shown
    assert shown in page.text(".row .inside")
    assert page.all("img, .row script, #boundaries script") == []
    assert page.run("return window.hacked ?? null") is None


def test_markup_could_be_made_from_text_at_all(page: Page, server: DashboardServer) -> None:
    page.open(server.page_url)
    page.wait_for_text("#connection", "Live")
    # Later, in the page's own time: what the driver runs directly may do more.
    made = """
        setTimeout(() => {
            window.caught = [];
            for (const attempt of [
                () => { document.body.innerHTML = "<b>x</b>"; },
                () => { eval("1"); },
                () => { document.createElement("script").textContent = "window.hacked = 1"; },
            ]) { try { attempt(); caught.push("passed"); } catch (error) { caught.push(error.name); } }
        })
    """
    page.run(made)
    page.wait(lambda: page.run("return window.caught"), "nothing was tried")
    assert page.run("return window.caught") == ["TypeError", "EvalError", "TypeError"]
    style = "const p = document.createElement('p'); p.setAttribute('style', 'position: fixed'); document.body.append(p); "
    assert page.run(style + "return getComputedStyle(p).position") == "static"
    # Refused, as asked for: nothing else may have complained.
    assert all("Content Security Policy" in complaint or "Trusted" in complaint for complaint in page.complaints())


def test_a_protected_server_is_shown_without_a_token(page: Page, engines: MovingEngines) -> None:
    engines.request("the-session")
    with DashboardServer(engines, token="right") as server:
        page.open(server.page_url)
        page.wait(lambda: page.find("#token-dialog").is_displayed(), "no question for a token")
        assert "Authorization: Bearer" in page.text("#token-reason")
        assert page.all(".row") == [] and page.all(".tier") == []
        asked = len(engines.calls)
        page.find("#token").send_keys("wrong", Keys.ENTER)
        page.wait_for_text("#token-reason", "refused the token")
        assert len(engines.calls) == asked
        page.find("#token").send_keys("right", Keys.ENTER)
        page.row("the-session")
        assert not page.find("#token-dialog").is_displayed()
        kept = "return [Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        assert page.run(kept) == [["right"], [], ""]
        assert "right" not in page.driver.current_url
        page.driver.refresh()
        page.row("the-session")
        page.find("#forget").click()
        page.wait(lambda: page.find("#token-dialog").is_displayed(), "no question for a token")
        assert page.run("return sessionStorage.length") == 0
        page.find("#token-cancel").click()
        page.wait_for_text("#problem", "asks for a token")
        page.find("#sign-in").click()
        page.find("#token").send_keys("right", Keys.ENTER)
        page.wait_for_text("#connection", "Live")
        page.wait(lambda: not page.find("#problem").is_displayed(), "it complains on")


def test_a_dead_server_looks_alive(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("before")
    page.open(server.page_url)
    page.row("before")
    page.wait_for_text("#connection", "Live")
    server.stop()
    page.wait_for_text("#connection", "Server gone")
    assert page.find("#problem").is_displayed()
    assert "No answer from the server since" in page.text("#problem")
    assert page.text("#health") == "no answer"
    assert page.row("before").get_attribute("data-state") == "active"  # nobody said that it ended
    engines.sessions.clear()
    engines.used.clear()
    engines.requests = engines.prompt_tokens = 0
    server.start()
    page.wait_for_text("#connection", "Live")
    engines.request("after")
    page.row("after")
    assert not page.find("#problem").is_displayed()
    assert page.row("before").get_attribute("data-state") == "no longer listed"
    areas = "return document.querySelectorAll('.tier[data-tier=hbm] polygon.fill-empty').length"
    assert page.run(areas) == 2  # before and after, and nothing in between
    assert server.boundary("turn_end", "after")["status"] == "accepted"
    page.find('#boundaries tr[data-kind="turn_end"]')


def test_a_failing_engine_is_not_named(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("s")
    page.open(server.page_url)
    page.row("s")
    engines.error = "the engine is out of order"
    page.wait_for_text("#problem", "the engine is out of order")
    assert "503" in page.text("#problem")
    page.wait_for_text("#health", "dead")
    engines.error = None
    page.wait_for_text("#health", "ok")
    page.wait(lambda: not page.find("#problem").is_displayed(), "it complains on")
    engines.oldest_io_s = 99.0
    page.wait_for_text("#health", "stalled")
    assert "oldest transfer 99.0 s" in page.text("#health-facts")


def test_a_hanging_engine_looks_like_a_dead_server(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("s")
    page.open(server.page_url)
    page.row("s")
    engines.is_open.clear()
    page.wait_for_text("#health", "stalled")
    page.wait(lambda: "tiers: no answer within 15 s" in page.text("#problem"), "the call that hangs is not named", timeout_s=30)
    assert page.text("#connection") == "Live"
    engines.is_open.set()
    page.wait_for_text("#health", "ok")
    page.wait(lambda: not page.find("#problem").is_displayed(), "it complains on")


def test_a_workflow_that_ends_is_only_missing(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("s", workflow_id="w")
    page.open(server.page_url)
    row = page.row("s")
    event = {"message_id": "end", "kind": "workflow_end", "workflow_id": "w"}
    outcome = httpx.post(f"{server.base_url}/lifetime/v1/boundaries", json=event).json()["outcomes"][0]
    assert outcome["status"] == "accepted"
    page.wait(lambda: row.get_attribute("data-state") == "retired", "the row does not retire")
    page.find('.row .mark[data-kind="workflow_end"]')


def test_pause_does_not_spare_the_server(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    page.open(server.page_url)
    page.wait_for_text("#connection", "Live")
    page.find("#pause").click()
    assert page.find("#pause").get_attribute("aria-pressed") == "true"
    assert page.text("#connection") == "Paused"
    time.sleep(0.5)  # what was under way ends
    asked = len(engines.calls)
    engines.request("meanwhile")
    time.sleep(2.5)
    assert len(engines.calls) == asked
    assert page.all(".row") == []
    page.find("#pause").click()
    page.row("meanwhile")
    page.wait_for_text("#connection", "Live")


def test_a_thousand_sessions_hide_the_one_that_is_looked_for(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.capacity = dict.fromkeys(engines.capacity, 20_000)
    for number in range(1000):
        engines.request(f"session-{number:04d}", agent="lead", segment_class="shared", blocks=2)
    for session in engines.sessions.values():
        session.touched_s -= 60
    engines.request("session-0500", agent="lead", segment_class="reviewer", blocks=2)
    page.open(server.page_url)
    page.row("session-0500")
    page.find('.row rect[data-class="reviewer"]')
    assert len(page.all(".row")) == 50
    assert page.text("#more-sessions").startswith("950 more")
    assert page.text("#sessions-note").startswith("1,000 listed")
    # Segments of the rows that are shown only, however many sessions there are.
    page.wait(lambda: len(page.all(".row rect")) >= 50, "no segments")
    page.find("#find").send_keys("session-0007")
    page.wait(lambda: len(page.all(".row")) == 1, "it is not found")
    page.wait(lambda: page.all('.row rect[data-class="shared"]'), "its segment is not shown")
    page.find("#find").send_keys("nobody")
    page.wait_for_text("#more-sessions", "No session of that name.")
    assert server.boundary("session_end", "session-0007")["status"] == "accepted"
    page.wait_for_text("#sessions-note", "999 listed")


def test_rates_are_not_those_of_the_counters(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("s", blocks=30)  # long before anybody looked: none of it was a hit
    page.open(server.page_url)
    page.wait_for_text("#hit-note", "none in the last 30 s")
    assert page.text('#hit-legend tr[data-tier="hbm"] .num') == "\u2013"
    engines.request("s", blocks=10)  # 30 of 40 blocks are found
    page.wait(lambda: page.text('#hit-legend tr[data-tier="hbm"] .num') == "75%", "no hit rate")
    assert page.text('#hit-legend tr[data-tier="hbm"] .num.soft') == "43%"  # 30 of 70
    page.find("#hit-plot polygon.fill-hbm")
    engines.written["host"] += 64 * BLOCK_BYTES
    page.wait(lambda: page.text('#bytes-legend tr[data-tier="host"] .num.soft') == "8.0 MiB", "no bytes")
    page.wait(lambda: "iB" in page.text('#bytes-legend tr[data-tier="host"] .num'), "no rate")
    page.find("#bytes-plot polygon.fill-host")
    engines.written.clear()
    engines.hits.clear()
    engines.prompt_tokens = 0  # another engine counts from the beginning
    page.wait(lambda: page.text('#bytes-legend tr[data-tier="host"] .num') == "\u2013", "a rate over a restart")
    assert "-" not in page.text("#hit-legend") + page.text("#bytes-legend")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_the_page_is_wider_than_the_screen(
    page: Page, server: DashboardServer, engines: MovingEngines, width: int, height: int
) -> None:
    engines.request("x" * 256, workflow_id="y" * 256, agent="z" * 256, agent_id="a" * 256)
    server.boundary("turn_end", "x" * 256)
    page.resize(width, height)
    page.open(server.page_url)
    page.row("x" * 256)
    page.find(".row button.name").click()
    page.find("#boundaries tr")
    assert page.run("return document.documentElement.scrollWidth") <= width
    grounds = set()
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        grounds.add(page.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2


def test_the_keyboard_does_not_reach_everything(page: Page, server: DashboardServer, engines: MovingEngines) -> None:
    engines.request("s")
    page.open(server.page_url)
    page.row("s")
    reached = []
    for _ in range(8):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.run("return document.activeElement.id || document.activeElement.className"))
    assert reached[:6] == ["window", "pause", "most", "find", "name", "boundaries-scroll"]
    nameless = """
        const controls = [...document.querySelectorAll('button, select, input')];
        return controls.filter((control) => !(control.textContent.trim() || control.labels?.length)).length;
    """
    assert page.run(nameless) == 0
    labels = page.run("return [...document.querySelectorAll('[role=img]')].map((plot) => plot.getAttribute('aria-label'))")
    assert len(labels) == 5 and all(labels)
