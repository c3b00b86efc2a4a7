# SPDX-License-Identifier: Apache-2.0
"""Where a predictor's file is written: `test_serving.py` has what is read."""

import os
from pathlib import Path

import pytest

from vllm_lifetime.prediction.predictor_file import write_predictor_file


@pytest.mark.parametrize("kind", ["pipe", "directory", "link to a pipe"])
def test_a_device_or_pipe_is_not_replaced_by_a_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "p.npz"
    if kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    before = path.lstat().st_mode
    with pytest.raises(OSError, match="is no regular file"):
        write_predictor_file(path, {"model": "m"}, {})
    assert path.lstat().st_mode == before


def test_a_link_to_a_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real.npz").write_bytes(b"old")
    path = tmp_path / "p.npz"
    path.symlink_to("real.npz")
    write_predictor_file(path, {"model": "m", "agents": [], "horizon": 1, "hidden_size": 0}, {})
    assert path.is_symlink() and (tmp_path / "real.npz").read_bytes() != b"old"
