# SPDX-License-Identifier: Apache-2.0
"""The lifetime rank as the server has it: any spawn has a score, and returned workers are learned from."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_lifetime.boundaries import Boundary, BoundaryKind, Spawn
from vllm_lifetime.prediction import spawn_features
from vllm_lifetime.prediction.lifetime_rank import (
    LifetimeRank,
    LifetimeRankError,
    load_base,
    save_base,
    target,
)
from vllm_lifetime.prediction.predictor_file import PredictorFileError, write_predictor_file
from vllm_lifetime.prediction.serving import load_predictor
from vllm_lifetime.prediction.spawn_features import FEATURES_VERSION, NUM_FEATURES, features, signal_of
from vllm_lifetime.traces.spawn_schema import SpawnSignal

# Lone surrogates, too: Python's json makes them of "\ud800".
any_text = st.none() | st.text(st.characters(), max_size=60)
signals = st.builds(
    SpawnSignal,
    instruction=any_text,
    context=any_text,
    instruction_chars=st.none() | st.integers(-1, 2**31 - 1),
    context_chars=st.none() | st.integers(0, 2**31 - 1),
    tools=st.lists(st.text(st.characters(), max_size=8), max_size=4).map(tuple),
    agent=any_text,
    model=any_text,
    position=st.none() | st.integers(-1, 2**31 - 1),
)


def worker(chars: int = 400, agent: str = "coder", **more: object) -> SpawnSignal:
    return SpawnSignal(instruction_chars=chars, agent=agent, **more)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- features


@given(signals)
@example(SpawnSignal(instruction_chars=-1, context_chars=-1, position=-1))
@example(SpawnSignal(instruction_chars=10**400, context_chars=10**400, position=10**400))
@example(SpawnSignal(instruction="\ud800", context="\0", tools=("",) * 1000, agent="\ud800", model=""))
def test_any_spawn_has_finite_features(signal: SpawnSignal) -> None:
    x = features(signal)
    assert x.shape == (NUM_FEATURES,) and np.isfinite(x).all()
    assert np.isfinite(LifetimeRank().score(signal))


def test_a_long_text_costs_no_more_than_its_head() -> None:
    """Of what stands behind the head only the length counts."""
    words = "find the cause and report " * 100
    head = features(SpawnSignal(instruction=words))
    other = features(SpawnSignal(instruction=words + "unheard of " * 6000))
    differs = np.flatnonzero(head != other).tolist()
    assert differs == [spawn_features.INSTRUCTION_LENGTH, spawn_features.EXPECTED_SIZE]


def test_features_are_the_same_in_every_process() -> None:
    """A file that was trained elsewhere has a weight for each place, so the places may not depend on the process."""
    signal = SpawnSignal(instruction="Für jeden Zweig: compare, with main!", agent="coder", model="m", tools=("bash", "grep"))
    code = (
        "from vllm_lifetime.prediction.spawn_features import features; "
        "from vllm_lifetime.traces.spawn_schema import SpawnSignal; import numpy as np; "
        f"print(np.flatnonzero(features({signal!r})).tolist())"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == np.flatnonzero(features(signal)).tolist()


def test_words_are_told_apart_by_punctuation_alone() -> None:
    one, other = SpawnSignal(instruction="read Für, main.py"), SpawnSignal(instruction="READ für  main/py")
    assert (features(one) == features(other)).all()
    assert (features(one) != features(SpawnSignal(instruction="read fxr, main.py"))).any()


def test_known_lengths_count_like_those_of_texts() -> None:
    text = features(SpawnSignal(instruction="." * 50, context=""))
    assert (text == features(SpawnSignal(instruction_chars=50, context_chars=0))).all()
    assert (text != features(SpawnSignal(instruction_chars=50))).any(), "no context is not an empty one"


def test_the_signal_of_a_boundary() -> None:
    spawn = Spawn(instruction="do it", context="c", tools=("bash",), model="m", position=3)
    event = Boundary(message_id="1", kind=BoundaryKind.SUBAGENT_SPAWN, session_id="s", agent="coder", agent_id="a", spawn=spawn)
    assert signal_of(event) == SpawnSignal("do it", "c", 5, 1, tools=("bash",), agent="coder", model="m", position=3)
    long = signal_of(event.model_copy(update={"spawn": Spawn(instruction="x" * 60_000, context="y" * 50_000)}))
    whole = SpawnSignal("x" * 60_000, "y" * 50_000, agent="coder")
    assert len(long.instruction or "") < 2000 and (features(long) == features(whole)).all()
    assert signal_of(event.model_copy(update={"spawn": None})) == SpawnSignal(agent="coder")


def test_serving_needs_no_training_library() -> None:
    code = "import sys, vllm_lifetime.prediction.lifetime_rank; print({'torch', 'sklearn', 'scipy', 'vllm'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "set()"


# ---------------------------------------------------------------------- ranking


def test_who_knows_nothing_orders_by_size() -> None:
    rank = LifetimeRank()
    told = [
        SpawnSignal(instruction="x" * 10, context="y" * 10, agent="z", tools=("bash", "grep", "edit")),
        worker(300, "reader", position=9),
        worker(300, context_chars=2000),
        worker(65_536),
    ]
    scores = [rank.score(signal) for signal in told]
    assert scores == sorted(scores) and len(set(scores)) == 4


def test_it_learns_which_roles_live_longer_against_their_size() -> None:
    rank = LifetimeRank()
    for _ in range(20):
        rank.observe(worker(2000, "grep"), 5.0)
        rank.observe(worker(500, "build"), 900.0)
    assert rank.score(worker(500, "build")) > rank.score(worker(2000, "grep"))
    assert rank.score(worker(600, "build")) == pytest.approx(target(900.0), abs=0.6)


def test_words_decide_where_roles_and_lengths_are_the_same() -> None:
    rank = LifetimeRank()
    long, short = "rewrite it all and run tests", "name this one file as a list"
    assert len(long) == len(short)
    for _ in range(20):
        rank.observe(SpawnSignal(instruction=long), 600.0)
        rank.observe(SpawnSignal(instruction=short), 20.0)
    assert rank.score(SpawnSignal(instruction="run tests and rewrite")) > rank.score(
        SpawnSignal(instruction="list one file by name")
    )


def test_it_forgets_what_is_no_longer_so() -> None:
    rank = LifetimeRank(window=30)
    for slow, fast in (("a", "b"), ("b", "a")):
        for _ in range(15):
            rank.observe(worker(agent=slow), 500.0)
            rank.observe(worker(agent=fast), 10.0)
        assert rank.score(worker(agent=slow)) > rank.score(worker(agent=fast))
    assert len(rank) == 30 and rank.num_observed == 60


@pytest.mark.parametrize("window", [7, 40])
def test_what_is_learned_is_the_ridge_regression_of_the_window(window: int) -> None:
    """However many came and went, no error adds up."""
    rng = np.random.default_rng(0)
    told = [
        SpawnSignal(
            instruction=" ".join(rng.choice(list("abcdefgh"), 5)),
            agent=str(rng.integers(4)),
            tools=tuple(map(str, rng.integers(9, size=3))),
            position=int(rng.integers(9)),
        )
        for _ in range(300)
    ]
    lifetimes = np.exp(rng.normal(4, 1, len(told)))
    base = rng.normal(size=NUM_FEATURES)
    rank = LifetimeRank(base, window=window, penalty=2.0)
    for signal, lifetime_s in zip(told, lifetimes, strict=True):
        rank.observe(signal, lifetime_s)
    x = np.array([features(signal) for signal in told[-window:]])
    y = np.log(lifetimes[-window:]) - x @ base
    learned = np.linalg.solve(2.0 * np.eye(NUM_FEATURES) + x.T @ x, x.T @ y)
    np.testing.assert_allclose(rank.weights, base + learned, atol=1e-9)


@pytest.mark.parametrize("lifetime_s", [float("nan"), float("inf"), -1.0])
def test_what_is_no_lifetime_is_ignored(lifetime_s: float) -> None:
    rank = LifetimeRank()
    rank.observe(worker(), lifetime_s)
    assert rank.num_observed == len(rank) == 0


def test_extreme_lifetimes_stay_within_bounds() -> None:
    rank = LifetimeRank()
    for lifetime_s in (0.0, 1e300, 0.0, 1e300):
        rank.observe(worker(), lifetime_s)
    assert abs(rank.score(worker())) < 20


def test_without_a_window_nothing_is_learned() -> None:
    rank = LifetimeRank(window=0)
    before = rank.score(worker())
    rank.observe(worker(), 1e4)
    assert rank.score(worker()) == before and rank.num_observed == 0


@pytest.mark.parametrize("arguments", [{"window": -1}, {"penalty": 0.0}, {"penalty": float("nan")}, {"base": np.zeros(3)}])
def test_arguments_out_of_bounds(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        LifetimeRank(**arguments)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- storing


@settings(max_examples=10)
@given(st.lists(st.tuples(signals, st.floats(0, 1e9)), max_size=12))
def test_what_was_learned_is_restored(seen: list[tuple[SpawnSignal, float]]) -> None:
    rank, again = LifetimeRank(window=8), LifetimeRank(window=8)
    for signal, lifetime_s in seen:
        rank.observe(signal, lifetime_s)
    again.restore(rank.to_json())
    assert (len(again), again.num_observed) == (len(rank), rank.num_observed)
    np.testing.assert_allclose(again.weights, rank.weights, atol=1e-9)


def test_a_smaller_window_restores_the_latest() -> None:
    rank, smaller = LifetimeRank(window=20), LifetimeRank(window=5)
    for lifetime_s in (10.0,) * 15 + (1000.0,) * 5:
        rank.observe(worker(), lifetime_s)
    smaller.restore(rank.to_json())
    assert len(smaller) == 5 and smaller.num_observed == 20
    assert smaller.score(worker()) > rank.score(worker())


def _stored(**changes: object) -> str:
    rank = LifetimeRank()
    rank.observe(worker(), 10.0)
    return json.dumps(json.loads(rank.to_json()) | changes)


ROW = {"target": 1.0, "places": [0], "values": [1.0]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "no lifetime rank"),
        (_stored(format="?"), "no lifetime rank"),
        (_stored(version=2), "of version 2"),
        (_stored(features=-1), "features -1"),
        (_stored(returned=3), "'returned' must be a list"),
        (_stored(num_observed=0), "'num_observed' must be a whole number of at least 1"),
        (_stored(num_observed="1"), "'num_observed'"),
        (_stored(returned=[7]), r"returned\[0\]: field 'places'"),
        (_stored(returned=[ROW | {"places": [NUM_FEATURES]}]), "field 'places'"),
        (_stored(returned=[ROW | {"places": [True]}]), "field 'places'"),
        (_stored(returned=[ROW | {"values": [1, 2]}]), "field 'values'"),
        (_stored(returned=[ROW | {"values": [float("nan")]}]), "field 'values'"),
        (_stored(returned=[ROW | {"target": None}]), "field 'target'"),
        (_stored(returned=[ROW | {"target": float("inf")}]), "field 'target'"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_learned(text: str, message: str) -> None:
    rank = LifetimeRank()
    with pytest.raises(LifetimeRankError, match=message):
        rank.restore(text)
    assert len(rank) == rank.num_observed == 0


def test_the_file_of_a_trained_rank(tmp_path: Path) -> None:
    weights = np.random.default_rng(0).normal(size=NUM_FEATURES)
    save_base(tmp_path / "r.npz", weights, {"workers": 3})
    assert (load_base(tmp_path / "r.npz") == weights).all()
    with pytest.raises(PredictorFileError, match="not what its header says"):
        load_predictor(tmp_path / "r.npz")


@pytest.mark.parametrize(
    ("header", "arrays", "message"),
    [
        ({"model": "markov"}, {}, "holds no lifetime rank but 'markov'"),
        ({"features": FEATURES_VERSION + 1}, {}, "train it again"),
        ({}, {}, "its weights are missing"),
        ({}, {"weights": np.zeros(NUM_FEATURES + 1)}, "its weights are not"),
        ({}, {"weights": np.full(NUM_FEATURES, np.nan)}, "not a number of at most"),
        ({}, {"weights": np.zeros(NUM_FEATURES, dtype=np.int64)}, "its weights are not"),
    ],
)
def test_files_that_cannot_serve(tmp_path: Path, header: dict[str, object], arrays: dict[str, object], message: str) -> None:
    full = {"model": "lifetime-rank", "features": FEATURES_VERSION} | header
    write_predictor_file(tmp_path / "r.npz", full, arrays)  # type: ignore[arg-type]
    with pytest.raises(PredictorFileError, match=message):
        load_base(tmp_path / "r.npz")


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_base(tmp_path / "r.npz", np.zeros(NUM_FEATURES), {})
    content = (tmp_path / "r.npz").read_bytes()
    (tmp_path / "r.npz").write_bytes(content[: len(content) // 2])
    with pytest.raises(PredictorFileError, match="damaged or truncated"):
        load_base(tmp_path / "r.npz")
