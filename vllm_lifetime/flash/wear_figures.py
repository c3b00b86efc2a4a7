# SPDX-License-Identifier: Apache-2.0
"""From counters to figures: write amplification, rates, device-years. Pure.

A `WearSnapshot` is plain data: the worker makes one, the scheduler side and the command line turn it into figures when asked.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_lifetime.flash.drive import DriveFacts
from vllm_lifetime.flash.endurance import DAY_S, device_years, drive_writes_per_day, endurance_used
from vllm_lifetime.flash.erase_blocks import NAND_PAGE_BYTES, EraseBlockSummary
from vllm_lifetime.flash.wear_counts import OVERHEAD, WearCounts
from vllm_lifetime.flash.wear_file import WearHeader
from vllm_lifetime.flash.write_history import WriteHistory

__all__ = ["WearSnapshot", "wear_figures"]

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class WearSnapshot:
    """The ledger of one flash file at one moment.

    Attributes:
        header: whose it is.
        written: (class, reason, writes, bytes).
        payload_bytes: bytes of KV blocks since the ledger began.
        programmed_pages: pages that these and all else took.
        blocks: the erase blocks.
        history_last, history_counts: payload bytes of the last day, see `WriteHistory`.
        opened_at_s: when this process opened the file, in Unix seconds; None: no process has it, as far as is known.
        opened_payload_bytes: `payload_bytes` at that time.
        flush_every_s: how often the ledger is written while anything changes.
        is_kept: whether it has been written since it last changed, but for what is younger than `flush_every_s`.
        errors: failed reads and writes of the ledger, by errno name.
        drive: what the system says of the drive.
    """

    header: WearHeader
    written: tuple[tuple[str, str, int, int], ...]
    payload_bytes: int
    programmed_pages: int
    blocks: EraseBlockSummary
    history_last: int
    history_counts: tuple[int, ...]
    opened_at_s: float | None = None
    opened_payload_bytes: int = 0
    flush_every_s: float = 0.0
    is_kept: bool = True
    errors: dict[str, int] = field(default_factory=dict)
    drive: DriveFacts | None = None

    @classmethod
    def of(cls, header: WearHeader, counts: WearCounts, blocks: EraseBlockSummary | None = None, **more: Any) -> "WearSnapshot":
        """Of these counters; O(erase blocks) unless `blocks` is given."""
        return cls(
            header=header,
            written=tuple(
                (segment_class, reason, writes, length)
                for (segment_class, reason), (writes, length) in sorted(counts.written.items())
            ),
            payload_bytes=counts.payload_bytes,
            programmed_pages=counts.programmed_pages,
            blocks=counts.blocks.summary() if blocks is None else blocks,
            history_last=counts.history.last,
            history_counts=tuple(counts.history.counts),
            **more,
        )

    @property
    def history(self) -> WriteHistory:
        """Payload bytes of the last day."""
        return WriteHistory(self.history_last, self.history_counts)

    @property
    def write_amplification(self) -> float | None:
        """Bytes programmed for each byte of KV; None before the first."""
        return self.programmed_pages * NAND_PAGE_BYTES / self.payload_bytes if self.payload_bytes else None


def wear_figures(snapshot: WearSnapshot, now_s: float) -> dict[str, Any]:
    """What the control API and the command line show of one flash file at `now_s` (Unix seconds). JSON-able. O(1).

    `rates` are KV bytes/s: over the last hour, the last day, since this process opened the file, and since the ledger began;
    pauses count. `device_years` and `drive_writes_per_day` are at these rates, with everything written beside KV.
    """
    header = snapshot.header
    history = snapshot.history
    age_s = max(1.0, now_s - header.created_at_s)
    rates = {
        "hour": history.rate(HOUR_S, header.created_at_s, now_s),
        "day": history.rate(DAY_S, header.created_at_s, now_s),
        "ledger": snapshot.payload_bytes / age_s,
    }
    if snapshot.opened_at_s is not None:
        written = snapshot.payload_bytes - snapshot.opened_payload_bytes
        rates["process"] = written / max(1.0, now_s - snapshot.opened_at_s)
    amplification = snapshot.write_amplification
    factor = amplification or 0.0
    years = {name: device_years(header.size_bytes, header.endurance_cycles, rate * factor) for name, rate in rates.items()}
    by_class: dict[str, dict[str, int]] = {}
    for segment_class, reason, _, length in snapshot.written:
        by_class.setdefault(segment_class, {})[reason] = length
    blocks = snapshot.blocks
    in_place_pages = snapshot.programmed_pages + blocks.moved_pages
    return {
        "file": header.flash_name,
        "wear_id": header.wear_id,
        "size_bytes": header.size_bytes,
        "erase_block_bytes": header.erase_block_bytes,
        "endurance_cycles": header.endurance_cycles,
        "age_s": round(age_s, 3),
        "written_bytes": by_class,
        "payload_bytes": snapshot.payload_bytes,
        "overhead_bytes": sum(by_class.get(OVERHEAD, {}).values()),
        "programmed_bytes": snapshot.programmed_pages * NAND_PAGE_BYTES,
        "written_last_day_bytes": history.written_since(DAY_S, now_s),
        "write_amplification": amplification,
        "in_place_write_amplification": (
            in_place_pages * NAND_PAGE_BYTES / snapshot.payload_bytes if snapshot.payload_bytes else None
        ),
        "cycles": {
            "erase_blocks": blocks.num_blocks,
            "mean": blocks.mean_cycles,
            "max": blocks.max_cycles,
            "in_place_erases": blocks.in_place_erases,
            "max_in_place_erases": blocks.max_in_place_erases,
        },
        "endurance_used": endurance_used(header.size_bytes, header.endurance_cycles, snapshot.programmed_pages * NAND_PAGE_BYTES),
        "rates_bytes_per_s": rates,
        "device_years": years,
        "drive_writes_per_day": {name: drive_writes_per_day(header.size_bytes, rate * factor) for name, rate in rates.items()},
        "ledger": {"is_kept": snapshot.is_kept, "flush_every_s": snapshot.flush_every_s, "errors": dict(snapshot.errors)},
        "drive": None if snapshot.drive is None else asdict(snapshot.drive),
    }
