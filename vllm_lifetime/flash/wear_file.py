# SPDX-License-Identifier: Apache-2.0
"""The ledger's file, `PATH.wear`: its bytes, reading, and replacing it. No thread, no lock.

All integers little endian::

    0       header  magic, version, JSON length, checksum, JSON: whose ledger it is, and sizes
    4096    slot A  checksum, number of the flush, lengths, JSON with counters, history, erase blocks
    ...     slot B  likewise

Flushes go to A and B in turn. Whatever part of a slot has been written when the process dies, the other slot is whole, so what is
read is the latest flush that was complete. The file is replaced as a whole (write, rename) at each start, so a header is never
torn.
"""

import contextlib
import json
import os
import stat
import struct
import sys
from array import array
from dataclasses import asdict, dataclass
from typing import Any

from xxhash import xxh3_64_intdigest

from vllm_lifetime.flash.erase_blocks import NAND_PAGE_BYTES, EraseBlocks
from vllm_lifetime.flash.errors import FlashFormatError
from vllm_lifetime.flash.wear_counts import MAX_REASONS, WearCounts
from vllm_lifetime.flash.write_history import NUM_INTERVALS, WriteHistory

__all__ = ["WEAR_SUFFIX", "WearHeader", "WearSlots", "pack_slot", "read_wear_file", "replace_wear_file", "write_at"]

WEAR_SUFFIX = ".wear"
"""Appended to the flash file's name."""

MAGIC = b"VLLMLTWR"
VERSION = 1
HEADER_BYTES = 4096
MAX_JSON_BYTES = 16384
MAX_FILE_BYTES = 1 << 30
LARGEST_COUNT = 1 << 60
"""Larger counters are no counters: a writer of 1 TB/s needs ten days for so many bytes, and 30 years for so many pages."""

_HEADER = struct.Struct("<8sIIQ")
_SLOT = struct.Struct("<QQIII")
_NEW_HINT = "Delete or move it to count this file's wear from zero."


@dataclass(frozen=True, slots=True)
class WearHeader:
    """Whose ledger it is.

    Attributes:
        wear_id: 32 hex digits, the same in the flash file.
        flash_name: name of the flash file, without its directory.
        size_bytes: of the flash file.
        erase_block_bytes: see `EraseBlocks`.
        endurance_cycles: program/erase cycles that a cell is taken to tolerate.
        created_at_s: when counting began, in Unix seconds.
    """

    wear_id: str
    flash_name: str
    size_bytes: int
    erase_block_bytes: int
    endurance_cycles: int
    created_at_s: float

    @property
    def num_blocks(self) -> int:
        """Erase blocks."""
        return -(-self.size_bytes // self.erase_block_bytes)


@dataclass(frozen=True, slots=True)
class WearSlots:
    """Where the two slots of a ledger with so many erase blocks lie, in bytes."""

    num_blocks: int

    @property
    def slot_bytes(self) -> int:
        """Of one slot, in whole pages."""
        length = _SLOT.size + MAX_JSON_BYTES + 8 * NUM_INTERVALS + 16 * self.num_blocks
        return -(-length // NAND_PAGE_BYTES) * NAND_PAGE_BYTES

    def offset(self, flush: int) -> int:
        """Where flush number `flush` goes."""
        return HEADER_BYTES + (flush % 2) * self.slot_bytes


def pack_header(header: WearHeader) -> bytes:
    """The header's bytes."""
    text = json.dumps(asdict(header), sort_keys=True).encode()
    prefix = MAGIC + struct.pack("<II", VERSION, len(text))
    checksum = struct.pack("<Q", xxh3_64_intdigest(prefix + text))
    return (prefix + checksum + text).ljust(HEADER_BYTES, b"\0")


def pack_slot(counts: WearCounts, flush: int, wear_id: str) -> bytes:
    """One slot's bytes, in whole pages. Its checksum is seeded with the ledger's id, so no other ledger's slot passes."""
    text = json.dumps(
        {
            "written": [[*key, *entry] for key, entry in counts.written.items()],
            "sequence": counts.sequence,
            "payload_bytes": counts.payload_bytes,
            "programmed_pages": counts.programmed_pages,
            "moved_pages": counts.blocks.moved_pages,
            "history_last": counts.history.last,
        }
    ).encode()
    if len(text) > MAX_JSON_BYTES:
        raise OSError(None, "the ledger's counters do not fit")
    history = counts.history.counts
    blocks = counts.blocks
    body = b"".join(
        (
            struct.pack("<QIII", flush, len(text), len(history), blocks.num_blocks),
            text,
            _to_bytes(array("Q", history)),
            _to_bytes(blocks.pages_programmed),
            _to_bytes(blocks.erases),
        )
    )
    slot = struct.pack("<Q", xxh3_64_intdigest(body, _seed(wear_id))) + body
    return slot.ljust(-(-len(slot) // NAND_PAGE_BYTES) * NAND_PAGE_BYTES, b"\0")


def read_wear_file(path: str) -> tuple[WearHeader, WearCounts, int]:
    """The ledger at `path`: whose it is, its counters, and the number of the flush that they are from.

    Safe while a server writes the file: what is read is a flush that was complete.

    Raises:
        FlashFormatError: it is no ledger, of another version, or damaged; one sentence, with what to do.
        OSError: it cannot be read.
    """
    # Without waiting: a named pipe would hold up the start for ever.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise FlashFormatError(f"The wear ledger {path} is not a regular file. {_NEW_HINT}")
        if status.st_size > MAX_FILE_BYTES:
            raise FlashFormatError(f"The wear ledger {path} is too large to be one. {_NEW_HINT}")
        raw = file.read(MAX_FILE_BYTES)
    try:
        header = _unpack_header(raw)
        slots = WearSlots(header.num_blocks)
        found = [_unpack_slot(raw[slots.offset(i) : slots.offset(i) + slots.slot_bytes], header) for i in (0, 1)]
    except FlashFormatError as error:
        raise FlashFormatError(f"The wear ledger {path} cannot be used: {error}. {_NEW_HINT}") from None
    whole = [slot for slot in found if slot is not None]
    if not whole:
        raise FlashFormatError(f"The wear ledger {path} cannot be used: neither of its two slots is whole. {_NEW_HINT}")
    flush, counts = max(whole, key=lambda slot: slot[0])
    return header, counts, flush


def replace_wear_file(path: str, header: WearHeader, slot: bytes, flush: int) -> int:
    """Write a ledger with one flush beside `path` and put it in its place. Returns the file's descriptor, for writing.

    Raises:
        OSError: it could not be written; what was at `path` is still there.
    """
    slots = WearSlots(header.num_blocks)
    temporary = f"{path}.new"
    file_descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        write_at(file_descriptor, pack_header(header), 0)
        write_at(file_descriptor, slot, slots.offset(flush))
        os.ftruncate(file_descriptor, HEADER_BYTES + 2 * slots.slot_bytes)
        # The data before the name: after a power loss there is the old ledger or the new one, never an empty one.
        os.fdatasync(file_descriptor)
        os.replace(temporary, path)
    except BaseException:
        os.close(file_descriptor)
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return file_descriptor


def write_at(file_descriptor: int, data: bytes, offset: int) -> None:
    """Write all of `data`.

    Raises:
        OSError: it could not be written.
    """
    done = 0
    while done < len(data):
        count = os.pwrite(file_descriptor, memoryview(data)[done:], offset + done)
        if count == 0:
            raise OSError(None, "short write")
        done += count


def _unpack_header(raw: bytes) -> WearHeader:
    if len(raw) < _HEADER.size or not raw.startswith(MAGIC):
        raise FlashFormatError("it was not written by vllm-lifetime" if raw else "it is empty")
    _, version, length, checksum = _HEADER.unpack_from(raw)
    if version != VERSION:
        raise FlashFormatError(f"it has version {version}, and this build reads {VERSION}")
    text = raw[_HEADER.size : _HEADER.size + length]
    if checksum != xxh3_64_intdigest(raw[: _HEADER.size - 8] + text):
        raise FlashFormatError("its header does not match its checksum")
    try:
        fields = json.loads(text)
        header = WearHeader(
            wear_id=bytes.fromhex(fields["wear_id"]).hex(),
            flash_name=str(fields["flash_name"]),
            size_bytes=_count_of(fields["size_bytes"]),
            erase_block_bytes=_count_of(fields["erase_block_bytes"]),
            endurance_cycles=_count_of(fields["endurance_cycles"]),
            created_at_s=float(fields["created_at_s"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise FlashFormatError(f"its header is damaged ({error})") from None
    if min(header.size_bytes, header.erase_block_bytes, header.endurance_cycles) < 1 or len(header.wear_id) != 32:
        raise FlashFormatError("its header is damaged")
    if header.num_blocks > MAX_FILE_BYTES // 32:
        raise FlashFormatError("its header is damaged")
    return header


def _unpack_slot(raw: bytes, header: WearHeader) -> tuple[int, WearCounts] | None:
    """The flush in a slot; None if it is torn, was never written, or says what cannot be."""
    if len(raw) < _SLOT.size:
        return None
    checksum, flush, text_bytes, num_intervals, num_blocks = _SLOT.unpack_from(raw)
    if num_intervals > NUM_INTERVALS or num_blocks != header.num_blocks:
        return None
    end = _SLOT.size + text_bytes
    length = end + 8 * num_intervals + 16 * num_blocks
    if length > len(raw) or checksum != xxh3_64_intdigest(raw[8:length], _seed(header.wear_id)):
        return None
    arrays = _from_bytes(raw[end:length])
    if any(value > LARGEST_COUNT for value in arrays):
        return None
    pages_from, erases_from = num_intervals, num_intervals + num_blocks
    try:
        fields: dict[str, Any] = json.loads(raw[_SLOT.size : end])
        blocks = EraseBlocks(
            header.size_bytes,
            header.erase_block_bytes,
            arrays[pages_from:erases_from],
            arrays[erases_from:],
            _count_of(fields["moved_pages"]),
        )
        counts = WearCounts(blocks)
        counts.written = {
            (str(segment_class), str(reason)): [_count_of(writes), _count_of(length)]
            for segment_class, reason, writes, length in fields["written"][: MAX_REASONS + 1]
        }
        counts.sequence = _count_of(fields["sequence"])
        counts.payload_bytes = _count_of(fields["payload_bytes"])
        counts.programmed_pages = _count_of(fields["programmed_pages"])
        counts.history = WriteHistory(_count_of(fields["history_last"]), arrays[:pages_from])
    except (KeyError, TypeError, ValueError):
        return None
    return flush, counts


def _count_of(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_COUNT:
        raise ValueError(f"{value!r} is no count")
    return value


def _seed(wear_id: str) -> int:
    return xxh3_64_intdigest(wear_id.encode())


def _to_bytes(counts: "array[int]") -> bytes:
    if sys.byteorder == "big":
        counts = counts[:]
        counts.byteswap()
    return counts.tobytes()


def _from_bytes(raw: bytes) -> "array[int]":
    counts = array("Q")
    counts.frombytes(raw)
    if sys.byteorder == "big":
        counts.byteswap()
    return counts
