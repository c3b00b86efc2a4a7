# SPDX-License-Identifier: Apache-2.0
"""Counters of one flash device, written by its IO threads and read by the metrics thread."""

import dataclasses
import threading
from dataclasses import dataclass, field

__all__ = ["FlashCounterValues", "FlashCounters"]


@dataclass(slots=True)
class FlashCounterValues:
    """One consistent reading. All but the bytes count events since the device was opened.

    Attributes:
        writes: slots written whole, payload and record.
        bytes_written: payload bytes of those.
        reads: slots read whole and verified (hits).
        bytes_read: payload bytes of those.
        write_errors: writes that failed, by errno name (``ENOSPC``), or ``SHORT_WRITE``.
        read_errors: reads that failed, by errno name (``EIO``).
        short_reads: reads that met the end of the file (it was cut from outside).
        checksum_failures: payloads that did not match their record.
        key_mismatches: reads of a slot that held no record, or that of another key.
        record_errors: records that could not be withdrawn in the file, by errno name.
    """

    writes: int = 0
    bytes_written: int = 0
    reads: int = 0
    bytes_read: int = 0
    write_errors: dict[str, int] = field(default_factory=dict)
    read_errors: dict[str, int] = field(default_factory=dict)
    short_reads: int = 0
    checksum_failures: int = 0
    key_mismatches: int = 0
    record_errors: dict[str, int] = field(default_factory=dict)


class FlashCounters:
    """Thread-safe counters. Every method is O(1), may be called on any thread and never raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = FlashCounterValues()

    def count_write(self, payload_bytes: int) -> None:
        """Counts a slot that was written whole."""
        with self._lock:
            self._values.writes += 1
            self._values.bytes_written += payload_bytes

    def count_read(self, payload_bytes: int) -> None:
        """Counts a slot that was read and verified."""
        with self._lock:
            self._values.reads += 1
            self._values.bytes_read += payload_bytes

    def count_write_error(self, kind: str) -> None:
        """Counts a failed write under its errno name."""
        with self._lock:
            _increment(self._values.write_errors, kind)

    def count_read_error(self, kind: str) -> None:
        """Counts a failed read under its errno name."""
        with self._lock:
            _increment(self._values.read_errors, kind)

    def count_record_error(self, kind: str) -> None:
        """Counts a record that could not be withdrawn, under its errno name."""
        with self._lock:
            _increment(self._values.record_errors, kind)

    def count_short_read(self) -> None:
        """Counts a read that met the end of the file."""
        with self._lock:
            self._values.short_reads += 1

    def count_checksum_failure(self) -> None:
        """Counts a payload that did not match its record."""
        with self._lock:
            self._values.checksum_failures += 1

    def count_key_mismatch(self) -> None:
        """Counts a read of a slot that does not hold the key."""
        with self._lock:
            self._values.key_mismatches += 1

    def snapshot(self) -> FlashCounterValues:
        """A copy of all counters, taken at one instant."""
        with self._lock:
            return dataclasses.replace(
                self._values,
                write_errors=dict(self._values.write_errors),
                read_errors=dict(self._values.read_errors),
                record_errors=dict(self._values.record_errors),
            )


def _increment(counts: dict[str, int], kind: str) -> None:
    counts[kind] = counts.get(kind, 0) + 1
