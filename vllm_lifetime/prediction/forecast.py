# SPDX-License-Identifier: Apache-2.0
"""What a transition predictor says, and the one method that it has.

Imports no torch: forecasts are read in the scheduler process.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEFAULT_HORIZON", "END", "Forecast", "TransitionPredictor"]

END = "<END>"
"""The outcome that the workflow invokes no agent any more. No agent may have this name."""

DEFAULT_HORIZON = 3
"""K, the invocations looked ahead (PBKV section 6.2)."""


class Forecast(NamedTuple):
    """The next K invocations of one workflow (PBKV section 4.1 and appendix G.1).

    `probabilities[k - 1, a]` is P_w^(k)(a): the probability that invocation k from now is of `agents[a]`, given that the workflow
    has not ended before; the last column is END's. Shape (K, len(agents) + 1), float64, each row sums to 1.
    """

    agents: tuple[str, ...]
    probabilities: NDArray[np.float64]


class TransitionPredictor(Protocol):
    """Whatever can tell who is called next."""

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """The next invocations of a workflow that has invoked the agents `history` so far, oldest first, the present one last.

        `hidden_state` is the post-norm hidden state of the last prompt token of the present invocation, shape (hidden size,), if
        it is at hand. Never raises: an agent that was never seen, or an empty history, gives a less certain forecast.
        """
