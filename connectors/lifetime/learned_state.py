# SPDX-License-Identifier: Apache-2.0
"""What was learned while serving, kept across restarts in one file (`state_path`).

EngineCore process. Read at start; written by a thread of its own, at intervals and at shutdown, whole or not at all, and never
on a step. A file that cannot be used is a warning and a fresh start.
"""

import json
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

__all__ = ["LearnedState"]

logger = init_logger(__name__)

FORMAT = "vllm-lifetime learned state"
VERSION = 1

MAX_FILE_BYTES = 64 << 20

SAVE_EVERY_S = 10.0
"""Often, since vLLM kills its EngineCore without waiting for it."""

MAX_TRIES = 5
"""Snapshots are taken while the scheduler goes on learning: one that it got in the way of is taken again."""


class LearnedState:
    """The file, and the thread that writes it.

    Args:
        path: the file; its directory must exist.
        parts: by name, a model's `to_json`.
        version: changes whenever there may be something new to write.
        save_every_s: seconds between two writes.

    """

    def __init__(
        self, path: Path, parts: dict[str, Callable[[], str]], version: Callable[[], int], save_every_s: float = SAVE_EVERY_S
    ) -> None:
        self._path = path
        self._parts = parts
        self._version = version
        self._saved_version: int | None = None
        self._save_every_s = save_every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lifetime-state", daemon=True)
        self._thread.start()

    @staticmethod
    def read(path: Path) -> dict[str, str]:
        """The models' texts by name; empty, with a warning, if there is nothing usable. No warning if there is no file."""
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
            document: Any = json.loads(content)
            if not isinstance(document, dict) or document.get("format") != FORMAT:
                raise ValueError("it is something else")
            if document.get("version") != VERSION:
                raise ValueError(f"its version is {document.get('version')!r}, and this package reads {VERSION}")
            parts = document["parts"]
            if not isinstance(parts, dict) or not all(isinstance(text, str) for text in parts.values()):
                raise ValueError("its parts are not texts")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, RecursionError) as error:
            logger.warning("state_path: %s cannot be used (%s): learning starts afresh, and the file is replaced", path, error)
            return {}
        return parts

    def _run(self) -> None:
        while not self._stop.wait(self._save_every_s):
            self.save()

    def save(self) -> bool:
        """Write the file, if anything has changed. Returns whether it holds what is known now."""
        version = self._version()
        if version == self._saved_version:
            return True
        text = self._snapshot()
        if text is None:
            return False
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=self._path.absolute().parent, prefix=f".{self._path.name}.")
            with os.fdopen(handle, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            logger.warning_once("state_path: %s cannot be written: %s", str(self._path), str(error))
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            return False
        self._saved_version = version
        return True

    def _snapshot(self) -> str | None:
        for _ in range(MAX_TRIES):
            try:
                parts = {name: to_json() for name, to_json in self._parts.items()}
            except (RuntimeError, KeyError, IndexError):
                continue
            return json.dumps({"format": FORMAT, "version": VERSION, "parts": parts})
        logger.warning_once("state_path: what was learned changes too fast to be written; it is tried again later")
        return None

    def shutdown(self) -> None:
        """Write once more, and end the thread."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self.save()
