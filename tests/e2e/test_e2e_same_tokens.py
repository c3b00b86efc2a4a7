# SPDX-License-Identifier: Apache-2.0
"""A hint may change speed; it never changes a token. Real servers against stock vLLM's answers, greedy.

In bfloat16 sequential requests only are compared: with another batch composition stock vLLM itself rounds differently.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import httpx
import pytest
from e2e_client import REQUEST_TIMEOUT_S, Api, Delta
from e2e_servers import TIERS, Servers, Stock
from e2e_workload import BLOCK_TOKENS, CROWD, GROWING, RELOAD, filler

from benchmarks.server import metric_sum, parse_metrics

Check = Callable[..., None]
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "bfloat16"], scope="module")


@pytest.fixture(scope="module")
def api(servers: Servers, dtype: str) -> Api:
    """A server with host and flash tiers."""
    return servers.get(TIERS[dtype])


@pytest.fixture
def empty(api: Api) -> Iterator[Api]:
    """The same, holding nothing; afterwards it must be well."""
    api.reset()
    yield api
    assert api.is_healthy()


def test_stock_agrees_with_itself(stock: dict[str, Stock]) -> None:
    """What the comparisons below rest on: in float32 stock vLLM's tokens depend neither on hits nor on concurrency."""
    answers = stock["float32"]
    for prompt in RELOAD:
        assert answers.cold[prompt.name].cached_tokens == 0
        assert answers.warm[prompt.name].cached_tokens == prompt.reusable_tokens
        assert answers.warm[prompt.name].tokens == answers.cold[prompt.name].tokens
    assert [a.tokens for a in answers.crowd] == [answers.cold[p.name].tokens for p in CROWD]


@both_dtypes
def test_cold_requests_give_the_same_tokens(empty: Api, dtype: str, same_as_stock: Check) -> None:
    """Nothing to load yet: the connector is only there."""
    for prompt in RELOAD:
        answer = empty.ask(prompt)
        assert answer.cached_tokens == 0
        same_as_stock(prompt, answer, dtype)


@both_dtypes
@pytest.mark.parametrize("tier,num_fillers", [("host", 4), ("flash", 12)])
def test_garbled_output_after_a_reload(empty: Api, dtype: str, tier: str, num_fillers: int, same_as_stock: Check) -> None:
    """R17, R20: an evicted prompt comes back from `tier` whole, and its tokens are stock's."""
    for prompt in RELOAD:
        if prompt.reusable_tokens < 4 * BLOCK_TOKENS:
            continue
        empty.ask(prompt)
        empty.settle()
        empty.fill(num_fillers)
        delta = Delta(empty)
        answer = empty.ask(prompt)
        same_as_stock(prompt, answer, dtype)
        assert answer.cached_tokens == prompt.reusable_tokens
        assert delta.await_growth("lifetime_loads_total", outcome="done") == 1
        blocks = prompt.reusable_tokens // BLOCK_TOKENS
        assert delta("lifetime_hit_blocks_total", tier=tier) == blocks
        assert delta("lifetime_hit_tokens_total", tier=tier) == prompt.reusable_tokens
        assert delta("lifetime_bytes_read_total", tier=tier) > 0
        same_as_stock(prompt, empty.ask(prompt), dtype)  # now from HBM


@both_dtypes
def test_chat_through_the_official_client(empty: Api, dtype: str, stock: dict[str, Stock]) -> None:
    """X-Session-ID and kv_transfer_params through the OpenAI client: same text, cold and reloaded."""
    cold, warm = stock[dtype].chat
    assert cold[0] and cold[1] == 0 and warm[1] > 0
    assert empty.chat("harness-1") == cold
    assert empty.metric("lifetime_bad_metadata_total") == 0
    [agent] = empty.http.get("/lifetime/v1/sessions/harness-1").json()["agents"]
    assert (agent["agent"], agent["turn"]) == ("planner", 1)
    empty.settle()
    empty.fill(4)
    delta = Delta(empty)
    assert empty.chat("harness-1") == warm
    assert delta.await_growth("lifetime_loads_total", outcome="done") == 1
    assert delta("lifetime_hit_tokens_total", tier="host") == warm[1]
    assert empty.boundary("session_end", session_id="harness-1")["status"] == "accepted"


@pytest.mark.parametrize("dtype", ["float32"], scope="module")
def test_deadlock_with_a_pool_of_one_request_and_a_tenth(empty: Api, same_as_stock: Check) -> None:
    """R1, R22: six requests at once, each nearly as large as the pool, three times over; all finish, and right."""
    delta = Delta(empty)
    for _ in range(3):
        for prompt, answer in zip(CROWD, empty.ask_together(CROWD), strict=True):
            same_as_stock(prompt, answer)
        empty.settle()
    assert delta("lifetime_loads_total", outcome="done") > 0
    assert delta("lifetime_loads_total", outcome="failed") == 0


@pytest.mark.parametrize("dtype", ["float32"], scope="module")
def test_wrong_output_after_a_preemption(empty: Api, same_as_stock: Check) -> None:
    """Requests that outgrow the pool together are preempted and resumed, with blocks from below."""
    delta = Delta(empty)
    for _ in range(2):
        for prompt, answer in zip(GROWING, empty.ask_together(GROWING), strict=True):
            same_as_stock(prompt, answer)
        empty.settle()
    assert delta("num_preemptions_total") > 0
    assert delta("lifetime_loads_total", outcome="done") > 0


@pytest.mark.parametrize("dtype", ["float32"], scope="module")
def test_a_reset_that_leaves_a_tier_serving(empty: Api, same_as_stock: Check) -> None:
    """R25: after POST /reset_prefix_cache no tier has anything, and the next request computes everything."""
    prompt = RELOAD[0]
    empty.ask(prompt)
    empty.settle()
    empty.fill(12)
    before = empty.settle()
    assert min(tier["used_blocks"] for tier in before.values()) > 0, before
    empty.reset()
    for tier in empty.settle().values():
        assert tier["used_blocks"] == tier["retired_blocks"] == tier.get("readable_blocks", 0) == 0
    answer = empty.ask(prompt)
    assert answer.cached_tokens == 0
    same_as_stock(prompt, answer)


@pytest.mark.parametrize("dtype", ["float32"], scope="module")
def test_a_thousand_aborts_leak_a_block(empty: Api, same_as_stock: Check) -> None:
    """R5, R15: clients go away while their requests wait, prefill, load or decode; nothing leaks and nobody else notices."""
    delta = Delta(empty)
    began = time.monotonic()
    seen = asyncio.run(_abort_many(empty, 1000))
    print(f"aborted in {time.monotonic() - began:.0f} s: {dict(seen)}; {delta('lifetime_loads_total', outcome='done'):.0f} loads")
    assert seen["before any token"] + seen["while decoding"] >= 1000
    assert min(seen["before any token"], seen["while decoding"]) > 20
    # How often the queue is polled depends on the machine; that there was one does not.
    assert seen["polls with a queue"] > 0
    assert delta("lifetime_loads_total", outcome="done") > 20
    assert delta("lifetime_loads_total", outcome="failed") == 0
    tiers = empty.settle(timeout_s=10)
    assert [tier["held_blocks"] for tier in tiers.values()] == [0, 0, 0]
    empty.await_metric(lambda m: metric_sum(m, "vllm:num_requests_running") == 0, "no request runs")
    for prompt in RELOAD:
        same_as_stock(prompt, empty.ask(prompt))
    empty.settle()


async def _abort_many(api: Api, count: int) -> Counter[str]:
    """Abort `count` requests or a few more, sixteen at a time, each at a random moment; says where the client was then."""
    generator = random.Random(0)
    seen: Counter[str] = Counter()
    # The same few prompts again and again: most of their blocks are somewhere below.
    prompts = [p.tokens for p in [*RELOAD, *CROWD]] + [filler(n, 500) for n in range(8)]
    aborted = 0

    async def one(client: httpx.AsyncClient) -> None:
        """Go away after a random time; one in four, after a random number of tokens."""
        nonlocal aborted
        body = api.body(generator.choice(prompts), 60, stream=True)
        patience_s = generator.expovariate(1 / 0.4)
        last_chunk = generator.randrange(1, 12) if generator.random() < 0.25 else None
        num_chunks = 0
        try:
            async with (
                asyncio.timeout(REQUEST_TIMEOUT_S if last_chunk else patience_s),
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    num_chunks += line.startswith("data: {")
                    if num_chunks == last_chunk:
                        raise TimeoutError
        except TimeoutError:
            aborted += 1
            seen["while decoding" if num_chunks else "before any token"] += 1

    async def worker(client: httpx.AsyncClient) -> None:
        while aborted < count:
            await one(client)

    async def watch_the_queue(client: httpx.AsyncClient) -> None:
        while aborted < count:
            metrics = parse_metrics((await client.get("/metrics")).text)
            seen["polls with a queue"] += metric_sum(metrics, "vllm:num_requests_waiting") > 0
            await asyncio.sleep(0.2)

    limits = httpx.Limits(max_connections=32, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=api.server.base_url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(watch_the_queue(client))
        for _ in range(16):
            group.create_task(worker(client))
    return seen
