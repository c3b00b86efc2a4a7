# SPDX-License-Identifier: Apache-2.0
"""How long flash lasts at a rate of writes. Pure formulas.

Lachesis (section 5.1) takes a device's life as the time that its program/erase budget lasts at the mean rate of writes:
`capacity x cycles / (write amplification x bytes per second)`.
"""

__all__ = [
    "DAY_S",
    "DEFAULT_ENDURANCE_CYCLES",
    "MOVED_FACTOR",
    "YEAR_S",
    "device_years",
    "drive_writes_per_day",
    "endurance_used",
]

DAY_S = 86_400.0
YEAR_S = 365.25 * DAY_S

DEFAULT_ENDURANCE_CYCLES = 100_000
"""Program/erase cycles that a cell tolerates: SLC, as Lachesis assumes for High-Bandwidth Flash (section 5.1, after Son et al.).
TLC drives are specified for a few thousand."""

MOVED_FACTOR = 1.02
"""Write amplification by garbage collection and wear levelling where blocks are written whole and in order (Lachesis section 5.1,
after H3 and Kyung et al.). Assumed, not measured: a file cannot see what its drive moves."""


def device_years(capacity_bytes: int, endurance_cycles: int, programmed_bytes_per_s: float) -> float | None:
    """Years that new flash of this capacity lasts at this rate; None if nothing is written."""
    if programmed_bytes_per_s <= 0:
        return None
    return capacity_bytes * endurance_cycles / (MOVED_FACTOR * programmed_bytes_per_s * YEAR_S)


def drive_writes_per_day(capacity_bytes: int, written_bytes_per_s: float) -> float:
    """How often the whole capacity is written in a day at this rate."""
    return written_bytes_per_s * DAY_S / capacity_bytes


def endurance_used(capacity_bytes: int, endurance_cycles: int, programmed_bytes: int) -> float:
    """The share of the program/erase budget that is spent; above 1 beyond it."""
    return MOVED_FACTOR * programmed_bytes / (capacity_bytes * endurance_cycles)
