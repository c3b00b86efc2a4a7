# SPDX-License-Identifier: Apache-2.0
"""The emulated flash device: one file of checksummed slots. See `FlashDevice`."""

from vllm_lifetime.flash.counters import FlashCounters, FlashCounterValues
from vllm_lifetime.flash.device import FlashDevice, ReadOutcome
from vllm_lifetime.flash.errors import (
    FlashError,
    FlashFormatError,
    FlashGeometryError,
    FlashPathError,
    FlashSpaceError,
    FlashUnavailableError,
)
from vllm_lifetime.flash.layout import FlashGeometry
from vllm_lifetime.flash.wear import WearOptions

__all__ = [
    "FlashCounterValues",
    "FlashCounters",
    "FlashDevice",
    "FlashError",
    "FlashFormatError",
    "FlashGeometry",
    "FlashGeometryError",
    "FlashPathError",
    "FlashSpaceError",
    "FlashUnavailableError",
    "ReadOutcome",
    "WearOptions",
]
