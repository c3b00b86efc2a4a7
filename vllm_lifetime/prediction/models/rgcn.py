# SPDX-License-Identifier: Apache-2.0
"""R-GCN (PBKV table 3): two relational graph layers over the call graph, the mean of the prefix. Needs torch-geometric."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import RGCNConv  # type: ignore[import-untyped]

from vllm_lifetime.prediction.models.base import Batch, HiddenStream, TransitionModel, mlp

__all__ = ["RgcnModel"]


class RgcnModel(TransitionModel):
    """Relation 0: "is followed by", 1: "follows". The paper does not say more of its own; what reads the prefix is our choice."""

    def __init__(self, transition_matrix: Tensor, horizon: int, hidden_size: int, width: int = 64, dropout: float = 0.1) -> None:
        num_agents = transition_matrix.shape[0]
        super().__init__(num_agents, horizon, hidden_size)
        self.width = width
        self.embedding = nn.Parameter(torch.randn(num_agents, width))
        self.layers = nn.ModuleList(RGCNConv(width, width, num_relations=2) for _ in range(2))
        self.text = HiddenStream(hidden_size, width)
        self.head = mlp([2 * width + self.text.size, width, self.num_outputs], dropout)
        forward = transition_matrix.nonzero().T
        self.register_buffer("edges", torch.cat((forward, forward.flip(0)), dim=1), persistent=False)
        self.register_buffer("relations", torch.arange(2).repeat_interleave(forward.shape[1]), persistent=False)

    def forward(self, batch: Batch) -> Tensor:
        states: Tensor = self.embedding
        for layer in self.layers:
            states = torch.relu(layer(states, self.edges, self.relations))
        present = (batch.prefix != self.num_agents).unsqueeze(2)
        path = (torch.cat((states, torch.zeros(1, self.width)))[batch.prefix] * present).sum(1) / present.sum(1)
        return self.split(self.head(torch.cat((states[batch.prefix[:, -1]], path, self.text(batch)), dim=1)))
