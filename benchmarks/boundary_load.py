# SPDX-License-Identifier: Apache-2.0
"""What a stream of boundary events costs: decode throughput with and without, and how long each event takes.

One real server with the lifetime connector decodes several streams without pause. Its worker has the core that vLLM bound it to
for itself; the API server, EngineCore and the generator share the others. Windows of three kinds take turns: `off` (no events),
`on` (RATE events per second, by default one per POST) and `sink` (the same events to a process that only answers: what
the generator costs on the same machine). The generator is a process of its own and sends in open loop: a POST is sent when the
last of its events is due, whether or not the ones before have been answered, and its latency counts from when it was due.

    python -m benchmarks.boundary_load --rate 1000 --seconds 60 --repeats 3
    python -m benchmarks.boundary_load --rate 1000 --events-per-post 10 --wait
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.agent_workload import FIRST_TOKEN
from benchmarks.boundary_load_generator import GRACE_S, MAX_EVENTS, PATH
from benchmarks.demo import Settings, machine, versions
from benchmarks.report import percentile
from benchmarks.server import ServerError, VllmServer, metric_sum, parse_metrics
from vllm_lifetime.boundaries import MAX_BATCH

console = Console()

MODES = ("off", "on", "sink")
WARM_UP_S = 5.0
SETTLE_S = 2.0
"""Seconds that the streams run before a window begins."""

STREAM_TOKENS = 2000
"""Tokens of one answer; the next one follows at once."""

PROMPT_TOKENS = 64
SESSIONS = 200
"""Sessions that the events are about. Each has a prompt in the cache before a window, which its first end retires."""

SESSION_PREFIX = "load-"
REPORT_TIMEOUT_S = 60.0
"""Seconds beside `GRACE_S` for the generator to end: on busy cores its last answers and its report take long."""

READY_TIMEOUT_S = 60.0
STYLE: dict[str, Any] = {"box": SIMPLE_HEAD, "collapse_padding": True, "pad_edge": False}


@dataclass(frozen=True)
class Load:
    """The events of a run."""

    rate: float
    """Events per second."""

    connections: int
    events_per_post: int = 1
    respond_async: bool = True
    """Ask for an answer before the engines have acted."""

    def __str__(self) -> str:
        """Say so in a title."""
        return f"{self.rate:g} events/s, {self.events_per_post} per POST, {'respond-async' if self.respond_async else 'wait'}"


@dataclass(frozen=True)
class Latency:
    """The distribution of one run's latencies, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True)
class Events:
    """What became of one run's events."""

    due: int
    statuses: dict[str, int]
    outcomes: dict[str, int]
    rate: float
    """Events answered per second, until the last answer."""

    from_due: Latency
    from_sent: Latency
    generator_cpu: float
    """CPU seconds of the generator per second."""

    reconnects: int

    @property
    def failed(self) -> int:
        """Events that were not answered with 202."""
        return self.due - self.statuses.get("202", 0)


@dataclass(frozen=True)
class Window:
    """One window."""

    mode: str
    seconds: float
    tokens_per_s: float
    api_cpu: float
    """CPU seconds of the API server's process per second."""

    engine_cpu: float
    """CPU seconds of EngineCore and workers per second."""

    calls_s: float = 0.0
    """Processor seconds per second that the scheduler thread spent on events: what decoding loses on any machine."""

    events: Events | None = None


def read_latency(microseconds: Sequence[float]) -> Latency:
    """The nearest-rank percentiles."""
    p50, p99, longest = (percentile(microseconds, share) / 1000 for share in (0.5, 0.99, 1.0))
    return Latency(p50, p99, longest)


def read_events(report: dict[str, Any]) -> Events:
    """The generator's report, condensed."""
    answered = report["answered"]
    return Events(
        due=report["events"],
        statuses=report["statuses"],
        outcomes=report["outcomes"],
        rate=answered / report["wall_s"] if answered else 0.0,
        from_due=read_latency(report["from_due_us"]),
        from_sent=read_latency(report["from_sent_us"]),
        generator_cpu=report["cpu_s"] / report["wall_s"] if answered else 0.0,
        reconnects=report["reconnects"],
    )


def summarize(windows: Sequence[Window]) -> dict[str, Any]:
    """Medians by mode, and the ratio of each repeat: the windows of one repeat stand behind one another."""
    tokens = {mode: [window.tokens_per_s for window in windows if window.mode == mode] for mode in MODES}
    report: dict[str, Any] = {"tokens_per_s": {mode: statistics.median(values) for mode, values in tokens.items()}}
    for name, (above, below) in {"on/off": ("on", "off"), "sink/off": ("sink", "off"), "on/sink": ("on", "sink")}.items():
        ratios = [a / b for a, b in zip(tokens[above], tokens[below], strict=True)]
        report[name] = {"median": statistics.median(ratios), "each": ratios}
    runs = [window.events for window in windows if window.mode == "on" and window.events is not None]
    for name in ("from_due", "from_sent"):
        latencies: list[Latency] = [getattr(run, name) for run in runs]
        report[name] = {
            "p50_ms": statistics.median(latency.p50_ms for latency in latencies),
            "p99_ms": statistics.median(latency.p99_ms for latency in latencies),
            "max_ms": max(latency.max_ms for latency in latencies),
        }
    report["rate"] = statistics.median(run.rate for run in runs)
    report["failed"] = sum(run.failed for run in runs)
    return report


def give_workers_their_cores(api: psutil.Process) -> list[int]:
    """Let the server's workers alone have the cores that vLLM bound them to; move all else, this process included, to the others.

    vLLM binds a CPU worker's threads, but keeps nobody else from those cores: EngineCore, which spins while it waits for a step,
    and the API server are run there as well. Processes that this one starts later inherit its cores. Returns the workers' cores;
    empty, and nothing is moved, if no worker is bound or no core is left.
    """
    mine = os.sched_getaffinity(0)
    children = api.children(recursive=True)
    workers = [child for child in children if "Worker" in " ".join(child.cmdline())]
    bound = [os.sched_getaffinity(thread.id) for worker in workers for thread in worker.threads()]
    cores = set().union(*(some for some in bound if some != mine))
    others = mine - cores
    if not cores or not others:
        return []
    for process in [psutil.Process(), api, *children]:
        for thread in process.threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores if process in workers else others)
    return sorted(cores)


class DecodeLoad:
    """So many streams that are decoded without pause."""

    def __init__(self, server: VllmServer, streams: int) -> None:
        """Ask `server`; `start` begins."""
        self._server = server
        self._flowing = [asyncio.Event() for _ in range(streams)]
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return when every stream flows and has settled."""
        self._tasks = [asyncio.create_task(self._stream(number)) for number in range(len(self._flowing))]
        async with asyncio.timeout(READY_TIMEOUT_S):
            for flowing in self._flowing:
                await flowing.wait()
        await asyncio.sleep(SETTLE_S)

    async def stop(self) -> None:
        """End all; raise what a stream raised."""
        failed = [task for task in self._tasks if task.done()]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for task in failed:
            task.result()
        await asyncio.sleep(SETTLE_S)  # vLLM aborts what nobody reads

    async def _stream(self, number: int) -> None:
        # The first answers are of different lengths, lest all end in the same step.
        max_tokens = STREAM_TOKENS * (number + 1) // len(self._flowing)
        while True:
            await self._answer(number, max_tokens)
            max_tokens = STREAM_TOKENS

    async def _answer(self, number: int, max_tokens: int) -> None:
        """Read one answer to its end, as cheaply as can be."""
        prompt = [FIRST_TOKEN + (number * 31 + position) % 500 for position in range(PROMPT_TOKENS)]
        body = {"model": self._server.served_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        content = json.dumps(body | {"ignore_eos": True, "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        try:
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Type: application/json\r\n"
                b"X-Session-ID: stream-%d\r\nContent-Length: %d\r\n\r\n%s" % (number, len(content), content)
            )
            status = await reader.readline()
            if b" 200 " not in status:
                raise ServerError(f"a stream was answered {status!r} {await reader.read(2000)!r}")
            await reader.readuntil(b"\r\n\r\n")
            while await reader.read(1 << 16):
                self._flowing[number].set()
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def generator(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A process of `benchmarks.boundary_load_generator` and the first line that it prints. Ends when it is told or left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.boundary_load_generator", *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            first = (await process.stdout.readline()).decode().strip()
        if not first:
            raise ServerError(f"the generator ended with exit code {await process.wait()}")
        yield process, first
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Bench:
    """Measures windows on a server."""

    def __init__(self, server: VllmServer, streams: int, load: Load) -> None:
        """Measure on `server`, which runs."""
        self._server = server
        self._streams = streams
        self._load = load
        self._api = psutil.Process(server.pid)
        self._count = 0

    async def measure(self, mode: str, seconds: float) -> Window:
        """One window. Raises `ServerError`."""
        self._count += 1
        await self._seed_sessions()
        async with contextlib.AsyncExitStack() as stack:
            sender = None
            if mode != "off":
                port = str(self._server.port)
                if mode == "sink":
                    _, port = await stack.enter_async_context(generator("sink"))
                sender, _ = await stack.enter_async_context(generator("send", *self._sender_arguments(port, seconds)))
            load = DecodeLoad(self._server, self._streams)
            stack.push_async_callback(load.stop)
            await load.start()
            before = await self._read_counters()
            if sender is not None and sender.stdin is not None:
                sender.stdin.write(b"go\n")
            await asyncio.sleep(seconds)
            after = await self._read_counters()
            events = None
            if sender is not None:
                events = read_events(await self._read_report(sender))
        self._server.check_alive()
        elapsed, *counts = (b - a for a, b in zip(before, after, strict=True))
        return Window(mode, elapsed, *(count / elapsed for count in counts), events=events)

    @staticmethod
    async def _read_report(sender: asyncio.subprocess.Process) -> dict[str, Any]:
        """What the generator prints last. Raises `ServerError` if it does not end or prints none."""
        try:
            async with asyncio.timeout(GRACE_S + REPORT_TIMEOUT_S):
                output, _ = await sender.communicate()
            report: dict[str, Any] = json.loads(output)
        except TimeoutError:
            raise ServerError(f"the generator of events did not end {GRACE_S + REPORT_TIMEOUT_S:g} s after its window") from None
        except ValueError:
            raise ServerError(f"the generator of events ended with exit code {sender.returncode} and no report") from None
        return report

    def _sender_arguments(self, port: str, seconds: float) -> list[str]:
        return [
            *("--port", port),
            *("--rate", str(self._load.rate)),
            *("--seconds", str(seconds)),
            *("--events-per-post", str(self._load.events_per_post)),
            "--respond-async" if self._load.respond_async else "--no-respond-async",
            *("--connections", str(self._load.connections)),
            *("--sessions", str(SESSIONS)),
            *("--session-prefix", SESSION_PREFIX),
            *("--run", f"w{self._count}"),
        ]

    async def _read_counters(self) -> tuple[float, float, float, float, float]:
        """Now, tokens, CPU seconds of the API server, of EngineCore and workers, and seconds of events in EngineCore."""
        async with httpx.AsyncClient(base_url=self._server.base_url, timeout=30.0) as client:
            response = await client.get("/metrics")
        now = time.monotonic()
        response.raise_for_status()
        metrics = parse_metrics(response.text)
        tokens = metric_sum(metrics, "vllm:generation_tokens_total")
        calls_s = metric_sum(metrics, "vllm:lifetime_control_call_seconds_sum", call="boundaries")
        engine_cpu_s = sum(self._cpu_s(child) for child in self._api.children(recursive=True))
        return now, tokens, self._cpu_s(self._api), engine_cpu_s, calls_s

    @staticmethod
    def _cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    async def _seed_sessions(self) -> None:
        """Let each session have a prompt in the cache, so that ending it retires something."""
        limits = httpx.Limits(max_connections=self._streams)
        async with httpx.AsyncClient(base_url=self._server.base_url, timeout=60.0, limits=limits) as client:

            async def seed(number: int) -> None:
                prompt = [FIRST_TOKEN + (number * 7 + self._count * 13 + position * 3) % 500 for position in range(PROMPT_TOKENS)]
                body = {"model": self._server.served_name, "prompt": prompt, "max_tokens": 1}
                headers = {"X-Session-ID": f"{SESSION_PREFIX}{number}"}
                response = await client.post("/v1/completions", json=body, headers=headers)
                if response.status_code != 200:
                    raise ServerError(f"a request was answered {response.status_code} {response.text}")

            await asyncio.gather(*(seed(number) for number in range(SESSIONS)))


async def run_windows(bench: Bench, seconds: float, repeats: int) -> list[Window]:
    """A short window that only warms up, then all, in turns."""
    await bench.measure("on", min(WARM_UP_S, seconds))
    windows = []
    for repeat in range(repeats):
        for mode in MODES:
            with console.status(f"repeat {repeat + 1} of {repeats}: {mode}, {seconds:g} s"):
                windows.append(await bench.measure(mode, seconds))
    return windows


def as_tables(windows: Sequence[Window], report: dict[str, Any], load: Load) -> list[Table]:
    """Each window, and the medians."""
    each = Table(title=f"{load}\nEach window; cores used by each process; ms from when a POST was due", **STYLE)
    for column in ("mode", "tokens/s", "API", "engine", "in step", "sender", "events/s", "p50", "p99", "max", "failed"):
        each.add_column(column, justify="left" if column == "mode" else "right", no_wrap=True)
    for window in windows:
        cells = [window.mode, f"{window.tokens_per_s:.1f}", f"{window.api_cpu:.2f}", f"{window.engine_cpu:.2f}"]
        cells.append(f"{window.calls_s:.2%}")
        events = window.events
        if events is not None:
            cells += [f"{events.generator_cpu:.2f}", f"{events.rate:.0f}"]
            cells += [f"{ms:.1f}" if ms < 100 else f"{ms:.0f}" for ms in astuple(events.from_due)]
            cells.append(f"{events.failed:,}")
        each.add_row(*cells)
    medians = Table(title="Medians", **STYLE)
    for column in ("measure", "value", "each repeat"):
        medians.add_column(column, justify="left" if column == "measure" else "right")
    for mode in MODES:
        values = [window.tokens_per_s for window in windows if window.mode == mode]
        medians.add_row(f"tokens/s, {mode}", f"{report['tokens_per_s'][mode]:.1f}", ", ".join(f"{value:.1f}" for value in values))
    for name in ("on/off", "sink/off", "on/sink"):
        medians.add_row(f"tokens/s, {name}", f"{report[name]['median']:.3f}", ", ".join(f"{r:.3f}" for r in report[name]["each"]))
    for name, shown in (("from_due", "from when it was due"), ("from_sent", "from when it was sent")):
        for key in ("p50_ms", "p99_ms", "max_ms"):
            medians.add_row(f"POST {key.removesuffix('_ms')}, {shown}", f"{report[name][key]:.1f} ms", "")
    medians.add_row("events per second", f"{report['rate']:.1f}", "")
    medians.add_row("events not answered with 202", f"{report['failed']:,}", "")
    return [each, medians]


def main(
    rate: Annotated[float, typer.Option(help="Events per second.", min=1, max=20_000)] = 1000.0,
    seconds: Annotated[float, typer.Option(help="Length of a window.", min=1, max=600)] = 60.0,
    repeats: Annotated[int, typer.Option(help="Windows of each kind.", min=1, max=20)] = 3,
    streams: Annotated[int, typer.Option(help="Streams decoded at a time.", min=1, max=8)] = 4,
    connections: Annotated[int, typer.Option(help="Connections of the generator.", min=1, max=1024)] = 128,
    events_per_post: Annotated[int, typer.Option(help="A POST is due when its last event is.", min=1, max=MAX_BATCH)] = 1,
    respond_async: Annotated[
        bool, typer.Option("--respond-async/--wait", help="Ask for an answer at once, or for one with the outcomes.")
    ] = True,
    model_layers: Annotated[int, typer.Option(help="Layers of the model.", min=1, max=64)] = Settings.model_layers,
    model_hidden: Annotated[int, typer.Option(help="Its hidden size; 64 divides it.", min=64, max=8192)] = Settings.model_hidden,
    access_log: Annotated[bool, typer.Option(help="Let the server log each POST, which is vLLM's default.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the model and the server's log.")] = Path("build"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Measure decode throughput with and without boundary events, and the latency of the events."""
    if rate * seconds > MAX_EVENTS:
        raise typer.BadParameter(f"{rate * seconds:,.0f} events a window; the most is {MAX_EVENTS:,}: lower --rate or --seconds")
    from scripts.make_test_model import make_test_model

    load = Load(rate, connections, events_per_post, respond_async)
    settings = Settings(max_num_seqs=streams, model_layers=model_layers, model_hidden=model_hidden)
    model = make_test_model(out / "boundary-load-model", layers=settings.model_layers, hidden=settings.model_hidden)
    server = VllmServer(
        model,
        log_path=out / "boundary-load.log",
        args=settings.server_args() + ([] if access_log else ["--disable-access-log-for-endpoints", PATH]),
        env=settings.server_env(),
        connector={},
    )
    try:
        with console.status(f"starting vLLM (log: {server.log_path})"):
            server.start()
        cores = give_workers_their_cores(psutil.Process(server.pid))
        windows = asyncio.run(run_windows(Bench(server, streams, load), seconds, repeats))
    except (ServerError, httpx.HTTPError) as error:
        message = f"The benchmark failed. {type(error).__name__}: {error}\n{server.log_tail()}"
        console.print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    finally:
        server.stop()
    report = summarize(windows)
    for table in as_tables(windows, report, load):
        console.print(table)
    if json_path is not None:
        asked = asdict(load) | {"seconds": seconds, "streams": streams, "access_log": access_log, "worker_cores": cores}
        asked |= {"model_layers": model_layers, "model_hidden": model_hidden}
        where = {"machine": machine(), "versions": versions()}
        whole = report | {"settings": asked} | where | {"windows": [asdict(window) for window in windows]}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
