# SPDX-License-Identifier: Apache-2.0
"""The semantic stream's way out of a worker: hidden states of prompts' last tokens, one float32 row per request.

Worker process, main thread. `patches/hidden_state.py` offers the rows, `LifetimeWorker.report` takes them. vLLM's V1 runner asks
for the report before a step's states are there, the V2 runner after: rows travel one step after their prompt ended, or with it.
From a device they travel when their copy to the host has ended, which nobody waits for.
"""

import logging
from collections import deque

import numpy as np
import torch

__all__ = ["MAX_WAITING_ROWS", "HiddenStateTap"]

logger = logging.getLogger("vllm.lifetime")

MAX_WAITING_ROWS = 1024
"""Rows that wait for a report at most. Of more, the oldest are dropped: a predictor does without them."""


class HiddenStateTap:
    """Holds the rows that have not been reported yet. See the module."""

    def __init__(self, max_rows: int = MAX_WAITING_ROWS) -> None:
        self._max_rows = max_rows
        self._waiting: deque[tuple[list[str], torch.Tensor, torch.Event | None]] = deque()
        """Requests, their rows in host memory, and the end of the copy to there; in the order of the steps."""
        self._num_rows = 0

    def on_attached(self, is_sender: bool) -> None:
        """Say so once, in the log."""
        if is_sender:
            logger.info("lifetime: hidden states of prompts' last tokens are sent to the scheduler side")

    def on_refused(self, reason: str) -> None:
        """Say so once, in the log. What has been offered is still reported."""
        logger.warning("lifetime: hidden states are off: %s The predictor does without them.", reason.rstrip(".") + ".")

    def offer(self, request_ids: list[str], rows: torch.Tensor) -> None:
        """Keep `rows`, `[n, hidden size]`, for the next report. Starts their copy to the host and does not wait for it."""
        rows, device, copied = rows.float(), rows.device, None
        if device.type != "cpu":
            rows = rows.to("cpu", non_blocking=True)  # torch takes pinned memory for that
            copied = torch.Event(device)
            copied.record()
        self._waiting.append((request_ids, rows, copied))
        self._num_rows += len(request_ids)
        while self._num_rows > self._max_rows:
            self._num_rows -= len(self._waiting.popleft()[0])

    def take(self) -> dict[str, np.ndarray]:
        """Rows that are complete and have not been taken: request -> float32 `[hidden size]`. Empty on nearly every step."""
        taken: dict[str, np.ndarray] = {}
        while self._waiting:
            request_ids, rows, copied = self._waiting[0]
            if copied is not None and not copied.query():
                break
            self._waiting.popleft()
            self._num_rows -= len(request_ids)
            taken.update(zip(request_ids, rows.numpy(), strict=True))
        return taken
