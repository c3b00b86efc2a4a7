# SPDX-License-Identifier: Apache-2.0
"""The load of boundary events: valid events, an honest open loop, and figures that say what was measured."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks import boundary_load
from benchmarks.boundary_load import (
    Bench,
    Events,
    Latency,
    Load,
    Window,
    as_tables,
    give_workers_their_cores,
    read_events,
    read_latency,
    summarize,
)
from benchmarks.boundary_load_generator import (
    Connection,
    Generator,
    make_answer,
    make_events,
    make_request,
    split_events,
    split_message,
)
from benchmarks.server import ServerError
from vllm_lifetime.boundaries import Boundary, BoundaryKind

ANSWER = make_answer()
GENERATOR = [sys.executable, "-m", "benchmarks.boundary_load_generator"]


# ---------------------------------------------------------------------- events and requests


def test_every_event_is_valid_and_every_kind_but_workflow_end_is_there() -> None:
    events = [Boundary.model_validate(event) for event in make_events(500, ["a", "b", "c"], "run", 1e9)]
    assert {event.kind for event in events} == set(BoundaryKind) - {BoundaryKind.WORKFLOW_END}
    assert len({event.message_id for event in events}) == 500
    assert [event.session_id for event in events[:4]] == ["a", "b", "c", "a"]


def test_each_session_goes_through_its_kinds_in_order() -> None:
    events = make_events(60, ["a", "b", "c"], "run")
    of_a = [event["kind"] for event in events if event["session_id"] == "a"]
    assert of_a[0] == "session_start" and of_a[9] == "session_end" and of_a[10] == "session_start"
    of_b = [event["kind"] for event in events if event["session_id"] == "b"]
    assert of_b[:9] == of_a[1:10]


def test_a_request_is_whole_http() -> None:
    event = {"message_id": "é", "kind": "turn_end", "session_id": "s"}
    request = make_request(8000, [event])
    head, body, total = split_message(request) or (b"", b"", 0)
    assert head.startswith(b"post /lifetime/v1/boundaries http/1.1")
    assert (json.loads(body), total) == (event, len(request))
    assert head.endswith(b"prefer: respond-async")
    head, body, _ = split_message(make_request(8000, [event, event], respond_async=False)) or (b"", b"", 0)
    assert json.loads(body) == [event, event] and b"prefer" not in head


def test_a_message_is_read_when_it_is_whole_and_not_before() -> None:
    for cut in range(len(ANSWER)):
        assert split_message(ANSWER[:cut]) is None
    head, body, total = split_message(ANSWER + ANSWER[:10]) or (b"", b"", 0)
    assert (int(head[9:12]), total) == (202, len(ANSWER))
    assert json.loads(body)["outcomes"][0]["status"] == "ignored"


# ---------------------------------------------------------------------- the generator against small servers


class Answering(asyncio.Protocol):
    """Answers a request after `delay_s` with `answer`; without an answer it hangs up."""

    delay_s = 0.0
    answer: bytes | None = ANSWER

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.buffer = b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (message := split_message(self.buffer)) is not None:
            self.buffer = self.buffer[message[2] :]
            if self.answer is None:
                self.transport.close()
            else:
                asyncio.get_running_loop().call_later(self.delay_s, self.transport.write, self.answer)


def generate(protocol: type[Answering], count: int, rate: float, connections: int, events_per_post: int = 1) -> dict[str, Any]:
    """Send `count` events to a server of `protocol`; return the report."""

    async def run() -> dict[str, Any]:
        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        posts = split_events(make_events(count, ["a"], "r"), events_per_post)
        generator = Generator(port, [make_request(port, post) for post in posts], rate, count, events_per_post)
        await generator.connect(connections)
        await generator.run()
        server.close()
        return generator.report()

    return asyncio.run(run())


def test_every_event_is_sent_at_its_rate_and_answered() -> None:
    report = generate(Answering, 200, 400.0, 8)
    assert (report["statuses"], report["outcomes"]) == ({"202": 200}, {"ignored": 200})
    assert 0.45 < report["wall_s"] < 2.0
    assert len(report["from_due_us"]) == len(report["from_sent_us"]) == 200


def test_a_post_of_many_events_is_due_with_the_last_of_them() -> None:
    due_s: list[float] = []

    class Recording(Answering):
        answer = make_answer(10)

        def data_received(self, data: bytes) -> None:
            due_s.append(asyncio.get_running_loop().time())
            super().data_received(data)

    report = generate(Recording, 205, 400.0, 8, events_per_post=10)
    assert report["statuses"] == {"202": 205} and report["answered"] == report["events"] == 205
    assert len(report["from_due_us"]) == len(due_s) == 21
    # The first when its tenth event is due, the last, of five, when event 205 is.
    assert due_s[-1] - due_s[0] == pytest.approx(195 / 400, abs=0.1)
    assert 0.5 < report["wall_s"] < 2.0
    assert min(report["from_due_us"]) >= 0
    assert read_events(report | {"cpu_s": 0.1}).rate == pytest.approx(400, rel=0.3)


def test_a_late_answer_counts_from_when_the_event_was_due() -> None:
    """Two connections and 50 ms per answer carry 40 events a second; at 200 the wait for a connection must be seen."""

    class Slow(Answering):
        delay_s = 0.05

    report = generate(Slow, 100, 200.0, 2)
    assert report["statuses"] == {"202": 100}
    assert 2.0 < report["wall_s"] < 6.0
    assert max(report["from_due_us"]) > 1_500_000
    assert sorted(report["from_sent_us"])[50] < 500_000


def test_what_goes_wrong_is_counted() -> None:
    class Busy(Answering):
        answer = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"

    report = generate(Busy, 20, 400.0, 2)
    assert (report["statuses"], report["outcomes"]) == ({"429": 20}, {"none": 20})


def test_a_server_that_hangs_up_is_connected_to_again() -> None:
    class HangsUp(Answering):
        answer = None

    report = generate(HangsUp, 10, 100.0, 2)
    assert report["statuses"] == {"connection lost": 10}
    assert report["reconnects"] >= 8
    assert report["from_due_us"] == []
    assert read_events(report | {"cpu_s": 0.1}).failed == 10


def test_what_is_never_answered_ends_the_run_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Answering):
        delay_s = 60.0

    monkeypatch.setattr("benchmarks.boundary_load_generator.GRACE_S", 0.3)
    report = generate(Silent, 10, 100.0, 4)
    assert report["statuses"] == {"unanswered": 10}
    assert read_events(report | {"cpu_s": 0.1}).rate == 0.0


def test_many_events_that_go_wrong_count_each() -> None:
    class Busy(Answering):
        answer = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"

    report = generate(Busy, 25, 400.0, 2, events_per_post=10)
    assert (report["statuses"], report["outcomes"]) == ({"429": 25}, {"none": 25})


@pytest.fixture
def sink() -> Iterator[str]:
    """The port of a sink process."""
    process = subprocess.Popen([*GENERATOR, "sink"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    yield process.stdout.readline().strip()
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


def test_the_processes_work_together(sink: str) -> None:
    command = [*GENERATOR, "send", "--port", sink, "--rate", "300", "--seconds", "1", "--connections", "4"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    output, _ = process.communicate("go\n", timeout=30)
    events = read_events(json.loads(output))
    assert (events.due, events.failed, events.statuses) == (300, 0, {"202": 300})
    assert events.rate == pytest.approx(300, rel=0.1)
    assert 0 < events.generator_cpu < 1
    assert 0 < events.from_sent.p50_ms <= events.from_sent.p99_ms <= events.from_sent.max_ms


def test_the_processes_work_together_on_lists(sink: str) -> None:
    command = [*GENERATOR, "send", "--port", sink, "--rate", "300", "--seconds", "1", "--events-per-post", "7"]
    done = subprocess.run([*command, "--no-respond-async"], input="go\n", capture_output=True, text=True, timeout=30)
    ready, output = done.stdout.splitlines()
    report = json.loads(output)
    assert ready == "ready" and report["outcomes"] == {"ignored": 300}
    assert (report["answered"], len(report["from_due_us"])) == (300, 43)


def test_too_many_events_are_refused(sink: str) -> None:
    command = [*GENERATOR, "send", "--port", sink, "--rate", "1e6", "--seconds", "60"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "1000000" in done.stderr
    app = typer.Typer()
    app.command()(boundary_load.main)
    result = CliRunner().invoke(app, ["--rate", "20000", "--seconds", "600"])
    assert result.exit_code == 2 and "12,000,000" in result.output


def test_connections_take_turns() -> None:
    """One that is left idle would be closed by the server."""

    async def run() -> Counter[int]:
        used: Counter[int] = Counter()

        class Counting(Answering):
            def data_received(self, data: bytes) -> None:
                used[id(self)] += 1
                super().data_received(data)

        server = await asyncio.get_running_loop().create_server(Counting, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        generator = Generator(port, [make_request(port, [event]) for event in make_events(40, ["a"], "r")], 400.0)
        await generator.connect(4)
        await generator.run()
        server.close()
        return used

    assert list(asyncio.run(run()).values()) == [10] * 4


def test_a_connection_that_was_lost_is_not_used() -> None:
    assert not Connection(None).is_open  # type: ignore[arg-type]


# ---------------------------------------------------------------------- figures


def make_window(mode: str, tokens_per_s: float, p50_ms: float | None = None, failed: int = 0) -> Window:
    events = None
    if p50_ms is not None:
        latency = Latency(p50_ms, 10 * p50_ms, 20 * p50_ms)
        events = Events(100, {"202": 100 - failed, "503": failed}, {}, 99.0, latency, latency, 0.1, 0)
    return Window(mode, 10.0, tokens_per_s, 0.2, 0.9, 0.0234, events)


WINDOWS = [
    make_window("off", 100.0), make_window("on", 90.0, 1.0), make_window("sink", 95.0, 0.1),
    make_window("off", 200.0), make_window("on", 198.0, 3.0, failed=2), make_window("sink", 199.0, 0.1),
    make_window("off", 100.0), make_window("on", 95.0, 2.0), make_window("sink", 96.0, 0.1),
]  # fmt: skip


def test_percentiles_are_nearest_rank() -> None:
    assert read_latency([float(value) for value in range(1000, 101_000, 1000)]) == Latency(50.0, 99.0, 100.0)
    assert read_latency([7000.0]) == Latency(7.0, 7.0, 7.0)


def test_ratios_compare_neighbours_and_medians_ignore_one_bad_repeat() -> None:
    report = summarize(WINDOWS)
    assert report["on/off"] == {"median": 0.95, "each": [0.9, 0.99, 0.95]}
    assert report["on/sink"]["each"] == pytest.approx([90 / 95, 198 / 199, 95 / 96])
    assert report["tokens_per_s"] == {"off": 100.0, "on": 95.0, "sink": 96.0}
    assert report["from_due"] == {"p50_ms": 2.0, "p99_ms": 20.0, "max_ms": 60.0}
    assert report["failed"] == 2


def test_the_tables_show_every_window_and_every_failure() -> None:
    console = Console(width=100, record=True, file=io.StringIO())
    for table in as_tables(WINDOWS, summarize(WINDOWS), Load(1000.0, 128, 10, respond_async=False)):
        console.print(table)
    text = console.export_text()
    assert "1000 events/s, 10 per POST, wait" in text
    assert "0.900, 0.990, 0.950" in text
    assert "198.0" in text and "60.0 ms" in text and "2.34%" in text


# ---------------------------------------------------------------------- processes


SERVER = """
import subprocess, sys
worker = "import os, sys; os.sched_setaffinity(0, {%d}); print('bound', flush=True); sys.stdin.read()  # Worker"
child = subprocess.Popen([sys.executable, "-c", worker % int(sys.argv[1])], stdin=sys.stdin)
child.wait()
"""


def test_the_worker_keeps_its_core_and_all_else_leaves_it() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    core = min(before)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(core)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == "bound\n"
        api = psutil.Process(server.pid)
        assert give_workers_their_cores(api) == [core]
        assert os.sched_getaffinity(api.children()[0].pid) == {core}
        assert os.sched_getaffinity(server.pid) == os.sched_getaffinity(0) == before - {core}
    finally:
        os.sched_setaffinity(0, before)
        server.communicate()


def test_nothing_is_moved_when_no_worker_is_bound() -> None:
    before = os.sched_getaffinity(0)
    assert give_workers_their_cores(psutil.Process()) == []
    assert os.sched_getaffinity(0) == before


def test_a_generator_without_a_report_is_an_error_that_says_so() -> None:
    async def run() -> None:
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "raise SystemExit(3)", stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with pytest.raises(ServerError, match="exit code 3 and no report"):
            await Bench._read_report(sender)

    asyncio.run(run())
