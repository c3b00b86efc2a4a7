# SPDX-License-Identifier: Apache-2.0
"""Predictors as they serve: loaded from a file of plain arrays, run with numpy on the caller's thread.

    load_predictor("agents.npz").predict(["planner", "coder"])

Imports no torch. Scheduler process; `load_predictor` reads a file and belongs to the start.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.prediction.forecast import END, TransitionPredictor
from vllm_lifetime.prediction.markov import ContextTables, MarkovPredictor
from vllm_lifetime.prediction.predictor_file import PredictorFile, PredictorFileError, read_predictor_file
from vllm_lifetime.prediction.samples import MAX_PREFIX
from vllm_lifetime.prediction.vocabulary import VocabularyPredictor

__all__ = ["GRAPHSAGE", "MARKOV", "GraphSagePredictor", "PredictorFileError", "load_predictor"]

GRAPHSAGE = "graphsage"
MARKOV = "markov"


class GraphSagePredictor(VocabularyPredictor):
    """The paper's model (appendix B) after training: what does not depend on the prefix is computed once.

    Everything before the first ReLU of the head is linear in H^(2)[v_t], in the attended rows and in h_txt. So for each agent its
    part of that layer is kept, and so is the attention score of each pair of agents. A prediction is O(prefix x width), 64 x 5120
    multiplications more with a hidden state.
    """

    def __init__(self, file: PredictorFile) -> None:
        header, arrays = file
        super().__init__(header["agents"], arrays["prior"].astype(np.float64), header["hidden_size"])
        states, query, head = arrays["states"], arrays["query"], arrays["head_weight"]
        width = states.shape[1]
        queries = states @ query.T / math.sqrt(width)
        self._scores = queries @ states.T
        self._current = states @ head[:, :width].T + arrays["head_bias"]
        self._values = states @ head[:, width : 2 * width].T
        # One row for each distance from the present; zeros if the model does not know the order.
        positions = arrays.get("position")
        self._position_scores = None if positions is None else queries @ positions.T
        self._position_values = None if positions is None else positions @ head[:, width : 2 * width].T
        self._text = arrays.get("text")
        self._text_head = np.ascontiguousarray(head[:, 2 * width :].T)
        self._output, self._output_bias = np.ascontiguousarray(arrays["output_weight"].T), arrays["output_bias"]
        self._shape = (header["horizon"], len(self.agents) + 1)

    def _probabilities(self, prefix: Sequence[int], hidden_state: NDArray[np.float32] | None) -> NDArray[np.float64]:
        present = prefix[-1]
        layer: NDArray[np.float32] = self._current[present]
        if len(prefix) > 1:
            earlier = np.array(prefix[-2::-1])  # the latest first
            scores = self._scores[present, earlier]
            values = self._values[earlier]
            if self._position_scores is not None and self._position_values is not None:
                scores = scores + self._position_scores[present, : len(earlier)]
                values = values + self._position_values[: len(earlier)]
            attention = np.exp(scores - scores.max())
            layer = layer + attention @ values / attention.sum()
        if hidden_state is not None and self._text is not None:
            layer = layer + np.maximum(self._text @ hidden_state, 0.0) @ self._text_head
        logits = (np.maximum(layer, 0.0) @ self._output + self._output_bias).reshape(self._shape).astype(np.float64)
        logits = np.exp(logits - logits.max(axis=1, keepdims=True))
        if not np.isfinite(logits).all():
            return self.prior  # a hidden state with an infinite or undefined element
        probabilities: NDArray[np.float64] = logits / logits.sum(axis=1, keepdims=True)
        return probabilities


def load_predictor(path: str | Path) -> TransitionPredictor:
    """Load what `vllm-lifetime predict train` wrote. Raises `PredictorFileError`: missing, truncated, no predictor, another
    version, or not what its header says."""
    file = read_predictor_file(path)
    try:
        _check_header(file.header)
        if file.header["model"] == MARKOV:
            return _load_markov(file)
        _check_graphsage(file)
        return GraphSagePredictor(file)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise PredictorFileError(f"The predictor file {path} is not what its header says: {reason}.") from None


def _check_header(header: dict[str, Any]) -> None:
    agents = header["agents"]
    if not isinstance(agents, list) or not agents or not all(isinstance(agent, str) and agent != END for agent in agents):
        raise ValueError("its agents are not a list of names")
    if len(set(agents)) != len(agents):
        raise ValueError("its agents have a name twice")
    if not isinstance(header["horizon"], int) or header["horizon"] < 1:
        raise ValueError(f"its horizon is {header['horizon']!r}")
    if not isinstance(header["hidden_size"], int) or header["hidden_size"] < 0:
        raise ValueError(f"its hidden size is {header['hidden_size']!r}")
    if header["model"] not in (GRAPHSAGE, MARKOV):
        raise ValueError(f"its model is {header['model']!r}, and known are {GRAPHSAGE} and {MARKOV}")


def _check_graphsage(file: PredictorFile) -> None:
    header, arrays = file
    num_agents, horizon, hidden_size = len(header["agents"]), header["horizon"], header["hidden_size"]
    width = arrays["states"].shape[1]
    middle = arrays["head_weight"].shape[0]
    outputs = horizon * (num_agents + 1)
    shapes = {
        "states": (num_agents, width),
        "prior": (horizon, num_agents + 1),
        "query": (width, width),
        "head_weight": (middle, (3 if hidden_size else 2) * width),
        "head_bias": (middle,),
        "output_weight": (outputs, middle),
        "output_bias": (outputs,),
        **({"text": (width, hidden_size)} if hidden_size else {}),
        **({"position": (MAX_PREFIX, width)} if "position" in arrays else {}),
    }
    for name, shape in shapes.items():
        if arrays[name].shape != shape or arrays[name].dtype.kind != "f":
            found = f"{arrays[name].shape} and type {arrays[name].dtype}"
            raise ValueError(f"{name!r} has shape {found}, not {shape} and a float type")
        if not np.isfinite(arrays[name]).all():
            raise ValueError(f"{name!r} has an element that is not finite")


def _load_markov(file: PredictorFile) -> MarkovPredictor:
    header, arrays = file
    agents, horizon, order = header["agents"], header["horizon"], header["max_order"]
    contexts, lengths, counts = arrays["contexts"], arrays["lengths"], arrays["counts"]
    if counts.shape != (len(contexts), horizon, len(agents) + 1) or lengths.shape != (len(contexts),):
        raise ValueError(f"'counts' has shape {counts.shape} for {len(contexts)} contexts")
    tables = ContextTables(horizon, order, len(agents), max(1, len(contexts)))
    for agent in agents:
        tables.number(agent)
    for context, length, table in zip(contexts.tolist(), lengths.tolist(), counts, strict=True):
        tables.tables[tuple(context[:length])] = table.astype(np.float64)
    return MarkovPredictor(tables, blend=bool(header["blend"]))
