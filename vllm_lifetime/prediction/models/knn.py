# SPDX-License-Identifier: Apache-2.0
"""k nearest neighbours (PBKV table 3). Needs scikit-learn, not torch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors  # type: ignore[import-untyped]

from vllm_lifetime.prediction.samples import Samples
from vllm_lifetime.prediction.vocabulary import VocabularyPredictor

__all__ = ["KnnPredictor"]

WINDOW = 5

PADDING = -1
"""A target after END."""


class KnnPredictor(VocabularyPredictor):
    """Features: the last five agents, how often each was invoked (divided by 10), and the hidden state at unit mean length. What
    followed the nearest training rows is averaged for each step over those that had not ended before. Of rows equally near, which
    are taken is arbitrary, so that a small k samples what followed rather than counting it all."""

    def __init__(self, samples: Samples, k: int) -> None:
        super().__init__(samples.agents, samples.prior(), samples.hidden_size)
        self.k = k
        features = np.stack([self._agent_features(prefix) for prefix in samples.prefixes])
        self._hidden_scale = 1.0
        if samples.hidden is not None:
            self._hidden_scale = 1.0 / max(1e-9, float(np.linalg.norm(samples.hidden, axis=1).mean()))
            features = np.concatenate((features, samples.hidden * self._hidden_scale), axis=1)
        # One row for each time that a prefix was seen, in random order: which of equal rows are nearest is then chance.
        times = samples.counts.sum(axis=2).max(axis=1).astype(np.int64)
        random = np.random.default_rng(0)
        rows = random.permutation(np.repeat(np.arange(len(samples)), times))
        self._targets = np.full((len(rows), samples.horizon), PADDING)
        for row in range(len(samples)):
            places = np.flatnonzero(rows == row)
            for step, counts in enumerate(samples.counts[row].astype(np.int64)):
                outcomes = np.repeat(np.arange(len(counts)), counts)
                self._targets[random.permutation(places)[: len(outcomes)], step] = outcomes
        self._index = NearestNeighbors(n_neighbors=min(k, len(rows)), algorithm="brute").fit(features[rows])

    def _probabilities(self, prefix: Sequence[int], hidden_state: NDArray[np.float32] | None) -> NDArray[np.float64]:
        features = self._agent_features(prefix)
        if self.hidden_size:
            known = np.zeros(self.hidden_size, np.float32) if hidden_state is None else hidden_state
            features = np.concatenate((features, known * self._hidden_scale))
        near = self._targets[self._index.kneighbors(features[None], return_distance=False)[0]]
        result = self.prior.copy()
        for step in range(result.shape[0]):
            told = near[near[:, step] != PADDING, step]
            if len(told):
                result[step] = np.bincount(told, minlength=result.shape[1]) / len(told)
        return result

    def _agent_features(self, prefix: Sequence[int]) -> NDArray[np.float32]:
        num_agents = len(self.agents)
        last = np.zeros((WINDOW, num_agents), dtype=np.float32)
        for position, agent in enumerate(prefix[-WINDOW:][::-1]):
            last[position, agent] = 1.0
        counts = np.bincount(np.asarray(prefix), minlength=num_agents).astype(np.float32) / 10.0
        return np.concatenate((last.ravel(), counts))
