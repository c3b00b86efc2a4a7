# SPDX-License-Identifier: Apache-2.0
"""Trains the base of the lifetime rank on recorded spawns: ridge regression (Lachesis section 3.5). Needs scikit-learn."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import GroupKFold  # type: ignore[import-untyped]
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from vllm_lifetime.prediction.lifetime_rank import target
from vllm_lifetime.prediction.ridge import ridge
from vllm_lifetime.prediction.spawn_features import BIAS, NUM_FEATURES, features
from vllm_lifetime.traces.spawn_schema import SpawnSample

__all__ = ["PENALTIES", "design", "fit", "session_folds", "train_weights"]

PENALTIES = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Among these the penalty is chosen, by cross-validation inside the training data."""

FOLDS = 5


def design(samples: Sequence[SpawnSample]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Features, one row for each sample, and targets."""
    rows = [features(sample.signal) for sample in samples]
    return np.array(rows).reshape(-1, NUM_FEATURES), np.array([target(sample.lifetime_s) for sample in samples])


def session_folds(sessions: Sequence[str], folds: int, seed: int) -> Iterator[tuple[NDArray[np.intp], NDArray[np.intp]]]:
    """Training and test rows of each fold; a session stands in one fold, and the seed decides which.

    Raises ValueError if there are fewer sessions than folds.
    """
    names, numbers = np.unique(np.array(sessions), return_inverse=True)
    if len(names) < folds:
        raise ValueError(f"{len(names)} session(s) with sub-agents are too few for {folds} folds that keep sessions whole")
    # GroupKFold sorts sessions by size; which of the equally large ones come first, their numbers decide.
    groups = np.random.default_rng(seed).permutation(len(names))[numbers]
    yield from GroupKFold(folds).split(np.zeros((len(groups), 1)), groups=groups)


def train_weights(samples: Sequence[SpawnSample], seed: int = 0) -> NDArray[np.float64]:
    """The base of a `LifetimeRank`. The same samples and seed give the same weights.

    Raises ValueError if there are fewer than two sessions.
    """
    return fit(*design(samples), [sample.session_id for sample in samples], seed)


def fit(x: NDArray[np.float64], y: NDArray[np.float64], sessions: Sequence[str], seed: int = 0) -> NDArray[np.float64]:
    """Weights for rows of features and targets; the penalty is the one with the least squared error on sessions left out."""
    errors = np.zeros(len(PENALTIES))
    folds = min(FOLDS, len(set(sessions)))
    if folds < 2:
        raise ValueError(f"{folds} session with sub-agents is too few to train on: at least 2 are needed")
    with threadpool_limits(1):  # the matrices are small: more threads mostly wait for each other
        for train, test in session_folds(sessions, folds, seed):
            for index, penalty in enumerate(PENALTIES):
                weights = _ridge(x[train], y[train], penalty)
                errors[index] += np.square(y[test] - x[test] @ weights).sum()
        return _ridge(x, y, PENALTIES[int(errors.argmin())])


def _ridge(x: NDArray[np.float64], y: NDArray[np.float64], penalty: float) -> NDArray[np.float64]:
    x_mean, y_mean = x.mean(axis=0), y.mean()
    weights = ridge(x - x_mean, y - y_mean, penalty)
    weights[BIAS] += y_mean - x_mean @ weights  # the feature is 1 throughout; what is centred has no weight for it
    return weights
