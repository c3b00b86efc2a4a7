# SPDX-License-Identifier: Apache-2.0
"""Damage, full disks, broken disks, cut files and killed processes: a miss, never wrong data."""

import contextlib
import errno
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import flash_testing as ft
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_lifetime.flash import FlashDevice, FlashPathError, FlashSpaceError, ReadOutcome

KEYS = [ft.key_of(number) for number in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.flash"


def write_three(path: Path) -> ft.ClosedFile:
    path.unlink(missing_ok=True)
    with ft.open_device(path) as device:
        assert all(ft.write(device, slot, key) for slot, key in enumerate(KEYS))
    return ft.ClosedFile(path)


def hits_after_reopen(path: Path) -> list[bool]:
    with ft.open_device(path) as device:
        return [ft.hits(device, slot, key) for slot, key in enumerate(KEYS)]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, ft.SLOT_BYTES - 1), bit=st.integers(0, 7))
def test_bit_flip_in_payload_misses(tmp_path: Path, offset: int, bit: int) -> None:
    path = tmp_path / "flip.flash"
    file = write_three(path)
    file.flip(file.payload_range(1).start + offset, 1 << bit)
    with ft.open_device(path) as device:
        assert ft.read(device, 1, KEYS[1])[0] is ReadOutcome.CHECKSUM_MISMATCH
        assert ft.read(device, 1, KEYS[1])[0] is ReadOutcome.KEY_MISMATCH  # it was withdrawn
        assert device.counters.snapshot().checksum_failures == 1
    assert hits_after_reopen(path) == [True, False, True]


def test_flip_of_any_record_byte_misses(path: Path) -> None:
    file = write_three(path)
    good = path.read_bytes()
    for offset in range(64):
        path.write_bytes(good)
        file.flip(file.record_range(1).start + offset, 1 << offset % 8)
        with ft.open_device(path) as device:
            assert device.recovered() == [(0, KEYS[0]), (2, KEYS[2])]
            assert not ft.hits(device, 1, KEYS[1])


@pytest.mark.parametrize("what", [("payload",), ("record",), ("payload", "record")])
def test_swapped_slots_miss(path: Path, what: tuple[str, ...]) -> None:
    file = write_three(path)
    if "payload" in what:
        file.swap(file.payload_range(0), file.payload_range(1))
    if "record" in what:
        file.swap(file.record_range(0), file.record_range(1))
    with ft.open_device(path) as device:
        for slot in (0, 1):
            assert not any(ft.hits(device, slot, key) for key in KEYS)
        assert ft.hits(device, 2, KEYS[2])


def test_swapped_payloads_miss_while_open(path: Path) -> None:
    with ft.open_device(path) as device:
        assert all(ft.write(device, slot, key) for slot, key in enumerate(KEYS))
        file = ft.ClosedFile(path)
        file.swap(file.payload_range(0), file.payload_range(1))
        assert [ft.hits(device, s, key) for s, key in enumerate(KEYS)] == [False, False, True]


def test_payload_checksum_is_bound_to_its_key(path: Path) -> None:
    """A checksum of the bytes alone would let one key's payload pass under another's record."""
    with ft.open_device(path) as device:
        same = ft.pages_of(ft.payload_of(b"same"))
        device.write(0, b"a", same)
        device.write(1, b"b", same)
    records = ft.ClosedFile(path)
    with records.bytes() as contents:
        first, second = (contents[records.record_range(slot)][48:56].tolist() for slot in (0, 1))
    assert first != second


def test_forged_record_hits(path: Path) -> None:
    """Zeros with a matching record do hit: nothing but the checks stands in their way."""
    file = write_three(path)
    with file.bytes() as contents:
        contents[file.payload_range(1)] = 0
    file.forge_record(1)
    with ft.open_device(path) as device:
        outcome, data = ft.read(device, 1, KEYS[1])
        assert outcome is ReadOutcome.HIT
        assert not data.any()


def test_zeroed_payload_misses(path: Path) -> None:
    file = write_three(path)
    with file.bytes() as contents:
        contents[file.payload_range(1)] = 0
    assert hits_after_reopen(path) == [True, False, True]


def test_truncated_while_open(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ft.open_device(path) as device:
        assert all(ft.write(device, slot, key) for slot, key in enumerate(KEYS))
        start = ft.ClosedFile(path).payload_range(1).start
        for length in (start + 5000, start, 0):
            os.truncate(path, length)
            assert ft.read(device, 1, KEYS[1])[0] is ReadOutcome.SHORT_READ
        assert device.counters.snapshot().short_reads == 3
        assert ft.write(device, 1, KEYS[1]) and ft.hits(device, 1, KEYS[1])
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(path) in caplog.text


def test_truncated_before_reopen_keeps_what_is_left(path: Path) -> None:
    file = write_three(path)
    os.truncate(path, file.payload_range(1).start + 100)
    assert hits_after_reopen(path) == [True, False, False]
    assert path.stat().st_size == ft.SIZE
    os.truncate(path, file.record_range(1).start + 10)
    with ft.open_device(path) as device:
        assert device.recovered() == [(0, KEYS[0])]
        assert not ft.hits(device, 0, KEYS[0])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_write_error_is_a_failed_outcome(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    real_write = os.pwritev
    file = write_three(path)
    payload_start = file.layout.payload_offset

    def failing(descriptor: int, buffers: list, offset: int, *flags: int) -> int:
        if offset >= payload_start:
            real_write(descriptor, [bytes(memoryview(buffers[0]).cast("B")[:100])], offset)
            raise OSError(number, os.strerror(number))
        return real_write(descriptor, buffers, offset, *flags)

    with ft.open_device(path) as device:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing)
            assert not ft.write(device, 0, ft.key_of(70))
            assert not ft.write(device, 1, KEYS[1])
        assert [ft.hits(device, slot, key) for slot, key in enumerate(KEYS)] == [False, False, True]
        assert not ft.hits(device, 0, ft.key_of(70))
        assert device.counters.snapshot().write_errors == {errno.errorcode[number]: 2}
        assert device.counters.snapshot().writes == 0
        assert len(caplog.records) == 1 and caplog.records[0].name == "vllm_lifetime.flash"
    with ft.open_device(path) as device:
        assert device.recovered() == [(2, KEYS[2])]


def test_record_that_cannot_be_written_is_no_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.pwritev
    file = write_three(path)

    def failing(descriptor: int, buffers: list, offset: int, *flags: int) -> int:
        if offset < file.layout.payload_offset:
            raise OSError(errno.EIO, "broken")
        return real_write(descriptor, buffers, offset, *flags)

    with ft.open_device(path) as device:
        monkeypatch.setattr(os, "pwritev", failing)
        assert not ft.write(device, 0, ft.key_of(70))
        device.invalidate([1])
        counters = device.counters.snapshot()
        assert counters.write_errors == {"EIO": 1}
        assert counters.record_errors == {"EIO": 2}
        monkeypatch.undo()
    # Slot 0: new payload beside the old record. Slot 1: the file was never told; its data is right.
    assert hits_after_reopen(path) == [False, True, True]


def test_clear_that_cannot_be_written_removes_the_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    with ft.open_device(path) as device:
        ft.write(device, 0, KEYS[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", failing)
            device.clear()
        assert not path.exists()
        assert not ft.hits(device, 0, KEYS[0])
        assert ft.write(device, 0, KEYS[0]) and ft.hits(device, 0, KEYS[0])
    assert not path.exists()


def test_read_error_is_a_failed_outcome(path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    with ft.open_device(path) as device:
        ft.write(device, 0, KEYS[0])
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing)
            assert ft.read(device, 0, KEYS[0])[0] is ReadOutcome.IO_ERROR
            assert ft.read(device, 0, KEYS[0])[0] is ReadOutcome.IO_ERROR
        assert device.counters.snapshot().read_errors == {"EIO": 2}
        assert len(caplog.records) == 1
        assert ft.hits(device, 0, KEYS[0])  # it may have passed


def test_partial_transfers_are_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwritev, os.preadv

    def some(buffers: list, limit: int = 1111) -> list[memoryview]:
        part = []
        for buffer in buffers:
            view = memoryview(buffer).cast("B")[:limit]
            part.append(view)
            limit -= len(view)
        return part

    with ft.open_device(path) as device:
        monkeypatch.setattr(os, "pwritev", lambda fd, b, at, *f: real_write(fd, some(b), at, *f))
        monkeypatch.setattr(os, "preadv", lambda fd, b, at: real_read(fd, some(b), at))
        assert ft.write(device, 0, KEYS[0]) and ft.hits(device, 0, KEYS[0])
        monkeypatch.setattr(os, "pwritev", lambda *_: 0)
        assert not ft.write(device, 0, KEYS[0])
        assert device.counters.snapshot().write_errors == {"SHORT_WRITE": 1}


def test_kernel_refuses_writes_in_mid_use(path: Path) -> None:
    """A real EFBIG: the process's file size limit drops to the middle of the payload area."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with ft.open_device(path) as device:
        assert all(ft.write(device, slot, key) for slot, key in enumerate(KEYS))
        limit = ft.ClosedFile(path).payload_range(1).start + 4096
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            results = [ft.write(device, slot, ft.key_of(70 + slot)) for slot in range(3)]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert results == [True, False, False]
        assert device.counters.snapshot().write_errors == {"EFBIG": 2}
        assert ft.hits(device, 0, ft.key_of(70))
        assert not any(ft.hits(device, slot, KEYS[slot]) for slot in range(3))


@contextlib.contextmanager
def small_tmpfs(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
        ).returncode
    )
    if not mounted:
        pytest.skip("needs to mount a tmpfs")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_too_small_file_system_refuses_at_open(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", 1 << 20) as folder:
        path = folder / "kv.flash"
        for persist in (True, False):
            with pytest.raises(FlashSpaceError, match=r"needs 2097152 bytes.*1048576 bytes are avail"):
                ft.open_device(path, size=2 << 20, persist=persist)
            assert list(folder.iterdir()) == []
        with ft.open_device(path, size=1 << 20) as device:
            assert ft.write(device, 0, KEYS[0]) and ft.hits(device, 0, KEYS[0])


def test_full_file_system_in_mid_use(tmp_path: Path) -> None:
    """A real ENOSPC: the file's blocks are punched out from outside and given to another file."""
    with small_tmpfs(tmp_path / "small", 1 << 20) as folder:
        path = folder / "kv.flash"
        with ft.open_device(path, size=1 << 20) as device:
            assert all(ft.write(device, slot, key) for slot, key in enumerate(KEYS))
            start = ft.ClosedFile(path, 1 << 20).payload_range(1).start
            punched = subprocess.run(["fallocate", "--punch-hole", "-o", str(start), "-l", str(2 * ft.SLOT_BYTES), path])
            if punched.returncode:
                pytest.skip("needs to punch holes")
            (folder / "hog").write_bytes(bytes(2 * ft.SLOT_BYTES))
            assert [ft.hits(device, s, key) for s, key in enumerate(KEYS)] == [True, False, False]
            assert [ft.write(device, s, key) for s, key in enumerate(KEYS)] == [True, False, False]
            assert device.counters.snapshot().write_errors == {"ENOSPC": 2}
            (folder / "hog").unlink()
            assert ft.write(device, 1, KEYS[1]) and ft.hits(device, 1, KEYS[1])


def test_read_only_file_system_at_open_and_in_mid_use(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small", 1 << 20) as folder:
        path = folder / "kv.flash"
        with ft.open_device(path) as device:
            assert ft.write(device, 0, KEYS[0])
            remount = ["mount", "-o", "remount,ro", str(folder)]
            refused = subprocess.run(remount, capture_output=True).returncode
            if not refused:  # Linux usually refuses: the file is open for writing
                assert not ft.write(device, 1, KEYS[1])
                assert device.counters.snapshot().write_errors == {"EROFS": 1}
        if refused:
            subprocess.run(remount, check=True)
        for persist in (True, False):
            with pytest.raises(FlashPathError, match=r"mounted read-only\. Remount it"):
                ft.open_device(path, persist=persist)
        assert path.exists()


WRITER = """
import itertools, sys
from pathlib import Path
import flash_testing as ft
device = ft.open_device(Path(sys.argv[1]), size=8 << 20, slot_bytes=1 << 20)
keys = [ft.key_of(number) for number in range(12)]
pages = {key: [ft.payload_of(key, 1 << 20)] for key in keys}
print("ready", flush=True)
for turn in itertools.count():
    device.write(turn % device.num_slots, keys[turn % 12], pages[keys[turn % 12]])
    if turn % 13 == 0:
        device.invalidate([turn // 13 % device.num_slots])
"""


def test_kill_in_mid_write(path: Path) -> None:
    generator = random.Random(5)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    seen_hits = 0
    for _ in range(12):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            cwd=Path(ft.__file__).parent,
            env=environment,
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        time.sleep(generator.uniform(0, 0.05))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with ft.open_device(path, size=8 << 20, slot_bytes=1 << 20) as device:
            recovered = device.recovered()
            hits = sum(reads_whole(device, slot, key) for slot, key in recovered)
            # Only the slot that was being written may have lost its payload.
            assert hits >= len(recovered) - 1
            seen_hits += hits
    assert seen_hits > 12


def reads_whole(device: FlashDevice, slot: int, key: bytes) -> bool:
    target = np.zeros(1 << 20, np.uint8)
    if not device.read(slot, key, [target]).hit:
        return False
    np.testing.assert_array_equal(target, ft.payload_of(key, 1 << 20))
    return True
