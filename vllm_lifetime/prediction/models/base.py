# SPDX-License-Identifier: Apache-2.0
"""What all torch models have in common: their input, and the projected hidden state."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Batch", "HiddenStream", "TransitionModel", "mlp"]


class Batch(NamedTuple):
    """B prefixes over V agents.

    `prefix`: (B, L) indices, the present agent in the last column, V where there is none. `hidden`: (B, hidden size) or None.
    """

    prefix: Tensor
    hidden: Tensor | None


class TransitionModel(nn.Module):
    """Maps a `Batch` to logits (B, K, V + 1), END last. All K steps come from one pass."""

    def __init__(self, num_agents: int, horizon: int, hidden_size: int) -> None:
        super().__init__()
        self.num_agents = num_agents
        self.horizon = horizon
        self.hidden_size = hidden_size

    @property
    def num_outputs(self) -> int:
        """Logits of one row."""
        return self.horizon * (self.num_agents + 1)

    def split(self, logits: Tensor) -> Tensor:
        """(B, outputs) -> (B, K, V + 1)."""
        return logits.view(-1, self.horizon, self.num_agents + 1)


class HiddenStream(nn.Module):
    """h_txt = ReLU(W_t x) (appendix B iii), without a bias; zeros where there is no hidden state; nothing if `hidden_size` is
    0."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.size = width if hidden_size else 0
        self.project = nn.Linear(hidden_size, width, bias=False) if hidden_size else None

    def forward(self, batch: Batch) -> Tensor:
        rows = batch.prefix.shape[0]
        if self.project is None or batch.hidden is None:
            return torch.zeros(rows, self.size)
        projected: Tensor = torch.relu(self.project(batch.hidden))
        return projected


def mlp(sizes: list[int], dropout: float) -> nn.Sequential:
    """Linear layers of the sizes given, ReLU and dropout between them."""
    layers: list[nn.Module] = []
    for size, following in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(size, following), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))
