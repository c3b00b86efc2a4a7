# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import contextvars
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from fake_lifetime_server import FakeLifetimeServer, find_dead_url

from vllm_lifetime.harness import AsyncLifetimeClient, ClientStats


@pytest.fixture
def server() -> Iterator[FakeLifetimeServer]:
    with FakeLifetimeServer() as running:
        yield running


async def until_sent(client: AsyncLifetimeClient, count: int) -> None:
    async with asyncio.timeout(60):
        while client.stats.sent < count:
            await asyncio.sleep(0.01)


def test_what_is_reported_arrives_without_a_flush_and_in_order(server: FakeLifetimeServer) -> None:
    async def agent() -> ClientStats:
        async with AsyncLifetimeClient(server.url) as client:
            for turn in range(250):
                client.boundary("turn_end", session_id="s", turn=turn)
            await until_sent(client, 250)
            client.boundary("session_end", session_id="s")
        return client.stats

    assert asyncio.run(agent()) == ClientStats(sent=251)
    assert [event.get("turn") for event in server.events] == [*range(250), None]
    assert server.requests <= 5


@pytest.mark.parametrize("is_async", [True, False])
def test_no_outcome_is_waited_for_and_either_answer_is_fine(server: FakeLifetimeServer, is_async: bool) -> None:
    server.is_async = is_async

    async def agent() -> ClientStats:
        async with AsyncLifetimeClient(server.url) as client:
            client.boundary("turn_end", session_id="s")
            assert await client.flush(60)
        return client.stats

    assert asyncio.run(agent()) == ClientStats(sent=1)
    assert server.preferences == ["respond-async"]


def test_the_loop_goes_on_while_the_server_is_slow(server: FakeLifetimeServer) -> None:
    server.is_open.clear()

    async def agent() -> bool:
        client = AsyncLifetimeClient(server.url, timeout_s=60)
        for turn in range(200):
            client.boundary("turn_end", session_id="s", turn=turn)
            await asyncio.sleep(0)
        assert not server.events  # all that while nothing was answered
        server.is_open.set()
        flushed = await client.flush(60)
        await client.aclose()
        return flushed

    start_s = time.monotonic()
    assert asyncio.run(agent())
    assert time.monotonic() - start_s < 30


def test_a_dead_server_loses_nothing_once_it_is_there(server: FakeLifetimeServer) -> None:
    async def agent() -> None:
        async with AsyncLifetimeClient(server.url) as client:
            server.stop()
            for turn in range(5):
                client.boundary("turn_end", session_id="s", turn=turn)
            assert not await client.flush(0.3)
            assert client.stats == ClientStats(queued=5)
            await asyncio.to_thread(server.start)
            await until_sent(client, 5)

    asyncio.run(agent())
    assert [event["turn"] for event in server.events] == list(range(5))


@pytest.mark.parametrize(("statuses", "stats"), [([503, 500, 429], ClientStats(sent=1)), ([401], ClientStats(refused=1))])
def test_answers_mean_what_they_mean_to_the_other_client(
    server: FakeLifetimeServer, statuses: list[int], stats: ClientStats
) -> None:
    async def agent() -> ClientStats:
        server.statuses = list(statuses)
        async with AsyncLifetimeClient(server.url) as client:
            client.boundary("turn_end", session_id="s")
            assert await client.flush(60)
            return client.stats

    assert asyncio.run(agent()) == stats


def test_a_cancelled_agent_still_says_what_it_reported(server: FakeLifetimeServer) -> None:
    server.delay_s = 0.2

    async def agent(client: AsyncLifetimeClient) -> None:
        client.boundary("turn_end", session_id="s")
        try:
            await asyncio.sleep(60)
        finally:
            client.boundary("session_end", session_id="s")

    async def main() -> ClientStats:
        async with AsyncLifetimeClient(server.url) as client:
            task = asyncio.create_task(agent(client))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return client.stats

    assert asyncio.run(main()) == ClientStats(sent=2)


def test_a_cancelled_flush_is_cancelled_and_the_events_go_on(server: FakeLifetimeServer) -> None:
    server.delay_s = 0.3

    async def main() -> None:
        async with AsyncLifetimeClient(server.url) as client:
            client.boundary("turn_end", session_id="s")
            flush = asyncio.create_task(client.flush(30))
            await asyncio.sleep(0.05)
            flush.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flush
            await until_sent(client, 1)

    asyncio.run(main())


def test_a_client_that_is_closed_by_cancellation_still_sends(server: FakeLifetimeServer) -> None:
    clients = []

    async def agent() -> None:
        async with AsyncLifetimeClient(server.url) as client:
            clients.append(client)
            client.boundary("session_end", session_id="s")
            await asyncio.sleep(60)

    async def main() -> None:
        task = asyncio.create_task(agent())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})

    asyncio.run(main())
    assert clients[0].stats == ClientStats(sent=1)


def test_one_client_serves_one_loop_after_another(server: FakeLifetimeServer) -> None:
    client = AsyncLifetimeClient(server.url)

    async def turn(number: int) -> None:
        client.boundary("turn_end", session_id="s", turn=number)
        assert await client.flush(60)

    asyncio.run(turn(0))
    client.boundary("turn_end", session_id="s", turn=1)  # where no loop runs
    assert client.stats.queued == 1
    asyncio.run(turn(2))
    asyncio.run(client.aclose())
    assert [event["turn"] for event in server.events] == [0, 1, 2]
    assert client.stats == ClientStats(sent=3)


def test_threads_beside_the_loop_may_report_too(server: FakeLifetimeServer) -> None:
    async def main() -> None:
        async with AsyncLifetimeClient(server.url) as client:
            client.boundary("turn_end", session_id="loop")
            await client.flush()
            thread = threading.Thread(target=client.boundary, args=("turn_end",), kwargs={"session_id": "thread"})
            thread.start()
            await until_sent(client, 2)
            thread.join()

    asyncio.run(main())


def test_close_waits_neither_for_a_dead_server_nor_longer_than_told(server: FakeLifetimeServer) -> None:
    async def main(url: str, timeout_s: float) -> tuple[ClientStats, float]:
        client = AsyncLifetimeClient(url, timeout_s=60)
        client.boundary("session_end", session_id="s")
        start_s = time.monotonic()
        await client.aclose(timeout_s)
        await client.aclose(timeout_s)
        client.boundary("session_end", session_id="s")
        return client.stats, time.monotonic() - start_s

    server.is_open.clear()
    for url, timeout_s in ((find_dead_url(), 120.0), (server.url, 0.3)):
        stats, took_s = asyncio.run(main(url, timeout_s))
        assert stats == ClientStats(failed=1, dropped=1)
        assert took_s < 30


def test_the_agents_context_is_not_carried_into_the_sending(server: FakeLifetimeServer) -> None:
    """A tracer that follows context variables would else put our requests under the agent's first step."""
    span = contextvars.ContextVar("span", default="none")

    seen = []

    class Client(AsyncLifetimeClient):
        async def _run(self) -> None:
            seen.append(span.get())
            await super()._run()

    async def main() -> None:
        async with Client(server.url) as client:
            span.set("the agent's step")
            client.boundary("turn_end", session_id="s")

    asyncio.run(main())
    assert seen == ["none"]


def test_nothing_is_left_behind(server: FakeLifetimeServer, recwarn: pytest.WarningsRecorder) -> None:
    async def main() -> list[str]:
        async with AsyncLifetimeClient(server.url) as client:
            client.boundary("turn_end", session_id="s")
        await asyncio.sleep(0)
        return [task.get_name() for task in asyncio.all_tasks()]

    gc.collect()  # what other tests left behind
    recwarn.clear()
    assert "vllm-lifetime" not in asyncio.run(main())
    gc.collect()
    assert [str(warning.message) for warning in recwarn if issubclass(warning.category, ResourceWarning)] == []


def test_a_program_that_ends_without_closing_still_says_so(server: FakeLifetimeServer) -> None:
    code = """
import asyncio, sys
from vllm_lifetime.harness import AsyncLifetimeClient, client as module
module.EXIT_TIMEOUT_S = 60  # a loaded machine may need longer than a user should wait
client = AsyncLifetimeClient(sys.argv[1], timeout_s=60)
async def main():
    client.boundary("session_end", session_id="s")
asyncio.run(main())
client.boundary("session_end", session_id="t")
"""
    done = subprocess.run([sys.executable, "-c", code, server.url], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert {event["session_id"] for event in server.events} == {"s", "t"}
