# SPDX-License-Identifier: Apache-2.0
"""Sessions and workflows: who may still read what, until a boundary says otherwise.

A **lease** is one workflow read within one session. Requests open leases; `workflow_end` and `session_end` end them. A request
that names neither a session nor a workflow has no lease: the lifetime of what it reads is unknown.

Scheduler process, one thread, no IO. Memory is bounded: a lease that holds no run and no request is forgotten, and so are old
message ids.
"""

from collections import OrderedDict
from collections.abc import Callable

from vllm_lifetime.boundaries import Boundary, BoundaryKind, Outcome, OutcomeStatus, RequestMetadata
from vllm_lifetime.pool.runs import Reader

__all__ = ["MAX_REMEMBERED_MESSAGES", "Lease", "Lifecycle"]

MAX_REMEMBERED_MESSAGES = 8192
"""Message ids kept to recognise duplicates. A harness retries within seconds, so thousands of newer events may pass meanwhile."""


class Lease(Reader):
    """One workflow within one session. After its end a new request with the same ids gets a new lease (a new generation)."""

    __slots__ = ("num_requests", "registry", "session_id")

    def __init__(self, workflow_id: str, session_id: str | None, registry: "Lifecycle") -> None:
        super().__init__(workflow_id)
        self.session_id = session_id
        self.num_requests = 0
        self.registry = registry

    def on_last_run_gone(self) -> None:
        """Forget the lease once nothing refers to it."""
        self.registry.forget_if_idle(self)


class Lifecycle:
    """The registry of live leases.

    Args:
        end_lease: retires what only this lease could read; returns the blocks retired in all tiers.
        block_bytes: bytes of one block over all layers and ranks, for the outcomes.

    """

    def __init__(self, end_lease: Callable[[Lease], int], block_bytes: int) -> None:
        self._end_lease = end_lease
        self._block_bytes = block_bytes
        self._leases: dict[tuple[str, str | None], Lease] = {}
        self._by_session: dict[str, set[Lease]] = {}
        self._by_workflow: dict[str, set[Lease]] = {}
        self._messages: OrderedDict[str, Outcome] = OrderedDict()

    def __len__(self) -> int:
        """Live leases."""
        return len(self._leases)

    # ------------------------------------------------------------------ requests

    def start_request(self, session_id: str | None, metadata: RequestMetadata) -> Lease | None:
        """A request arrives: its lease, opened if need be; None if it names neither session nor workflow. O(1)."""
        workflow_id = metadata.workflow_id or session_id
        if workflow_id is None:
            return None
        key = (workflow_id, session_id)
        lease = self._leases.get(key)
        if lease is None:
            lease = self._leases[key] = Lease(workflow_id, session_id, self)
            self._by_workflow.setdefault(workflow_id, set()).add(lease)
            if session_id is not None:
                self._by_session.setdefault(session_id, set()).add(lease)
        lease.num_requests += 1
        return lease

    def finish_request(self, lease: Lease) -> None:
        """A request of `lease` is over, however it ended."""
        lease.num_requests -= 1
        self.forget_if_idle(lease)

    def forget_if_idle(self, lease: Lease) -> None:
        """Drop a lease that holds no run and no request; the next request of its ids opens a new one."""
        if lease.num_requests == 0 and not lease.runs:
            self._remove(lease)

    # ------------------------------------------------------------------ boundaries

    def apply(self, event: Boundary) -> Outcome:
        """Act on one event, once per `message_id`. Never raises; an event about something unknown changes nothing."""
        known = self._messages.get(event.message_id)
        if known is not None:
            return Outcome(
                message_id=event.message_id,
                status=OutcomeStatus.DUPLICATE,
                reason=f"already {known.status.value}",
            )
        outcome = self._act(event)
        self._messages[event.message_id] = outcome
        if len(self._messages) > MAX_REMEMBERED_MESSAGES:
            self._messages.popitem(last=False)
        return outcome

    def _act(self, event: Boundary) -> Outcome:
        if event.kind is BoundaryKind.SESSION_END:
            leases = self._by_session.get(event.session_id or "", set())
            subject = f"session {event.session_id!r}"
        elif event.kind is BoundaryKind.WORKFLOW_END:
            leases = self._by_workflow.get(event.workflow, set())
            subject = f"workflow {event.workflow!r}"
        else:
            return Outcome(
                message_id=event.message_id,
                status=OutcomeStatus.IGNORED,
                reason=f"{event.kind.value} frees nothing yet: only workflow_end and session_end do",
            )
        if not leases:
            return Outcome(
                message_id=event.message_id,
                status=OutcomeStatus.IGNORED,
                reason=f"{subject} holds nothing here",
            )
        blocks = 0
        for lease in list(leases):
            self._remove(lease)
            blocks += self._end_lease(lease)
        return Outcome(
            message_id=event.message_id,
            status=OutcomeStatus.ACCEPTED,
            blocks=blocks,
            bytes=blocks * self._block_bytes,
        )

    def _remove(self, lease: Lease) -> None:
        key = (lease.workflow_id, lease.session_id)
        if self._leases.get(key) is not lease:
            return  # ended before; a later generation may stand in its place
        del self._leases[key]
        _discard(self._by_workflow, lease.workflow_id, lease)
        if lease.session_id is not None:
            _discard(self._by_session, lease.session_id, lease)


def _discard(index: dict[str, set[Lease]], key: str, lease: Lease) -> None:
    leases = index[key]
    leases.discard(lease)
    if not leases:
        del index[key]
