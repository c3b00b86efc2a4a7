# SPDX-License-Identifier: Apache-2.0
"""What all trained predictors with a fixed set of agents share: names to indices, and what is said where the model has no input.

Imports no torch.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.prediction.forecast import Forecast
from vllm_lifetime.prediction.samples import MAX_PREFIX

__all__ = ["VocabularyPredictor"]

logger = logging.getLogger(__name__)


class VocabularyPredictor:
    """Base of trained predictors: a `TransitionPredictor` once `_probabilities` is there.

    Agents that were not trained on are left out of the prefix; where the present one is such an agent, or the history is empty,
    the forecast is `prior`: (K, V + 1), how often each outcome was step k's in training. A hidden state of another size than
    `hidden_size` (0: the model reads none) is ignored; the first time it is logged and `hidden_state_ignored` is set.
    """

    def __init__(self, agents: Sequence[str], prior: NDArray[np.float64], hidden_size: int) -> None:
        self.agents = tuple(agents)
        self.prior = prior
        self.hidden_size = hidden_size
        self.hidden_state_ignored = False
        self._indices = {agent: i for i, agent in enumerate(self.agents)}

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """As `TransitionPredictor.predict`."""
        indices = self._indices
        if not history or history[-1] not in indices:
            return Forecast(self.agents, self.prior)
        prefix = [indices[agent] for agent in history[-MAX_PREFIX:] if agent in indices]
        if hidden_state is not None and (self.hidden_size == 0 or not self._fits(hidden_state)):
            hidden_state = None
        return Forecast(self.agents, self._probabilities(prefix, hidden_state))

    def _probabilities(self, prefix: Sequence[int], hidden_state: NDArray[np.float32] | None) -> NDArray[np.float64]:
        """(K, V + 1) after a prefix of indices that is not empty; a hidden state is of the right size."""
        raise NotImplementedError

    def _fits(self, hidden_state: NDArray[np.float32]) -> bool:
        if hidden_state.shape == (self.hidden_size,):
            return True
        if not self.hidden_state_ignored:
            self.hidden_state_ignored = True
            logger.warning(
                "The transition predictor was trained on hidden states of size %d, but gets %s: they are ignored. "
                "Train it on the model that is served.",
                self.hidden_size,
                hidden_state.shape,
            )
        return False
