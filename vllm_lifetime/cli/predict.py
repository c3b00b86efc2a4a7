# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime predict`: train transition predictors on recorded workflows, and compare them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_lifetime.cli.console import results_console
from vllm_lifetime.cli.failure import fail
from vllm_lifetime.cli.outputs import check_outputs
from vllm_lifetime.whole_file import write_text

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.table import Table

    from vllm_lifetime.prediction.evaluation import Measurement
    from vllm_lifetime.prediction.samples import Split
    from vllm_lifetime.traces.workflows import AgentWorkflow

PathArgument = Annotated[Path, typer.Argument(metavar="PATH", help="File of workflows: JSON Lines, plain or .xz.")]
FormatOption = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help='mapcoder, or jsonl: {"task": ..., "agents": [...]} on each line.')
]
HiddenOption = Annotated[
    Path | None,
    typer.Option(metavar="NPZ", help="Hidden states: array `hidden`, one row for each invocation of the file, in its order."),
]
HorizonOption = Annotated[int, typer.Option(min=1, max=16, help="K: invocations to look ahead.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands on `app`."""
    predict = typer.Typer(
        help="Train a predictor of which agent is invoked next, or compare predictors.",
        no_args_is_help=True,
        rich_markup_mode=None,
    )
    predict.command("train")(train)
    predict.command("evaluate")(evaluate)
    app.add_typer(predict, name="predict")


def train(
    path: PathArgument,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the predictor (.npz).")],
    format: FormatOption = "jsonl",
    model: Annotated[
        str, typer.Option(help="graphsage, graphsage-ordered, markov-1 to markov-5 or markov-variable.")
    ] = "graphsage",
    seed: Annotated[int, typer.Option(min=0, help="Decides the split and the initial parameters.")] = 0,
    horizon: HorizonOption = 3,
    hidden_states: HiddenOption = None,
) -> None:
    """Train on nine tenths of the tasks, stop early by the tenth, and write one file for the server."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from vllm_lifetime.prediction.model_names import MODEL_NAMES, SERVING_MODELS

    if model not in SERVING_MODELS:
        known = "is only for comparison" if model in MODEL_NAMES else "is unknown"
        raise typer.BadParameter(f"{model!r} {known}; those that serve: {', '.join(SERVING_MODELS)}", param_hint="--model")
    _check(out, path, hidden_states)
    workflows, hidden = _read(path, format, hidden_states)
    split = _split(workflows, seed, test=0.0)
    _need_training_libraries()
    # All that can be refused has been: these take seconds.
    from vllm_lifetime.prediction.evaluation import score_predictor
    from vllm_lifetime.prediction.export import export_predictor
    from vllm_lifetime.prediction.models.registry import TrainingData, train_predictor

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task(f"training {model}", total=None)
            data = TrainingData.of(
                [workflows[i] for i in split.train],
                [workflows[i] for i in split.validation],
                horizon,
                seed,
                None if hidden is None else [hidden[i] for i in split.train],
                None if hidden is None else [hidden[i] for i in split.validation],
                on_epoch=lambda epoch, loss: progress.update(
                    bar, description=f"training {model}: epoch {epoch}, validation loss {loss:.3f}"
                ),
            )
            predictor = train_predictor(model, data)
        accuracy, _ = score_predictor(predictor, data.validation)
        export_predictor(predictor, out)
    except (OSError, ValueError) as error:
        fail(str(error))
    shown = ", ".join(f"s{step + 1} {_shown(value)}" for step, value in enumerate(accuracy))
    typer.echo(f"Wrote {out}: {model} for {len(data.train.agents)} agents, from {len(split.train)} workflows.")
    typer.echo(f"Top-1 accuracy on the {len(split.validation)} workflows held out to stop by: {shown}")


def evaluate(
    path: PathArgument,
    format: FormatOption = "jsonl",
    models: Annotated[str, typer.Option(metavar="NAMES", help="Names with commas between, or all.")] = "all",
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Splits and trainings of each.")] = 10,
    horizon: HorizonOption = 3,
    hidden_states: HiddenOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Where to write the figures, too.")] = None,
) -> None:
    """Train and test predictors on random splits by task (70 % train, 10 % validation, 20 % test) and print a table."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from vllm_lifetime.prediction.model_names import MODEL_NAMES

    names = list(dict.fromkeys(name.strip() for name in models.split(",") if name.strip()))
    if models == "all":
        names = list(MODEL_NAMES)
    unknown = [name for name in names if name not in MODEL_NAMES]
    if unknown or not names:
        wrong = ", ".join(unknown) if names else repr(models)
        raise typer.BadParameter(f"unknown: {wrong}; known: {', '.join(MODEL_NAMES)}", param_hint="--models")
    _check(json_file, path, hidden_states)
    workflows, hidden = _read(path, format, hidden_states)
    _split(workflows, 0)
    _need_training_libraries()
    # All that can be refused has been: these take seconds.
    from vllm_lifetime.prediction.evaluation import evaluate as measure_all
    from vllm_lifetime.prediction.evaluation import report

    def save(done: Sequence[Measurement]) -> None:
        if json_file is not None:
            write_text(json_file, json.dumps(report(done, workflows, horizon, path.name), indent=2) + "\n")

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            bar = progress.add_task("", total=len(names) * seeds)
            done = measure_all(
                names,
                workflows,
                seeds,
                horizon,
                hidden,
                on_model=lambda name: progress.update(bar, advance=1, description=name),
                on_seed=save,
            )
    except (OSError, ValueError) as error:
        fail(str(error))
    results_console(60 + 20 * horizon, highlight=True).print(_table(done, horizon, seeds))
    if json_file is not None:
        typer.echo(f"Wrote {json_file}")


def _check(output: Path | None, *sources: Path | None) -> None:
    try:
        check_outputs([output], sources)
    except (OSError, ValueError) as error:
        fail(str(error))


def _read(path: Path, format: str, hidden_states: Path | None) -> tuple[list[AgentWorkflow], list[NDArray[np.float32]] | None]:
    from vllm_lifetime.traces.workflows import WorkflowFileError, read_hidden_states, read_workflows

    try:
        workflows = read_workflows(path, format)
        return workflows, None if hidden_states is None else read_hidden_states(hidden_states, workflows)
    except WorkflowFileError as error:
        fail(str(error))


def _split(workflows: Sequence[AgentWorkflow], seed: int, test: float = 0.2) -> Split:
    from vllm_lifetime.prediction.samples import split_by_task

    try:
        return split_by_task(workflows, seed, test=test)
    except ValueError as error:
        fail(str(error))


def _shown(value: float, digits: int = 3) -> str:
    """A figure, or `-` for a step that no workflow came to."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _need_training_libraries() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "torch_geometric", "sklearn") if find_spec(name) is None]
    if missing:
        fail(f"training needs {', '.join(missing)}: pip install 'vllm-lifetime[prediction]', and torch as vLLM brings it")


def _table(done: Sequence[Measurement], horizon: int, seeds: int) -> Table:
    from rich import box
    from rich.table import Table

    title = f"Top-1 accuracy and log loss (nats) at each step, mean ± deviation over {seeds} seeds"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("Predictor", no_wrap=True)
    for name in ("Parameters", *(f"s{k + 1}" for k in range(horizon)), "log loss"):
        table.add_column(name, justify="right", no_wrap=True)
    best = [max(row.accuracy_mean[k] for row in done) for k in range(horizon)]
    for previous, row in zip([None, *done[:-1]], done, strict=True):
        if previous is not None and previous.family != row.family:
            table.add_section()
        accuracies = []
        for k, (mean, deviation) in enumerate(zip(row.accuracy_mean, row.accuracy_deviation, strict=True)):
            text = "-" if math.isnan(mean) else f"{mean:.3f}±{deviation:.3f}"
            accuracies.append(f"[bold]{text}[/bold]" if mean == best[k] else text)
        table.add_row(
            f"{row.family} {row.variant}".strip(),
            "" if row.parameters is None else f"{row.parameters:,}",
            *accuracies,
            " ".join(_shown(mean, 2) for mean in row.log_loss_mean),
        )
    return table
