# SPDX-License-Identifier: Apache-2.0
"""One run of one system: start it, warm it up, replay the work, once or in turns, and keep what was measured."""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.comparison.regimes import Work
from benchmarks.comparison.systems import Running, Site, System
from benchmarks.server import ServerError
from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.plan import Plan, make_plan
from vllm_lifetime.bench.records import RequestRecord, RunRecord
from vllm_lifetime.bench.report import find_problems, summarize
from vllm_lifetime.bench.run import run_bench
from vllm_lifetime.bench.server import ServerError as BenchError
from vllm_lifetime.traces.generate import generate_workload

__all__ = ["FAILURES", "Result", "bytes_written", "measure", "measure_running", "short_error", "started", "warm_up_plan"]

REQUEST_TIMEOUT_S = 300.0
TIME_LIMIT_S = 900.0
WARM_UP_REQUESTS = 4
FAILURES = (ServerError, BenchError, OSError, ValueError)
"""What a system that does not start or does not serve raises here."""
SHOWN_CHARACTERS = 200
_EXCEPTION = re.compile(r"(?:^|\] )((?:\w+\.)*\w*(?:Error|Exception): .+)", re.MULTILINE)


@dataclass
class Result:
    """A run of `system`, in JSON's terms. `error`: why there is nothing else."""

    system: str
    repeat: int
    error: str | None = None
    startup_s: float = 0.0
    summary: dict[str, Any] = field(default_factory=dict)
    """Of `vllm_lifetime.bench.report.summarize`, with `disk_bytes_written`."""
    problems: list[str] = field(default_factory=list)
    counters: dict[str, Any] = field(default_factory=dict)
    workflow_latency_s: list[float] = field(default_factory=list)
    requests: dict[str, list[Any]] = field(default_factory=dict)
    """`session/index` -> tokens of prompt, cached, and generated, digest of the generated ones, TTFT and latency in seconds."""

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


def measure(system: System, site: Site, work: Work, repeat: int) -> Result:
    """Start `system`, run `work` once and end it. What fails is in the result. Takes minutes. Raises KeyboardInterrupt."""
    try:
        with started(system, site, work) as running:
            return measure_running(system.name, running, work, repeat)
    except FAILURES as error:
        return Result(system.name, repeat, error=short_error(str(error)))


@contextlib.contextmanager
def started(system: System, site: Site, work: Work) -> Iterator[Running]:
    """`system`, warmed up for `work`. Raises one of `FAILURES`: for one that did not start, `ServerError` with its log."""
    log = site.log("vllm")
    log.unlink(missing_ok=True)
    is_up = False
    try:
        with system.start(site) as running:
            _warm_up(running, work)
            is_up = True
            yield running
    except ServerError as error:
        if is_up:
            raise
        text = str(error)
        with contextlib.suppress(OSError):  # the log begins with the cause, and the error has only the log's end
            text = log.read_text(errors="replace") + text
        raise ServerError(text) from error


def measure_running(name: str, running: Running, work: Work, repeat: int) -> Result:
    """Run `work` once on a system that has been started. Whatever fails is in the result. Raises KeyboardInterrupt."""
    result = Result(name, repeat, startup_s=round(running.server.startup_s, 3))
    try:
        _run(running, work, result)
    except FAILURES as error:
        result.error = short_error(str(error))
    return result


def warm_up_plan(work: Work) -> Plan:
    """What a system that is to run `work` is warmed up with: two short workflows."""
    trace = generate_workload("hover-langchain", 2, seed=1_000_003)
    short = tuple(replace(session, requests=tuple(session.requests[:WARM_UP_REQUESTS])) for session in trace.sessions)
    seed = work.plan.tokens.seed + 1_000_003
    return make_plan(replace(trace, sessions=short), tokens_per_block=work.plan.tokens.tokens_per_block, seed=seed)


def _warm_up(running: Running, work: Work) -> None:
    """A few requests of other tokens that nobody names."""
    plan = warm_up_plan(work)
    pace = replace(work.pace, time_scale=0.0, time_limit_s=TIME_LIMIT_S)
    _, was_interrupted = run_bench(
        plan,
        running.server.base_url,
        pace,
        model=None,
        names_requests=False,
        boundaries="off",
        request_timeout_s=REQUEST_TIMEOUT_S,
    )
    if was_interrupted:
        raise KeyboardInterrupt


def _run(running: Running, work: Work, result: Result) -> None:
    pace: Pace = replace(work.pace, time_limit_s=TIME_LIMIT_S)
    written = bytes_written(running.process_groups)
    outcome, was_interrupted = run_bench(
        work.plan,
        running.server.base_url,
        pace,
        model=None,
        names_requests=work.names_requests,
        boundaries="auto" if work.names_requests else "off",
        request_timeout_s=REQUEST_TIMEOUT_S,
        keeps_token_ids=True,
    )
    if was_interrupted:
        raise KeyboardInterrupt
    running.server.check_alive()
    record = outcome.record
    result.summary = summarize(record, outcome.counts, len(work.plan.sessions))
    # Linux counts a page of our file once, however often it is written before it reaches the disk: there the connector's own
    # counter is the truth. LMCache writes each chunk into a file of its own.
    ours = result.summary["flash_bytes_written"]
    result.summary["disk_bytes_written"] = bytes_written(running.process_groups) - written if ours is None else ours
    result.problems = find_problems(record, outcome.counts)
    if outcome.boundaries_lost:
        result.problems.append(f"{outcome.boundaries_lost} boundaries were lost")
    result.counters = outcome.counts.as_json() if outcome.counts else {}
    result.workflow_latency_s = [round(s.latency_s, 4) for s in record.sessions if s.latency_s is not None]
    result.requests = _requests(record)
    if record.stopped is not None or record.num_errors:
        first = next((request.error for request in record.requests if request.error), None)
        result.error = short_error(record.stopped or f"{record.num_errors} requests failed, the first with: {first}")


def _requests(record: RunRecord) -> dict[str, list[Any]]:
    return {f"{request.session_id}/{request.index}": _row(request) for request in record.requests}


def _row(request: RequestRecord) -> list[Any]:
    digest = hashlib.sha256(",".join(map(str, request.token_ids)).encode()).hexdigest()[:12] if request.token_ids else None
    ttft_s = None if request.ttft_s is None else round(request.ttft_s, 4)
    latency_s = None if request.ended_s is None else round(request.ended_s - request.sent_s, 4)
    return [request.prompt_tokens, request.cached_tokens, request.output_tokens, digest, ttft_s, latency_s]


def bytes_written(process_groups: Iterable[int]) -> int:
    """Bytes that the living processes of these groups have caused to be sent to storage (`write_bytes` of `/proc/PID/io`)."""
    groups, total = set(process_groups), 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            if os.getpgid(int(folder.name)) in groups:
                fields = dict(line.split(": ") for line in (folder / "io").read_text().splitlines())
                total += int(fields["write_bytes"])
        except (OSError, ValueError, KeyError):  # it has ended, or is somebody else's
            continue
    return total


def short_error(text: str) -> str:
    """The first exception that a long error or a log names, in one line; without one the first line."""
    named = _EXCEPTION.search(text)
    return (named[1] if named else next(iter(text.strip().splitlines()), "unknown"))[:SHOWN_CHARACTERS]
