# SPDX-License-Identifier: Apache-2.0
"""The recorder: what it writes is read as a trace, and it never gets in the scheduler's way."""

import json
import threading
from pathlib import Path

import pytest

from vllm_lifetime.boundaries import Spawn
from vllm_lifetime.connectors.lifetime.recording import TraceRecorder
from vllm_lifetime.traces.read import TraceError, read_trace
from vllm_lifetime.traces.spawns import read_spawns


def hashes(*names: str) -> list[bytes]:
    return [name.encode() for name in names]


def run(recorder: TraceRecorder, name: str, starts_s: float, ends_s: float, blocks: list[bytes], **who: str) -> None:
    recorder.on_request_started(name, starts_s, blocks, len(blocks) * 16 + 1, **who)
    recorder.on_request_finished(name, ends_s, 5, finish_reason="stop")


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = TraceRecorder(path, 16)
    lead = {"session_id": "s", "agent": "lead", "agent_id": "l"}
    worker = {"session_id": "s", "agent": "worker", "agent_id": "w", "parent_agent_id": "l"}
    run(recorder, "1", 0.0, 2.0, hashes("a", "b"), **lead)
    run(recorder, "2", 3.0, 6.0, hashes("c"), **worker)
    recorder.on_boundary("subagent_return", 6.1, session_id="s", agent_id="w")
    run(recorder, "3", 7.0, 8.0, hashes("a", "b", "d"), **lead)
    recorder.on_boundary("turn_end", 8.1, session_id="s", agent_id="l")
    recorder.on_boundary("compaction", 8.2, session_id="s", agent_id="l")
    run(recorder, "4", 18.0, 19.0, hashes("a", "e"), **lead)
    run(recorder, "5", 18.5, 19.0, hashes("a"))
    recorder.on_boundary("session_end", 19.1, session_id="s")
    run(recorder, "6", 20.0, 21.0, hashes("a"), **lead)
    recorder.on_request_started("7", 22.0, hashes("a"), 17, **lead)
    recorder.close()

    trace = read_trace(path, "jsonl")
    assert trace.block_size_tokens == 16
    assert [(s.session_id, s.names_session, len(s.requests)) for s in trace.sessions] == [
        ("s", True, 4),
        ("5", False, 1),
        ("s#2", True, 1),
    ]
    assert [s.arrival_s for s in trace.sessions] == pytest.approx([0.0, 18.5, 20.0], abs=1e-3)
    first, sub, second, third = trace.sessions[0].requests
    assert [r.blocks.tolist() for r in (first, sub, second, third)] == [[0, 1], [2], [0, 1, 3], [0, 4]]
    assert [r.after for r in (first, sub, second, third)] == [-1, 0, 1, 2]
    assert [r.gap_s for r in (first, sub, second, third)] == pytest.approx([0, 1, 1, 10], abs=1e-3)
    assert (sub.ends_agent, second.ends_turn, third.compacts, first.ends_turn) == (True, True, True, False)
    assert (sub.agent, sub.parent_agent_id, first.service_s) == ("worker", "l", pytest.approx(2.0, abs=1e-3))


def test_a_restarted_server_goes_on_after_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for began_s in (0.0, 2.0):
        recorder = TraceRecorder(path, 16)
        run(recorder, "1", began_s, began_s + 1.0, hashes("a"), session_id="s")
        recorder.close()
        with path.open("a") as file:
            file.write('{"kind":"start","at')
    trace = read_trace(path, "jsonl")
    assert [(s.session_id, s.requests[0].blocks.tolist()) for s in trace.sessions] == [("s", [0]), ("s#2", [1])]


def test_of_a_spawn_lengths_and_names_are_kept_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = TraceRecorder(path, 16)
    run(recorder, "1", 0.0, 1.0, hashes("a"), session_id="s", agent_id="l")
    spawn = Spawn(instruction="secret", tools=("bash",), position=2)
    recorder.on_boundary("subagent_spawn", 1.1, session_id="s", agent="w", agent_id="w-1", parent_agent_id="l", spawn=spawn)
    run(recorder, "2", 1.2, 2.0, hashes("b"), session_id="s", agent="w", agent_id="w-1", parent_agent_id="l")
    recorder.on_boundary("subagent_return", 3.1, session_id="s", agent="w", agent_id="w-1")
    recorder.close()
    assert "secret" not in path.read_text()
    (sample,) = read_spawns(path, "jsonl")
    assert (sample.signal.instruction_chars, sample.signal.tools) == (6, ("bash",))


def test_a_torn_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = TraceRecorder(path, 16)
    run(recorder, "1", 0.0, 1.0, hashes("a"), session_id="s")
    recorder.close()
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[0], rows[1][:20], rows[2]]) + "\n")
    with pytest.raises(TraceError, match=r"r.jsonl:2: expected JSON"):
        read_trace(path, "jsonl")


def test_a_slow_disk_costs_records_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = TraceRecorder(tmp_path / "r.jsonl", 16, max_queued=5)
    gate, row = threading.Event(), recorder._row
    monkeypatch.setattr(recorder, "_row", lambda record: (gate.wait(10), row(record))[1])
    for index in range(50):
        recorder.on_boundary("turn_end", float(index), session_id="s")
    assert 44 <= recorder.dropped <= 45  # five wait, and one may be in the writer's hand
    gate.set()
    recorder.close()
    rows = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert {"kind": "note", "dropped": recorder.dropped} in rows
    assert sum(row.get("kind") == "boundary" for row in rows) + recorder.dropped == 50


def test_a_disk_that_is_full_at_the_start_is_an_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="No space"):
        TraceRecorder("/dev/full", 16)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(row: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = TraceRecorder(tmp_path / "r.jsonl", 16)
    monkeypatch.setattr(recorder, "_write_row", write)
    run(recorder, "1", 0.0, 1.0, hashes("a"))
    recorder.close()
    run(recorder, "2", 2.0, 3.0, hashes("a"))
    assert recorder.dropped >= 1
    assert "recording to" in caplog.text


def test_forgotten_blocks_are_new_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_lifetime.connectors.lifetime.recording.MAX_KNOWN_BLOCKS", 2)
    recorder = TraceRecorder(tmp_path / "r.jsonl", 16)
    for index, blocks in enumerate((hashes("a", "b"), hashes("a", "c"), hashes("a", "b"))):
        run(recorder, str(index), index * 2.0, index * 2.0 + 1, blocks, session_id="s")
    recorder.close()
    requests = read_trace(tmp_path / "r.jsonl", "jsonl").sessions[0].requests
    assert [r.blocks.tolist() for r in requests] == [[0, 1], [0, 2], [0, 3]]
