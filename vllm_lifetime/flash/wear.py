# SPDX-License-Identifier: Apache-2.0
"""The wear ledger of one flash file: what has been written to it in its life, kept in `PATH.wear` over restarts and crashes.

Worker process. The IO threads of the device count under a lock, for microseconds; a thread of the ledger's own writes the file,
at most every `flush_every_s`, so nobody ever waits for that. A ledger that cannot be read or written costs nothing but itself:
the fault is counted, said once, and the counting goes on in memory.

**What a crash costs.** A killed process loses what it counted after the last flush. Each payload write has a number, which stands
in the record of its slot in the flash file, too: at the next start, records with numbers after the ledger's say how many blocks
were written and lost from the count, and they are added, as class `unknown` and reason `unrecorded`. Flash in place has no
records; there the file itself says how many bytes have been written. So of the bytes of KV nothing is lost but what was in
flight; of their classes, and of the bytes beside them, what was younger than the last flush. A power loss may cost what the
system had not written back (some 30 s): nothing here is synced but at start and close, since that would wear the flash.
"""

import contextlib
import dataclasses
import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_lifetime.flash.drive import DriveFacts, describe_drive
from vllm_lifetime.flash.endurance import DEFAULT_ENDURANCE_CYCLES
from vllm_lifetime.flash.erase_blocks import DEFAULT_ERASE_BLOCK_BYTES, EraseBlocks, EraseBlockSummary
from vllm_lifetime.flash.errors import FlashFormatError
from vllm_lifetime.flash.faults import errno_name
from vllm_lifetime.flash.wear_counts import WearCounts
from vllm_lifetime.flash.wear_figures import WearSnapshot
from vllm_lifetime.flash.wear_file import (
    WEAR_SUFFIX,
    WearHeader,
    WearSlots,
    pack_slot,
    read_wear_file,
    replace_wear_file,
    write_at,
)

__all__ = ["FlashTrace", "WearLedger", "WearOptions"]

logger = logging.getLogger("vllm_lifetime.flash")

LOOK_EVERY_S = 1.0
"""How often a new snapshot is made while anything changes."""

FLUSH_BYTES_PER_S = 16384
"""Most that the ledger itself writes, over time."""

MAX_QUICK_BLOCKS = 65536
"""With more erase blocks their figures are the thread's business alone."""

RETRY_S = 60.0
"""How long after a failed start the ledger's file is tried again."""

CLOSE_TIMEOUT_S = 5.0
MAX_UNRECORDED = 1 << 24
"""Most writes that are believed to have been lost from the count: more is another file's numbering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WearOptions:
    """What the figures rest on.

    Attributes:
        erase_block_bytes: a multiple of 4 KiB.
        endurance_cycles: program/erase cycles that a cell tolerates.
    """

    erase_block_bytes: int = DEFAULT_ERASE_BLOCK_BYTES
    endurance_cycles: int = DEFAULT_ENDURANCE_CYCLES


@dataclass(frozen=True, slots=True)
class FlashTrace:
    """What an earlier process left in the flash file.

    Attributes:
        wear_id: the ledger's id, as the flash file has it; None if it has none.
        offsets: of the payload of each valid record that has a number.
        numbers: of the write, likewise.
        payload_bytes: of each.
        payload_total: bytes of KV that its ledger had counted, or would have but for a kill; None if the file does not say. It is
            kept up in place only.
    """

    wear_id: str | None = None
    offsets: Sequence[int] = ()
    numbers: Sequence[int] = ()
    payload_bytes: int = 0
    payload_total: int | None = None


class WearLedger:
    """The ledger of one flash file, which this process has locked. Methods may be called on any thread; none raises.

    Make one with `open`.
    """

    def __init__(self, path: str, header: WearHeader, counts: WearCounts, flush: int, *, may_write: bool) -> None:
        """Use `open` instead. `may_write`: whether the file at `path` is ours to replace."""
        self.path = path
        self.header = header
        slot_bytes = WearSlots(counts.blocks.num_blocks).slot_bytes
        self.flush_every_s = max(LOOK_EVERY_S, slot_bytes / FLUSH_BYTES_PER_S)
        self._counts = counts
        self._flush_number = flush
        self._may_write = may_write
        self._file_descriptor: int | None = None
        self._opened_at_s = time.time()
        self._opened_payload_bytes = counts.payload_bytes
        self._source: Callable[[WearCounts], None] | None = None
        self._drive: DriveFacts | None = None
        self._errors: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._is_kept = may_write
        self._shown_changes = self._seen_changes = -1
        """`WearCounts.changes` when the thread, and when anybody, made the latest snapshot."""
        self._flushed_changes = -1
        self._next_flush = 0.0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.snapshot = self._snapshot()
        """The latest, at most `LOOK_EVERY_S` behind while the thread runs. Replaced as a whole, never changed."""

    @classmethod
    def open(cls, flash_path: str, size_bytes: int, options: WearOptions, trace: FlashTrace) -> "WearLedger":
        """Read the ledger of the flash file at `flash_path`, or begin one; `trace`: what that file says. Starts no thread.

        Raises:
            FlashFormatError: there is a file at `PATH.wear` that is damaged, forged, another flash file's, or no ledger. The text
                says so, and what to do. The file is not touched.

        A file that cannot be read or written is no error: see the module. Blocks for a read of the ledger.
        """
        path = flash_path + WEAR_SUFFIX
        name = os.path.basename(flash_path)
        header = WearHeader(
            wear_id=trace.wear_id or secrets.token_hex(16),
            flash_name=name,
            size_bytes=size_bytes,
            erase_block_bytes=options.erase_block_bytes,
            endurance_cycles=options.endurance_cycles,
            created_at_s=time.time(),
        )
        counts, flush = WearCounts(EraseBlocks(size_bytes, options.erase_block_bytes)), 0
        problem, is_new = None, True
        try:
            kept, old, flush = read_wear_file(path)
            is_new = False
            _check_owner(path, kept, name, trace)
            header = dataclasses.replace(header, wear_id=kept.wear_id, created_at_s=kept.created_at_s)
            _carry_over(path, kept, old, counts)
        except FileNotFoundError:
            pass
        except OSError as error:
            problem = error
        if is_new:
            # What is in the flash file was counted, or not, by a ledger that is gone; numbers go on where that one was.
            counts.sequence = int(max(trace.numbers, default=0))
        else:
            _reconcile(counts, trace)
        ledger = cls(path, header, counts, flush, may_write=problem is None)
        if problem is not None:
            ledger._failed(problem, "cannot be read, so it is left as it is, and wear is counted in memory from zero")
        return ledger

    def start(self, source: Callable[[WearCounts], None] | None = None) -> None:
        """Begin to keep the file. The thread ends with `close`.

        `source` counts what it knows and the ledger does not; it is called before each look, on whatever thread that is.
        """
        self._source = source
        self._thread = threading.Thread(target=self._run, name="lifetime-wear", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ counting

    def note_payload(self, offset: int, length: int, segment_class: str, reason: str) -> int:
        """A KV block of `length` bytes has been written at `offset` of the flash file. Returns the number for its record."""
        now_s = time.time()
        with self._lock:
            return self._counts.note_payload(offset, length, segment_class, reason, now_s)

    def note_overhead(self, offset: int, length: int, reason: str) -> None:
        """`length` bytes that are no KV have been written at `offset` of the flash file."""
        with self._lock:
            self._counts.note_overhead(offset, length, reason)

    def refresh(self) -> WearSnapshot:
        """A snapshot that has every write up to now; the same one as before if there was none.

        O(erase blocks), vectorised, where they are few; else their figures are those of up to `LOOK_EVERY_S` ago.
        """
        with self._lock:
            self._collect()
            if self._counts.changes != self._seen_changes:
                is_large = self._counts.blocks.num_blocks > MAX_QUICK_BLOCKS
                self.snapshot = self._snapshot(self.snapshot.blocks if is_large else None)
                self._seen_changes = self._counts.changes
            return self.snapshot

    # ------------------------------------------------------------------ keeping

    def close(self) -> None:
        """Write what is new, sync the file, and end the thread; waits a few seconds at most. Once."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
            if self._thread.is_alive():
                logger.error("IO on the wear ledger %s hangs; it is left as it is.", self.path)
            self._thread = None
        else:
            self._finish()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self._drive = describe_drive(os.path.dirname(os.path.abspath(self.path)))
        self._look(time.monotonic())
        while not self._stop.wait(LOOK_EVERY_S):
            self._look(time.monotonic())
        self._finish()

    def _finish(self) -> None:
        self._look(float("inf"))
        if self._file_descriptor is not None:
            self._attempt(lambda: os.fdatasync(self._file_descriptor or 0))
            os.close(self._file_descriptor)
            self._file_descriptor = None

    def _look(self, now: float) -> None:
        """Make a new snapshot if anything has changed, and flush if that is due at `now` (a `time.monotonic` time)."""
        with self._lock:
            self._collect()
            self._counts.settle()
            changes = self._counts.changes
        if changes != self._flushed_changes and now >= self._next_flush and self._may_write:
            self._flush(changes, now)
        with self._lock:
            if self._counts.changes != self._shown_changes:
                self._shown_changes = self._seen_changes = self._counts.changes
                self.snapshot = self._snapshot()

    def _collect(self) -> None:
        if self._source is None:
            return
        try:
            self._source(self._counts)
        except Exception as error:  # the thread that counts must go on
            self._failed(error, "misses some of what was just written")

    def _snapshot(self, blocks: EraseBlockSummary | None = None) -> WearSnapshot:
        return WearSnapshot.of(
            self.header,
            self._counts,
            blocks,
            opened_at_s=self._opened_at_s,
            opened_payload_bytes=self._opened_payload_bytes,
            flush_every_s=self.flush_every_s,
            is_kept=self._is_kept,
            errors=dict(self._errors),
            drive=self._drive,
        )

    def _flush(self, changes: int, now: float) -> None:
        flush = self._flush_number + 1
        was_kept = self._is_kept
        self._is_kept = self._attempt(lambda: self._write(flush))
        if self._is_kept:
            self._flush_number = flush
            self._flushed_changes = changes
        self._next_flush = now + (self.flush_every_s if self._is_kept else RETRY_S)
        if self._is_kept != was_kept or not self._is_kept:
            self._shown_changes = -1

    def _write(self, flush: int) -> None:
        slots = WearSlots(self._counts.blocks.num_blocks)
        with self._lock:
            # Counted before it is written, so that the file says so, too; a flush that fails is counted all the same.
            self._counts.note_ledger(slots.slot_bytes)
            slot = pack_slot(self._counts, flush, self.header.wear_id)
        if self._file_descriptor is None:
            self._file_descriptor = replace_wear_file(self.path, self.header, slot, flush)
        else:
            write_at(self._file_descriptor, slot, slots.offset(flush))

    def _attempt(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except Exception as error:
            self._failed(error, "cannot be written; wear is counted in memory meanwhile")
            return False
        return True

    def _failed(self, error: Exception, what: str) -> None:
        if isinstance(error, OSError):
            kind = "SHORT_WRITE" if error.errno is None else errno_name(error)
        else:
            kind = type(error).__name__
        self._errors[kind] += 1
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning(
                "The wear ledger %s %s (%s). Serving goes on. This is logged once; the counters go on.",
                self.path,
                what,
                error,
            )


def _check_owner(path: str, kept: WearHeader, name: str, trace: FlashTrace) -> None:
    """Raise FlashFormatError if the ledger is another flash file's."""
    if trace.wear_id is not None and trace.wear_id != kept.wear_id:
        whose = f"it has the id {kept.wear_id}, and this flash file has {trace.wear_id}"
    elif trace.wear_id is None and kept.flash_name != name:
        whose = f"it was kept for a file of the name {kept.flash_name!r}, and this one is {name!r}"
    else:
        return
    raise FlashFormatError(
        f"The wear ledger {path} belongs to another flash file: {whose}. Put the right one there, or delete or move it to count "
        "this file's wear from zero."
    )


def _carry_over(path: str, kept: WearHeader, old: WearCounts, counts: WearCounts) -> None:
    """Go on from `old`, whatever sizes it was kept with."""
    blocks = counts.blocks
    counts.written = old.written
    counts.sequence = old.sequence
    counts.payload_bytes = old.payload_bytes
    counts.programmed_pages = old.programmed_pages
    counts.history = old.history
    size_bytes = blocks.num_blocks * blocks.erase_block_bytes
    if kept.erase_block_bytes == blocks.erase_block_bytes:
        counts.blocks = EraseBlocks(
            size_bytes, blocks.erase_block_bytes, old.blocks.pages_programmed, old.blocks.erases, old.blocks.moved_pages
        )
        return
    blocks.moved_pages = old.blocks.moved_pages
    logger.warning(
        "The wear ledger %s was kept for erase blocks of %d bytes; the cycles of each block are counted from zero with %d bytes. "
        "All else goes on.",
        path,
        kept.erase_block_bytes,
        blocks.erase_block_bytes,
    )


def _reconcile(counts: WearCounts, trace: FlashTrace) -> None:
    """Add the writes that the flash file has and the ledger has not. O(records)."""
    ahead = (np.asarray(trace.numbers, np.int64) - counts.sequence) % 0xFFFFFFFF
    is_lost = (ahead >= 1) & (ahead <= MAX_UNRECORDED)
    if is_lost.any():
        offsets = np.asarray(trace.offsets, np.int64)[is_lost].tolist()
        counts.note_unrecorded(offsets, int(ahead[is_lost].max()), trace.payload_bytes, time.time())
    if trace.payload_total is not None and trace.payload_total > counts.payload_bytes:
        counts.note_unplaced(trace.payload_total - counts.payload_bytes, time.time())
