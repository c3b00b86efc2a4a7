# SPDX-License-Identifier: Apache-2.0
"""What the control API asks of one engine: boundaries, hints, and views of tiers and sessions.

EngineCore process, scheduler thread, between two steps. Arguments and answers are what JSON can say; the table of calls is in
`control/service.py`.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from vllm_lifetime.agents import Agent
from vllm_lifetime.boundaries import Boundary, BoundaryKind, Outcome, OutcomeStatus
from vllm_lifetime.connectors.lifetime import stats
from vllm_lifetime.hints import DEFAULT_PRIORITY
from vllm_lifetime.lifecycle import MAX_REMEMBERED_MESSAGES
from vllm_lifetime.policy.retention import Retention
from vllm_lifetime.pool.access import TIER_NAMES
from vllm_lifetime.pool.runs import DEMOTED_RANK
from vllm_lifetime.segments import Segment
from vllm_lifetime.sessions import Session

if TYPE_CHECKING:
    from vllm_lifetime.connectors.lifetime.scheduler import LifetimeScheduler

__all__ = ["ControlCalls"]

Answer = dict[str, Any]

_EVENTS = TypeAdapter(list[Boundary])
_OUTCOMES = TypeAdapter(list[Outcome])

CHANGING = frozenset({"boundaries", "hints", "release"})
"""Calls that change something; the others only look."""

CLASSES_MAX_AGE_S = 0.5
"""How old the counts by class may be that are shown again: to count them walks every run."""

CLASSES_SHARE = 50
"""And so many times longer than the count takes, whatever has happened since."""


class ControlCalls:
    """The calls of one engine, by name."""

    def __init__(self, scheduler: "LifetimeScheduler") -> None:
        self._scheduler = scheduler
        self._lifecycle = scheduler.lifecycle
        self._recorder = scheduler.recorder
        self._hints_done: OrderedDict[str, None] = OrderedDict()
        self._classes: dict[str, dict[str, int]] = {}
        self._classes_at = float("-inf")
        self._classes_due = float("-inf")
        self._classes_are_old = True
        self._calls: dict[str, Callable[[dict[str, Any]], Answer]] = {
            "boundaries": self._apply_boundaries,
            "health": self._health,
            "hints": self._apply_hints,
            "release": self._release,
            "session": self._session,
            "sessions": self._sessions,
            "tiers": self._tiers,
        }

    def call(self, method: str, payload: dict[str, Any]) -> Answer:
        """Carry out one call.

        Raises:
            ValueError: `method` is not one of ours.

        """
        if method not in self._calls:
            raise ValueError(f"the lifetime connector has no call {method!r}")
        began_s = time.thread_time()
        # An idle engine takes no step in which it would be noticed that a time is over.
        self._scheduler.expire()
        answer = self._calls[method](payload)
        if method in CHANGING:
            # Views cause no step, which is when observations leave: those of an idle engine would pile up.
            self._recorder.observe(stats.CONTROL_CALL_SECONDS, method, value=time.thread_time() - began_s)
        return answer

    # ------------------------------------------------------------------ boundaries and hints

    def _apply_boundaries(self, payload: dict[str, Any]) -> Answer:
        # The whole list at once is cheaper than one by one, and no event of a list is acted on if one is not valid.
        outcomes = self._apply(_EVENTS.validate_python(payload["events"]))
        return {"outcomes": _OUTCOMES.dump_python(outcomes, mode="json")}

    def _apply(self, events: list[Boundary]) -> list[Outcome]:
        """Act on events in their order; what they have done is counted once for all of them."""
        outcomes = [self._scheduler.apply_boundary(event) for event in events]
        kinds = Counter((event.kind, outcome.status) for event, outcome in zip(events, outcomes, strict=True))
        for (kind, status), number in kinds.items():
            self._recorder.count(stats.BOUNDARIES, kind.value, status.value, by=number)
        blocks = sum(outcome.blocks for outcome in outcomes)
        self._scheduler.note_retired(blocks)
        self._scheduler.want_step()
        if blocks:
            self._classes_are_old = True  # who has freed something looks next
        return outcomes

    def _release(self, payload: dict[str, Any]) -> Answer:
        event = Boundary(message_id=payload["message_id"], kind=BoundaryKind.SESSION_END, session_id=payload["session_id"])
        agents = self._lifecycle.find_agents(payload["session_id"], None, None)
        self._drop_wishes([segment for agent in agents for segment in agent.segments])
        return {"outcome": self._apply([event])[0].model_dump(mode="json")}

    def _apply_hints(self, payload: dict[str, Any]) -> Answer:
        outcomes = []
        for action in payload["actions"]:
            key = f"{payload['message_id']}/{action['action_id']}"
            if key in self._hints_done:
                outcome: Answer = {"status": "duplicate", "reason": "this action has been carried out"}
            else:
                outcome = self._apply_hint(action["action_type"], action["payload"], key)
                self._hints_done[key] = None
                if len(self._hints_done) > MAX_REMEMBERED_MESSAGES:
                    self._hints_done.popitem(last=False)
            outcome.setdefault("blocks", 0)
            outcome["bytes"] = outcome["blocks"] * self._scheduler.layout.block_bytes
            outcomes.append({"action_id": action["action_id"], **outcome})
            self._recorder.count(stats.HINTS, action["action_type"], outcome["status"])
        self._scheduler.want_step()
        return {"outcomes": outcomes}

    def _apply_hint(self, action_type: str, target: dict[str, Any], message_id: str) -> Answer:
        if action_type == "lifetime.boundary":
            outcome = self._apply([Boundary.model_validate({"message_id": message_id, **target})])[0]
            # The envelope's words for it.
            status = "missing" if outcome.status is OutcomeStatus.IGNORED else outcome.status.value
            return {"status": status, "reason": outcome.reason, "blocks": outcome.blocks}
        agents = self._lifecycle.find_agents(target.get("session_id"), target.get("workflow_id"), target.get("agent_id"))
        segments = [segment for agent in agents for segment in agent.segments]
        if target.get("segment_id") is not None:
            segments = [segment for segment in segments if segment.segment_id == target["segment_id"]]
        if not segments:
            return {"status": "missing", "reason": "the target holds nothing here"}
        if action_type == "kv.release":
            return self._release_segments(agents, segments, whole=target.get("segment_id") is None)
        if action_type == "kv.retain":
            return self._retain(segments, target)
        if action_type == "kv.demote":
            return self._demote(segments)
        if action_type == "kv.prefetch":
            return self._prefetch(segments)
        return {"status": "rejected", "reason": f"this server does not do {action_type}"}

    def _release_segments(self, agents: list[Agent], segments: list[Segment], *, whole: bool) -> Answer:
        self._drop_wishes(segments)
        leases = list(dict.fromkeys(agent.lease for agent in agents))
        close = self._lifecycle.end_agents(agents) if whole else self._lifecycle.close_segments(segments)
        if self._scheduler.forecasting is not None:
            self._scheduler.forecasting.end_leases(leases)
        blocks, num_waiting = close
        self._scheduler.note_retired(blocks)
        reason = f"{num_waiting} segments wait for a running request" if num_waiting else None
        return {"status": "deferred" if num_waiting else "accepted", "reason": reason, "blocks": blocks}

    def _drop_wishes(self, segments: list[Segment]) -> int:
        """What nobody but `segments` reads is not kept by wish any more. Returns the blocks that no wish keeps now."""
        mine = set(segments)
        blocks = 0
        for run in {run for segment in mine for run in segment.runs}:
            wishes = [reader for reader in run.readers if isinstance(reader, Retention)]
            if wishes and all(reader in mine or isinstance(reader, Retention) for reader in run.readers):
                for wish in wishes:
                    wish.leave(run)
                blocks += sum(run.num_blocks)
        return blocks

    def _retain(self, segments: list[Segment], target: dict[str, Any]) -> Answer:
        retentions = self._scheduler.retentions
        if retentions is None:
            return {"status": "rejected", "reason": "this engine's block pool is not ours"}
        if target["ttl_s"] == 0:
            return {"status": "accepted", "reason": "wishes taken back", "blocks": self._drop_wishes(segments)}
        retention = retentions.new(segments[0].workflow_id, target.get("priority", DEFAULT_PRIORITY))
        runs = {run for segment in segments for run in segment.runs}
        blocks, is_whole = retentions.retain(retention, runs, target["ttl_s"], time.monotonic())
        if is_whole:
            return {"status": "accepted", "blocks": blocks}
        return {"status": "clipped", "reason": "at most half of all blocks can be kept by wish", "blocks": blocks}

    def _demote(self, segments: Iterable[Segment]) -> Answer:
        mine = set(segments)
        blocks = 0
        for run in {run for segment in mine for run in segment.runs}:
            if not run.is_retired and not run.has_unknown_reader and run.readers <= mine:
                self._scheduler.set_rank(run, DEMOTED_RANK)
                blocks += sum(run.num_blocks)
        return {"status": "accepted", "blocks": blocks}

    def _prefetch(self, segments: list[Segment]) -> Answer:
        prefetch = self._scheduler.prefetch
        if prefetch is None:
            return {"status": "rejected", "reason": "this server does not prefetch: no tier below HBM, or `prefetch` is off"}
        blocks, is_whole = prefetch.wish({run for segment in segments for run in segment.runs})
        if not is_whole:
            return {"status": "clipped", "reason": "too much is to be prefetched already", "blocks": blocks}
        return {"status": "accepted", "reason": None if blocks else "all of it is in HBM, or nowhere", "blocks": blocks}

    # ------------------------------------------------------------------ views

    def _health(self, payload: dict[str, Any]) -> Answer:
        return {
            "oldest_io_s": round(self._scheduler.oldest_io_s, 3),
            "deadline_s": self._scheduler.options.load_deadline_s,
            "flash_faults": self._recorder.total(stats.FLASH_FAULTS),
        }

    def _tiers(self, payload: dict[str, Any]) -> Answer:
        total = self._recorder.total
        return {
            "tiers": self._describe_tiers(),
            "classes": self.count_classes(),
            "wear": self._scheduler.wear.describe() or None,
            "flash_writes": self._describe_flash_writes(),
            "counters": {
                "prompt_tokens": total(stats.PROMPT_TOKENS),
                "requests": total(stats.REQUESTS),
                "hit_tokens": {tier: total(stats.HIT_TOKENS, tier) for tier in TIER_NAMES},
                "evictions": {
                    reason: sum(total(stats.EVICTIONS, tier, reason) for tier in TIER_NAMES)
                    for reason in ("retired", "demoted", "lost")
                },
            },
        }

    def _describe_flash_writes(self) -> Answer | None:
        """What may be written to flash; None without a flash tier."""
        scheduler = self._scheduler
        if not scheduler.flash.slots:
            return None
        writes = scheduler.flash_writes
        return {
            "placement": writes.placement,
            "bytes_per_day": writes.budget_bytes,
            "available_bytes": writes.available_bytes(time.monotonic()),
            "is_throttled": writes.is_throttled,
            "refused_blocks": self._recorder.totals_by_two(stats.FLASH_WRITES_REFUSED),
        }

    def _describe_tiers(self) -> Answer:
        """Counts in blocks and bytes, and how old the oldest transfer is."""
        scheduler = self._scheduler
        block_bytes = scheduler.layout.block_bytes
        answer: Answer = {}
        for name, usage in sorted(scheduler.usage().items(), key=lambda item: TIER_NAMES.index(item[0])):
            answer[name] = {
                "capacity_blocks": usage.capacity,
                "used_blocks": usage.used,
                "free_blocks": usage.free,
                "retired_blocks": usage.retired,
                "capacity_bytes": usage.capacity * block_bytes,
                "used_bytes": usage.used * block_bytes,
            }
        if scheduler.pool is not None:
            # Of the used blocks, those that a running request references.
            answer["hbm"]["held_blocks"] = scheduler.pool.num_gpu_blocks - 1 - scheduler.pool.get_num_free_blocks()
        for tier in (scheduler.host, scheduler.flash):
            answer[tier.name]["held_blocks"] = len(tier.slots) - tier.free_list.num_free_blocks
            answer[tier.name]["readable_blocks"] = len(tier)
            for metric in (stats.BYTES_READ, stats.BYTES_WRITTEN):
                answer[tier.name][metric.name] = self._recorder.total(metric, tier.name)
        if scheduler.in_place is not None:
            for name, count in scheduler.in_place.held().items():
                answer[name]["held_blocks"] = count
            if scheduler.options.flash_emulation.is_on:
                answer["flash"]["emulated_delay_us"] = self._recorder.total(stats.EMULATED_DELAY)
        answer["flash"]["oldest_io_s"] = round(scheduler.oldest_io_s, 3)
        return answer

    def count_classes(self) -> dict[str, dict[str, int]]:
        """Blocks by tier and class of what live segments read; counted again when the last count is half a second old."""
        now = time.monotonic()
        if now >= self._classes_due and (self._classes_are_old or now - self._classes_at > CLASSES_MAX_AGE_S):
            counts = self._lifecycle.segments.count_classes(len(TIER_NAMES))
            self._classes = {
                tier: {segment_class.value: count for segment_class, count in by_class.items()}
                for tier, by_class in zip(TIER_NAMES, counts, strict=True)
            }
            self._classes_at = time.monotonic()
            self._classes_due = self._classes_at + CLASSES_SHARE * (self._classes_at - now)
            self._classes_are_old = False
        return self._classes

    def _sessions(self, payload: dict[str, Any]) -> Answer:
        after = payload.get("after") or ""
        sessions = sorted(self._lifecycle.sessions(), key=_session_name)
        chosen = [session for session in sessions if _session_name(session) > after][: payload.get("limit", 100)]
        with_segments = bool(payload.get("segments"))
        return {"sessions": [self._describe(s, with_segments=with_segments) for s in chosen], "total": len(sessions)}

    def _session(self, payload: dict[str, Any]) -> Answer:
        session_id = payload["session_id"]
        session = self._lifecycle.find_session(session_id)
        if session is not None:
            return {"session": self._describe(session, with_segments=True)}
        ended = self._lifecycle.find_ended(session_id)
        if ended is None:
            return {"session": None}
        now = time.monotonic()
        # What its boundary waits for.
        agents = self._lifecycle.closing_agents(session_id)
        return {
            "session": {
                "session_id": session_id,
                "workflow_ids": [],
                "state": "ended",
                "generation": ended.generation,
                "running_requests": sum(agent.num_requests for agent in agents),
                "idle_s": 0.0 if agents else round(now - ended.at, 3),
                "held": self._held([segment for agent in agents for segment in agent.segments]),
                "last_boundary": _describe_boundary(ended.last_boundary, ended.at, now),
                "agents": [self._describe_agent(agent, now) for agent in agents],
            }
        }

    def _describe(self, session: Session, *, with_segments: bool) -> Answer:
        now = time.monotonic()
        agents = session.agents
        view: Answer = {
            "session_id": session.session_id,
            "workflow_ids": list(session.leases),
            "state": "active",
            "generation": session.generation,
            "running_requests": sum(agent.num_requests for agent in agents),
            "idle_s": round(now - max([session.last_active, *(agent.last_active for agent in agents)]), 3),
            "held": self._held([segment for agent in agents for segment in agent.segments]),
            "last_boundary": _describe_boundary(session.last_boundary, session.last_boundary_at, now),
        }
        if with_segments:
            view["agents"] = [self._describe_agent(agent, now) for agent in agents]
        return view

    def _held(self, segments: list[Segment]) -> Answer:
        block_bytes = self._scheduler.layout.block_bytes
        blocks, private = self._lifecycle.segments.count_blocks(segments, len(TIER_NAMES))
        return {
            tier: {
                "blocks": blocks[i],
                "private_blocks": private[i],
                "bytes": blocks[i] * block_bytes,
                "private_bytes": private[i] * block_bytes,
            }
            for i, tier in enumerate(TIER_NAMES)
        }

    def _describe_agent(self, agent: Agent, now: float) -> Answer:
        return {
            "agent": agent.role,
            "agent_id": agent.agent_id,
            "parent_agent_id": agent.parent_agent_id,
            "state": "returned" if agent.is_returned else "active",
            "turn": agent.turn if agent.turn is not None else agent.counted_turn,
            "running_requests": agent.num_requests,
            "segments": [self._describe_segment(segment, now) for segment in agent.segments],
        }

    def _describe_segment(self, segment: Segment, now: float) -> Answer:
        blocks, private = self._lifecycle.segments.count_blocks([segment], len(TIER_NAMES))
        return {
            "segment_id": segment.segment_id,
            "class": segment.segment_class.value,
            "closes_at": segment.closes_at.value,
            "state": "closing" if segment.is_closing else "open",
            "age_s": round(now - segment.opened_at, 3),
            "blocks": dict(zip(TIER_NAMES, blocks, strict=True)),
            "private_blocks": dict(zip(TIER_NAMES, private, strict=True)),
        }


def _describe_boundary(kind: BoundaryKind | None, at: float, now: float) -> Answer | None:
    return None if kind is None else {"kind": kind.value, "age_s": round(now - at, 3)}


def _session_name(session: Session) -> str:
    """Orders the sessions: by id, nameless ones by their workflow after a character that no id needs."""
    return session.session_id if session.session_id is not None else "\uffff" + (session.key[1] or "")
