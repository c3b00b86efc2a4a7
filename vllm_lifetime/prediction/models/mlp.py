# SPDX-License-Identifier: Apache-2.0
"""MLPs over the last few agents, and the linear probe (PBKV table 3)."""

import torch
from torch import Tensor, nn

from vllm_lifetime.prediction.models.base import Batch, HiddenStream, TransitionModel, mlp

__all__ = ["LinearProbeModel", "MlpModel"]


class MlpModel(TransitionModel):
    """One-hot of the last `window` agents, and the hidden state, through layers of the sizes given."""

    def __init__(
        self, num_agents: int, horizon: int, hidden_size: int, window: int, sizes: tuple[int, ...], dropout: float = 0.1
    ) -> None:
        super().__init__(num_agents, horizon, hidden_size)
        self.window = window
        self.text = HiddenStream(hidden_size, sizes[0])
        self.head = mlp([window * (num_agents + 1) + self.text.size, *sizes, self.num_outputs], dropout)

    def forward(self, batch: Batch) -> Tensor:
        last = _last_agents(batch.prefix, self.window, self.num_agents)
        return self.split(self.head(torch.cat((last, self.text(batch)), dim=1)))


class LinearProbeModel(TransitionModel):
    """One linear layer on the hidden state and the present agent."""

    def __init__(self, num_agents: int, horizon: int, hidden_size: int) -> None:
        super().__init__(num_agents, horizon, hidden_size)
        self.agent = nn.Linear(num_agents + 1, self.num_outputs)
        self.probe = nn.Linear(hidden_size, self.num_outputs, bias=False) if hidden_size else None

    def forward(self, batch: Batch) -> Tensor:
        logits = self.agent(_last_agents(batch.prefix, 1, self.num_agents))
        if self.probe is not None and batch.hidden is not None:
            logits = logits + self.probe(batch.hidden)
        return self.split(logits)


def _last_agents(prefix: Tensor, window: int, num_agents: int) -> Tensor:
    """(B, window * (V + 1)): one-hot of each of the last agents, V where there is none."""
    padded = nn.functional.pad(prefix, (window, 0), value=num_agents)[:, -window:]
    return nn.functional.one_hot(padded, num_agents + 1).flatten(1).float()
