# SPDX-License-Identifier: Apache-2.0
"""The scorer in the live engine: policies, predictor files, what is kept across restarts, and what it may import."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated_engine import BLOCK_BYTES, SimulatedEngine, prompt, tiers
from simulated_engine import serve as serve_request

from vllm_lifetime.connectors.lifetime.forecasting import Forecasting
from vllm_lifetime.connectors.lifetime.learned_state import LearnedState
from vllm_lifetime.prediction.predictor_file import write_predictor_file

NUM_BLOCKS = 48
LOGGER = "vllm_lifetime.connectors.lifetime"


serve = partial(serve_request, max_tokens=2)


def run_workflow(engine: SimulatedEngine, number: int, agents: tuple[str, ...] = ("planner", "writer", "planner")) -> None:
    """One workflow, from its start to its end."""
    for i, agent in enumerate(agents):
        who = {"workflow_id": f"w{number}", "agent": agent}
        serve(engine, f"{number}-{i}", prompt(number, 48 + 16 * i), session_id=f"s{number}", metadata=who)
    engine.boundary("session_end", f"end-{number}", session_id=f"s{number}")


def forecasting_of(engine: SimulatedEngine) -> Forecasting:
    """The engine's."""
    forecasting = engine.connector._scheduler_side.forecasting
    assert forecasting is not None
    return forecasting


def warnings_of(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """Warnings that say `text`."""
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and text in r.getMessage()]


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """vLLM's loggers do not propagate."""
    for name in ("forecasting", "learned_state"):
        monkeypatch.setattr(logging.getLogger(f"{LOGGER}.{name}"), "propagate", True)
    for name in ("vllm_lifetime", LOGGER, "vllm_lifetime.connectors"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def test_the_metrics_do_not_tell_what_the_scorer_does(make_scored: Callable[..., SimulatedEngine], counters: Any) -> None:
    """Forecasts are made at each invocation, judged by the next, and better than chance on workflows that repeat."""
    engine = make_scored(NUM_BLOCKS, {})
    for number in range(12):
        run_workflow(engine, number)
    engine.settle()
    totals = counters(engine)
    assert totals["predictions.online.made"] == 36
    assert totals["predictions.online.failed"] == 0
    assert totals["predictions.online.judged"] >= 36
    assert totals["predictions.online.correct"] > 0.6 * totals["predictions.online.judged"]
    assert totals["scorer_updates"] > 0
    gauges = {(name, *labels): value for data in engine.stats for name, labels, value in data["gauges"]}
    assert gauges["predictor_in_use", "online"] == 1 and gauges["predictor_in_use", "trained"] == 0
    assert gauges["scored_workflows",] == 0
    seconds = [v for data in engine.stats for n, labels, values in data["observations"] if n == "scorer_seconds" for v in values]
    assert len(seconds) >= 72
    engine.check_conservation()


def test_the_horizon_stays_a_guess_however_fast_the_cache_is_replaced(make_scored: Callable[..., SimulatedEngine]) -> None:
    engine = make_scored(NUM_BLOCKS, {})
    guess_s = forecasting_of(engine).time_horizon_s
    run_workflow(engine, 0)
    engine.settle()
    assert forecasting_of(engine).time_horizon_s == guess_s, "nothing has been evicted yet"
    for number in range(1, 40):
        run_workflow(engine, number)
    engine.settle()
    horizon_s = forecasting_of(engine).time_horizon_s
    assert horizon_s < guess_s / 2
    gauges = {name: value for data in engine.stats for name, _, value in data["gauges"]}
    assert gauges["time_horizon_seconds"] == horizon_s


@pytest.mark.parametrize("policy", ["lru", "kvflow", "ttl", "time"])
def test_a_policy_without_boundaries_retires_something(make_scored: Callable[..., SimulatedEngine], policy: str) -> None:
    """What a policy is not to know changes nothing: no block is retired, whatever ends."""
    engine = make_scored(NUM_BLOCKS, {"eviction_policy": policy})
    for number in range(4):
        for i, agent in enumerate(("planner", "writer")):
            who = {"workflow_id": f"w{number}", "agent": agent}
            serve(engine, f"{number}-{i}", prompt(number, 48 + 16 * i), session_id=f"s{number}", metadata=who)
        outcome = engine.boundary("session_end", f"end-{number}", session_id=f"s{number}")
        assert outcome["status"] == "ignored" and policy in outcome["reason"]
    assert engine.connector._scheduler_side.usage()["hbm"].retired == 0
    engine.check_conservation()


def order_of(engine: SimulatedEngine) -> list[int]:
    """The blocks in the order in which they would be handed out."""
    return [block.block_id for block in engine.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()]


def test_metadata_changes_the_order_of_lru(make_scored: Callable[..., SimulatedEngine]) -> None:
    """`lru` with metadata evicts block by block as stock vLLM does."""
    engines = [make_scored(NUM_BLOCKS, {"eviction_policy": "lru"}), make_scored(NUM_BLOCKS)]
    for number in range(12):
        for engine in engines:
            who = {"workflow_id": f"w{number % 3}", "agent": "planner"} if engine is engines[0] else None
            serve(engine, f"r{number}", prompt(number % 5, 100 + 16 * number), metadata=who)
        if number == 6:
            engines[0].boundary("workflow_end", "end", workflow_id="w0")
        assert order_of(engines[0]) == order_of(engines[1])


def test_the_forecast_changes_nothing(make_scored: Callable[..., SimulatedEngine]) -> None:
    """Of two live workflows of equal age the one whose agent is never called again is evicted first, though it was used last."""
    for policy, survivor in (("lifetime", "writer"), ("lifecycle", "planner")):
        engine = make_scored(NUM_BLOCKS, {"eviction_policy": policy})
        for number in range(10):
            run_workflow(engine, number, ("planner", "writer", "writer", "writer"))
        # The planner's own prompt is read last; whoever plans writes next, and never plans again.
        who = {"workflow_id": "w", "agent": "writer"}
        serve(engine, "writer", prompt(90, 240), session_id="s", metadata=who)
        serve(engine, "planner", prompt(91, 240), session_id="s", metadata={**who, "agent": "planner"})
        serve(engine, "filler", prompt(92, 16 * 30))
        kept = {"writer": prompt(90, 240), "planner": prompt(91, 240)}
        hits = {name: serve(engine, f"{name}-again", tokens, max_tokens=1) for name, tokens in kept.items() if name == survivor}
        assert hits[survivor] > 0, policy


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 truncated", b"not a predictor", "other agents"])
def test_a_bad_predictor_file_ends_the_engine(
    make_scored: Callable[..., SimulatedEngine], tmp_path: Path, counters: Any, warnings: pytest.LogCaptureFixture, content: Any
) -> None:
    """Missing, empty, truncated, something else: one warning, and the online model serves. For other agents: it serves, too."""
    path = tmp_path / "agents.npz"
    if content == "other agents":
        counts = np.ones((1, 3, 2), dtype=np.float32)
        arrays = {"contexts": np.zeros((1, 1), dtype=np.int64), "lengths": np.zeros(1, dtype=np.int64), "counts": counts}
        header = {"model": "markov", "agents": ["nobody"], "horizon": 3, "hidden_size": 0, "max_order": 1, "blend": True}
        write_predictor_file(path, header, arrays)
    elif content is not None:
        path.write_bytes(content)
    engine = make_scored(NUM_BLOCKS, {"predictor_path": str(path)})
    assert len(warnings_of(warnings, "predictor_path")) == (content != "other agents")
    for number in range(3):
        run_workflow(engine, number)
    engine.settle()
    assert len(warnings_of(warnings, "predictor_path")) == (content != "other agents")
    assert counters(engine)["predictions.online.made"] == 9


def test_what_was_learned_is_lost_at_a_restart(make_scored: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """Written at shutdown, read at start; nothing is left behind but the file."""
    options = {"state_path": str(tmp_path / "state.json")}
    engine = make_scored(NUM_BLOCKS, options)
    for number in range(6):
        run_workflow(engine, number)
    learned = forecasting_of(engine).online.predict(["planner", "writer"])
    engine.connector.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == ["state.json"]
    again = forecasting_of(make_scored(NUM_BLOCKS, options))
    forecast = again.online.predict(["planner", "writer"])
    assert forecast.agents == learned.agents
    assert np.allclose(forecast.probabilities, learned.probabilities, atol=1e-3)
    again.shutdown()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"format": "vllm-lifetime learned state", "version": 99, "parts": {}}',
        json.dumps({"format": "vllm-lifetime learned state", "version": 1, "parts": {"predictor": "{}"}}).encode(),
        json.dumps({"format": "vllm-lifetime learned state", "version": 1, "parts": {"next_use": "[1]"}}).encode(),
        b"\x00\xff" * 100,
    ],
)
def test_a_damaged_state_file_ends_the_engine(
    make_scored: Callable[..., SimulatedEngine], tmp_path: Path, warnings: pytest.LogCaptureFixture, content: bytes
) -> None:
    """One warning, a fresh start, and the next write replaces it."""
    path = tmp_path / "state.json"
    path.write_bytes(content)
    engine = make_scored(NUM_BLOCKS, {"state_path": str(path)})
    assert len(warnings_of(warnings, "state_path")) == 1
    run_workflow(engine, 0)
    engine.connector.shutdown()
    assert LearnedState.read(path).keys() == {"predictor", "next_use"}


def test_a_state_that_cannot_be_written_ends_the_engine(tmp_path: Path) -> None:
    """A directory that is gone: nothing is written, nothing raises, and a later write succeeds."""
    directory = tmp_path / "gone"
    state = LearnedState(directory / "state.json", {"part": lambda: "text"}, lambda: 1)
    assert not state.save()
    directory.mkdir()
    assert state.save()
    assert LearnedState.read(directory / "state.json") == {"part": "text"}
    state.shutdown()


def test_a_state_that_changes_while_it_is_written_is_torn(tmp_path: Path) -> None:
    """A snapshot that the scheduler got in the way of is taken again."""
    tries = iter([RuntimeError("dictionary changed size during iteration"), None])

    def to_json() -> str:
        error = next(tries)
        if error is not None:
            raise error
        return "whole"

    state = LearnedState(tmp_path / "state.json", {"part": to_json}, lambda: 1, save_every_s=1000)
    assert state.save()
    assert LearnedState.read(tmp_path / "state.json") == {"part": "whole"}
    assert state.save(), "nothing new: nothing is asked"
    state.shutdown()


def test_requests_and_boundaries_are_not_recorded(make_scored: Callable[..., SimulatedEngine], tmp_path: Path) -> None:
    """`record_path`: each request's start and end and each boundary, with equal numbers for equal blocks and no token."""
    path = tmp_path / "trace.jsonl"
    engine = make_scored(NUM_BLOCKS, {"record_path": str(path)})
    run_workflow(engine, 1)
    engine.connector.shutdown()
    rows = [json.loads(line) for line in path.read_text().splitlines()][1:]
    assert [row["kind"] for row in rows] == ["start", "finish"] * 3 + ["boundary"]
    starts = [row for row in rows if row["kind"] == "start"]
    assert [row["blocks"] for row in starts] == [[[0, 3]], [[0, 4]], [[0, 5]]]
    assert starts[0]["agent"] == "planner" and starts[0]["session_id"] == "s1"
    assert rows[1]["output_tokens"] == 2 and rows[1]["finish_reason"] == "length"
    assert rows[-1]["event"] == "session_end"


def test_hidden_states_reach_a_predictor_that_does_not_ask(make_scored: Callable[..., SimulatedEngine]) -> None:
    """Rows of running requests refresh their forecast; those of requests that are over or unknown are left out."""
    engine = make_scored(NUM_BLOCKS, {"hidden_states": True})
    forecasting = forecasting_of(engine)
    seen: list[Any] = []
    predict = forecasting.predictor.predict
    forecasting.predictor.predict = lambda history, row=None: (seen.append(row), predict(history, row))[1]  # type: ignore[method-assign]
    engine.add("r", prompt(1, 48), max_tokens=20, session_id="s", metadata={"agent": "planner"})
    engine.step()
    row = np.ones(4, dtype=np.float32)
    forecasting.on_hidden_states({"r": row, "unknown": row})
    engine.run()
    forecasting.on_hidden_states({"r": row})
    assert [one is not None for one in seen] == [False, True]


def test_the_scorer_imports_torch() -> None:
    """Nothing that the scheduler side of the policy needs imports torch or vLLM."""
    modules = (
        "policy.scorer",
        "policy.prefetch",
        "policy.eviction",
        "policy.inheritance",
        "prediction.online",
        "prediction.serving",
        "prediction.next_use",
        "prediction.time_to_live",
        "prediction.predictor_file",
    )
    imports = "; ".join(f"import vllm_lifetime.{module}" for module in modules)
    code = f"{imports}; import sys; print([m for m in ('torch', 'vllm') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("host,flash", [(8, 0), (0, 16), (8, 16)])
def test_an_idle_engine_copies_the_same_blocks_for_ever(
    make_scored: Callable[..., SimulatedEngine], counters: Any, tmp_path: Path, host: int, flash: int
) -> None:
    """Tiers full of what is worth more: the copy of what is worth least was the first to go there, was missed, and made again."""
    engine = make_scored(NUM_BLOCKS, tiers(tmp_path, host, flash))
    for number in range(4):
        run_workflow(engine, number, ("planner", "writer", "writer", "writer"))
    for number in range(20, 30):
        for i, agent in enumerate(("planner", "writer", "writer")):
            who = {"workflow_id": f"w{number}", "agent": agent, "agent_id": agent}
            serve(engine, f"{number}-{i}", prompt(100 * i + number, 100), session_id=f"s{number}", metadata=who)
        engine.settle()
    engine.settle()
    engine.check_conservation()
    written = counters(engine)["bytes_written.host"] + counters(engine)["bytes_written.flash"]
    for _ in range(200):
        engine.step()
    assert counters(engine)["bytes_written.host"] + counters(engine)["bytes_written.flash"] - written <= 8 * BLOCK_BYTES
