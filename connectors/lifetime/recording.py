# SPDX-License-Identifier: Apache-2.0
"""Records a server's requests and boundaries as a JSON Lines log that `read_trace` reads: prompts as block ids, no text.

The scheduler thread only puts a tuple into a queue; one daemon thread numbers the block hashes and writes. If it falls behind or
the disk fails, records are dropped and counted, and serving goes on.
"""

import contextlib
import io
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from vllm_lifetime.boundaries import Spawn
from vllm_lifetime.traces.recorded import RECORDING_FORMAT, RECORDING_VERSION

__all__ = ["TraceRecorder"]

logger = logging.getLogger(__name__)

MAX_QUEUED = 10_000
"""Records that wait for the writer; beyond, they are dropped."""
MAX_KNOWN_BLOCKS = 1 << 20
"""Block hashes whose number is remembered, the latest used. One that was forgotten counts as new content."""
CLOSE_TIMEOUT_S = 5.0


class TraceRecorder:
    """Appends to `path`. Each recorder begins with a header; what a killed server left before it is kept.

    `on_*`: any one thread (the scheduler's). They take microseconds, and never block or raise. `now_s` is `time.monotonic()`.
    The constructor raises OSError if the file cannot be opened for appending.
    """

    def __init__(self, path: str | Path, block_size_tokens: int, max_queued: int = MAX_QUEUED) -> None:
        self.dropped = 0
        """Records lost: the queue was full, or a write failed."""
        self.written = 0
        self._max_queued = max_queued
        self._queue: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next_number = 0
        self._noted_drops = 0
        self._is_closed = self._has_failed = False
        # Times are written by the wall clock, so that several runs in one file follow one another.
        self._clock_offset_s = time.time() - time.monotonic()
        self._file = open(path, "a+b")  # noqa: SIM115 - closed by the writer
        try:
            self._begin(block_size_tokens)
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.close()
            raise
        self._thread = threading.Thread(target=self._write_all, name="lifetime-recorder", daemon=True)
        self._thread.start()

    def on_request_started(
        self,
        request_id: str,
        now_s: float,
        block_hashes: Sequence[bytes],
        input_tokens: int,
        *,
        session_id: str | None = None,
        workflow_id: str | None = None,
        agent: str | None = None,
        agent_id: str | None = None,
        parent_agent_id: str | None = None,
    ) -> None:
        """A request has arrived. `block_hashes`: of the whole blocks of its prompt, in order; they are copied."""
        names = (session_id, workflow_id, agent, agent_id, parent_agent_id)
        self._put(("start", now_s, request_id, tuple(block_hashes), input_tokens, names))

    def on_request_finished(
        self, request_id: str, now_s: float, output_tokens: int, *, finish_reason: str | None = None, tool: str | None = None
    ) -> None:
        """A request is over. `finish_reason`: `tool_calls`, `stop`, `length`, or what else is known."""
        self._put(("finish", now_s, request_id, output_tokens, finish_reason, tool))

    def on_boundary(
        self,
        event: str,
        now_s: float,
        *,
        session_id: str | None = None,
        workflow_id: str | None = None,
        agent: str | None = None,
        agent_id: str | None = None,
        parent_agent_id: str | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        """A boundary was applied. `event`: its kind (`turn_end`, ...). Of the texts of `spawn` only lengths are kept."""
        told = None if spawn is None else _describe(spawn)
        self._put(("boundary", now_s, event, (session_id, workflow_id, agent, agent_id, parent_agent_id), told))

    def close(self) -> None:
        """Write what waits and close the file; waits at most CLOSE_TIMEOUT_S. Later calls of `on_*` do nothing."""
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _put(self, record: tuple[Any, ...]) -> None:
        if self._is_closed:
            return
        if self._has_failed or self._queue.qsize() >= self._max_queued:
            self.dropped += 1
        else:
            self._queue.put(record)

    def _begin(self, block_size_tokens: int) -> None:
        if self._file.seek(0, io.SEEK_END):
            self._file.seek(-1, io.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")
        self._write_row({"format": RECORDING_FORMAT, "version": RECORDING_VERSION, "block_size_tokens": block_size_tokens})
        self._file.flush()

    # ------------------------------------------------------------------ the writer's thread

    def _write_all(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                self._write_row(self._row(record))
                if self._queue.empty():
                    self._note_drops()
                    self._file.flush()
            self._note_drops()
            self._file.flush()
        except Exception as error:
            self._has_failed = True
            self.dropped += 1
            logger.error("recording to %s has ended: %r. Serving goes on.", self._file.name, error)
        finally:
            # What could not be written cannot be written at closing either.
            with contextlib.suppress(OSError):
                self._file.close()

    def _note_drops(self) -> None:
        if self.dropped > self._noted_drops:
            self._noted_drops = self.dropped
            self._write_row({"kind": "note", "dropped": self.dropped})

    def _row(self, record: tuple[Any, ...]) -> dict[str, Any]:
        kind, now_s, *rest = record
        row: dict[str, Any] = {"kind": kind, "at_s": round(now_s + self._clock_offset_s, 6)}
        if kind == "finish":
            row["request_id"], row["output_tokens"], finish_reason, tool = rest
            names = {"finish_reason": finish_reason, "tool": tool}
        else:
            if kind == "start":
                row["request_id"], hashes, row["input_tokens"], ids = rest
                row["blocks"] = self._number(hashes)
            else:
                row["event"], ids, spawn = rest
                if spawn is not None:
                    row["spawn"] = spawn
            names = dict(zip(("session_id", "workflow_id", "agent", "agent_id", "parent_agent_id"), ids, strict=True))
        return row | {name: value for name, value in names.items() if value is not None}

    def _number(self, hashes: Sequence[bytes]) -> list[list[int]]:
        """[first, count] of consecutive numbers, by order of first sight."""
        runs: list[list[int]] = []
        numbers = self._numbers
        for block_hash in hashes:
            number = numbers.get(block_hash)
            if number is None:
                number = numbers[block_hash] = self._next_number
                self._next_number += 1
            else:
                numbers.move_to_end(block_hash)
            if runs and runs[-1][0] + runs[-1][1] == number:
                runs[-1][1] += 1
            else:
                runs.append([number, 1])
        while len(numbers) > MAX_KNOWN_BLOCKS:
            numbers.popitem(last=False)
        return runs

    def _write_row(self, row: dict[str, Any]) -> None:
        self._file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        self.written += 1


def _describe(spawn: Spawn) -> dict[str, Any]:
    """What the lifetime rank reads of a spawn record (docs/lifetime-rank.md), without its texts."""
    told = {
        "instruction_chars": None if spawn.instruction is None else len(spawn.instruction),
        "context_chars": None if spawn.context is None else len(spawn.context),
        "tools": list(spawn.tools) or None,
        "model": spawn.model,
        "position": spawn.position,
    }
    return {name: value for name, value in told.items() if value is not None}
