# SPDX-License-Identifier: Apache-2.0
"""An engine that is only told what happens: it reports sessions, segments and tiers as the real one does, and moves no KV."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

BLOCK_BYTES = 1 << 17
BLOCK_TOKENS = 32
TIERS = ("hbm", "host", "flash")
CLOSES_AT = {
    "shared": "workflow_end",
    "lead": "session_end",
    "worker": "subagent_return",
    "reviewer": "subagent_return",
    "reasoning_laden": "turn_end",
    "reasoning_stripped": "session_end",
    "unknown": "session_end",
}


@dataclass
class Segment:
    """Blocks with one lifetime, all private."""

    segment_id: str | None
    segment_class: str
    opened_s: float
    blocks: Counter[str] = field(default_factory=Counter)


@dataclass
class Agent:
    """One instance of a role."""

    agent: str | None
    agent_id: str | None
    parent_agent_id: str | None = None
    state: str = "active"
    turn: int = 1
    segments: dict[str, Segment] = field(default_factory=dict)


@dataclass
class Session:
    """One generation of a session."""

    session_id: str
    workflow_id: str
    generation: int
    touched_s: float
    agents: dict[str | None, Agent] = field(default_factory=dict)
    last_boundary: tuple[str, float] | None = None
    running: int = 0

    def segments(self) -> list[Segment]:
        """All segments, of all agents."""
        return [segment for agent in self.agents.values() for segment in agent.segments.values()]


class MovingEngines:
    """An `EnginePort` of one engine. `request` and the boundaries move it."""

    def __init__(self, hbm: int = 560, host: int = 1024, flash: int = 4096) -> None:
        self.capacity = {"hbm": hbm, "host": host, "flash": flash}
        self.used: Counter[str] = Counter()
        self.retired: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.hits: Counter[str] = Counter()
        self.evictions: Counter[str] = Counter()
        self.prompt_tokens = 0
        self.requests = 0
        self.sessions: dict[str, Session] = {}
        self.generations: Counter[str] = Counter()
        self.oldest_io_s = 0.0
        self.error: str | None = None
        self.is_open = threading.Event()
        self.is_open.set()
        self.calls: list[str] = []

    # -- what happens ----------------------------------------------------------------------

    def request(
        self,
        session_id: str,
        *,
        workflow_id: str | None = None,
        agent: str | None = None,
        agent_id: str | None = None,
        segment_class: str = "lead",
        blocks: int = 8,
    ) -> None:
        """A request reads what its agent holds, wherever it lies, and adds `blocks` to a segment of that class."""
        now_s = time.time()
        session = self.sessions.get(session_id)
        if session is None:
            self.generations[session_id] += 1
            session = Session(session_id, workflow_id or session_id, self.generations[session_id], now_s)
            self.sessions[session_id] = session
        session.touched_s = now_s
        instance = session.agents.setdefault(agent_id, Agent(agent, agent_id))
        name = f"{agent_id or 'main'}:{segment_class}"
        segment = instance.segments.setdefault(name, Segment(name, segment_class, now_s))
        held: Counter[str] = Counter()
        for each in instance.segments.values():
            held.update(each.blocks)
        self.requests += 1
        self.prompt_tokens += BLOCK_TOKENS * (held.total() + blocks)
        for tier, count in held.items():
            self.hits[tier] += BLOCK_TOKENS * count
            if tier != "hbm":
                self.read[tier] += count * BLOCK_BYTES
        for each in instance.segments.values():
            self.used.subtract(each.blocks)
            self.used["hbm"] += each.blocks.total()
            each.blocks = Counter({"hbm": each.blocks.total()})
        segment.blocks["hbm"] += blocks
        self.used["hbm"] += blocks
        self._make_room(session)

    def _make_room(self, busy: Session) -> None:
        """Evict retired blocks, then move those of the session that was idle for longest one tier down."""
        for tier, below in itertools.pairwise((*TIERS, "")):
            excess = self.used[tier] + self.retired[tier] - self.capacity[tier]
            if excess <= 0:
                continue
            dropped = max(0, min(excess, self.retired[tier]))
            self.retired[tier] -= dropped
            self.evictions["retired"] += dropped
            excess -= dropped
            for session in sorted(self.sessions.values(), key=lambda each: (each is busy, each.touched_s)):
                for segment in session.segments():
                    count = max(0, min(excess, segment.blocks[tier]))
                    segment.blocks[tier] -= count
                    self.used[tier] -= count
                    excess -= count
                    self.evictions["demoted" if below else "lost"] += count
                    if below and count:
                        segment.blocks[below] += count
                        self.used[below] += count
                        self.written[below] += count * BLOCK_BYTES

    def _retire(self, segments: list[Segment]) -> int:
        blocks = 0
        for segment in segments:
            self.retired.update(segment.blocks)
            self.used.subtract(segment.blocks)
            blocks += segment.blocks.total()
        return blocks

    def apply(self, event: dict[str, Any]) -> dict[str, Any]:
        """One boundary; returns its outcome."""
        kind, now_s = event["kind"], time.time()
        session = self.sessions.get(event.get("session_id", ""))
        if kind == "session_start" and session is None:
            name = event["session_id"]
            self.request(name, workflow_id=event.get("workflow_id"), agent="lead", segment_class="shared", blocks=4)
            session = self.sessions[name]
        if kind == "workflow_end" and session is None:
            session = next((each for each in self.sessions.values() if each.workflow_id == event.get("workflow_id")), None)
        if session is None:
            return {"message_id": event["message_id"], "status": "ignored", "reason": "nothing of that name is here"}
        session.last_boundary = (kind, now_s)
        session.touched_s = now_s
        over: list[Segment] = []
        if kind in ("session_end", "workflow_end"):
            over = session.segments()
            del self.sessions[session.session_id]
        elif kind == "subagent_spawn":
            self.request(
                session.session_id,
                agent=event.get("agent"),
                agent_id=event.get("agent_id"),
                segment_class="reviewer" if event.get("agent") == "reviewer" else "worker",
                blocks=6,
            )
        elif kind == "subagent_return" and event.get("agent_id") in session.agents:
            agent = session.agents[event["agent_id"]]
            agent.state = "returned"
            over = list(agent.segments.values())
            agent.segments.clear()
        elif kind == "turn_end":
            for agent in session.agents.values():
                over += [each for each in agent.segments.values() if each.segment_class == "reasoning_laden"]
                agent.segments = {n: s for n, s in agent.segments.items() if s.segment_class != "reasoning_laden"}
                agent.turn += 1
        elif kind == "compaction":
            for agent in session.agents.values():
                over += [each for each in agent.segments.values() if each.segment_class == "lead"]
                agent.segments = {n: s for n, s in agent.segments.items() if s.segment_class != "lead"}
        blocks = self._retire(over)
        return {"message_id": event["message_id"], "status": "accepted", "blocks": blocks, "bytes": blocks * BLOCK_BYTES}

    # -- what is asked ---------------------------------------------------------------------

    async def call(self, method: str, *args: Any) -> list[Any]:
        """`EnginePort.call`."""
        assert method == "lifetime_call"
        what, payload = args
        self.calls.append(what)
        while not self.is_open.is_set():
            await asyncio.sleep(0.02)
        if self.error is not None:
            return [{"error": self.error}]
        answers = {
            "boundaries": lambda: {"outcomes": [self.apply(event) for event in payload["events"]]},
            "tiers": self._tiers,
            "sessions": lambda: self._sessions(payload),
            "session": lambda: self._session(payload["session_id"]),
            "health": lambda: {"oldest_io_s": self.oldest_io_s, "deadline_s": 30.0, "flash_faults": 0},
        }
        return [answers[what]()]

    def _tiers(self) -> dict[str, Any]:
        tiers, classes = {}, {}
        for tier, capacity in self.capacity.items():
            if not capacity:
                continue
            counts: Counter[str] = Counter()
            for session in self.sessions.values():
                for segment in session.segments():
                    counts[segment.segment_class] += segment.blocks[tier]
            used = counts.total()
            classes[tier] = dict(counts)
            tiers[tier] = {
                "capacity_blocks": capacity,
                "used_blocks": used,
                "free_blocks": capacity - used,
                "retired_blocks": self.retired[tier],
                "held_blocks": 0,
                "capacity_bytes": capacity * BLOCK_BYTES,
                "used_bytes": used * BLOCK_BYTES,
                "bytes_read": self.read[tier],
                "bytes_written": self.written[tier],
            }
        return {
            "tiers": tiers,
            "classes": classes,
            "counters": {
                "prompt_tokens": self.prompt_tokens,
                "hit_tokens": {tier: self.hits[tier] for tier in TIERS},
                "requests": self.requests,
                "evictions": {reason: self.evictions[reason] for reason in ("retired", "demoted", "lost")},
            },
        }

    def _sessions(self, payload: dict[str, Any]) -> dict[str, Any]:
        after = payload.get("after")
        names = sorted(name for name in self.sessions if after is None or name > after)[: payload["limit"]]
        views = [self._view(self.sessions[name], bool(payload.get("segments"))) for name in names]
        return {"sessions": views, "total": len(self.sessions)}

    def _session(self, session_id: str) -> dict[str, Any]:
        session = self.sessions.get(session_id)
        return {"session": None if session is None else self._view(session, True)}

    @staticmethod
    def _view(session: Session, with_segments: bool) -> dict[str, Any]:
        now_s = time.time()
        held: Counter[str] = Counter()
        for segment in session.segments():
            held.update(segment.blocks)
        view: dict[str, Any] = {
            "session_id": session.session_id,
            "workflow_ids": [session.workflow_id],
            "state": "active",
            "generation": session.generation,
            "running_requests": session.running,
            "idle_s": now_s - session.touched_s,
            "held": {
                tier: {"blocks": n, "private_blocks": n, "bytes": n * BLOCK_BYTES, "private_bytes": n * BLOCK_BYTES}
                for tier, n in held.items()
                if n
            },
            "last_boundary": None,
        }
        if session.last_boundary is not None:
            kind, at_s = session.last_boundary
            view["last_boundary"] = {"kind": kind, "age_s": now_s - at_s}
        if with_segments:
            view["agents"] = [
                {
                    "agent": agent.agent,
                    "agent_id": agent.agent_id,
                    "parent_agent_id": agent.parent_agent_id,
                    "state": agent.state,
                    "turn": agent.turn,
                    "running_requests": 0,
                    "segments": [
                        {
                            "segment_id": segment.segment_id,
                            "class": segment.segment_class,
                            "closes_at": CLOSES_AT[segment.segment_class],
                            "state": "open",
                            "age_s": now_s - segment.opened_s,
                            "blocks": {tier: n for tier, n in segment.blocks.items() if n},
                            "private_blocks": {tier: n for tier, n in segment.blocks.items() if n},
                        }
                        for segment in agent.segments.values()
                    ],
                }
                for agent in session.agents.values()
            ]
        return view
