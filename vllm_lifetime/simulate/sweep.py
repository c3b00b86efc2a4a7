# SPDX-License-Identifier: Apache-2.0
"""How hit rates depend on one parameter, over made-up workloads of several seeds (PBKV figures 5, 10, 11 and 12)."""

import json
import statistics
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TypeVar

from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON
from vllm_lifetime.prediction.markov import MAX_ORDER
from vllm_lifetime.prediction.online import OnlineMarkov
from vllm_lifetime.prediction.serving import load_predictor
from vllm_lifetime.simulate.policies import BELADY, Variant, replay_policy, train
from vllm_lifetime.simulate.schedule import make_schedule, mean_final_context_blocks
from vllm_lifetime.simulate.scored import Models
from vllm_lifetime.traces.generate import generate_workload
from vllm_lifetime.traces.schema import Trace

__all__ = ["PARAMETERS", "Sweep", "SweepRow", "plot_sweep", "sweep", "write_sweep"]

_T = TypeVar("_T", int, float)

PARAMETERS = ("concurrency", "horizon", "gamma", "predictor", "noise", "rho")
"""What can be varied. `horizon` is K; `predictor` is `markov1` .. `markov5` (online, of that order) or a predictor's file;
`noise` is lambda (Eq. 5); `rho` is the share of the capacity that aggressive prefetch may displace, 0 is conservative."""

TRAINING_SEEDS = 1000
"""Seeds from here on make the workflows that the models learn from."""


@dataclass(frozen=True)
class Sweep:
    """What is varied, and what stays.

    The capacity is `capacity` x `concurrency` x mean final context, also where concurrency varies.
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
    """One policy at one value: mean and sample deviation of the hit rate over the seeds."""

    workload: str
    parameter: str
    value: str
    policy: str
    seeds: int
    hit_rate: float
    deviation: float


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
    cells = list(product(what.values, range(what.seeds)))
    if processes > 1:
        with ProcessPoolExecutor(processes) as pool:
            rates = list(pool.map(partial(_measure, what), cells))
    else:
        rates = [_measure(what, cell) for cell in cells]
    rows: list[SweepRow] = []
    for value in what.values:
        for index, policy in enumerate(what.policies):
            found = [rate[index] for (of, _), rate in zip(cells, rates, strict=True) if of == value]
            deviation = statistics.stdev(found) if len(found) > 1 else 0.0
            rows.append(
                SweepRow(what.workload, what.parameter, value, policy, what.seeds, statistics.fmean(found), deviation)
            )
    return rows


def _measure(what: Sweep, cell: tuple[str, int]) -> list[float]:
    """The hit rate of each policy at one value with one seed."""
    value, seed = cell
    concurrency, variant = what.concurrency, what.variant
    models = Models(OnlineMarkov(horizon=DEFAULT_HORIZON))
    match what.parameter:
        case "concurrency":
            concurrency = _number(value, int, "a whole number")
        case "horizon":
            variant = replace(variant, horizon=_number(value, int, "a whole number"))
            models = Models(OnlineMarkov(horizon=max(1, variant.horizon or 1)))
        case "gamma":
            variant = replace(variant, gamma=_number(value, float, "a number"))
        case "noise":
            variant = replace(variant, noise=_number(value, float, "a number"))
        case "rho":
            variant = replace(variant, rho=_number(value, float, "a number"))
        case "predictor":
            orders = {f"markov{order}": order for order in range(1, MAX_ORDER + 1)}
            models = Models(OnlineMarkov(max_order=orders[value]) if value in orders else load_predictor(value))
    trace = generate_workload(what.workload, what.workflows, seed)
    if what.training_workflows:
        training: Trace = generate_workload(what.workload, what.training_workflows, TRAINING_SEEDS + seed)
        models = train(make_schedule(training, what.concurrency), models)
    schedule = make_schedule(trace, concurrency)
    capacity_blocks = int(what.capacity * what.concurrency * mean_final_context_blocks(trace))
    rates: list[float] = []
    for name in what.policies:
        known = None if name == BELADY else models
        rates.append(replay_policy(schedule, name, capacity_blocks, known, variant).hit_rate)
    return rates


def _number(text: str, kind: type[_T], name: str) -> _T:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"expected {name}, found {text!r}") from None


def write_sweep(rows: Iterable[SweepRow], path: Path) -> None:
    """Write the rows as a JSON list. Raises OSError."""
    path.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def plot_sweep(rows: Sequence[SweepRow], path: Path) -> None:
    """Draw hit rate over the values, a line per policy, into an image file.

    Raises ImportError without matplotlib, OSError, ValueError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row.policy for row in rows):
        line = [row for row in rows if row.policy == policy]
        axes.errorbar(
            [row.value for row in line],
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
    axes.legend()
    figure.savefig(path, dpi=120)
