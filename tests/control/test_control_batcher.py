# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from control_fakes import FakeEngines

from vllm_lifetime.boundaries import MAX_BATCH, Boundary
from vllm_lifetime.control import ControlService, EngineUnavailable
from vllm_lifetime.control.batcher import Batcher
from vllm_lifetime.control.service import MAX_WAITING_EVENTS


class Recorder:
    """A `send` that answers each number with its double when `gate` is open."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()
        self.num_running = 0
        self.error: Exception | None = None

    async def __call__(self, items: list[int]) -> list[int]:
        self.batches.append(items)
        self.num_running += 1
        assert self.num_running == 1
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.num_running -= 1
        if self.error is not None and 13 in items:
            raise self.error
        return [2 * item for item in items]


def run(test: Callable[[Recorder, Batcher[int, int]], Awaitable[Any]], timeout_s: float = 60.0) -> Any:
    async def main() -> Any:
        recorder = Recorder()
        return await test(recorder, Batcher(recorder, max_batch=10, max_waiting=60, timeout_s=timeout_s))

    return asyncio.run(asyncio.wait_for(main(), 10))


async def start(batcher: Batcher[int, int], *requests: list[int]) -> list[asyncio.Task[list[int]]]:
    tasks = [asyncio.create_task(batcher.submit(request)) for request in requests]
    await asyncio.sleep(0.01)
    return tasks


def test_what_arrives_while_a_call_is_under_way_goes_together_in_the_next() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        tasks = await start(batcher, [1])
        tasks += await start(batcher, [2, 3], [4], [5, 6, 7])
        assert recorder.batches == [[1]]
        recorder.gate.set()
        assert await asyncio.gather(*tasks) == [[2], [4, 6], [8], [10, 12, 14]]
        assert recorder.batches == [[1], [2, 3, 4, 5, 6, 7]]

    run(test)


def test_no_call_is_larger_than_the_limit_and_requests_are_not_overtaken() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        sizes = [6, 6, 4, 10, 1, 23, 2]
        numbers = iter(range(100))
        requests = [[next(numbers) for _ in range(size)] for size in sizes]
        tasks = await start(batcher, *requests)
        recorder.gate.set()
        assert await asyncio.gather(*tasks) == [[2 * number for number in request] for request in requests]
        assert [len(batch) for batch in recorder.batches] == [6, 10, 10, 1, 10, 10, 5]
        assert [number for batch in recorder.batches for number in batch] == list(range(sum(sizes)))

    run(test)


def test_a_request_given_up_on_changes_nothing_for_the_others() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        (first,) = await start(batcher, [1])
        tasks = await start(batcher, [2], [3], [4])
        first.cancel()
        tasks[1].cancel()
        await asyncio.sleep(0.01)
        recorder.gate.set()
        assert await asyncio.gather(tasks[0], tasks[2]) == [[4], [8]]
        # It was told, so it counts, though nobody waits for the answer.
        assert recorder.batches == [[1], [2, 3, 4]]
        assert await batcher.submit([5]) == [10]

    run(test)


def test_a_failed_call_is_told_to_its_requests_and_the_next_go_on() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        recorder.error = EngineUnavailable("gone")
        tasks = await start(batcher, [13])
        tasks += await start(batcher, [1] * 8, [13], [2] * 3)
        recorder.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, EngineUnavailable) for result in results] == [True, True, True, False]
        assert results[1] is not results[2]

    run(test)


def test_an_unforeseen_error_stops_nobody_for_good() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        recorder.error = ZeroDivisionError("oh")
        recorder.gate.set()
        with pytest.raises(EngineUnavailable, match="oh"):
            await batcher.submit([13])
        assert await batcher.submit([1]) == [2]

    run(test)


def test_a_long_queue_is_refused_instead_of_growing() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        tasks = await start(batcher, [1])
        tasks += await start(batcher, *[[2] * 10] * 6)
        with pytest.raises(EngineUnavailable, match="60 events wait"):
            await batcher.submit([3])
        recorder.gate.set()
        await asyncio.gather(*tasks)
        assert await batcher.submit([3] * 70) == [6] * 70

    run(test)


def test_what_nobody_waits_for_keeps_its_place() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        (first,) = await start(batcher, [1])
        batcher.put([2])
        (third,) = await start(batcher, [3])
        batcher.put(list(range(4, 27)))
        (last,) = await start(batcher, [27])
        assert recorder.batches == [[1]]
        recorder.gate.set()
        assert await asyncio.gather(first, third, last) == [[2], [6], [54]]
        assert [number for batch in recorder.batches for number in batch] == list(range(1, 28))
        assert max(len(batch) for batch in recorder.batches) == 10

    run(test)


def test_draining_waits_for_what_nobody_waits_for() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        await batcher.drain()
        batcher.put([1])
        batcher.put([2])
        draining = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0.01)
        assert not draining.done()
        recorder.gate.set()
        await draining
        assert recorder.batches == [[1, 2]]

    run(test)


def test_what_nobody_waits_for_is_bounded_and_has_no_deadline() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        batcher.put([0])
        await asyncio.sleep(0)
        for _ in range(6):
            batcher.put([1] * 10)
        with pytest.raises(EngineUnavailable, match="60 events wait"):
            batcher.put([2])
        await asyncio.sleep(0.2)
        recorder.gate.set()
        await batcher.drain()
        assert sum(map(sum, recorder.batches)) == 60

    run(test, timeout_s=0.05)


def test_who_waits_behind_what_nobody_waits_for_has_a_deadline() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        batcher.put([1])
        batcher.put([2])
        with pytest.raises(TimeoutError):
            await batcher.submit([3])
        recorder.gate.set()
        await batcher.drain()
        assert [number for batch in recorder.batches for number in batch] == [1, 2, 3]

    run(test, timeout_s=0.1)


def spaced(test: Callable[[Recorder, Batcher[int, int]], Awaitable[Any]], spacing_s: float) -> Any:
    """Run `test` with a batcher whose calls return at once, and begin `spacing_s` apart while nobody waits."""

    async def main() -> Any:
        recorder = Recorder()
        recorder.gate.set()
        batcher: Batcher[int, int] = Batcher(recorder, max_batch=10, max_waiting=60, timeout_s=60.0, spacing_s=spacing_s)
        return await test(recorder, batcher)

    return asyncio.run(asyncio.wait_for(main(), 10))


def test_what_nobody_waits_for_goes_at_once_and_then_in_few_calls() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        batcher.put([0])
        await asyncio.sleep(0.01)
        assert recorder.batches == [[0]]
        for number in range(1, 6):
            batcher.put([number])
            await asyncio.sleep(0.002)
        assert recorder.batches == [[0]] or loop.time() - began_s > 0.2
        while len(recorder.batches) < 2:
            await asyncio.sleep(0.001)
        assert loop.time() - began_s >= 0.2
        assert recorder.batches == [[0], [1, 2, 3, 4, 5]]

    spaced(test, spacing_s=0.2)


@pytest.mark.parametrize("urgent", ["submit", "settle", "full", "drain"])
def test_somebody_who_waits_or_a_full_call_ends_the_pause_between_calls(urgent: str) -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        batcher.put([0])
        await batcher.drain()
        batcher.put([1])
        await asyncio.sleep(0.01)
        assert recorder.batches == [[0]]
        match urgent:
            case "submit":
                assert await batcher.submit([2]) == [4]
            case "settle":
                await batcher.settle()
            case "full":
                batcher.put(list(range(2, 11)))
                await asyncio.sleep(0.01)
            case "drain":
                await batcher.drain()
        assert [number for batch in recorder.batches for number in batch] == {
            "submit": [0, 1, 2],
            "full": list(range(11)),
        }.get(urgent, [0, 1])
        # And the next pause is kept again.
        count = len(recorder.batches)
        batcher.put([20])
        await asyncio.sleep(0.01)
        assert len(recorder.batches) == count

    spaced(test, spacing_s=60.0)


def test_of_a_failed_call_the_owner_is_told_what_nobody_waits_for() -> None:
    async def main() -> None:
        recorder = Recorder()
        recorder.error = ZeroDivisionError("oh")
        recorder.gate.set()
        lost: list[tuple[list[int], str]] = []
        batcher: Batcher[int, int] = Batcher(
            recorder,
            max_batch=10,
            max_waiting=60,
            timeout_s=60.0,
            on_lost=lambda items, error: lost.append((items, str(error.detail))),
        )
        batcher.put([13])
        batcher.put([1, 2])
        with pytest.raises(EngineUnavailable, match="oh"):
            await batcher.submit([3])
        batcher.put([4])
        await batcher.drain()
        assert lost == [([13, 1, 2], "An engine is not available: oh")]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_many_requests_are_few_engine_calls_each_with_its_own_outcome() -> None:
    engines = FakeEngines(count=2, delay_s=0.005)

    async def main() -> None:
        service = ControlService(engines)
        events = [Boundary(message_id=f"m{number}", kind="turn_end", session_id="s") for number in range(3000)]
        outcomes = await asyncio.gather(*[service.apply_boundaries([event]) for event in events])
        assert [outcome[0].message_id for outcome in outcomes] == [event.message_id for event in events]

    asyncio.run(main())
    assert engines.max_running == 1
    assert [len(payload["events"]) for _, payload in engines.calls] == [MAX_BATCH] * 3


def test_a_request_waits_no_longer_than_its_time_behind_an_engine_that_hangs() -> None:
    async def main() -> None:
        service = ControlService(FakeEngines(delay_s=60), timeout_s=0.2)
        event = Boundary(message_id="m", kind="turn_end", session_id="s")
        loop = asyncio.get_running_loop()

        async def post(delay_s: float) -> float:
            await asyncio.sleep(delay_s)
            start_s = loop.time()
            with pytest.raises(EngineUnavailable, match=r"within 0\.2 seconds"):
                await service.apply_boundaries([event])
            return loop.time() - start_s

        assert max(await asyncio.gather(post(0), post(0.1), post(0.15))) < 2

    asyncio.run(main())


def test_the_service_bounds_what_waits() -> None:
    async def main() -> None:
        service = ControlService(FakeEngines(delay_s=60), timeout_s=0.5)
        events = [Boundary(message_id="m", kind="turn_end", session_id="s")] * MAX_BATCH
        posts = [service.apply_boundaries(events) for _ in range(10)]
        results = await asyncio.gather(*posts, return_exceptions=True)
        assert all(isinstance(result, EngineUnavailable) for result in results)
        assert MAX_WAITING_EVENTS >= 10 * MAX_BATCH

    asyncio.run(main())


def test_each_request_has_its_own_deadline_whether_sent_or_waiting() -> None:
    async def test(recorder: Recorder, batcher: Batcher[int, int]) -> None:
        (sent,) = await start(batcher, [1])
        (waiting,) = await start(batcher, [2])
        await asyncio.sleep(0.3)
        (late,) = await start(batcher, [3])
        await asyncio.wait([sent, waiting])
        assert not late.done()
        recorder.gate.set()
        assert await late == [6]
        results = await asyncio.gather(sent, waiting, return_exceptions=True)
        assert [type(result) for result in results] == [TimeoutError, TimeoutError]
        # What was given up on is sent all the same, and a later request has a deadline again.
        assert recorder.batches == [[1], [2, 3]]
        recorder.gate.clear()
        (again,) = await start(batcher, [4])
        with pytest.raises(TimeoutError):
            await again

    run(test, timeout_s=0.6)
