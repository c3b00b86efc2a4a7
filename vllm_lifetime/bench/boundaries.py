# SPDX-License-Identifier: Apache-2.0
"""Posts the boundaries of a trace as a harness would, and names its requests."""

from collections.abc import Callable
from typing import Any

from vllm_lifetime.bench.plan import PlannedRequest, PlannedSession
from vllm_lifetime.bench.records import BoundaryRecord, RunRecord
from vllm_lifetime.boundaries import BoundaryKind
from vllm_lifetime.harness.client import AsyncLifetimeClient, request_fields

__all__ = ["BoundaryPoster", "name_request"]


def name_request(session: PlannedSession, request: PlannedRequest) -> tuple[dict[str, str], dict[str, Any]]:
    """Headers, and fields of the body, that name a request: `X-Session-ID` and `kv_transfer_params.lifetime`."""
    trace = request.trace
    fields = request_fields(
        session_id=session.trace.session_id,
        agent=trace.agent,
        agent_id=trace.agent_id,
        parent_agent_id=trace.parent_agent_id,
    )
    return fields["extra_headers"], fields["extra_body"]


class BoundaryPoster:
    """Turns what happens to a session into boundaries. Sessions that the trace leaves unnamed have none. Raises nothing."""

    def __init__(self, client: AsyncLifetimeClient, record: RunRecord, clock: Callable[[], float]) -> None:
        self._client = client
        self._record = record
        self._clock = clock

    def before(self, session: PlannedSession, request: PlannedRequest) -> None:
        """A request is about to be sent: its agent may have been spawned, or compacted."""
        if request.spawns:
            self._post(BoundaryKind.SUBAGENT_SPAWN, session, request)
        if request.trace.compacts:
            self._post(BoundaryKind.COMPACTION, session, request)

    def after(self, session: PlannedSession, request: PlannedRequest) -> None:
        """A request has been answered: a turn, or a sub-agent, may be over."""
        if request.trace.ends_turn:
            self._post(BoundaryKind.TURN_END, session, request)
        if request.trace.ends_agent:
            self._post(BoundaryKind.SUBAGENT_RETURN, session, request)

    def end(self, session: PlannedSession) -> None:
        """A session is over."""
        self._post(BoundaryKind.SESSION_END, session, None)

    def _post(self, kind: BoundaryKind, session: PlannedSession, request: PlannedRequest | None) -> None:
        if not session.trace.names_session:
            return
        agent = request.trace if request is not None else None
        session_id = session.trace.session_id
        self._client.boundary(
            kind,
            session_id=session_id,
            agent=agent.agent if agent else None,
            agent_id=agent.agent_id if agent else None,
            parent_agent_id=agent.parent_agent_id if agent else None,
        )
        self._record.boundaries.append(BoundaryRecord(self._clock(), kind.value, session_id))
