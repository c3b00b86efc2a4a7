# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime simulate`: devices that nobody has yet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["add_to", "hbf"]

PIPE_WIDTH = 180
"""Columns where there is no terminal to ask."""

DEFAULT_POLICIES = "hbm_first,lachesis_no_predictive,lachesis"


def add_to(app: typer.Typer) -> None:
    """Register the command group on `app`."""
    group = typer.Typer(help="Simulate devices that nobody has yet.", no_args_is_help=True, rich_markup_mode=None)
    # One command alone would take the place of the group.
    group.callback()(lambda: None)
    group.command("hbf")(hbf)
    app.add_typer(group, name="simulate")


def hbf(
    out: Annotated[Path, typer.Option(help="Folder for results.json, checks.json, calibration.json and the plots.")],
    config: Annotated[str, typer.Option(help="Configurations of the device, with commas between them, or all.")] = "all",
    model: Annotated[str, typer.Option(help="Models by name or .toml file, with commas between them, or all.")] = "all",
    slo: Annotated[str, typer.Option(help="tight (60 ms), loose (100 ms), or milliseconds, with commas between them.")] = "tight",
    policy: Annotated[
        str, typer.Option(help="Placement policies with commas between them; see docs/hbf-simulator.md.")
    ] = DEFAULT_POLICIES,
    trace: Annotated[
        str, typer.Option(help="multi_agent, multi_agent_no_reviewer, tau3, bfcl, with commas between them.")
    ] = "multi_agent",
    seeds: Annotated[int, typer.Option(min=1, help="Traces made up for each cell.")] = 1,
    device: Annotated[str, typer.Option(help="Device by name or .toml file.")] = "rubin_hbf",
    growth: Annotated[float, typer.Option(help="g: HBM that an admitted worker is counted with, in mean final sizes.")] = 2.0,
    reserve: Annotated[float, typer.Option(help="Most of HBM that is kept for reviewers; 0: none.")] = 0.9,
    own_admission: Annotated[
        bool, typer.Option("--own-admission", help="Each policy serves as many sessions as it can, not as many as hbm_first can.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Processes to use.")] = 1,
) -> None:
    """How long HBF lasts under each placement policy, on a decode node with HBM and HBF. Exit code 2: it cannot be said."""
    try:
        _run(out, config, model, slo, policy, trace, seeds, device, growth, reserve, own_admission, processes)
    except (ValueError, OSError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except ImportError as error:
        typer.echo(
            f"Error: the simulator needs numba, and matplotlib for its plots ({error}). Try: pip install numba matplotlib",
            err=True,
        )
        raise typer.Exit(2) from None


def _run(
    out: Path,
    config: str,
    model: str,
    slo: str,
    policy: str,
    trace: str,
    seeds: int,
    device: str,
    growth: float,
    reserve: float,
    own_admission: bool,
    processes: int,
) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from vllm_lifetime.policy.placement import PlacementConfig, parse_placement
    from vllm_lifetime.simulate.hbf.calibration import check_structural, check_temporal
    from vllm_lifetime.simulate.hbf.checks import run_checks
    from vllm_lifetime.simulate.hbf.hardware import load_device, load_model, model_names
    from vllm_lifetime.simulate.hbf.report import (
        checks_table,
        findings_table,
        plot_lifetimes,
        plot_writes,
        results_table,
        write_json,
    )
    from vllm_lifetime.simulate.hbf.sweep import Cell, Setup, make_sessions, parse_slo, run_cells
    from vllm_lifetime.simulate.hbf.workload_files import load_structural, load_temporal

    setup = Setup(device=device, placement=PlacementConfig(growth=growth, max_reserve_share=reserve), own_admission=own_admission)
    loaded = load_device(device)
    configs = list(loaded.configurations) if config == "all" else _names(config)
    for name in configs:
        loaded.configuration(name)
    models = model_names() if model == "all" else _names(model)
    for name in models:
        load_model(name)
    policies = _names(policy)
    for name in policies:
        parse_placement(name, is_live=False)
    slos = _names(slo)
    for name in slos:
        parse_slo(name)
    traces = _names(trace)
    sessions = {name: make_sessions(setup, name, 0) for name in traces}
    out.mkdir(parents=True, exist_ok=True)

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    cells = [Cell(m, c, s, t, seed) for t in traces for m in models for s in slos for c in configs for seed in range(seeds)]
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{len(cells)} cells, {len(policies)} policies", total=len(cells))
        rows = run_cells(setup, cells, policies, processes, lambda cell: progress.advance(task))
    checks = run_checks(rows)
    tpot_s = loaded.gpu.reference_tpot.value
    findings = []
    for name in traces:
        if name == "multi_agent":
            findings += check_structural(load_structural(setup.structural), sessions[name], tpot_s)
        elif name != "multi_agent_no_reviewer":
            findings += check_temporal(load_temporal(setup.temporal), name, sessions[name], tpot_s)
    write_json(out / "results.json", rows)
    write_json(out / "checks.json", checks)
    write_json(out / "calibration.json", findings)
    console.print(results_table(rows))
    run = [check for check in checks if check.passes is not None]
    console.print(
        f"{sum(check.passes is True for check in run)} of {len(run)} checks pass; {len(checks) - len(run)} need more cells"
    )
    console.print(checks_table(checks))
    console.print(f"{sum(finding.passes for finding in findings)} of {len(findings)} calibration targets are met")
    console.print(findings_table(finding for finding in findings if not finding.passes))
    plot_lifetimes(rows, out / "lifetimes.png")
    for number, (m, s, t) in enumerate(dict.fromkeys((row.model, row.slo, row.trace) for row in rows)):
        chosen = [row for row in rows if (row.model, row.slo, row.trace) == (m, s, t)]
        plot_writes(chosen, out / f"writes-{number}.png", f"{m}, {t}, {s}")


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError("an option that takes names got none")
    return list(dict.fromkeys(names))
