# SPDX-License-Identifier: Apache-2.0
"""The events that wait to be sent: a bounded queue, and what an answer of the server means for them.

Shared by the two clients of `client.py`, which differ only in how they wait. Does no IO. Every method is
thread-safe and raises nothing.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import httpx
from pydantic import ValidationError

from vllm_lifetime.boundaries import MAX_BATCH, Boundary

__all__ = ["MAX_BODY_BYTES", "ClientStats", "Outbox", "encode"]

logger = logging.getLogger("vllm_lifetime.harness")

MAX_BODY_BYTES = 1 << 20
"""Longest body that the server reads, in bytes."""

FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
"""Seconds between two attempts: doubled from the first to the longest, each cut by up to half at random."""

MAX_SERVER_ERRORS = 5
"""Attempts at a batch that the server fails on with a 500: one event that breaks it must not hold up the rest for good."""

_RETRIED = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses that say `later`: tried until they pass."""

_ADVICE = {
    401: "set VLLM_LIFETIME_TOKEN here, or token=..., to the server's token",
    404: "is this a vLLM server that was started with `--kv-connector lifetime`, and the URL its root?",
}


@dataclass(frozen=True)
class ClientStats:
    """Where the events of a client are. Each event is counted in exactly one of these."""

    queued: int = 0
    """Waiting, or on their way."""

    sent: int = 0
    """Taken by the server, which tells its engines at once or, if it answers `queued`, between two of their steps."""

    dropped: int = 0
    """Not queued: the queue was full, or the client closed."""

    failed: int = 0
    """Given up: the server did not take them before the client was closed, or failed on them each time."""

    refused: int = 0
    """Not valid: found here, or said by the server (4xx, or the outcome `rejected`)."""


class Outbox:
    """A bounded queue of events, each encoded as JSON, and their count."""

    def __init__(self, server: str, queue_size: int, batch_size: int) -> None:
        """Hold at most `queue_size` events for `server` (its name in the log), and give out at most `batch_size` at once.

        Raises `ValueError` unless both are positive.
        """
        if queue_size < 1 or batch_size < 1:
            raise ValueError(f"queue_size and batch_size must be 1 or more, not {queue_size} and {batch_size}")
        self._server = server
        self._queue_size = queue_size
        self._batch_size = min(batch_size, MAX_BATCH)
        self.reset()

    def reset(self) -> None:
        """Start anew, empty and open, with a lock of its own: in a forked child the parent's events are the parent's."""
        self.changed = threading.Condition()
        """Notified when an event comes in or goes out. Its lock guards everything here."""
        self._queue: deque[bytes] = deque()
        self._sent = self._dropped = self._failed = self._refused = 0
        self._closed = False
        self._attempts = 0
        self._one_by_one = 0
        self._logged: set[str] = set()
        self._logged_until_sent: set[str] = set()

    def __len__(self) -> int:
        """Return how many events wait or are on their way."""
        return len(self._queue)

    @property
    def stats(self) -> ClientStats:
        """Return the counts of this moment."""
        with self.changed:
            return ClientStats(len(self._queue), self._sent, self._dropped, self._failed, self._refused)

    def put(self, fields: Mapping[str, Any]) -> bool:
        """Queue the event with these fields, `None` meaning absent; return whether it is in the queue."""
        try:
            event = Boundary.model_validate({key: value for key, value in fields.items() if value is not None})
            encoded = event.model_dump_json(exclude_none=True).encode()
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            return self._refuse(f"{field}: {first['msg']}")
        except Exception as error:
            return self._refuse(str(error) or type(error).__name__)
        if len(encoded) + 2 > MAX_BODY_BYTES:
            return self._refuse(f"it is longer than {MAX_BODY_BYTES} bytes")
        with self.changed:
            if self._closed or len(self._queue) >= self._queue_size:
                self._dropped += 1
                why = "the client is closed" if self._closed else f"{self._queue_size} already wait for {self._server}"
                self._log_until_sent(logging.WARNING, "dropped", f"a boundary was dropped: {why}")
                return False
            self._queue.append(encoded)
            self.changed.notify_all()
            return True

    def take(self) -> list[bytes]:
        """Return the next batch, as its encoded events; they stay queued until `settle`."""
        with self.changed:
            batch: list[bytes] = []
            size_bytes = 2
            for event in islice(self._queue, 1 if self._one_by_one else self._batch_size):
                size_bytes += len(event) + 1
                if batch and size_bytes > MAX_BODY_BYTES:
                    break
                batch.append(event)
            return batch

    def settle(self, batch: list[bytes], answer: httpx.Response | Exception) -> float:
        """Count what became of a batch, by the server's answer to it.

        Returns the seconds to wait before the next `take`: 0 unless the batch has to be tried again.
        """
        with self.changed:
            if isinstance(answer, Exception):
                return self._retry("unreachable", f"{self._server} cannot be reached: {answer or type(answer).__name__}")
            status = answer.status_code
            text = f"{self._server} answered {status}: {answer.text[:300]}"
            if answer.is_success:
                rejected = _count_rejected(answer)
                if rejected:
                    self._log_until_sent(logging.ERROR, "rejected", f"{rejected} boundaries were rejected: {text}")
                else:
                    self._logged_until_sent.clear()
                self._remove(batch, refused=rejected)
            elif status in _RETRIED or (answer.is_server_error and self._attempts + 1 < MAX_SERVER_ERRORS):
                return self._retry(str(status), text)
            elif answer.is_server_error:
                self._log_until_sent(logging.ERROR, "given up", f"{len(batch)} boundaries were given up: {text}")
                self._remove(batch, failed=len(batch))
            elif status in (413, 422) and len(batch) > 1:
                self._one_by_one = len(batch)  # a list is taken or refused as a whole: find out which event is wrong
            else:
                advice = f" ({_ADVICE[status]})" if status in _ADVICE else ""
                self._log_until_sent(logging.ERROR, f"refused {status}", f"boundaries were refused: {text}{advice}")
                self._remove(batch, refused=len(batch))
            return 0.0

    def give_up(self) -> None:
        """Take nothing more, and count as failed what still waits."""
        with self.changed:
            self._closed = True
            if self._queue:
                logger.warning("lifetime: %d boundaries could not be sent to %s", len(self._queue), self._server)
            self._remove(list(self._queue), failed=len(self._queue))

    def close(self) -> None:
        """Take nothing more; what waits can still be sent."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Block for at most `timeout_s` seconds until nothing waits; return whether that is so."""
        with self.changed:
            return self.changed.wait_for(lambda: not self._queue, timeout_s)

    def wait(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block until `condition` holds, for at most `timeout_s` seconds."""
        with self.changed:
            self.changed.wait_for(condition, timeout_s)

    def notify(self) -> None:
        """Let everybody who waits look at their condition again."""
        with self.changed:
            self.changed.notify_all()

    def _remove(self, batch: list[bytes], *, refused: int = 0, failed: int = 0) -> None:
        """Take the batch out of the queue; those of it neither refused nor failed were sent."""
        count = 0
        for event in batch:
            if self._queue and self._queue[0] is event:  # else it was given up while on its way
                self._queue.popleft()
                count += 1
        refused, failed = min(refused, count), min(failed, count)
        self._refused += refused
        self._failed += failed
        self._sent += count - refused - failed
        self._attempts = 0
        self._one_by_one = max(0, self._one_by_one - count)
        self.changed.notify_all()

    def _retry(self, key: str, text: str) -> float:
        self._log_until_sent(logging.WARNING, key, f"boundaries wait: {text}")
        delay_s: float = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._attempts, 16))
        self._attempts += 1
        return delay_s * random.uniform(0.5, 1.0)

    def _refuse(self, text: str) -> bool:
        """Count an event as refused, and log why: each reason once, and no more than a hundred."""
        with self.changed:
            self._refused += 1
            if text not in self._logged and len(self._logged) < 100:
                self._logged.add(text)
                logger.error("lifetime: a boundary was not sent: %s", text)
        return False

    def _log_until_sent(self, level: int, key: str, text: str) -> None:
        """Log once what would repeat itself with every event, until the server takes some again."""
        if key not in self._logged_until_sent:
            self._logged_until_sent.add(key)
            logger.log(level, "lifetime: %s", text)


def encode(batch: list[bytes]) -> bytes:
    """Return a batch as the body of a request."""
    return b"[" + b",".join(batch) + b"]"


def _count_rejected(answer: httpx.Response) -> int:
    """Return how many events the server says that it rejected."""
    try:
        return sum(1 for outcome in answer.json()["outcomes"] if outcome["status"] == "rejected")
    except Exception:  # any 2xx means that they arrived
        return 0
