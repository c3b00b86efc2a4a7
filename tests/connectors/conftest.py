# SPDX-License-Identifier: Apache-2.0
"""The test model and simulated engines."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The test model; only its configuration is read here."""
    from scripts.make_test_model import make_test_model

    return make_test_model(Path(__file__).parents[2] / "build" / "test-model")


@pytest.fixture
def make_engine(model: Path) -> Iterator[Callable[..., Any]]:
    """Makes simulated engines, and closes them at the end."""
    from simulated_engine import SimulatedEngine, make_vllm_config

    engines = []

    def make(num_blocks: int, options: dict[str, Any] | None = None, **arguments: Any) -> SimulatedEngine:
        engine = SimulatedEngine(make_vllm_config(model, num_blocks, options, **arguments), num_blocks)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.fixture
def make_scored(make_engine: Callable[..., Any]) -> Callable[..., Any]:
    """Makes simulated engines with the scorer on."""

    def make(num_blocks: int, options: dict[str, Any] | None = None, **arguments: Any) -> Any:
        return make_engine(num_blocks, {"eviction_policy": "lifetime", **(options or {})}, **arguments)

    return make


@pytest.fixture
def counters() -> Callable[[Any], Counter[str]]:
    """An engine's counters so far, as `name.label.label`."""

    def read(engine: Any) -> Counter[str]:
        totals: Counter[str] = Counter()
        for data in engine.stats:
            for name, labels, value in data["counters"]:
                totals[".".join([name, *labels])] += value
        return totals

    return read
