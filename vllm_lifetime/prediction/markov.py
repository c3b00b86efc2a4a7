# SPDX-License-Identifier: Apache-2.0
"""Markov predictors of order 1 to 5 with back-off: the baseline of PBKV's Table 3, and what the online model is made of.

For each context (the last n agents, n from 0 to the order) there is one table per step k: how often each agent, or END, was
invoked k invocations later. Steps are counted directly and not by chaining one-step tables: a chain forgets at each step what
lies beyond the order, and the direct count is one lookup (`vllm-lifetime predict evaluate` compares both). What follows END is
not counted, so that step k is conditional on not having ended before, as `Forecast` says.

Two ways to back off. *Longest*: the longest context that was seen decides alone. *Blend* (variable order; Witten-Bell, which is
PPM's escape method C interpolated): a context seen n times with d different outcomes keeps n / (n + d) of the probability and
leaves the rest to the context one shorter. It has nothing to tune, trusts a long context no further than its own counts, and
never says 0.

No torch, no IO; any thread, one at a time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.prediction.forecast import DEFAULT_HORIZON, END, Forecast
from vllm_lifetime.traces.workflows import AgentWorkflow

__all__ = ["MAX_ORDER", "START", "UNKNOWN", "ContextTables", "MarkovPredictor", "chain_steps"]

MAX_ORDER = 5
"""Highest order offered."""

START = -1
"""What stands in a context before the first invocation, so that a workflow's begin is told from its middle."""

UNKNOWN = -2
"""What stands in a context for an agent without a number."""

FORGOTTEN = 1e-3
"""A count below this is of an outcome that no longer happens."""

Context = tuple[int, ...]


class ContextTables:
    """Counts of what followed each context. Bounded: `max_contexts`, least recently added to dropped first; `max_agents`.

    Column 0 is END, column 1 + i agent i. `keep` below 1 forgets: before a count in a row of a context, the row is multiplied by
    it, so that a row remembers about 1 / (1 - keep) of its latest.
    """

    def __init__(self, horizon: int, max_order: int, max_agents: int, max_contexts: int, keep: float = 1.0) -> None:
        if horizon < 1 or max_order < 0 or max_agents < 1 or max_contexts < 1 or not 0.0 < keep <= 1.0:
            raise ValueError(
                f"need horizon >= 1, max_order >= 0, max_agents >= 1, max_contexts >= 1 and 0 < keep <= 1, but have "
                f"{horizon}, {max_order}, {max_agents}, {max_contexts} and {keep}"
            )
        self.horizon = horizon
        self.max_order = max_order
        self.max_agents = max_agents
        self.max_contexts = max_contexts
        self.keep = keep
        self.agents: list[str] = []
        self.numbers: dict[str, int] = {}
        self.tables: OrderedDict[Context, NDArray[np.float64]] = OrderedDict()

    def number(self, agent: str) -> int:
        """The agent's number; a new one if there is room, else `UNKNOWN`."""
        number = self.numbers.get(agent)
        if number is None:
            if len(self.agents) >= self.max_agents:
                return UNKNOWN
            number = self.numbers[agent] = len(self.agents)
            self.agents.append(agent)
        return number

    def replace(self, old: str, new: str) -> None:
        """Give the number of an agent to another, and forget what was counted of the old one. O(contexts)."""
        number = self.numbers.pop(old)
        self.numbers[new] = number
        self.agents[number] = new
        for context in [context for context in self.tables if number in context]:
            del self.tables[context]
        for table in self.tables.values():
            table[:, number + 1] = 0.0

    def context(self, history: Sequence[str]) -> Context:
        """The longest context at the end of `history`: numbers, oldest first, with `START` before a history that is shorter."""
        order = self.max_order
        known = tuple([self.numbers.get(agent, UNKNOWN) for agent in history[-order:]]) if order else ()
        return known if len(known) == order else (START, *known)

    def add(self, history: Sequence[str]) -> None:
        """Count the last element of `history` (an agent, or END) as what followed each context before it. K x (order + 1)
        updates."""
        if not history:
            return
        history = history[-(self.max_order + self.horizon + 1) :]
        if history[-1] == END:
            column = 0
        elif (number := self.number(history[-1])) != UNKNOWN:
            column = number + 1
        else:
            return  # no output stands for it
        for step in range(min(self.horizon, len(history))):
            context = self.context(history[: len(history) - 1 - step])
            for begin in range(len(context) + 1):
                row = self._table(context[begin:])[step]
                if self.keep < 1.0:
                    row *= self.keep
                row[column] += 1.0

    def probabilities(self, history: Sequence[str], blend: bool = True) -> NDArray[np.float64]:
        """P^(k) for k = 1..K after `history`, shape (K, agents + 1), END in the last column. Below 0.1 ms for order 5."""
        width = len(self.agents) + 1
        result = np.full((self.horizon, width), 1.0 / width)
        context = self.context(history)
        # The shortest first. One that is not there is skipped: a shorter one may have been dropped and a longer one not.
        found = [self.tables.get(context[begin:]) for begin in range(len(context), -1, -1)]
        tables = [table for table in found if table is not None]
        if not tables:
            return result
        counts = np.array(tables)[:, :, :width]
        seen = counts.sum(axis=2, keepdims=True)
        if blend:
            # A step that a context was never seen at leaves all to the shorter one.
            different = np.maximum((counts > FORGOTTEN).sum(axis=2, keepdims=True), 1e-9)
            shares = 1.0 / (seen + different)
            counts *= shares
            different *= shares
            for own, rest in zip(counts, different, strict=True):
                result = own + rest * result
        else:
            for own, times in zip(counts, seen, strict=True):
                told = times[:, 0] > 0
                result[told] = own[told] / times[told]
        return np.concatenate((result[:, 1:], result[:, :1]), axis=1)

    def _table(self, context: Context) -> NDArray[np.float64]:
        table = self.tables.get(context)
        if table is None:
            if len(self.tables) >= self.max_contexts:
                self.tables.popitem(last=False)
            table = self.tables[context] = np.zeros((self.horizon, self.max_agents + 1))
        else:
            self.tables.move_to_end(context)
        return table


class MarkovPredictor:
    """A trained Markov predictor of one order; see the module. A `TransitionPredictor`."""

    def __init__(self, tables: ContextTables, blend: bool) -> None:
        self.tables = tables
        self.blend = blend
        self.agents = tuple(tables.agents)

    @classmethod
    def train(
        cls,
        workflows: Iterable[AgentWorkflow],
        agents: Sequence[str],
        order: int,
        horizon: int = DEFAULT_HORIZON,
        blend: bool = True,
        max_contexts: int = 1 << 16,
    ) -> "MarkovPredictor":
        """Count all of `workflows`; agents that are not in `agents` are unknown."""
        tables = ContextTables(horizon, order, max(1, len(agents)), max_contexts)
        for agent in agents:
            tables.number(agent)
        for workflow in workflows:
            path = [*workflow.agents, END]
            for end in range(1, len(path) + 1):
                tables.add(path[:end])
        return cls(tables, blend)

    def predict(self, history: Sequence[str], hidden_state: NDArray[np.float32] | None = None) -> Forecast:
        """As `TransitionPredictor.predict`; the hidden state is not used."""
        return Forecast(self.agents, self.tables.probabilities(history, self.blend))


def chain_steps(one_step: MarkovPredictor, history: Sequence[str], horizon: int, beam: int = 64) -> NDArray[np.float64]:
    """P^(k) by chaining the first step of a predictor over the `beam` likeliest continuations; (K, agents + 1). For
    comparison."""
    agents = one_step.agents
    paths: list[tuple[float, tuple[str, ...]]] = [(1.0, tuple(history))]
    result = np.zeros((horizon, len(agents) + 1))
    for step in range(horizon):
        following: list[tuple[float, tuple[str, ...]]] = []
        for weight, path in paths:
            row = one_step.predict(path).probabilities[0]
            result[step] += weight * row
            following += [(weight * float(row[i]), (*path, agent)) for i, agent in enumerate(agents) if row[i] > 0]
        paths = sorted(following, reverse=True)[:beam]
        total = sum(weight for weight, _ in paths)
        # Conditional on not having ended: what goes on shares all of the probability again.
        paths = [(weight / total, path) for weight, path in paths] if total > 0 else [(1.0, tuple(history))]
        result[step] /= result[step].sum()
    return result
