# SPDX-License-Identifier: Apache-2.0
"""The record table of a flash file in bulk: recovering it at open, withdrawing stretches of it."""

import os
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from vllm_lifetime.flash.layout import MAX_KEY_BYTES, RECORD_BYTES, RECORD_DTYPE, FlashLayout, valid_slots
from vllm_lifetime.flash.transfer import write_fully

__all__ = ["empty_table", "keys_of", "recover_table", "withdraw_records"]

_EMPTY_RECORDS = bytes(RECORD_BYTES * 1024)
"""What one system call withdraws at most: 64 KiB."""


def empty_table(num_slots: int) -> npt.NDArray[np.void]:
    """A table without records."""
    return np.zeros(num_slots, RECORD_DTYPE)


def recover_table(file_descriptor: int, layout: FlashLayout, epoch: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """The table of a file, with only its valid records, and their slots in ascending order.

    One sequential read, then O(slots); 1M slots take well under 2 s. What the file lacks is empty.

    Raises:
        OSError: the read failed.
    """
    table = empty_table(layout.num_slots)
    rest = table.view(np.uint8).data
    offset = layout.table_offset
    while count := os.preadv(file_descriptor, [rest], offset):
        rest, offset = rest[count:], offset + count
    slots = valid_slots(table, epoch)
    is_invalid = np.ones(layout.num_slots, np.bool_)
    is_invalid[slots] = False
    table[is_invalid] = np.zeros((), RECORD_DTYPE)
    return table, slots


def keys_of(table: npt.NDArray[np.void], slots: npt.NDArray[np.int64]) -> list[tuple[int, bytes]]:
    """``(slot, key)`` of those ``slots`` that have a record. O(slots)."""
    records = table[slots]
    in_use = np.flatnonzero(records["state"])
    keys = records[in_use]["key"].tobytes()
    starts = range(0, len(keys), MAX_KEY_BYTES)
    lengths = records[in_use]["key_length"].tolist()
    return [
        (slot, keys[start : start + length]) for slot, start, length in zip(slots[in_use].tolist(), starts, lengths, strict=True)
    ]


def withdraw_records(file_descriptor: int, layout: FlashLayout, slots: Sequence[int]) -> list[OSError]:
    """Empties the records of ascending ``slots`` in the file; returns what failed, raises nothing.

    One write per stretch of adjacent slots. O(slots).
    """
    errors = []
    for first, count in _stretches(slots):
        length = count * RECORD_BYTES
        offset = layout.table_offset + first * RECORD_BYTES
        try:
            write_fully(file_descriptor, [_EMPTY_RECORDS[:length]], offset, length)
        except OSError as error:
            errors.append(error)
    return errors


def _stretches(slots: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Stretches of adjacent slots: (first slot, count)."""
    first = count = 0
    for slot in slots:
        if count and slot == first + count and count * RECORD_BYTES < len(_EMPTY_RECORDS):
            count += 1
            continue
        if count:
            yield first, count
        first, count = slot, 1
    if count:
        yield first, count
