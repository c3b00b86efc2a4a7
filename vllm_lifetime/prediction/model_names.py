# SPDX-License-Identifier: Apache-2.0
"""The names of the predictors that can be trained, known without torch; `models/registry.py` has the predictors."""

from vllm_lifetime.prediction.markov import MAX_ORDER

__all__ = ["MODEL_NAMES", "SERVING_MODELS"]

_MARKOV = tuple(f"markov-{order}" for order in range(1, MAX_ORDER + 1))

MODEL_NAMES = (
    *("graphsage", "graphsage-ordered", "rgcn", "transformer-1l", "transformer-2l", "tcn-small", "tcn-large"),
    *("mlp-tiny", "mlp-small", "mlp-deep", "linear-probe", "knn-5", "knn-20", *_MARKOV, "markov-variable", "markov-chained"),
)
"""In the order of tables."""

SERVING_MODELS = ("graphsage", "graphsage-ordered", *_MARKOV, "markov-variable")
"""Those that a server can answer with."""
