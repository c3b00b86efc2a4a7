# SPDX-License-Identifier: Apache-2.0
"""How long High-Bandwidth Flash would take for a step that reads and writes KV in place.

The step waits for it on top of what it took. Reads of one step are one stream (the blocks are known before it begins, so that
they can be prefetched: Lachesis section 2.2), so the latency counts once. Writes are buffered over the layers and flushed at the
end of the step (section 5.1), and a page is programmed when it is full.
"""

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["FlashEmulation", "FlashTiming"]


class FlashTiming(BaseModel):
    """The emulated device. Nothing is emulated unless a bandwidth or a latency is set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    read_bytes_per_s: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Read bandwidth. 0: infinite.")
    write_bytes_per_s: float = Field(default=0.0, ge=0, allow_inf_nan=False, description="Write bandwidth. 0: infinite.")
    read_latency_s: float = Field(
        default=0.0, ge=0, le=1, allow_inf_nan=False, description="Of the first page that a step reads, in seconds."
    )
    page_bytes: int = Field(default=4096, strict=True, ge=1, description="What is read and programmed as one.")

    @property
    def is_on(self) -> bool:
        """Whether steps are delayed at all."""
        return self.read_bytes_per_s > 0 or self.write_bytes_per_s > 0 or self.read_latency_s > 0


class FlashEmulation:
    """What the device has done so far, and the delay of each step. One thread.

    `pages_read` and `pages_programmed` count since the start; a page that is not full yet is not programmed.
    """

    def __init__(self, timing: FlashTiming) -> None:
        self.timing = timing
        self.pages_read = 0
        self._bytes_written = 0

    @property
    def pages_programmed(self) -> int:
        """Pages written so far."""
        return self._bytes_written // self.timing.page_bytes

    def step(self, num_extents: int, extent_bytes: int, written_bytes: int) -> float:
        """A step reads `num_extents` pieces of `extent_bytes`, each in whole pages, and writes. Its delay in seconds. O(1)."""
        timing = self.timing
        pages = num_extents * -(-extent_bytes // timing.page_bytes)
        programmed = self.pages_programmed
        self.pages_read += pages
        self._bytes_written += written_bytes
        delay_s = timing.read_latency_s if pages else 0.0
        if timing.read_bytes_per_s:
            delay_s += pages * timing.page_bytes / timing.read_bytes_per_s
        if timing.write_bytes_per_s:
            delay_s += (self.pages_programmed - programmed) * timing.page_bytes / timing.write_bytes_per_s
        return delay_s
