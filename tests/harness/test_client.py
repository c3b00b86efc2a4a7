# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from fake_lifetime_server import FakeLifetimeServer, find_dead_url, wait_until

from vllm_lifetime.boundaries import BoundaryKind, Spawn
from vllm_lifetime.harness import ClientStats, LifetimeClient
from vllm_lifetime.harness.client import EXIT_TIMEOUT_S


@pytest.fixture
def server() -> Iterator[FakeLifetimeServer]:
    with FakeLifetimeServer() as running:
        yield running


def count_threads() -> int:
    return sum(thread.name == "vllm-lifetime" for thread in threading.enumerate())


def total(stats: ClientStats) -> int:
    return stats.queued + stats.sent + stats.dropped + stats.failed + stats.refused


def test_what_is_reported_arrives(server: FakeLifetimeServer) -> None:
    before_s = time.time()
    with LifetimeClient(server.url) as client:
        client.boundary(
            "subagent_spawn",
            session_id="s",
            workflow_id="w",
            agent="coder",
            agent_id="c1",
            parent_agent_id="p",
            spawn={"instruction": "write", "tools": ["edit"], "position": 2},
        )
        client.boundary(BoundaryKind.COMPACTION, session_id="s", expected_return_s=0, turn=3, message_id="mine")
        client.boundary("subagent_spawn", session_id="s", spawn=Spawn(model="m"))
        assert client.flush(60)
        assert client.stats == ClientStats(sent=3)
    first, second, third = server.events
    assert before_s <= first.pop("sent_at_s") <= time.time()
    assert len(first.pop("message_id")) == 32
    assert first == {
        "kind": "subagent_spawn",
        "session_id": "s",
        "workflow_id": "w",
        "agent": "coder",
        "agent_id": "c1",
        "parent_agent_id": "p",
        "spawn": {"instruction": "write", "tools": ["edit"], "position": 2},
    }
    assert (second["message_id"], second["expected_return_s"], second["turn"]) == ("mine", 0, 3)
    assert third["spawn"]["model"] == "m"


@pytest.mark.parametrize("is_async", [True, False])
def test_no_outcome_is_waited_for_and_either_answer_is_fine(server: FakeLifetimeServer, is_async: bool) -> None:
    server.is_async = is_async
    with LifetimeClient(server.url) as client:
        for turn in range(3):
            client.boundary("turn_end", session_id="s", turn=turn)
        assert client.flush(60)
        assert client.stats == ClientStats(sent=3)
    assert set(server.preferences) == {"respond-async"}


def test_events_that_wait_go_as_one_list_in_order(server: FakeLifetimeServer) -> None:
    server.is_open.clear()
    with LifetimeClient(server.url, batch_size=50, timeout_s=60) as client:
        for turn in range(101):
            client.boundary("turn_end", session_id="s", turn=turn)
        server.is_open.set()
        assert client.flush(60)
    assert [event["turn"] for event in server.events] == list(range(101))
    assert server.requests <= 4
    assert max(len(batch) for batch in server.batches) == 50


def test_nothing_is_started_before_the_first_event() -> None:
    before = count_threads()
    client = LifetimeClient(find_dead_url())
    assert client.flush(0)
    assert count_threads() == before
    client.boundary("turn_end", session_id="s")
    client.boundary("turn_end", session_id="s")
    assert count_threads() == before + 1
    client.close()
    assert count_threads() == before


def test_boundary_takes_microseconds_while_the_server_is_dead_or_slow(server: FakeLifetimeServer) -> None:
    server.is_open.clear()
    for url in (server.url, find_dead_url()):
        client = LifetimeClient(url, queue_size=100_000, timeout_s=60)
        durations_s = []
        for turn in range(2000):
            start_s = time.perf_counter()
            client.boundary("turn_end", session_id="s", agent="planner", turn=turn)
            durations_s.append(time.perf_counter() - start_s)
            if turn % 20 == 0:
                time.sleep(0.001)  # an agent does something between its events, so the sender runs in between
        client.close(0)
        # Some calls wait for their turn on a loaded machine; one that waited for the server would take a minute.
        assert sorted(durations_s)[int(len(durations_s) * 0.9)] < 1e-3
        assert max(durations_s) < 10


def test_a_dead_server_loses_nothing_once_it_is_there(server: FakeLifetimeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.stop()
    with LifetimeClient(server.url) as client:
        for turn in range(5):
            client.boundary("turn_end", session_id="s", turn=turn)
        assert not client.flush(0.5)
        wait_until(lambda: "cannot be reached" in caplog.text)
        assert client.stats == ClientStats(queued=5)
        server.start()
        assert client.flush(60)
        assert client.stats == ClientStats(sent=5)
    assert [event["turn"] for event in server.events] == list(range(5))
    (record,) = caplog.records
    assert "cannot be reached" in record.message and server.url in record.message


def test_it_reconnects_by_itself_and_after_every_restart(server: FakeLifetimeServer) -> None:
    with LifetimeClient(server.url) as client:
        for turn in range(3):
            client.boundary("turn_end", session_id="s", turn=turn)
            wait_until(lambda turn=turn: client.stats.sent == turn + 1)  # type: ignore[misc]
            server.stop()
            server.start()
    assert [event["turn"] for event in server.events] == [0, 1, 2]


@pytest.mark.parametrize("status", [503, 502, 429, 500])
def test_an_event_is_sent_again_with_the_same_id_until_it_is_taken(server: FakeLifetimeServer, status: int) -> None:
    server.statuses = [status, status, status]
    with LifetimeClient(server.url) as client:
        client.boundary("turn_end", session_id="s", message_id="m")
        wait_until(lambda: client.stats.sent == 1)
    assert server.requests == 4
    assert [event["message_id"] for event in server.events] == ["m"]


def test_an_event_on_which_the_server_fails_each_time_does_not_hold_up_the_rest(server: FakeLifetimeServer) -> None:
    server.statuses = [500] * 5
    with LifetimeClient(server.url) as client:
        client.boundary("turn_end", session_id="s", turn=0)
        wait_until(lambda: client.stats.failed == 1)
        client.boundary("turn_end", session_id="s", turn=1)
        assert client.flush(60)
        assert client.stats == ClientStats(sent=1, failed=1)


def test_a_wrong_token_is_said_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    with FakeLifetimeServer(token="right") as server, LifetimeClient(server.url, token="wrong") as client:
        for _ in range(3):
            client.boundary("turn_end", session_id="s")
            assert client.flush(60)
        assert client.stats == ClientStats(refused=3)
        assert server.requests == 3
    (record,) = caplog.records
    assert "401" in record.message and "VLLM_LIFETIME_TOKEN" in record.message
    assert "wrong" not in record.message


def test_url_and_token_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeLifetimeServer(token="right") as server:
        monkeypatch.setenv("VLLM_LIFETIME_URL", server.url + "/v1/")
        monkeypatch.setenv("VLLM_LIFETIME_TOKEN", "right\n")
        with LifetimeClient() as client:
            client.boundary("turn_end", session_id="s")
            assert client.flush(60)
            assert client.stats == ClientStats(sent=1)


def test_a_server_without_lifetime_is_named(server: FakeLifetimeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.statuses = [404]
    with LifetimeClient(server.url) as client:
        client.boundary("turn_end", session_id="s")
        assert client.flush(60)
        assert client.stats == ClientStats(refused=1)
    assert "--kv-connector lifetime" in caplog.text


def test_one_wrong_event_does_not_take_the_others_of_its_list_with_it(server: FakeLifetimeServer) -> None:
    server.is_wrong = lambda event: event["turn"] == 7
    server.statuses = [503]
    with LifetimeClient(server.url) as client:
        for turn in range(20):
            client.boundary("turn_end", session_id="s", turn=turn)
        assert client.flush(60)
        assert client.stats == ClientStats(sent=19, refused=1)
        client.boundary("turn_end", session_id="s", turn=20)
        client.boundary("turn_end", session_id="s", turn=21)
        assert client.flush(60)
    assert [event["turn"] for event in server.events] == [turn for turn in range(22) if turn != 7]


def test_an_event_that_the_server_rejects_is_counted_as_refused(server: FakeLifetimeServer) -> None:
    server.is_rejected = lambda event: event["turn"] == 1
    with LifetimeClient(server.url) as client:
        for turn in range(3):
            client.boundary("turn_end", session_id="s", turn=turn)
        assert client.flush(60)
        assert client.stats == ClientStats(sent=2, refused=1)


def test_a_list_never_exceeds_what_the_server_reads(server: FakeLifetimeServer) -> None:
    server.delay_s = 0.1
    with LifetimeClient(server.url) as client:
        for _ in range(40):
            client.boundary("subagent_spawn", session_id="s", spawn={"instruction": "x" * 65_000, "context": "y" * 65_000})
        assert client.flush(60)
        assert client.stats == ClientStats(sent=40)
    assert server.requests >= 5
    assert max(len(batch) for batch in server.batches) <= 8


def test_a_full_queue_drops_the_newest_and_says_so_once(server: FakeLifetimeServer, caplog: pytest.LogCaptureFixture) -> None:
    server.stop()
    client = LifetimeClient(server.url, queue_size=4)
    for turn in range(10):
        client.boundary("turn_end", session_id="s", turn=turn)
    assert client.stats == ClientStats(queued=4, dropped=6)
    assert caplog.text.count("dropped") == 1
    server.start()
    assert client.flush(60)
    client.close()
    assert [event["turn"] for event in server.events] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kind": "over", "session_id": "s"}, "kind"),
        ({"kind": "turn_end"}, "session_id"),
        ({"kind": "turn_end", "session_id": 7}, "session_id"),
        ({"kind": "turn_end", "session_id": "s" * 300}, "session_id"),
        ({"kind": "turn_end", "session_id": "s", "expected_return_s": float("nan")}, "expected_return_s"),
        ({"kind": "turn_end", "session_id": "s", "spawn": {"task": 1}}, "spawn.task"),
        ({"kind": "turn_end", "session_id": "s", "spawn": object()}, "spawn"),
        ({"kind": "turn_end", "session_id": "\ud800"}, "session_id: Input should be a valid string"),
        (
            {
                "kind": "subagent_spawn",
                "session_id": "s",
                "spawn": {"instruction": "\1" * 65_536, "context": "\1" * 65_536, "tools": ["\1" * 256] * 256},
            },
            "1048576 bytes",
        ),
    ],
)
def test_a_wrong_argument_never_breaks_the_agent(
    server: FakeLifetimeServer, caplog: pytest.LogCaptureFixture, arguments: dict[str, object], said: str
) -> None:
    with LifetimeClient(server.url) as client:
        for _ in range(3):
            client.boundary(**arguments)  # type: ignore[arg-type]
        assert client.stats == ClientStats(refused=3)
    (record,) = caplog.records
    assert said in record.message
    assert server.requests == 0


def test_close_waits_for_a_slow_server_but_not_longer_than_told(server: FakeLifetimeServer) -> None:
    server.is_open.clear()
    client = LifetimeClient(server.url, timeout_s=60)
    client.boundary("session_end", session_id="s")
    closing = threading.Thread(target=client.close, args=(60,))
    closing.start()
    wait_until(lambda: server.requests == 1)
    closing.join(0.1)
    assert closing.is_alive()
    server.is_open.set()
    closing.join(60)
    assert client.stats == ClientStats(sent=1)
    server.is_open.clear()
    client = LifetimeClient(server.url, timeout_s=60)
    client.boundary("session_end", session_id="s")
    start_s = time.monotonic()
    client.close(0.2)
    assert time.monotonic() - start_s < 30
    assert client.stats == ClientStats(failed=1)


def test_close_does_not_wait_for_a_dead_server(caplog: pytest.LogCaptureFixture) -> None:
    client = LifetimeClient(find_dead_url())
    client.boundary("session_end", session_id="s")
    wait_until(lambda: "cannot be reached" in caplog.text)
    start_s = time.monotonic()
    client.close(120)
    assert time.monotonic() - start_s < 60
    client.boundary("session_end", session_id="s")
    client.close()
    assert client.stats == ClientStats(failed=1, dropped=1)


def test_events_from_many_threads_are_each_counted_once(server: FakeLifetimeServer) -> None:
    with LifetimeClient(server.url, queue_size=300) as client:

        def report(name: str) -> None:
            for turn in range(100):
                client.boundary("turn_end", session_id=name, turn=turn)

        threads = [threading.Thread(target=report, args=(f"s{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client.flush(60)
        assert total(client.stats) == 800
        assert client.stats.sent == len(server.events)
        assert client.stats.sent + client.stats.dropped == 800
    for name in {event["session_id"] for event in server.events}:
        turns = [event["turn"] for event in server.events if event["session_id"] == name]
        assert turns == sorted(turns)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_sends_its_own_events_and_none_of_the_parents(server: FakeLifetimeServer) -> None:
    server.stop()
    code = """
import multiprocessing, os, sys
from vllm_lifetime.harness import LifetimeClient, client as module
module.EXIT_TIMEOUT_S = 60
client = LifetimeClient(sys.argv[1], timeout_s=60)
client.boundary("turn_end", session_id="parent")
ready_out, ready_in = os.pipe()
def work():
    client.boundary("turn_end", session_id="worker")
    os.write(1, b"worker %d\\n" % client.stats.queued)
    os.read(ready_out, 1)
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
pid = os.fork()
if pid == 0:
    client.boundary("turn_end", session_id="child")
    os.write(1, b"child %d\\n" % client.stats.queued)
    os.read(ready_out, 1)
    os._exit(not client.flush(60))
os.write(1, b"parent %d\\n" % client.stats.queued)
sys.stdin.readline()
os.write(ready_in, b"go")
child.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code, server.url], text=True, **pipes)
    assert process.stdout is not None
    said = {process.stdout.readline().strip() for _ in range(3)}
    assert said == {"worker 1", "child 1", "parent 1"}
    server.start()
    _, errors = process.communicate("\n", timeout=120)
    assert process.returncode == 0, errors
    assert sorted(event["session_id"] for event in server.events) == ["child", "parent", "worker"]


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120)


SCRIPT = """
import sys
from vllm_lifetime.harness import LifetimeClient
client = LifetimeClient(sys.argv[1])
client.boundary("session_end", session_id="s")
"""


PATIENCE = "import vllm_lifetime.harness.client as module\nmodule.EXIT_TIMEOUT_S = 60\n"
"""A loaded machine may need longer than a user should wait."""


def test_a_script_that_just_ends_still_says_so(server: FakeLifetimeServer) -> None:
    server.delay_s = 0.3
    done = run_script(PATIENCE + SCRIPT.replace("argv[1]", "argv[1], timeout_s=60"), server.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(server.events) == 1


def test_an_event_reported_at_exit_is_sent(server: FakeLifetimeServer) -> None:
    code = PATIENCE + (
        "import atexit, sys\nfrom vllm_lifetime.harness import LifetimeClient\n"
        "client = LifetimeClient(sys.argv[1], timeout_s=60)\n"
        "atexit.register(client.boundary, 'session_end', session_id='s')\n"
    )
    done = run_script(code, server.url)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(server.events) == 1


def test_a_dead_or_stuck_server_holds_up_the_exit_only_briefly(server: FakeLifetimeServer) -> None:
    # What is registered first runs last. Without a limit the exit would wait for the answer.
    before = "import atexit, time\natexit.register(lambda: print(time.monotonic() - ended_s))\n"
    server.is_open.clear()
    for url in (find_dead_url(), server.url):
        code = before + SCRIPT.replace("argv[1]", "argv[1], timeout_s=60") + "ended_s = time.monotonic()\n"
        done = run_script(code, url)
        assert done.returncode == 0
        assert "could not be sent" in done.stderr
        assert float(done.stdout) < EXIT_TIMEOUT_S + 20


def test_the_import_needs_neither_vllm_nor_torch() -> None:
    done = run_script(
        "import sys, vllm_lifetime.harness; print(sorted({'vllm', 'torch', 'numpy', 'fastapi'} & set(sys.modules)))"
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://host:8000", "http://host:8000"),
        ("http://host:8000/", "http://host:8000"),
        ("http://host:8000/v1", "http://host:8000"),
        (" https://host/gateway/v1/ ", "https://host/gateway"),
        ("http://host/lifetime/v1", "http://host"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_the_servers_root_is_found_in_the_url(given: str, used: str) -> None:
    assert LifetimeClient(given)._url == f"{used}/lifetime/v1/boundaries"


@pytest.mark.parametrize("url", ["localhost:8000", "/v1", "ftp://host", "http://", "http://host:port", "unix:///socket"])
def test_what_is_no_url_of_a_server_is_said_at_once(url: str) -> None:
    with pytest.raises(ValueError, match="not a URL of a server"):
        LifetimeClient(url)


def test_a_token_that_no_header_can_hold_is_said_at_once_and_not_shown() -> None:
    with pytest.raises(ValueError, match="VLLM_LIFETIME_TOKEN") as caught:
        LifetimeClient(token="sec\nret")
    assert "ret" not in str(caught.value).replace("header", "")
    with pytest.raises(ValueError, match="queue_size"):
        LifetimeClient(queue_size=0)


def test_a_client_that_cannot_be_made_is_tried_again(
    server: FakeLifetimeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: object
) -> None:
    """An environment can hold what stops httpx: certificates that are not there, a proxy that is none."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("SSL_CERT_FILE", f"{tmp_path}/missing.pem")
    with LifetimeClient(server.url) as client:
        client.boundary("turn_end", session_id="s")
        assert not client.flush(0.3)
        assert client.stats == ClientStats(queued=1)
        monkeypatch.delenv("SSL_CERT_FILE")
        assert client.flush(60)
        assert client.stats == ClientStats(sent=1)
