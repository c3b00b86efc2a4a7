# SPDX-License-Identifier: Apache-2.0
"""How well lifetime ranks rank (Lachesis section 3.5, figure 7): Kendall's tau, and what the k shortest-predicted hold. Needs
scikit-learn; `plot_ranks` matplotlib.

Trained rankers are scored by cross-validation that keeps all workers of a session in one fold. Rankers that learn while serving
score each worker when it is spawned and learn from it when it returns, one session after the other.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau  # type: ignore[import-untyped]

from vllm_lifetime.prediction.lifetime_rank import LifetimeRank
from vllm_lifetime.prediction.rank_training import design, fit, session_folds
from vllm_lifetime.prediction.selection import Shares, selection_shares
from vllm_lifetime.traces.spawn_schema import SpawnSample
from vllm_lifetime.whole_file import replacing, write_text

__all__ = [
    "DEFAULT_FOLDS",
    "PERCENTS",
    "RANKERS",
    "RankData",
    "RankEvaluation",
    "RankRow",
    "evaluate_ranks",
    "plot_ranks",
]

Scores = NDArray[np.float64]

DEFAULT_FOLDS = 5
PERCENTS = tuple(range(5, 65, 5))
"""k, in percent of the workers."""

RIDGE, BEST, RANDOM = "ridge", "what the spawns show", "random"

RESAMPLES = 200
"""Times that sessions are drawn again for an interval; also random orders."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One ranker over all seeds."""

    name: str
    tau: float
    """Kendall's tau-b between scores and lifetimes of all workers, mean over the seeds."""
    tau_deviation: float
    """Over the seeds: how much folds, or the order of the sessions, matter; of random scores, how much chance does."""
    tau_low: float
    tau_high: float
    """Where 95 % of the taus lie when sessions are drawn again with replacement: how much the sample matters. One seed."""
    shares: list[Shares]


@dataclass(frozen=True, slots=True)
class RankEvaluation:
    """All rankers on the same workers."""

    source: str
    workers: int
    sessions: int
    seeds: int
    folds: int
    p10_s: float
    median_s: float
    p90_s: float
    """Of the lifetimes."""
    rows: list[RankRow]
    lifetimes_s: list[float] = field(repr=False)
    ridge_scores: list[float] = field(repr=False)
    """Of the first seed, for the plot."""

    def write(self, path: Path) -> None:
        """Write everything as JSON, or nothing. Raises OSError."""
        write_text(path, json.dumps(asdict(self), indent=1) + "\n")


class RankData:
    """The samples, and what all rankers need of them. `x`, `y`: see `design`."""

    def __init__(self, samples: Sequence[SpawnSample], folds: int) -> None:
        self.samples = samples
        self.folds = folds
        self.sessions = [sample.session_id for sample in samples]
        self.x, self.y = design(samples)

    def out_of_fold(self, seed: int, learn: Callable[[NDArray[np.intp], NDArray[np.intp]], Scores]) -> Scores:
        """Scores of each fold by `learn(training rows, rows to score)`."""
        scores = np.empty(len(self.samples))
        for train, test in session_folds(self.sessions, self.folds, seed):
            scores[test] = learn(train, test)
        return scores


def _ridge(data: RankData, seed: int) -> Scores:
    def learn(train: NDArray[np.intp], test: NDArray[np.intp]) -> Scores:
        scores: Scores = data.x[test] @ fit(data.x[train], data.y[train], [data.sessions[i] for i in train], seed)
        return scores

    return data.out_of_fold(seed, learn)


def _online(data: RankData, seed: int) -> Scores:
    """The rank as the server has it without a file, over the sessions in random order."""
    rank = LifetimeRank()
    scores = np.empty(len(data.samples))
    rows_of: dict[str, list[int]] = {}
    for row, session in enumerate(data.sessions):
        rows_of.setdefault(session, []).append(row)
    names = list(rows_of)
    for index in np.random.default_rng(seed).permutation(len(names)):
        events = []
        for row in rows_of[names[index]]:
            begin_s = data.samples[row].starts_s
            events += [(begin_s, False, row), (begin_s + data.samples[row].lifetime_s, True, row)]
        for _, returns, row in sorted(events):
            signal = data.samples[row].signal
            if returns:
                rank.observe(signal, data.samples[row].lifetime_s)
            else:
                scores[row] = rank.score(signal)
    return scores


def _expected_size(data: RankData, seed: int) -> Scores:
    rank = LifetimeRank(window=0)
    return np.array([rank.score(sample.signal) for sample in data.samples])


def _instruction_length(data: RankData, seed: int) -> Scores:
    signals = [sample.signal for sample in data.samples]
    return np.array([float(s.instruction_chars or 0) if s.instruction is None else float(len(s.instruction)) for s in signals])


def _role_mean(data: RankData, seed: int) -> Scores:
    def learn(train: NDArray[np.intp], test: NDArray[np.intp]) -> Scores:
        by_role: dict[str | None, list[float]] = {}
        for row in train:
            by_role.setdefault(data.samples[row].signal.agent, []).append(float(data.y[row]))
        mean = float(data.y[train].mean())
        return np.array([statistics.fmean(by_role.get(data.samples[row].signal.agent, [mean])) for row in test])

    return data.out_of_fold(seed, learn)


def _volume(data: RankData, seed: int) -> Scores:
    return np.array([float(sample.written_tokens) for sample in data.samples])


RANKERS: dict[str, Callable[[RankData, int], Scores]] = {
    RIDGE: _ridge,
    "ridge, learned while serving": _online,
    "expected size (nothing learned)": _expected_size,
    "instruction length": _instruction_length,
    "mean of the role": _role_mean,
    "written volume (oracle)": _volume,
}
"""Names, and scores by seed. A row of random scores is added."""


def evaluate_ranks(
    samples: Sequence[SpawnSample],
    source: str,
    seeds: int = 10,
    folds: int = DEFAULT_FOLDS,
    best_scores: Scores | None = None,
    on_step: Callable[[str], None] = lambda name: None,
) -> RankEvaluation:
    """Score all rankers with seeds 0, 1, ...; `on_step` is told each name before a seed, (rankers) x `seeds` times in all.

    `best_scores`: of generated spawns, a further row. Raises ValueError: fewer sessions than folds, or too few to train on.
    """
    data = RankData(samples, folds)
    lifetimes = np.array([sample.lifetime_s for sample in samples])
    rows, ridge_scores = [], np.empty(0)
    for name, ranker in RANKERS.items():
        each = []
        for seed in range(seeds):
            on_step(name)
            each.append(ranker(data, seed))
        if name == RIDGE:
            ridge_scores = each[0]
        rows.append(_summarise(name, each, data))
    rng = np.random.default_rng(0)
    rows.append(_summarise(RANDOM, [rng.random(len(samples)) for _ in range(RESAMPLES)], data))
    if best_scores is not None:
        rows.insert(0, _summarise(BEST, [best_scores], data))
    p10, median, p90 = np.percentile(lifetimes, (10, 50, 90)).tolist()
    return RankEvaluation(
        source=source,
        workers=len(samples),
        sessions=len(set(data.sessions)),
        seeds=seeds,
        folds=folds,
        p10_s=p10,
        median_s=median,
        p90_s=p90,
        rows=rows,
        lifetimes_s=lifetimes.tolist(),
        ridge_scores=ridge_scores.tolist(),
    )


def _summarise(name: str, each: Sequence[Scores], data: RankData) -> RankRow:
    taus = [_tau(scores, data.y) for scores in each]
    low, high = _interval(each[0], data)
    shares = []
    for percent in PERCENTS:
        seen = [selection_shares(scores, data.y, percent, seed) for seed, scores in enumerate(each)]
        means = np.mean([(s.among_shortest, s.among_shortest_2k, s.avoids_longest) for s in seen], axis=0).tolist()
        shares.append(Shares(percent, *means))
    return RankRow(name, statistics.fmean(taus), statistics.pstdev(taus), low, high, shares)


def _tau(scores: Scores, lifetimes: Scores) -> float:
    tau = float(kendalltau(scores, lifetimes).statistic)
    return tau if tau == tau else 0.0  # one score, or one lifetime, for all


def _interval(scores: Scores, data: RankData) -> tuple[float, float]:
    names, numbers = np.unique(np.array(data.sessions), return_inverse=True)
    rows_of = [np.flatnonzero(numbers == index) for index in range(len(names))]
    rng = np.random.default_rng(0)
    taus = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([rows_of[index] for index in rng.integers(len(names), size=len(names))])
        taus.append(_tau(scores[rows], data.y[rows]))
    low, high = np.percentile(taus, (2.5, 97.5)).tolist()
    return low, high


def plot_ranks(evaluation: RankEvaluation, path: Path) -> None:
    """Draw Lachesis' figure 7 of the ridge rank into an image file: lifetimes by predicted quartile, and what k selects.

    Raises ImportError without matplotlib, OSError, ValueError.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    lifetimes = np.array(evaluation.lifetimes_s)
    order = np.argsort(np.array(evaluation.ridge_scores), kind="stable")
    for quartile, rows in enumerate(np.array_split(order, 4), start=1):
        values = np.sort(lifetimes[rows])
        left.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=f"Q{quartile}")
    left.set_xscale("log")
    left.set_xlabel("lifetime (s)")
    left.set_ylabel("share of workers")
    left.set_title("By predicted quartile")
    row = next(row for row in evaluation.rows if row.name == RIDGE)
    percents = [shares.percent for shares in row.shares]
    lines: Iterable[tuple[str, list[float], list[float]]] = (
        ("shortest k", [s.among_shortest for s in row.shares], [p / 100 for p in percents]),
        ("shortest 2k", [s.among_shortest_2k for s in row.shares], [min(1.0, p / 50) for p in percents]),
        ("avoids longest k", [s.avoids_longest for s in row.shares], [1 - p / 100 for p in percents]),
    )
    for color, (label, shares, by_chance) in enumerate(lines):
        right.plot(percents, [100 * share for share in shares], f"C{color}-", label=label)
        right.plot(percents, [100 * share for share in by_chance], f"C{color}--", alpha=0.6)
    right.set_xlabel("k (% of workers)")
    right.set_ylabel("% of the k shortest-predicted")
    right.set_title("What k selects (dashed: at random)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(f"{evaluation.source}: {evaluation.workers} workers, Kendall's tau {row.tau:.2f}", fontsize="medium")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110)
