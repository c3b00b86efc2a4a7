# SPDX-License-Identifier: Apache-2.0
"""Block ids that do not name whole prefixes would make a replay run for ever; they are refused as they are read."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_lifetime.traces import prefixes
from vllm_lifetime.traces.read import TraceError, read_trace

PROMPTS = [
    ([[0], [0, 0]], 2, "block 0 comes after block 0 here and first in"),
    ([[1, 1]], 1, "block 1 comes after block 1 here and first in"),
    ([[1, 2], [3, 2]], 2, "block 2 comes after block 3 here and after block 1 in"),
    ([[1, 2], [2]], 2, "block 2 comes first here and after block 1 in"),
    ([[1, 2], [1, 2, 3], [4, 1, 2]], 3, "block 1 comes after block 4 here and first in"),
]


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def own_trace(path: Path, prompts: list[list[int]]) -> Path:
    header = {"format": "vllm-lifetime-trace", "version": 1, "name": "t", "block_size_tokens": 16}
    request = {"after": -1, "gap_s": 0, "service_s": 1, "input_tokens": 64, "output_tokens": 1}
    sessions = [
        row for i, ids in enumerate(prompts) for row in ({"session_id": str(i)}, {"session_id": str(i), "blocks": ids} | request)
    ]
    return write(path, [header, *sessions])


def recording(path: Path, prompts: list[list[int]]) -> Path:
    rows: list[dict[str, object]] = [{"format": "vllm-lifetime-recording", "version": 1, "block_size_tokens": 16}]
    for i, ids in enumerate(prompts):
        rows.append({"kind": "start", "at_s": i, "request_id": str(i), "session_id": "s", "blocks": ids, "input_tokens": 64})
        rows.append({"kind": "finish", "at_s": i + 0.5, "request_id": str(i), "output_tokens": 1})
    return write(path, rows)


@pytest.mark.parametrize(("prompts", "line", "says"), PROMPTS)
def test_a_block_after_different_blocks_is_named(tmp_path: Path, prompts: list[list[int]], line: int, says: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(own_trace(tmp_path / "t.jsonl", prompts), "jsonl")
    assert f"t.jsonl:{1 + 2 * line}: field 'blocks': {says}" in str(caught.value)


@pytest.mark.parametrize(("prompts", "line", "says"), PROMPTS)
def test_a_hash_after_different_hashes_is_named(tmp_path: Path, prompts: list[list[int]], line: int, says: str) -> None:
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 512 * len(ids), "output_length": 1, "hash_ids": ids} for ids in prompts
    ]
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path / "m.jsonl", rows), "mooncake")
    assert f"m.jsonl:{line}: field 'hash_ids': {says}" in str(caught.value)


def test_a_recorder_that_forgot_a_prompts_first_blocks_is_understood(tmp_path: Path) -> None:
    trace = read_trace(recording(tmp_path / "r.jsonl", [[0, 1, 2], [3, 1, 2], [3, 1, 2, 4]]), "jsonl")
    assert [request.blocks.tolist() for request in trace.sessions[0].requests] == [[0, 1, 2], [3, 4, 5], [3, 4, 5, 6]]


@given(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6), st.integers(1, 8))
def test_what_comes_after_different_blocks_is_found_in_any_batch(content: list[list[int]], batch_blocks: int) -> None:
    prompts = [np.array(ids, np.int64) for ids in content]
    pairs = {(id, ids[i - 1] if i else None) for ids in content for i, id in enumerate(ids)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "_BATCH_BLOCKS", batch_blocks)
        assert (prefixes.find_misnamed(prompts) is None) == (len(pairs) == len({id for id, _ in pairs}))
        assert prefixes.find_misnamed(prefixes.number_prefixes(prompts)) is None
