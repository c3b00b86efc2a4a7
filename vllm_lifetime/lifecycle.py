# SPDX-License-Identifier: Apache-2.0
"""Sessions, workflows and agents: who may still read what, until a boundary, a request or time says otherwise.

A session holds **leases**, one per workflow that is read within it; a lease holds agents; an agent holds segments, which are the
readers of the pool's runs (`segments.py`). Requests open all of them. A request that names neither a session nor a workflow has
none: the lifetime of what it reads is unknown.

Events may come in any order, twice, late or never:

- each counts once by its `message_id`;
- one of another generation of its session, of an earlier turn, or sent before its session was last opened is late and ignored;
- what a running request reads is closed when the request is over;
- an agent of which nothing is heard for `lease_s` seconds is closed.

Scheduler process, one thread, no IO. Memory is bounded: what holds no block and runs no request is kept for `MAX_IDLE_AGENTS`
agents, ended sessions and message ids for the latest few thousand.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from vllm_lifetime.agents import Agent, Reading, TurnMemory
from vllm_lifetime.boundaries import Boundary, BoundaryKind, Outcome, OutcomeStatus, RequestMetadata
from vllm_lifetime.conversations import MIN_NEW_TOKENS, MIN_SHARED_TOKENS, Conversations
from vllm_lifetime.pool.runs import Reader
from vllm_lifetime.segments import Segment, SegmentTable
from vllm_lifetime.sessions import EndedSession, Lease, Session

__all__ = [
    "DEFAULT_LEASE_S",
    "MAX_AGENTS",
    "MAX_ENDED_SESSIONS",
    "MAX_IDLE_AGENTS",
    "MAX_LINES",
    "MAX_REMEMBERED_MESSAGES",
    "Lifecycle",
]

MAX_REMEMBERED_MESSAGES = 8192
"""Message ids kept to recognise duplicates. A harness retries within seconds, so thousands of newer events may pass meanwhile."""

MAX_ENDED_SESSIONS = 8192
"""Ended sessions whose generation is remembered, so that an event from before the end is recognised when the session is back."""

MAX_IDLE_AGENTS = 8192
"""Agents without block and request that are remembered: announced ones, and those whose blocks have been evicted."""

MAX_AGENTS = 10_000
"""Agents known at a time; the one not heard of for longest is closed for a new one. What many share has one reader for each."""

MAX_LINES = 32
"""Conversations told apart under one name of one lease; the one not heard of for longest is closed for a new one."""

DEFAULT_LEASE_S = 3600.0
"""Seconds of silence after which an agent is taken for lost. In recorded Claude Code sessions 0.25 % of what is read again is
read after a longer gap."""

_ACCEPTED = OutcomeStatus.ACCEPTED  # a name of this module: an enum's member is a slow attribute


class Lifecycle:
    """The registry of live sessions; see the module.

    Args:
        end_reader: retires what only this segment could read; returns the blocks retired in all tiers.
        block_bytes: bytes of one block over all layers and ranks, for the outcomes.
        lease_s: seconds of silence after which an agent is taken for lost.
        hash_tokens: tokens per block hash, as in a request's `block_hashes`.
        min_shared_tokens: see `MIN_SHARED_TOKENS`.
        min_new_tokens: see `MIN_NEW_TOKENS`.
        clock: monotonic seconds.

    """

    def __init__(
        self,
        end_reader: Callable[[Reader], int],
        block_bytes: int,
        lease_s: float = DEFAULT_LEASE_S,
        *,
        hash_tokens: int = 16,
        min_shared_tokens: int = MIN_SHARED_TOKENS,
        min_new_tokens: int = MIN_NEW_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.segments = SegmentTable(end_reader, self._on_segment_empty)
        self._block_bytes = block_bytes
        self._lease_s = lease_s
        self._conversations = Conversations(hash_tokens, min_shared_tokens, min_new_tokens)
        self._clock = clock
        self._memory = TurnMemory()
        self._sessions: dict[tuple[str | None, str | None], Session] = {}
        self._by_workflow: dict[str, set[Lease]] = {}
        self._by_activity: OrderedDict[Agent, None] = OrderedDict()
        self._idle: OrderedDict[Agent, None] = OrderedDict()
        self._ended: OrderedDict[str, EndedSession] = OrderedDict()
        self._messages: OrderedDict[str, OutcomeStatus] = OrderedDict()
        self._opening: dict[BoundaryKind, Callable[[Boundary, Session | None, float], Outcome]] = {
            BoundaryKind.SESSION_START: self._start_session,
            BoundaryKind.SUBAGENT_SPAWN: self._spawn,
            BoundaryKind.WORKFLOW_END: self._end_workflow,
        }
        """What may be about a session that is not known, or about none."""
        self._within: dict[BoundaryKind, Callable[[Boundary, Session, float], Outcome]] = {
            BoundaryKind.TURN_END: self._end_turn,
            BoundaryKind.SUBAGENT_RETURN: self._return,
            BoundaryKind.COMPACTION: self._compact,
            BoundaryKind.SESSION_END: self._end_session,
        }
        self.num_expired = 0
        """Agents closed because their lease ran out."""

    def set_hash_tokens(self, hash_tokens: int) -> None:
        """Tokens per block hash, once they are known."""
        self._conversations.set_hash_tokens(hash_tokens)

    def __len__(self) -> int:
        """Live sessions, those without a session id included."""
        return len(self._sessions)

    @property
    def num_agents(self) -> int:
        """Agents known, with and without blocks."""
        return len(self._by_activity)

    # ------------------------------------------------------------------ requests

    def start_request(self, session_id: str | None, metadata: RequestMetadata, hashes: Sequence[bytes]) -> Reading | None:
        """A request arrives, with the block hashes of its prompt: as whom it reads; None if it names no session and no workflow.

        O(log blocks) per conversation of the name, and O(new blocks).
        """
        workflow_id = metadata.workflow_id or session_id
        if workflow_id is None:
            return None
        now = self._clock()
        lease = self._lease_of(session_id, workflow_id, now)
        lease.session.last_active = now
        agent = self._line_for(lease, metadata, hashes, now)
        if metadata.parent_agent_id is not None:
            self._mark_lead(lease, metadata.parent_agent_id)
        reading = agent.start_request(metadata, hashes, now, self._memory)
        self._idle.pop(agent, None)
        self._by_activity.move_to_end(agent)
        return reading

    def has_read(self, reading: Reading) -> int:
        """The request has its prefix: close what it shows to be over. Returns the blocks retired."""
        if not reading.replaced:
            return 0
        replaced, reading.replaced = reading.replaced, []
        return self._close(replaced)[0]

    def finish_request(self, reading: Reading, hashes: Sequence[bytes], *, is_aborted: bool = False) -> int:
        """The request is over, however it ended; `hashes` covers prompt and answer. Returns the blocks retired by it."""
        if not reading.is_running:
            return 0
        blocks = self.has_read(reading)
        agent = reading.agent
        now = self._clock()
        blocks += agent.finish_request(reading, hashes, is_aborted=is_aborted, now=now)
        if agent in self._by_activity:
            self._by_activity.move_to_end(agent)
            self._note_if_idle(agent)
        return blocks

    def expire(self) -> int:
        """Close the agents of which nothing has been heard for a lease's time. Returns the blocks retired. O(1) if none."""
        blocks = 0
        limit = self._clock() - self._lease_s
        while self._by_activity:
            agent = next(iter(self._by_activity))
            if agent.last_active > limit:
                break
            if agent.num_requests:
                agent.last_active = self._clock()
                self._by_activity.move_to_end(agent)
                continue
            if not agent.is_empty:
                self.num_expired += 1
            blocks += self._lose(agent)
        return blocks

    def _close_oldest(self) -> bool:
        """Close the agent not heard of for longest that runs nothing; whether there was one among the first few."""
        for agent in itertools.islice(self._by_activity, 64):
            if not agent.num_requests:
                self._lose(agent)
                return True
        return False

    def _lose(self, agent: Agent) -> int:
        """Close an agent of which nobody has said that it is over. Returns the blocks retired."""
        blocks, _ = self._close(agent.end(), is_lost=True)
        self._forget(agent)
        return blocks

    # ------------------------------------------------------------------ boundaries

    def apply(self, event: Boundary) -> Outcome:
        """Act on one event, once per `message_id`. Never raises; an event about something unknown changes nothing."""
        known = self._messages.get(event.message_id)
        if known is not None:
            return Outcome(
                message_id=event.message_id,
                status=OutcomeStatus.DUPLICATE,
                reason=f"already {known}",
            )
        outcome = self._act(event, self._clock())
        self._messages[event.message_id] = outcome.status
        if len(self._messages) > MAX_REMEMBERED_MESSAGES:
            self._messages.popitem(last=False)
        return outcome

    def _act(self, event: Boundary, now: float) -> Outcome:
        session = self.find_session(event.session_id) if event.session_id is not None else None
        late = self._reason_if_late(event, session)
        if late is not None:
            return _ignored(event, late)
        if session is not None:
            session.last_boundary, session.last_boundary_at, session.last_active = event.kind, now, now
        opening = self._opening.get(event.kind)
        if opening is not None:
            return opening(event, session, now)
        if session is None:
            return _ignored(event, f"session {event.session_id!r} holds nothing here")
        return self._within[event.kind](event, session, now)

    def _reason_if_late(self, event: Boundary, session: Session | None) -> str | None:
        if session is None:
            ended = self._ended.get(event.session_id) if event.session_id is not None else None
            if ended is None or (event.kind is BoundaryKind.WORKFLOW_END and event.workflow_id is not None):
                return None
            # These may be the first that is heard of a session that is back, unless their time says that they are late.
            opens = event.kind in (BoundaryKind.SESSION_START, BoundaryKind.SUBAGENT_SPAWN)
            if opens and _is_after(event.sent_at_s, ended.sent_at_s):
                return None
            return f"session {event.session_id!r} has ended"
        if event.generation is not None and event.generation != session.generation:
            return f"it is about generation {event.generation} of the session, which is in generation {session.generation}"
        if not _is_after(event.sent_at_s, session.opened_sent_at_s):
            return "it was sent before the session was opened again"
        return None

    def _start_session(self, event: Boundary, session: Session | None, now: float) -> Outcome:
        if session is None:
            assert event.session_id is not None  # Boundary
            lease = self._lease_of(event.session_id, event.workflow, now)
            session = lease.session
            self._new_line(lease, None, None, None, None, now)
            session.last_boundary, session.last_boundary_at = event.kind, now
        session.opened_sent_at_s = event.sent_at_s if event.sent_at_s is not None else session.opened_sent_at_s
        return Outcome(message_id=event.message_id, status=_ACCEPTED)

    def _end_session(self, event: Boundary, session: Session, now: float) -> Outcome:
        outcome = self._end_agents(event, session.agents)
        self._remember_end(session, event.sent_at_s, now)
        return outcome

    def _end_workflow(self, event: Boundary, _session: Session | None, now: float) -> Outcome:
        leases = self._by_workflow.get(event.workflow, set())
        if not leases:
            return _ignored(event, f"workflow {event.workflow!r} holds nothing here")
        sessions = {lease.session for lease in leases}
        outcome = self._end_agents(event, [agent for lease in leases for agent in lease.agents])
        for session in sessions:
            if self._sessions.get(session.key) is not session:
                self._remember_end(session, event.sent_at_s, now)
        return outcome

    def _spawn(self, event: Boundary, _session: Session | None, now: float) -> Outcome:
        name = event.agent_id or event.agent
        if name is None:
            return _ignored(event, "subagent_spawn names neither agent_id nor agent")
        lease = self._lease_of(event.session_id, event.workflow, now)
        lines = lease.lines.get(name)
        if lines is None:
            agent = self._new_line(lease, name, event.agent, event.agent_id, event.parent_agent_id, now)
            lease.waiting_spawns[name] = now
            lines = [agent]
        for agent in lines:
            agent.become_subagent(event.parent_agent_id)
        self._mark_lead(lease, event.parent_agent_id)
        return Outcome(message_id=event.message_id, status=_ACCEPTED)

    def _end_turn(self, event: Boundary, session: Session, _now: float) -> Outcome:
        agents = self._agents_of(event, session)
        timely = [agent for agent in agents if not self._is_late_turn_end(event, agent)]
        if not timely:
            return _ignored(event, "that turn is over already" if agents else "no agent of that name is here")
        return self._closed(event, [segment for agent in timely for segment in agent.end_turn(event)])

    def _is_late_turn_end(self, event: Boundary, agent: Agent) -> bool:
        if event.turn is not None and agent.turn is not None:
            return event.turn < agent.turn
        if not _is_after(event.sent_at_s, agent.turn_ended_sent_at_s):
            return True
        # Nothing has been answered in this turn: the event is about the one before, or about the session before its end.
        if agent.num_finished_in_turn:
            return False
        return agent.num_turns > 1 or (agent.num_turns == 1 and agent.lease.session.generation > 0)

    def _return(self, event: Boundary, session: Session, _now: float) -> Outcome:
        name = event.agent_id or event.agent
        if name is None:
            return _ignored(event, "subagent_return names neither agent_id nor agent")
        agents = self._agents_of(event, session)
        if not agents:
            return _ignored(event, f"agent {name!r} holds nothing here")
        return self._end_agents(event, agents)

    def _compact(self, event: Boundary, session: Session, now: float) -> Outcome:
        agents = self._agents_of(event, session)
        if not agents:
            return _ignored(event, "no agent of that name is here")
        # Of several conversations under one name it is the latest one's.
        latest = {agent.name: agent for agent in sorted(agents, key=lambda agent: agent.last_active)}
        agents = list(latest.values())
        if event.expected_return_s is not None:
            for agent in agents:
                agent.expects_compaction, agent.is_summarised = True, False
            return Outcome(
                message_id=event.message_id,
                status=_ACCEPTED,
                reason="closes with the next request that does not read the old context to its end",
            )
        return self._closed(event, [segment for agent in agents for segment in agent.compact(now)])

    # ------------------------------------------------------------------ closing

    def end_agents(self, agents: Iterable[Agent]) -> tuple[int, int]:
        """Close every segment of `agents` and forget them. Returns the blocks retired and the segments that wait for requests."""
        agents = list(agents)
        result = self._close([segment for agent in agents for segment in agent.end()])
        for agent in agents:
            self._forget(agent)
        return result

    def close_segments(self, segments: Iterable[Segment]) -> tuple[int, int]:
        """Close single segments; their agents go on. Returns as `end_agents`."""
        return self._close(list(segments))

    def _end_agents(self, event: Boundary, agents: Iterable[Agent]) -> Outcome:
        return self._outcome(event, *self.end_agents(agents))

    def _closed(self, event: Boundary, segments: list[Segment]) -> Outcome:
        return self._outcome(event, *self._close(segments))

    def _close(self, segments: list[Segment], *, is_lost: bool = False) -> tuple[int, int]:
        blocks = num_waiting = 0
        for segment in segments:
            retired = self.segments.close(segment, is_lost=is_lost)
            if retired is None:
                num_waiting += 1
            else:
                blocks += retired
        return blocks, num_waiting

    def _outcome(self, event: Boundary, blocks: int, num_waiting: int) -> Outcome:
        reason = None
        if num_waiting:
            reason = f"{num_waiting} segment{'s wait' if num_waiting > 1 else ' waits'} for a running request"
        return Outcome(
            message_id=event.message_id, status=_ACCEPTED, reason=reason, blocks=blocks, bytes=blocks * self._block_bytes
        )

    # ------------------------------------------------------------------ finding

    def find_session(self, session_id: str) -> Session | None:
        """The live session of that id."""
        return self._sessions.get((session_id, None))

    def find_ended(self, session_id: str) -> EndedSession | None:
        """What is remembered of a session that has ended and is not back."""
        return self._ended.get(session_id)

    def closing_agents(self, session_id: str) -> list[Agent]:
        """Agents of an ended session of which a request still runs. O(live segments)."""
        agents = {segment.agent: None for segment in self.segments if segment.is_closing}
        return [agent for agent in agents if agent.lease.session.session_id == session_id]

    def sessions(self) -> list[Session]:
        """All live sessions."""
        return list(self._sessions.values())

    def find_agents(self, session_id: str | None, workflow_id: str | None, name: str | None) -> list[Agent]:
        """The agents of a session, a workflow, or both, called `name` (None: all of them)."""
        leases: Iterable[Lease]
        if session_id is None:
            leases = self._by_workflow.get(workflow_id or "", set())
        else:
            session = self.find_session(session_id)
            leases = [] if session is None else session.find_leases(workflow_id)
        return [agent for lease in leases for agent in (lease.agents if name is None else lease.find(name))]

    def _agents_of(self, event: Boundary, session: Session) -> list[Agent]:
        chosen = session.find_leases(event.workflow_id)
        if event.agent_id is None:
            return [agent for lease in chosen for agent in lease.find(event.agent)]
        found = [agent for lease in chosen for agent in lease.find(event.agent_id)]
        if event.agent is None or any(not agent.is_empty for agent in found):
            return found
        # Its requests may have named the role alone.
        by_role = [agent for lease in chosen for agent in lease.find(event.agent) if agent.agent_id is None]
        return found + by_role

    # ------------------------------------------------------------------ opening

    def _lease_of(self, session_id: str | None, workflow_id: str, now: float) -> Lease:
        key = (session_id, workflow_id if session_id is None else None)
        session = self._sessions.get(key)
        if session is None:
            ended = self._ended.pop(session_id, None) if session_id is not None else None
            generation, sent_at_s = (ended.generation + 1, ended.sent_at_s) if ended else (0, None)
            session = self._sessions[key] = Session(key, generation, sent_at_s, now)
        lease = session.leases.get(workflow_id)
        if lease is None:
            lease = session.leases[workflow_id] = Lease(workflow_id, session)
            self._by_workflow.setdefault(workflow_id, set()).add(lease)
        return lease

    def _line_for(self, lease: Lease, metadata: RequestMetadata, hashes: Sequence[bytes], now: float) -> Agent:
        """The conversation that a request goes on with, or a new one."""
        name = metadata.agent_id or metadata.agent
        lease.names_agents |= name is not None
        found = self._conversations.find(lease, name, metadata, hashes, now)
        if found is not None:
            return found
        lines = lease.lines.get(name, [])
        if len(lines) >= MAX_LINES:
            crowd = self._make_room(lease, name, now)
            if crowd is not None:
                return crowd
        parent = metadata.parent_agent_id
        agent = self._new_line(lease, name, metadata.agent, metadata.agent_id, parent, now)
        if lines and lines[0].is_subagent and lines[0] is not agent:
            agent.become_subagent(lines[0].parent_agent_id)
        return agent

    def _make_room(self, lease: Lease, name: str | None, now: float) -> Agent | None:
        """Close the conversation that matters least; if all of them run, return the one that stands for all further ones."""
        lines = lease.lines[name]
        idle = [agent for agent in lines if not agent.num_requests and not agent.is_crowd]
        if idle:
            self.end_agents([min(idle, key=lambda agent: (agent.num_turns > 1, len(agent.history), agent.last_active))])
            return None
        if not lines[-1].is_crowd:
            self._new_line(lease, name, None, None, None, now).is_crowd = True
        return lease.lines[name][-1]

    def _new_line(
        self, lease: Lease, name: str | None, role: str | None, agent_id: str | None, parent: str | None, now: float
    ) -> Agent:
        while len(self._by_activity) >= MAX_AGENTS and self._close_oldest():
            pass
        if lease.session.leases.get(lease.workflow_id) is not lease:
            # It has gone while room was made.
            lease = self._lease_of(lease.session.session_id, lease.workflow_id, now)
        agent = Agent(self.segments, lease, lease.workflow_id, name, role, agent_id, parent, now)
        lease.lines.setdefault(name, []).append(agent)
        self._by_activity[agent] = None
        self._note_if_idle(agent)
        return agent

    def _mark_lead(self, lease: Lease, parent_agent_id: str | None) -> None:
        for agent in lease.find(parent_agent_id):
            agent.become_lead()

    # ------------------------------------------------------------------ forgetting

    def _on_segment_empty(self, segment: Segment) -> None:
        self._note_if_idle(segment.agent)

    def _note_if_idle(self, agent: Agent) -> None:
        """An agent without block and request is kept among the latest few thousand."""
        if agent not in self._by_activity or not agent.is_empty:
            return
        if len(agent.history):
            agent.forget_context()
        self._idle[agent] = None
        self._idle.move_to_end(agent)
        while len(self._idle) > MAX_IDLE_AGENTS:
            self._forget(next(iter(self._idle)))

    def _forget(self, agent: Agent) -> None:
        """Drop an agent, and its lease and session if it was their last."""
        self._idle.pop(agent, None)
        if agent not in self._by_activity:
            return
        del self._by_activity[agent]
        lease = agent.lease
        for name in {agent.name, agent.role, None}:
            lines = lease.lines.get(name)
            if lines is not None and agent in lines:
                lines.remove(agent)
                if not lines:
                    del lease.lines[name]
                    if name is not None:
                        lease.waiting_spawns.pop(name, None)
        if lease.lines:
            return
        session = lease.session
        if session.leases.get(lease.workflow_id) is lease:
            del session.leases[lease.workflow_id]
            _discard(self._by_workflow, lease.workflow_id, lease)
        if not session.leases and self._sessions.get(session.key) is session:
            del self._sessions[session.key]
            if session.generation:
                self._remember_end(session, session.opened_sent_at_s, self._clock())

    def _remember_end(self, session: Session, sent_at_s: float | None, now: float) -> None:
        if session.session_id is None:
            return
        self._ended[session.session_id] = EndedSession(session.generation, sent_at_s, now, session.last_boundary)
        self._ended.move_to_end(session.session_id)
        if len(self._ended) > MAX_ENDED_SESSIONS:
            self._ended.popitem(last=False)


def _is_after(sent_at_s: float | None, opened_sent_at_s: float | None) -> bool:
    """Whether an event may have been sent after another one: yes, if either time is unknown."""
    return sent_at_s is None or opened_sent_at_s is None or sent_at_s >= opened_sent_at_s


def _ignored(event: Boundary, reason: str) -> Outcome:
    return Outcome(message_id=event.message_id, status=OutcomeStatus.IGNORED, reason=reason)


def _discard(index: dict[str, set[Lease]], key: str, lease: Lease) -> None:
    leases = index.get(key)
    if leases is not None:
        leases.discard(lease)
        if not leases:
            del index[key]
