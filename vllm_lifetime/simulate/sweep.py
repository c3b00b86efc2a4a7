# SPDX-License-Identifier: Apache-2.0
"""How hit rates depend on one parameter, over made-up workloads of several seeds (PBKV figures 5, 10, 11 and 12)."""

import json
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeVar

from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON
from vllm_lifetime.prediction.markov import MAX_ORDER
from vllm_lifetime.prediction.online import OnlineMarkov
from vllm_lifetime.prediction.serving import load_predictor
from vllm_lifetime.simulate.comparison import count_capacity
from vllm_lifetime.simulate.engine import ReplayResult
from vllm_lifetime.simulate.images import image_format
from vllm_lifetime.simulate.limits import MAX_CONCURRENCY
from vllm_lifetime.simulate.policies import Variant, replay_policy, train
from vllm_lifetime.simulate.schedule import make_schedule, mean_final_context_blocks
from vllm_lifetime.simulate.scored import Models
from vllm_lifetime.traces.generate import generate_workload
from vllm_lifetime.whole_file import replacing, write_text

__all__ = ["PARAMETERS", "Sweep", "SweepRow", "plot_sweep", "plot_sweeps", "sweep", "write_sweep"]

_T = TypeVar("_T", int, float)

PARAMETERS = ("concurrency", "horizon", "gamma", "predictor", "noise", "rho")
"""What can be varied. `horizon` is K; `predictor` is `markov1` .. `markov5` (online, of that order) or a predictor's file;
`noise` is lambda (Eq. 5); `rho` is the share of the capacity that aggressive prefetch may displace, 0 is conservative."""

DEFAULT_PREDICTOR = f"markov{MAX_ORDER}"

MAX_HORIZON = 16
"""As far as `vllm-lifetime predict` looks."""

TRAINING_SEEDS = 1000
"""Seeds from here on make the workflows that the models learn from."""


@dataclass(frozen=True)
class Sweep:
    """What is varied, and what stays.

    The capacity is `capacity` x `concurrency` x mean final context, also where the concurrency is varied.
    """

    workload: str
    parameter: str
    values: tuple[str, ...]
    policies: tuple[str, ...]
    concurrency: int
    capacity: float
    workflows: int
    training_workflows: int
    seeds: int
    variant: Variant = field(default_factory=lambda: Variant(has_host=True))


@dataclass(frozen=True)
class SweepRow:
    """One policy at one value, over the seeds: mean and sample deviation of the hit rate, and mean blocks evicted per block read.

    What is fetched and displaced again before anybody reads it shows in `evicted_per_read` alone.
    """

    workload: str
    parameter: str
    value: str
    policy: str
    seeds: int
    hit_rate: float
    deviation: float
    evicted_per_read: float


def sweep(what: Sweep, processes: int = 1) -> list[SweepRow]:
    """Replay each value with each seed and each policy, in so many processes.

    Raises:
        ValueError: unknown parameter, workload or policy, or a value out of range.
        PredictorFileError: a predictor's file cannot be used.

    """
    if what.parameter not in PARAMETERS:
        raise ValueError(f"unknown parameter {what.parameter!r}; there are {', '.join(PARAMETERS)}")
    if what.seeds < 1:
        raise ValueError(f"there must be at least one seed, not {what.seeds}")
    for value in what.values:
        _vary(what, value)
    cells = list(product(what.values, range(what.seeds)))
    if processes > 1:
        with ProcessPoolExecutor(processes) as pool:
            measured = list(pool.map(partial(_measure, what), cells))
    else:
        measured = [_measure(what, cell) for cell in cells]
    rows: list[SweepRow] = []
    for value in what.values:
        for index, policy in enumerate(what.policies):
            found = [results[index] for (of, _), results in zip(cells, measured, strict=True) if of == value]
            rates = [result.hit_rate for result in found]
            rows.append(
                SweepRow(
                    what.workload,
                    what.parameter,
                    value,
                    policy,
                    what.seeds,
                    hit_rate=statistics.fmean(rates),
                    deviation=statistics.stdev(rates) if len(rates) > 1 else 0.0,
                    evicted_per_read=statistics.fmean(result.evicted_blocks / result.prompt_blocks for result in found),
                )
            )
    return rows


class _Varied(NamedTuple):
    """What a value of the parameter makes of what could be varied."""

    concurrency: int
    variant: Variant
    horizon: int
    predictor: str


def _vary(what: Sweep, value: str) -> _Varied:
    """Raises ValueError where the value is none, or one that would take for ever."""
    concurrency, variant = what.concurrency, what.variant
    horizon, predictor = DEFAULT_HORIZON, DEFAULT_PREDICTOR
    match what.parameter:
        case "concurrency":
            concurrency = _number(value, int, "a whole number")
            if concurrency > MAX_CONCURRENCY:
                raise ValueError(f"the concurrency must be at most {MAX_CONCURRENCY}, it is {value:.40}")
        case "horizon":
            horizon = _number(value, int, "a whole number")
            if horizon > MAX_HORIZON:
                raise ValueError(f"the horizon K must be at most {MAX_HORIZON}, it is {value:.40}")
            variant = replace(variant, horizon=horizon)
        case "gamma":
            variant = replace(variant, gamma=_number(value, float, "a number"))
        case "noise":
            variant = replace(variant, noise=_number(value, float, "a number"))
        case "rho":
            variant = replace(variant, rho=_number(value, float, "a number"))
        case "predictor":
            predictor = value
    return _Varied(concurrency, variant, horizon, predictor)


def _measure(what: Sweep, cell: tuple[str, int]) -> list[ReplayResult]:
    """What each policy comes to at one value with one seed."""
    value, seed = cell
    concurrency, variant, horizon, predictor = _vary(what, value)
    models = _models(what.workload, what.training_workflows, what.concurrency, seed, predictor, max(1, horizon))
    trace = generate_workload(what.workload, what.workflows, seed)
    mean_blocks = mean_final_context_blocks(trace)
    blocks = what.capacity * what.concurrency * mean_blocks
    capacity_blocks = count_capacity(what.capacity, what.concurrency * mean_blocks, blocks)
    schedule = make_schedule(trace, concurrency, capacity_blocks=capacity_blocks)
    return [replay_policy(schedule, name, capacity_blocks, models, variant) for name in what.policies]


@cache
def _models(workload: str, workflows: int, concurrency: int, seed: int, predictor: str, horizon: int) -> Models:
    """What is known before the measurement. The same for most values of a sweep, and nobody changes it."""
    orders = {f"markov{order}": order for order in range(1, MAX_ORDER + 1)}
    if predictor in orders:
        models = Models(OnlineMarkov(horizon=horizon, max_order=orders[predictor]))
    else:
        models = Models(load_predictor(predictor))
    if not workflows:
        return models
    return train(make_schedule(generate_workload(workload, workflows, TRAINING_SEEDS + seed), concurrency), models)


def _number(text: str, kind: type[_T], name: str) -> _T:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {name}, found {text!r}") from None


def write_sweep(rows: Iterable[SweepRow], path: Path) -> None:
    """Write the rows as a JSON list. Raises OSError."""
    write_text(path, json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def plot_sweep(rows: Sequence[SweepRow], path: Path) -> None:
    """Draw hit rate over the values, a line per policy, into an image file. See `plot_sweeps`."""
    plot_sweeps([rows], path)


def plot_sweeps(sweeps: Sequence[Sequence[SweepRow]], path: Path, columns: int = 1) -> None:
    """Draw several sweeps side by side, `columns` in a row.

    Raises ImportError without matplotlib, OSError, ValueError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    format = image_format(path)
    lines = -(-len(sweeps) // columns)
    size = (7.0, 4.5) if columns == 1 else (4.2 * columns, 3.2 * lines)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    for index, rows in enumerate(sweeps):
        axes = figure.add_subplot(lines, columns, index + 1)
        for policy in dict.fromkeys(row.policy for row in rows):
            line = [row for row in rows if row.policy == policy]
            axes.errorbar(
                # A predictor's file may have a dollar in its name, which begins a formula.
                [row.value.replace("$", r"\$") for row in line],
                [100 * row.hit_rate for row in line],
                [100 * row.deviation for row in line],
                marker="o",
                capsize=3,
                label=policy,
            )
        axes.set_xlabel(rows[0].parameter)
        axes.set_ylabel("hit rate (%)")
        axes.set_title(rows[0].workload)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120 if columns == 1 else 80, format=format)
