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
