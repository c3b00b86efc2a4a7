# SPDX-License-Identifier: Apache-2.0
"""What our block pool costs per call, beside stock vLLM's, and what a boundary costs.

Calls: `get_new_blocks`, `touch` and `free_blocks` on full pools of several sizes. Both pools of a size hold the same
hashes and get the same calls in turns, round by round. Figures are CPU time of the thread, which other processes
disturb less than wall time: the median over the rounds per call, and the median of each round's ratio. What lies
between the timed calls (new hashes, new members of runs) is not counted.

"Runs" is over how many runs our pool's blocks are spread, half of them retired; "-" is no metadata. The target is a
ratio of at most 1.5 and a cost that does not grow with the number of blocks. "Cycle" is the sum of the three: a block
handed out, hit once and given back.

Ending is `AccessTable.end` of a reader that alone reads all runs: it may grow with the runs, not with their blocks.

    python benchmarks/block_pool.py --json pool.json
"""

import argparse
import json
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id

from benchmarks.timing import QuietGc
from vllm_lifetime.connectors.lifetime.block_pool import LifetimeBlockPool
from vllm_lifetime.pool.access import AccessTable
from vllm_lifetime.pool.runs import ACTIVE_RANK, Reader, Run, retired_rank

BLOCK_SIZE = 16
TARGET_RATIO = 1.5
BLOCKS_PER_ROUND = 2048
"""What a round takes at most: enough calls to be timed, few enough to leave most of a small pool free."""
CALLS_PER_ROUND = 256
OPERATIONS = ("get_new_blocks", "touch", "free_blocks", "cycle")

Row = dict[str, Any]


def main() -> None:
    arguments = parse_arguments()
    logging.disable(logging.WARNING)
    console = Console()
    rows: list[Row] = []
    for num_blocks in arguments.blocks:
        for num_runs in arguments.runs:
            rows += measure_calls(num_blocks, num_runs, arguments.batch, arguments.repeats)
            console.print(f"{num_blocks} blocks, {num_runs} runs: done", style="dim")
    console.print(calls_table(rows))
    ends = measure_ends(arguments.repeats)
    console.print(ends_table(ends))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"calls": rows, "ends": ends}, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="pool sizes")
    parser.add_argument("--runs", type=int, nargs="+", default=[0, 1, 100, 10_000], help="0 is no metadata")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 128], help="blocks per call")
    parser.add_argument("--repeats", type=int, default=25, help="rounds, of which the median is taken")
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


class Driver:
    """One pool, full of hashed blocks that nobody references. `num_runs` is 0 for a stock pool.

    Blocks of one run have consecutive depths; what was handed out comes back as the deepest of the next run in turn.
    """

    def __init__(self, pool: BlockPool, num_runs: int) -> None:
        self.pool = pool
        self.num_hashes = 0
        self.runs = [Run(0, 0, 1) for _ in range(num_runs)]
        for number, run in enumerate(self.runs[::2]):
            run.rank = retired_rank(1 + number % 4)
        self.turn = 0
        count = pool.get_num_free_blocks()
        blocks = pool.get_new_blocks(count)
        per_request = -(-count // num_runs) if num_runs else 128
        for start in range(0, count, per_request):
            request = blocks[start : start + per_request]
            self.fill(request)
            pool.free_blocks(reversed(request))

    def fill(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give new blocks hashes and, if there are runs, a run."""
        pool = self.pool
        run = None
        depth = 0
        if self.runs:
            run = self.runs[self.turn % len(self.runs)]
            self.turn += 1
            depth = run.end
            run.end += len(blocks)
        for block in blocks:
            self.num_hashes += 1
            depth += 1
            key = make_block_hash_with_group_id(self.num_hashes.to_bytes(32, "big"), 0)  # type: ignore[arg-type]
            pool._insert_block_hash(key, block, num_tokens=BLOCK_SIZE * depth)
            if run is not None:
                pool.free_list.set_run(block, run)  # type: ignore[attr-defined]

    def round(self, batch: int, calls: int) -> list[float]:
        """Microseconds per call of each operation."""
        pool = self.pool
        get, touch, free = pool.get_new_blocks, pool.touch, pool.free_blocks
        taken: list[list[KVCacheBlock]] = []
        keep = taken.append
        start = time.thread_time_ns()
        for _ in range(calls):
            keep(get(batch))
        get_ns = time.thread_time_ns() - start
        for blocks in taken:
            self.fill(blocks)
        backwards = [blocks[::-1] for blocks in taken]
        start = time.thread_time_ns()
        for blocks in backwards:
            free(blocks)
        free_ns = time.thread_time_ns() - start
        start = time.thread_time_ns()
        for blocks in taken:
            touch(blocks)
        touch_ns = time.thread_time_ns() - start
        for blocks in backwards:
            free(blocks)
        return [ns / calls / 1000 for ns in (get_ns, touch_ns, free_ns, get_ns + touch_ns + free_ns)]


def measure_calls(num_blocks: int, num_runs: int, batches: Sequence[int], repeats: int) -> list[Row]:
    """Both pools of a size in turns, for each batch size."""
    stock = Driver(BlockPool(num_blocks, True, BLOCK_SIZE), 0)
    ours = Driver(LifetimeBlockPool(num_blocks, True, BLOCK_SIZE), num_runs)
    rows = []
    with QuietGc():
        for batch in batches:
            calls = max(1, min(CALLS_PER_ROUND, BLOCKS_PER_ROUND // batch))
            rounds = []
            for number in range(repeats + 1):
                # Who goes first alternates, so that neither always finds the caches warm.
                first = [stock.round(batch, calls)] if number % 2 else []
                mine = ours.round(batch, calls)
                theirs = first[0] if first else stock.round(batch, calls)
                rounds.append((theirs, mine))
            del rounds[0]
            for index, operation in enumerate(OPERATIONS):
                rows.append(
                    {
                        "blocks": num_blocks,
                        "runs": num_runs,
                        "batch": batch,
                        "operation": operation,
                        "stock_us": statistics.median(theirs[index] for theirs, _ in rounds),
                        "ours_us": statistics.median(mine[index] for _, mine in rounds),
                        "ratio": statistics.median(mine[index] / theirs[index] for theirs, mine in rounds),
                    }
                )
    return rows


def measure_ends(repeats: int) -> list[Row]:
    """A reader's end against its runs, and against the blocks of each run."""
    shapes = [(runs, 10) for runs in (1, 10, 100, 1_000, 10_000)] + [(100, blocks) for blocks in (1, 10, 100, 1_000)]
    return [measure_end(num_runs, blocks_per_run, repeats) for num_runs, blocks_per_run in shapes]


def measure_end(num_runs: int, blocks_per_run: int, repeats: int) -> Row:
    pool = LifetimeBlockPool(num_runs * blocks_per_run + 1, True, BLOCK_SIZE)
    driver = Driver(pool, num_runs)
    table = AccessTable([pool.free_list], lambda _hash: (), pool.twin_of)
    times = []
    with QuietGc():
        for number in range(repeats):
            reader = Reader(str(number))
            for run in driver.runs:
                run.add_reader(reader)
                table.set_rank(run, ACTIVE_RANK)
            start = time.thread_time_ns()
            (retired,) = table.end(reader)
            times.append(time.thread_time_ns() - start)
            assert retired == num_runs * blocks_per_run
    microseconds = statistics.median(times) / 1000
    return {
        "runs": num_runs,
        "blocks_per_run": blocks_per_run,
        "end_us": microseconds,
        "us_per_run": microseconds / num_runs,
    }


def calls_table(rows: Sequence[Row]) -> Table:
    """One line per pool and batch size, the operations side by side."""
    table = Table(title="Microseconds per call: stock, ours, ours / stock")
    for heading in ("blocks", "runs", "batch", *OPERATIONS):
        table.add_column(heading, justify="right", no_wrap=True)
    groups: dict[tuple[int, int, int], list[str]] = {}
    for row in rows:
        key = (row["blocks"], row["runs"], row["batch"])
        style = "green" if row["ratio"] <= TARGET_RATIO else "red"
        cell = f"{row['stock_us']:.4g} {row['ours_us']:.4g} [{style}]{row['ratio']:.2f}[/]"
        groups.setdefault(key, []).append(cell)
    for (blocks, runs, batch), cells in groups.items():
        table.add_row(f"{blocks:,}", f"{runs:,}" if runs else "-", str(batch), *cells)
    return table


def ends_table(rows: Sequence[Row]) -> Table:
    """Ends by shape."""
    table = Table(title="Ending a reader")
    columns: list[tuple[str, Callable[[Row], str]]] = [
        ("runs", lambda row: f"{row['runs']:,}"),
        ("blocks per run", lambda row: f"{row['blocks_per_run']:,}"),
        ("us", lambda row: f"{row['end_us']:.1f}"),
        ("us per run", lambda row: f"{row['us_per_run']:.2f}"),
    ]
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns))
    return table


if __name__ == "__main__":
    main()
