# SPDX-License-Identifier: Apache-2.0
"""How fast the flash device is, against plain file IO of the same pages.

Plain is one ``os.pwritev`` or ``os.preadv`` per slot: same pages, sizes, offsets' alignment, thread
count and file system, without keys, records and checksums. Plain and device take turns; the
figures are medians over the turns, and the ratio is the median of each turn's ratio. The page cache
is warm, so this measures the cost of the code, not of a drive. Source and target pages come from a
pool larger than the CPU's private caches, as a staging buffer is.

"Ratio" is of throughput; "CPU" is of CPU time, plain's over the device's, which other processes on
the machine disturb less.

    python benchmarks/flash_device.py --directory /mnt/nvme
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from vllm_lifetime.flash import FlashDevice, FlashGeometry

KIB = 1024
MIB = 1024 * KIB
TARGET_RATIO = 0.8


def main() -> None:
    arguments = parse_arguments()
    rows = []
    for slot_bytes in arguments.slot_kib:
        for pages_per_slot in arguments.pages:
            for threads in arguments.threads:
                rows += measure(
                    Path(arguments.directory),
                    slot_bytes * KIB,
                    pages_per_slot,
                    threads,
                    working_set=arguments.working_set_mib * MIB,
                    repeats=arguments.repeats,
                    is_cold=arguments.cache == "cold",
                )
    Console().print(as_table(rows, arguments.cache))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the files go")
    parser.add_argument("--slot-kib", type=int, nargs="+", default=[64, 256, 2048])
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16], help="pages per slot")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--working-set-mib", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm", help="page cache; see above")
    parser.add_argument("--json", help="also write the figures to this file")
    return parser.parse_args()


def measure(
    directory: Path,
    slot_bytes: int,
    pages_per_slot: int,
    threads: int,
    *,
    working_set: int,
    repeats: int,
    is_cold: bool,
) -> list[dict[str, Any]]:
    """Rows for write and read of one configuration."""
    num_slots = working_set // slot_bytes
    geometry = FlashGeometry(
        model="benchmark",
        dtype="uint8",
        block_size_tokens=16,
        num_layers=pages_per_slot,
        slot_bytes=slot_bytes,
        hash_algorithm="none",
        hash_seed="0",
    )
    generator = np.random.default_rng(0)
    pool = generator.integers(0, 256, working_set // 2, dtype=np.uint8)
    slots_in_pool = len(pool) // slot_bytes
    pages_of_pool = [
        list(pool[start : start + slot_bytes].reshape(pages_per_slot, -1))
        for start in range(0, slots_in_pool * slot_bytes, slot_bytes)
    ]
    keys = [slot.to_bytes(36, "little") for slot in range(num_slots)]
    file_bytes = num_slots * (slot_bytes + 64) + MIB
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        plain = os.open(f"{folder}/plain", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(plain, 0, num_slots * slot_bytes)
        device = FlashDevice.open(f"{folder}/device", geometry, size_bytes=file_bytes, persist=False)

        device_file = os.open(f"{folder}/device", os.O_RDWR)
        files = {"plain": plain, "device": device_file}

        def sync(name: str) -> None:
            if is_cold:
                os.fdatasync(files[name])

        def empty_cache(name: str) -> None:
            if is_cold:
                os.fdatasync(files[name])
                os.posix_fadvise(files[name], 0, 0, os.POSIX_FADV_DONTNEED)

        def nothing(name: str) -> None:
            pass

        def pages_of(slot: int) -> list[np.ndarray]:
            return pages_of_pool[slot % slots_in_pool]

        def plain_write(slots: Sequence[int]) -> None:
            for slot in slots:
                assert os.pwritev(plain, pages_of(slot), slot * slot_bytes) == slot_bytes

        def plain_read(slots: Sequence[int]) -> None:
            for slot in slots:
                assert os.preadv(plain, pages_of(slot), slot * slot_bytes) == slot_bytes

        def device_write(slots: Sequence[int]) -> None:
            for slot in slots:
                assert device.write(slot, keys[slot], pages_of(slot))

        def device_read(slots: Sequence[int]) -> None:
            for slot in slots:
                assert device.read(slot, keys[slot], pages_of(slot)).hit

        try:
            return [
                compare(
                    {
                        "operation": operation,
                        "slot_kib": slot_bytes // KIB,
                        "pages": pages_per_slot,
                        "threads": threads,
                    },
                    contestants,
                    num_slots,
                    num_slots * slot_bytes,
                    threads,
                    repeats,
                    before,
                    after,
                )
                for operation, contestants, before, after in (
                    ("write", {"plain": plain_write, "device": device_write}, nothing, sync),
                    ("read", {"plain": plain_read, "device": device_read}, empty_cache, nothing),
                )
            ]
        finally:
            os.close(device_file)
            device.close()
            os.close(plain)


def compare(
    row: dict[str, Any],
    contestants: dict[str, Callable[[Sequence[int]], None]],
    num_slots: int,
    total_bytes: int,
    threads: int,
    repeats: int,
    before: Callable[[str], None],
    after: Callable[[str], None],
) -> dict[str, Any]:
    """``row`` with the throughput of each contestant and the device's share of plain.

    ``before(name)`` is not timed, ``after(name)`` is.
    """
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-1, repeats):  # the first turn only warms up
        names = list(contestants) if turn % 2 else list(reversed(contestants))
        for name in names:
            before(name)
            cpu_started = time.process_time()
            started = time.perf_counter()
            run_threads(contestants[name], num_slots, threads)
            after(name)
            seconds = time.perf_counter() - started
            if turn >= 0:
                rates[name].append(total_bytes / seconds / 1e9)
                cpu_seconds[name].append(time.process_time() - cpu_started)
    row |= {f"{name}_gb_per_s": statistics.median(values) for name, values in rates.items()}
    for name in contestants:
        row[f"{name}_ratio"] = statistics.median(
            rate / plain for rate, plain in zip(rates[name], rates["plain"], strict=True)
        )
        row[f"{name}_cpu_ratio"] = statistics.median(
            plain / ours for plain, ours in zip(cpu_seconds["plain"], cpu_seconds[name], strict=True)
        )
    return row


def run_threads(work: Callable[[Sequence[int]], None], num_slots: int, threads: int) -> None:
    """Let ``threads`` threads do their shares of the slots."""
    shares = [range(num_slots * i // threads, num_slots * (i + 1) // threads) for i in range(threads)]
    workers = [threading.Thread(target=work, args=(share,)) for share in shares]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def as_table(rows: list[dict[str, Any]], cache: str) -> Table:
    table = Table(title=f"Flash device against plain file IO, {cache} page cache, medians")
    names = ["operation", "slot KiB", "pages", "threads", "plain GB/s"]
    for name in (*names, "device GB/s", "ratio", "CPU"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for row in rows:
        cells = [row["operation"], *(str(row[name]) for name in ("slot_kib", "pages", "threads"))]
        cells.append(f"{row['plain_gb_per_s']:.2f}")
        cells.append(f"{row['device_gb_per_s']:.2f}")
        for ratio in (row["device_ratio"], row["device_cpu_ratio"]):
            colour = "green" if ratio >= TARGET_RATIO else "red"
            cells.append(f"[{colour}]{ratio:.2f}[/{colour}]")
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()
