# SPDX-License-Identifier: Apache-2.0
"""Our own trace format: whatever is written is read again; what is wrong is named."""

import gzip
import json
import tempfile
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.traces.trace_testing import assert_same_traces
from vllm_lifetime.traces.jsonl import write_jsonl
from vllm_lifetime.traces.read import TraceError, read_trace
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=8)
seconds = st.floats(0, 1e6)
HEADER = {"format": "vllm-lifetime-trace", "version": 1, "name": "t", "block_size_tokens": 16}
SESSION = {"session_id": "s"}
REQUEST = {
    "session_id": "s",
    "blocks": [[0, 3], 7],
    "after": -1,
    "gap_s": 0,
    "service_s": 1,
    "input_tokens": 64,
    "output_tokens": 1,
}


def prefix_ids(content: list[int]) -> NDArray[np.int64]:
    """An id for each prefix of `content`, other prefixes having others."""
    return np.array(list(accumulate(content, lambda prefix, block: 7 * prefix + block + 1, initial=0))[1:], np.int64)


@st.composite
def sessions(draw: st.DrawFn) -> TraceSession:
    requests = tuple(
        TraceRequest(
            draw(st.lists(st.integers(0, 5), max_size=8).map(prefix_ids)),
            draw(st.integers(-1, index - 1)),
            draw(seconds),
            draw(seconds),
            draw(st.integers(0, 1 << 30)),
            draw(st.integers(0, 1 << 30)),
            draw(names),
            *(draw(st.none() | names) for _ in range(4)),
            *(draw(st.booleans()) for _ in range(3)),
        )
        for index in range(draw(st.integers(0, 4)))
    )
    return TraceSession(draw(names), requests, draw(st.booleans()), draw(st.none() | seconds))


@settings(max_examples=60, deadline=None)
@given(st.lists(sessions(), max_size=4, unique_by=lambda s: s.session_id), names, st.integers(1, 512))
def test_what_is_written_is_read_again(written: list[TraceSession], name: str, block_size: int) -> None:
    trace = Trace(name, block_size, tuple(written))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.jsonl"
        write_jsonl(trace, path)
        assert_same_traces(read_trace(path, "jsonl"), trace)


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_blocks_may_be_ids_and_pairs(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", HEADER, SESSION, REQUEST), "jsonl")
    assert trace.sessions[0].requests[0].blocks.tolist() == [0, 1, 2, 7]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "header line"),
        ([HEADER | {"format": "other"}], "'format'"),
        ([HEADER | {"version": 2}], "'version'"),
        ([HEADER | {"block_size_tokens": 0}], "'block_size_tokens'"),
        ([HEADER, REQUEST], ":2: field 'session_id'"),
        ([HEADER, SESSION, SESSION], ":3: expected each session once"),
        ([HEADER, SESSION, REQUEST | {"after": 0}], ":3: field 'after'"),
        ([HEADER, SESSION, REQUEST | {"after": True}], ":3: field 'after'"),
        (
            [HEADER, SESSION, REQUEST | {"output_tokens": 10**19}],
            ":3: field 'output_tokens': expected a whole number of at least 0",
        ),
        ([HEADER, SESSION, REQUEST | {"gap_s": -1}], ":3: field 'gap_s': expected a number of at least 0, found -1"),
        ([HEADER, SESSION, REQUEST | {"service_s": float("nan")}], "'service_s'"),
        ([HEADER, SESSION, REQUEST | {"gap_s": 10**400}], ":3: field 'gap_s': expected a number of at least 0, found 1000"),
        ([HEADER | {"name": "\ud800"}], "field 'name': expected a non-empty string that UTF-8 can hold, found '\\ud800'"),
        ([HEADER, SESSION, REQUEST | {"tool": "\udfff"}], "'tool': expected a string that UTF-8 can hold, or null"),
        ([HEADER, SESSION, REQUEST | {"blocks": [[1, -1]]}], "'blocks'"),
        ([HEADER, SESSION, REQUEST | {"blocks": [[0, 1 << 40]]}], "'blocks'"),
        ([HEADER, SESSION, REQUEST | {"blocks": "1"}], "'blocks'"),
        ([HEADER, SESSION, REQUEST | {"ends_turn": 1}], "'ends_turn'"),
        ([HEADER, "{"], ":2: expected JSON"),
        ([HEADER, "[]"], ":2: expected a JSON object"),
    ],
)
def test_an_error_says_where_and_what(tmp_path: Path, rows: list[object], says: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(write(tmp_path / "t.jsonl", *rows), "jsonl")
    assert says in str(caught.value)
    assert "t.jsonl" in str(caught.value)


def test_an_unknown_format_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="known are kv-cache-tester, claude-code, codex, mooncake, mapcoder, jsonl"):
        read_trace(tmp_path, "csv")


def test_a_broken_archive_is_an_error(tmp_path: Path) -> None:
    broken = tmp_path / "t.jsonl.xz"
    broken.write_bytes(b"no xz")
    for name in (broken, tmp_path / "missing.jsonl"):
        with pytest.raises(TraceError, match="cannot be read"):
            read_trace(name, "jsonl")


def test_a_damaged_gz_is_an_error(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b"".join(b'{"n": %d}\n' % n for n in range(999))))
    packed[40:60] = b"\xff" * 20
    (tmp_path / "t.jsonl.gz").write_bytes(packed)
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz: cannot be read"):
        read_trace(tmp_path / "t.jsonl.gz", "jsonl")
