# SPDX-License-Identifier: Apache-2.0
"""The servers of a whole test session: what stock vLLM answered, and one server with the connector at a time."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_client import Answer, Api, make_server, tier_options
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
    return answers


class Servers:
    """Keeps one server running and replaces it when another configuration is asked for: modules may share one."""

    def __init__(self, model: Path, directory: Path) -> None:
        self.model = model
        self._directory = directory
        self._key: tuple[Any, ...] | None = None
        self._api: Api | None = None
        self._count = 0

    def directory(self) -> Path:
        """A new directory."""
        self._count += 1
        path = self._directory / f"server-{self._count}"
        path.mkdir()
        return path

    def get(self, dtype: str, host_blocks: int = 0, flash_blocks: int = 0, **options: Any) -> Api:
        """The running server of this configuration; started if it is not the one that runs."""
        key = (dtype, host_blocks, flash_blocks, *sorted(options.items()))
        if self._api is None or self._key != key:
            self.stop()
            directory = self.directory()
            connector = tier_options(dtype, directory / "flash.kv", host_blocks, flash_blocks, **options)
            self._api = self.start(directory, dtype, connector)
            self._key = key
        return self._api

    def start(self, directory: Path, dtype: str, connector: dict[str, Any], *args: str) -> Api:
        """A server of the caller's own; its log stays in `directory`."""
        server = self.make(directory, dtype, connector, *args)
        server.start()
        return Api(server)

    def make(self, directory: Path, dtype: str, connector: dict[str, Any], *args: str, **options: Any) -> VllmServer:
        """The same, not started."""
        number = len(list(directory.glob("*.log")))
        return make_server(self.model, directory / f"{number}.log", dtype, connector, *args, **options)

    def stop(self) -> None:
        """End the running server, if there is one; the next `get` starts a new one."""
        if self._api is not None:
            self._api.server.stop()
            self._api = None
