# SPDX-License-Identifier: Apache-2.0
"""What has been written to one flash file, by whom and why. Pure; the caller holds a lock.

Every byte that the device hands to the system is counted once, under a class and a reason. The bytes of KV blocks (*payload*)
have the class of their segment; what the file costs beside them has the class `overhead`. What the flash then programs is whole
pages (`erase_blocks.py`). A page of the record table or of the header that is written again and again within one `settle` counts
once: the page cache brings it to the drive once.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum

from vllm_lifetime.flash.erase_blocks import NAND_PAGE_BYTES, EraseBlocks
from vllm_lifetime.flash.write_history import WriteHistory

__all__ = ["MAX_REASONS", "OVERHEAD", "UNKNOWN_CLASS", "WearCounts", "WriteReason"]

OVERHEAD = "overhead"
"""Class of what is written beside KV blocks."""

UNKNOWN_CLASS = "unknown"
"""Class of blocks whose segment is not known."""

MAX_REASONS = 64
"""Most pairs of class and reason that are told apart; more are counted as unknown."""


class WriteReason(StrEnum):
    """Why bytes were written. The first four are payload."""

    DEMOTION = "demotion"
    """A block from HBM, straight to flash."""
    MOVE = "move"
    """A block from a host slot, which was given up for it."""
    IN_PLACE = "in_place"
    """Tokens that attention wrote where they lie: flash in place."""
    UNRECORDED = "unrecorded"
    """What a process wrote after its last flush of the ledger and before it was killed: found in the flash file."""
    RECORD = "record"
    """Records of slots, written or withdrawn."""
    HEADER = "header"
    """The flash file's header, epoch and ledger id."""
    LEDGER = "ledger"
    """The ledger itself."""


class WearCounts:
    """The counters of one flash file. `written[class, reason]` is `[writes, bytes]`; in place, each token is a write.

    Attributes:
        sequence: number of the latest payload write, 1 to 2**32 - 1 and then from 1 again; 0: none yet.
        payload_bytes: bytes of KV blocks.
        programmed_pages: pages of `NAND_PAGE_BYTES`, the ledger's own included.
    """

    def __init__(self, blocks: EraseBlocks) -> None:
        self.written: dict[tuple[str, str], list[int]] = {}
        self.sequence = 0
        self.payload_bytes = 0
        self.programmed_pages = 0
        self.blocks = blocks
        self.history = WriteHistory()
        self._dirty_pages: set[int] = set()
        self.changes = 0
        """How often anything was counted but the ledger's own writes."""

    @property
    def written_bytes(self) -> int:
        """All bytes, of every class and reason."""
        return sum(length for _, length in self.written.values())

    def note_payload(self, offset: int, length: int, segment_class: str, reason: str, now_s: float) -> int:
        """A block of `length` bytes was written at `offset`. Returns the number of this write. O(erase blocks touched)."""
        self.sequence = self.sequence % 0xFFFFFFFF + 1
        self._count(segment_class, reason, length)
        self.payload_bytes += length
        self.programmed_pages += self.blocks.program(offset, length)
        self.history.add(length, now_s)
        return self.sequence

    def note_in_place(
        self,
        tokens: Mapping[str, int],
        token_bytes: int,
        extents: Iterable[tuple[int, int, int, int]],
        now_s: float,
    ) -> None:
        """So many tokens of each class were written in place.

        Args:
            extents: (offset, length, writes, programs) of each piece of the file that they touched, see `EraseBlocks.program`.

        O(classes + erase blocks touched).
        """
        for segment_class, number in tokens.items():
            self._count(segment_class, WriteReason.IN_PLACE, number * token_bytes, writes=number)
        length = sum(tokens.values()) * token_bytes
        self.payload_bytes += length
        self.history.add(length, now_s)
        for extent in extents:
            self.programmed_pages += self.blocks.program(*extent)

    def note_unplaced(self, length: int, now_s: float) -> None:
        """`length` bytes of KV were written that no ledger has; where they lie is not known. They filled their pages. O(1)."""
        self._count(UNKNOWN_CLASS, WriteReason.UNRECORDED, length)
        self.payload_bytes += length
        self.programmed_pages += -(-length // NAND_PAGE_BYTES)
        self.history.add(length, now_s)

    def note_unrecorded(self, offsets: list[int], num_writes: int, length: int, now_s: float) -> None:
        """`num_writes` blocks were written that no ledger has; the latest of each place at `offsets`."""
        self.sequence = (self.sequence + num_writes - 1) % 0xFFFFFFFF + 1
        entry = self.written.setdefault((UNKNOWN_CLASS, WriteReason.UNRECORDED), [0, 0])
        entry[0] += num_writes
        entry[1] += num_writes * length
        self.payload_bytes += num_writes * length
        # Where those lie that were overwritten is not known; each took as many pages.
        self.programmed_pages += (num_writes - len(offsets)) * -(-length // NAND_PAGE_BYTES)
        for offset in offsets:
            self.programmed_pages += self.blocks.program(offset, length)
        self.history.add(num_writes * length, now_s)
        self.changes += 1

    def note_overhead(self, offset: int, length: int, reason: str) -> None:
        """`length` bytes beside the payload were written at `offset`. O(pages)."""
        self._count(OVERHEAD, reason, length)
        first, last = offset // NAND_PAGE_BYTES, (offset + length - 1) // NAND_PAGE_BYTES
        if first == last:
            self._dirty_pages.add(first)
        else:
            self._dirty_pages.update(range(first, last + 1))

    def note_ledger(self, length: int) -> None:
        """The ledger was written, `length` bytes in whole pages, in a file of its own."""
        self._count(OVERHEAD, WriteReason.LEDGER, length)
        self.changes -= 1
        self.programmed_pages += -(-length // NAND_PAGE_BYTES)

    def settle(self) -> None:
        """The pages of `note_overhead` go to the flash now, each once. O(pages)."""
        for page in self._dirty_pages:
            self.programmed_pages += self.blocks.program(page * NAND_PAGE_BYTES, NAND_PAGE_BYTES)
        self._dirty_pages.clear()

    def _count(self, segment_class: str, reason: str, length: int, writes: int = 1) -> None:
        key = segment_class, reason
        entry = self.written.get(key)
        if entry is None:
            if len(self.written) >= MAX_REASONS:
                key = UNKNOWN_CLASS, WriteReason.DEMOTION
            entry = self.written.setdefault(key, [0, 0])
        entry[0] += writes
        entry[1] += length
        self.changes += 1
