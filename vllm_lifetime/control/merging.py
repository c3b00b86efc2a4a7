# SPDX-License-Identifier: Apache-2.0
"""Puts the answers of several engines together. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_lifetime.control.views import (
    AgentView,
    EngineHealth,
    HealthView,
    HeldBlocks,
    SessionsPage,
    SessionView,
    TiersOfEngine,
    TiersView,
)

__all__ = ["merge_health", "merge_sessions", "merge_tiers", "page_sessions"]


def merge_tiers(engines: list[TiersOfEngine]) -> TiersView:
    """Return the tiers of all engines together: counts add up, and of ages the oldest stands."""
    total = _add_up([engine.model_dump(exclude_none=True, exclude={"wear", "flash_writes"}) for engine in engines])
    wear = [view for engine in engines for view in engine.wear or []]
    return TiersView.model_validate({"tiers": {}, **total, "wear": wear or None, "engines": engines})


def _add_up(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Add integers, take the largest of floats (ages), and do so in dictionaries; leave out the rest."""
    total: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            known = total.get(key)
            if isinstance(value, Mapping):
                total[key] = _add_up([known or {}, value])
            elif isinstance(value, float):
                total[key] = value if known is None else max(known, value)
            elif isinstance(value, int) and not isinstance(value, bool):
                total[key] = value + (known or 0)
    return total


def merge_health(engines: list[EngineHealth]) -> HealthView:
    """Return the state of all engines: stalled if one of them is."""
    worst = max(engines, key=lambda engine: engine.oldest_io_s - engine.deadline_s)
    is_stalled = worst.oldest_io_s > worst.deadline_s
    return HealthView(
        status="stalled" if is_stalled else "ok",
        detail=f"A transfer has taken {worst.oldest_io_s:g} s, longer than {worst.deadline_s:g} s." if is_stalled else None,
        oldest_io_s=worst.oldest_io_s,
        deadline_s=worst.deadline_s,
        flash_faults=sum(engine.flash_faults for engine in engines),
        engines=engines,
    )


def page_sessions(pages: list[SessionsPage], limit: int) -> SessionsPage:
    """Return the first `limit` sessions of what each engine gave, in the engines' order: by name, nameless ones last.

    There are more if an engine gave more or says so in `next`.
    """
    by_name: dict[tuple[bool, str], list[SessionView]] = {}
    for page in pages:
        for view in page.sessions:
            by_name.setdefault(_order(view), []).append(view)
    names = sorted(by_name)
    shown = [merge_sessions(by_name[name]) for name in names[:limit]]
    total = max(len(names), *(page.total for page in pages))
    has_more = len(names) > limit or any(page.next is not None for page in pages)
    last = shown[-1].session_id if shown and has_more else None
    return SessionsPage(sessions=shown, total=total, next=last)


def _order(view: SessionView) -> tuple[bool, str]:
    name = view.session_id
    return name is None, name if name is not None else "/".join(view.workflow_ids)


def merge_sessions(views: Sequence[SessionView]) -> SessionView:
    """Return one view of a session that one or several engines know."""
    first = views[0]
    if len(views) == 1:
        return first
    last = [view.last_boundary for view in views if view.last_boundary is not None]
    changes: dict[str, Any] = {
        "workflow_ids": sorted({workflow_id for view in views for workflow_id in view.workflow_ids}),
        "state": "active" if any(view.state == "active" for view in views) else "ended",
        "generation": max(view.generation for view in views),
        "running_requests": sum(view.running_requests for view in views),
        "idle_s": min(view.idle_s for view in views),
        "held": _merge_held([view.held for view in views]),
        "last_boundary": min(last, key=lambda boundary: boundary.age_s, default=None),
    }
    if agents := [agent for view in views for agent in view.agents or []]:
        changes["agents"] = _merge_agents(agents)
    return first.model_copy(update=changes)


def _merge_held(held: list[dict[str, HeldBlocks]]) -> dict[str, HeldBlocks]:
    total = _add_up({tier: blocks.model_dump() for tier, blocks in by_tier.items()} for by_tier in held)
    return {tier: HeldBlocks.model_validate(blocks) for tier, blocks in total.items()}


def _merge_agents(agents: list[AgentView]) -> list[AgentView]:
    """Return each agent instance once; its segments are those that it has on any engine."""
    by_name: dict[tuple[str | None, str | None], list[AgentView]] = {}
    for agent in agents:
        by_name.setdefault((agent.agent, agent.agent_id), []).append(agent)
    return [
        views[0].model_copy(
            update={
                "parent_agent_id": next((view.parent_agent_id for view in views if view.parent_agent_id is not None), None),
                "state": "active" if any(view.state == "active" for view in views) else "returned",
                "turn": max((view.turn for view in views if view.turn is not None), default=None),
                "running_requests": sum(view.running_requests for view in views),
                "segments": [segment for view in views for segment in view.segments],
            }
        )
        for views in by_name.values()
    ]
