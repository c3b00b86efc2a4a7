# SPDX-License-Identifier: Apache-2.0
"""Predictors that learn while serving: for the cold start, for agents nobody trained on, and for behaviour that changes.

No torch. Scheduler process, one thread, no IO.
"""

import json
import logging
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON, END, Forecast, TransitionPredictor
from vllm_lifetime.prediction.markov import MAX_ORDER, ContextTables

__all__ = ["OnlineMarkov", "OnlineStateError", "SwitchingPredictor"]

logger = logging.getLogger(__name__)

STATE_VERSION = 1

LOWEST_PROBABILITY = 1e-3
"""What a predictor is taken to have said where it said less: bounds what one surprise weighs."""


class OnlineStateError(ValueError):
    """What `OnlineMarkov.from_json` was given is no saved state; the message says why."""


class OnlineMarkov:
    """A variable-order Markov model, blended (see `markov`), that forgets. A `TransitionPredictor`.

    Each row of counts remembers about `memory` of its latest observations, so that after a change the new behaviour has more
    weight than the old after about 0.7 x `memory` of them in the same context. At most `max_contexts` contexts, the least
    recently seen dropped first, and `max_agents` agents: a further one takes the place of the least recently invoked if that one
    has not been invoked for `max_agents` x `memory` observations, and is unknown otherwise. About K x max_agents x 8 bytes for
    each context.
    """

    def __init__(
        self,
        horizon: int = DEFAULT_HORIZON,
        max_order: int = MAX_ORDER,
        memory: float = 200.0,
        max_agents: int = 64,
        max_contexts: int = 4096,
    ) -> None:
        if memory < 1.0:
            raise ValueError(f"memory must be at least 1 observation, but is {memory}")
        self.memory = memory
        self._tables = ContextTables(horizon, max_order, max_agents, max_contexts, keep=1.0 - 1.0 / memory)
        self._names: tuple[str, ...] = ()
        self._last_invoked: dict[str, int] = {}
        self._num_observed = 0

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents it knows."""
        return self._names

    @property
    def num_contexts(self) -> int:
        """Contexts kept."""
        return len(self._tables.tables)

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """As `TransitionPredictor.predict`; the hidden state is not used. Before it has observed anything, all outcomes are as
        likely."""
        return Forecast(self._names, self._tables.probabilities(history))

    def observe(self, history: Sequence[str]) -> None:
        """Learn from the last element of `history`: the agent invoked now or, when the workflow has ended, `END`."""
        if not history:
            return
        self._num_observed += 1
        agent = history[-1]
        if agent != END:
            self._make_room(agent)
            if agent in self._tables.numbers or len(self._tables.agents) < self._tables.max_agents:
                # Kept in the order of their last invocation.
                self._last_invoked.pop(agent, None)
                self._last_invoked[agent] = self._num_observed
        self._tables.add(history)
        if len(self._names) != len(self._tables.agents):
            self._names = tuple(self._tables.agents)

    def to_json(self) -> str:
        """All that was learned, for `from_json`."""
        tables = self._tables
        contexts = [
            [list(context), [[[int(i), round(float(row[i]), 4)] for i in np.flatnonzero(row > 1e-3)] for row in table]]
            for context, table in tables.tables.items()
        ]
        return json.dumps(
            {
                "version": STATE_VERSION,
                "horizon": tables.horizon,
                "max_order": tables.max_order,
                "agents": tables.agents,
                "least_recent_first": list(self._last_invoked),
                "contexts": contexts,
            }
        )

    @classmethod
    def from_json(
        cls,
        text: str,
        horizon: int = DEFAULT_HORIZON,
        max_order: int = MAX_ORDER,
        memory: float = 200.0,
        max_agents: int = 64,
        max_contexts: int = 4096,
    ) -> "OnlineMarkov":
        """A model with the options given that knows what was saved, as far as it has room. Raises `OnlineStateError`."""
        model = cls(horizon, max_order, memory, max_agents, max_contexts)
        try:
            model._restore(json.loads(text))
        except (KeyError, TypeError, IndexError, ValueError, RecursionError, OverflowError) as error:
            raise OnlineStateError(f"not a saved online predictor: {type(error).__name__}: {error}") from None
        return model

    def _restore(self, state: dict[str, object]) -> None:
        saved_as = (state["version"], state["horizon"], state["max_order"])
        tables = self._tables
        if saved_as != (STATE_VERSION, tables.horizon, tables.max_order):
            raise ValueError(
                f"version, horizon and order are {saved_as}, and not {(STATE_VERSION, tables.horizon, tables.max_order)}"
            )
        names, recent, contexts = state["agents"], state["least_recent_first"], state["contexts"]
        if not isinstance(names, list) or not isinstance(contexts, list) or not isinstance(recent, list):
            raise TypeError("agents, least_recent_first and contexts must be lists")
        if len(set(names)) != len(names) or not all(isinstance(name, str) and name != END for name in names):
            raise ValueError("its agents must be different names")
        if not set(recent) <= set(names):
            raise ValueError("least_recent_first names an agent that is not there")
        names = names[: tables.max_agents]
        for name in names:
            tables.number(name)
        # Contexts too many: those seen last are kept.
        for context, rows in contexts[-tables.max_contexts :]:
            key = tuple(context)
            if len(key) > tables.max_order or len(rows) != tables.horizon or not all(type(i) is int and i >= -2 for i in key):
                raise ValueError(f"{context!r:.60} is no context")
            if any(i >= len(names) for i in key):
                continue
            table = np.zeros((tables.horizon, tables.max_agents + 1))
            for step, row in enumerate(rows):
                for column, count in row:
                    if type(column) is not int or column < 0 or not 0.0 <= count < float("inf"):
                        raise ValueError(f"{[column, count]!r:.60} is no count")
                    if column <= len(names):
                        table[step, column] = count
            tables.tables[key] = table
        self._names = tuple(names)
        self._last_invoked = {name: 0 for name in recent if name in tables.numbers}

    def _make_room(self, agent: str) -> None:
        tables = self._tables
        if agent in tables.numbers or len(tables.agents) < tables.max_agents or not self._last_invoked:
            return
        oldest = next(iter(self._last_invoked))
        if self._num_observed - self._last_invoked[oldest] > tables.max_agents * self.memory:
            del self._last_invoked[oldest]
            tables.replace(oldest, agent)
            self._names = tuple(tables.agents)


class SwitchingPredictor:
    """The online or the trained predictor, whichever was better on what was just seen. A `TransitionPredictor`.

    Both say what comes next before it is observed; the log loss of each is averaged with exponential weights over about `window`
    observations. It starts with the online one and changes over when the other is better by `margin` nats on average, at the
    earliest `patience` observations after the last change. Where the trained one does not know the present agent, the online one
    answers. A trained predictor that raises is not asked again.
    """

    def __init__(
        self,
        online: OnlineMarkov,
        trained: TransitionPredictor | None,
        window: float = 100.0,
        margin: float = 0.02,
        patience: int = 20,
    ) -> None:
        self.online = online
        self.trained = trained
        self.margin = margin
        self.patience = patience
        self._rate = 1.0 / window
        self._uses_trained = False
        self._num_judged = 0
        self._since_change = 0
        self._online_loss = 0.0
        self._trained_loss = 0.0

    @property
    def uses_trained(self) -> bool:
        """Whether the trained one answers at present."""
        return self._uses_trained and self.trained is not None

    @property
    def losses(self) -> tuple[float, float]:
        """Recent mean log loss in nats of the next invocation: online, trained. 0 until something was observed."""
        return self._online_loss, self._trained_loss

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """As `TransitionPredictor.predict`."""
        if self._uses_trained and history:
            forecast = self._ask_trained(history, hidden_state)
            if forecast is not None and history[-1] in forecast.agents:
                return forecast
        return self.online.predict(history)

    def observe(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> None:
        """As `OnlineMarkov.observe`. `hidden_state`: what `predict` was given for `history[:-1]`, so that the trained predictor
        is judged by what it really says."""
        before = history[:-1]
        # The first invocation of a workflow is what no trained predictor was trained to say.
        if before and self.trained is not None:
            forecast = self._ask_trained(before, hidden_state)
            if forecast is not None:
                self._judge(_log_loss(self.online.predict(before), history[-1]), _log_loss(forecast, history[-1]))
        self.online.observe(history)

    def _judge(self, online_loss: float, trained_loss: float) -> None:
        self._num_judged += 1
        self._since_change += 1
        # The plain mean of what there is, as long as that is less than the window.
        rate = max(self._rate, 1.0 / self._num_judged)
        self._online_loss += rate * (online_loss - self._online_loss)
        self._trained_loss += rate * (trained_loss - self._trained_loss)
        better_by = self._online_loss - self._trained_loss
        if self._since_change >= self.patience and (better_by < -self.margin if self._uses_trained else better_by > self.margin):
            self._uses_trained = not self._uses_trained
            self._since_change = 0

    def _ask_trained(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None) -> Forecast | None:
        if self.trained is None:
            return None
        try:
            return self.trained.predict(history, hidden_state)
        except Exception:
            # It may be anybody's; the scheduler must go on.
            logger.warning("The trained transition predictor failed and is not used any more.", exc_info=True)
            self.trained = None
            return None


def _log_loss(forecast: Forecast, outcome: str) -> float:
    """In nats, of the first step."""
    row = forecast.probabilities[0]
    outcomes = (*forecast.agents, END)
    said = float(row[outcomes.index(outcome)]) if outcome in outcomes else 0.0
    return -math.log(max(LOWEST_PROBABILITY, said))
