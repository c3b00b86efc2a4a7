# SPDX-License-Identifier: Apache-2.0
"""Without metadata, and without the connector: what stays exactly as it is in stock vLLM."""

from collections.abc import Callable

from e2e_client import Delta
from e2e_servers import PLAIN, Servers, Stock
from e2e_workload import agents_sequence


def test_package_changes_a_server_that_did_not_choose_it(stock: dict[str, Stock]) -> None:
    """Our package is installed, the connector not chosen: no route, no metric, no block pool, no word in the log."""
    for answers in stock.values():
        assert answers.lifetime_status == 404
        assert not [name for name in answers.metric_names if "lifetime" in name]
        assert "vllm:num_preemptions_total" in answers.metric_names  # the names were read
        lines = [line for line in answers.log.splitlines() if "lifetime" in line.lower()]
        # vLLM lists the plugins that it found, and our own request for the route above.
        assert not [line for line in lines if not any(w in line for w in ("plugins", "- lifetime ->", "404 Not Found"))], lines


def test_hit_rate_falls_without_metadata(servers: Servers, stock: dict[str, Stock], same_as_stock: Callable[..., None]) -> None:
    """No lower tier and no metadata: request by request, stock's hits under stock's order of eviction, and its tokens."""
    api = servers.get(PLAIN)
    delta = Delta(api)
    prompts = agents_sequence()
    expected = stock["float32"].sequence
    answers = [api.ask(prompt) for prompt in prompts]
    hits = [answer.cached_tokens for answer in answers]
    assert hits == [answer.cached_tokens for answer in expected]
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    # The order of eviction has decided: many whole prompts were evicted, and many were not.
    evicted = delta("lifetime_evictions_total", tier="hbm")
    print(f"{sum(hits)} of {sum(len(p.tokens) for p in prompts)} prompt tokens hit, as in stock; {evicted:.0f} evictions")
    assert evicted > 5 * 23
    assert sum(hits) > 1000
    assert delta("lifetime_hit_tokens_total", tier="hbm") == sum(hits)
    assert delta("lifetime_evictions_total", tier="hbm", reason="lost") == evicted
    assert delta("lifetime_loads_total") == 0
