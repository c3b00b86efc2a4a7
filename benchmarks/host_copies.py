# SPDX-License-Identifier: Apache-2.0
"""How fast the CPU platform's copy engine moves blocks between the KV tensor and host memory, against plain memcpy.

Plain is one call of `memcpy` per page on the calling thread, on the same pages: same tensors, blocks and slots. The engine
moves them through its `OffloadingWorker` interface and on its own thread, from submission to completion. Both take turns;
medians. One contiguous `memcpy` of as many bytes stands beside them: what scattering the pages costs, whoever copies them.

    python -m benchmarks.host_copies
"""

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_lifetime.connectors.lifetime.copy_engine import PageCopyWorker

KIB = 1024
MIB = 1024 * KIB
TARGET_RATIO = 0.8


def main() -> None:
    """Print the table; with `--json`, write the figures too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page-kib", type=int, nargs="+", default=[4, 16, 64], help="one layer's page of a block")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--working-set-mib", type=int, default=512)
    parser.add_argument("--copy-mib", type=int, default=32, help="bytes moved per transfer")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    rows = []
    for page_kib in arguments.page_kib:
        rows += measure(
            page_kib * KIB, arguments.layers, arguments.working_set_mib * MIB, arguments.copy_mib * MIB, arguments.repeats
        )
    table = Table(title="Copy engine against memcpy, one thread, medians")
    for name in ("operation", "page KiB", "contiguous GB/s", "memcpy GB/s", "engine GB/s", "ratio"):
        table.add_column(name, justify="left" if name == "operation" else "right")
    for row in rows:
        colour = "green" if row["ratio"] >= TARGET_RATIO else "red"
        table.add_row(
            row["operation"],
            str(row["page_kib"]),
            f"{row['contiguous_gb_per_s']:.2f}",
            f"{row['memcpy_gb_per_s']:.2f}",
            f"{row['engine_gb_per_s']:.2f}",
            f"[{colour}]{row['ratio']:.2f}[/{colour}]",
        )
    Console().print(table)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


def measure(page_bytes: int, layers: int, working_set: int, copy_bytes: int, repeats: int) -> list[dict[str, Any]]:
    """Rows for store and load of one page size."""
    num_blocks = working_set // (page_bytes * layers)
    tensors = [torch.ones((num_blocks, page_bytes), dtype=torch.int8) for _ in range(layers)]
    caches = CanonicalKVCaches(
        [CanonicalKVCacheTensor(tensor, page_bytes) for tensor in tensors],
        [[CanonicalKVCacheRef(i, page_bytes) for i in range(layers)]],
    )
    engine = PageCopyWorker(caches, num_blocks)
    count = copy_bytes // (page_bytes * layers)
    copy_bytes = count * page_bytes * layers
    source, target = np.ones(8 * copy_bytes, dtype=np.int8), np.zeros(8 * copy_bytes, dtype=np.int8)
    generator = np.random.default_rng(0)
    job = 0

    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes, memcpy.restype = [ctypes.c_size_t] * 3, ctypes.c_size_t
    pages = [(t.data_ptr(), t.stride(0)) for t in tensors]
    slots_address, slot_bytes = engine.slots.ctypes.data, engine.slots.shape[1]

    def run_engine(is_store: bool, blocks: list[int], slots: list[int]) -> None:
        nonlocal job
        job += 1
        gpu, cpu = GPULoadStoreSpec(blocks, [count], [0]), CPULoadStoreSpec(slots)
        if is_store:
            engine.submit_store(job, gpu, cpu)
        else:
            engine.submit_load(job, cpu, gpu)
        engine.wait({job})
        assert [result.success for result in engine.get_finished()] == [True]

    def run_memcpy(is_store: bool, blocks: list[int], slots: list[int]) -> None:
        for layer, (address, stride) in enumerate(pages):
            in_slots = slots_address + layer * page_bytes
            for block, slot in zip(blocks, slots, strict=True):
                page, place = address + block * stride, in_slots + slot * slot_bytes
                if is_store:
                    memcpy(place, page, page_bytes)
                else:
                    memcpy(page, place, page_bytes)

    def run_contiguous(is_store: bool, blocks: list[int], slots: list[int]) -> None:
        memcpy(target.ctypes.data + slots[0] % 8 * copy_bytes, source.ctypes.data + blocks[0] % 8 * copy_bytes, copy_bytes)

    rows = []
    contestants: dict[str, Callable[[bool, list[int], list[int]], None]] = {
        "memcpy": run_memcpy,
        "engine": run_engine,
        "contiguous": run_contiguous,
    }
    for operation in ("store", "load"):
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for turn in range(-3, repeats):
            blocks = generator.choice(num_blocks, count, replace=False).tolist()
            slots = generator.choice(num_blocks, count, replace=False).tolist()
            # Whoever comes second finds the pages' translations warm: take turns.
            for name, run in list(contestants.items())[:: 1 if turn % 2 else -1]:
                started = time.perf_counter()
                run(operation == "store", blocks, slots)
                if turn >= 0:
                    rates[name].append(copy_bytes / (time.perf_counter() - started) / 1e9)
        row: dict[str, Any] = {"operation": operation, "page_kib": page_bytes // KIB}
        row |= {f"{name}_gb_per_s": statistics.median(values) for name, values in rates.items()}
        row["ratio"] = statistics.median(e / m for e, m in zip(rates["engine"], rates["memcpy"], strict=True))
        rows.append(row)
    engine.shutdown()
    return rows


if __name__ == "__main__":
    main()
