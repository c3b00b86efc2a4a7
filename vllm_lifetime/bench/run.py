# SPDX-License-Identifier: Apache-2.0
"""One run from its settings to its report: checks before it starts, progress while it goes on."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from vllm_lifetime.bench.counters import ServerCounts, counts_between
from vllm_lifetime.bench.driver import Driver, Pace
from vllm_lifetime.bench.plan import Plan
from vllm_lifetime.bench.records import RunRecord
from vllm_lifetime.bench.server import BenchServer, ServerError, ServerInfo
from vllm_lifetime.harness.client import AsyncLifetimeClient

__all__ = ["BoundaryMode", "Outcome", "run_bench"]

BoundaryMode: TypeAlias = Literal["auto", "on", "off"]

QUEUED_BOUNDARIES = 1 << 16


@dataclass
class Outcome:
    """What is left of a run, however it ended."""

    info: ServerInfo
    record: RunRecord
    counts: ServerCounts | None = None
    boundaries_sent: int = 0
    """Taken by the server."""
    boundaries_lost: int = 0
    """Given up, dropped or refused."""


def run_bench(
    plan: Plan,
    base_url: str,
    pace: Pace,
    *,
    model: str | None,
    names_requests: bool,
    boundaries: BoundaryMode,
    request_timeout_s: float,
    keeps_token_ids: bool = False,
    on_change: Callable[[RunRecord], None] = lambda _: None,
) -> tuple[Outcome, bool]:
    """Replay `plan` on the server at `base_url`. Blocks; SIGINT and SIGTERM end the run.

    Returns what was measured and whether it was interrupted. Raises `ServerError`, `PlanError` or `ValueError` before anything
    is sent, and nothing later.
    """
    outcomes: list[Outcome] = []
    server = BenchServer(base_url, request_timeout_s, keeps_token_ids=keeps_token_ids)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(_run(plan, server, pace, model, names_requests, boundaries, on_change, outcomes.append))
    except (KeyboardInterrupt, asyncio.CancelledError):
        if not outcomes:  # nothing was sent
            raise KeyboardInterrupt from None
        return outcomes[0], True
    finally:
        # asyncio leaves the default behind, with which a caller who runs more than this could not clean up.
        with contextlib.suppress(ValueError, TypeError):  # not the main thread; a handler that is not Python's
            signal.signal(signal.SIGTERM, on_sigterm)
    return outcomes[0], False


async def _run(
    plan: Plan,
    bench_server: BenchServer,
    pace: Pace,
    model: str | None,
    names_requests: bool,
    boundaries: BoundaryMode,
    on_change: Callable[[RunRecord], None],
    begin: Callable[[Outcome], Any],
) -> None:
    task = asyncio.current_task()
    if task is not None:
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # Windows; not the main thread
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began_s = time.perf_counter()
    limit_s = pace.time_limit_s
    async with bench_server as server:
        try:
            async with asyncio.timeout(None if limit_s == float("inf") else limit_s):
                info = await server.ask(model, needs_boundaries=names_requests and boundaries != "off")
                before = await server.counters()
        except TimeoutError:
            raise ServerError(f"{server.url} did not answer within {limit_s:g} s (--time-limit-s)") from None
        plan.check_fits(info.max_model_len)
        client = None
        if posts_boundaries(boundaries, names_requests, info.has_lifetime, server.url):
            client = AsyncLifetimeClient(server.url, queue_size=QUEUED_BOUNDARIES)
        driver = Driver(plan, server, info.model, pace, client=client, names_requests=names_requests, on_change=on_change)
        outcome = Outcome(info, driver.record)
        begin(outcome)
        try:
            await driver.run(time.perf_counter() - began_s)
        finally:
            if client is not None:
                await client.aclose()
                stats = client.stats
                outcome.boundaries_sent = stats.sent
                outcome.boundaries_lost = stats.failed + stats.dropped + stats.refused
            after = await server.settled_counters() if before is not None else None
            if before is not None and after is not None:
                outcome.counts = counts_between(before, after)


def posts_boundaries(mode: BoundaryMode, names_requests: bool, has_lifetime: bool, url: str) -> bool:
    """Whether boundaries are posted. Raises `ServerError`: they were asked for and cannot be.

    `has_lifetime`: whether the server takes them; not asked, hence False, where requests go unnamed.
    """
    if mode == "on":
        if not names_requests:
            raise ServerError("--boundaries on needs --metadata: without it the server knows no session to end")
        if not has_lifetime:
            raise ServerError(f"{url} takes no boundaries: is it started with --kv-connector lifetime? Or use --boundaries auto")
        return True
    return mode == "auto" and has_lifetime
