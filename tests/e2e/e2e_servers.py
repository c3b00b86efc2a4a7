# SPDX-License-Identifier: Apache-2.0
"""The servers of a whole test session: what stock vLLM answered, and those with the connector that test files share."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_client import Answer, Api, make_server, tier_options
from e2e_logprobs import Replies, ask_everything
from e2e_workload import CROWD, GROWING, KEPT, RELOAD, WRITING, agents_sequence

from benchmarks.server import VllmServer


@dataclass
class Stock:
    """What stock vLLM answered, on a server with our package installed and the same options but for the connector."""

    cold: dict[str, Answer] = field(default_factory=dict)
    """By prompt: computed in full."""
    warm: dict[str, Answer] = field(default_factory=dict)
    """By prompt: all whole blocks found in HBM."""
    chat: list[tuple[str, int]] = field(default_factory=list)
    """Text and cached tokens of the chat completion, cold and warm."""
    sequence: list[Answer] = field(default_factory=list)
    """`agents_sequence()`, one request after the other on an empty cache."""
    crowd: list[Answer] = field(default_factory=list)
    """`CROWD`, all at the same time."""
    replies: Replies = field(default_factory=Replies)
    """With log probabilities."""
    lifetime_status: int = 0
    """HTTP status of `GET /lifetime/v1/tiers`."""
    metric_names: set[str] = field(default_factory=set)
    log: str = ""


def ask_stock(api: Api, is_full: bool) -> Stock:
    """Ask everything once; `is_full` also what is compared in float32 only."""
    answers = Stock()
    for prompt in RELOAD:
        answers.cold[prompt.name] = api.ask(prompt)
        answers.warm[prompt.name] = api.ask(prompt)
    answers.chat = [api.chat("stock"), api.chat("stock")]
    answers.lifetime_status = api.http.get("/lifetime/v1/tiers").status_code
    answers.metric_names = {name for name, _ in api.metrics()}
    if is_full:
        for prompt in [*CROWD, *GROWING, *KEPT, *WRITING]:
            answers.cold[prompt.name] = api.ask(prompt)
        assert api.http.post("/reset_prefix_cache").json() == {"success": True}
        answers.sequence = [api.ask(prompt) for prompt in agents_sequence()]
        answers.crowd = api.ask_together(CROWD)
    answers.replies = ask_everything(api, is_full=is_full)
    return answers


@dataclass(frozen=True)
class Setup:
    """How a shared server is configured. A path among `options` lies in the server's own directory."""

    dtype: str = "float32"
    host_blocks: int = 0
    flash_blocks: int = 0
    options: tuple[tuple[str, Any], ...] = ()


PLAIN = Setup()
"""The connector without lower tiers."""

TIERS = {dtype: Setup(dtype, host_blocks=64, flash_blocks=200) for dtype in ("float32", "bfloat16")}

SCORED = Setup(
    host_blocks=120,
    options=(
        ("eviction_policy", "lifetime"),
        ("predictor_path", Path("missing.npz")),
        ("state_path", Path("state.json")),
        ("prefetch", "conservative"),
    ),
)
"""A host tier, and a predictor file that is not there."""

TOGETHER = ((PLAIN, TIERS["float32"]), (TIERS["bfloat16"], SCORED))
"""Which servers are started side by side: a start is the work of one thread, and who is not asked costs nothing."""


class Servers:
    """Keeps two servers running at most, and replaces them when another setup is asked for: test files may share one."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self._directory = directory
        self._running: dict[Setup, Api] = {}
        self._numbers = itertools.count(1)
        self.on_started: Callable[[], None] = lambda: None
        """Called when shared servers run, and the machine has a core to spare."""

    def directory(self) -> Path:
        """A new directory. From any thread."""
        path = self._directory / f"server-{next(self._numbers)}"
        path.mkdir()
        return path

    def get(self, setup: Setup) -> Api:
        """The running server of this setup. If it does not run, others are ended, and it is started with its companion."""
        if setup not in self._running:
            self.stop()
            (setups,) = [pair for pair in TOGETHER if setup in pair]
            with ThreadPoolExecutor(len(setups)) as threads:
                starting = {each: threads.submit(self._start_shared, each) for each in setups}
            self._running = {each: start.result() for each, start in starting.items() if start.exception() is None}
            self.on_started()
            return starting[setup].result()
        return self._running[setup]

    def _start_shared(self, setup: Setup) -> Api:
        directory = self.directory()
        options = {name: str(directory / value) if isinstance(value, Path) else value for name, value in setup.options}
        flash_path = directory / "flash.kv"
        connector = tier_options(setup.dtype, flash_path, setup.host_blocks, setup.flash_blocks, **options)
        return self.start(directory, setup.dtype, connector)

    def start(self, directory: Path, dtype: str, connector: dict[str, Any], *args: str) -> Api:
        """A server of the caller's own; its log stays in `directory`. From any thread."""
        server = self.make(directory, dtype, connector, *args)
        server.start()
        return Api(server)

    def make(self, directory: Path, dtype: str, connector: dict[str, Any], *args: str, **options: Any) -> VllmServer:
        """The same, not started."""
        number = len(list(directory.glob("*.log")))
        return make_server(self.model, directory / f"{number}.log", dtype, connector, *args, **options)

    def stop(self) -> None:
        """End the shared servers; the next `get` starts new ones."""
        for api in self._running.values():
            api.server.stop()
        self._running = {}
