# SPDX-License-Identifier: Apache-2.0
"""What the wear tests share: devices with a ledger, and ledgers that are looked at now instead of within a second."""

from pathlib import Path
from typing import Any

import pytest
from flash_testing import GEOMETRY, SIZE, key_of, pages_of, payload_of

from vllm_lifetime.flash import FlashDevice, WearOptions
from vllm_lifetime.flash.wear import WearLedger
from vllm_lifetime.flash.wear_counts import WearCounts
from vllm_lifetime.flash.wear_file import read_wear_file

OPTIONS = WearOptions(erase_block_bytes=65536, endurance_cycles=1000)


def open_worn(path: Path, *, persist: bool = True, wear: WearOptions = OPTIONS) -> FlashDevice:
    """A device whose ledger has no thread: `look` does its work."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WearLedger, "start", lambda _: None)
        return FlashDevice.open(path, GEOMETRY, size_bytes=SIZE, persist=persist, wear=wear)


def write_as(device: FlashDevice, slot: int, segment_class: str, reason: str = "demotion", number: int = 1) -> bool:
    key = key_of(number)
    return device.write(slot, key, pages_of(payload_of(key)), segment_class, reason)


def ledger_of(device: FlashDevice) -> WearLedger:
    assert device.wear is not None
    return device.wear


def look(device: FlashDevice) -> WearLedger:
    """The ledger, with a fresh snapshot and a fresh flush, as its thread would make them."""
    ledger = ledger_of(device)
    ledger._look(float("inf"))
    return ledger


def counts_in(path: Path) -> WearCounts:
    """What the ledger's file beside a flash file says."""
    return read_wear_file(f"{path}.wear")[1]


def payload(counts: WearCounts | Any) -> dict[tuple[str, str], int]:
    """Bytes by class and reason, without the overhead."""
    return {key: entry[1] for key, entry in counts.written.items() if key[0] != "overhead"}
