# SPDX-License-Identifier: Apache-2.0
"""The paper's model (PBKV appendix B), and one that also knows the order of the prefix. Needs torch-geometric."""

import math

import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphConv  # type: ignore[import-untyped]

from vllm_lifetime.prediction.models.base import Batch, HiddenStream, TransitionModel, mlp
from vllm_lifetime.prediction.samples import MAX_PREFIX

__all__ = ["WIDTH", "GraphSageModel"]

WIDTH = 64
"""d. The hidden state of Qwen3-32B has 5120 elements; with d = 64 throughout the model then has 350k to 360k parameters, as the
paper says of its own, 328k of them in W_t. Without a hidden state it has about 30k."""


class GraphSageModel(TransitionModel):
    """Learnable agent embeddings, two layers of Eq. 3, attention over the prefix (Eq. 4), W_t x, and a two-layer head.

    Eq. 3 is torch-geometric's `GraphConv` without bias, summing over weighted edges: W_1 h_i + W_2 sum_j A_ij h_j is [h_i || (A
    h)_i] W^T with W = [W_1 | W_2]. Its `SAGEConv` is not the same: it takes the mean of the neighbours and ignores A's weights.

    `ordered` adds to each key and value of Eq. 4 a learnable embedding of how many invocations ago it was. Without it attention
    sees a bag: the shares of the agents in the prefix, neither their order nor their number. Not in the paper.
    """

    def __init__(
        self,
        transition_matrix: Tensor,
        horizon: int,
        hidden_size: int,
        ordered: bool = False,
        width: int = WIDTH,
        dropout: float = 0.1,
    ) -> None:
        num_agents = transition_matrix.shape[0]
        super().__init__(num_agents, horizon, hidden_size)
        self.width = width
        self.embedding = nn.Parameter(torch.randn(num_agents, width))
        self.layers = nn.ModuleList(GraphConv(width, width, aggr="add", bias=False) for _ in range(2))
        self.query = nn.Linear(width, width, bias=False)
        self.position = nn.Parameter(torch.randn(MAX_PREFIX, width) * 0.1) if ordered else None
        self.text = HiddenStream(hidden_size, width)
        self.head = mlp([2 * width + self.text.size, width, self.num_outputs], dropout)
        # Edge j -> i carries A_ij h_j to i.
        to, source = transition_matrix.nonzero(as_tuple=True)
        self.register_buffer("edges", torch.stack((source, to)), persistent=False)
        self.register_buffer("weights", transition_matrix[to, source], persistent=False)

    def agent_states(self) -> Tensor:
        """H^(2), (V, d)."""
        states: Tensor = self.embedding
        for layer in self.layers:
            states = torch.relu(layer(states, self.edges, self.weights))
        return states

    def forward(self, batch: Batch) -> Tensor:
        states = self.agent_states()
        current = states[batch.prefix[:, -1]]
        earlier = batch.prefix[:, :-1]
        absent = earlier == self.num_agents
        values = torch.cat((states, torch.zeros(1, self.width)))[earlier]
        if self.position is not None and earlier.shape[1]:
            values = values + self.position[: earlier.shape[1]].flip(0)
        scores = (values @ self.query(current).unsqueeze(2)).squeeze(2) / math.sqrt(self.width)
        # A row with no earlier invocation attends to nothing, and has a path of zeros.
        attention = torch.softmax(scores.masked_fill(absent, -1e9), dim=1).masked_fill(absent, 0.0)
        path = (attention.unsqueeze(1) @ values).squeeze(1)
        return self.split(self.head(torch.cat((current, path, self.text(batch)), dim=1)))
