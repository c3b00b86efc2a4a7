# SPDX-License-Identifier: Apache-2.0
"""Program/erase cycles of each erase block of a flash file. Pure; the caller holds a lock.

NAND is programmed by the page and erased by the erase block. The file stands for flash without a translation layer in between, so
two figures bound what a device would do with the same writes:

- **levelled**: every write programs fresh pages, and whole blocks are erased later. An erase block has been cycled as often as
  its pages have been programmed: `pages_programmed / pages_per_block`. A translation layer that moves next to nothing comes
  close; this is what Lachesis's lifetime counts (section 5.1), with a factor of 1.02 for what is moved.
- **in place**: nothing is remapped and nothing buffered. To program a page again its whole erase block is erased, and the other
  pages programmed in it are copied and programmed again.
"""

from array import array
from dataclasses import dataclass

import numpy as np

__all__ = ["DEFAULT_ERASE_BLOCK_BYTES", "NAND_PAGE_BYTES", "EraseBlockSummary", "EraseBlocks"]

NAND_PAGE_BYTES = 4096
"""What is programmed at once: the page of the High-Bandwidth Flash that Son et al. model (Lachesis's reference 41)."""

DEFAULT_ERASE_BLOCK_BYTES = 4 << 20
"""An assumption, since no size has been published for High-Bandwidth Flash: about a thousand pages, as is usual in 3D NAND, of 4
KiB. Bytes and device-years do not depend on it."""

_ALL = -1
"""Bit set of a block all of whose pages are programmed."""


@dataclass(frozen=True, slots=True)
class EraseBlockSummary:
    """All erase blocks at one moment. Cycles are whole-block equivalents.

    Attributes:
        num_blocks: erase blocks of the file.
        mean_cycles: levelled program/erase cycles, averaged.
        max_cycles: of the most programmed block.
        in_place_erases: erases in all, had each write been done in place.
        max_in_place_erases: of the block with the most.
        moved_pages: pages that writing in place programs beyond the levelled ones: copied because their block was erased for
            another's sake, or programmed again because nothing waited until they were full.
    """

    num_blocks: int = 0
    mean_cycles: float = 0.0
    max_cycles: float = 0.0
    in_place_erases: int = 0
    max_in_place_erases: int = 0
    moved_pages: int = 0


class EraseBlocks:
    """Counts per erase block of a file.

    Args:
        size_bytes: of the file.
        erase_block_bytes: a multiple of `NAND_PAGE_BYTES`.
        pages_programmed: by block, from an earlier process; None: the flash is new.
        erases: in-place erases by block, likewise.
        moved_pages: likewise.

    Which pages of a block are programmed is not kept over a restart: blocks that were ever written count as full then, which adds
    at most one in-place erase to each.
    """

    def __init__(
        self,
        size_bytes: int,
        erase_block_bytes: int,
        pages_programmed: "array[int] | None" = None,
        erases: "array[int] | None" = None,
        moved_pages: int = 0,
    ) -> None:
        self.erase_block_bytes = erase_block_bytes
        self.pages_per_block = erase_block_bytes // NAND_PAGE_BYTES
        self.num_blocks = -(-size_bytes // erase_block_bytes)
        self.pages_programmed = _fitted(pages_programmed, self.num_blocks)
        self.erases = _fitted(erases, self.num_blocks)
        self.moved_pages = moved_pages
        self._programmed = [_ALL if pages else 0 for pages in self.pages_programmed]

    def program(self, offset: int, length: int, writes: int = 1, programs: int = 1) -> int:
        """`length` bytes from `offset` on were written `writes` times, one after the other.

        `programs`, at most `writes`: how often their pages are programmed where a buffer keeps pages that are not full. Returns
        the pages that this makes, none outside the file. O(blocks).
        """
        first = offset // NAND_PAGE_BYTES
        end = -(-(offset + length) // NAND_PAGE_BYTES)
        per_block = self.pages_per_block
        page = first
        while page < end:
            block = page // per_block
            if block >= self.num_blocks:
                return (page - first) * programs
            start = page - block * per_block
            count = min(end - page, per_block - start)
            self._program_in(block, start, count, writes, programs)
            page += count
        return (page - first) * programs

    def _program_in(self, block: int, start: int, count: int, writes: int, programs: int) -> None:
        per_block = self.pages_per_block
        self.pages_programmed[block] += count * programs
        self.moved_pages += count * (writes - programs)
        programmed = self._programmed[block]
        if count == per_block:
            self.erases[block] += writes - (programmed == 0)
            self._programmed[block] = _ALL
            return
        mask = ((1 << count) - 1) << start
        num_erases = writes - (programmed & mask == 0)
        if num_erases:
            self.erases[block] += num_erases
            self.moved_pages += num_erases * (per_block - count if programmed == _ALL else (programmed & ~mask).bit_count())
        self._programmed[block] = programmed | mask

    def summary(self) -> EraseBlockSummary:
        """The figures of all blocks together. O(blocks), vectorised."""
        pages = np.frombuffer(self.pages_programmed, np.uint64)
        erases = np.frombuffer(self.erases, np.uint64)
        if not len(pages):
            return EraseBlockSummary(moved_pages=self.moved_pages)
        return EraseBlockSummary(
            num_blocks=self.num_blocks,
            mean_cycles=float(pages.mean()) / self.pages_per_block,
            max_cycles=int(pages.max()) / self.pages_per_block,
            in_place_erases=int(erases.sum()),
            max_in_place_erases=int(erases.max()),
            moved_pages=self.moved_pages,
        )


def _fitted(counts: "array[int] | None", length: int) -> "array[int]":
    """A copy of `length` counts: cut, or with zeros behind."""
    kept = array("Q", (counts or array("Q"))[:length])
    kept.extend([0] * (length - len(kept)))
    return kept
