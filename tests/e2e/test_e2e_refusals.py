# SPDX-License-Identifier: Apache-2.0
"""Options that cannot work end the start with one sentence that says what to change, where the user sees it."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e_ahead import ahead
from e2e_client import BLOCK_BYTES, tier_options
from e2e_flash_file import FlashFileKnife
from e2e_mounts import small_tmpfs
from e2e_refusal import TAIL_LINES, Refusal, early_refusals, refusal
from e2e_servers import Servers

from vllm_lifetime.flash import FlashDevice, FlashGeometry

MIB = 1 << 20

CASES: dict[str, tuple[str, ...]] = {
    "unknown key": ("unknown key 'host_byte'", "host_bytes"),
    "negative size": ("host_bytes = -1", "greater than or equal to 0"),
    "directory is missing": ("/none' does not exist", "Create it first"),
    "directory cannot be written": ("cannot be written by this user", "another path"),
    "flash larger than the disk": (f"flash_bytes = {1 << 50} does not fit", "Lower flash_bytes"),
    "flash larger than a small tmpfs": (f"flash_bytes = {16 * MIB} does not fit", "Lower flash_bytes"),
    "host larger than the memory": (f"host_bytes = {1 << 50} does not fit", "Lower host_bytes"),
    "flash file of another model": ("was written with another geometry", "model: stored 'some/other-model'", "Delete the file"),
}

FOUND_BY_THE_WORKER = {"flash file of another model"}
"""Only the worker knows what the KV cache looks like; vLLM prints the traces of three processes behind its reason."""


@dataclass(frozen=True)
class Refusals:
    """How each start ended, and what became of the files around it."""

    base: Path
    by_case: dict[str, Refusal | BaseException | None]
    """None: it went on. An exception: it did not end as it should."""
    is_tmpfs_empty: bool


@ahead(num_starts=1)
def refusals(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Refusals:
    """All starts, those that the worker refuses beside the others."""
    base = tmp_path_factory.mktemp("refusals")
    with ExitStack() as mounts:
        starts = {
            case: servers.make(servers.directory(), "float32", options)
            for case, options in _options(base, mounts).items()
        }
        late = {case: starts.pop(case) for case in FOUND_BY_THE_WORKER}
        by_case: dict[str, Refusal | BaseException | None] = {}
        with ThreadPoolExecutor(1 + len(late)) as threads:
            early = threads.submit(early_refusals, starts)
            for case, start in {case: threads.submit(refusal, server) for case, server in late.items()}.items():
                error = start.exception()
                by_case[case] = start.result() if error is None else error
            by_case |= early.result()
        return Refusals(base, by_case, not (base / "small" / "flash.kv").exists())


def _options(base: Path, mounts: ExitStack) -> dict[str, dict[str, Any]]:
    flash = base / "flash.kv"
    options: dict[str, dict[str, Any]] = {
        "unknown key": {"host_byte": MIB},
        "negative size": {"host_bytes": -1},
        "directory is missing": {"flash_path": str(base / "none" / "flash.kv"), "flash_bytes": MIB},
        "flash larger than the disk": {"flash_path": str(flash), "flash_bytes": 1 << 50},
        "host larger than the memory": {"host_bytes": 1 << 50},
        "flash file of another model": _file_of_another_model(base / "other.kv"),
    }
    if os.geteuid() == 0:
        try:
            full = mounts.enter_context(small_tmpfs(base / "small", 8))
            read_only = mounts.enter_context(small_tmpfs(base / "read-only", 8, is_read_only=True))
        except pytest.skip.Exception:
            return options
        options["flash larger than a small tmpfs"] = {"flash_path": str(full / "flash.kv"), "flash_bytes": 16 * MIB}
        options["directory cannot be written"] = {"flash_path": str(read_only / "flash.kv"), "flash_bytes": MIB}
    else:
        (base / "mine-not").mkdir(mode=0o500)
        options["directory cannot be written"] = {"flash_path": str(base / "mine-not" / "flash.kv"), "flash_bytes": MIB}
    return options


def _file_of_another_model(path: Path) -> dict[str, Any]:
    options = tier_options("float32", path, 0, 20, flash_persist=True)
    geometry = FlashGeometry(
        model="some/other-model",
        dtype="float32",
        block_size_tokens=32,
        num_layers=4,
        slot_bytes=BLOCK_BYTES["float32"],
        hash_algorithm="sha256",
        hash_seed="0",
    )
    FlashDevice.open(path, geometry, size_bytes=options["flash_bytes"], persist=True).close()
    return options


@pytest.mark.parametrize("case", CASES)
def test_start_goes_on_or_fails_in_riddles(refusals: Refusals, case: str) -> None:
    """The process ends by itself, not with 0, and all of the sentence stands in one line, at the end of its output."""
    if case not in refusals.by_case:
        pytest.skip("no such file system here")
    refused = refusals.by_case[case]
    assert refused is not None, "the start goes on"
    if isinstance(refused, BaseException):
        raise refused
    first, *others = CASES[case]
    print(f"{case}: {refused}")
    assert refused.exit_code != 0
    assert refused.says(first), refused
    line = next(line for line in reversed(refused.lines) if first in line)
    print(f"{refused.lines_after(first)} lines from the end: {line}")
    assert all(other in line for other in others), line
    assert case in FOUND_BY_THE_WORKER or refused.lines_after(first) < TAIL_LINES


def test_refusal_touches_a_file(refusals: Refusals) -> None:
    """What lay there before is as it was, and nothing new was created."""
    base = refusals.base
    assert FlashFileKnife(base / "other.kv").layout.geometry.model == "some/other-model"
    assert not (base / "flash.kv").exists()
    assert not (base / "none").exists()
    assert refusals.is_tmpfs_empty
