# SPDX-License-Identifier: Apache-2.0
"""Stock vLLM's answers, and servers with the connector.

The two stock servers are started first and ended before any other. Then two of `servers` run at a time, and beside them one of
what is done ahead (`e2e_ahead`); when they are not needed any more, two of those.
"""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from e2e_ahead import Ahead
from e2e_client import Answer, Api, make_server
from e2e_servers import TIERS, Servers, Stock, ask_stock
from e2e_workload import Prompt

HERE = Path(__file__).parent
DTYPES = ("float32", "bfloat16")

ORDER = (
    *("without_metadata", "request_naming"),  # one server
    *("boundaries", "bench", "dashboard", "retirement", "same_tokens"),  # another; the last goes on to one in bfloat16
    "scorer",
    *("device_faults", "data_parallel"),
    *("restart", "wear", "harness", "refusals", "hidden_states", "in_place"),  # each waits for what was done ahead
)
"""Files with the same servers stand together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts a server; those with the same one come together."""
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.e2e)
    place = {f"test_e2e_{name}": index for index, name in enumerate(ORDER)}
    ours.sort(key=lambda item: place.get(item.path.stem, len(place)))
    items[:] = [item for item in items if HERE not in item.path.parents] + ours


@pytest.fixture(scope="session")
def model() -> Path:
    """The test model."""
    from scripts.make_test_model import make_test_model

    return make_test_model(HERE.parents[1] / "build" / "test-model")


@pytest.fixture(scope="session")
def stock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stock]:
    """Stock vLLM's answers by dtype. Both servers are gone when this returns."""
    directory = tmp_path_factory.mktemp("stock")

    def collect(dtype: str) -> Stock:
        with make_server(model, directory / f"{dtype}.log", dtype, None) as server:
            answers = ask_stock(Api(server), is_full=dtype == "float32")
        answers.log = server.log_path.read_text(errors="replace")
        return answers

    with ThreadPoolExecutor(len(DTYPES)) as threads:
        return dict(zip(DTYPES, threads.map(collect, DTYPES), strict=True))


@pytest.fixture(scope="session")
def same_as_stock(stock: dict[str, Stock]) -> Callable[..., None]:
    """Asserts that an answer's tokens are stock vLLM's.

    In bfloat16 the rounding, hence the token, may depend on how the prompt was cut into steps: the answer is compared
    with stock's for the same number of cached tokens. In float32 all of stock's answers agree.
    """

    def check(prompt: Prompt, answer: Answer, dtype: str = "float32") -> None:
        cold = stock[dtype].cold[prompt.name]
        expected = cold
        if dtype != "float32" and answer.cached_tokens:
            expected = stock[dtype].warm[prompt.name]
            assert answer.cached_tokens == expected.cached_tokens, "not comparable in bfloat16"
        assert answer.tokens == expected.tokens, f"{prompt.name} with {answer.cached_tokens} cached tokens"

    return check


@pytest.fixture(scope="session")
def wanted(request: pytest.FixtureRequest) -> set[str]:
    """The fixtures of this session's tests."""
    return {name for item in request.session.items if isinstance(item, pytest.Function) for name in item.fixturenames}


@pytest.fixture(scope="session")
def servers(request: pytest.FixtureRequest, wanted: set[str], model: Path, tmp_path_factory: pytest.TempPathFactory) -> Servers:
    """See `Servers`. The stock servers are gone."""
    if "stock" in wanted:
        request.getfixturevalue("stock")
    running = Servers(model, tmp_path_factory.mktemp("lifetime"))
    request.addfinalizer(running.stop)
    return running


@pytest.fixture(scope="session", autouse=True)
def ahead(wanted: set[str], servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ahead]:
    """What the tests to come want done ahead (`e2e_ahead`), under way as soon as there is a core to spare."""
    work = Ahead(wanted, servers, tmp_path_factory)
    servers.on_started = partial(work.go_on, 1)
    yield work
    work.end()


@pytest.fixture(scope="session")
def pieces(ahead: Ahead, servers: Servers) -> dict[str, Future[Any]]:
    """The results; nobody asks for shared servers any more."""
    servers.stop()
    ahead.go_on(2)
    return ahead.results


@pytest.fixture
def tiers_server(servers: Servers) -> Api:
    """A float32 server with host and flash tiers, empty."""
    api = servers.get(TIERS["float32"])
    api.reset()
    return api
