# SPDX-License-Identifier: Apache-2.0
"""The ledger's file: whole after a crash at any byte, and refused if it is damaged, forged or no ledger."""

import dataclasses
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.flash import FlashFormatError
from vllm_lifetime.flash.erase_blocks import EraseBlocks
from vllm_lifetime.flash.wear_counts import WearCounts
from vllm_lifetime.flash.wear_file import (
    HEADER_BYTES,
    WearHeader,
    WearSlots,
    pack_header,
    pack_slot,
    read_wear_file,
    replace_wear_file,
    write_at,
)

SIZE = 1 << 20
BLOCK = 1 << 16
HEADER = WearHeader("ab" * 16, "flash.kv", SIZE, BLOCK, 1000, 1.7e9)
SLOTS = WearSlots(HEADER.num_blocks)


def counts_of(num_writes: int) -> WearCounts:
    counts = WearCounts(EraseBlocks(SIZE, BLOCK))
    for number in range(num_writes):
        counts.note_payload(8192 * (number % 100), 8192, "lead", "move", 1.7e9 + number)
    counts.note_overhead(0, 64, "record")
    counts.settle()
    return counts


def facts(counts: WearCounts) -> tuple[object, ...]:
    return (
        counts.written,
        counts.sequence,
        counts.payload_bytes,
        counts.programmed_pages,
        counts.history.counts,
        counts.history.last,
        counts.blocks.summary(),
    )


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A ledger with flushes 6 (3 writes) and 7 (5 writes)."""
    name = str(tmp_path / "flash.kv.wear")
    descriptor = replace_wear_file(name, HEADER, pack_slot(counts_of(3), 6, HEADER.wear_id), 6)
    write_at(descriptor, pack_slot(counts_of(5), 7, HEADER.wear_id), SLOTS.offset(7))
    os.close(descriptor)
    return name


def test_what_is_written_is_read(path: str) -> None:
    header, counts, flush = read_wear_file(path)
    assert (header, flush) == (HEADER, 7)
    assert facts(counts) == facts(counts_of(5))


def test_a_crash_at_any_byte_leaves_the_flush_before_or_the_new_one(path: str) -> None:
    """Flush 8 overwrites flush 6, byte by byte; what is read is 7 until the last byte that matters, then 8."""
    slot = pack_slot(counts_of(9), 8, HEADER.wear_id)
    expected = {7: facts(counts_of(5)), 8: facts(counts_of(9))}
    found = []
    with open(path, "r+b", buffering=0) as file:
        for cut in range(len(slot.rstrip(b"\0")) + 2):  # behind that is padding, in both
            _, counts, flush = read_wear_file(path)
            assert facts(counts) == expected[flush]
            found.append(flush)
            write_at(file.fileno(), slot[cut : cut + 1], SLOTS.offset(8) + cut)
    assert found == sorted(found)
    assert found[0] == 7 and found[-1] == 8


def test_a_crash_while_it_is_replaced_leaves_the_old_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise OSError(5, "killed")

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(OSError, match="killed"):
        replace_wear_file(path, HEADER, pack_slot(counts_of(1), 8, HEADER.wear_id), 8)
    assert facts(read_wear_file(path)[1]) == facts(counts_of(5))
    assert os.listdir(os.path.dirname(path)) == ["flash.kv.wear"]


@settings(max_examples=150, deadline=None)
@given(position=st.integers(0, 1 << 30), mask=st.integers(1, 255))
def test_a_flipped_bit_is_refused_or_the_other_slot_is_read(
    tmp_path_factory: pytest.TempPathFactory, position: int, mask: int
) -> None:
    """Damage never changes a figure: it is the latest flush, the one before, or a refusal."""
    path = tmp_path_factory.mktemp("wear") / "flash.kv.wear"
    whole = (
        pack_header(HEADER)
        + pack_slot(counts_of(3), 6, HEADER.wear_id).ljust(SLOTS.slot_bytes, b"\0")
        + pack_slot(counts_of(5), 7, HEADER.wear_id).ljust(SLOTS.slot_bytes, b"\0")
    )
    raw = bytearray(whole)
    raw[position % len(raw)] ^= mask
    path.write_bytes(raw)
    try:
        header, counts, flush = read_wear_file(str(path))
    except FlashFormatError as error:
        assert "wear ledger" in str(error) and "Delete or move it" in str(error)
        assert position % len(raw) < HEADER_BYTES
        return
    assert header == HEADER
    assert facts(counts) == facts(counts_of({6: 3, 7: 5}[flush]))


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, HEADER_BYTES + 2 * SLOTS.slot_bytes))
def test_a_cut_file_is_refused_or_read_as_far_as_it_is_whole(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("wear") / "flash.kv.wear"
    slot = pack_slot(counts_of(5), 7, HEADER.wear_id)
    raw = pack_header(HEADER).ljust(SLOTS.offset(7), b"\0") + slot
    path.write_bytes(raw[:cut])
    try:
        _, counts, _ = read_wear_file(str(path))
    except FlashFormatError:
        return
    assert facts(counts) == facts(counts_of(5))


def test_both_slots_damaged(path: str) -> None:
    raw = bytearray(Path(path).read_bytes())
    for flush in (6, 7):
        raw[SLOTS.offset(flush) + 100] ^= 1
    Path(path).write_bytes(raw)
    with pytest.raises(FlashFormatError, match=r"neither of its two slots is whole\. Delete or move it"):
        read_wear_file(path)


def test_a_slot_of_another_ledger_does_not_pass(path: str) -> None:
    """Somebody pastes the counters of a fresh file into a worn one's ledger."""
    fresh = pack_slot(counts_of(0), 9, "cd" * 16)
    with open(path, "r+b", buffering=0) as file:
        write_at(file.fileno(), fresh, SLOTS.offset(9))
    assert read_wear_file(path)[2] == 6


@pytest.mark.parametrize(
    "raw,text",
    [
        (b"", "it is empty"),
        (b"hello world" * 500, "it was not written by vllm-lifetime"),
        (pack_header(HEADER)[:8] + struct.pack("<I", 9) + pack_header(HEADER)[12:], "it has version 9, and this build reads 1"),
        (pack_header(HEADER).replace(b'"endurance_cycles": 1000', b'"endurance_cycles": 9999'), "does not match its checksum"),
        (pack_header(HEADER), "neither of its two slots"),
    ],
)
def test_what_is_no_ledger_is_refused_in_a_sentence(tmp_path: Path, raw: bytes, text: str) -> None:
    path = tmp_path / "flash.kv.wear"
    path.write_bytes(raw)
    with pytest.raises(FlashFormatError, match=text) as told:
        read_wear_file(str(path))
    assert str(path) in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_does_not_hold_up_the_start(tmp_path: Path, make: Callable[[str], None]) -> None:
    path = str(tmp_path / "flash.kv.wear")
    make(path)
    with pytest.raises(FlashFormatError, match="is not a regular file"):
        read_wear_file(path)


@pytest.mark.parametrize(
    "changes", [{"erase_block_bytes": 0}, {"size_bytes": -1}, {"wear_id": "ab"}, {"size_bytes": 1 << 59, "erase_block_bytes": 1}]
)
def test_a_header_with_a_good_checksum_and_impossible_sizes_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """Forged: no size of it may lead to an allocation, a division by zero or an exception of another kind."""
    path = tmp_path / "flash.kv.wear"
    header = dataclasses.replace(HEADER, **changes)  # type: ignore[arg-type]
    path.write_bytes(pack_header(header) + bytes(8192))
    with pytest.raises(FlashFormatError, match="its header is damaged"):
        read_wear_file(str(path))


def test_a_slot_with_a_good_checksum_and_impossible_counts_is_not_read(path: str) -> None:
    """Forged, in a way that an integer would overflow while serving."""
    for flush in (6, 7):
        counts = counts_of(1)
        counts.blocks.pages_programmed[0] = (1 << 64) - 1
        with open(path, "r+b", buffering=0) as file:
            write_at(file.fileno(), pack_slot(counts, flush, HEADER.wear_id), SLOTS.offset(flush))
    with pytest.raises(FlashFormatError, match="neither"):
        read_wear_file(path)
