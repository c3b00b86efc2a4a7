# SPDX-License-Identifier: Apache-2.0
"""Placement policies with flash in place: one multi-agent workload on one real server for each policy and size of HBM.

    python -m benchmarks.placement --shares 0.25,0.5,0.75 --seeds 3 --json build/placement.json

After Lachesis section 5, Figures 9 and 10: how much is written to flash, and what, under `lachesis`, `lachesis_no_predictive` and
`hbm_first`. All servers get the same model, the same flash and the same sessions (`placement_workload.py`), round by
round: a round's boundaries, then its requests together. Each server warms up with sessions of a seed of their own, until every
block has been written, and then serves the seeds one after the other; counters are read between them.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from benchmarks.demo import machine, versions
from benchmarks.placement_plan import Plan, Settings, kendall_taus, make_plan, train_rank
from benchmarks.placement_player import Answers, Player
from benchmarks.placement_report import POLICIES, Run, build_report, num_differing, plot, read_run, table
from benchmarks.placement_workload import WorkloadConfig
from benchmarks.server import ServerError, VllmServer

REQUEST_TIMEOUT_S = 120.0

PIPE_WIDTH = 130
"""Columns where there is no terminal to ask."""

console = Console()
if not console.is_terminal:
    console = Console(width=PIPE_WIDTH)


@dataclass(frozen=True)
class Cell:
    """One server."""

    share: float
    policy: str

    def __str__(self) -> str:
        """For people."""
        return f"{self.policy} {self.share:g}"


class Bench:
    """All servers, some at a time."""

    def __init__(self, plan: Plan, model: Path, rank_path: Path, out: Path) -> None:
        self.runs: list[Run] = []
        self.first_answers: dict[int, Answers] = {}
        """By seed, of the server that was done first."""
        self.num_differing = 0
        self.progress = Progress(
            TextColumn("{task.description:<40}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TimeElapsedColumn(),
            console=console,
        )
        self._plan = plan
        self._model = model
        self._rank_path = rank_path
        self._out = out
        self._servers: list[VllmServer] = []

    async def run(self, cells: Sequence[Cell], at_a_time: int) -> None:
        """Serve all cells. Raises ServerError; no server is left then."""
        free = asyncio.Semaphore(at_a_time)

        async def one(cell: Cell) -> None:
            async with free:
                await self._serve(cell)

        async with asyncio.TaskGroup() as group:
            for cell in cells:
                group.create_task(one(cell))

    async def _serve(self, cell: Cell) -> None:
        plan = self._plan
        settings = plan.settings
        name = f"placement-{cell.policy}-{cell.share:g}"
        flash = self._out / f"{name}.kv"
        num_hbm = plan.hbm_blocks(cell.share) + 1
        server = VllmServer(
            self._model,
            log_path=self._out / f"{name}.log",
            args=settings.server_args(num_hbm + plan.flash_blocks),
            env=settings.server_env(),
            connector={
                "flash_mode": "in_place",
                "flash_path": str(flash),
                "flash_bytes": settings.flash_bytes(plan.flash_blocks),
                "placement": cell.policy,
                # Only lachesis reads it.
                "rank_path": str(self._rank_path),
            },
        )
        self._servers.append(server)
        task = self.progress.add_task(f"{cell}: starting", total=plan.num_rounds)
        try:
            await asyncio.to_thread(server.start)
            await self._play(cell, server, task)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise ServerError(f"{cell}: {type(error).__name__}: {error}\n{server.log_tail()}") from error
        finally:
            await asyncio.shield(asyncio.to_thread(server.stop))
            for file in (flash, flash.with_name(f"{flash.name}.wear")):
                file.unlink(missing_ok=True)
        self.progress.update(task, description=f"{cell}: done")

    async def _play(self, cell: Cell, server: VllmServer, task: TaskID) -> None:
        plan = self._plan
        # The server closes a connection that is idle for 5 s: none may be used again just then.
        limits = httpx.Limits(max_connections=128, max_keepalive_connections=128, keepalive_expiry=1.0)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=REQUEST_TIMEOUT_S, limits=limits) as http:
            player = Player(http, server.served_name)

            def on_round() -> None:
                self.progress.advance(task)

            await player.check_tiers({"hbm": plan.hbm_blocks(cell.share), "flash": plan.flash_blocks})
            self.progress.update(task, description=f"{cell}: warm-up")
            await player.play(plan.warm_up, on_round)
            before = await player.settled_metrics()
            for workload in plan.workloads:
                seed = workload.config.seed
                self.progress.update(task, description=f"{cell}: seed {seed}")
                began = time.perf_counter()
                prompt_tokens, cached_tokens = player.prompt_tokens, player.cached_tokens
                answers = await player.play(workload, on_round)
                wall_s = time.perf_counter() - began
                after = await player.settled_metrics()
                self.runs.append(
                    read_run(
                        before,
                        after,
                        share=cell.share,
                        seed=seed,
                        policy=cell.policy,
                        block_bytes=plan.settings.block_bytes,
                        requests=workload.num_requests,
                        prompt_tokens=player.prompt_tokens - prompt_tokens - 1,
                        cached_tokens=player.cached_tokens - cached_tokens,
                        wall_s=round(wall_s, 3),
                    )
                )
                self.num_differing += num_differing(self.first_answers.setdefault(seed, answers), answers)
                before = after

    def stop(self) -> None:
        """End what still runs; for whoever was interrupted."""
        for server in self._servers:
            server.stop()


def _shares(text: str) -> list[float]:
    try:
        shares = sorted({float(part) for part in text.split(",")})
    except ValueError:
        raise typer.BadParameter(f"--shares are numbers, with commas between them, not {text!r}") from None
    if not all(0 < share <= 4 for share in shares):
        raise typer.BadParameter("--shares must be above 0 and at most 4")
    return shares


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def print_report(report: dict[str, Any]) -> None:
    """The table, and what it means."""
    console.print(table(report))
    taus = report["taus"]
    console.print(
        f"Kendall's tau with the lifetimes, by seed: what spawns show {taus['shown']}, the trained rank {taus['rank']}. "
        f"Preemptions: {sum(cell['preemptions'] for cell in report['cells'])}."
    )
    for order in report["orders"]:
        console.print(
            f"HBM {order['share']:g}: lachesis_no_predictive writes less to flash than hbm_first in "
            f"{order['no_predictive_below_hbm_first']} of {order['seeds']} seeds, lachesis less than that in "
            f"{order['lachesis_below_no_predictive']}, with reviewers mostly in HBM in {order['reviewers_mostly_in_hbm']}."
        )
    total = sum(report["workload"]["requests"])
    num_servers = len(report["cells"])
    if report["tokens_identical"]:
        console.print(f"Generated tokens: identical in all {total:,} requests on all {num_servers} servers.", style="green")
    else:
        others = total * (num_servers - 1)
        console.print(f"Generated tokens differ in {report['differing_requests']} of {others:,} answers.", style="red")


def run_cells(bench: Bench, cells: Sequence[Cell], at_a_time: int) -> None:
    """Serve all cells; leaves no server behind. Exits with a message if a server fails (1) or on Ctrl-C and SIGTERM (130)."""
    # As Ctrl-C, so that the event loop ends its tasks and they their servers.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    failure, code = "", 0
    try:
        with bench.progress:
            asyncio.run(bench.run(cells, at_a_time))
    except (ServerError, ExceptionGroup) as error:
        first = _first(error)
        if not isinstance(first, ServerError):
            raise
        failure, code = f"The comparison failed. {first}", 1
    except KeyboardInterrupt:
        failure, code = "Interrupted; the servers are stopped.", 130
    finally:
        bench.stop()
    if code:
        console.print(failure, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(code)


def main(
    shares: Annotated[
        str, typer.Option(help="Sizes of HBM, over the short-lived KV that is alive on average.", metavar="LIST")
    ] = "0.25,0.5,0.75",
    seeds: Annotated[int, typer.Option(help="Workloads that each server serves.", min=1, max=100)] = 3,
    sessions: Annotated[int, typer.Option(help="Sessions of each workload.", min=1)] = WorkloadConfig.sessions,
    concurrency: Annotated[int, typer.Option(help="Sessions at a time.", min=1)] = WorkloadConfig.concurrency,
    servers: Annotated[int, typer.Option(help="Servers at a time.", min=1)] = 2,
    json_file: Annotated[Path, typer.Option("--json", help="Where to write the figures.")] = Path("build/placement.json"),
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Where to draw them. Default: beside the figures, .png.")
    ] = None,
) -> None:
    """Compare hbm_first, lachesis_no_predictive and lachesis with flash in place."""
    chosen = _shares(shares)
    settings = Settings()
    config = WorkloadConfig(sessions=sessions, concurrency=concurrency)
    try:
        plan = make_plan(config, seeds, settings)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    out = json_file.parent
    out.mkdir(parents=True, exist_ok=True)
    rank_path = out / "placement-rank.npz"
    # Imported late: it needs torch, which takes seconds.
    from scripts.make_test_model import make_test_model

    began = time.perf_counter()
    with console.status("making the model, training the rank"):
        model = make_test_model(out / "placement-model", layers=settings.model_layers, hidden=settings.model_hidden)
        train_rank(rank_path, config.tau)
        taus = kendall_taus(plan, rank_path)
    hbm = ", ".join(str(plan.hbm_blocks(share)) for share in chosen)
    requests = [one.num_requests for one in plan.workloads]
    console.print(
        f"{seeds} workloads of {sessions} sessions, {concurrency} at a time: {sum(requests):,} requests; short-lived and alive "
        f"on average {plan.short_lived_blocks:.0f} blocks of {settings.block_size} tokens; HBM {hbm} blocks, "
        f"flash {plan.flash_blocks}"
    )
    bench = Bench(plan, model, rank_path, out)
    run_cells(bench, [Cell(share, policy) for share in chosen for policy in POLICIES], servers)
    report = build_report(
        sorted(bench.runs, key=lambda run: (run.share, POLICIES.index(run.policy), run.seed)),
        bench.num_differing,
        {
            "settings": asdict(settings),
            "workload": asdict(config) | {"seeds": seeds, "requests": requests},
            "live_blocks": {name: round(blocks, 1) for name, blocks in plan.live_blocks.items()},
            "hbm_blocks": {f"{share:g}": plan.hbm_blocks(share) for share in chosen},
            "flash_blocks": plan.flash_blocks,
            "taus": taus,
            "machine": machine(),
            "versions": versions(),
            "wall_s": round(time.perf_counter() - began, 1),
        },
    )
    json_file.write_text(json.dumps(report, indent=2) + "\n")
    plot_file = plot_file or json_file.with_suffix(".png")
    plot(report, plot_file)
    print_report(report)
    console.print(f"{json_file}, {plot_file}  ({report['wall_s']:.0f} s)")
    if not report["tokens_identical"]:
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
