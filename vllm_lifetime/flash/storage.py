# SPDX-License-Identifier: Apache-2.0
"""Opening a flash file: checks, lock, reservation of every block, header and epoch.

All of it runs once, on the thread that opens the device, and raises `FlashError`s. A file of ours
is known by its mark; nothing else at the path is ever written to.
"""

import errno
import fcntl
import logging
import os
import secrets
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_lifetime.flash.errors import (
    FlashError,
    FlashFormatError,
    FlashGeometryError,
    FlashPathError,
    FlashSpaceError,
    FlashUnavailableError,
)
from vllm_lifetime.flash.faults import errno_name
from vllm_lifetime.flash.layout import (
    EPOCH_BYTES,
    HEADER_PREFIX_BYTES,
    MAGIC,
    PAYLOAD_TOTAL_BYTES,
    WEAR_ID_BYTES,
    FlashGeometry,
    FlashHeader,
    FlashLayout,
    describe_geometry_differences,
    header_bytes_from_prefix,
    pack_epoch,
    pack_header,
    pack_payload_total,
    pack_wear_id,
    unpack_epoch,
    unpack_header,
    unpack_payload_total,
    unpack_wear_id,
)
from vllm_lifetime.flash.records import empty_table, recover_table
from vllm_lifetime.flash.wear import FlashTrace

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["FlashFile", "new_epoch", "open_flash_file", "remove_file", "write_epoch", "write_wear_id"]

logger = logging.getLogger("vllm_lifetime.flash")

_FILE_MODE = 0o600
_OPEN_ATTEMPTS = 10
_DELETE_OR_MOVE = "Delete the file or give the flash tier another path."


@dataclass(frozen=True, slots=True, eq=False)
class FlashFile:
    """An open, locked and fully reserved file.

    Attributes:
        file_descriptor: open for reading and writing; holds the lock until it is closed.
        layout: where everything lies in the file.
        epoch: the number that valid records are signed with.
        table: one `RECORD_DTYPE` record per slot, all of them valid or empty.
        recovered_slots: the slots whose records an earlier process left; ascending.
        is_created: whether there was no file before.
        is_new: whether the header was written just now.
        trace: what an earlier process left, for the wear ledger; also if its blocks are not kept.
    """

    file_descriptor: int
    layout: FlashLayout
    epoch: int
    table: npt.NDArray[np.void]
    recovered_slots: npt.NDArray[np.int64]
    is_created: bool
    is_new: bool
    trace: FlashTrace


def open_flash_file(path: str, geometry: FlashGeometry, *, size_bytes: int, persist: bool) -> FlashFile:
    """Opens or creates the file at ``path`` and reserves all of its blocks.

    With ``persist`` an existing file of equal geometry and size is kept; without, it is emptied.

    Raises:
        FlashPathError: the path is unusable.
        FlashUnavailableError: another process holds the file.
        FlashFormatError: the path holds something else, or a damaged flash file.
        FlashGeometryError: the file was written with another geometry.
        FlashSpaceError: no slot fits, the size has changed, or the disk is too full.
    """
    layout = FlashLayout.plan(geometry, size_bytes)
    file_descriptor, created = _open_locked(path)
    try:
        if not created:
            _check_mark(path, file_descriptor)
        reopened = persist and not created
        epoch = None
        trace = FlashTrace() if created or reopened else _trace_before(file_descriptor)
        if reopened:
            _check_header(path, file_descriptor, layout)
            epoch = unpack_epoch(os.pread(file_descriptor, EPOCH_BYTES, layout.epoch_offset))
        else:
            # Before the blocks are reserved: a process killed in between leaves a file that is
            # known as ours, and the next open reserves the rest.
            _write_durably(file_descriptor, pack_header(layout), 0)
        if epoch is None:
            epoch = new_epoch()
            write_epoch(file_descriptor, layout, epoch)
        os.fchmod(file_descriptor, _FILE_MODE)
        _reserve(path, file_descriptor, size_bytes, keep=reopened)
        if reopened:
            table, recovered_slots = recover_table(file_descriptor, layout, epoch)
            trace = _trace_of(file_descriptor, layout, table, recovered_slots)
        else:
            table, recovered_slots = empty_table(layout.num_slots), np.empty(0, np.int64)
        return FlashFile(file_descriptor, layout, epoch, table, recovered_slots, created, not reopened, trace)
    except BaseException as error:
        if created or (isinstance(error, FlashSpaceError) and not persist):
            remove_file(path, file_descriptor)
        os.close(file_descriptor)
        if isinstance(error, OSError):
            raise _path_error(path, error) from error
        raise


def new_epoch() -> int:
    """A number that no earlier record of any file was signed with."""
    return secrets.randbits(64)


def write_epoch(file_descriptor: int, layout: FlashLayout, epoch: int) -> None:
    """Makes ``epoch`` the file's epoch, which forgets every record in it that has another.

    Durable when it returns: after a power loss the forgotten records must stay forgotten.

    Raises:
        OSError: it could not be written.
    """
    _write_durably(file_descriptor, pack_epoch(epoch), layout.epoch_offset)


def write_wear_id(file_descriptor: int, layout: FlashLayout, wear_id: str, payload_bytes: int) -> None:
    """Says in the file which wear ledger is its own, and how many bytes of KV it has counted.

    Raises:
        OSError: it could not be written.
    """
    note = pack_wear_id(wear_id) + pack_payload_total(payload_bytes)
    _write_durably(file_descriptor, note, layout.epoch_offset + EPOCH_BYTES)


def _trace_of(file_descriptor: int, layout: FlashLayout, table: npt.NDArray[np.void], slots: npt.NDArray[np.int64]) -> FlashTrace:
    numbers = table["number"][slots]
    has_number = numbers != 0
    note = os.pread(file_descriptor, WEAR_ID_BYTES + PAYLOAD_TOTAL_BYTES, layout.epoch_offset + EPOCH_BYTES)
    return FlashTrace(
        wear_id=unpack_wear_id(note),
        payload_total=unpack_payload_total(note[WEAR_ID_BYTES:]),
        offsets=layout.payload_offset + slots[has_number] * layout.slot_stride,
        numbers=numbers[has_number].astype(np.int64),
        payload_bytes=layout.geometry.slot_bytes,
    )


def _trace_before(file_descriptor: int) -> FlashTrace:
    """What is in a file that is about to be emptied, whatever its geometry; nothing if that cannot be told."""
    try:
        prefix = os.pread(file_descriptor, HEADER_PREFIX_BYTES, 0)
        header = unpack_header(os.pread(file_descriptor, header_bytes_from_prefix(prefix), 0))
        layout = FlashLayout.plan(FlashGeometry(**header.geometry), header.size_bytes)
        epoch = unpack_epoch(os.pread(file_descriptor, EPOCH_BYTES, layout.epoch_offset))
        if epoch is None:
            return FlashTrace()
        return _trace_of(file_descriptor, layout, *recover_table(file_descriptor, layout, epoch))
    except (OSError, FlashError, TypeError, ValueError, MemoryError):
        return FlashTrace()


def remove_file(path: str, file_descriptor: int) -> None:
    """Removes ``path`` if it still is the open file; a failure is logged, never raised."""
    try:
        if os.path.samestat(os.stat(path), os.fstat(file_descriptor)):
            os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("The flash file %s could not be removed: %s.", path, error.strerror)


def _write_durably(file_descriptor: int, data: "ReadableBuffer", offset: int) -> None:
    # RWF_DSYNC flushes this range only; fsync would wait for gigabytes of payload.
    written = os.pwritev(file_descriptor, [data], offset, os.RWF_DSYNC)
    if written != memoryview(data).nbytes:
        raise OSError(errno.EIO, "short write")


def _open_locked(path: str) -> tuple[int, bool]:
    """Opens and locks the file, creating it if there is none: (descriptor, created)."""
    for _ in range(_OPEN_ATTEMPTS):
        try:
            try:
                # Looked at before it is opened, because opening a device node may have effects.
                if not stat.S_ISREG(os.stat(path).st_mode):
                    raise FlashPathError(
                        f"The flash path {path} exists and is not a regular file. "
                        "Give the path of a file inside a directory on the flash drive."
                    )
                file_descriptor, created = os.open(path, os.O_RDWR), False
            except FileNotFoundError:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
                file_descriptor, created = os.open(path, flags, _FILE_MODE), True
        except FileExistsError:
            continue  # made by another process in between, or a dangling link
        except OSError as error:
            raise _path_error(path, error) from error
        try:
            fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path), os.fstat(file_descriptor)):
                return file_descriptor, created
        except FileNotFoundError:
            pass  # its last owner removed it between our open and our lock
        except BlockingIOError:
            os.close(file_descriptor)
            raise FlashUnavailableError(
                f"The flash file {path} is in use by another process or device. "
                "Give each worker its own path, or stop the other process first."
            ) from None
        except OSError as error:
            os.close(file_descriptor)
            raise _path_error(path, error) from error
        os.close(file_descriptor)
    raise FlashUnavailableError(
        f"The flash path {path} could not be claimed in {_OPEN_ATTEMPTS} attempts: other processes "
        "keep replacing it, or it is a symbolic link to nothing. Give the flash tier another path."
    )


def _check_mark(path: str, file_descriptor: int) -> None:
    start = os.pread(file_descriptor, len(MAGIC), 0)
    if start != MAGIC:
        what = "is empty" if not start else "was not written by vllm-lifetime"
        raise FlashFormatError(f"The file {path} exists and {what}, so it is left untouched. {_DELETE_OR_MOVE}")


def _read_header(path: str, file_descriptor: int) -> FlashHeader:
    try:
        prefix = os.pread(file_descriptor, HEADER_PREFIX_BYTES, 0)
        return unpack_header(os.pread(file_descriptor, header_bytes_from_prefix(prefix), 0))
    except FlashFormatError as error:
        raise FlashFormatError(f"The flash file {path} cannot be reused: {error}. {_DELETE_OR_MOVE}") from None


def _check_header(path: str, file_descriptor: int, layout: FlashLayout) -> None:
    header = _read_header(path, file_descriptor)
    differences = describe_geometry_differences(header.geometry, layout.geometry)
    if differences:
        raise FlashGeometryError(
            f"The flash file {path} was written with another geometry, so its blocks cannot be "
            f"read: {'; '.join(differences)}. {_DELETE_OR_MOVE}"
        )
    if header.size_bytes != layout.size_bytes or header.num_slots != layout.num_slots:
        raise FlashSpaceError(
            f"The flash file {path} has {header.size_bytes} bytes ({header.num_slots} slots), and "
            f"{layout.size_bytes} bytes ({layout.num_slots} slots) are asked for now. Ask for the "
            f"stored size to keep its blocks. Otherwise: {_DELETE_OR_MOVE[0].lower()}"
            f"{_DELETE_OR_MOVE[1:]}"
        )


def _reserve(path: str, file_descriptor: int, size_bytes: int, *, keep: bool) -> None:
    """Gives the file its size and a block for every byte, so that no later write finds it full."""
    size_now = os.fstat(file_descriptor).st_size
    if keep and size_now != size_bytes:
        # Cut from outside, or killed while it was created. What is missing reads as zeros and
        # fails its checksum, so the rest of the file can be kept.
        logger.warning(
            "The flash file %s has %d bytes instead of %d; blocks that are missing are dropped.",
            path,
            size_now,
            size_bytes,
        )
    if size_now > size_bytes:
        os.ftruncate(file_descriptor, size_bytes)
    try:
        os.posix_fallocate(file_descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        # Give back what was reserved before it failed, and only then see what there is.
        os.ftruncate(file_descriptor, min(size_now, size_bytes) if keep else 0)
        space = os.fstatvfs(file_descriptor)
        held = os.fstat(file_descriptor).st_blocks * 512
        limit = {
            errno.ENOSPC: "its file system is too full",
            errno.EDQUOT: "its disk quota does not allow that",
            errno.EFBIG: "its file system or the process's file size limit does not allow that",
        }[error.errno]
        raise FlashSpaceError(
            f"The flash file {path} needs {size_bytes} bytes and {limit}: "
            f"{space.f_bavail * space.f_frsize + held} bytes are available. Ask for a smaller flash "
            "tier, free space, or give a path on a larger drive."
        ) from error


def _path_error(path: str, error: OSError) -> FlashError:
    directory = os.path.dirname(os.path.abspath(path))
    match error.errno:
        case errno.ENOENT:
            text = f"the directory {directory} does not exist. Create it or give another path."
        case errno.ENOTDIR:
            text = f"a part of {directory} is not a directory. Give another path."
        case errno.EACCES | errno.EPERM:
            text = (
                f"permission denied for user {os.geteuid()}. Make {directory} and the file "
                "writable for the server's user or give another path."
            )
        case errno.EROFS:
            text = "its file system is mounted read-only. Remount it writable or give another path."
        case errno.ENOSPC | errno.EDQUOT:
            text = "its file system is full. Free space or give a path on another drive."
        case _:
            text = f"{error.strerror} ({errno_name(error)}). Give a path on a local file system that supports reserving space."
    return FlashPathError(f"The flash file {path} cannot be opened: {text}")
