# SPDX-License-Identifier: Apache-2.0
import json
import lzma
from pathlib import Path

import numpy as np
import pytest

from vllm_lifetime.traces.workflows import (
    AgentWorkflow,
    WorkflowFileError,
    read_hidden_states,
    read_workflows,
    write_workflows,
)

MAPCODER = [
    {"file": "a.jsonl", "task": "HumanEval/1", "k": 3, "seq": ["retrieval", "planner", "coder", "debugger"], "solved": True},
    {"file": "a.jsonl", "task": 1629, "k": 3, "seq": ["retrieval"], "solved": False},
]


def test_mapcoder_is_read_from_xz(tmp_path: Path) -> None:
    path = tmp_path / "workflows.jsonl.xz"
    with lzma.open(path, "wt") as file:
        file.write("".join(json.dumps(row) + "\n\n" for row in MAPCODER))
    assert read_workflows(path, "mapcoder") == [
        AgentWorkflow("HumanEval/1", ("retrieval", "planner", "coder", "debugger")),
        AgentWorkflow("1629", ("retrieval",)),
    ]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    workflows = [AgentWorkflow("a", ("x", "ÿ")), AgentWorkflow("b", ("x",))]
    write_workflows(tmp_path / "w.jsonl", workflows)
    assert read_workflows(tmp_path / "w.jsonl") == workflows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: not a JSON object"),
        ('{"task": "t"}', "line 2: 'agents' must be a list"),
        ('{"task": "t", "agents": []}', "line 2: 'agents' must be a list"),
        ('{"task": "t", "agents": ["a", 1]}', "line 2: an agent in 'agents' must be a name"),
        ('{"task": "t", "agents": ["<END>"]}', "line 2: an agent in 'agents' must be a name other than <END>"),
        ('{"agents": ["a"]}', "line 2: 'task' must name the task"),
        (r'{"task": "\ud800", "agents": ["a"]}', "line 2: 'task' must name the task"),
        (r'{"task": "t", "agents": ["\ud800"]}', "line 2: an agent in 'agents' must be a name"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"task": "t", "agents": ["a"]}\n' + line + "\n")
    with pytest.raises(WorkflowFileError, match="w.jsonl, " + message):
        read_workflows(path)


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "cut.jsonl.xz").write_bytes(lzma.compress(b'{"task": "t"}' * 999)[:40])
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    for name, message in [
        ("absent.jsonl", "cannot be read"),
        ("empty.jsonl", "holds no workflow"),
        ("cut.jsonl.xz", "cannot be read"),
        ("binary.jsonl", "cannot be read"),
    ]:
        with pytest.raises(WorkflowFileError, match=message):
            read_workflows(tmp_path / name)
    with pytest.raises(WorkflowFileError, match="unknown format 'csv'; known: jsonl, mapcoder"):
        read_workflows(tmp_path / "empty.jsonl", "csv")


def test_hidden_states_are_divided_among_the_workflows(tmp_path: Path) -> None:
    workflows = [AgentWorkflow("a", ("x", "y")), AgentWorkflow("b", ("x",))]
    np.savez(tmp_path / "h.npz", hidden=np.arange(6, dtype=np.float16).reshape(3, 2))
    parts = read_hidden_states(tmp_path / "h.npz", workflows)
    assert [part.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5]]]
    assert parts[0].dtype == np.float32


def test_wrong_hidden_states_are_refused(tmp_path: Path) -> None:
    workflows = [AgentWorkflow("a", ("x", "y"))]
    np.savez(tmp_path / "short.npz", hidden=np.zeros((1, 2)))
    np.savez(tmp_path / "other.npz", x=np.zeros((2, 2)))
    np.savez(tmp_path / "nan.npz", hidden=np.full((2, 2), np.nan))
    np.savez(tmp_path / "pickle.npz", hidden=np.array([{}, {}], dtype=object))
    np.savez(tmp_path / "complex.npz", hidden=np.full((2, 2), 1j))
    np.save(tmp_path / "array.npy", np.zeros((2, 2)))
    np.savez_compressed(tmp_path / "damaged.npz", hidden=np.random.default_rng(0).random((2, 200)))
    damaged = bytearray((tmp_path / "damaged.npz").read_bytes())
    damaged[200:260] = b"\xff" * 60
    (tmp_path / "damaged.npz").write_bytes(damaged)
    (tmp_path / "text.npz").write_text("hello")
    for name, message in [
        ("short.npz", r"shape \(1, 2\), but the workflows have 2"),
        ("other.npz", "no array named 'hidden'"),
        ("nan.npz", "not finite"),
        ("pickle.npz", "cannot be read as .npz"),
        ("text.npz", "cannot be read as .npz: it is no such archive, or damaged; write one by numpy.savez"),
        ("array.npy", "cannot be read as .npz: it is no such archive, or damaged; write one by numpy.savez"),
        ("complex.npz", "'hidden' holds elements of type complex128, not real numbers"),
        ("damaged.npz", "cannot be read as .npz"),
        ("absent.npz", "cannot be read as .npz"),
    ]:
        with pytest.raises(WorkflowFileError, match=message):
            read_hidden_states(tmp_path / name, workflows)
