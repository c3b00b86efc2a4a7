# SPDX-License-Identifier: Apache-2.0
"""Memory of which some parts lie in a flash file: ordinary stores and loads read and write the file in place.

The file is a flash file as every other (`storage.py`): known by its mark, locked, and reserved to its last byte before anything
is mapped, because a store to a page for which the disk has no room raises SIGBUS, which ends the process. It must not be cut
while it is mapped, for the same reason. Its slots' bytes are laid out part after part, not slot after slot.

What is written is in the file for every other process at once (one page cache), and on the device when the kernel writes it back.
Linux only. One thread opens and closes it.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_lifetime.flash.errors import FlashError
from vllm_lifetime.flash.layout import PAGE_BYTES, RECORD_BYTES, FlashGeometry, FlashLayout
from vllm_lifetime.flash.ledger_of_file import open_ledger
from vllm_lifetime.flash.mapped_wear import MappedWear
from vllm_lifetime.flash.storage import open_flash_file, remove_file
from vllm_lifetime.flash.wear import WearLedger, WearOptions

__all__ = ["MappedFlash", "Span", "mapped_file_bytes", "mapped_slots"]

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes `start <= i < start + length` of the memory; both multiples of the page size."""

    start: int
    length: int


def mapped_slots(geometry: FlashGeometry, size_bytes: int) -> int:
    """KV blocks that a mapped file of `size_bytes` holds. Raises `FlashSpaceError` if that is none."""
    return FlashLayout.plan(geometry, size_bytes).num_slots


def mapped_file_bytes(geometry: FlashGeometry, num_slots: int) -> int:
    """The size of a file that holds `num_slots` blocks, in bytes."""
    table_offset = FlashLayout.plan(geometry, 1 << 62).table_offset
    table_bytes = -(-num_slots * RECORD_BYTES // PAGE_BYTES) * PAGE_BYTES
    return table_offset + table_bytes + num_slots * -(-geometry.slot_bytes // PAGE_BYTES) * PAGE_BYTES


class MappedFlash:
    """`total_bytes` of zeroed memory at `address`, whose `spans` lie one after the other in the payload of a flash file.

    The memory is never unmapped: whoever got it may hold it as long as the process lives.

    Args:
        spans: ascending, without overlap, inside the memory; together no more than the payload of a file of `size_bytes`.
        wear: keep a ledger of what is written, in a file beside this one; each span is then one part of all blocks. None: no
            ledger.

    Raises:
        FlashError: the file cannot be used, its ledger is not its own, or the memory cannot be mapped; the text says what to
            change. Nothing new is left behind.
        ValueError: the spans are not as they should be.

    """

    def __init__(
        self,
        path: str,
        geometry: FlashGeometry,
        *,
        size_bytes: int,
        total_bytes: int,
        spans: Sequence[Span],
        wear: WearOptions | None = None,
    ) -> None:
        end = 0
        for span in spans:
            if span.start % mmap.PAGESIZE or span.length % mmap.PAGESIZE or span.start < end or span.length <= 0:
                raise ValueError(f"{span} is not whole pages of {mmap.PAGESIZE} bytes behind byte {end}")
            end = span.start + span.length
        if end > total_bytes:
            raise ValueError(f"the spans end at byte {end}, the memory at {total_bytes}")
        self.path = path
        self.total_bytes = total_bytes
        file = open_flash_file(path, geometry, size_bytes=size_bytes, persist=False)
        self._descriptor: int | None = file.file_descriptor
        self.wear: MappedWear | None = None
        """What is written, for the ledger; None without one."""
        ledger: WearLedger | None = None
        try:
            ledger = None if wear is None else open_ledger(path, file, wear)
        except BaseException:
            # The file stays if there was one: its id says that the ledger is another's.
            if file.is_created:
                remove_file(path, file.file_descriptor)
            os.close(file.file_descriptor)
            raise
        try:
            offset = file.layout.payload_offset
            if sum(span.length for span in spans) > size_bytes - offset:
                raise ValueError(f"the spans do not fit into a file of {size_bytes} bytes")
            # What an earlier server left must not be read as KV: another type's bits may be NaNs.
            os.ftruncate(file.file_descriptor, offset)
            os.posix_fallocate(file.file_descriptor, 0, size_bytes)
            self.address = _map(total_bytes, spans, file.file_descriptor, offset)
            if ledger is not None:
                num_blocks = sum(span.length for span in spans) // geometry.slot_bytes
                part_bytes = [span.length // num_blocks for span in spans]
                self.wear = MappedWear(ledger, file.file_descriptor, file.layout, part_bytes, num_blocks)
        except OSError as error:
            self._give_up(ledger)
            raise FlashError(
                f"{total_bytes} bytes with parts of the flash file {path} cannot be mapped: {error.strerror}. Lower flash_bytes, "
                "or give a path on a local file system."
            ) from error
        except BaseException:
            self._give_up(ledger)
            raise

    def _give_up(self, ledger: WearLedger | None) -> None:
        """As `close`; what the ledger has found of an earlier server is only there so far, and would go with the file."""
        if self.wear is None and ledger is not None:
            ledger.close()
        self.close()

    def buffer(self) -> "ctypes.Array[ctypes.c_int8]":
        """The memory, for whoever wants a buffer."""
        return (ctypes.c_int8 * self.total_bytes).from_address(self.address)

    def close(self) -> None:
        """Remove the file and give up its lock; its ledger is written first, and stays.

        What is mapped stays readable and writable. May be called again.
        """
        if self._descriptor is not None:
            if self.wear is not None:
                self.wear.close()
            remove_file(self.path, self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def _map(total_bytes: int, spans: Sequence[Span], descriptor: int, offset: int) -> int:
    """Map the file over `spans`, plain memory over what lies between; returns the address."""
    # Addresses first, without a claim to memory: the whole may be larger than the machine's.
    base = _mmap(None, total_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    usable = mmap.PROT_READ | mmap.PROT_WRITE
    end = 0
    for span in [*spans, Span(-(-total_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, 0)]:
        if span.start > end:
            anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
            _mmap(base + end, span.start - end, usable, anonymous, -1, 0)
        if span.length:
            _mmap(base + span.start, span.length, usable, mmap.MAP_SHARED | _MAP_FIXED, descriptor, offset)
            offset += span.length
        end = span.start + span.length
    return base


def _mmap(address: int | None, length: int, protection: int, flags: int, descriptor: int, offset: int) -> int:
    """`mmap(2)`; the module `mmap` takes no address. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    mapped = libc.mmap(address, length, protection, flags, descriptor, offset)
    if mapped is None or mapped == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(mapped)
