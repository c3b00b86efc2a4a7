# SPDX-License-Identifier: Apache-2.0
"""Sequence models (PBKV table 3): Transformer with one or two layers, temporal convolution small and large."""

import torch
from torch import Tensor, nn

from vllm_lifetime.prediction.models.base import Batch, HiddenStream, TransitionModel, mlp
from vllm_lifetime.prediction.samples import MAX_PREFIX

__all__ = ["TcnModel", "TransformerModel"]


class TransformerModel(TransitionModel):
    """An encoder over the prefix with learnable positions, counted back from the present invocation, whose state is read."""

    def __init__(
        self, num_agents: int, horizon: int, hidden_size: int, layers: int, width: int = 32, dropout: float = 0.1
    ) -> None:
        super().__init__(num_agents, horizon, hidden_size)
        self.embedding = nn.Embedding(num_agents + 1, width)
        self.position = nn.Parameter(torch.randn(MAX_PREFIX, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.text = HiddenStream(hidden_size, width)
        self.head = mlp([width + self.text.size, width, self.num_outputs], dropout)

    def forward(self, batch: Batch) -> Tensor:
        length = batch.prefix.shape[1]
        states = self.embedding(batch.prefix) + self.position[:length].flip(0)
        states = self.encoder(states, src_key_padding_mask=batch.prefix == self.num_agents)
        return self.split(self.head(torch.cat((states[:, -1], self.text(batch)), dim=1)))


class TcnModel(TransitionModel):
    """Causal convolutions of kernel 3 with dilations 1, 2, 4, ...: `levels` of them see 2^(levels + 1) - 1 invocations."""

    def __init__(
        self, num_agents: int, horizon: int, hidden_size: int, levels: int, width: int, dropout: float = 0.1
    ) -> None:
        super().__init__(num_agents, horizon, hidden_size)
        self.embedding = nn.Embedding(num_agents + 1, width, padding_idx=num_agents)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, kernel_size=3, dilation=2**i) for i in range(levels))
        self.dropout = nn.Dropout(dropout)
        self.text = HiddenStream(hidden_size, width)
        self.head = mlp([width + self.text.size, width, self.num_outputs], dropout)

    def forward(self, batch: Batch) -> Tensor:
        states: Tensor = self.embedding(batch.prefix).transpose(1, 2)
        # A convolution's bias must not tell how much padding stands before a prefix: that depends on its batch.
        present = (batch.prefix != self.num_agents).unsqueeze(1)
        for level, convolution in enumerate(self.convolutions):
            padded = nn.functional.pad(states, (2 ** (level + 1), 0))
            states = (states + self.dropout(torch.relu(convolution(padded)))) * present
        return self.split(self.head(torch.cat((states[:, :, -1], self.text(batch)), dim=1)))
