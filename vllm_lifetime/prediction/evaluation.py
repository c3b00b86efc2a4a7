# SPDX-License-Identifier: Apache-2.0
"""How well predictors predict: top-1 accuracy s_1..s_K and log loss, over seeds, split by task (PBKV table 3). Needs torch.

A position counts at step k if the workflow had not ended before step k; END counts like an agent. Each seed has its own split and
its own training.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON, Forecast, TransitionPredictor
from vllm_lifetime.prediction.models.registry import MODELS, TrainingData, train_predictor
from vllm_lifetime.prediction.samples import Samples, list_agents, make_samples, split_by_task
from vllm_lifetime.prediction.training import TrainingOptions
from vllm_lifetime.traces.workflows import AgentWorkflow
from vllm_lifetime.whole_file import finite

__all__ = ["Measurement", "evaluate", "report", "score_predictor"]

LOWEST_PROBABILITY = 1e-4
"""What a predictor is taken to have said where it said less, so that one certain mistake does not outweigh all else."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One predictor over all seeds; lists have an element for each of the K steps, NaN where no test workflow came so far."""

    name: str
    family: str
    variant: str
    parameters: int | None
    seeds: int
    accuracy_mean: list[float]
    accuracy_deviation: list[float]
    log_loss_mean: list[float]
    log_loss_deviation: list[float]
    training_cpu_s: float
    """Mean processor time to train and test it once."""


def score_predictor(predictor: TransitionPredictor, test: Samples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Accuracy and log loss (nats) at each step, over `test`'s targets; NaN where there are none. Two arrays of length K."""
    right, loss = np.zeros(test.horizon), np.zeros(test.horizon)
    for row, prefix in enumerate(test.prefixes):
        forecast = predictor.predict([test.agents[i] for i in prefix], None if test.hidden is None else test.hidden[row])
        probabilities = _aligned(forecast, test.agents)
        counts = test.counts[row]
        right += counts[np.arange(test.horizon), probabilities.argmax(axis=1)]
        loss -= (counts * np.log(np.maximum(LOWEST_PROBABILITY, probabilities))).sum(axis=1)
    counted = test.counts.sum(axis=(0, 2))
    counted = np.where(counted, counted, np.nan)
    return right / counted, loss / counted


def evaluate(
    names: Sequence[str],
    workflows: Sequence[AgentWorkflow],
    seeds: int,
    horizon: int = DEFAULT_HORIZON,
    hidden_states: Sequence[NDArray[np.float32]] | None = None,
    options: TrainingOptions | None = None,
    on_model: Callable[[str], None] | None = None,
    on_seed: Callable[[list[Measurement]], None] | None = None,
) -> list[Measurement]:
    """Train and test predictors with seeds 0, 1, ...: 70 % of the tasks to train, 10 % to validate, 20 % to test.

    All of them are measured with a seed before the next: `on_seed` gets the result so far. `on_model` is told each name before
    its training. Raises `ValueError` if a name is unknown or there are too few tasks.
    """
    rows = {name: _Row(name) for name in names}
    # Agents that training did not see count as what they are: missed.
    agents = list_agents(workflows)
    for seed in range(seeds):
        split = split_by_task(workflows, seed)
        sides = [[workflows[i] for i in side] for side in split]
        hidden = [None if hidden_states is None else [hidden_states[i] for i in side] for side in split]
        data = TrainingData.of(sides[0], sides[1], horizon, seed, hidden[0], hidden[1], options)
        test = make_samples(sides[2], agents, horizon, hidden[2])
        for name, row in rows.items():
            if on_model is not None:
                on_model(name)
            begin = time.process_time()
            predictor = train_predictor(name, data)
            row.add(predictor, *score_predictor(predictor, test), time.process_time() - begin)
        if on_seed is not None:
            on_seed([row.summarise() for row in rows.values()])
    return [row.summarise() for row in rows.values()]


class _Row:
    """What was measured of one predictor, seed by seed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.parameters: int | None = None
        self.accuracies: list[NDArray[np.float64]] = []
        self.losses: list[NDArray[np.float64]] = []
        self.seconds: list[float] = []

    def add(
        self, predictor: TransitionPredictor, accuracy: NDArray[np.float64], loss: NDArray[np.float64], seconds: float
    ) -> None:
        model = getattr(predictor, "model", None)
        if isinstance(model, nn.Module):
            self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.accuracies.append(accuracy)
        self.losses.append(loss)
        self.seconds.append(seconds)

    def summarise(self) -> Measurement:
        return Measurement(
            name=self.name,
            family=MODELS[self.name].family,
            variant=MODELS[self.name].variant,
            parameters=self.parameters,
            seeds=len(self.accuracies),
            accuracy_mean=_over_seeds(np.nanmean, self.accuracies),
            accuracy_deviation=_over_seeds(np.nanstd, self.accuracies),
            log_loss_mean=_over_seeds(np.nanmean, self.losses),
            log_loss_deviation=_over_seeds(np.nanstd, self.losses),
            training_cpu_s=statistics.fmean(self.seconds),
        )


def report(done: Sequence[Measurement], workflows: Sequence[AgentWorkflow], horizon: int, source: str) -> dict[str, object]:
    """What a file of figures holds: the data set in numbers, and each measurement."""
    agents = list_agents(workflows)
    return {
        "source": source,
        "workflows": len(workflows),
        "tasks": len({workflow.task for workflow in workflows}),
        "invocations": sum(len(workflow.agents) for workflow in workflows),
        "prefixes": len(make_samples(workflows, agents, horizon)),
        "agents": list(agents),
        "horizon": horizon,
        "measurements": [
            {
                name: [finite(one) for one in value] if isinstance(value, list) else value
                for name, value in asdict(measurement).items()
            }
            for measurement in done
        ],
    }


def _over_seeds(summarise: Callable[..., Any], values: Sequence[NDArray[np.float64]]) -> list[float]:
    """Of each step, over the seeds that have targets for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no seed has any
        summary: list[float] = summarise(np.stack(values), axis=0).tolist()
    return summary


def _aligned(forecast: Forecast, agents: tuple[str, ...]) -> NDArray[np.float64]:
    """Its probabilities in the columns of `agents` and END; an agent that the predictor does not know has 0."""
    if forecast.agents == agents:
        return forecast.probabilities
    result = np.zeros((forecast.probabilities.shape[0], len(agents) + 1))
    place = {agent: i for i, agent in enumerate(agents)}
    for column, agent in enumerate(forecast.agents):
        if agent in place:
            result[:, place[agent]] = forecast.probabilities[:, column]
    result[:, -1] = forecast.probabilities[:, -1]
    return result
