# SPDX-License-Identifier: Apache-2.0
"""The lifetime rank: in which order will the workers of this server return? (Lachesis sections 3.5 and 4, predictive path)

A linear model over the spawn signal, fitted by ridge regression to the logarithm of the lifetime and read only for the order it
gives. Its weights are the sum of two:

- the *base*: a file of `vllm-lifetime rank train`, or without one a single weight, on the expected size (the length of
  instruction and context), so that an engine that knows nothing ranks by that;
- what is *learned* while serving: the ridge regression of what the base got wrong, over the last `window` workers that returned.
  It is kept exact by rank-one updates: a return costs the same, however many there were, and there is no refit to wait for.

Scheduler process, one thread; no torch, no scikit-learn, no locks. Only `save_base` and `load_base` do IO.
"""

import json
import math
from collections import deque
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.prediction.predictor_file import PredictorFileError, read_predictor_file, write_predictor_file
from vllm_lifetime.prediction.spawn_features import BIAS, EXPECTED_SIZE, FEATURES_VERSION, NUM_FEATURES, features
from vllm_lifetime.traces.spawn_schema import SpawnSignal

__all__ = ["DEFAULT_PENALTY", "DEFAULT_WINDOW", "LifetimeRank", "LifetimeRankError", "load_base", "save_base", "target"]

Vector = NDArray[np.float64]

DEFAULT_WINDOW = 512
"""Workers that are learned from, the latest."""

DEFAULT_PENALTY = 3.0
"""Ridge penalty of what is learned while serving; chosen on recorded sessions (docs/lifetime-rank.md)."""

TYPICAL_LIFETIME_S = 60.0
SIZE_WEIGHT = 0.5
"""The base without a file: a worker told e^1.5 times as much is taken to live e^0.5 times as long. Until something is learned,
only its sign decides the order; afterwards its size says how soon what is learned outweighs it."""

SHORTEST_S, LONGEST_S = 1e-2, 1e7
"""Lifetimes outside are taken for these."""

MODEL = "lifetime-rank"
FORMAT, VERSION = "vllm-lifetime lifetime rank", 1
_MAX_WEIGHT = 1e6


class LifetimeRankError(ValueError):
    """A stored rank cannot be used; the message says why, in one sentence."""


def target(lifetime_s: float) -> float:
    """What is predicted: the natural logarithm of the lifetime in seconds, within bounds."""
    return math.log(min(max(lifetime_s, SHORTEST_S), LONGEST_S))


class LifetimeRank:
    """See the module.

    Args:
        base: weights of `load_base` or of training; None: the expected size alone.
        window: returned workers that are learned from; 0: nothing is learned.
        penalty: ridge penalty of what is learned.

    Raises:
        ValueError: an argument is out of its bounds.

    """

    def __init__(self, base: Vector | None = None, window: int = DEFAULT_WINDOW, penalty: float = DEFAULT_PENALTY) -> None:
        if window < 0 or not 0.0 < penalty < math.inf:
            raise ValueError(f"window must be at least 0 and penalty above 0, not {window} and {penalty}")
        if base is None:
            base = np.zeros(NUM_FEATURES)
            base[BIAS], base[EXPECTED_SIZE] = math.log(TYPICAL_LIFETIME_S), SIZE_WEIGHT
        _check_weights(base)
        self._base = base.astype(np.float64)
        self._window = window
        self._penalty = penalty
        self._kept: deque[tuple[Vector, float]] = deque()
        self._learned = np.zeros(NUM_FEATURES)
        self._inverse = np.eye(NUM_FEATURES) / penalty
        """(penalty I + sum x x^T over the window)^-1."""
        self._scratch = np.empty((NUM_FEATURES, NUM_FEATURES))
        self.num_observed = 0
        """Returned workers observed."""

    def __len__(self) -> int:
        """Returned workers that it learns from at present."""
        return len(self._kept)

    @property
    def weights(self) -> Vector:
        """The weights in use, one for each of `spawn_features`."""
        return self._base + self._learned

    def score(self, signal: SpawnSignal) -> float:
        """Higher: it is expected to live longer. Finite, whatever the signal holds.

        In the unit of `target`, but only the order of scores given at about the same time means anything. Under 0.2 ms of
        processor time.
        """
        return self._score(features(signal))

    def observe(self, signal: SpawnSignal, lifetime_s: float) -> None:
        """A worker of `signal` has returned after `lifetime_s`. One that is not a number of at least 0 is ignored.

        O(features^2): about 0.4 ms of processor time.
        """
        if not 0.0 <= lifetime_s < math.inf or not self._window:
            return
        self._learn(features(signal), target(lifetime_s))
        self.num_observed += 1

    # ------------------------------------------------------------------ storing

    def to_json(self) -> str:
        """What was learned, as text for `restore`: the signals' features, no text of theirs. The base is not part of it."""
        rows = [{"target": y, "places": np.flatnonzero(x).tolist(), "values": x[x != 0].tolist()} for x, y in list(self._kept)]
        head = {"format": FORMAT, "version": VERSION, "features": FEATURES_VERSION, "num_observed": self.num_observed}
        return json.dumps({**head, "returned": rows})

    def restore(self, text: str) -> None:
        """Learn what `to_json` wrote, before anything was observed; the base may be another one now.

        Raises LifetimeRankError: not such a text, another version, or a damaged one. Nothing is learned then.
        """
        try:
            stored = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LifetimeRankError(f"A stored lifetime rank must be JSON: {error}.") from error
        if not isinstance(stored, dict) or stored.get("format") != FORMAT:
            raise LifetimeRankError(f"This is no lifetime rank: its 'format' must be {FORMAT!r}.")
        if (stored.get("version"), stored.get("features")) != (VERSION, FEATURES_VERSION):
            raise LifetimeRankError(
                f"A lifetime rank of version {stored.get('version')!r} with features {stored.get('features')!r} was found; "
                f"this reads version {VERSION} with features {FEATURES_VERSION}."
            )
        rows, num_observed = stored.get("returned"), stored.get("num_observed")
        if not isinstance(rows, list):
            raise LifetimeRankError("Field 'returned' must be a list of returned workers.")
        if type(num_observed) is not int or num_observed < len(rows):
            raise LifetimeRankError(f"Field 'num_observed' must be a whole number of at least {len(rows)}: {num_observed!r:.60}.")
        read = [_read_row(row, index) for index, row in enumerate(rows)]
        for x, y in read[-self._window :] if self._window else []:
            self._learn(x, y)
        self.num_observed = num_observed

    # ------------------------------------------------------------------ ridge regression

    def _score(self, x: Vector) -> float:
        return float(self._base @ x + self._learned @ x)

    def _learn(self, x: Vector, y: float) -> None:
        if len(self._kept) == self._window:
            self._change(*self._kept.popleft(), -1.0)
        self._kept.append((x, y))
        self._change(x, y, 1.0)

    def _change(self, x: Vector, y: float, sign: float) -> None:
        """Put a worker in (+1) or take it out (-1): Sherman and Morrison's formula, and what follows for the weights.

        Taking out is safe: the penalty keeps what is left positive definite.
        """
        g = self._inverse @ x
        gain = sign / (1.0 + sign * float(x @ g))
        self._learned += gain * (y - self._score(x)) * g
        np.outer(gain * g, g, out=self._scratch)
        self._inverse -= self._scratch


def save_base(path: str | Path, weights: Vector, about: dict[str, Any]) -> None:
    """Write trained weights to one file, whole or not at all; `about` says what they were trained on, as JSON has it.

    Raises OSError.
    """
    write_predictor_file(path, {"model": MODEL, "features": FEATURES_VERSION, "about": about}, {"weights": weights})


def load_base(path: str | Path) -> Vector:
    """The weights that `vllm-lifetime rank train` wrote, for `LifetimeRank`.

    Raises PredictorFileError: missing, damaged, something else, or of another version of the features.
    """
    header, arrays = read_predictor_file(path)
    if header.get("model") != MODEL:
        raise PredictorFileError(f"The file {path} holds no lifetime rank but {header.get('model')!r:.60}.")
    if header.get("features") != FEATURES_VERSION:
        raise PredictorFileError(
            f"The lifetime rank {path} was trained on version {header.get('features')!r} of the features, and this package has "
            f"version {FEATURES_VERSION}: train it again with this version."
        )
    try:
        weights = arrays["weights"]
        _check_weights(weights)
    except (KeyError, ValueError) as error:
        reason = "its weights are missing" if isinstance(error, KeyError) else error
        raise PredictorFileError(f"The lifetime rank {path} is not what its header says: {reason}.") from None
    return weights.astype(np.float64)


def _check_weights(weights: NDArray[Any]) -> None:
    if weights.shape != (NUM_FEATURES,) or weights.dtype.kind != "f":
        raise ValueError(f"its weights are not {NUM_FEATURES} numbers")
    if not np.all(np.abs(weights) <= _MAX_WEIGHT):  # also for what is not a number
        raise ValueError(f"a weight is not a number of at most {_MAX_WEIGHT:g}")


def _read_row(row: Any, index: int) -> tuple[Vector, float]:
    """A returned worker. Raises LifetimeRankError."""
    where = f"returned[{index}]"
    stored: dict[str, Any] = row if isinstance(row, dict) else {}
    places, values, y = stored.get("places"), stored.get("values"), stored.get("target")
    if not isinstance(places, list) or not all(type(place) is int and 0 <= place < NUM_FEATURES for place in places):
        raise LifetimeRankError(f"{where}: field 'places' must be whole numbers below {NUM_FEATURES}.")
    if not isinstance(values, list) or len(values) != len(places) or not all(map(_is_small, values)):
        raise LifetimeRankError(f"{where}: field 'values' must be {len(places)} numbers.")
    if not _is_small(y):
        raise LifetimeRankError(f"{where}: field 'target' must be a number, it is {y!r:.60}.")
    x = np.zeros(NUM_FEATURES)
    x[places] = values
    return x, float(y)


def _is_small(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e3
