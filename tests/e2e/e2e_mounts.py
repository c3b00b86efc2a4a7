# SPDX-License-Identifier: Apache-2.0
"""Small file systems that can be full, read-only or broken. Only root on a machine with mounts can have them."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        pytest.skip(f"{error.filename} is not installed")
    if done.returncode:
        pytest.skip(f"not possible here: {' '.join(command)}: {done.stderr.strip()}")


@contextlib.contextmanager
def _mounted(directory: Path, *options: str) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    directory.mkdir()
    _run("mount", *options, str(directory))
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], capture_output=True, timeout=60)


@contextlib.contextmanager
def small_tmpfs(directory: Path, mib: int, *, is_read_only: bool = False) -> Iterator[Path]:
    """A file system in memory of so many MiB."""
    with _mounted(directory, "-t", "tmpfs", "-o", f"size={mib}m{',ro' if is_read_only else ''}", "tmpfs") as path:
        yield path


@contextlib.contextmanager
def disk_image(directory: Path, mib: int) -> Iterator[Path]:
    """An ext4 file system in a file, which `break_device` can break while files on it are open."""
    image = directory.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(mib << 20)
    _run("mkfs.ext4", "-q", "-F", str(image))
    with _mounted(directory, "-o", "loop", str(image)) as path:
        yield path


def break_device(directory: Path) -> None:
    """Do to the file system what a critical error of its device does: every write fails from now on."""
    _run("mount", "-o", "remount,abort", str(directory))
    with pytest.raises(OSError):
        (directory / "probe").write_bytes(b"x")
