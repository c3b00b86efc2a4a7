# SPDX-License-Identifier: Apache-2.0
"""The bytes of a flash file: header, slot records, payload area. Pure functions, no IO.

The file, all integers little endian::

    0                header   magic, version, JSON length, slot count, file size, checksum, JSON
    epoch_offset     epoch    the number that every valid record was signed with, and its checksum; the wear ledger's id;
                              of flash in place, the KV bytes that the ledger counts, kept up with each step
    table_offset     table    one 64-byte record per slot
    payload_offset   payload  one block per slot, at a stride of whole 4 KiB pages

Each part starts on a 4 KiB boundary, so a slot can be mapped in place.

The epoch makes forgetting everything one small write: records signed with another epoch are not
valid. It lies on its own page so that the header is written only once in a file's life.
"""

import dataclasses
import json
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from vllm_lifetime.flash.errors import FlashFormatError, FlashGeometryError, FlashSpaceError

__all__ = [
    "EPOCH_BYTES",
    "HEADER_PREFIX_BYTES",
    "MAGIC",
    "MAX_KEY_BYTES",
    "PAGE_BYTES",
    "PAYLOAD_TOTAL_BYTES",
    "RECORD_BYTES",
    "RECORD_DTYPE",
    "WEAR_ID_BYTES",
    "FlashGeometry",
    "FlashHeader",
    "FlashLayout",
    "describe_geometry_differences",
    "header_bytes_from_prefix",
    "pack_epoch",
    "pack_header",
    "pack_payload_total",
    "pack_record",
    "pack_wear_id",
    "payload_checksum_of",
    "unpack_epoch",
    "unpack_header",
    "unpack_payload_total",
    "unpack_wear_id",
    "valid_slots",
]

MAGIC = b"VLLMLTFL"
FORMAT_VERSION = 1
PAGE_BYTES = 4096
MAX_KEY_BYTES = 36
"""A 32-byte block hash and a 4-byte KV cache group."""
MAX_GEOMETRY_JSON_BYTES = 1 << 20
MAX_SLOTS = 1 << 32
"""A record numbers its slot with 32 bits."""

# magic, version, JSON length, slot count, file size, checksum of all of the header but itself
_HEADER_PREFIX = struct.Struct("<8sIIQQQ")
_HEADER_CHECKSUM_OFFSET = _HEADER_PREFIX.size - 8
HEADER_PREFIX_BYTES = _HEADER_PREFIX.size

_EPOCH = struct.Struct("<QQ")
EPOCH_BYTES = _EPOCH.size

WEAR_ID_BYTES = 24
"""The id of the file's wear ledger and its checksum; they follow the epoch."""

_PAYLOAD_TOTAL = struct.Struct("<QQ")
PAYLOAD_TOTAL_BYTES = _PAYLOAD_TOTAL.size
"""KV bytes written to flash in place in the ledger's life, and their complement; they follow the ledger's id."""
_LARGEST_TOTAL = (1 << 60) - 1

STATE_EMPTY = 0
STATE_VALID = 1

RECORD_DTYPE = np.dtype(
    [
        ("key", "V36"),
        ("key_length", "u1"),
        ("state", "u1"),
        ("reserved", "<u2"),
        ("slot", "<u4"),
        ("number", "<u4"),
        ("payload_checksum", "<u8"),
        ("record_checksum", "<u8"),
    ]
)
"""One slot record. 64 bytes, so no record straddles a page or a disk sector. `number`: of the write, see `wear.py`; 0: none."""
RECORD_BYTES = RECORD_DTYPE.itemsize
_RECORD_BODY = struct.Struct("<36sBB2xIIQ")
_RECORD_BODY_BYTES = _RECORD_BODY.size
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashGeometry:
    """What the bytes of a slot mean. Two devices may share a file only if all of this is equal.

    Attributes:
        model: name or path of the model, with its revision where one is known.
        dtype: element type of the KV cache, e.g. ``bfloat16``.
        block_size_tokens: tokens of one KV block.
        num_layers: layers whose KV one slot holds, on this rank.
        slot_bytes: payload bytes of one slot.
        hash_algorithm: how block hashes, the slots' keys, are computed, e.g. ``sha256_cbor``.
        hash_seed: what seeds those hashes; equal tokens under two seeds have different keys.
        tp_size: tensor parallel ranks.
        tp_rank: this worker's tensor parallel rank.
        pp_size: pipeline parallel ranks.
        pp_rank: this worker's pipeline parallel rank.
        extra: anything else that the byte order depends on, e.g. the KV layout ``NHD``.

    Raises:
        FlashGeometryError: a size is not positive or a rank is out of range.
    """

    model: str
    dtype: str
    block_size_tokens: int
    num_layers: int
    slot_bytes: int
    hash_algorithm: str
    hash_seed: str
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    extra: str = ""

    def __post_init__(self) -> None:
        for name in ("block_size_tokens", "num_layers", "slot_bytes", "tp_size", "pp_size"):
            value = getattr(self, name)
            if value < 1:
                raise FlashGeometryError(f"{name} is {value}; it must be at least 1.")
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            value, limit = getattr(self, rank), getattr(self, size)
            if not 0 <= value < limit:
                raise FlashGeometryError(f"{rank} is {value}; with {size}={limit} it must be 0 to {limit - 1}.")


@dataclass(frozen=True, slots=True)
class FlashHeader:
    """A header as stored in a file.

    Attributes:
        geometry: field name to value; a mapping, since another version may have other fields.
        num_slots: slots of the file.
        size_bytes: bytes of the whole file.
    """

    geometry: dict[str, Any]
    num_slots: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FlashLayout:
    """Where everything lies in a file of a given geometry and size. Offsets and sizes in bytes."""

    geometry: FlashGeometry
    size_bytes: int
    num_slots: int
    slot_stride: int
    epoch_offset: int
    table_offset: int
    payload_offset: int

    @classmethod
    def plan(cls, geometry: FlashGeometry, size_bytes: int) -> "FlashLayout":
        """Lays out as many slots as fit into ``size_bytes``. O(1).

        Raises:
            FlashSpaceError: not even one slot fits.
        """
        stride = _page_aligned(geometry.slot_bytes)
        epoch_offset = _page_aligned(_HEADER_PREFIX.size + len(_geometry_json(geometry)))
        table_offset = epoch_offset + PAGE_BYTES
        num_slots = min(MAX_SLOTS, max(0, (size_bytes - table_offset) // (stride + RECORD_BYTES)))
        # The table is rounded up to a page, which may cost the last slot.
        while num_slots and _payload_offset(table_offset, num_slots) + num_slots * stride > size_bytes:
            num_slots -= 1
        if num_slots < 1:
            needed = _payload_offset(table_offset, 1) + stride
            raise FlashSpaceError(
                f"A flash file of {size_bytes} bytes holds no slot: one slot of {geometry.slot_bytes} "
                f"bytes needs a file of {needed} bytes. Give the flash tier at least that much."
            )
        return cls(
            geometry=geometry,
            size_bytes=size_bytes,
            num_slots=num_slots,
            slot_stride=stride,
            epoch_offset=epoch_offset,
            table_offset=table_offset,
            payload_offset=_payload_offset(table_offset, num_slots),
        )


def _page_aligned(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def _payload_offset(table_offset: int, num_slots: int) -> int:
    return table_offset + _page_aligned(num_slots * RECORD_BYTES)


def _geometry_json(geometry: FlashGeometry) -> bytes:
    return json.dumps(dataclasses.asdict(geometry), sort_keys=True).encode()


def pack_header(layout: FlashLayout) -> bytes:
    """The header of a file: whole pages, up to ``layout.epoch_offset``."""
    text = _geometry_json(layout.geometry)
    if len(text) > MAX_GEOMETRY_JSON_BYTES:
        raise FlashGeometryError(
            f"The geometry takes {len(text)} bytes as JSON; at most {MAX_GEOMETRY_JSON_BYTES} fit. "
            "Shorten its strings (model, hash_seed, extra)."
        )
    prefix = _HEADER_PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), layout.num_slots, layout.size_bytes, 0)
    checksum = _CHECKSUM.pack(xxh3_64_intdigest(prefix[:_HEADER_CHECKSUM_OFFSET] + text))
    return (prefix[:_HEADER_CHECKSUM_OFFSET] + checksum + text).ljust(layout.epoch_offset, b"\0")


def header_bytes_from_prefix(prefix: bytes) -> int:
    """Bytes of a header, prefix and JSON, given its first ``HEADER_PREFIX_BYTES``.

    Raises:
        FlashFormatError: no flash file, another format version, or an impossible length.
    """
    if len(prefix) < HEADER_PREFIX_BYTES or not prefix.startswith(MAGIC):
        raise FlashFormatError("it does not start with the mark of a flash file")
    _, version, json_bytes, _, _, _ = _HEADER_PREFIX.unpack(prefix)
    if version != FORMAT_VERSION:
        raise FlashFormatError(f"it has format version {version}, and this build reads {FORMAT_VERSION}")
    if json_bytes > MAX_GEOMETRY_JSON_BYTES:
        raise FlashFormatError("its header is damaged")
    return HEADER_PREFIX_BYTES + int(json_bytes)


def unpack_header(raw: bytes) -> FlashHeader:
    """The header from ``header_bytes_from_prefix(raw)`` bytes of a file's start.

    Raises:
        FlashFormatError: it is not a header, or its checksum does not match.
    """
    expected_bytes = header_bytes_from_prefix(raw[:HEADER_PREFIX_BYTES])
    _, _, _, num_slots, size_bytes, checksum = _HEADER_PREFIX.unpack(raw[:HEADER_PREFIX_BYTES])
    text = raw[HEADER_PREFIX_BYTES:expected_bytes]
    if checksum != xxh3_64_intdigest(raw[:_HEADER_CHECKSUM_OFFSET] + text):
        raise FlashFormatError("its header is damaged")
    return FlashHeader(json.loads(text), num_slots, size_bytes)


def describe_geometry_differences(stored: dict[str, Any], geometry: FlashGeometry) -> list[str]:
    """One phrase per field that differs, ``name: stored X, now Y``; empty if all are equal."""
    wanted = dataclasses.asdict(geometry)
    absent = "(absent)"
    return [
        f"{name}: stored {stored.get(name, absent)!r}, now {wanted.get(name, absent)!r}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name, absent) != wanted.get(name, absent)
    ]


def pack_epoch(epoch: int) -> bytes:
    """The epoch page's bytes. ``epoch`` is an unsigned 64-bit number."""
    raw = _CHECKSUM.pack(epoch)
    return raw + _CHECKSUM.pack(xxh3_64_intdigest(raw))


def unpack_epoch(raw: bytes) -> int | None:
    """The epoch, or None if the page is damaged, cut short or never written."""
    if len(raw) < EPOCH_BYTES:
        return None
    epoch, checksum = _EPOCH.unpack(raw[:EPOCH_BYTES])
    return int(epoch) if checksum == xxh3_64_intdigest(raw[:8]) else None


def pack_wear_id(wear_id: str) -> bytes:
    """What follows the epoch. ``wear_id``: 32 hex digits."""
    raw = bytes.fromhex(wear_id)
    return raw + _CHECKSUM.pack(xxh3_64_intdigest(raw))


def unpack_wear_id(raw: bytes) -> str | None:
    """The id of the file's wear ledger, or None if none was written, or it is damaged."""
    if len(raw) < WEAR_ID_BYTES or raw[16:WEAR_ID_BYTES] != _CHECKSUM.pack(xxh3_64_intdigest(raw[:16])):
        return None
    return raw[:16].hex()


def pack_payload_total(total: int) -> bytes:
    """What follows the ledger's id. ``total``: bytes, less than 2**60."""
    return _PAYLOAD_TOTAL.pack(total, total ^ 0xFFFFFFFFFFFFFFFF)


def unpack_payload_total(raw: bytes) -> int | None:
    """Bytes, or None if none were noted, or the note is damaged."""
    if len(raw) < PAYLOAD_TOTAL_BYTES:
        return None
    total, complement = _PAYLOAD_TOTAL.unpack(raw[:PAYLOAD_TOTAL_BYTES])
    return total if total ^ complement == 0xFFFFFFFFFFFFFFFF and total <= _LARGEST_TOTAL else None


def pack_record(slot: int, key: bytes, payload_checksum: int, epoch: int, number: int = 0) -> bytes:
    """A valid record of ``RECORD_BYTES``; it validates only at this slot and under this epoch. ``number``: of the write."""
    body = _RECORD_BODY.pack(key, len(key), STATE_VALID, slot, number, payload_checksum)
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body, epoch))


def payload_checksum_of(record: bytes, key: bytes) -> int | None:
    """The payload checksum of the in-memory record if it is of this key, else None.

    The record's own checksum is not looked at: it was when the record came from the file.
    """
    stored_key, key_length, state, _, _, payload_checksum = _RECORD_BODY.unpack_from(record)
    if state != STATE_VALID or key_length != len(key) or not stored_key.startswith(key):
        return None
    return payload_checksum  # type: ignore[no-any-return]


def valid_slots(table: npt.NDArray[np.void], epoch: int) -> npt.NDArray[np.int64]:
    """The slots of a table, read from a file, whose record is whole, in its place and of ``epoch``.

    O(n): vectorised but for one 56-byte hash per record in use, 1M of them in well under 2 s.
    """
    length = table["key_length"]
    in_use = table["state"] == STATE_VALID
    in_place = table["slot"] == np.arange(len(table), dtype=np.uint32)
    candidates = np.flatnonzero(in_use & in_place & (length >= 1) & (length <= MAX_KEY_BYTES))
    raw = table.view(np.uint8).data
    checksums = np.fromiter(
        (xxh3_64_intdigest(raw[start : start + _RECORD_BODY_BYTES], epoch) for start in (candidates * RECORD_BYTES).tolist()),
        dtype=np.uint64,
        count=len(candidates),
    )
    valid: npt.NDArray[np.int64] = candidates[checksums == table["record_checksum"][candidates]]
    return valid
