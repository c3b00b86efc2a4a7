# SPDX-License-Identifier: Apache-2.0
"""Files that commands write: whole, or as they were."""

import errno
import os
from pathlib import Path

import pytest

from vllm_lifetime.whole_file import replacing, write_text


def test_disk_that_is_full_in_the_middle_leaves_a_cut_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")

    def write_some(self: Path, text: str, **_: object) -> None:
        with self.open("w") as file:
            file.write(text[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_some)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new figures")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "plot.png") as temporary:
        assert temporary.suffix == ".png", "by which a plot's format is told"
        temporary.write_bytes(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_link_still_leads_to_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new"


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_text(path, "figures")
    assert os.read(reader, 100) == b"figures"
    assert path.is_fifo()
    os.close(reader)


def test_pipe_by_its_descriptor_is_no_file() -> None:
    """`--json /dev/stdout | cat`, and the shell's `>(...)`."""
    reader, writer = os.pipe()
    try:
        write_text(f"/dev/fd/{writer}", "figures")
        assert os.read(reader, 100) == b"figures"
    finally:
        os.close(reader)
        os.close(writer)


def test_private_file_becomes_readable_by_all(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")
    path.chmod(0o600)
    write_text(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o600


def test_file_whose_name_cannot_change_hands_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is mounted by itself."""
    path = tmp_path / "figures.json"
    path.write_text("old")

    def busy(*_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "replace", busy)
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_file_in_a_folder_that_takes_no_new_ones_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "figures.json"
    path.write_text("old")

    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    write_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "new"
    with pytest.raises(PermissionError):
        monkeypatch.setattr(os, "open", refuse)
        write_text(tmp_path / "other.json", "new")


def test_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250 + ".json")
    write_text(path, "new")
    assert path.read_text() == "new"
