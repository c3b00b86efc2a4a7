# SPDX-License-Identifier: Apache-2.0
"""The wear ledger beside a device: it counts what is written, over restarts, kills and faults."""

import errno
import os
import shutil
import time
from pathlib import Path

import pytest
from flash_testing import GEOMETRY, SIZE, SLOT_BYTES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wear_testing import counts_in, ledger_of, look, open_worn, payload, write_as

from vllm_lifetime.flash import FlashDevice, FlashFormatError, WearOptions, wear
from vllm_lifetime.flash.layout import FlashLayout
from vllm_lifetime.flash.wear_figures import wear_figures

CLASSES = ("shared", "lead", "worker", "unknown")
LAYOUT = FlashLayout.plan(GEOMETRY, SIZE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "flash.kv"


def kill(device: FlashDevice) -> None:
    """What kill -9 leaves: nothing more is written, and the lock is gone."""
    ledger_of(device)._may_write = False
    os.close(device._file_descriptor)


def test_bytes_are_counted_by_class_and_reason(path: Path) -> None:
    with open_worn(path) as device:
        write_as(device, 0, "lead")
        write_as(device, 1, "lead", "move")
        write_as(device, 1, "worker", "move")
    assert payload(counts_in(path)) == {
        ("lead", "demotion"): SLOT_BYTES,
        ("lead", "move"): SLOT_BYTES,
        ("worker", "move"): SLOT_BYTES,
    }


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_classes_add_up_to_what_the_device_wrote(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever is written, withdrawn, cleared and opened again: the sum over classes and reasons is that of all writes."""
    path = tmp_path_factory.mktemp("wear") / "flash.kv"
    slot = st.integers(0, LAYOUT.num_slots - 1)
    action = st.one_of(
        st.tuples(st.just("write"), slot, st.sampled_from(CLASSES), st.sampled_from(["demotion", "move"])),
        st.tuples(st.just("invalidate"), st.lists(slot, max_size=4)),
        st.tuples(st.just("clear")),
        st.tuples(st.just("reopen"), st.booleans()),
    )
    real_pwritev = os.pwritev
    seen = 0

    def pwritev(descriptor, buffers, *arguments):  # type: ignore[no-untyped-def]
        nonlocal seen
        count = real_pwritev(descriptor, buffers, *arguments)
        seen += count
        return count

    expected: dict[tuple[str, str], int] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", pwritev)
        device = open_worn(path)
        for name, *arguments in data.draw(st.lists(action, max_size=20)):
            if name == "write":
                assert write_as(device, *arguments)
                key = (arguments[1], arguments[2])
                expected[key] = expected.get(key, 0) + SLOT_BYTES
            elif name == "invalidate":
                device.invalidate(*arguments)
            elif name == "clear":
                device.clear()
            else:
                device.close()
                device = open_worn(path, persist=arguments[0])
        device.close()
    counts = counts_in(path)
    assert payload(counts) == expected
    assert counts.payload_bytes == sum(expected.values())
    ledger_bytes = counts.written.get(("overhead", "ledger"), [0, 0])[1]
    assert counts.written_bytes - ledger_bytes == seen


def test_two_lives_add_up(path: Path) -> None:
    for persist in (True, False, True):
        with open_worn(path, persist=persist) as device:
            write_as(device, 3, "shared")
    assert payload(counts_in(path)) == {("shared", "demotion"): 3 * SLOT_BYTES}


def test_what_a_killed_process_had_not_flushed_is_found_in_the_flash_file(path: Path) -> None:
    """All of it: also blocks that have been overwritten since, and whether or not the file's blocks are kept."""
    device = open_worn(path)
    write_as(device, 0, "lead")
    look(device)
    device.wear._may_write = False  # type: ignore[union-attr]
    for slot in (1, 2, 2, 2, 3):
        write_as(device, slot, "worker")
    kill(device)
    assert counts_in(path).payload_bytes == SLOT_BYTES
    with open_worn(path, persist=False):
        pass
    assert payload(counts_in(path)) == {("lead", "demotion"): SLOT_BYTES, ("unknown", "unrecorded"): 5 * SLOT_BYTES}


def test_a_flushed_write_is_not_found_again(path: Path) -> None:
    for _ in range(3):
        device = open_worn(path)
        write_as(device, 0, "lead")
        look(device)
        kill(device)
    assert payload(counts_in(path)) == {("lead", "demotion"): 3 * SLOT_BYTES}


def test_numbers_go_round(path: Path) -> None:
    """After 2**32 - 1 writes they begin again at 1."""
    device = open_worn(path)
    ledger_of(device)._counts.sequence = 0xFFFFFFFE
    look(device)
    device.wear._may_write = False  # type: ignore[union-attr]
    for slot in (0, 1, 2):
        write_as(device, slot, "lead")
    kill(device)
    with open_worn(path) as device:
        assert ledger_of(device)._counts.sequence == 2
    assert payload(counts_in(path)) == {("unknown", "unrecorded"): 3 * SLOT_BYTES}


def test_a_deleted_ledger_begins_at_zero(path: Path) -> None:
    with open_worn(path) as device:
        write_as(device, 0, "lead")
    os.unlink(f"{path}.wear")
    with open_worn(path) as device:
        write_as(device, 1, "worker")
    assert payload(counts_in(path)) == {("worker", "demotion"): SLOT_BYTES}


def test_a_file_of_an_earlier_build_gets_a_ledger(path: Path) -> None:
    """Records without a number, and no id: nothing is lost from the file, and nothing counted that nobody saw."""
    with FlashDevice.open(path, GEOMETRY, size_bytes=SIZE, persist=True) as device:
        write_as(device, 0, "lead")
    with open_worn(path) as device:
        assert [slot for slot, _ in device.recovered()] == [0]
        assert payload(ledger_of(device)._counts) == {}


def test_another_files_ledger_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.kv"
    for each in (path, other):
        with open_worn(each) as device:
            write_as(device, 0, "lead")
    before = Path(f"{other}.wear").read_bytes()
    shutil.copy(f"{other}.wear", f"{path}.wear")
    with pytest.raises(FlashFormatError, match=r"belongs to another flash file: it has the id [0-9a-f]{32}, and this"):
        open_worn(path)
    assert Path(f"{path}.wear").read_bytes() == before
    os.unlink(path)
    with pytest.raises(FlashFormatError, match=r"kept for a file of the name 'other\.kv'"):
        open_worn(path)
    assert not path.exists(), "a start that is refused leaves nothing"


def test_a_refused_start_leaves_the_flash_file_usable(path: Path) -> None:
    with open_worn(path) as device:
        write_as(device, 0, "lead")
    Path(f"{path}.wear").write_bytes(b"no ledger")
    with pytest.raises(FlashFormatError, match=r"not written by vllm-lifetime\. Delete or move it"):
        open_worn(path)
    os.unlink(f"{path}.wear")
    with open_worn(path) as device:
        assert [slot for slot, _ in device.recovered()] == [0]


def test_another_erase_block_size_keeps_the_totals(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_worn(path) as device:
        write_as(device, 0, "lead")
    with open_worn(path, wear=WearOptions(erase_block_bytes=131072)) as device:
        assert "counted from zero with 131072 bytes" in caplog.text
        assert ledger_of(device).snapshot.payload_bytes == SLOT_BYTES
        assert look(device).snapshot.blocks.num_blocks == 2


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_ledger_that_cannot_be_written_costs_only_itself(
    path: Path, error: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    with open_worn(path) as device:
        look(device)
        monkeypatch.setattr(wear, "write_at", fail)
        monkeypatch.setattr(wear, "replace_wear_file", fail)
        for _ in range(3):
            assert write_as(device, 0, "lead")
            ledger = look(device)
        assert not ledger.snapshot.is_kept
        assert ledger.snapshot.errors[errno.errorcode[error]] >= 3
        assert caplog.text.count("cannot be written") == 1
        assert ledger.snapshot.payload_bytes == 3 * SLOT_BYTES
        monkeypatch.undo()
        write_as(device, 0, "lead")
        assert look(device).snapshot.is_kept
    assert counts_in(path).payload_bytes == 4 * SLOT_BYTES


def test_a_ledger_that_cannot_be_read_is_left_alone(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with open_worn(path) as device:
        write_as(device, 0, "lead")
    before = Path(f"{path}.wear").read_bytes()

    def fail(_: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(wear, "read_wear_file", fail)
    with open_worn(path) as device:
        write_as(device, 1, "worker")
        assert not look(device).snapshot.is_kept
    assert "cannot be read" in caplog.text
    assert Path(f"{path}.wear").read_bytes() == before


def test_the_thread_keeps_the_file_by_itself(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wear, "LOOK_EVERY_S", 0.01)
    with FlashDevice.open(path, GEOMETRY, size_bytes=SIZE, persist=True, wear=WearOptions()) as device:
        ledger_of(device).flush_every_s = 0.01
        time.sleep(0.05)
        write_as(device, 0, "lead")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and counts_in(path).payload_bytes != SLOT_BYTES:
            time.sleep(0.01)
        assert counts_in(path).payload_bytes == SLOT_BYTES
        drive = ledger_of(device).snapshot.drive
        assert drive is not None and (drive.name or drive.note)


def test_figures(path: Path) -> None:
    """By hand: three slots of 8 KiB, two pages each, one of them twice."""
    with open_worn(path) as device:
        for slot in (0, 1, 2, 2):
            write_as(device, slot, "lead")
        snapshot = look(device).snapshot
    created = snapshot.header.created_at_s
    figures = wear_figures(snapshot, created + 100)
    assert figures["payload_bytes"] == 4 * SLOT_BYTES
    assert figures["written_bytes"]["lead"] == {"demotion": 4 * SLOT_BYTES}
    assert figures["written_bytes"]["overhead"]["record"] == 4 * 64
    assert figures["rates_bytes_per_s"]["ledger"] == pytest.approx(4 * SLOT_BYTES / 100)
    programmed = figures["programmed_bytes"]
    assert figures["write_amplification"] == programmed / (4 * SLOT_BYTES)
    assert figures["device_years"]["ledger"] == pytest.approx(SIZE * 1000 / (1.02 * programmed / 100 * 365.25 * 86400))
    assert figures["endurance_used"] == pytest.approx(1.02 * programmed / (SIZE * 1000))
    assert figures["cycles"]["in_place_erases"] >= 1


def test_a_device_without_a_ledger_makes_no_file(tmp_path: Path) -> None:
    with FlashDevice.open(tmp_path / "flash.kv", GEOMETRY, size_bytes=SIZE, persist=True) as device:
        assert device.wear is None
    assert [file.name for file in tmp_path.iterdir()] == ["flash.kv"]
