# SPDX-License-Identifier: Apache-2.0
"""The wear ledger of a flash file that has just been opened: found, or begun, and named in the file."""

import logging

from vllm_lifetime.flash.layout import EPOCH_BYTES, PAYLOAD_TOTAL_BYTES, WEAR_ID_BYTES
from vllm_lifetime.flash.storage import FlashFile, write_wear_id
from vllm_lifetime.flash.wear import WearLedger, WearOptions
from vllm_lifetime.flash.wear_counts import WriteReason

__all__ = ["open_ledger"]

logger = logging.getLogger("vllm_lifetime.flash")


def open_ledger(path: str, file: FlashFile, options: WearOptions) -> WearLedger:
    """The ledger of the flash file at `path`, which gets its id if it has another. It is not started. Blocks for a few small IOs.

    Raises:
        FlashFormatError: see `WearLedger.open`.
    """
    layout = file.layout
    ledger = WearLedger.open(path, layout.size_bytes, options, file.trace)
    if file.is_new:
        ledger.note_overhead(0, layout.epoch_offset + EPOCH_BYTES, WriteReason.HEADER)
    if file.is_new or file.trace.wear_id != ledger.header.wear_id:
        try:
            write_wear_id(file.file_descriptor, layout, ledger.header.wear_id, ledger.snapshot.payload_bytes)
            length = WEAR_ID_BYTES + PAYLOAD_TOTAL_BYTES
            ledger.note_overhead(layout.epoch_offset + EPOCH_BYTES, length, WriteReason.HEADER)
        except OSError as error:
            logger.warning("The flash file %s does not take the id of its wear ledger: %s.", path, error.strerror)
    return ledger
