# SPDX-License-Identifier: Apache-2.0
"""What all systems of a comparison are given alike: the model, the server's options, and the bytes of each memory."""

from dataclasses import dataclass

from benchmarks.server import serve_arguments

__all__ = ["SCHEDULER_TIMES", "Budget", "ServerSettings"]

SCHEDULER_TIMES = "BENCHMARK_SCHEDULER_TIMES"
"""Environment variable: the file that `TimedScheduler` writes to."""


@dataclass(frozen=True)
class ServerSettings:
    """Options of `vllm serve` and the size of the test model, the same for every system."""

    model_layers: int = 4
    model_hidden: int = 640
    block_size_tokens: int = 32
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192
    dtype: str = "float32"
    kv_cache_gib: int = 2
    """What the CPU backend may take; the number of blocks says what it does take."""
    more_arguments: tuple[str, ...] = ()
    more_environment: tuple[tuple[str, str], ...] = ()

    def arguments(self, hbm_blocks: int) -> list[str]:
        """Options of `vllm serve`."""
        shared = serve_arguments(
            dtype=self.dtype,
            block_size=self.block_size_tokens,
            blocks=hbm_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        return [*shared, *self.more_arguments]

    def environment(self) -> dict[str, str]:
        """Environment of `vllm serve`.

        The CPU backend reserves one more core when it sees a connector; the first variable makes every system reserve one, so
        that all compute with the same number of threads.
        """
        return {
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            **dict(self.more_environment),
        }


@dataclass(frozen=True)
class Budget:
    """Bytes of each memory that a system may hold KV in. Stock vLLM has a use for the first only."""

    hbm_blocks: int
    block_bytes: int
    host_share: float
    """Host memory, as a share of HBM."""
    disk_share: float

    @property
    def hbm_bytes(self) -> int:
        """Of all KV blocks."""
        return self.hbm_blocks * self.block_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory for KV, staging buffers included; whole blocks."""
        return self._blocks(self.host_share) * self.block_bytes

    @property
    def disk_bytes(self) -> int:
        """Disk for KV; whole blocks."""
        return self._blocks(self.disk_share) * self.block_bytes

    def _blocks(self, share: float) -> int:
        return round(self.hbm_blocks * share)
