# SPDX-License-Identifier: Apache-2.0
"""What can go wrong when a flash file is opened.

Only opening raises these. Once a device is open, IO faults are counted, logged once per kind and
returned as failed outcomes, because a lost block costs a recomputation and must not stop a worker.
"""

__all__ = [
    "FlashError",
    "FlashFormatError",
    "FlashGeometryError",
    "FlashPathError",
    "FlashSpaceError",
    "FlashUnavailableError",
]


class FlashError(ValueError):
    """A flash file cannot be used. The text says what, with which value, and what to change."""


class FlashPathError(FlashError):
    """The path cannot hold a flash file: missing directory, no permission, not a regular file."""


class FlashUnavailableError(FlashError):
    """Another process, or another device of this process, holds the file's lock."""


class FlashSpaceError(FlashError):
    """The size holds no slot, or the file system cannot reserve that many bytes."""


class FlashFormatError(FlashError):
    """The path holds something that is not a flash file, or a flash file that is damaged."""


class FlashGeometryError(FlashError):
    """The geometry is impossible, or it differs from the one that the file was written with."""
