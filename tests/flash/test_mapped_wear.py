# SPDX-License-Identifier: Apache-2.0
"""The wear ledger of flash in place: against a model that keeps every write, over restarts, kills and foreign ledgers."""

import errno
import fcntl
import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wear_testing import counts_in, payload

from vllm_lifetime.flash import FlashError, FlashFormatError, FlashGeometry, WearOptions, wear
from vllm_lifetime.flash.erase_blocks import EraseBlocks
from vllm_lifetime.flash.layout import FlashLayout
from vllm_lifetime.flash.mapped import MappedFlash, Span, mapped_file_bytes
from vllm_lifetime.flash.mapped_wear import MappedWear
from vllm_lifetime.flash.wear import WearLedger
from vllm_lifetime.flash.wear_figures import wear_figures

PAGE = 4096
BLOCK_TOKENS = 4
NUM_BLOCKS = 6
PARTS = (2 * PAGE, PAGE)
"""Bytes of a block in each of two layers."""

GEOMETRY = FlashGeometry(
    model="m",
    dtype="float32",
    block_size_tokens=BLOCK_TOKENS,
    num_layers=len(PARTS),
    slot_bytes=sum(PARTS),
    hash_algorithm="none",
    hash_seed="none",
)
OPTIONS = WearOptions(erase_block_bytes=4 * PAGE)
TOKEN_BYTES = sum(PARTS) // BLOCK_TOKENS
SIZE = mapped_file_bytes(GEOMETRY, NUM_BLOCKS)
PAYLOAD = FlashLayout.plan(GEOMETRY, SIZE).payload_offset
SPANS = (Span(0, NUM_BLOCKS * PARTS[0]), Span((NUM_BLOCKS + 1) * PARTS[0], NUM_BLOCKS * PARTS[1]))


def open_mapped(path: Path, options: WearOptions = OPTIONS) -> tuple[MappedFlash, MappedWear]:
    """Memory whose ledger has no thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WearLedger, "start", lambda ledger, source: setattr(ledger, "_source", source))
        mapped = MappedFlash(
            str(path), GEOMETRY, size_bytes=SIZE, total_bytes=SPANS[1].start + SPANS[1].length, spans=SPANS, wear=options
        )
    assert mapped.wear is not None
    return mapped, mapped.wear


def write(of: MappedWear, *tokens: int) -> None:
    of.note(np.array(tokens, np.int64))


def written(path: Path) -> dict[tuple[str, str], int]:
    return payload(counts_in(path))


def abandon(mapped: MappedFlash) -> None:
    """What kill -9 leaves: the file, without a lock, and the ledger as it was last flushed."""
    assert mapped._descriptor is not None and mapped.wear is not None
    fcntl.flock(mapped._descriptor, fcntl.LOCK_UN)
    os.close(mapped._descriptor)
    mapped._descriptor = None


step = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, BLOCK_TOKENS - 1), st.integers(1, BLOCK_TOKENS)), max_size=4
)


@settings(max_examples=25, deadline=None)
@given(steps=st.lists(st.tuples(step, st.sampled_from(["lead", "worker"]), st.integers(0, NUM_BLOCKS - 1)), max_size=12))
def test_every_byte_and_page_is_that_of_a_model(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[list[tuple[int, int, int]], str, int]]
) -> None:
    """Bytes by class; a block's pages once it is full; and with no buffer, each step's once."""
    path = tmp_path_factory.mktemp("wear") / "flash.kv"
    mapped, of = open_mapped(path)
    # One that programs each write at once, and one that programs what is full.
    unbuffered, buffered = (EraseBlocks(SIZE, OPTIONS.erase_block_bytes) for _ in range(2))
    classes, by_class = ["unknown"] * NUM_BLOCKS, Counter[str]()
    for extents, segment_class, block in steps:
        of.name_blocks(np.array([block]), segment_class)
        classes[block] = segment_class
        tokens: list[int] = []
        for written_block, first, count in {extent[0]: extent for extent in extents}.values():
            end = min(first + count, BLOCK_TOKENS)
            tokens += range(written_block * BLOCK_TOKENS + first, written_block * BLOCK_TOKENS + end)
            by_class[classes[written_block]] += end - first
        write(of, *tokens)
        for written_block in sorted({token // BLOCK_TOKENS for token in tokens}):
            is_full = (written_block + 1) * BLOCK_TOKENS - 1 in tokens
            for start, length in ((PAYLOAD, PARTS[0]), (PAYLOAD + NUM_BLOCKS * PARTS[0], PARTS[1])):
                unbuffered.program(start + written_block * length, length)
                if is_full:
                    buffered.program(start + written_block * length, length)
        of.ledger._look(0.0)
    # Beside KV: the header, whose pages lie before the payload.
    counts = of.ledger._counts
    assert payload(counts) == {(name, "in_place"): number * TOKEN_BYTES for name, number in by_class.items()}
    assert counts.payload_bytes == sum(by_class.values()) * TOKEN_BYTES
    assert list(counts.blocks.pages_programmed)[1:] == list(buffered.pages_programmed)[1:]
    assert list(counts.blocks.erases)[1:] == list(unbuffered.erases)[1:]
    ledger_pages = counts.written.get(("overhead", "ledger"), [0, 0])[1] // PAGE
    assert counts.programmed_pages == sum(counts.blocks.pages_programmed) + ledger_pages
    mapped.close()


def test_decode_programs_a_page_once_it_is_full_and_without_a_buffer_each_time(path: Path) -> None:
    mapped, of = open_mapped(path, WearOptions(erase_block_bytes=PAGE))
    pages = of.ledger._counts.blocks.pages_programmed
    first = PAYLOAD // PAGE
    for token in range(BLOCK_TOKENS):
        assert not sum(pages[first:]), f"{token} tokens of {BLOCK_TOKENS}"
        write(of, token)
        of.ledger.refresh()
    assert list(pages[first:]) == [1, 1] + [0] * 10 + [1] + [0] * 5
    assert list(of.ledger._counts.blocks.erases)[first:] == [3, 3] + [0] * 10 + [3] + [0] * 5
    assert of.ledger._counts.blocks.moved_pages == 3 * 3
    figures = wear_figures(of.ledger.refresh(), time.time())
    assert figures["payload_bytes"] == sum(PARTS)
    assert figures["in_place_write_amplification"] - figures["write_amplification"] == pytest.approx(3)
    mapped.close()


def test_block_that_is_given_up_before_it_is_full_is_never_programmed(path: Path) -> None:
    """Its bytes were written all the same."""
    mapped, of = open_mapped(path)
    write(of, 0, 1, 2)
    of.ledger.refresh()
    write(of, 0, 1)
    of.ledger.refresh()
    assert not sum(of.ledger._counts.blocks.pages_programmed)
    assert of.ledger.snapshot.payload_bytes == 5 * TOKEN_BYTES
    mapped.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flash.kv"


def test_step_after_the_end_is_not_counted(path: Path) -> None:
    """And does no harm."""
    mapped, of = open_mapped(path)
    write(of, 0)
    mapped.close()
    write(of, 1)
    assert written(path) == {("unknown", "in_place"): TOKEN_BYTES}


def test_two_lives_add_up(path: Path) -> None:
    for name in ("lead", "worker"):
        mapped, of = open_mapped(path)
        of.name_blocks(np.array([0, 1]), name)
        write(of, *range(8))
        mapped.close()
        assert not path.exists()
    assert written(path) == {("lead", "in_place"): 8 * TOKEN_BYTES, ("worker", "in_place"): 8 * TOKEN_BYTES}


def test_kill_9_loses_no_byte(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed between two flushes: the file says how many bytes, though not whose."""
    monkeypatch.setattr(wear, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(wear, "FLUSH_BYTES_PER_S", 10**9)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        total = SPANS[1].start + SPANS[1].length
        mapped = MappedFlash(str(path), GEOMETRY, size_bytes=SIZE, total_bytes=total, spans=SPANS, wear=OPTIONS)
        assert mapped.wear is not None
        write(mapped.wear, *range(8))
        while not Path(f"{path}.wear").exists() or not written(path):
            time.sleep(0.01)
        mapped.wear.ledger._may_write = False
        write(mapped.wear, 8, 9, 10)
        os.write(writing, b"x")
        time.sleep(60)
    os.read(reading, 1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert written(path) == {("unknown", "in_place"): 8 * TOKEN_BYTES}
    mapped, of = open_mapped(path)
    write(of, 0)
    mapped.close()
    assert written(path) == {("unknown", "in_place"): 9 * TOKEN_BYTES, ("unknown", "unrecorded"): 3 * TOKEN_BYTES}
    mapped, of = open_mapped(path)
    assert of.ledger.snapshot.payload_bytes == 12 * TOKEN_BYTES, "found twice"
    mapped.close()


def test_bytes_of_a_deleted_ledger_are_not_found(path: Path) -> None:
    """Counting begins at zero, also at the start after that."""
    mapped, of = open_mapped(path)
    write(of, *range(8))
    of.ledger._look(float("inf"))
    abandon(mapped)
    os.unlink(f"{path}.wear")
    for expected in (0, 0):
        mapped, of = open_mapped(path)
        assert of.ledger.snapshot.payload_bytes == expected
        of.ledger._look(float("inf"))
        abandon(mapped)


def test_damaged_sum_of_bytes_is_not_believed(path: Path) -> None:
    mapped, of = open_mapped(path)
    write(of, *range(8))
    of.ledger._look(float("inf"))
    abandon(mapped)
    with path.open("r+b") as file:
        file.seek(of._total_offset)
        file.write(b"\xff" * 7)
    mapped, of = open_mapped(path)
    assert of.ledger.snapshot.payload_bytes == 8 * TOKEN_BYTES
    mapped.close()


def test_another_files_ledger_is_refused(path: Path, tmp_path: Path) -> None:
    """Whether there is a flash file or not; and one that there is keeps its id, so that it is refused again."""
    other = tmp_path / "other.kv"
    for each in (path, other):
        mapped, _ = open_mapped(each)
        abandon(mapped) if each == path else mapped.close()
    shutil.copy(f"{other}.wear", f"{path}.wear")
    for _ in range(2):
        with pytest.raises(FlashFormatError, match=r"belongs to another flash file: it has the id [0-9a-f]{32}, and this"):
            open_mapped(path)
    os.unlink(path)
    with pytest.raises(FlashFormatError, match=r"kept for a file of the name 'other\.kv'"):
        open_mapped(path)
    assert not path.exists(), "a start that is refused leaves nothing"


def test_forged_ledger_is_refused(path: Path) -> None:
    Path(f"{path}.wear").write_bytes(b"no ledger")
    with pytest.raises(FlashFormatError, match=r"not written by vllm-lifetime\. Delete or move it"):
        open_mapped(path)
    assert not path.exists()


def test_bytes_of_a_killed_server_are_lost_by_a_start_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full when the payload is reserved: the flash file goes, and its ledger has to have been written before."""
    mapped, of = open_mapped(path)
    write(of, *range(8))
    of.ledger._look(float("inf"))
    write(of, 8, 9)
    abandon(mapped)
    reserve = os.posix_fallocate
    calls = Counter[str]()

    def fill_up(descriptor: int, offset: int, length: int) -> None:
        calls["reserve"] += 1
        if calls["reserve"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    with pytest.raises(FlashError, match="cannot be mapped: No space left on device"):
        open_mapped(path)
    assert not path.exists()
    assert sum(written(path).values()) == 10 * TOKEN_BYTES


def test_an_error_in_counting_ends_the_count_for_good(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped, of = open_mapped(path)
    write(of, 0)
    with monkeypatch.context() as patch:
        patch.setattr(of, "_extents", lambda *_: 1 // 0)
        of.ledger.refresh()
    write(of, 1)
    snapshot = of.ledger.refresh()
    assert snapshot.payload_bytes == TOKEN_BYTES
    of.ledger._look(float("inf"))
    assert of.ledger.snapshot.errors == {"ZeroDivisionError": 1}
    mapped.close()
