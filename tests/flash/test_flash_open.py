# SPDX-License-Identifier: Apache-2.0
"""Opening: every refusal says what, with which value, and what to change, and harms nothing."""

import dataclasses
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import flash_testing as ft
import pytest

from vllm_lifetime.flash import (
    FlashError,
    FlashFormatError,
    FlashGeometry,
    FlashGeometryError,
    FlashPathError,
    FlashSpaceError,
    FlashUnavailableError,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv.flash"


def test_mode_is_0600_and_every_block_is_reserved(path: Path) -> None:
    old = os.umask(0)
    try:
        with ft.open_device(path):
            pass
    finally:
        os.umask(old)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == ft.SIZE
    assert status.st_blocks * 512 >= ft.SIZE
    path.chmod(0o644)
    with ft.open_device(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("persist", [True, False])
@pytest.mark.parametrize("contents", [b"", b"VLLM", b"precious data" * 1000])
def test_foreign_file_is_refused_and_untouched(path: Path, contents: bytes, persist: bool) -> None:
    path.write_bytes(contents)
    path.chmod(0o640)
    before = path.stat()
    with pytest.raises(FlashFormatError, match=r"left untouched\. Delete the file or"):
        ft.open_device(path, persist=persist)
    assert path.read_bytes() == contents
    after = path.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_geometry_mismatch_names_each_field(path: Path) -> None:
    with ft.open_device(path) as device:
        ft.write(device, 0, ft.key_of(0))
    with pytest.raises(FlashGeometryError) as caught:
        ft.open_device(path, model="other/model", tp_size=2, tp_rank=1)
    text = str(caught.value)
    assert "model: stored 'test/model', now 'other/model'" in text
    assert "tp_rank: stored 0, now 1" in text
    assert "tp_size: stored 1, now 2" in text
    assert "dtype" not in text
    assert "Delete the file or" in text
    with ft.open_device(path) as device:
        assert ft.hits(device, 0, ft.key_of(0))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(FlashGeometry)])
def test_every_geometry_field_counts(path: Path, field: str) -> None:
    base = {"tp_size": 4, "pp_size": 4}
    ft.open_device(path, **base).close()
    value = (base | dataclasses.asdict(ft.GEOMETRY) | base)[field]
    changed = value + 1 if isinstance(value, int) else value + "x"
    with pytest.raises(FlashGeometryError, match=f"{field}: stored {value!r}, now {changed!r}"):
        ft.open_device(path, **(base | {field: changed}))


def test_changed_size_is_refused(path: Path) -> None:
    ft.open_device(path).close()
    with pytest.raises(FlashSpaceError, match=rf"{ft.SIZE} bytes.*{ft.SIZE * 2} bytes.*delete the"):
        ft.open_device(path, size=ft.SIZE * 2)
    assert path.stat().st_size == ft.SIZE


def test_size_for_no_slot(path: Path) -> None:
    with pytest.raises(FlashSpaceError, match="holds no slot") as caught:
        ft.open_device(path, size=10_000)
    assert not path.exists()
    needed = int(str(caught.value).split("needs a file of ")[1].split()[0])
    with ft.open_device(path, size=needed) as device:
        assert device.num_slots == 1
        assert ft.write(device, 0, b"k") and ft.hits(device, 0, b"k")
    path.unlink()
    with pytest.raises(FlashSpaceError):
        ft.open_device(path, size=needed - 1)


@pytest.mark.parametrize("offset", [8, 12, 16, 24, 32, 40, 60, 200])
def test_damaged_header_is_refused(path: Path, offset: int) -> None:
    ft.open_device(path).close()
    ft.ClosedFile(path).flip(offset, 0x10)
    with pytest.raises(FlashFormatError, match=r"cannot be reused: .*Delete the file or"):
        ft.open_device(path)
    with ft.open_device(path, persist=False) as device:  # it holds our mark, so it may be emptied
        assert ft.write(device, 0, b"k")


def test_damaged_epoch_forgets_everything(path: Path) -> None:
    with ft.open_device(path) as device:
        ft.write(device, 0, b"k")
    file = ft.ClosedFile(path)
    file.flip(file.layout.epoch_offset, 1)
    with ft.open_device(path) as device:
        assert device.recovered() == []
        assert ft.write(device, 0, b"k")
    with ft.open_device(path) as device:
        assert device.recovered() == [(0, b"k")]


def test_very_long_geometry_takes_more_header_pages(path: Path) -> None:
    extra = {"extra": "layout " * 3000}
    with ft.open_device(path, **extra) as device:
        assert ft.write(device, 0, b"k")
    with ft.open_device(path, **extra) as device:
        assert ft.hits(device, 0, b"k")


def test_path_is_a_directory_or_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(FlashPathError, match="not a regular file"):
        ft.open_device(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FlashPathError, match="not a regular file"):
        ft.open_device(tmp_path / "pipe")


def test_directory_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FlashPathError, match=f"directory {tmp_path}/none does not exist. Create it"):
        ft.open_device(tmp_path / "none" / "kv.flash")
    (tmp_path / "file").touch()
    with pytest.raises(FlashPathError, match="not a directory"):
        ft.open_device(tmp_path / "file" / "kv.flash")


def test_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(FlashUnavailableError, match="symbolic link to nothing"):
        ft.open_device(tmp_path / "link")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "permission denied"),
        (errno.EROFS, "mounted read-only"),
        (errno.ENOSPC, "file system is full"),
        (errno.EIO, r"\(EIO\)"),
    ],
)
def test_open_errors_are_sentences(path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(FlashPathError, match=words):
        ft.open_device(path)


@pytest.mark.parametrize("persist", [True, False])
def test_failed_reservation_leaves_no_new_file(path: Path, monkeypatch: pytest.MonkeyPatch, persist: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(FlashSpaceError, match=rf"needs {ft.SIZE} bytes .* bytes are available"):
            ft.open_device(path, persist=persist)
    assert not path.exists()
    with ft.open_device(path) as device:
        ft.write(device, 0, b"k")
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(FlashSpaceError):
            ft.open_device(path)
    with ft.open_device(path) as device:  # what was there already is kept
        assert ft.hits(device, 0, b"k")


def test_unreadable_table_is_a_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ft.open_device(path).close()

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(FlashPathError, match=r"cannot be opened: broken \(EIO\)"):
            ft.open_device(path)
    ft.open_device(path).close()  # neither removed nor left locked


def test_second_device_and_second_process_are_refused(path: Path) -> None:
    program = (
        "import sys, flash_testing as ft\n"
        "from pathlib import Path\n"
        "from vllm_lifetime.flash import FlashUnavailableError\n"
        "try: ft.open_device(Path(sys.argv[1]), persist=False)\n"
        "except FlashUnavailableError as error: print(error)\n"
    )
    with ft.open_device(path) as device:
        ft.write(device, 0, b"k")
        with pytest.raises(FlashUnavailableError):
            ft.open_device(path)
        answer = subprocess.run(
            [sys.executable, "-c", program, str(path)],
            cwd=Path(ft.__file__).parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert f"{path} is in use by another process" in answer.stdout, answer.stderr
        assert ft.hits(device, 0, b"k")
    ft.open_device(path).close()


def test_close_removes_only_its_own_file(path: Path) -> None:
    device = ft.open_device(path, persist=False)
    path.unlink()
    path.write_text("someone else's")
    device.close()
    assert path.read_text() == "someone else's"


@pytest.mark.parametrize(("field", "value"), [("slot_bytes", 0), ("num_layers", -1), ("tp_rank", 1), ("pp_rank", -1)])
def test_impossible_geometry(field: str, value: int) -> None:
    with pytest.raises(FlashGeometryError, match=f"{field} is {value}"):
        dataclasses.replace(ft.GEOMETRY, **{field: value})


def test_every_error_is_a_value_error() -> None:
    assert issubclass(FlashError, ValueError)
