# SPDX-License-Identifier: Apache-2.0
"""From a trained predictor to the file that serves (see `serving`). Needs torch, which the file does not."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vllm_lifetime.prediction.forecast import TransitionPredictor
from vllm_lifetime.prediction.markov import MarkovPredictor
from vllm_lifetime.prediction.models.graphsage import GraphSageModel
from vllm_lifetime.prediction.predictor_file import write_predictor_file
from vllm_lifetime.prediction.serving import GRAPHSAGE, MARKOV
from vllm_lifetime.prediction.training import TorchPredictor

__all__ = ["export_predictor"]


def export_predictor(predictor: TransitionPredictor, path: str | Path) -> None:
    """Write a GraphSAGE or Markov predictor to one file. Raises `ValueError` for any other, which is for comparison only;
    `OSError`."""
    if isinstance(predictor, MarkovPredictor):
        header, arrays = _markov(predictor)
    elif isinstance(predictor, TorchPredictor) and isinstance(predictor.model, GraphSageModel):
        header, arrays = _graphsage(predictor, predictor.model)
    else:
        raise ValueError(f"a {type(predictor).__name__} cannot be exported: only GraphSAGE and Markov predictors serve")
    write_predictor_file(path, header, arrays)


def _graphsage(predictor: TorchPredictor, model: GraphSageModel) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    first, last = model.head[0], model.head[-1]
    if not isinstance(first, nn.Linear) or not isinstance(last, nn.Linear):
        raise ValueError("the head is not two linear layers")
    with torch.inference_mode():
        tensors: dict[str, Tensor | None] = {
            "states": model.agent_states(),
            "query": model.query.weight,
            "position": model.position,
            "text": None if model.text.project is None else model.text.project.weight,
            "head_weight": first.weight,
            "head_bias": first.bias,
            "output_weight": last.weight,
            "output_bias": last.bias,
        }
        arrays: dict[str, NDArray[Any]] = {
            name: tensor.detach().numpy() for name, tensor in tensors.items() if tensor is not None
        }
    arrays["prior"] = predictor.prior
    return _header(GRAPHSAGE, predictor.agents, model.horizon, model.hidden_size), arrays


def _markov(predictor: MarkovPredictor) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    tables = predictor.tables
    contexts = np.zeros((len(tables.tables), tables.max_order + 1), dtype=np.int32)
    lengths = np.array([len(context) for context in tables.tables], dtype=np.int32)
    for row, context in enumerate(tables.tables):
        contexts[row, : len(context)] = context
    width = len(tables.agents) + 1
    counts = np.array([table[:, :width] for table in tables.tables.values()]).reshape(-1, tables.horizon, width)
    header = _header(MARKOV, predictor.agents, tables.horizon, 0)
    return {**header, "max_order": tables.max_order, "blend": predictor.blend}, {
        "contexts": contexts,
        "lengths": lengths,
        "counts": counts.astype(np.float32),
    }


def _header(model: str, agents: tuple[str, ...], horizon: int, hidden_size: int) -> dict[str, Any]:
    return {"model": model, "agents": list(agents), "horizon": horizon, "hidden_size": hidden_size}
