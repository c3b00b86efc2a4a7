# SPDX-License-Identifier: Apache-2.0
"""Moving payloads between pages and a file while their checksums are computed. Any thread.

A payload moves in chunks, each hashed right after its system call, while the CPU's cache still has
it; on ext4 hashing after a write costs a tenth less than hashing before it. The checksum is that of
the bytes in order, whatever the pages, so a payload may be read into other pages than it was
written from.

Pages are contiguous buffers (numpy arrays, bytearrays, memoryviews); nothing is copied on the way.
"""

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from xxhash import xxh3_64, xxh3_64_intdigest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "CHUNK_BYTES",
    "MAX_BUFFERS",
    "checksum_of",
    "length_of",
    "read_fully",
    "write_fully",
]

CHUNK_BYTES = 1 << 19
"""Bytes of one system call: small enough to stay in cache, large enough to hide the call's cost."""
MAX_BUFFERS = 1024
"""Buffers of one system call; Linux's IOV_MAX."""


def length_of(pages: "Sequence[ReadableBuffer]") -> int:
    """Bytes of all pages. O(pages)."""
    if len(pages) == 1:
        return memoryview(pages[0]).nbytes
    return sum([memoryview(page).nbytes for page in pages])


def checksum_of(pages: "Sequence[ReadableBuffer]", key: bytes) -> int:
    """The 64-bit checksum of all pages in order, seeded by ``key``. O(bytes)."""
    seed = xxh3_64_intdigest(key)
    if len(pages) == 1:
        return xxh3_64_intdigest(pages[0], seed)
    hasher = xxh3_64(seed=seed)
    update = hasher.update
    for page in pages:
        update(page)
    return hasher.intdigest()


def write_payload(file_descriptor: int, offset: int, pages: "Sequence[ReadableBuffer]", length: int, key: bytes) -> int:
    """Writes ``pages``, ``length`` bytes in all, from ``offset`` on; returns their checksum.

    Raises:
        OSError: a write failed; without an errno if the file took no more bytes.
    """
    if length <= CHUNK_BYTES and len(pages) <= MAX_BUFFERS:
        write_fully(file_descriptor, pages, offset, length)
        return checksum_of(pages, key)
    hasher = xxh3_64(seed=xxh3_64_intdigest(key))
    for chunk, chunk_bytes in _chunks(pages):
        write_fully(file_descriptor, chunk, offset, chunk_bytes)
        for part in chunk:
            hasher.update(part)
        offset += chunk_bytes
    return hasher.intdigest()


def read_payload(file_descriptor: int, offset: int, pages: "Sequence[WriteableBuffer]", length: int, key: bytes) -> int | None:
    """Fills ``pages``, ``length`` bytes in all, from ``offset`` on; returns their checksum.

    None if the file ends before that.

    Raises:
        OSError: a read failed.
    """
    if length <= CHUNK_BYTES and len(pages) <= MAX_BUFFERS:
        if not read_fully(file_descriptor, pages, offset, length):
            return None
        return checksum_of(pages, key)
    hasher = xxh3_64(seed=xxh3_64_intdigest(key))
    for chunk, chunk_bytes in _chunks(pages):
        if not read_fully(file_descriptor, chunk, offset, chunk_bytes):
            return None
        for part in chunk:
            hasher.update(part)
        offset += chunk_bytes
    return hasher.intdigest()


def write_fully(file_descriptor: int, buffers: "Sequence[ReadableBuffer]", offset: int, length: int) -> None:
    """Writes at most `MAX_BUFFERS` buffers of ``length`` bytes in all at ``offset``.

    Raises:
        OSError: a write failed; without an errno if the file took no more bytes.
    """
    done = os.pwritev(file_descriptor, buffers, offset)
    while done < length:
        count = os.pwritev(file_descriptor, _after(buffers, done), offset + done)
        if count == 0:
            raise OSError("short write")
        done += count


def read_fully(file_descriptor: int, buffers: "Sequence[WriteableBuffer]", offset: int, length: int) -> bool:
    """Fills at most `MAX_BUFFERS` buffers of ``length`` bytes in all from ``offset`` on.

    Returns whether the file went that far.

    Raises:
        OSError: a read failed.
    """
    done = os.preadv(file_descriptor, buffers, offset)
    while done < length:
        count = os.preadv(file_descriptor, _after(buffers, done), offset + done)
        if count == 0:
            return False
        done += count
    return True


def _after(buffers: "Sequence[ReadableBuffer]", skip: int) -> list[memoryview]:
    """The buffers without their first ``skip`` bytes."""
    rest = []
    for view in map(_bytes_view, buffers):
        rest.append(view[skip:])
        skip = max(0, skip - len(view))
    return [view for view in rest if len(view)]


def _chunks(pages: "Sequence[ReadableBuffer]") -> Iterator[tuple[list[memoryview], int]]:
    """The pages in groups for one system call each, long pages cut: (buffers, their bytes)."""
    chunk: list[memoryview] = []
    chunk_bytes = 0
    for view in map(_bytes_view, pages):
        while len(view):
            if chunk_bytes == CHUNK_BYTES or len(chunk) == MAX_BUFFERS:
                yield chunk, chunk_bytes
                chunk, chunk_bytes = [], 0
            part = view[: CHUNK_BYTES - chunk_bytes]
            chunk.append(part)
            chunk_bytes += len(part)
            view = view[len(part) :]
    if chunk:
        yield chunk, chunk_bytes


def _bytes_view(page: "ReadableBuffer") -> memoryview:
    view = memoryview(page)
    return view.cast("B") if view.nbytes else memoryview(b"")
