# SPDX-License-Identifier: Apache-2.0
"""Reads Mooncake traces (FAST 25): a production server's requests, prompts as hashes of 512 tokens each, no sessions."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.traces.prefixes import check_prefixes
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.source import TraceError, json_lines

__all__ = ["BLOCK_SIZE_TOKENS", "FIRST_TOKEN_S", "OUTPUT_TOKENS_PER_S", "read_mooncake"]

BLOCK_SIZE_TOKENS = 512
FIRST_TOKEN_S, OUTPUT_TOKENS_PER_S = 0.5, 30.0
"""How long a request runs; the trace does not say. Assumed."""


def read_mooncake(path: Path) -> Trace:
    """Read a trace (.jsonl, also packed). Each request is a session of its own that the engine is told nothing about.

    The last, partly filled block of a prompt has a hash too; it is left out, since an engine keeps whole blocks only.
    Raises TraceError.
    """
    sessions: list[TraceSession] = []
    prompts: list[tuple[str, NDArray[np.int64]]] = []
    for row in json_lines(path):
        input_tokens, output_tokens = row.count("input_length"), row.count("output_length")
        ids = row.items("hash_ids")
        if not all(type(block) is int and 0 <= block < 1 << 62 for block in ids):
            raise row.error("hash_ids", "a list of whole numbers")
        whole = input_tokens // BLOCK_SIZE_TOKENS
        if len(ids) not in (whole, -(-input_tokens // BLOCK_SIZE_TOKENS)):
            raise TraceError(
                row.where, f"field 'hash_ids': expected one per {BLOCK_SIZE_TOKENS} of {input_tokens} tokens, found {len(ids)}"
            )
        request = TraceRequest(
            blocks=np.array(ids[:whole], np.int64),
            after=-1,
            gap_s=0.0,
            service_s=FIRST_TOKEN_S + output_tokens / OUTPUT_TOKENS_PER_S,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
        )
        prompts.append((row.where, request.blocks))
        name = f"request-{len(sessions)}"
        sessions.append(TraceSession(name, (request,), names_session=False, arrival_s=row.seconds("timestamp") / 1000))
    if not sessions:
        raise TraceError(str(path), "expected at least one request, found none")
    check_prefixes(prompts, "hash_ids")
    return Trace("mooncake", BLOCK_SIZE_TOKENS, tuple(sessions))
