# SPDX-License-Identifier: Apache-2.0
"""What sysfs says of a drive, from made-up trees: partitions, volumes, and nothing at all."""

import os
from pathlib import Path

import pytest

from vllm_lifetime.flash.drive import describe_drive


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """An NVMe drive with a partition, and an encrypted volume on that partition, on which the files are said to lie."""
    root = tmp_path / "sys"
    drive = root / "devices" / "nvme0n1"
    partition = drive / "nvme0n1p1"
    volume = root / "devices" / "dm-0"
    for folder in (partition, drive / "device", volume / "slaves", root / "dev" / "block"):
        folder.mkdir(parents=True)
    (partition / "partition").write_text("1\n")
    (drive / "size").write_text("2000\n")
    (drive / "device" / "model").write_text("Fast Flash 9\n")
    (drive / "stat").write_text(" 1 2 3 4 5 6 700 8 9 10 11\n")
    (volume / "slaves" / "nvme0n1p1").symlink_to(partition)
    (volume / "stat").write_text("0 0 0 0 0 0 1 0\n")
    return root


def lies_on(sysfs: Path, folder: str) -> Path:
    """A file that lies on this device, as that system tells it."""
    number = os.stat(sysfs).st_dev
    (sysfs / "dev" / "block" / f"{os.major(number)}:{os.minor(number)}").symlink_to(sysfs / "devices" / folder)
    return sysfs / "devices"


@pytest.mark.parametrize("folder", ["nvme0n1", "nvme0n1/nvme0n1p1", "dm-0"])
def test_the_drive_under_a_partition_and_a_volume(sysfs: Path, folder: str) -> None:
    facts = describe_drive(lies_on(sysfs, folder), str(sysfs))
    assert (facts.name, facts.model) == ("nvme0n1", "Fast Flash 9")
    assert facts.capacity_bytes == 2000 * 512
    assert facts.written_since_boot_bytes == 700 * 512
    assert "not readable without root: nvme smart-log /dev/nvme0n1" in facts.note


def test_what_cannot_be_read_is_said(sysfs: Path, tmp_path: Path) -> None:
    assert "could not be looked up" in describe_drive(tmp_path / "missing").note
    assert "no block device" in describe_drive(tmp_path, str(tmp_path / "no-sys")).note
    (sysfs / "devices" / "nvme0n1" / "stat").write_text("what\n")
    (sysfs / "devices" / "nvme0n1" / "device" / "model").unlink()
    facts = describe_drive(lies_on(sysfs, "nvme0n1"), str(sysfs))
    assert facts.written_since_boot_bytes is None and facts.model == ""


def test_this_machine(tmp_path: Path) -> None:
    """Whatever it is, something is said."""
    facts = describe_drive(tmp_path)
    assert facts.name or facts.note
