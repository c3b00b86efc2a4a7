# SPDX-License-Identifier: Apache-2.0
"""Reads a trace of any format that is known by name."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from vllm_lifetime.traces.claude_code import read_claude_code
from vllm_lifetime.traces.codex import read_codex
from vllm_lifetime.traces.jsonl import read_jsonl
from vllm_lifetime.traces.kv_cache_tester import read_kv_cache_tester
from vllm_lifetime.traces.mapcoder import read_mapcoder
from vllm_lifetime.traces.mooncake import read_mooncake
from vllm_lifetime.traces.schema import Trace
from vllm_lifetime.traces.source import TraceError

__all__ = ["TRACE_FORMATS", "TraceError", "read_trace"]

TRACE_FORMATS: Mapping[str, Callable[[Path], Trace]] = MappingProxyType(
    {
        "kv-cache-tester": read_kv_cache_tester,
        "claude-code": read_claude_code,
        "codex": read_codex,
        "mooncake": read_mooncake,
        "mapcoder": read_mapcoder,
        "jsonl": read_jsonl,
    }
)
"""Format names, as the command line takes them, and their readers."""


def read_trace(path: str | Path, format: str) -> Trace:
    """Read the trace at `path`. Raises TraceError: unknown format, unreadable file, or a field that is not as it should be."""
    reader = TRACE_FORMATS.get(format)
    if reader is None:
        raise TraceError(str(path), f"unknown format {format!r}; known are {', '.join(TRACE_FORMATS)}")
    return reader(Path(path))
