# SPDX-License-Identifier: Apache-2.0
"""The line that a terminal shows while a run goes on."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vllm_lifetime.bench.records import RunRecord

__all__ = ["RunProgress"]


class RunProgress:
    """Requests that have ended, hit rate and errors so far. Nothing is shown where there is no terminal. A context manager."""

    def __init__(self, console: Console, num_requests: int) -> None:
        self._progress = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("hit rate {task.fields[hit_rate]:6.1%}  sessions {task.fields[sessions]}  errors {task.fields[errors]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("", total=num_requests, hit_rate=0.0, sessions=0, errors=0)

    def update(self, record: RunRecord) -> None:
        """A request, or a session, has ended."""
        self._progress.update(
            self._task,
            completed=record.num_ended,
            hit_rate=record.hit_rate,
            sessions=record.num_sessions_ended,
            errors=record.num_errors,
        )

    def __enter__(self) -> Self:
        """Show it."""
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Hide it."""
        self._progress.stop()
