# SPDX-License-Identifier: Apache-2.0
"""What the control API answers, and what the engines answer it. Plain data.

An engine may say more than what is named here; it is passed on. Counts are blocks unless the name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from vllm_lifetime.boundaries import Boundary, BoundaryKind, Outcome, SegmentClass
from vllm_lifetime.hints import HintOutcome

__all__ = [
    "AgentView",
    "BoundaryOutcomes",
    "Counters",
    "EngineHealth",
    "ErrorList",
    "ErrorText",
    "EventRecord",
    "EventsPage",
    "HealthView",
    "HeldBlocks",
    "HintOutcomes",
    "LastBoundary",
    "ReleaseOutcome",
    "SegmentView",
    "SessionView",
    "SessionsPage",
    "TierState",
    "TiersOfEngine",
    "TiersView",
    "WearView",
    "WriteBudgetView",
]

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _View(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


# ---------------------------------------------------------------------- errors


class ErrorText(_View):
    """Why the request was not served, in a sentence."""

    detail: str


class ErrorItem(_View):
    """One field that is not what it should be."""

    loc: list[str | int]
    """Where: `body`, `query` or `path`, then keys and positions."""

    msg: str
    type: str


class ErrorList(_View):
    """What is wrong with the request."""

    detail: list[ErrorItem]


# ---------------------------------------------------------------------- boundaries, hints, events


class BoundaryOutcomes(_View):
    """An outcome per event, in the order of the events."""

    outcomes: list[Outcome]


class ReleaseOutcome(_View):
    """What a session's release did."""

    outcome: Outcome


class HintOutcomes(_View):
    """An outcome per action, in the order of the actions."""

    message_id: str
    outcomes: list[HintOutcome]


class EventRecord(_View):
    """One event that this API server took."""

    sequence: Count
    """Its number, from 1 since the server started."""

    received_at_s: Seconds
    """When it came, in Unix seconds."""

    event: Boundary
    """The event; a long spawn record is cut."""

    outcome: Outcome


class EventsPage(_View):
    """Events in the order they were taken."""

    events: list[EventRecord]
    next: Count
    """`after` of the request for what comes next."""


# ---------------------------------------------------------------------- tiers


class TierState(_View):
    """One tier. used + free = capacity; of the used blocks, `held` are referenced by a request or transfer; of the free
    ones, `retired` are still readable."""

    capacity_blocks: Count | None = None
    used_blocks: Count | None = None
    free_blocks: Count | None = None
    retired_blocks: Count | None = None
    held_blocks: Count | None = None
    readable_blocks: Count | None = None
    capacity_bytes: Count | None = None
    used_bytes: Count | None = None
    bytes_read: Count | None = None
    bytes_written: Count | None = None
    oldest_io_s: Seconds | None = None
    """Age of the oldest transfer that is not done."""

    emulated_delay_us: Count | None = None
    """Of flash in place: by how much steps were delayed, so that it takes as long as the emulated device. null: by nothing."""


class Evictions(_View):
    """Blocks that left HBM: those that nobody could read any more, those kept in a lower tier, those gone."""

    retired: Count = 0
    demoted: Count = 0
    lost: Count = 0


class HitTokens(_View):
    """Prompt tokens that were found, by the tier they were found in."""

    hbm: Count = 0
    host: Count = 0
    flash: Count = 0


class Counters(_View):
    """Sums since the engine started."""

    prompt_tokens: Count = 0
    hit_tokens: HitTokens = HitTokens()
    requests: Count = 0
    evictions: Evictions = Evictions()


class EraseCycles(_View):
    """Program/erase cycles of a flash file's erase blocks.

    `mean` and `max`: had writes been levelled; `in_place_...`: had each write erased what it lies on.
    """

    erase_blocks: Count
    mean: Annotated[float, Field(ge=0)]
    max: Annotated[float, Field(ge=0)]
    in_place_erases: Count
    max_in_place_erases: Count


class LedgerState(_View):
    """Whether the file that keeps the counts is written."""

    is_kept: bool
    flush_every_s: Seconds
    errors: dict[str, Count] = {}
    """Failed reads and writes of it, by errno name."""


class DriveView(_View):
    """What the system says, without privileges, of the drive under a flash file."""

    name: str = ""
    model: str = ""
    capacity_bytes: Count = 0
    written_since_boot_bytes: Count | None = None
    """By all processes."""

    note: str = ""
    """What could not be read, and why."""


class WearView(_View):
    """What has been written to one flash file since its ledger began.

    Keys of rates, years and drive writes: `hour`, `day`, `ledger` (since it began) and `process` (since the file was opened).
    """

    file: str
    wear_id: str
    size_bytes: Count
    erase_block_bytes: Count
    endurance_cycles: Count
    age_s: Seconds
    written_bytes: dict[str, dict[str, Count]]
    """By segment class and reason; `overhead` is what is not KV."""

    payload_bytes: Count
    overhead_bytes: Count
    programmed_bytes: Count
    written_last_day_bytes: Count
    write_amplification: Annotated[float, Field(ge=0)] | None
    in_place_write_amplification: Annotated[float, Field(ge=0)] | None
    cycles: EraseCycles
    endurance_used: Annotated[float, Field(ge=0)]
    rates_bytes_per_s: dict[str, Annotated[float, Field(ge=0)]]
    device_years: dict[str, Annotated[float, Field(ge=0)] | None]
    """null: nothing was written."""

    drive_writes_per_day: dict[str, Annotated[float, Field(ge=0)]]
    ledger: LedgerState
    drive: DriveView | None = None


class WriteBudgetView(_View):
    """Whether, and what, may be written to flash."""

    placement: str
    bytes_per_day: Count | None = None
    """null: no limit."""

    available_bytes: Count | None = None
    is_throttled: bool = False
    """Nothing is written to flash until more of the budget comes in."""

    refused_blocks: dict[str, dict[str, Count]] = {}
    """By segment class and reason."""


class TiersOfEngine(_View):
    """The tiers of one engine."""

    tiers: dict[str, TierState]
    classes: dict[str, dict[str, Count]] = {}
    """Blocks by tier and segment class."""

    counters: Counters = Counters()
    wear: list[WearView] | None = None
    """One for each flash file: one a rank. null: no flash tier."""

    flash_writes: WriteBudgetView | None = None
    """null: no flash tier."""


class TiersView(TiersOfEngine):
    """The tiers of all engines together, and of each. Counts add up; of ages the oldest stands. What may be written to flash
    is each engine's own."""

    engines: list[TiersOfEngine]


# ---------------------------------------------------------------------- sessions


class HeldBlocks(_View):
    """What a session can read in one tier; `private` is what nobody else can."""

    blocks: Count
    private_blocks: Count
    bytes: Count
    private_bytes: Count


class LastBoundary(_View):
    """The latest event of a session."""

    kind: BoundaryKind
    age_s: Seconds


class SegmentView(_View):
    """Tokens that share one lifetime."""

    segment_id: str | None
    segment_class: Annotated[SegmentClass, Field(alias="class")]
    closes_at: BoundaryKind
    state: Literal["open", "closing"]
    age_s: Seconds
    blocks: dict[str, Count]
    """By tier."""

    private_blocks: dict[str, Count]


class AgentView(_View):
    """One running instance of an agent."""

    agent: str | None
    agent_id: str | None
    parent_agent_id: str | None
    state: Literal["active", "returned"]
    turn: Count | None
    running_requests: Count
    segments: list[SegmentView] = []


class SessionView(_View):
    """One session, or a workflow that no session was named for (`session_id` is null)."""

    session_id: str | None
    workflow_ids: list[str]
    state: Literal["active", "ended"]
    generation: Count
    """How many times the session has begun anew after an end."""

    running_requests: Count
    idle_s: Seconds
    """Since its last request or event."""

    held: dict[str, HeldBlocks]
    """By tier."""

    last_boundary: LastBoundary | None = None
    agents: list[AgentView] | None = None


class SessionsPage(_View):
    """Sessions by name; those without one stand last."""

    sessions: list[SessionView]
    total: Count
    """Sessions there are. With several engines, those of the engine that has most."""

    next: str | None = None
    """`after` of the request for what comes next; absent at the end."""


# ---------------------------------------------------------------------- health


class EngineHealth(_View):
    """What an engine says of itself."""

    oldest_io_s: Seconds
    deadline_s: Seconds
    flash_faults: Count


class HealthView(_View):
    """Whether the engines answer and their transfers come to an end.

    `stalled`: a transfer is older than the deadline, or an engine does not answer in time. `dead`: an engine is gone
    or cannot answer.
    """

    status: Literal["ok", "stalled", "dead"]
    detail: str | None = None
    """Why it is not ok."""

    oldest_io_s: Seconds | None = None
    """Age of the oldest transfer in flight, of all engines."""

    deadline_s: Seconds | None = None
    flash_faults: Count | None = None
    engines: list[EngineHealth] = []
