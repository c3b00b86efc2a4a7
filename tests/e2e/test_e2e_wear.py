# SPDX-License-Identifier: Apache-2.0
"""The wear ledger on a real server, against what the kernel says was written and against the flash file, over kill -9 and a
restart.

The kernel's count (`/proc/PID/io`, `write_bytes`) is of pages that became dirty, so it has each payload page once, a page of the
record table once for each time the system wrote it back, and the ledger's own pages. The flash file has room for everything that
is ever written here: each block that was written whole has its record in the end.
"""

import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_ahead import ahead
from e2e_client import BLOCK_BYTES, Api, tier_options
from e2e_flash_file import FlashFileKnife
from e2e_servers import Servers
from e2e_workload import filler

from vllm_lifetime.flash.wear_file import read_wear_file

BLOCK = BLOCK_BYTES["float32"]
FLASH_BLOCKS = 1500
IO_THREADS = 4
"""Blocks that may be in flight when the process is killed."""


@dataclass
class History:
    """What was seen of two servers."""

    served: dict[str, Any] = field(default_factory=dict)
    """The ledger after the first requests, as the control API has it."""
    kernel_bytes: int | None = None
    """What the first server's processes wrote meanwhile."""
    ledger_bytes: int = 0
    """The same as the ledger counts it: pages programmed."""
    records_after_kill: int = 0
    flushed_payload_bytes: int = 0
    """In the ledger's file, right after the kill."""
    after_restart: dict[str, Any] = field(default_factory=dict)


@ahead(num_starts=2)
def wear_history(servers: Servers, _: pytest.TempPathFactory) -> History:
    """The two servers' lives."""
    directory = servers.directory()
    path = directory / "flash.kv"
    options = tier_options("float32", path, 0, FLASH_BLOCKS, flash_persist=True, demote_ahead_blocks=64, io_threads=IO_THREADS)
    told = History()
    with servers.start(directory, "float32", options) as api:
        before, ledger_before = _written_bytes(api.server.pid), _wear(api)["programmed_bytes"]
        for number in range(12):
            api.complete(filler(50_000 + number), 1, metadata={"workflow_id": f"w{number}", "segment_class": "lead"})
            api.settle()
        time.sleep(2.5)  # the ledger's last flush
        api.complete(filler(49_000), 1)  # its figures come with a step
        api.settle()
        told.served = _wear(api)
        after = _written_bytes(api.server.pid)
        told.kernel_bytes = None if before is None or after is None else after - before
        told.ledger_bytes = told.served["programmed_bytes"] - ledger_before
        _kill_while_writing(api)
    told.records_after_kill = len(FlashFileKnife(path).keys())
    told.flushed_payload_bytes = read_wear_file(f"{path}.wear")[1].payload_bytes
    with servers.start(directory, "float32", options) as api:
        told.after_restart = _wear(api)
    return told


def _wear(api: Api) -> dict[str, Any]:
    (figures,) = api.http.get("/lifetime/v1/tiers").json()["wear"]
    return dict(figures)


def _kill_while_writing(api: Api) -> None:
    """Requests from three threads, and kill -9 when blocks are being written."""

    def ask(thread: int) -> None:
        try:
            for number in itertools.count():
                api.complete(filler(60_000 + 1000 * thread + number), 1)
        except httpx.HTTPError:
            pass

    before = _wear(api)["payload_bytes"]
    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and _wear(api)["payload_bytes"] < before + 20 * BLOCK:
        pass
    api.server.kill_9()
    for thread in threads:
        thread.join()


def _written_bytes(pid: int) -> int | None:
    """`write_bytes` of a process and all its descendants; None if the system does not say."""
    try:
        return sum(_write_bytes_of(process) for process in _family(pid))
    except (OSError, KeyError, ValueError):
        return None


def _write_bytes_of(pid: int) -> int:
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["write_bytes"])


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _family(int(child))


def test_the_ledger_has_what_the_kernel_counted(wear_history: History) -> None:
    """Every page of KV is there, and what the ledger counts beside them is not less than what was written."""
    payload = wear_history.served["payload_bytes"]
    assert payload >= 60 * BLOCK
    by_class = wear_history.served["written_bytes"]
    assert sum(length for name, reasons in by_class.items() if name != "overhead" for length in reasons.values()) == payload
    assert by_class["lead"]["demotion"] > 0.8 * payload
    if wear_history.kernel_bytes is None:
        pytest.skip("this system does not say what a process has written")
    if wear_history.kernel_bytes < 4096:
        pytest.skip("the flash file's file system does not count writes (memory, network)")
    print(f"KV {payload}, ledger {wear_history.ledger_bytes} (whole pages), kernel {wear_history.kernel_bytes} bytes")
    assert payload <= wear_history.kernel_bytes
    # The server writes a little beside: caches, and the ledger's pages more often than the kernel dirties them.
    assert wear_history.kernel_bytes <= 1.1 * wear_history.ledger_bytes + (1 << 20)
    assert wear_history.ledger_bytes <= 1.25 * wear_history.kernel_bytes


def test_no_block_is_lost_from_the_count_by_kill_9(wear_history: History) -> None:
    """The restart finds in the flash file what was written after the last flush; what was in flight may count or not."""
    payload = wear_history.after_restart["payload_bytes"]
    records = wear_history.records_after_kill * BLOCK
    print(f"records {records}, flushed {wear_history.flushed_payload_bytes}, after the restart {payload} bytes of KV")
    assert records <= payload <= records + IO_THREADS * BLOCK
    assert wear_history.flushed_payload_bytes <= payload
    found = wear_history.after_restart["written_bytes"].get("unknown", {}).get("unrecorded", 0)
    assert payload - wear_history.flushed_payload_bytes == found
    assert wear_history.after_restart["wear_id"] == wear_history.served["wear_id"]
    assert wear_history.after_restart["cycles"]["max"] > 0
