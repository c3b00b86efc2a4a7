# SPDX-License-Identifier: Apache-2.0
"""Training rows: each prefix of each workflow with the K invocations that followed (PBKV appendix B, training strategy).

END is a target like any agent; what comes after it in a window is padding, which no loss and no accuracy counts. Equal prefixes
are one row with counts of what followed them: the cross-entropy is the same, and agent workflows repeat themselves a lot.

Imports no torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.workflows import AgentWorkflow

__all__ = ["MAX_PREFIX", "Samples", "Split", "list_agents", "make_samples", "split_by_task"]

MAX_PREFIX = 64
"""Latest invocations of a prefix that models read; what came before is cut off."""


@dataclass(frozen=True)
class Samples:
    """N rows over V agents.

    `prefixes[i]`: indices into `agents`, oldest first, the present agent last, never empty. `counts[i, k - 1, a]`: how often
    `agents[a]` (V: END) was invoked k invocations later; shape (N, K, V + 1). The sum over a falls with k, as workflows end.
    `hidden`: (N, hidden size), of the present invocation, or None.
    """

    agents: tuple[str, ...]
    prefixes: Sequence[tuple[int, ...]]
    counts: NDArray[np.float32]
    hidden: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        """Different rows."""
        return len(self.prefixes)

    @property
    def horizon(self) -> int:
        """K."""
        return int(self.counts.shape[1])

    @property
    def hidden_size(self) -> int:
        """Size of a hidden state, 0 without them."""
        return 0 if self.hidden is None else int(self.hidden.shape[1])

    def padded_prefixes(self) -> NDArray[np.int64]:
        """(N, longest) indices with the present agent in the last column and V where there is none."""
        longest = max(len(prefix) for prefix in self.prefixes)
        padded = np.full((len(self), longest), len(self.agents), dtype=np.int64)
        for row, prefix in enumerate(self.prefixes):
            padded[row, longest - len(prefix) :] = prefix
        return padded

    def transition_matrix(self) -> NDArray[np.float32]:
        """(V, V): the row-normalised forward transitions (A of Eq. 3); an agent that nobody follows has zeros."""
        counts = np.zeros((len(self.agents), len(self.agents)), dtype=np.float64)
        present = np.fromiter((prefix[-1] for prefix in self.prefixes), dtype=np.int64, count=len(self))
        np.add.at(counts, present, self.counts[:, 0, :-1])
        totals = np.maximum(counts.sum(axis=1, keepdims=True), 1e-9)
        matrix: NDArray[np.float32] = (counts / totals).astype(np.float32)
        return matrix

    def prior(self) -> NDArray[np.float64]:
        """(K, V + 1): how often each outcome is step k's, whatever the prefix; each counted once more than it was seen."""
        counts = 1.0 + self.counts.sum(axis=0, dtype=np.float64)
        prior: NDArray[np.float64] = counts / counts.sum(axis=1, keepdims=True)
        return prior


class Split(NamedTuple):
    """Indices of workflows."""

    train: list[int]
    validation: list[int]
    test: list[int]


def list_agents(workflows: Iterable[AgentWorkflow]) -> tuple[str, ...]:
    """All agents of the workflows, sorted."""
    return tuple(sorted({agent for workflow in workflows for agent in workflow.agents}))


def split_by_task(workflows: Sequence[AgentWorkflow], seed: int, validation: float = 0.1, test: float = 0.2) -> Split:
    """Split at random such that all workflows of a task stand on one side; the shares are of the tasks, and at least one task
    each if not 0. Raises `ValueError` if that leaves none to train on."""
    tasks = sorted({workflow.task for workflow in workflows})
    order = np.random.default_rng(seed).permutation(len(tasks))
    num_validation, num_test = (max(1, round(share * len(tasks))) if share else 0 for share in (validation, test))
    if num_validation + num_test >= len(tasks):
        parts = "training, validation and test" if test else "training and validation"
        needed = 1 + bool(validation) + bool(test)
        raise ValueError(f"{len(tasks)} different task(s) are too few to split into {parts}: at least {needed} are needed")
    side = {}
    for position, index in enumerate(order):
        side[tasks[index]] = 2 if position < num_test else 1 if position < num_test + num_validation else 0
    sides: tuple[list[int], list[int], list[int]] = ([], [], [])
    for i, workflow in enumerate(workflows):
        sides[side[workflow.task]].append(i)
    return Split(*sides)


def make_samples(
    workflows: Sequence[AgentWorkflow],
    agents: Sequence[str],
    horizon: int,
    hidden_states: Sequence[NDArray[np.float32]] | None = None,
) -> Samples:
    """One row for each prefix of the workflows or, with hidden states, for each invocation.

    `hidden_states[i]`: (invocations of workflow i, hidden size). Agents that are not in `agents` are left out of prefixes, and
    what follows one is not counted; as targets they are not counted either, since no output stands for them.
    """
    index = {agent: i for i, agent in enumerate(agents)}
    unknown, end = -1, len(agents)
    place: dict[tuple[int, ...], int] = {}
    prefixes: list[tuple[int, ...]] = []
    followed: list[tuple[int, int, int]] = []  # row, step, target
    hidden: list[NDArray[np.float32]] = []
    for number, workflow in enumerate(workflows):
        path = [*(index.get(agent, unknown) for agent in workflow.agents), end]
        for i, present in enumerate(path[:-1]):
            if present == unknown:
                continue
            prefix = tuple(agent for agent in path[: i + 1] if agent != unknown)[-MAX_PREFIX:]
            if hidden_states is None:
                row = place.setdefault(prefix, len(prefixes))
            else:
                row = len(prefixes)
                hidden.append(hidden_states[number][i])
            if row == len(prefixes):
                prefixes.append(prefix)
            # The window ends with END: what would come after it is padding.
            window = path[i + 1 : i + 1 + horizon]
            followed += [(row, step, target) for step, target in enumerate(window) if target != unknown]
    counts = np.zeros((len(prefixes), horizon, end + 1), dtype=np.float32)
    np.add.at(counts, tuple(np.array(followed, dtype=np.int64).reshape(-1, 3).T), 1.0)
    return Samples(tuple(agents), prefixes, counts, np.stack(hidden).astype(np.float32) if hidden else None)
