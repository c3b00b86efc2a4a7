# SPDX-License-Identifier: Apache-2.0
"""What the system says, without privileges, about the drive that holds a file. Reads sysfs once; never fails.

Linux gives everybody the model and the sectors written since boot, by all processes. How much of its endurance a drive has used,
and how much it has written in its life, is in its SMART log, which takes root to read: `nvme smart-log /dev/nvme0`.
"""

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DriveFacts", "describe_drive"]

_SECTOR_BYTES = 512
_SECTORS_WRITTEN = 6
"""Position in a block device's `stat`; its unit is 512 bytes whatever the device."""

_MAX_STEPS = 8
"""Longest chain of partition, encryption and volume that is followed down to a drive."""


@dataclass(frozen=True, slots=True)
class DriveFacts:
    """One drive, or why nothing is known of it.

    Attributes:
        name: of its block device, e.g. `nvme0n1`; empty if there is none.
        model: as the drive calls itself; empty if it does not.
        capacity_bytes: 0 if unknown.
        written_since_boot_bytes: by all processes, to the whole drive; None if unknown.
        note: what could not be read, and why; a sentence.
    """

    name: str = ""
    model: str = ""
    capacity_bytes: int = 0
    written_since_boot_bytes: int | None = None
    note: str = ""


def describe_drive(path: str | os.PathLike[str], sysfs: str = "/sys") -> DriveFacts:
    """The drive under the file or directory at `path`. Blocks for a few reads of sysfs; raises nothing."""
    try:
        device = os.stat(path).st_dev
        folder = Path(sysfs, "dev", "block", f"{os.major(device)}:{os.minor(device)}")
        if not folder.exists():
            return DriveFacts(
                note="The file lies on no block device that the system shows (a network, memory or overlay file system)."
            )
        folder = _whole_drive(folder.resolve())
        name = folder.name
        stat = _read(folder / "stat").split()
        written = int(stat[_SECTORS_WRITTEN]) * _SECTOR_BYTES if len(stat) > _SECTORS_WRITTEN else None
        return DriveFacts(
            name=name,
            model=_read(folder / "device" / "model"),
            capacity_bytes=int(_read(folder / "size") or 0) * _SECTOR_BYTES,
            written_since_boot_bytes=written,
            note="The share of its endurance that the drive has used is not readable without root: " + _smart_hint(name),
        )
    except (OSError, ValueError) as error:
        return DriveFacts(note=f"The drive could not be looked up: {error}.")


def _smart_hint(name: str) -> str:
    return f"nvme smart-log /dev/{name}." if name.startswith("nvme") else f"smartctl -A /dev/{name}, if it is a drive of its own."


def _whole_drive(folder: Path) -> Path:
    """The drive under a partition, an encrypted or a logical volume, as far as there is just one."""
    for _ in range(_MAX_STEPS):
        if (folder / "partition").exists():
            folder = folder.parent
            continue
        below = sorted((folder / "slaves").iterdir()) if (folder / "slaves").is_dir() else []
        if len(below) != 1:
            return folder
        folder = below[0].resolve()
    return folder


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
