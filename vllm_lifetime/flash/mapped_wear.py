# SPDX-License-Identifier: Apache-2.0
"""What steps write to flash in place, for its wear ledger.

Worker process. The thread that runs the steps notes which tokens a step has written, in arrays, without IO; the ledger's own
thread looks up which pages of the file they lie in, within a second. The sum of bytes is kept up in the flash file itself, by a
store to a mapped page, so that `kill -9` loses nothing of it.

Attention scatters a token over its block's part of a layer (head-major), so every page of that part counts as touched. Flash that
keeps pages in a buffer until they are full programs them when the block's last token has been written: never, if the block is
given up before. Flash without a buffer programs them in every step that writes to the block. A page that two blocks share counts
for each.
"""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from vllm_lifetime.flash.layout import EPOCH_BYTES, PAYLOAD_TOTAL_BYTES, WEAR_ID_BYTES, FlashLayout, pack_payload_total
from vllm_lifetime.flash.wear import WearLedger
from vllm_lifetime.flash.wear_counts import MAX_REASONS, UNKNOWN_CLASS, WearCounts, WriteReason

__all__ = ["MappedWear"]


class MappedWear:
    """See the module. `note` and `name_blocks` belong to one thread, which never waits for more than the swap of a few arrays.

    Args:
        ledger: of the file, not started yet; it is started here and closed by `close`.
        file_descriptor: the flash file, which must not be cut while this lives.
        part_bytes: of each part of the payload, one layer's of all blocks, the bytes of one block; in the file's order.
        num_blocks: KV blocks in the file.
    """

    def __init__(
        self, ledger: WearLedger, file_descriptor: int, layout: FlashLayout, part_bytes: Sequence[int], num_blocks: int
    ) -> None:
        self.ledger = ledger
        self._block_tokens = layout.geometry.block_size_tokens
        self._token_bytes = layout.geometry.slot_bytes // self._block_tokens
        starts = layout.payload_offset + num_blocks * np.concatenate(([0], np.cumsum(part_bytes[:-1], dtype=np.int64)))
        self._parts: list[tuple[int, int]] = list(zip(starts.tolist(), part_bytes, strict=True))
        self._num_blocks = num_blocks
        self._codes = {UNKNOWN_CLASS: 0}
        self._class_of = np.zeros(num_blocks, np.uint8)
        self._page = mmap.mmap(file_descriptor, mmap.PAGESIZE, offset=layout.epoch_offset)
        self._total_at = EPOCH_BYTES + WEAR_ID_BYTES
        self._total_offset = layout.epoch_offset + self._total_at
        self._total = ledger.snapshot.payload_bytes
        self._lock = threading.Lock()
        self._clear()
        ledger.start(self._give)

    def _clear(self) -> None:
        self._tokens = np.zeros(MAX_REASONS, np.int64)
        """Written since the ledger last asked, by class."""
        self._writes = np.zeros(self._num_blocks, np.int64)
        """Steps that wrote to each block, likewise."""
        self._programs = np.zeros(self._num_blocks, np.int64)
        """How often each block's last token was written, likewise."""

    # ------------------------------------------------------------------ the steps' thread

    def name_blocks(self, blocks: npt.NDArray[np.int64], segment_class: str) -> None:
        """These blocks (0: the first in flash) are handed out to a segment of that class. O(blocks), vectorised."""
        code = self._codes.get(segment_class)
        if code is None:
            code = self._codes[segment_class] = len(self._codes) if len(self._codes) < MAX_REASONS else 0
        self._class_of[blocks] = code

    def note(self, tokens: npt.NDArray[np.int64]) -> None:
        """A step has written these tokens' KV, numbered from the first flash block's first; each block's stand together.

        O(tokens), vectorised.
        """
        if not len(tokens) or self._page.closed:
            return
        blocks = tokens // self._block_tokens
        is_last = tokens - blocks * self._block_tokens == self._block_tokens - 1
        is_first = np.empty(len(blocks), np.bool_)
        is_first[0] = True
        np.not_equal(blocks[1:], blocks[:-1], out=is_first[1:])
        by_class = np.bincount(self._class_of[blocks], minlength=MAX_REASONS)
        with self._lock:
            self._tokens += by_class
            np.add.at(self._writes, blocks[is_first], 1)
            np.add.at(self._programs, blocks[is_last], 1)
        self._total += len(tokens) * self._token_bytes
        self._page[self._total_at : self._total_at + PAYLOAD_TOTAL_BYTES] = pack_payload_total(self._total)

    def close(self) -> None:
        """Write the ledger's rest, and end its thread. Of a step that follows nothing is counted."""
        self._page.close()
        self.ledger.close()

    # ------------------------------------------------------------------ the ledger's thread

    def _give(self, counts: WearCounts) -> None:
        """Count what has been noted since the last call. O(blocks written x parts)."""
        with self._lock:
            if not self._tokens.any():
                return
            tokens, writes, programs = self._tokens, self._writes, self._programs
            self._clear()
        by_class = {name: number for name, code in self._codes.copy().items() if (number := int(tokens[code]))}
        counts.note_in_place(by_class, self._token_bytes, self._extents(writes, programs), time.time())
        counts.note_overhead(self._total_offset, PAYLOAD_TOTAL_BYTES, WriteReason.HEADER)

    def _extents(self, writes: npt.NDArray[np.int64], programs: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
        blocks = np.flatnonzero(writes)
        for block, times, fills in zip(blocks.tolist(), writes[blocks].tolist(), programs[blocks].tolist(), strict=True):
            for start, length in self._parts:
                yield start + block * length, length, times, fills
