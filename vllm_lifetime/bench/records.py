# SPDX-License-Identifier: Apache-2.0
"""What a run has measured so far. Every time is in seconds from the run's start, by the client's clock."""

from dataclasses import dataclass, field

__all__ = ["BoundaryRecord", "RequestRecord", "RunRecord", "SessionRecord"]


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it."""

    session_id: str
    index: int
    agent: str
    prompt_tokens: int
    """Sent."""
    due_s: float
    """When it was to be sent."""
    sent_s: float = 0.0
    chunk_s: list[float] = field(default_factory=list)
    """When each piece of the answer came."""
    ended_s: float | None = None
    """None: it was still running when the run ended."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    """Of the prompt, as the server's usage has it; None where it does not say."""
    has_usage: bool = False
    """Whether the answer said how many tokens it has."""
    token_ids: list[int] = field(default_factory=list)
    """What was generated; empty unless it was asked for."""
    error: str | None = None

    @property
    def is_done(self) -> bool:
        """Whether it was answered in full."""
        return self.ended_s is not None and self.error is None

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: from sending to the first piece of the answer."""
        return self.chunk_s[0] - self.sent_s if self.chunk_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first."""
        if self.output_tokens < 2 or len(self.chunk_s) < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: the pauses between pieces of the answer."""
        return [later - earlier for earlier, later in zip(self.chunk_s, self.chunk_s[1:], strict=False)]


@dataclass(slots=True)
class SessionRecord:
    """One session, which is one workflow: from its start to the end of its last request."""

    session_id: str
    began_s: float
    ended_s: float | None = None
    """None: it had not ended when the run did."""
    has_failed: bool = False

    @property
    def latency_s(self) -> float | None:
        """Workflow latency; None if it was not served in full."""
        return None if self.ended_s is None or self.has_failed else self.ended_s - self.began_s


@dataclass(frozen=True, slots=True)
class BoundaryRecord:
    """A boundary that was posted."""

    at_s: float
    kind: str
    session_id: str


@dataclass
class RunRecord:
    """All that has been measured."""

    requests: list[RequestRecord] = field(default_factory=list)
    """In the order in which they were sent."""
    sessions: list[SessionRecord] = field(default_factory=list)
    """In the order in which they began."""
    boundaries: list[BoundaryRecord] = field(default_factory=list)
    wall_s: float = 0.0
    stopped: str | None = None
    """Why the run ended before its sessions did; None: it did not."""
    num_ended: int = 0
    """Requests, failed ones too."""
    num_errors: int = 0
    """Requests that failed."""
    num_sessions_ended: int = 0
    prompt_tokens: int = 0
    """Of the requests that were answered in full; so are the cached ones."""
    cached_tokens: int = 0

    def end_request(self, request: RequestRecord) -> None:
        """Count a request that has ended."""
        self.num_ended += 1
        if request.error is not None:
            self.num_errors += 1
        else:
            self.prompt_tokens += request.prompt_tokens
            self.cached_tokens += request.cached_tokens or 0

    @property
    def hit_rate(self) -> float:
        """Cached share of the prompt tokens that were answered."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0
