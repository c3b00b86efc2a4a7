# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side knows of one request. EngineCore process, scheduler thread."""

from dataclasses import dataclass, field

from vllm_lifetime.agents import Reading
from vllm_lifetime.pool.access import Path
from vllm_lifetime.pool.tiers import Slot

__all__ = ["RequestState"]


@dataclass(slots=True)
class RequestState:
    """What the scheduler side knows of a request, from its arrival to its end."""

    reading: Reading | None
    boundary_tokens: int
    """Tokens before this one are read and written as the reading's `prompt`."""
    paths: dict[int, Path] = field(default_factory=dict)
    """By KV cache group."""
    num_local_blocks: int | None = None
    """vLLM's own prefix hit at the present admission, until it has been counted."""
    plan: list[Slot] = field(default_factory=list)
    """Slots that hold the blocks after the local hit, from the lookup to the allocation, in the same scheduler step."""
    loaded_end: int = 0
    """Blocks before this index were loaded, not computed."""
    loading: tuple[int, int] = (0, 0)
    """Blocks of the latest load by origin: host, flash."""
    was_refused: bool = False
    """A load has been refused already: counted once, however often admission is tried."""

    def path(self, group_id: int, block_size: int) -> Path:
        """The request's path in a KV cache group whose blocks hold `block_size` tokens."""
        path = self.paths.get(group_id)
        if path is None:
            reading = self.reading
            path = Path(None) if reading is None else Path(reading.prompt, reading.output, self.boundary_tokens // block_size)
            self.paths[group_id] = path
        return path
