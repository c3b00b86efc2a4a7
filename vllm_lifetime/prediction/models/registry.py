# SPDX-License-Identifier: Apache-2.0
"""Every predictor by name: the paper's model, its whole baseline table (PBKV table 3), and what we add."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_lifetime.prediction.forecast import Forecast, TransitionPredictor
from vllm_lifetime.prediction.markov import MAX_ORDER, MarkovPredictor, chain_steps
from vllm_lifetime.prediction.models.base import TransitionModel
from vllm_lifetime.prediction.models.graphsage import GraphSageModel
from vllm_lifetime.prediction.models.knn import KnnPredictor
from vllm_lifetime.prediction.models.mlp import LinearProbeModel, MlpModel
from vllm_lifetime.prediction.models.rgcn import RgcnModel
from vllm_lifetime.prediction.models.sequence import TcnModel, TransformerModel
from vllm_lifetime.prediction.samples import Samples, list_agents, make_samples
from vllm_lifetime.prediction.training import TorchPredictor, TrainingOptions, train_model
from vllm_lifetime.traces.workflows import AgentWorkflow

__all__ = ["MODELS", "ModelSpec", "TrainingData", "train_predictor"]

HiddenStates = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class TrainingData:
    """What a predictor is trained on. `seed` decides whatever is random about it."""

    workflows: Sequence[AgentWorkflow]
    train: Samples
    validation: Samples
    seed: int
    options: TrainingOptions
    on_epoch: Callable[[int, float], None] | None = None

    @classmethod
    def of(
        cls,
        train: Sequence[AgentWorkflow],
        validation: Sequence[AgentWorkflow],
        horizon: int,
        seed: int,
        train_hidden: HiddenStates | None = None,
        validation_hidden: HiddenStates | None = None,
        options: TrainingOptions | None = None,
        on_epoch: Callable[[int, float], None] | None = None,
    ) -> "TrainingData":
        """The agents are those of `train`."""
        agents = list_agents(train)
        return cls(
            workflows=train,
            train=make_samples(train, agents, horizon, train_hidden),
            validation=make_samples(validation, agents, horizon, validation_hidden),
            seed=seed,
            options=options or TrainingOptions(),
            on_epoch=on_epoch,
        )


@dataclass(frozen=True)
class ModelSpec:
    """One predictor: its family and variant as tables name them, and how it is trained. `serves`: whether it can be exported."""

    family: str
    variant: str
    train: Callable[[TrainingData], TransitionPredictor]
    serves: bool = False


def train_predictor(name: str, data: TrainingData) -> TransitionPredictor:
    """Train one by name. Raises `ValueError` for an unknown name and for data without rows."""
    if name not in MODELS:
        raise ValueError(f"unknown predictor {name!r}; known: {', '.join(MODELS)}")
    if not len(data.train):
        raise ValueError("nothing to train on: no invocation in the training workflows")
    if not len(data.validation):
        raise ValueError(
            f"nothing to stop training by: none of the validation workflows' agents is one of the {len(data.train.agents)} "
            "to train on; give more workflows, of tasks that share agents"
        )
    return MODELS[name].train(data)


class ChainedMarkov:
    """Steps beyond the first by chaining the first (see `markov.chain_steps`); for comparison only."""

    def __init__(self, one_step: MarkovPredictor, horizon: int) -> None:
        self.one_step = one_step
        self.horizon = horizon

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """As `TransitionPredictor.predict`."""
        return Forecast(self.one_step.agents, chain_steps(self.one_step, history, self.horizon))


def _markov(order: int, blend: bool) -> Callable[[TrainingData], MarkovPredictor]:
    def train(data: TrainingData) -> MarkovPredictor:
        return MarkovPredictor.train(data.workflows, data.train.agents, order, data.train.horizon, blend)

    return train


def _chained(data: TrainingData) -> ChainedMarkov:
    return ChainedMarkov(_markov(MAX_ORDER, blend=True)(data), data.train.horizon)


def _knn(k: int) -> Callable[[TrainingData], KnnPredictor]:
    return lambda data: KnnPredictor(data.train, k)


def _torch(build: Callable[[Samples], TransitionModel]) -> Callable[[TrainingData], TorchPredictor]:
    def train(data: TrainingData) -> TorchPredictor:
        samples = data.train
        model = train_model(lambda: build(samples), samples, data.validation, data.seed, data.options, data.on_epoch)
        return TorchPredictor(model, samples.agents, samples.prior())

    return train


def _graphsage(ordered: bool) -> Callable[[Samples], GraphSageModel]:
    return lambda samples: GraphSageModel(
        torch.from_numpy(samples.transition_matrix()), samples.horizon, samples.hidden_size, ordered
    )


def _rgcn(samples: Samples) -> RgcnModel:
    return RgcnModel(torch.from_numpy(samples.transition_matrix()), samples.horizon, samples.hidden_size)


def _transformer(layers: int) -> Callable[[Samples], TransformerModel]:
    return lambda samples: TransformerModel(len(samples.agents), samples.horizon, samples.hidden_size, layers)


def _tcn(levels: int, width: int) -> Callable[[Samples], TcnModel]:
    return lambda samples: TcnModel(len(samples.agents), samples.horizon, samples.hidden_size, levels, width)


def _mlp(window: int, *sizes: int) -> Callable[[Samples], MlpModel]:
    return lambda samples: MlpModel(len(samples.agents), samples.horizon, samples.hidden_size, window, sizes)


def _without_hidden(build: Callable[[Samples], TransitionModel]) -> Callable[[Samples], TransitionModel]:
    return lambda samples: build(replace(samples, hidden=None))


def _linear_probe(samples: Samples) -> LinearProbeModel:
    return LinearProbeModel(len(samples.agents), samples.horizon, samples.hidden_size)


MODELS: dict[str, ModelSpec] = {
    "graphsage": ModelSpec("GraphSAGE", "PBKV", _torch(_graphsage(ordered=False)), serves=True),
    "graphsage-ordered": ModelSpec("GraphSAGE", "ordered", _torch(_graphsage(ordered=True)), serves=True),
    "rgcn": ModelSpec("R-GCN", "", _torch(_rgcn)),
    "transformer-1l": ModelSpec("Transformer", "1L", _torch(_transformer(1))),
    "transformer-2l": ModelSpec("Transformer", "2L", _torch(_transformer(2))),
    "tcn-small": ModelSpec("TCN", "small", _torch(_tcn(levels=2, width=32))),
    "tcn-large": ModelSpec("TCN", "large", _torch(_tcn(levels=4, width=64))),
    "mlp-tiny": ModelSpec("MLP", "tiny", _torch(_without_hidden(_mlp(3, 16)))),
    "mlp-small": ModelSpec("MLP", "small", _torch(_mlp(5, 64))),
    "mlp-deep": ModelSpec("MLP", "deep", _torch(_mlp(8, 128, 128, 64))),
    "linear-probe": ModelSpec("Linear probe", "post-norm", _torch(_linear_probe)),
    "knn-5": ModelSpec("kNN", "k=5", _knn(5)),
    "knn-20": ModelSpec("kNN", "k=20", _knn(20)),
    **{
        f"markov-{order}": ModelSpec("Markov", f"n={order}", _markov(order, blend=False), serves=True)
        for order in range(1, MAX_ORDER + 1)
    },
    "markov-variable": ModelSpec("Markov", f"n=1..{MAX_ORDER} blended", _markov(MAX_ORDER, blend=True), serves=True),
    "markov-chained": ModelSpec("Markov", f"n=1..{MAX_ORDER} chained", _chained),
}
"""Name -> predictor, in the order of tables."""
