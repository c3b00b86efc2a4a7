# SPDX-License-Identifier: Apache-2.0
"""Which agents workflows invoked, in order: what transition predictors learn from. One reader per format.

Both formats are JSON Lines, plain or `.xz`: `mapcoder` (`{"task": ..., "seq": [...]}`, as its published logs give it) and
`jsonl`, our own (`{"task": ..., "agents": [...]}`). Other keys of a line are ignored.
"""

import json
import lzma
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.prediction.forecast import END
from vllm_lifetime.traces.source import is_text

__all__ = ["WORKFLOW_FORMATS", "AgentWorkflow", "WorkflowFileError", "read_hidden_states", "read_workflows", "write_workflows"]

_ARCHIVE_ERRORS = (
    *(OSError, EOFError, ValueError, AttributeError, TypeError, MemoryError),
    # Of zipfile: a damaged member, one packed in a way it does not know, one with a password.
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, NotImplementedError, RuntimeError),
)


@dataclass(frozen=True, slots=True)
class AgentWorkflow:
    """One workflow that has ended: its agents in the order of invocation, at least one.

    Workflows of the same `task` are alike and never stand on both sides of a split.
    """

    task: str
    agents: tuple[str, ...]


class WorkflowFileError(ValueError):
    """A file of workflows cannot be read; the message says where and why."""


def read_workflows(path: str | Path, format: str = "jsonl") -> list[AgentWorkflow]:
    """Read all workflows of a file. Raises `WorkflowFileError`, with the line's number if it is one line's fault."""
    key = WORKFLOW_FORMATS.get(format)
    if key is None:
        raise WorkflowFileError(f"unknown format {format!r}; known: {', '.join(sorted(WORKFLOW_FORMATS))}")
    workflows = []
    try:
        with _open(Path(path)) as file:
            for number, line in _numbered(file):
                try:
                    workflows.append(_parse(line, key))
                except ValueError as error:
                    raise WorkflowFileError(f"{path}, line {number}: {error}") from None
    except (OSError, EOFError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise WorkflowFileError(f"{path}: cannot be read: {error}") from None
    if not workflows:
        raise WorkflowFileError(f"{path}: holds no workflow")
    return workflows


def write_workflows(path: str | Path, workflows: Sequence[AgentWorkflow]) -> None:
    """Write workflows in the format `jsonl`. Raises `OSError`."""
    with open(path, "w", encoding="utf-8") as file:
        for workflow in workflows:
            file.write(json.dumps({"task": workflow.task, "agents": workflow.agents}, ensure_ascii=False) + "\n")


def read_hidden_states(path: str | Path, workflows: Sequence[AgentWorkflow]) -> list[NDArray[np.float32]]:
    """Read the hidden states beside a file of workflows: a `.npz` with one array `hidden`, (invocations of all workflows in the
    file's order, hidden size), of any float type. Returns one array for each workflow. Raises `WorkflowFileError`."""
    try:
        with open(path, "rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("it is no such archive, or damaged; write one by numpy.savez(file, hidden=array)")
        with np.load(path, allow_pickle=False) as archive:
            stored = archive["hidden"]
            if stored.dtype.kind not in "fiu":
                raise ValueError(f"'hidden' holds elements of type {stored.dtype}, not real numbers")
            hidden = stored.astype(np.float32)
    except KeyError:
        raise WorkflowFileError(f"{path}: holds no array named 'hidden'") from None
    except _ARCHIVE_ERRORS as error:
        raise WorkflowFileError(f"{path}: cannot be read as .npz: {error}") from None
    ends = np.cumsum([len(workflow.agents) for workflow in workflows])
    if hidden.ndim != 2 or len(hidden) != ends[-1] or not hidden.shape[1]:
        raise WorkflowFileError(
            f"{path}: 'hidden' has shape {hidden.shape}, but the workflows have {ends[-1]} invocations: one row each is needed"
        )
    if not np.isfinite(hidden).all():
        raise WorkflowFileError(f"{path}: 'hidden' has elements that are not finite numbers")
    return np.split(hidden, ends[:-1])


def _open(path: Path) -> TextIO:
    opener: Callable[..., TextIO] = lzma.open if path.suffix == ".xz" else open
    return opener(path, "rt", encoding="utf-8")


def _numbered(file: TextIO) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield number, line


def _parse(line: str, key: str) -> AgentWorkflow:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    agents, task = row.get(key), row.get("task")
    if not isinstance(agents, list) or not agents:
        raise ValueError(f"{key!r} must be a list of agents, at least one, but is {agents!r:.60}")
    if (wrong := next((a for a in agents if not is_text(a) or not a or a == END), None)) is not None:
        raise ValueError(f"an agent in {key!r} must be a name other than {END}, but is {wrong!r:.60}")
    if isinstance(task, bool) or not (isinstance(task, int) or is_text(task)):
        raise ValueError(f"'task' must name the task by a string or a number, but is {task!r:.60}")
    return AgentWorkflow(task=str(task), agents=tuple(agents))


WORKFLOW_FORMATS = {"mapcoder": "seq", "jsonl": "agents"}
"""Name of each format -> the key under which a line has its agents."""
