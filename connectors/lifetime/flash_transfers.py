# SPDX-License-Identifier: Apache-2.0
"""Transfers between flash and the tiers above, in the worker.

Flash is reached through host memory on every platform: a load reads slots into staging slots and copies those to HBM, a store
without a host tier goes the other way round. File reads and writes run on IO threads; `poll`, on the main thread, moves each
transfer from one phase to the next. On the CPU platform the IO thread copies to HBM itself, which saves a load an engine step.
A read that does not return by its deadline is given up: its blocks count as failed and are not touched any more, its staging
slots come back when the read does.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from vllm.logger import init_logger

from vllm_lifetime.connectors.lifetime.copy_engine import CopyQueue
from vllm_lifetime.flash import FlashDevice
from vllm_lifetime.flash.wear_counts import WriteReason

__all__ = ["Finished", "FlashLoad", "FlashTransfers"]

logger = init_logger(__name__)

CLEAR_TIMEOUT_S = 10.0
"""Longest wait, at shutdown, for a reset to reach the device."""

Finished = Callable[[set[int], bool, float], None]
"""`finished(failed positions, is late, seconds of transfer)`, on the main thread."""


class FlashLoad:
    """A load: chunks as large as the staging slots allow, each read and then copied. Its fields are the module's own."""

    def __init__(
        self, slots: Sequence[int], keys: Sequence[bytes], block_ids: Sequence[int], deadline: float, finished: Finished
    ) -> None:
        self.slots, self.keys, self.block_ids = slots, keys, block_ids
        self.deadline = deadline
        self.finished = finished
        self.position = 0
        self.failed: set[int] = set()
        self.seconds = 0.0
        self.copy: int | None = None
        """The copy to HBM under way."""
        self.is_cancelled = False


class _Chunk:
    """Positions `[start, start + len(staging))` of a load, being read."""

    def __init__(self, load: FlashLoad, start: int, staging: list[int]) -> None:
        self.load, self.start, self.staging = load, start, staging
        self.reads: list[tuple[Future[list[bool]], int]] = []
        """Each thread's share, and its size."""
        self.started = self.ended = time.monotonic()
        # Held while a read block is copied to HBM, so that giving up means that no copy comes later. Never held over IO.
        self.copying = threading.Lock()
        self.is_abandoned = False


class FlashTransfers:
    """All flash transfers of one worker. Main thread only, but for the reads and writes themselves.

    Args:
        device: the open flash device.
        copies: copies between HBM and host slots.
        staging: numbers of the host slots that transfers pass through; at least one.
        num_threads: IO threads.

    """

    def __init__(self, device: FlashDevice, copies: CopyQueue, staging: Sequence[int], num_threads: int) -> None:
        self._device = device
        self._copies = copies
        self._free_staging = list(staging)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lifetime-flash")
        self._waiting_loads: deque[FlashLoad] = deque()
        self._reading: list[_Chunk] = []
        self._abandoned: list[_Chunk] = []
        self._writing: list[tuple[list[Future[list[bool]]], list[int], Sequence[int], list[int], Finished]] = []
        self._num_copying = 0
        self._to_invalidate: list[int] = []
        self._num_clears = 0
        self._forgetting: list[Future[None]] = []
        """What the device is still to forget: while any is under way, nothing is written."""

    # ------------------------------------------------------------------ orders

    def load(
        self,
        slots: Sequence[int],
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        deadline: float,
        finished: Finished,
    ) -> FlashLoad:
        """Bring flash slots to HBM blocks, until `deadline` (a `time.monotonic` time). The answer is for `cancel`."""
        load = FlashLoad(slots, keys, block_ids, deadline, finished)
        self._waiting_loads.append(load)
        self._start_waiting()
        return load

    def cancel(self, load: FlashLoad) -> None:
        """End a load: when this returns none of its blocks is written any more. Waits for a copy from memory, never for a read.

        What has not arrived counts as failed; nothing happens if the load is over.
        """
        load.is_cancelled = True
        if load in self._waiting_loads:
            self._waiting_loads.remove(load)
            self._give_up(load, load.position, is_late=False)
        for chunk in [chunk for chunk in self._reading if chunk.load is load]:
            self._abandon(chunk, is_late=False)
        if load.copy is not None:
            self._copies.wait({load.copy})

    def store(
        self,
        block_ids: Sequence[int],
        slots: Sequence[int],
        keys: Sequence[bytes],
        classes: Sequence[str],
        finished: Finished,
    ) -> int | None:
        """Write HBM blocks, of these segment classes, to flash slots.

        Returns the number of the first copy if it could start at once, else None.

        What does not fit into the staging slots at once is not written: its positions are reported as failed. A demotion is
        worth no wait.
        """
        count = min(len(slots), len(self._free_staging))
        left_out = set(range(count, len(slots)))
        if count == 0:
            finished(left_out, False, 0.0)
            return None
        staging = [self._free_staging.pop() for _ in range(count)]
        self._num_copying += 1
        num_clears = self._num_clears

        def written(failed: set[int], late: bool, seconds: float) -> None:
            finished(failed | left_out, late, seconds)

        def copied(success: bool, _: float) -> None:
            self._num_copying -= 1
            # What was on its way when everything was to be forgotten must not arrive.
            if not success or num_clears != self._num_clears:
                self._free_staging.extend(staging)
                finished(set(range(len(slots))), False, 0.0)
                return
            self._write(staging, slots[:count], keys[:count], classes[:count], staging, written)

        return self._copies.store(block_ids[:count], staging, copied)

    def demote(
        self,
        host_slots: Sequence[int],
        flash_slots: Sequence[int],
        keys: Sequence[bytes],
        classes: Sequence[str],
        finished: Finished,
    ) -> None:
        """Write host slots, of these segment classes, to flash slots."""
        self._write(host_slots, flash_slots, keys, classes, [], finished)

    def clear(self) -> None:
        """Forget every block on the device, on an IO thread; until that is done nothing is written.

        What is being written now is forgotten when it is there.
        """
        self._num_clears += 1
        self._forgetting.append(self._threads.submit(self._device.clear))
        for _, _, flash_slots, _, _ in self._writing:
            self._to_invalidate.extend(flash_slots)

    def oldest_start(self) -> float | None:
        """When the oldest read still out began (a `time.monotonic` time), given up or not; None without any."""
        return min((chunk.started for chunk in (*self._reading, *self._abandoned)), default=None)

    # ------------------------------------------------------------------ progress

    def poll(self) -> None:
        """Move every transfer on; never waits."""
        now = time.monotonic()
        for chunk in [c for c in self._abandoned if all(read.done() for read, _ in c.reads)]:
            self._abandoned.remove(chunk)
            self._free_staging.extend(chunk.staging)
        for chunk in list(self._reading):
            if all(read.done() for read, _ in chunk.reads):
                self._reading.remove(chunk)
                self._chunk_read(chunk)
            elif now > chunk.load.deadline:
                self._abandon(chunk, is_late=True)
        for load in [load for load in self._waiting_loads if now > load.deadline]:
            self._waiting_loads.remove(load)
            self._give_up(load, load.position, is_late=True)
        for item in [item for item in self._writing if all(write.done() for write in item[0])]:
            self._writing.remove(item)
            self._written(*item)
        self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting_loads and self._free_staging:
            load = self._waiting_loads.popleft()
            start = load.position
            count = min(len(load.slots) - start, len(self._free_staging))
            staging = [self._free_staging.pop() for _ in range(count)]
            load.position += count
            chunk = _Chunk(load, start, staging)
            chunk.reads = [(self._threads.submit(self._read, chunk, i, j), j - i) for i, j in self._shares(0, count)]
            self._reading.append(chunk)

    def _shares(self, start: int, end: int) -> list[tuple[int, int]]:
        """`[start, end)` in as many parts as there are threads."""
        size = -(-(end - start) // self._num_threads)
        return [(i, min(i + size, end)) for i in range(start, end, size)]

    def _chunk_read(self, chunk: _Chunk) -> None:
        load = chunk.load
        hits = [hit for read, size in chunk.reads for hit in self._result(read, size)]
        good = [i for i, hit in enumerate(hits) if hit]
        load.failed.update(chunk.start + i for i, hit in enumerate(hits) if not hit)

        load.seconds += chunk.ended - chunk.started

        def copied(success: bool, seconds: float) -> None:
            self._num_copying -= 1
            load.copy = None
            load.seconds += seconds
            if not success:
                load.failed.update(chunk.start + i for i in good)
            self._free_staging.extend(chunk.staging)
            self._chunk_done(load)

        self._num_copying += 1
        if good and self._copies.load_now is None:
            targets = [load.block_ids[chunk.start + i] for i in good]
            load.copy = self._copies.load([chunk.staging[i] for i in good], targets, copied)
        else:
            copied(True, 0.0)

    def _chunk_done(self, load: FlashLoad) -> None:
        if load.position >= len(load.slots):
            load.finished(load.failed, False, load.seconds)
        elif load.failed or load.is_cancelled:
            # vLLM recomputes everything behind the first block that failed: the rest need not be read.
            load.finished(load.failed | set(range(load.position, len(load.slots))), False, load.seconds)
        else:
            self._waiting_loads.appendleft(load)

    def _abandon(self, chunk: _Chunk, *, is_late: bool) -> None:
        """Wait no longer for a chunk's reads; what they bring is not copied."""
        with chunk.copying:
            chunk.is_abandoned = True
        self._reading.remove(chunk)
        self._abandoned.append(chunk)
        self._give_up(chunk.load, chunk.start, is_late=is_late)

    def _give_up(self, load: FlashLoad, start: int, *, is_late: bool) -> None:
        load.failed.update(range(start, len(load.slots)))
        load.finished(load.failed, is_late, load.seconds)

    def _write(
        self,
        sources: Sequence[int],
        flash_slots: Sequence[int],
        keys: Sequence[bytes],
        classes: Sequence[str],
        staging: list[int],
        finished: Finished,
    ) -> None:
        """Write host slots to flash slots; `staging`: those of them that are staging slots, all or none."""
        self._forgetting = [future for future in self._forgetting if not future.done()]
        if self._forgetting:
            self._free_staging.extend(staging)
            finished(set(range(len(sources))), False, 0.0)
            return
        shares = self._shares(0, len(sources))
        reason = WriteReason.DEMOTION if staging else WriteReason.MOVE
        writes = [
            self._threads.submit(self._write_some, sources[i:j], flash_slots[i:j], keys[i:j], classes[i:j], reason)
            for i, j in shares
        ]
        self._writing.append((writes, [j - i for i, j in shares], flash_slots, staging, finished))

    def _written(
        self,
        writes: list[Future[list[bool]]],
        sizes: list[int],
        flash_slots: Sequence[int],
        staging: list[int],
        finished: Finished,
    ) -> None:
        done = [ok for write, size in zip(writes, sizes, strict=True) for ok in self._result(write, size)]
        self._free_staging.extend(staging)
        if self._to_invalidate:
            stale = set(flash_slots).intersection(self._to_invalidate)
            if stale:
                self._forgetting.append(self._threads.submit(self._device.invalidate, sorted(stale)))
            self._to_invalidate = [slot for slot in self._to_invalidate if slot not in stale]
        finished({i for i, ok in enumerate(done) if not ok}, False, 0.0)

    @staticmethod
    def _result(future: Future[list[bool]], size: int) -> list[bool]:
        error = future.exception()
        if error is None:
            return future.result()
        logger.error("a flash transfer failed: %r", error)
        return [False] * size

    # ------------------------------------------------------------------ IO threads

    def _read(self, chunk: _Chunk, start: int, end: int) -> list[bool]:
        """Read positions `start <= i < end` of a chunk; where the platform allows, bring each to HBM at once."""
        load = chunk.load
        load_now = self._copies.load_now
        hits = []
        for i in range(start, end):
            position = chunk.start + i
            hit = False
            try:
                if not chunk.is_abandoned:
                    pages = self._copies.host_pages(chunk.staging[i])
                    hit = self._device.read(load.slots[position], load.keys[position], pages).hit
                if hit and load_now is not None:
                    with chunk.copying:
                        hit = not chunk.is_abandoned
                        if hit:
                            load_now([chunk.staging[i]], [load.block_ids[position]])
            except Exception:
                logger.exception("a flash read failed")
                hit = False
            hits.append(hit)
            if not hit:
                # vLLM recomputes everything behind the first block that failed.
                break
        chunk.ended = time.monotonic()
        return hits + [False] * (end - start - len(hits))

    def _write_some(
        self,
        sources: Sequence[int],
        flash_slots: Sequence[int],
        keys: Sequence[bytes],
        classes: Sequence[str],
        reason: WriteReason,
    ) -> list[bool]:
        pages = self._copies.host_pages
        return [
            self._device.write(slot, key, pages(source), segment_class, reason)
            for source, slot, key, segment_class in zip(sources, flash_slots, keys, classes, strict=True)
        ]

    def shutdown(self) -> None:
        """Start no more reads and writes, and close the device, which waits for those that run, but not for ever."""
        # What was to be forgotten must not be there after a restart.
        wait(self._forgetting, timeout=CLEAR_TIMEOUT_S)
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._device.close()
