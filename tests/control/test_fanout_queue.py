# SPDX-License-Identifier: Apache-2.0
"""The queue for one server: bounded, in order, and nothing gets lost without a result."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.control.fanout_queue import Delivery, DeliveryQueue, Refused, Ticket


def make_queue(max_items: int = 1000, max_bytes: int = 1 << 20, max_age_s: float = 60.0) -> DeliveryQueue:
    return DeliveryQueue(max_items, max_bytes, max_age_s)


def make_ticket(count: int) -> Ticket:
    """A ticket; its future needs a loop, which need not live on."""

    async def make() -> Ticket:
        return Ticket(count)

    return asyncio.run(make())


def make_deliveries(count: int, body: bytes = b"{}", can_share: bool = True, queued_at_s: float = 0.0) -> list[Delivery]:
    ticket = make_ticket(count)
    return [Delivery("POST", "/boundaries", body, queued_at_s, ticket, index, can_share) for index in range(count)]


def indexes(deliveries: list[Delivery]) -> list[int]:
    return [delivery.index for delivery in deliveries]


def test_a_full_queue_drops_the_oldest() -> None:
    queue = make_queue(max_items=3)
    dropped = [d.index for delivery in make_deliveries(5) for d in queue.put(delivery)]
    assert dropped == [0, 1]
    assert indexes(queue.take(10, 1000)) == [2, 3, 4]


def test_a_queue_is_bounded_in_bytes_too() -> None:
    queue = make_queue(max_bytes=250)
    dropped = [d.index for delivery in make_deliveries(4, body=b"x" * 100) for d in queue.put(delivery)]
    assert dropped == [0, 1]
    assert queue.waiting_bytes == 200


def test_what_is_too_big_for_the_queue_does_not_get_in() -> None:
    queue = make_queue(max_bytes=50)
    (delivery,) = make_deliveries(1, body=b"x" * 100)
    assert queue.put(delivery) == [delivery]
    assert (len(queue), queue.waiting_bytes) == (0, 0)


def test_what_is_on_its_way_is_not_dropped_for_newer_events() -> None:
    queue = make_queue(max_items=2)
    old, new = make_deliveries(2), make_deliveries(3)
    for delivery in old:
        queue.put(delivery)
    assert queue.take(10, 1000) == old
    assert [d for delivery in new for d in queue.put(delivery)] == [new[0]]
    # It was not taken: now it is the oldest of what waits.
    assert queue.put_back(old) == old
    assert queue.take(10, 1000) == new[1:]


def test_a_group_is_bounded_in_count_and_bytes() -> None:
    queue = make_queue()
    deliveries = make_deliveries(10, body=b"x" * 10)
    for delivery in deliveries:
        queue.put(delivery)
    first = queue.take(4, 1000)
    queue.finish_group()
    second = queue.take(10, 2 + 3 * 11)
    assert (indexes(first), indexes(second)) == ([0, 1, 2, 3], [4, 5, 6])


def test_a_body_longer_than_a_group_goes_alone() -> None:
    queue = make_queue()
    for delivery in make_deliveries(2, body=b"x" * 100):
        queue.put(delivery)
    assert indexes(queue.take(10, 50)) == [0]


def test_what_cannot_share_a_request_keeps_its_place() -> None:
    queue = make_queue()
    hints = make_deliveries(1, can_share=False)
    before, after = make_deliveries(2), make_deliveries(1)
    for delivery in [*before, *hints, *after]:
        queue.put(delivery)
    groups = []
    while group := queue.take(10, 1000):
        queue.finish_group()
        groups.append(group)
    assert groups == [before, hints, after]


def test_two_groups_cannot_be_on_their_way() -> None:
    queue = make_queue()
    for delivery in make_deliveries(2):
        queue.put(delivery)
    queue.take(1, 1000)
    with pytest.raises(RuntimeError, match="on its way"):
        queue.take(1, 1000)


def test_old_events_expire_and_young_ones_stay() -> None:
    queue = make_queue(max_age_s=10.0)
    old, young = make_deliveries(2, queued_at_s=0.0), make_deliveries(1, queued_at_s=5.0)
    for delivery in [*old, *young]:
        queue.put(delivery)
    assert queue.oldest_age_s(9.0) == 9.0
    assert queue.pop_expired(10.0) == []
    assert queue.pop_expired(10.5) == old
    assert queue.oldest_age_s(10.5) == 5.5


def test_a_ticket_is_done_when_all_results_are_in() -> None:
    deliveries = make_deliveries(2)
    ticket = deliveries[0].ticket
    deliveries[1].finish({"status": "accepted"})
    assert not ticket.done.done()
    deliveries[0].finish(Refused("no"))
    assert ticket.done.done()
    assert ticket.results == [Refused("no"), {"status": "accepted"}]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 60), st.booleans()),
        st.tuples(st.just("take"), st.integers(1, 5), st.integers(2, 150)),
        st.tuples(st.just("deliver"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 8), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS, st.integers(0, 8), st.integers(1, 200))
def test_every_event_is_delivered_once_in_order_or_counted_as_lost(
    operations: list[tuple[str, int, int]], max_items: int, max_bytes: int
) -> None:
    """Against a list of what is neither delivered nor lost: in order, within bounds, nothing twice, nothing forgotten."""
    queue = make_queue(max_items, max_bytes, max_age_s=10.0)
    now_s = 0.0
    delivered: list[int] = []
    lost: list[int] = []
    group: list[Delivery] = []
    ticket = make_ticket(len(operations))
    count = 0
    for name, first, second in operations:
        if name == "put":
            delivery = Delivery("POST", "/", b"x" * first, now_s, ticket, count, bool(second))
            count += 1
            lost += indexes(queue.put(delivery))
        elif name == "take" and not group:
            group = queue.take(first, second)
            assert len(group) <= first
            assert len(group) <= 1 or sum(len(delivery.body) + 1 for delivery in group) + 2 <= second
            assert len(group) <= 1 or all(delivery.can_share for delivery in group)
        elif name == "deliver" and group:
            # Some of the group were taken by the server, the others were not.
            delivered += indexes(group[:first])
            if first >= len(group):
                queue.finish_group()
            else:
                lost += indexes(queue.put_back(group[first:]))
            group = []
        elif name == "wait":
            now_s += first
            lost += indexes(queue.pop_expired(now_s))
        waiting = len(queue) - len(group)
        assert waiting <= max_items
        assert queue.waiting_bytes <= max_bytes
        assert delivered == sorted(delivered)
        assert len(queue) == count - len(delivered) - len(lost)
    rest = indexes(queue.clear())
    assert rest == sorted(rest)
    assert sorted([*delivered, *lost, *rest]) == list(range(count))
