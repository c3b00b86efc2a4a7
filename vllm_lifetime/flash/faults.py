# SPDX-License-Identifier: Apache-2.0
"""What a device does about a fault: count it, and log the first of each kind. Any thread."""

import errno
import logging
import threading

from vllm_lifetime.flash.counters import FlashCounters

__all__ = ["FlashFaults", "errno_name"]

logger = logging.getLogger("vllm_lifetime.flash")


def errno_name(error: OSError) -> str:
    """``ENOSPC`` for an error that carries that number; the number itself if it has no name."""
    return errno.errorcode.get(error.errno or 0, str(error.errno))


class FlashFaults:
    """The faults of one device. Methods never raise; O(1)."""

    def __init__(self, path: str, counters: FlashCounters) -> None:
        """Faults of the file at ``path``, counted in ``counters``."""
        self._path = path
        self._counters = counters
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def write_failed(self, error: OSError) -> None:
        """A slot could not be written. An error without an errno is a short write."""
        kind = "SHORT_WRITE" if error.errno is None else errno_name(error)
        self._counters.count_write_error(kind)
        self._log_once(f"writing failed ({error.strerror or kind}); such blocks are not kept", kind)

    def read_failed(self, error: OSError) -> None:
        """A slot could not be read."""
        kind = errno_name(error)
        self._counters.count_read_error(kind)
        self._log_once(f"reading failed ({error.strerror}); such blocks are recomputed", kind)

    def read_short(self) -> None:
        """The file ended inside a slot."""
        self._counters.count_short_read()
        self._log_once("it was cut from outside; blocks that are missing are recomputed")

    def payload_mismatch(self) -> None:
        """A slot's payload did not match its record."""
        self._counters.count_checksum_failure()
        self._log_once("a block does not match its checksum: it is damaged, or its write was cut off; such blocks are recomputed")

    def withdraw_failed(self, error: OSError) -> None:
        """A record could not be withdrawn in the file."""
        kind = "SHORT_WRITE" if error.errno is None else errno_name(error)
        self._counters.count_record_error(kind)
        self._log_once(f"withdrawing a record failed ({error.strerror or kind})", kind)

    def clear_failed(self, error: OSError) -> None:
        """The file could not be told to forget its records."""
        kind = errno_name(error)
        self._counters.count_record_error(kind)
        self._log_once(f"clearing failed ({error.strerror}), so it is removed and not kept", kind)

    def _log_once(self, text: str, kind: str = "") -> None:
        # The text tells the operation, the kind tells errors apart whose texts are equal.
        with self._lock:
            if text + kind in self._logged:
                return
            self._logged.add(text + kind)
        logger.warning("Flash file %s: %s. This is logged once; the counters go on.", self._path, text)
