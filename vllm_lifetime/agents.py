# SPDX-License-Identifier: Apache-2.0
"""One running agent: its turns, and which segment each of its requests reads and writes.

An agent's context is one conversation that grows request by request. In a turn the first request's prompt is the part that
survives (`reasoning_stripped`; `lead` if the agent has sub-agents); everything the turn adds to it, tool calls and reasoning, is
`reasoning_laden` until the turn ends, because the next user message brings the conversation back without it (Lachesis section
3.3). A sub-agent's context is one segment, `worker` or `reviewer`, until it returns (section 3.4).

Harnesses that keep reasoning are found out: if the first request of a new turn reads on where the last one ended, the agent's
turns have no segment of their own any more, nor have those of later agents of that role.

Scheduler process, one thread, no IO.
"""

import re
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm_lifetime.boundaries import Boundary, RequestMetadata, SegmentClass
from vllm_lifetime.pool.runs import Reader
from vllm_lifetime.segments import Segment, SegmentTable

if TYPE_CHECKING:
    from vllm_lifetime.sessions import Lease

__all__ = ["Agent", "Continuation", "Reading", "TurnMemory", "common_length", "subagent_class"]

_REVIEWER = re.compile(r"review|critic|judge|verif|evaluat|grader", re.IGNORECASE)
"""Roles of sub-agents whose class is `reviewer`: they read a worker's result and do not delegate further."""

MAX_ROLES = 1024
"""Roles of which is remembered whether their turns strip reasoning."""

MAX_NAMED_SEGMENTS = 64
"""Segments of one agent that requests named by `segment_id`; the oldest is closed for a new one."""


class Continuation(Enum):
    """How a request's prompt goes on from the agent's latest context."""

    NEW = auto()
    """There is nothing to compare with."""
    EXTENDS = auto()
    """It reads all of it and adds to it."""
    DROPS_TURN = auto()
    """It reads what the present turn began with, not what the turn has added."""
    REPLACES = auto()
    """It reads less than that: the context has been compacted or cut."""


class Reading:
    """As which segments one request reads and writes.

    `prompt` reads and writes the first `boundary_blocks` blocks (of a block hash each; None: the whole prompt), `output` what
    comes after them. `replaced` are the segments that this request shows to be over; they are closed once it has read its
    prefix, so that what it shares with them is never retired.
    """

    __slots__ = (
        "agent",
        "begins_turn",
        "boundary_blocks",
        "cache_ttl_s",
        "is_running",
        "output",
        "prompt",
        "replaced",
        "retain_s",
    )

    def __init__(
        self,
        agent: "Agent",
        prompt: Segment,
        output: Segment,
        replaced: list[Segment],
        metadata: RequestMetadata,
        *,
        boundary_blocks: int | None,
        begins_turn: bool,
    ) -> None:
        self.agent = agent
        self.prompt = prompt
        self.output = output
        self.replaced = replaced
        self.boundary_blocks = boundary_blocks
        self.begins_turn = begins_turn
        self.retain_s = metadata.retain_s or 0.0
        self.cache_ttl_s = metadata.cache_ttl_s or 0.0
        self.is_running = True


class TurnMemory:
    """Whether the turns of a role strip their reasoning, learned from the agents seen so far. Bounded by `MAX_ROLES`."""

    def __init__(self) -> None:
        self._keeps: OrderedDict[str | None, bool] = OrderedDict()

    def observe(self, role: str | None, keeps: bool) -> None:
        """A new turn of an agent of `role` has read on from the last one (`keeps`), or without its reasoning."""
        for name in {role, None}:
            self._keeps[name] = keeps
            self._keeps.move_to_end(name)
        while len(self._keeps) > MAX_ROLES:
            del self._keeps[next(name for name in self._keeps if name is not None)]

    def keeps(self, role: str | None) -> bool:
        """Whether turns of `role` keep their reasoning: as last seen, in the role or else in any, and no if nothing was."""
        return self._keeps.get(role, self._keeps.get(None, False))


def subagent_class(role: str) -> SegmentClass:
    """`reviewer` for roles that read a worker's result and judge it, else `worker` (Lachesis section 3.4)."""
    return SegmentClass.REVIEWER if _REVIEWER.search(role) else SegmentClass.WORKER


def common_length(history: Sequence[int], hashes: Sequence[bytes]) -> int:
    """Number of leading blocks in which a context and a prompt agree. O(log blocks), since each hash covers all before it."""
    low, high = 0, min(len(history), len(hashes))
    while low < high:
        middle = (low + high) // 2
        if history[middle] == _short(hashes[middle]):
            low = middle + 1
        else:
            high = middle
    return low


def _short(block_hash: bytes) -> int:
    """Eight bytes of a block hash: enough to tell a few thousand blocks of one agent apart."""
    return int.from_bytes(block_hash[:8], "little")


class Agent:
    """See the module. `lease` is the workflow and session it belongs to; `name` how requests and events find it.

    `history` has a number for each whole block of its latest context, from the block hashes.
    """

    __slots__ = (
        "agent_id",
        "base",
        "counted_turn",
        "expects_compaction",
        "has_children",
        "history",
        "is_crowd",
        "is_returned",
        "is_subagent",
        "is_summarised",
        "keeps_reasoning",
        "last_active",
        "lease",
        "name",
        "named",
        "num_finished_in_turn",
        "num_requests",
        "num_turns",
        "parent_agent_id",
        "retention",
        "role",
        "table",
        "turn",
        "turn_base_blocks",
        "turn_ended_sent_at_s",
        "turn_has_segment",
        "turn_is_over",
        "turn_segment",
        "wish",
    )

    def __init__(
        self,
        table: SegmentTable,
        lease: "Lease",
        workflow_id: str,
        name: str | None,
        role: str | None,
        agent_id: str | None,
        parent_agent_id: str | None,
        now: float,
    ) -> None:
        self.table = table
        self.lease = lease
        self.name = name
        self.role = role
        self.agent_id = agent_id
        self.parent_agent_id = parent_agent_id
        self.is_subagent = parent_agent_id is not None
        self.has_children = False
        self.is_returned = False
        self.turn: int | None = None
        self.counted_turn: int | None = None
        self.num_turns = 0
        self.turn_is_over = False
        self.turn_ended_sent_at_s: float | None = None
        self.num_finished_in_turn = 0
        self.turn_base_blocks = 0
        self.turn_has_segment = False
        self.keeps_reasoning: bool | None = None
        self.expects_compaction = False
        self.is_summarised = False
        """Whether its context has been read once more since a compaction was announced."""
        self.is_crowd = False
        """Whether it stands for more conversations than are told apart."""
        self.history: array[int] = array("Q")
        self.num_requests = 0
        self.last_active = now
        self.base = Segment(table, self, workflow_id, SegmentClass.REASONING_STRIPPED, now)
        self.base.segment_class = self._base_class()
        self.turn_segment: Segment | None = None
        self.named: dict[str, Segment] = {}
        self.retention: Reader | None = None
        """Keeps what its requests wished to be kept, also after its end."""
        self.wish: Reader | None = None
        """Keeps what its requests' protocol asks to be kept, until its end."""

    # ------------------------------------------------------------------ looking

    @property
    def segments(self) -> list[Segment]:
        """Its live segments, the longest-lived first."""
        own = [self.base, self.turn_segment, *self.named.values()]
        return [segment for segment in own if segment is not None and not segment.is_empty]

    @property
    def is_empty(self) -> bool:
        """Whether it runs nothing and none of its segments holds a block."""
        if self.num_requests or not self.base.is_empty:
            return False
        if self.turn_segment is not None and not self.turn_segment.is_empty:
            return False
        return not self.named or all(segment.is_empty for segment in self.named.values())

    def continuation(self, hashes: Sequence[bytes]) -> tuple[Continuation, int]:
        """How a prompt goes on from this agent's context, and in how many leading blocks the two agree. O(log blocks)."""
        length = len(self.history)
        if not length:
            return Continuation.NEW, 0
        common = common_length(self.history, hashes)
        # The last block may hold the chat template's opening of the answer, which no later prompt repeats as it was.
        if common >= length - 1:
            return Continuation.EXTENDS, common
        if common >= self.turn_base_blocks - 1 and self.turn_base_blocks > 1:
            return Continuation.DROPS_TURN, common
        return Continuation.REPLACES, common

    # ------------------------------------------------------------------ requests

    def start_request(self, metadata: RequestMetadata, hashes: Sequence[bytes], now: float, memory: TurnMemory) -> Reading:
        """A request of this agent arrives. O(log blocks) and O(new blocks) for the history."""
        if metadata.parent_agent_id is not None and not self.is_subagent:
            self.become_subagent(metadata.parent_agent_id)
        self.role = self.role or metadata.agent
        replaced: list[Segment] = []
        boundary_blocks = None
        num_turns_before = self.num_turns
        if metadata.segment_id is not None:
            prompt = output = self._named_segment(metadata.segment_id, metadata.segment_class, now, replaced)
            self._note_turn(metadata, is_new=self._has_new_number(metadata))
        elif self.is_crowd:
            prompt = output = self.base = self.base if self._is_open(self.base) else self._new_base(now)
        else:
            prompt, output = self._choose_segments(metadata, hashes, now, memory, replaced)
            if num_turns_before == self.num_turns:
                # The part that survives the turn stays the base's, also when it has been evicted and is computed again.
                boundary_blocks = self.turn_base_blocks
        self.num_requests += 1
        self.last_active = now
        self.table.start_request(prompt)
        if output is not prompt:
            self.table.start_request(output)
        begins_turn = num_turns_before != self.num_turns
        return Reading(self, prompt, output, replaced, metadata, boundary_blocks=boundary_blocks, begins_turn=begins_turn)

    def _has_new_number(self, metadata: RequestMetadata) -> bool:
        """Whether the request says, or shows, that it answers another user message than the last one."""
        if metadata.turn is not None:
            return metadata.turn != self.turn
        return metadata.counted_turn is not None and metadata.counted_turn != self.counted_turn

    @staticmethod
    def _is_open(segment: Segment) -> bool:
        return segment.is_live and not segment.is_closing

    def _choose_segments(
        self,
        metadata: RequestMetadata,
        hashes: Sequence[bytes],
        now: float,
        memory: TurnMemory,
        replaced: list[Segment],
    ) -> tuple[Segment, Segment]:
        how, common = self.continuation(hashes)
        if not self._is_open(self.base):
            self.base = self._new_base(now)
        is_cut = how in (Continuation.DROPS_TURN, Continuation.REPLACES)
        is_new_turn = is_cut or self.num_turns == 0 or self.turn_is_over or self._has_new_number(metadata)
        num_added = len(self.history) - self.turn_base_blocks
        if how is Continuation.REPLACES or (how is Continuation.DROPS_TURN and not self.turn_has_segment):
            # Compaction; or what the turn added is gone, which was taken for the part that stays.
            replaced.extend(self._drop_context(now))
        is_retry = len(hashes) <= self.turn_base_blocks
        if is_new_turn and num_added > 1 and not is_retry and how in (Continuation.EXTENDS, Continuation.DROPS_TURN):
            # Half: the last answer may be lost alone, to another tokenization of the same text.
            self._learn(2 * (common - self.turn_base_blocks) >= num_added, memory)
        del self.history[common:]
        self.history.extend(map(_short, hashes[common:]))
        if is_new_turn:
            if self.turn_segment is not None:
                replaced.append(self.turn_segment)
                self.turn_segment = None
            self.turn_base_blocks = len(hashes)
            self.turn_has_segment = False
        self._note_turn(metadata, is_new_turn)
        if how is not Continuation.EXTENDS:
            self.expects_compaction = self.is_summarised = False
        elif self.expects_compaction:
            self.is_summarised = True
        return self._segments_of_turn(metadata.segment_class, now, memory)

    def _segments_of_turn(self, segment_class: SegmentClass | None, now: float, memory: TurnMemory) -> tuple[Segment, Segment]:
        if segment_class is SegmentClass.REASONING_LADEN:
            laden = self._open_turn_segment(now)
            return laden, laden
        if segment_class is not None:
            self.base.segment_class = segment_class
            if segment_class is not SegmentClass.REASONING_STRIPPED:
                return self.base, self.base
            return self.base, self._open_turn_segment(now)
        keeps = memory.keeps(self.role) if self.keeps_reasoning is None else self.keeps_reasoning
        if self.is_subagent or (keeps and self.turn_segment is None):
            return self.base, self.base
        return self.base, self._open_turn_segment(now)

    def finish_request(self, reading: Reading, hashes: Sequence[bytes], *, is_aborted: bool, now: float) -> int:
        """One of its requests is over. Returns the blocks retired, if a boundary had been waiting for it.

        An aborted first request of a turn takes what it decoded with it: no later prompt has half an answer in it.
        """
        reading.is_running = False
        self.num_requests -= 1
        self.num_finished_in_turn += 1
        self.last_active = now
        if not is_aborted and len(hashes) > len(self.history) and self._ends_with_history(hashes):
            self.history.extend(map(_short, hashes[len(self.history) :]))
        output = reading.output
        if is_aborted and reading.begins_turn and output is self.turn_segment and output.num_requests == 1:
            self.turn_segment = None
            self.table.close(output)
        blocks = self.table.finish_request(output)
        if reading.prompt is not output:
            blocks += self.table.finish_request(reading.prompt)
        return blocks

    def _ends_with_history(self, hashes: Sequence[bytes]) -> bool:
        return not self.history or self.history[-1] == _short(hashes[len(self.history) - 1])

    # ------------------------------------------------------------------ boundaries

    def end_turn(self, event: Boundary) -> list[Segment]:
        """`turn_end`: the segments that are over."""
        self.turn_is_over = True
        self.turn_ended_sent_at_s = event.sent_at_s
        over, self.turn_segment = self.turn_segment, None
        return [] if over is None else [over]

    def compact(self, now: float) -> list[Segment]:
        """`compaction`: the segments that are over. The next request opens new ones."""
        over = self._drop_context(now)
        self.forget_context()
        return over

    def forget_context(self) -> None:
        """Nothing of its context is left to compare with: the next request begins a turn."""
        del self.history[:]
        self.turn_base_blocks = 0
        self.turn_is_over = True

    def end(self) -> list[Segment]:
        """The agent has returned, or its workflow or session is over: all its segments are."""
        self.is_returned = True
        return self.segments

    def become_subagent(self, parent_agent_id: str | None) -> None:
        """A spawn record, or a request's metadata, says that somebody spawned it."""
        self.is_subagent = True
        self.parent_agent_id = parent_agent_id or self.parent_agent_id
        self.base.segment_class = self._base_class()

    def become_lead(self) -> None:
        """It has spawned a sub-agent: what survives its turns is a lead's context."""
        self.has_children = True
        if self.base.segment_class is SegmentClass.REASONING_STRIPPED:
            self.base.segment_class = SegmentClass.LEAD

    # ------------------------------------------------------------------ inside

    def _base_class(self) -> SegmentClass:
        if self.is_subagent:
            return subagent_class(self.role or self.name or "")
        return SegmentClass.LEAD if self.has_children else SegmentClass.REASONING_STRIPPED

    def _learn(self, keeps: bool, memory: TurnMemory) -> None:
        if self.is_subagent:
            return
        self.keeps_reasoning = keeps
        memory.observe(self.role, keeps)

    def _note_turn(self, metadata: RequestMetadata, is_new: bool) -> None:
        if is_new:
            self.num_turns += 1
            self.num_finished_in_turn = 0
            self.turn_is_over = False
        if metadata.turn is not None:
            self.turn = metadata.turn
        if metadata.counted_turn is not None:
            self.counted_turn = metadata.counted_turn

    def _open_turn_segment(self, now: float) -> Segment:
        self.turn_has_segment = True
        if self.turn_segment is None:
            self.turn_segment = Segment(self.table, self, self.base.workflow_id, SegmentClass.REASONING_LADEN, now)
        return self.turn_segment

    def _drop_context(self, now: float) -> list[Segment]:
        """Take leave of the context as it is; a new, empty one follows."""
        over = [segment for segment in (self.base, self.turn_segment) if segment is not None and not segment.is_empty]
        self.base = self._new_base(now)
        self.turn_segment = None
        return over

    def _new_base(self, now: float) -> Segment:
        return Segment(self.table, self, self.base.workflow_id, self._base_class(), now)

    def _named_segment(self, segment_id: str, segment_class: SegmentClass | None, now: float, replaced: list[Segment]) -> Segment:
        segment = self.named.get(segment_id)
        if segment is None or not self._is_open(segment):
            if len(self.named) >= MAX_NAMED_SEGMENTS:
                replaced.append(self.named.pop(next(iter(self.named))))
            inferred = segment_class or (self._base_class() if self.is_subagent else SegmentClass.UNKNOWN)
            segment = self.named[segment_id] = Segment(self.table, self, self.base.workflow_id, inferred, now, segment_id)
        elif segment_class is not None:
            segment.segment_class = segment_class
        return segment
