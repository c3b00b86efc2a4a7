# SPDX-License-Identifier: Apache-2.0
"""The scheduler side's own files: one of each per engine. EngineCore process, at start."""

from pathlib import Path
from typing import TYPE_CHECKING

from vllm_lifetime.connectors.lifetime.options import OptionsError
from vllm_lifetime.connectors.lifetime.recording import TraceRecorder

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["engine_file_path", "open_recorder"]


def engine_file_path(path: Path | None, vllm_config: "VllmConfig") -> Path | None:
    """`path` itself for the only engine; otherwise with the data-parallel index appended."""
    parallel = vllm_config.parallel_config
    if path is None or (parallel.data_parallel_size == 1 and parallel.data_parallel_index == 0):
        return path
    return path.with_name(f"{path.name}.dp{parallel.data_parallel_index}")


def open_recorder(path: Path | None, block_size_tokens: int) -> TraceRecorder | None:
    """A recorder that appends to `path`; None without a path.

    Raises:
        OptionsError: the file cannot be opened.

    """
    if path is None:
        return None
    try:
        return TraceRecorder(path, block_size_tokens)
    except OSError as error:
        raise OptionsError(f"record_path = {str(path)!r} cannot be opened: {error.strerror}. Give another path.") from None
