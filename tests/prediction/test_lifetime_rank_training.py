# SPDX-License-Identifier: Apache-2.0
"""Training and measuring the lifetime rank, on made-up spawns."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn")

from scipy.stats import kendalltau

from vllm_lifetime.prediction import rank_evaluation
from vllm_lifetime.prediction.lifetime_rank import LifetimeRank
from vllm_lifetime.prediction.rank_evaluation import RANKERS, RankData, evaluate_ranks, plot_ranks
from vllm_lifetime.prediction.rank_training import session_folds, train_weights
from vllm_lifetime.prediction.selection import selection_shares
from vllm_lifetime.traces.generate_spawns import generate_spawns
from vllm_lifetime.traces.spawn_schema import SpawnSample, SpawnSignal


@pytest.mark.parametrize("tau", [0.0, 0.3, 0.53, 1.0])
def test_made_up_spawns_show_their_lifetimes_to_the_stated_degree(tau: float) -> None:
    made_up = generate_spawns(2000, seed=1, tau=tau)
    lifetimes = [sample.lifetime_s for sample in made_up.samples]
    assert kendalltau(made_up.scores, lifetimes).statistic == pytest.approx(tau, abs=0.03)
    volumes = [sample.written_tokens for sample in made_up.samples]
    assert 0.51 < kendalltau(volumes, lifetimes).statistic < 0.72, "as in the paper"
    p10, p90 = np.percentile(lifetimes, (10, 90))
    assert 3.7 < p90 / p10 < 23.6, "as in the paper"


def test_made_up_spawns_depend_on_the_seed_alone() -> None:
    one, again, other = generate_spawns(50, seed=3), generate_spawns(50, seed=3), generate_spawns(50, seed=4)
    assert one.samples == again.samples != other.samples
    positions = [sample.signal.position for sample in one.samples]
    assert positions[0] == 0 and all(b in (a + 1, 0) for a, b in pairwise(positions))  # type: ignore[operator]


@pytest.mark.parametrize("arguments", [{"number": 0}, {"number": 5, "tau": 1.5}, {"number": 5, "tau": float("nan")}])
def test_spawns_that_cannot_be_made_up(arguments: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        generate_spawns(**arguments)  # type: ignore[arg-type]


def test_a_trained_base_ranks_new_workers() -> None:
    samples = generate_spawns(600, seed=0).samples
    rank = LifetimeRank(train_weights(samples[:400]))
    rest = samples[400:]
    tau = kendalltau([rank.score(sample.signal) for sample in rest], [sample.lifetime_s for sample in rest]).statistic
    assert tau > 0.4
    # The server's plain arrays say what scikit-learn's model says: the intercept is part of them.
    mean = np.mean([rank.score(sample.signal) for sample in rest])
    assert mean == pytest.approx(np.mean(np.log([sample.lifetime_s for sample in rest])), abs=0.15)


def test_folds_keep_sessions_whole_and_differ_by_seed() -> None:
    sessions = [f"s{i // 3}" for i in range(60)]
    divisions = []
    for seed in (0, 1):
        tested: list[int] = []
        for train, test in session_folds(sessions, 5, seed):
            assert not {sessions[i] for i in train} & {sessions[i] for i in test}
            tested += test.tolist()
        assert sorted(tested) == list(range(60))
        divisions.append(tested)
    assert divisions[0] != divisions[1]
    with pytest.raises(ValueError, match="20 session"):
        next(session_folds(sessions, 21, 0))


def test_one_session_is_too_few_to_train_on() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        train_weights([SpawnSample("s", SpawnSignal(), 0.0, 1.0, 1)] * 3)


def test_shares_of_a_selection_by_hand() -> None:
    lifetimes = np.arange(10.0)
    perfect, reversed_ = selection_shares(lifetimes, lifetimes, 20), selection_shares(-lifetimes, lifetimes, 20)
    assert (perfect.among_shortest, perfect.among_shortest_2k, perfect.avoids_longest) == (1.0, 1.0, 1.0)
    assert (reversed_.among_shortest, reversed_.among_shortest_2k, reversed_.avoids_longest) == (0.0, 0.0, 0.0)
    # Workers 7 and 0 are chosen: one is among the two shortest and the four shortest, none among the two longest.
    scores = np.array([1.0, 5, 5, 5, 5, 5, 5, 0, 5, 5])
    shares = selection_shares(scores, lifetimes, 20)
    assert (shares.among_shortest, shares.among_shortest_2k, shares.avoids_longest) == (0.5, 0.5, 1.0)
    # And of 3 and 0, both are among the four shortest.
    scores[[3, 7]] = scores[[7, 3]]
    assert selection_shares(scores, lifetimes, 20).among_shortest_2k == 1.0


def test_equal_scores_do_not_favour_the_traces_order() -> None:
    lifetimes = np.arange(1000.0)
    assert selection_shares(np.zeros(1000), lifetimes, 30).among_shortest == pytest.approx(0.3, abs=0.06)


def test_a_worker_that_has_not_returned_teaches_nothing_yet() -> None:
    """What learns while serving has, of workers side by side, none before the first returns."""
    told = [SpawnSignal(instruction_chars=100 * i, agent="a") for i in range(1, 4)]
    overlapping = [SpawnSample("s", signal, float(i), 1000.0, 1) for i, signal in enumerate(told)]
    online = RANKERS["ridge, learned while serving"]
    cold = [LifetimeRank().score(signal) for signal in told]
    assert online(RankData(overlapping, 2), 0).tolist() == cold
    one_by_one = [SpawnSample("s", signal, 2000.0 * i, 1000.0, 1) for i, signal in enumerate(told)]
    assert online(RankData(one_by_one, 2), 0).tolist()[1:] != cold[1:]


def test_the_measured_rows_are_in_the_expected_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_evaluation, "RESAMPLES", 30)
    made_up = generate_spawns(240, seed=2)
    steps: list[str] = []
    done = evaluate_ranks(made_up.samples, "made up", seeds=1, best_scores=made_up.scores, on_step=steps.append)
    tau = {row.name: row.tau for row in done.rows}
    assert len(steps) == len(RANKERS) and done.workers == 240
    assert tau["what the spawns show"] > tau["ridge"] > tau["instruction length"] > tau["random"]
    assert tau["instruction length"] == tau["expected size (nothing learned)"], "there is no context"
    assert abs(tau["random"]) < 0.03
    for row in done.rows:
        assert row.tau_low <= row.tau_high
        assert [shares.percent for shares in row.shares] == list(range(5, 65, 5))
        assert all(0 <= s.among_shortest <= s.among_shortest_2k <= 1 for s in row.shares)
    pytest.importorskip("matplotlib")
    plot_ranks(done, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_equal_lifetimes_have_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_evaluation, "RESAMPLES", 3)
    samples = [SpawnSample(f"s{i}", SpawnSignal(instruction_chars=i), 0.0, 5.0, i) for i in range(6)]
    assert {row.tau for row in evaluate_ranks(samples, "x", seeds=1).rows} == {0.0}
