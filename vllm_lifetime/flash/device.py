# SPDX-License-Identifier: Apache-2.0
"""The emulated flash device: slots of one file, each holding one KV block under its key.

Runs in the worker process. `read` and `write` are called by several IO threads at once; slots are
handed out by the scheduler side, which never has two transfers of one slot in flight. If it did,
the worst outcome would be a miss.

**Wrong data is impossible short of a checksum collision.** A record in memory says which key a
slot holds and what its payload's checksum is. That checksum is seeded by the key, so neither a torn
payload, nor a flipped bit, nor another slot's payload passes. A record in the file is signed
together with its slot and the epoch, so neither a torn nor a moved nor a forgotten record passes.
A write puts the payload first and its record second. While a slot is overwritten, its old record is
still in the file beside a payload that is half new: that record is recovered after a crash, but
the payload does not match it, so a read of it misses.

**The file, not a mapping.** Transfers are positioned reads and writes. A touched page of a mapping
raises SIGBUS when the disk is full or the file was cut; a system call returns an error.

**Not synchronised.** Writes go to the page cache and are not flushed, since a lost block costs a
recomputation only. A killed process loses nothing; a power loss loses what was not written back.
"""

import enum
import logging
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_lifetime.flash.counters import FlashCounters
from vllm_lifetime.flash.faults import FlashFaults
from vllm_lifetime.flash.layout import (
    EPOCH_BYTES,
    MAX_KEY_BYTES,
    RECORD_BYTES,
    FlashGeometry,
    pack_record,
    payload_checksum_of,
)
from vllm_lifetime.flash.ledger_of_file import open_ledger
from vllm_lifetime.flash.records import keys_of, withdraw_records
from vllm_lifetime.flash.storage import (
    FlashFile,
    new_epoch,
    open_flash_file,
    remove_file,
    write_epoch,
)
from vllm_lifetime.flash.transfer import length_of, read_payload, write_fully, write_payload
from vllm_lifetime.flash.wear import WearLedger, WearOptions
from vllm_lifetime.flash.wear_counts import UNKNOWN_CLASS, WriteReason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = ["FlashDevice", "ReadOutcome"]

logger = logging.getLogger("vllm_lifetime.flash")

_CLOSE_TIMEOUT_SECONDS = 30.0
_NO_RECORD = bytes(RECORD_BYTES)


class ReadOutcome(enum.Enum):
    """What became of a read. After anything but HIT the pages hold unspecified bytes."""

    HIT = "hit"
    """The pages hold the key's payload."""
    KEY_MISMATCH = "key_mismatch"
    """The slot holds no record, or another key's."""
    CHECKSUM_MISMATCH = "checksum_mismatch"
    """The payload is damaged or torn. The slot's record has been withdrawn."""
    SHORT_READ = "short_read"
    """The file ends inside the slot: it was cut from outside."""
    IO_ERROR = "io_error"
    """The read failed; `FlashCounters.read_errors` has the errno."""
    CLOSED = "closed"
    """The device is closed."""

    @property
    def hit(self) -> bool:
        """Whether the pages hold the key's payload."""
        return self is ReadOutcome.HIT


class FlashDevice:
    """Slots of one file. Make one with `open`; every method may be called on any thread.

    Attributes:
        path: the file.
        geometry: what a slot's bytes mean.
        num_slots: slots of the device; they are numbered from 0.
        slot_bytes: payload bytes of each.
        counters: what happened since the device was opened.
        wear: what has been written in the file's life; None if nobody wants to know.
    """

    def __init__(self, path: str, file: FlashFile, wear: WearLedger | None, *, persist: bool) -> None:
        """Takes over an open file. Use `open` instead."""
        self.path = path
        self.wear = wear
        self.geometry = file.layout.geometry
        self.num_slots = file.layout.num_slots
        self.slot_bytes = self.geometry.slot_bytes
        self.counters = FlashCounters()
        self._faults = FlashFaults(path, self.counters)
        self._layout = file.layout
        self._file_descriptor = file.file_descriptor
        self._persist = persist
        self._epoch = file.epoch
        # Guards the records, the epoch and what follows. Held for moments, never during IO.
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_flight = 0
        self._closed = False
        # Two clears must reach the file in the order in which they took effect in memory.
        self._clear_lock = threading.Lock()
        self._table, self._recovered_slots = file.table, file.recovered_slots
        # Scalar access through a memoryview is several times faster than through the array.
        self._records = self._table.view(np.uint8).data

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        geometry: FlashGeometry,
        *,
        size_bytes: int,
        persist: bool,
        wear: WearOptions | None = None,
    ) -> "FlashDevice":
        """Opens the file at ``path``, or creates it with mode 0600; locks it and reserves its blocks.

        Args:
            path: a file on the flash drive; its directory must exist. One per worker.
            geometry: what a slot's bytes mean.
            size_bytes: bytes of the whole file, header and record table included.
            persist: keep the blocks of an existing file of equal geometry and size, and keep the
                file at close. Otherwise the device starts empty and the file is removed at close.
            wear: keep a ledger of what is written, in a file beside this one. None: no ledger.

        Raises:
            FlashError: the file cannot be used; the text says why and what to change. A file that
                is not a flash file is never touched.

        O(slots) to recover records, else O(1) but for the reservation. Blocks.
        """
        name = os.fspath(path)
        file = open_flash_file(name, geometry, size_bytes=size_bytes, persist=persist)
        try:
            ledger = None if wear is None else open_ledger(name, file, wear)
            if ledger is not None:
                ledger.start()
        except BaseException:
            if file.is_created:
                remove_file(name, file.file_descriptor)
            os.close(file.file_descriptor)
            raise
        return cls(name, file, ledger, persist=persist)

    def recovered(self) -> list[tuple[int, bytes]]:
        """The ``(slot, key)`` that were valid when a persisted file was opened and still are.

        Their payloads are verified when they are read, not here. Two slots may hold one key. Ask
        before the first write: a slot that has been rewritten since is listed with its new key.
        Empty for a new file and without ``persist``. O(records).
        """
        with self._lock:
            return keys_of(self._table, self._recovered_slots)

    def write(
        self,
        slot: int,
        key: bytes,
        pages: Sequence["ReadableBuffer"],
        segment_class: str = UNKNOWN_CLASS,
        reason: str = WriteReason.DEMOTION,
    ) -> bool:
        """Stores ``pages``, one after the other, in ``slot`` under ``key``.

        The slot's old record is withdrawn first, in memory; it stays in the file until the new one
        replaces it, which is safe because the new payload does not match it.

        Args:
            slot: 0 to ``num_slots`` - 1.
            key: 1 to 36 bytes.
            pages: contiguous buffers of ``slot_bytes`` bytes in all, not changed meanwhile.
            segment_class: whose block it is, for the wear ledger.
            reason: why it is written, likewise.

        Returns:
            Whether the slot now holds the key. If not, the slot holds no record; the reason is
            counted and logged once per kind. Also False if `clear` ran meanwhile or the device is
            closed.

        Raises:
            ValueError: an argument is out of range. IO faults are never raised.

        O(bytes). Blocks; releases the GIL while it copies and, above 64 KiB a page, hashes.
        """
        self._check(slot, key, pages)
        place = _record_range(slot)
        with self._lock:
            if self._closed:
                return False
            self._in_flight += 1
            epoch = self._epoch
            self._records[place] = _NO_RECORD
        try:
            checksum = write_payload(self._file_descriptor, self._payload_at(slot), pages, self.slot_bytes, key)
            # Counted between the two, so that a record in the file has a number that the ledger had given.
            number = self._count_payload(slot, segment_class, reason)
            record = pack_record(slot, key, checksum, epoch, number)
            write_fully(self._file_descriptor, [record], self._layout.table_offset + place.start, RECORD_BYTES)
            self._count_overhead(self._layout.table_offset + place.start, RECORD_BYTES, WriteReason.RECORD)
            with self._lock:
                if epoch != self._epoch:  # cleared meanwhile; the file's record has expired as well
                    return False
                self._records[place] = record
            self.counters.count_write(self.slot_bytes)
            return True
        except OSError as error:
            self._faults.write_failed(error)
            self._withdraw([slot])
            return False
        finally:
            self._end()

    def read(self, slot: int, key: bytes, pages: Sequence["WriteableBuffer"]) -> ReadOutcome:
        """Fills ``pages``, one after the other, with the payload of ``slot`` if it holds ``key``.

        Verified against the records in memory; the table in the file is not read.

        Args:
            slot: 0 to ``num_slots`` - 1.
            key: 1 to 36 bytes.
            pages: contiguous writable buffers of ``slot_bytes`` bytes in all.

        Returns:
            HIT only if the slot's record has this key and the bytes in the pages match its
            checksum. Everything else is counted, and faults are logged once per kind.

        Raises:
            ValueError: an argument is out of range. IO faults are never raised.

        O(bytes). Blocks; releases the GIL while it copies and, above 64 KiB a page, hashes.
        """
        self._check(slot, key, pages)
        with self._lock:
            if self._closed:
                return ReadOutcome.CLOSED
            self._in_flight += 1
            record = bytes(self._records[_record_range(slot)])
        try:
            expected = payload_checksum_of(record, key)
            if expected is None:
                self.counters.count_key_mismatch()
                return ReadOutcome.KEY_MISMATCH
            checksum = read_payload(self._file_descriptor, self._payload_at(slot), pages, self.slot_bytes, key)
            if checksum == expected:
                self.counters.count_read(self.slot_bytes)
                return ReadOutcome.HIT
            if checksum is None:
                self._faults.read_short()
                return ReadOutcome.SHORT_READ
            return self._payload_mismatch(slot, record)
        except OSError as error:
            self._faults.read_failed(error)
            return ReadOutcome.IO_ERROR
        finally:
            self._end()

    def invalidate(self, slots: Sequence[int]) -> None:
        """Withdraws the records of ``slots``: reads miss, and a later recovery does not see them.

        Best effort in the file: a power loss soon after may bring a record back, with the right
        data for its key. Slots out of range are ignored. Never raises. O(n log n), one small write
        per stretch of adjacent slots.
        """
        known = sorted({slot for slot in slots if 0 <= slot < self.num_slots})
        with self._lock:
            if self._closed:
                return
            self._in_flight += 1
            for slot in known:
                self._records[_record_range(slot)] = _NO_RECORD
        try:
            self._withdraw(known)
        finally:
            self._end()

    def clear(self) -> None:
        """Forgets every record, durably, and every write that is in flight. Never raises.

        For a prefix-cache reset, after which old payloads may be wrong for their keys. If the file
        cannot be told to forget, it is removed, so that no later process can recover from it.
        O(slots) in memory, one synchronous 16-byte write. Blocks for the latter.
        """
        with self._clear_lock:
            epoch = new_epoch()
            with self._lock:
                if self._closed:
                    return
                self._in_flight += 1
                self._epoch = epoch
                self._records[:] = bytes(len(self._records))
                self._recovered_slots = np.empty(0, np.int64)
            try:
                write_epoch(self._file_descriptor, self._layout, epoch)
                self._count_overhead(self._layout.epoch_offset, EPOCH_BYTES, WriteReason.HEADER)
            except OSError as error:
                self._faults.clear_failed(error)
                self._persist = False
                remove_file(self.path, self._file_descriptor)
            finally:
                self._end()

    def close(self) -> None:
        """Waits for transfers in flight, then unlocks the file, and removes it unless persistent.

        Later calls of any method do nothing. If a transfer hangs for 30 s the file stays open, and
        locked, until the process ends: closing it would let the transfer hit another file.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            is_idle = self._idle.wait_for(lambda: self._in_flight == 0, _CLOSE_TIMEOUT_SECONDS)
        if self.wear is not None:
            self.wear.close()
        if not self._persist:
            remove_file(self.path, self._file_descriptor)
        if is_idle:
            os.close(self._file_descriptor)
        else:
            logger.error("IO on the flash file %s hangs; it stays open and locked.", self.path)

    def __enter__(self) -> "FlashDevice":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, slot: int, key: bytes, pages: Sequence["ReadableBuffer"]) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"Slot {slot} does not exist; they are 0 to {self.num_slots - 1}.")
        if not 1 <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"A key of {len(key)} bytes; it must have 1 to {MAX_KEY_BYTES}.")
        length = length_of(pages)
        if length != self.slot_bytes:
            raise ValueError(f"Pages of {length} bytes; a slot holds {self.slot_bytes}.")

    def _payload_at(self, slot: int) -> int:
        return self._layout.payload_offset + slot * self._layout.slot_stride

    def _count_payload(self, slot: int, segment_class: str, reason: str) -> int:
        """Count a block in the ledger; the number of its write, 0 without a ledger."""
        if self.wear is None:
            return 0
        return self.wear.note_payload(self._payload_at(slot), self.slot_bytes, segment_class, reason)

    def _count_overhead(self, offset: int, length: int, reason: str) -> None:
        if self.wear is not None:
            self.wear.note_overhead(offset, length, reason)

    def _end(self) -> None:
        with self._lock:
            self._in_flight -= 1
            if self._closed:
                self._idle.notify_all()

    def _payload_mismatch(self, slot: int, record: bytes) -> ReadOutcome:
        place = _record_range(slot)
        with self._lock:
            is_current = self._records[place] == record
            if is_current:
                self._records[place] = _NO_RECORD
        if not is_current:  # rewritten or withdrawn while it was read; nothing is damaged
            self.counters.count_key_mismatch()
            return ReadOutcome.KEY_MISMATCH
        self._faults.payload_mismatch()
        self._withdraw([slot])
        return ReadOutcome.CHECKSUM_MISMATCH

    def _withdraw(self, slots: Sequence[int]) -> None:
        """Empties the records of ascending ``slots`` in the file, as far as it lets us."""
        errors = withdraw_records(self._file_descriptor, self._layout, slots)
        for error in errors:
            self._faults.withdraw_failed(error)
        if not errors:
            for slot in slots:
                self._count_overhead(self._layout.table_offset + slot * RECORD_BYTES, RECORD_BYTES, WriteReason.RECORD)


def _record_range(slot: int) -> slice:
    """Where a slot's record lies in the table, in bytes."""
    return slice(slot * RECORD_BYTES, (slot + 1) * RECORD_BYTES)
