# SPDX-License-Identifier: Apache-2.0
"""What a decision costs on the scheduler's thread: to evict, to refresh scores, to predict, to choose what to prefetch.

A full pool of each size is shared by 72 workflows of five agents. Each agent has read its prompt, which the agents of its role
share over all workflows, and private blocks in runs of sixteen. Workflows invoke agents in turn, and blocks are evicted and
computed anew. Then the host tier, an eighth of HBM, is filled with runs of all agents that HBM gives up, and as many go down as
come up.

- *evict*: to take the blocks of one scheduler step (`--step-blocks`) from a free list with all its ranks, and note what prefetch
  may bring back.
- *score update*: what it costs to bring a workflow's runs up to date with a new forecast, per run that is re-ranked.
- *invocation*: all of `Scorer.start_request` but the prediction: history, values, next use, and those updates.
- *place run*: to rank one run that is new, or whose readers have changed, alone.
- *predict*: one forecast of three steps, by the online model and, with `--predictor`, by one from a file.
- *prefetch*: to choose what to fetch in one decode step of 12 ms, at 10,000 blocks a second.
- *prefetch, nothing*: the same when all that is below is in HBM, too.

Figures are CPU time of one thread. PBKV's (its table 4) are beside ours.

    python -m benchmarks.decision_costs --json decisions.json
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.report import mean, percentile
from benchmarks.timing import QuietGc
from vllm_lifetime.policy.eviction import EVICTION_POLICIES
from vllm_lifetime.policy.prefetch import PrefetchBudget, PrefetchPlanner, TransferRates, free_members
from vllm_lifetime.policy.scorer import Scorer
from vllm_lifetime.pool.access import HBM_TIER, AccessTable, Path
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Reader
from vllm_lifetime.pool.tiers import Slot, SlotTier
from vllm_lifetime.prediction.forecast import Forecast, TransitionPredictor
from vllm_lifetime.prediction.next_use import NextUseModel
from vllm_lifetime.prediction.online import OnlineMarkov
from vllm_lifetime.prediction.serving import load_predictor

ROLES = ("planner", "coder", "tester", "reviewer", "writer")
RUN_BLOCKS = 16
PROMPT_BLOCKS = 32
BLOCK_TOKENS = 16
PAPER = {
    "evict": ("ms", 0.44, 0.81),
    "score update, per run": ("us", 1.53, 2.69),
    "predict, online": ("ms", 1.18, 1.68),
    "predict, from file": ("ms", 1.18, 1.68),
    "prefetch": ("ms", 0.64, 1.60),
}

Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments()
    rows: list[Row] = []
    for num_blocks in arguments.blocks:
        rows += measure(num_blocks, arguments)
    trained = None if arguments.predictor is None else load_predictor(arguments.predictor)
    rows += measure_predictions("predict, online", learned_model(), arguments.repeats)
    if trained is not None:
        rows += measure_predictions("predict, from file", trained, arguments.repeats)
    Console().print(table_of(rows))
    if trained is None:
        Console().print("No --predictor was given: a trained model's forecasts are not measured.", style="dim")
    if arguments.json:
        FilePath(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[100_000, 1_000_000], help="pool sizes")
    parser.add_argument("--workflows", type=int, default=72, help="workflows that share the pool")
    parser.add_argument("--step-blocks", type=int, default=64, help="blocks that one scheduler step needs")
    parser.add_argument("--repeats", type=int, default=2000, help="decisions measured")
    parser.add_argument("--predictor", help="a file that `vllm-lifetime predict train` has written")
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


class AnyForecast:
    """A forecast that costs nothing, another one each time."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._forecasts = itertools.cycle(Forecast(ROLES, rng.dirichlet(np.ones(len(ROLES) + 1), size=3)) for _ in range(997))

    def predict(self, history: Any, hidden_state: Any = None) -> Forecast:
        return next(self._forecasts)


class World:
    """A full pool, its table and a scorer."""

    def __init__(self, num_blocks: int, num_workflows: int) -> None:
        self.blocks = [Slot(index) for index in range(num_blocks)]
        self.hbm: TierFreeList[Slot] = TierFreeList(self.blocks, 0)
        self.host = SlotTier("host", 1, num_blocks // 8)
        self.known: set[bytes] = set()
        self.rates = TransferRates()
        self.rates.observe_step(0.012)
        self.rates.observe_transfer(1, 100, 0.01)
        free_lists: list[TierFreeList[Any]] = [self.hbm, self.host.free_list]
        self.table = AccessTable(free_lists, self.copies_of, lambda block: None)
        self.now = 0.0
        # What is measured is what a forecast's consequences cost, not the forecast.
        self.scorer = Scorer(self.table, EVICTION_POLICIES["lifetime"], AnyForecast(), NextUseModel(), slow_prediction_s=math.inf)
        self.planner = PrefetchPlanner(self.scorer.one_step_value, self.is_in_hbm, BLOCK_TOKENS, self.rates, (1,))
        self.num_hashes = 0
        self.prompts: dict[str, list[Slot]] = {}
        self.readers = [(role, Reader(f"w{number}")) for number in range(num_workflows) for role in ROLES]
        for role, reader in self.readers:
            self.invoke(role, reader)
        turns = itertools.cycle(self.readers)
        while len(self.prompts) < len(ROLES) or self.hbm.num_empty_blocks >= RUN_BLOCKS:
            self.extend(*next(turns))
        self.scorer.advance(self.now)

    def copies_of(self, block_hash: bytes) -> list[tuple[int, Slot]]:
        slot = self.host.get(block_hash)
        return [] if slot is None else [(1, slot)]

    def is_in_hbm(self, slot: Slot) -> bool:
        return slot.block_hash in self.known

    def invoke(self, role: str, reader: Reader) -> None:
        self.now += 0.1
        self.scorer.start_request(reader, self.now, agent=role)
        self.scorer.finish_request(reader, self.now + 0.05, "tool_calls", "read", agent=role)

    def extend(self, role: str, reader: Reader) -> None:
        """Sixteen blocks more behind the role's prompt, as a run of their own."""
        prompt = self.prompts.get(role)
        blocks = [] if prompt is None else list(prompt)
        new = self.hbm.popleft_n(PROMPT_BLOCKS + RUN_BLOCKS - len(blocks))
        path = Path(reader)
        held = [block for block in blocks if block.next_free_block is not None]
        self.hbm.remove_n(held)
        self.table.read(path, blocks, len(blocks))
        blocks += new
        for depth, block in enumerate(new, len(blocks) - len(new) + 1):
            self.fill(block, depth)
        if prompt is None:
            self.table.write(path, blocks, PROMPT_BLOCKS)
            self.prompts[role] = blocks[:PROMPT_BLOCKS]
        self.table.write(path, blocks, len(blocks))
        self.hbm.append_n((held + new)[::-1])

    def fill(self, block: Slot, depth: int) -> None:
        self.num_hashes += 1
        block.block_hash = self.num_hashes.to_bytes(8, "big")
        block.block_hash_num_tokens = depth * BLOCK_TOKENS
        self.known.add(block.block_hash)

    def take(self, count: int) -> list[Slot]:
        """The next blocks, as the engine takes them."""
        blocks = self.hbm.popleft_n(count)
        run_of = self.hbm.run_of
        self.planner.note_lost([run for block in blocks if (run := run_of[block.block_id]) is not None])
        return blocks

    def give_up(self, blocks: list[Slot], *, copy: bool) -> None:
        """Blocks that were taken lose their content; copied down before, or lost."""
        for block in blocks:
            if block.block_hash is None:
                continue
            if copy:
                self.copy_down(block)
            self.hbm.forget_hash(block)
            self.known.discard(block.block_hash)
            block.block_hash = block.block_hash_num_tokens = None
        self.hbm.prepend_n(blocks)

    def copy_down(self, block: Slot) -> None:
        """Give the host tier a copy, for which it gives up what it values least."""
        if block.block_hash is not None and block.block_hash not in self.host:
            for slot in self.host.allocate(1):
                self.host.publish(slot, block.block_hash, block.block_hash_num_tokens or 0, self.hbm.run_of[block.block_id])

    def put_below(self, rng: random.Random) -> None:
        """HBM gives up a run of some agent, which the host tier has then."""
        _, reader = self.readers[rng.randrange(len(self.readers))]
        run = rng.choice(sorted(reader.runs, key=lambda run: run.start))
        if run.start:
            blocks: list[Slot] = list(free_members(run, HBM_TIER))
            self.planner.note_lost([run])
            self.hbm.remove_n(blocks)
            self.give_up(blocks, copy=True)

    def fill_up(self, rng: random.Random) -> None:
        """What is empty is computed anew."""
        while self.hbm.num_empty_blocks >= RUN_BLOCKS:
            self.extend(*self.readers[rng.randrange(len(self.readers))])

    def bring_up(self, slots: list[Slot]) -> None:
        """Blocks move from the host tier to HBM."""
        blocks = self.hbm.popleft_n(len(slots))
        for block, slot in zip(blocks, slots, strict=True):
            block.block_hash, block.block_hash_num_tokens = slot.block_hash, slot.block_hash_num_tokens
            assert block.block_hash is not None
            self.known.add(block.block_hash)
            self.hbm.set_run(block, self.host.run_of(slot))
        self.hbm.append_n(sorted(blocks, key=lambda block: -(block.block_hash_num_tokens or 0)))
        self.host.forget(slots)

    def budget(self) -> PrefetchBudget:
        empty, retired = self.hbm.num_empty_blocks, self.hbm.num_retired_blocks
        return PrefetchBudget.of(self.rates, num_empty=empty, num_retired=retired, num_reserved=0)


def measure(num_blocks: int, arguments: argparse.Namespace) -> list[Row]:
    """All decisions about one pool."""
    world = World(num_blocks, arguments.workflows)
    rng = random.Random(1)
    evictions: list[float] = []
    updates: list[float] = []
    invocations: list[float] = []
    places: list[float] = []
    with QuietGc():
        for _ in range(arguments.repeats):
            role, reader = world.readers[rng.randrange(len(world.readers))]
            invocations.append(timed(partial(world.scorer.start_request, reader, world.now, agent=role)))
            workflow, _ = world.scorer.ranking._by_reader[reader]
            workflow.weight *= 0.999
            before = world.scorer.num_updates
            nanoseconds = timed(partial(world.scorer.ranking.refresh, workflow))
            updates.append(nanoseconds / max(1, world.scorer.num_updates - before))
            world.scorer.finish_request(reader, world.now + 0.05, "tool_calls", "read", agent=role)
            world.now += 0.1
            start = time.thread_time_ns()
            blocks = world.take(arguments.step_blocks)
            evictions.append(time.thread_time_ns() - start)
            world.give_up(blocks, copy=False)
            world.fill_up(rng)
            before = world.scorer.num_updates
            nanoseconds = timed(lambda: world.scorer.advance(-1.0))
            places.append(nanoseconds / max(1, world.scorer.num_updates - before))
        prefetches = list(measure_prefetch(world, rng, arguments.repeats))
        nothings = list(measure_nothing(world, rng, arguments.repeats // 10))
    figures = {
        "evict": evictions,
        "score update, per run": updates,
        "invocation": invocations,
        "place run": places,
        "prefetch": prefetches,
        "prefetch, nothing": nothings,
    }
    return [row(name, num_blocks, times) for name, times in figures.items()]


def measure_prefetch(world: World, rng: random.Random, repeats: int) -> Iterator[float]:
    """Choose what fits one decode step; it comes up, and as much goes down."""
    while len(world.host) + RUN_BLOCKS <= len(world.host.slots):
        world.put_below(rng)
    world.fill_up(rng)
    for _ in range(repeats):
        world.invoke(*world.readers[rng.randrange(len(world.readers))])
        while world.hbm.num_empty_blocks < 128:
            world.put_below(rng)
        start = time.thread_time_ns()
        chosen = world.planner.choose(world.budget())
        yield time.thread_time_ns() - start
        world.bring_up([slot for _, slot in chosen])


def measure_nothing(world: World, rng: random.Random, repeats: int) -> Iterator[float]:
    """Choose, when the host tier has copies of nothing but what is in HBM, too."""
    world.host.clear()
    for block in list(itertools.islice(world.hbm.iter_cached_blocks(), len(world.host.slots))):
        world.copy_down(block)
    for _ in range(repeats):
        world.invoke(*world.readers[rng.randrange(len(world.readers))])
        world.give_up(world.take(1), copy=False)
        start = time.thread_time_ns()
        world.planner.choose(world.budget())
        yield time.thread_time_ns() - start


def learned_model() -> OnlineMarkov:
    """The online model after a thousand workflows."""
    model = OnlineMarkov()
    rng = random.Random(2)
    for _ in range(1000):
        history: list[str] = []
        for _ in range(rng.randrange(3, 20)):
            history.append(rng.choice(ROLES))
            model.observe(tuple(history))
    return model


def measure_predictions(name: str, predictor: TransitionPredictor, repeats: int) -> list[Row]:
    """One forecast a call, of histories of up to sixty invocations."""
    rng = random.Random(3)
    agents: tuple[str, ...] = getattr(predictor, "agents", ROLES)
    times = []
    with QuietGc():
        for _ in range(repeats):
            history = tuple(rng.choice(agents) for _ in range(rng.randrange(1, 60)))
            times.append(timed(partial(predictor.predict, history)))
    return [row(name, None, times)]


def timed(call: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    call()
    return time.thread_time_ns() - start


def row(name: str, num_blocks: int | None, nanoseconds: list[float]) -> Row:
    """Mean and 99th percentile."""
    return {
        "decision": name,
        "blocks": num_blocks,
        "mean_us": mean(nanoseconds) / 1000,
        "p99_us": percentile(nanoseconds, 0.99) / 1000,
        "count": len(nanoseconds),
    }


def table_of(rows: list[Row]) -> Table:
    """One line per decision and pool."""
    table = Table(title="Cost of a decision, microseconds of one core")
    for heading in ("decision", "blocks", "mean", "p99", "PBKV mean", "PBKV p99"):
        table.add_column(heading, justify="left" if heading == "decision" else "right")
    for each in rows:
        unit, mean, p99 = PAPER.get(each["decision"], ("us", math.nan, math.nan))
        scale = 1000 if unit == "ms" else 1
        paper = ["-", "-"] if math.isnan(mean) else [f"{mean * scale:g}", f"{p99 * scale:g}"]
        blocks = "-" if each["blocks"] is None else f"{each['blocks']:,}"
        table.add_row(each["decision"], blocks, f"{each['mean_us']:.3g}", f"{each['p99_us']:.3g}", *paper)
    return table


if __name__ == "__main__":
    main()
