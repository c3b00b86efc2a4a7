# SPDX-License-Identifier: Apache-2.0
"""What the flash tests share: a small geometry, deterministic payloads, and a file under the knife."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from vllm_lifetime.flash import FlashDevice, FlashGeometry, ReadOutcome
from vllm_lifetime.flash.layout import (
    EPOCH_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    FlashLayout,
    unpack_epoch,
)

SLOT_BYTES = 8192
PAGES = (4096, 1000, 3096)
SIZE = 256 * 1024

GEOMETRY = FlashGeometry(
    model="test/model",
    dtype="bfloat16",
    block_size_tokens=16,
    num_layers=3,
    slot_bytes=SLOT_BYTES,
    hash_algorithm="sha256",
    hash_seed="0",
)


def open_device(path: Path, *, persist: bool = True, size: int = SIZE, **geometry: Any) -> FlashDevice:
    return FlashDevice.open(path, dataclasses.replace(GEOMETRY, **geometry), size_bytes=size, persist=persist)


def key_of(number: int) -> bytes:
    return number.to_bytes(4, "big") * 9


def payload_of(key: bytes, length: int = SLOT_BYTES) -> np.ndarray:
    """Bytes that only this key has."""
    generator = np.random.default_rng(xxh3_64_intdigest(key))
    return generator.integers(1, 256, length, dtype=np.uint8)


def pages_of(payload: np.ndarray, lengths: tuple[int, ...] = PAGES) -> list[np.ndarray]:
    return [page.copy() for page in np.split(payload, np.cumsum(lengths)[:-1])]


def write(device: FlashDevice, slot: int, key: bytes) -> bool:
    return device.write(slot, key, pages_of(payload_of(key)))


def read(device: FlashDevice, slot: int, key: bytes) -> tuple[ReadOutcome, np.ndarray]:
    pages = pages_of(np.zeros(SLOT_BYTES, np.uint8))
    return device.read(slot, key, pages), np.concatenate(pages)


def hits(device: FlashDevice, slot: int, key: bytes) -> bool:
    """Whether the slot reads as the key; fails the test if it does with wrong data."""
    outcome, data = read(device, slot, key)
    if outcome.hit:
        np.testing.assert_array_equal(data, payload_of(key))
    return outcome.hit


class ClosedFile:
    """A closed flash file, to be damaged or forged on purpose."""

    def __init__(self, path: Path, size: int = SIZE) -> None:
        self.path = path
        self.layout = FlashLayout.plan(GEOMETRY, size)

    @contextlib.contextmanager
    def bytes(self) -> Iterator[np.ndarray]:
        contents = np.fromfile(self.path, np.uint8)
        yield contents
        with open(self.path, "r+b") as file:
            file.write(contents.tobytes())

    def payload_range(self, slot: int) -> slice:
        start = self.layout.payload_offset + slot * self.layout.slot_stride
        return slice(start, start + SLOT_BYTES)

    def record_range(self, slot: int) -> slice:
        start = self.layout.table_offset + slot * RECORD_BYTES
        return slice(start, start + RECORD_BYTES)

    def swap(self, first: slice, second: slice) -> None:
        with self.bytes() as contents:
            contents[first], contents[second] = contents[second].copy(), contents[first].copy()

    def flip(self, offset: int, mask: int) -> None:
        with open(self.path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, offset)[0]
            os.pwrite(file.fileno(), bytes([byte ^ mask]), offset)

    def forge_record(self, slot: int) -> None:
        """Makes the record match whatever the payload is, as only a deliberate hand can."""
        with self.bytes() as contents:
            start = self.layout.epoch_offset
            epoch = unpack_epoch(contents[start : start + EPOCH_BYTES].tobytes())
            assert epoch is not None
            record = contents[self.record_range(slot)].view(RECORD_DTYPE)
            key = record["key"][0].tobytes()[: record["key_length"][0]]
            payload = contents[self.payload_range(slot)]
            record["payload_checksum"] = xxh3_64_intdigest(payload, xxh3_64_intdigest(key))
            record["record_checksum"] = xxh3_64_intdigest(record.tobytes()[:56], epoch)
