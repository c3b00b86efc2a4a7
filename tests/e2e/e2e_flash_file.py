# SPDX-License-Identifier: Apache-2.0
"""A flash file under the knife, while its server runs or between two of them."""

import os
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from vllm_lifetime.flash.layout import (
    EPOCH_BYTES,
    HEADER_PREFIX_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    FlashGeometry,
    FlashLayout,
    header_bytes_from_prefix,
    unpack_epoch,
    unpack_header,
    valid_slots,
)


class FlashFileKnife:
    """Reads a flash file's own header to know where everything lies. Opens the file anew for each cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        prefix = self._read(0, HEADER_PREFIX_BYTES)
        header = unpack_header(self._read(0, header_bytes_from_prefix(prefix)))
        self.layout = FlashLayout.plan(FlashGeometry(**header.geometry), header.size_bytes)
        assert self.layout.num_slots == header.num_slots

    def keys(self) -> dict[int, bytes]:
        """Key by slot of every valid record."""
        raw = self._read(self.layout.table_offset, self.layout.num_slots * RECORD_BYTES)
        table = np.frombuffer(bytearray(raw), RECORD_DTYPE)
        return {
            slot: table["key"][slot].tobytes()[: table["key_length"][slot]] for slot in valid_slots(table, self._epoch()).tolist()
        }

    def flip_a_bit_of_every_payload(self) -> int:
        """Damage every slot that holds a block, in its payload only; returns how many."""
        slots = self.keys()
        for slot in slots:
            offset = self._payload_offset(slot) + self.layout.geometry.slot_bytes // 2
            self._write(offset, bytes([self._read(offset, 1)[0] ^ 4]))
        return len(slots)

    def zero_and_forge(self, slot: int) -> None:
        """Zero a slot's payload and make its record match, as only a deliberate hand can."""
        key = self.keys()[slot]
        payload = bytes(self.layout.geometry.slot_bytes)
        self._write(self._payload_offset(slot), payload)
        record = np.frombuffer(bytearray(self._read(self._record_offset(slot), RECORD_BYTES)), RECORD_DTYPE)
        record["payload_checksum"] = xxh3_64_intdigest(payload, xxh3_64_intdigest(key))
        record["record_checksum"] = xxh3_64_intdigest(record.tobytes()[:56], self._epoch())
        self._write(self._record_offset(slot), record.tobytes())
        assert self.keys()[slot] == key

    def cut_payloads(self) -> None:
        """Truncate the file behind the table of records."""
        os.truncate(self.path, self.layout.payload_offset)

    def _epoch(self) -> int:
        epoch = unpack_epoch(self._read(self.layout.epoch_offset, EPOCH_BYTES))
        assert epoch is not None
        return epoch

    def _payload_offset(self, slot: int) -> int:
        return self.layout.payload_offset + slot * self.layout.slot_stride

    def _record_offset(self, slot: int) -> int:
        return self.layout.table_offset + slot * RECORD_BYTES

    def _read(self, offset: int, length: int) -> bytes:
        with self.path.open("rb") as file:
            return os.pread(file.fileno(), length, offset)

    def _write(self, offset: int, data: bytes) -> None:
        with self.path.open("r+b", buffering=0) as file:
            assert os.pwrite(file.fileno(), data, offset) == len(data)
