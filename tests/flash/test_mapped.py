# SPDX-License-Identifier: Apache-2.0
"""Memory whose spans lie in a flash file."""

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_lifetime.flash import FlashError, FlashFormatError, FlashGeometry, FlashSpaceError, FlashUnavailableError
from vllm_lifetime.flash.mapped import MappedFlash, Span, mapped_file_bytes, mapped_slots

PAGE = mmap.PAGESIZE
GEOMETRY = FlashGeometry(
    model="m", dtype="float32", block_size_tokens=16, num_layers=2, slot_bytes=2 * PAGE, hash_algorithm="none", hash_seed="none"
)
TOTAL = 10 * PAGE + 100
"""Two layers of five pages each, and a rest that is not a page."""

SPANS = (Span(3 * PAGE, 2 * PAGE), Span(8 * PAGE, 2 * PAGE))
"""Of each layer the last two."""

SIZE = mapped_file_bytes(GEOMETRY, 2)
PAYLOAD = SIZE - 4 * PAGE


def open_mapped(path: Path, **changes: Any) -> MappedFlash:
    return MappedFlash(str(path), GEOMETRY, **{"size_bytes": SIZE, "total_bytes": TOTAL, "spans": SPANS, **changes})


def memory_of(mapped: MappedFlash) -> memoryview:
    return memoryview(mapped.buffer()).cast("B")


@pytest.mark.parametrize("num_slots", [1, 2, 63, 64, 65, 1000])
def test_size_holds_exactly_so_many_blocks(num_slots: int) -> None:
    size_bytes = mapped_file_bytes(GEOMETRY, num_slots)
    assert mapped_slots(GEOMETRY, size_bytes) == num_slots
    if num_slots > 1:
        assert mapped_slots(GEOMETRY, size_bytes - 1) == num_slots - 1


def test_spans_lie_in_the_file_and_nothing_else_does(tmp_path: Path) -> None:
    """Each page of memory gets its own number; those of the spans stand in the file, one span after the other."""
    path = tmp_path / "flash.kv"
    mapped = open_mapped(path)
    memory = memory_of(mapped)
    assert len(memory) == TOTAL and not any(memory)
    for page in range(10):
        memory[page * PAGE] = page + 1
    memory[TOTAL - 1] = 99
    payload = path.read_bytes()[PAYLOAD:]
    assert [payload[page * PAGE] for page in range(4)] == [4, 5, 9, 10]
    assert sum(byte != 0 for byte in payload) == 4
    with path.open("r+b") as file:
        file.seek(PAYLOAD)
        file.write(b"\x2a")
    assert memory[3 * PAGE] == 42
    mapped.close()
    mapped.close()
    assert not path.exists()
    assert (memory[3 * PAGE], memory[0]) == (42, 1)


def test_reserved_to_the_last_byte(tmp_path: Path) -> None:
    """A store to a page for which the disk has no room would kill the process."""
    path = tmp_path / "flash.kv"
    mapped = open_mapped(path)
    status = path.stat()
    assert status.st_size == SIZE and status.st_blocks * 512 >= SIZE
    mapped.close()


def test_kv_of_an_earlier_server_is_read(tmp_path: Path) -> None:
    """A file that a killed server left is ours, and holds nothing any more."""
    path = tmp_path / "flash.kv"
    child = os.fork()
    if child == 0:
        memory_of(open_mapped(path))[3 * PAGE] = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.read_bytes()[PAYLOAD] == 7
    mapped = open_mapped(path)
    assert not any(memory_of(mapped))
    mapped.close()


def test_file_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "flash.kv"
    path.write_bytes(b"mine" * 10000)
    with pytest.raises(FlashFormatError, match="left untouched"):
        open_mapped(path)
    assert path.read_bytes() == b"mine" * 10000


def test_two_servers_with_one_file(tmp_path: Path) -> None:
    mapped = open_mapped(tmp_path / "flash.kv")
    with pytest.raises(FlashUnavailableError, match="in use by another process"):
        open_mapped(tmp_path / "flash.kv")
    mapped.close()


def test_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(FlashSpaceError, match="Ask for a smaller flash"):
        open_mapped(tmp_path / "flash.kv")
    assert not (tmp_path / "flash.kv").exists()


def test_mapping_fails(tmp_path: Path) -> None:
    """More addresses than there are."""
    with pytest.raises(FlashError, match="cannot be mapped: Cannot allocate memory"):
        open_mapped(tmp_path / "flash.kv", total_bytes=1 << 60)
    assert not (tmp_path / "flash.kv").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"spans": [Span(100, PAGE)]},
        {"spans": [Span(0, 100)]},
        {"spans": [Span(PAGE, PAGE), Span(0, PAGE)]},
        {"spans": [Span(10 * PAGE, PAGE)]},
        {"spans": [Span(0, 5 * PAGE)]},
    ],
)
def test_spans_that_cannot_be(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"[Ss]pan"):
        open_mapped(tmp_path / "flash.kv", **changes)
    assert not (tmp_path / "flash.kv").exists()
