# SPDX-License-Identifier: Apache-2.0
"""Finds out from their times which request of a session waited for which."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Timed", "link_requests"]


class Timed(NamedTuple):
    """When a request ran, and whose it was."""

    starts_s: float
    ends_s: float
    agent: str | None
    parent: str | None = None


def link_requests(requests: Sequence[Timed], tolerance_s: float = 0.0) -> list[int]:
    """The index of the request that each one waited for, -1 for none. `requests` are in the order in which they started.

    An agent waits for its own last request, or for a sub-agent of its that ended after that one and before this one began. An
    agent's first request waits for its parent's last one, without a parent for whichever ended last. A request that began before
    what it would wait for had ended waits for what that one waited for. `tolerance_s`: how far the times may be off.
    O(requests x agents).
    """
    links: list[int] = []
    last_of: dict[str | None, int] = {}
    for index, request in enumerate(requests):
        latest_s = request.starts_s + tolerance_s
        own = last_of.get(request.agent)
        if own is None:
            parent = last_of.get(request.parent) if request.parent is not None else None
            candidates = [parent] if parent is not None else list(last_of.values())
        else:
            children = [
                last for agent, last in last_of.items() if agent != request.agent and requests[last].parent == request.agent
            ]
            candidates = [own, *(last for last in children if last > own)]
        over = [last for last in candidates if requests[last].ends_s <= latest_s]
        if over:
            after = max(over, key=lambda last: requests[last].ends_s)
        else:
            after = links[own] if own is not None else -1
            while after >= 0 and requests[after].ends_s > latest_s:
                after = links[after]
        links.append(after)
        last_of[request.agent] = index
    return links
