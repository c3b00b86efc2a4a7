# SPDX-License-Identifier: Apache-2.0
"""One training loop for all torch models. Needs torch.

Cross-entropy over all K steps, padding after END masked; Adam; the parameters of the epoch with the lowest
validation loss are kept, and training stops when that has not fallen for a while. One thread.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vllm_lifetime.prediction.models.base import Batch, TransitionModel
from vllm_lifetime.prediction.samples import Samples
from vllm_lifetime.prediction.vocabulary import VocabularyPredictor

__all__ = ["TorchPredictor", "TrainingOptions", "masked_loss", "to_batch", "train_model"]


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How to train. `patience`: epochs without a lower validation loss after which it stops."""

    learning_rate: float = 1e-2
    weight_decay: float = 1e-5
    batch_size: int = 1024
    max_epochs: int = 600
    patience: int = 60


class TorchPredictor(VocabularyPredictor):
    """A trained torch model as a `TransitionPredictor`, for evaluation; what serves is its export."""

    def __init__(self, model: TransitionModel, agents: Sequence[str], prior: NDArray[np.float64]) -> None:
        super().__init__(agents, prior, model.hidden_size)
        self.model = model.eval()

    def _probabilities(self, prefix: Sequence[int], hidden_state: NDArray[np.float32] | None) -> NDArray[np.float64]:
        hidden = None if hidden_state is None else torch.from_numpy(np.ascontiguousarray(hidden_state, dtype=np.float32))[None]
        with torch.inference_mode():
            logits = self.model(Batch(torch.tensor([list(prefix)]), hidden))
            probabilities: NDArray[np.float64] = torch.softmax(logits[0].double(), dim=1).numpy()
        return probabilities


def masked_loss(logits: Tensor, counts: Tensor) -> Tensor:
    """Mean cross-entropy over all targets. Both (B, K, V + 1); a window's padding has no count, and so no part in it."""
    return -(counts * torch.log_softmax(logits, dim=2)).sum() / counts.sum()


def to_batch(samples: Samples) -> Batch:
    """All rows as the input of a model."""
    hidden = None if samples.hidden is None else torch.from_numpy(samples.hidden)
    return Batch(torch.from_numpy(samples.padded_prefixes()), hidden)


def train_model(
    build: Callable[[], TransitionModel],
    train: Samples,
    validation: Samples,
    seed: int,
    options: TrainingOptions | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> TransitionModel:
    """Build a model and train it; the same seed gives the same model. `on_epoch(epoch, validation loss)` reports progress.

    Raises `ValueError` if there is no row to train on or to validate with. Uses one thread while it runs, and leaves torch's own
    random state and number of threads as they were.
    """
    if not len(train) or not len(validation):
        raise ValueError(f"nothing to train on: {len(train)} training rows and {len(validation)} validation rows")
    options = options or TrainingOptions()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _train(build(), train, validation, options, on_epoch)
    finally:
        torch.set_num_threads(threads)


def _train(
    model: TransitionModel,
    train: Samples,
    validation: Samples,
    options: TrainingOptions,
    on_epoch: Callable[[int, float], None] | None,
) -> TransitionModel:
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate, weight_decay=options.weight_decay)
    inputs, counts = to_batch(train), torch.from_numpy(train.counts)
    checked, wanted = to_batch(validation), torch.from_numpy(validation.counts)
    best, best_epoch, kept = float("inf"), 0, copy.deepcopy(model.state_dict())
    for epoch in range(options.max_epochs):
        model.train()
        order = torch.randperm(len(train))
        for rows in order.split(options.batch_size):
            batch = Batch(inputs.prefix[rows], None if inputs.hidden is None else inputs.hidden[rows])
            optimizer.zero_grad(set_to_none=True)
            masked_loss(model(batch), counts[rows]).backward()
            optimizer.step()
        model.eval()
        with torch.inference_mode():
            loss = float(masked_loss(model(checked), wanted))
        if on_epoch is not None:
            on_epoch(epoch, loss)
        if loss < best:
            best, best_epoch, kept = loss, epoch, copy.deepcopy(model.state_dict())
        elif epoch - best_epoch >= options.patience:
            break
    model.load_state_dict(kept)
    return model.eval()
