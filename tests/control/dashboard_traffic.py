# SPDX-License-Identifier: Apache-2.0
"""Believable agents for `MovingEngines`. `python tests/control/dashboard_traffic.py` serves the dashboard with them."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from dashboard_engines import BLOCK_TOKENS, MovingEngines

Post = Callable[[dict[str, Any]], object]
NAMES = ("fix-login", "review-pr", "migrate-db", "write-docs", "triage", "upgrade-deps", "port-tests", "profile")


def live(engines: MovingEngines | RealServer, post: Post, session_id: str, dice: random.Random) -> Iterator[None]:
    """One session from its start to its end, a step at a time."""
    ids = (f"{session_id}-{number}" for number in itertools.count())

    def say(kind: str, **fields: Any) -> None:
        post({"message_id": next(ids), "kind": kind, "session_id": session_id, **fields})

    say("session_start")
    yield
    for _turn in range(dice.randrange(2, 5)):
        for _step in range(dice.randrange(2, 6)):
            engines.request(session_id, agent="lead", segment_class="lead", blocks=dice.randrange(2, 7))
            yield
            engines.request(session_id, agent="lead", segment_class="reasoning_laden", blocks=dice.randrange(2, 8))
            yield
        crew = [f"worker-{number}" for number in range(dice.randrange(4))] + ["reviewer-0"] * dice.randrange(2)
        for member in crew:
            say("subagent_spawn", agent=member.partition("-")[0], agent_id=member)
            yield
        for _step in range(dice.randrange(2, 5)):
            for member in crew:
                role = member.partition("-")[0]
                engines.request(session_id, agent=role, agent_id=member, segment_class=role, blocks=dice.randrange(2, 6))
                yield
        for member in crew:
            say("subagent_return", agent_id=member)
            yield
        say("turn_end")
        engines.request(session_id, agent="lead", segment_class="reasoning_stripped", blocks=2)
        for _pause in range(dice.randrange(8)):
            yield
        if dice.random() < 0.2:
            say("compaction")
            yield
    say(dice.choice(["session_end", "session_end", "workflow_end"]))


class Traffic:
    """So many sessions at a time; one that ends is followed by another."""

    def __init__(self, engines: MovingEngines | RealServer, post: Post, sessions: int = 14, seed: int = 1) -> None:
        self._engines = engines
        self._post = post
        self._dice = random.Random(seed)
        self._numbers = itertools.count(1)
        self._lives = [self._start() for _ in range(sessions)]

    def _start(self) -> Iterator[None]:
        name = f"{self._dice.choice(NAMES)}-{next(self._numbers):03d}"
        return live(self._engines, self._post, name, self._dice)

    def step(self) -> None:
        """Some session does something."""
        index = self._dice.randrange(len(self._lives))
        if next(self._lives[index], self) is self:
            self._lives[index] = self._start()


class RealServer:
    """A vLLM server in the place of `MovingEngines`: its agents' contexts are random tokens that grow as theirs do."""

    def __init__(self, base_url: str, model: str, vocabulary: int) -> None:
        import httpx

        self._http = httpx.Client(base_url=base_url, timeout=120.0)
        self._model = model
        self._vocabulary = vocabulary
        self._dice = random.Random(2)
        self._system = self._tokens(4)
        self._kept: dict[tuple[str, str | None], list[int]] = {}
        self._turns: dict[tuple[str, str | None], tuple[int, list[int]]] = {}

    def _tokens(self, blocks: int) -> list[int]:
        return [self._dice.randrange(3, self._vocabulary) for _ in range(blocks * BLOCK_TOKENS)]

    def request(self, session_id: str, *, agent: str, agent_id: str | None = None, segment_class: str, blocks: int) -> None:
        """One step of an agent: it reads all it has read in this turn, and `blocks` more."""
        who = (session_id, agent_id)
        turn, added = self._turns.get(who, (1, []))
        added = added + self._tokens(blocks)
        self._turns[who] = (turn, added)
        about = {"agent": agent, "turn": turn, **({} if agent_id is None else {"agent_id": agent_id})}
        body = {
            "model": self._model,
            "prompt": self._system + self._kept.setdefault(who, []) + added,
            "max_tokens": 8,
            "kv_transfer_params": {"lifetime": about},
        }
        self._http.post("/v1/completions", json=body, headers={"X-Session-ID": session_id}).raise_for_status()

    def post(self, event: dict[str, Any]) -> None:
        """Report a boundary. After a turn the next request comes without what the turn added, but for its answer."""
        self._http.post("/lifetime/v1/boundaries", json=event).raise_for_status()
        for who, (turn, added) in list(self._turns.items()):
            if who[0] != event.get("session_id"):
                continue
            if event["kind"] == "turn_end":
                self._kept[who] += added[: 2 * BLOCK_TOKENS]
                self._turns[who] = (turn + 1, [])
            elif event["kind"] == "compaction":
                self._kept[who] = self._kept[who][-2 * BLOCK_TOKENS :]
            elif event["kind"] in ("session_end", "workflow_end"):
                del self._turns[who], self._kept[who]


def main() -> None:
    """Serve, or use the server of `--url`, until interrupted."""
    import httpx
    from dashboard_server import DashboardServer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=14)
    parser.add_argument("--steps-per-s", type=float, default=12.0)
    parser.add_argument("--url", help="a vLLM server with the lifetime connector, instead of one without an engine")
    parser.add_argument("--model", default="model")
    parser.add_argument("--vocabulary", type=int, default=1000)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if options.url:
            real = RealServer(options.url, options.model, options.vocabulary)
            traffic = Traffic(real, real.post, options.sessions)
        else:
            engines = MovingEngines()
            server = stack.enter_context(DashboardServer(engines, port=options.port))
            http = stack.enter_context(httpx.Client(base_url=server.base_url))
            print(server.page_url, flush=True)
            traffic = Traffic(engines, lambda event: http.post("/lifetime/v1/boundaries", json=event), options.sessions)
        while True:
            traffic.step()
            time.sleep(1 / options.steps_per_s)


if __name__ == "__main__":
    main()
