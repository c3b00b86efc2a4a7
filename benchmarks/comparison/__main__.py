# SPDX-License-Identifier: Apache-2.0
"""The commands; see the package."""

import contextlib
import json
import signal
import sys
import time
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from benchmarks.comparison.figures import FIGURES, check, figures_of, ratio_to, targets
from benchmarks.comparison.measure import FAILURES, Result, measure, measure_running, short_error, started, warm_up_plan
from benchmarks.comparison.overhead import overhead
from benchmarks.comparison.plots import plot
from benchmarks.comparison.regimes import REGIMES, Regime, Work, work_of
from benchmarks.comparison.settings import Budget, ServerSettings
from benchmarks.comparison.systems import SYSTEMS, Running, Site, lmcache_version, why_not_here
from benchmarks.comparison.tables import markdown
from benchmarks.demo import machine, versions
from benchmarks.server import kv_block_bytes
from vllm_lifetime.bench.plan import Plan
from vllm_lifetime.traces.source import TraceError

BASE, OURS = "vllm", "lifetime"
RESULTS = Path("benchmarks/results")
QUICK_SYSTEMS = ("vllm", "lmcache", "lru", "lifetime")
QUICK_WORKFLOWS = 10
QUICK_CAPACITY = 1.3 / 1.7
"""Of the regime's: with so few workflows there are fewer than eight at a time for most of the run."""

T = TypeVar("T")

app = typer.Typer(add_completion=False, help=__doc__)
console = Console(highlight=False)
app.command("overhead")(overhead)


@app.command("table")
def table(folder: Annotated[Path, typer.Argument(help="benchmarks/results/DATE, or one of its .json files.")]) -> None:
    """Print the tables of a comparison as markdown."""
    paths = [folder] if folder.is_file() else [folder / f"{name}.json" for name in REGIMES]
    found = [path for path in paths if path.exists()]
    for path in found:
        try:
            text = markdown(json.loads(path.read_text()))
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            _refuse(f"{path} is no result of a comparison: {type(error).__name__} {error}")
        sys.stdout.write(text + "\n")
    if not found:
        _refuse(f"{folder} has no results; they are called {', '.join(f'{name}.json' for name in REGIMES)}")


@app.command("run")
def run(
    regime: Annotated[list[str] | None, typer.Option(help=f"Which workload, may be repeated: {', '.join(REGIMES)}.")] = None,
    system: Annotated[list[str] | None, typer.Option(help=f"Which systems: {', '.join(SYSTEMS)}; default: the regime's.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Runs of each system; default 3, with --quick 1.")] = None,
    workflows: Annotated[int | None, typer.Option(min=1, help="Workflows of a run; default 24, with --quick 10.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One small run of four systems, in six minutes.")] = False,
    in_turns: Annotated[
        bool, typer.Option("--in-turns", help="Start all systems once, and let them take turns: more repeats in less time.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Recorded sessions for --regime real.")] = None,
    format: Annotated[str, typer.Option(help="Their format; see docs/traces.md.")] = "kv-cache-tester",
    capacity: Annotated[
        float | None, typer.Option(min=0.1, max=1000, help="HBM, in final contexts of all running workflows.")
    ] = None,
    host_share: Annotated[float | None, typer.Option(min=0.02, max=1000, help="Host memory, as a share of HBM.")] = None,
    disk_share: Annotated[float | None, typer.Option(min=0.02, max=1000, help="Disk, as a share of HBM.")] = None,
    model_layers: Annotated[int, typer.Option(min=1, help="Of the test model.")] = ServerSettings.model_layers,
    model_hidden: Annotated[int, typer.Option(min=64, help="Of the test model.")] = ServerSettings.model_hidden,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload and its tokens.")] = 0,
    out: Annotated[Path | None, typer.Option(help=f"Folder for the results; default {RESULTS}/DATE.")] = None,
) -> None:
    """Run every system on the same work, one after the other, several times. Exit code 1: something is doubtful; 2: cannot be.

    The machine should have nothing else to do.
    """
    signal.signal(signal.SIGTERM, _on_sigterm)
    folder = out or RESULTS / date.today().isoformat()
    settings = ServerSettings(model_layers=model_layers, model_hidden=model_hidden)
    try:
        regimes = [_named(name, REGIMES, "regime") for name in regime or ["dynamic"]]
        chosen = [_named(name, SYSTEMS, "system").name for name in system or ()]
        works = [
            work_of(one, workflows=workflows or (QUICK_WORKFLOWS if quick else 24), seed=seed, path=trace, format=format)
            for one in regimes
        ]
        folder.mkdir(parents=True, exist_ok=True)
    except (TraceError, ValueError, OSError) as error:
        _refuse(str(error))
    # Imported late: it needs torch, which takes seconds.
    from scripts.make_test_model import make_test_model

    try:
        model = make_test_model(Path("build/comparison-model"), layers=settings.model_layers, hidden=settings.model_hidden)
    except (ValueError, OSError) as error:
        _refuse(str(error))
    is_doubtful = False
    for one, work in zip(regimes, works, strict=True):
        fitting = _settings_for(work, settings)
        tokens = work.working_set_tokens * (capacity or one.capacity * (QUICK_CAPACITY if quick else 1.0))
        blocks = max(round(tokens / settings.block_size_tokens), _fewest_blocks(work, settings))
        shares = (host_share or one.host_share, disk_share or one.disk_share)
        budget = Budget(blocks, kv_block_bytes(model, settings.block_size_tokens, settings.dtype), *shares)
        names = chosen or [name for name in one.systems if not quick or name in QUICK_SYSTEMS]
        comparison = Comparison(one, work, fitting, budget, names, seed, folder, model, in_turns=in_turns)
        try:
            comparison.run(repeats or (1 if quick else 3))
        finally:  # also of what was measured before an interrupt; if that is nothing, earlier results stay
            is_doubtful |= comparison.write()
    if is_doubtful:
        raise typer.Exit(1)


class Comparison:
    """The runs of one regime, and their report; after each run what there is so far is on disk."""

    def __init__(
        self,
        regime: Regime,
        work: Work,
        settings: ServerSettings,
        budget: Budget,
        systems: list[str],
        seed: int,
        folder: Path,
        model: Path,
        *,
        in_turns: bool = False,
    ) -> None:
        """Compare `systems` in `regime`."""
        self._regime, self._work, self._settings, self._budget = regime, work, settings, budget
        self._systems, self._seed, self._folder, self._model = systems, seed, folder, model
        self._in_turns = in_turns
        self._missing: dict[str, str] = {}
        self._results: list[Result] = []

    def run(self, repeats: int) -> None:
        """All runs: each system once in a repeat, each repeat beginning with another. One that never did any work is left out.

        In turns, all systems are up from the first run to the last, and those whose turn it is not wait for requests.
        """
        for name in self._systems:
            if why := why_not_here(name):
                self._leave_out(name, why)
        running: dict[str, Running] = {}
        with contextlib.ExitStack() as stack:
            if self._in_turns:
                for name in self._systems:
                    if name not in self._missing:
                        self._start(name, running, stack)
            for repeat in range(repeats):
                start = repeat % len(self._systems)
                for name in self._systems[start:] + self._systems[:start]:
                    if name not in self._missing:
                        self._run_once(name, repeat, running.get(name))

    def _start(self, name: str, running: dict[str, Running], stack: contextlib.ExitStack) -> None:
        try:
            running[name] = stack.enter_context(started(SYSTEMS[name], self._site(name, f"{name}-turns"), self._work))
        except FAILURES as error:
            self._leave_out(name, short_error(str(error)))

    def _run_once(self, name: str, repeat: int, running: Running | None) -> None:
        began_s = time.monotonic()
        if running is not None:
            result = measure_running(name, running, self._work.again(repeat), repeat)
        else:
            result = measure(SYSTEMS[name], self._site(name, f"{name}-{repeat + 1}"), self._work, repeat)
        if result.error is not None and not result.summary and all(run.system != name for run in self._results):
            self._leave_out(name, result.error)
            return
        figures = result.summary
        console.print(
            f"{self._regime.name}, repeat {repeat + 1}, {name}: hit rate {figures.get('hit_rate') or 0:.1%}, workflow "
            f"{figures.get('workflow_latency_mean_s') or 0:.2f} s, TTFT {figures.get('ttft_mean_s') or 0:.3f} s "
            f"({time.monotonic() - began_s:.0f} s)" + (f"; {escape(result.error)}" if result.error else ""),
            soft_wrap=True,
        )
        self._results.append(result)
        (self._folder / f"{self._regime.name}-runs.json").write_text(
            json.dumps([run.as_json() for run in self._results], separators=(",", ":")) + "\n"
        )

    def _leave_out(self, name: str, why: str) -> None:
        self._missing[name] = why
        console.print(f"  {name} does not run here: {escape(why)}", soft_wrap=True)

    def _site(self, name: str, label: str) -> Site:
        folder = Path("build/comparison") / name  # those that are up at a time must not share one
        return Site(self._model, folder, self._settings, self._budget, f"{self._regime.name}-{label}")

    def write(self) -> bool:
        """Write report, table and plot, unless no run has ended; returns whether something is doubtful."""
        if not self._results and not self._missing:
            return True
        report = self.report()
        stem = self._folder / self._regime.name
        stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        text = markdown(report)
        stem.with_suffix(".md").write_text(text)
        plot(report, self._results, stem.with_suffix(".png"))
        sys.stdout.write(text + "\n")
        return bool(report["checks"])

    def report(self) -> dict[str, Any]:
        """Everything but the single requests, for JSON."""
        figures = figures_of(self._results)
        requests = [request for session in self._work.plan.sessions for request in session.requests]
        return {
            "regime": self._regime.name,
            "title": self._regime.title[0].upper() + self._regime.title[1:],
            "base_title": SYSTEMS[BASE].title,
            "seed": self._seed,
            "in_turns": self._in_turns,
            "repeats": max((run.repeat for run in self._results), default=-1) + 1,
            "systems": {name: SYSTEMS[name].title for name in self._systems},
            "missing": self._missing,
            "settings": asdict(self._settings),
            "budget": {
                **asdict(self._budget),
                "hbm_bytes": self._budget.hbm_bytes,
                "host_bytes": self._budget.host_bytes,
                "disk_bytes": self._budget.disk_bytes,
            },
            "workload": {
                "name": self._work.plan.name,
                "sessions": len(self._work.plan.sessions),
                "requests": len(requests),
                "prompt_tokens": sum(request.prompt_tokens for request in requests),
                "output_tokens": sum(request.output_tokens for request in requests),
                "concurrency": self._work.pace.concurrency,
                "time_scale": self._work.pace.time_scale,
                "idle_cap_s": self._work.pace.idle_cap_s,
                "names_requests": self._work.names_requests,
            },
            "versions": versions() | lmcache_version(),
            "machine": machine(),
            "figures": {
                name: {key: value.as_json() if value else None for key, value in row.items()} for name, row in figures.items()
            },
            "ratios": {
                name: {
                    figure.key: ratio.as_json()
                    for figure in FIGURES
                    if (ratio := ratio_to(self._results, name, BASE, figure.key)) is not None
                }
                for name in self._systems
                if name != BASE and name not in self._missing
            },
            "targets": targets(self._results, self._regime, BASE, OURS),
            "checks": [
                f"{name} does not run here: {why}" for name, why in self._missing.items() if name == BASE or SYSTEMS[name].is_ours
            ]
            + check(self._results, BASE),
        }


def _settings_for(work: Work, settings: ServerSettings) -> ServerSettings:
    """With no longer a context than the work needs: a server must have room for one, however little HBM it is given."""
    longest = max(_longest(plan, settings.block_size_tokens) for plan in (work.plan, warm_up_plan(work)))
    return replace(settings, max_model_len=min(settings.max_model_len, longest))


def _longest(plan: Plan, block_size_tokens: int) -> int:
    """Tokens of the longest request with its output, in whole blocks."""
    longest = max(request.tokens for session in plan.sessions for request in session.requests)
    return -(-longest // block_size_tokens) * block_size_tokens


def _fewest_blocks(work: Work, settings: ServerSettings) -> int:
    """Two of the longest requests fit: else the engine, not the cache, is what is measured."""
    return 2 * (_longest(work.plan, settings.block_size_tokens) // settings.block_size_tokens) + 1


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"Error: {reason}", err=True)
    raise typer.Exit(2)


def _named(name: str, known: dict[str, T], kind: str) -> T:
    if name not in known:
        raise ValueError(f"there is no {kind} {name!r}; there are {', '.join(known)}")
    return known[name]


def _on_sigterm(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    app()
