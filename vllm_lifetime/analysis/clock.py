# SPDX-License-Identifier: Apache-2.0
"""Time on the reference clock of Lachesis Eq. 1, and on the trace's own.

Eq. 1 charges a segment 0.2 s per decoded token, 1 s per observation that is prefilled, the tools' latency and the user's
delay, all while it is live. Here a session is laid out on that clock as its requests waited for one another, and a segment's
lifetime is the time from its opening to its close. For requests that follow one another that is Eq. 1; of agents that run side
by side it counts the time once, where the sum would count every agent's.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.analysis.structure import Opens, SessionStructure
from vllm_lifetime.traces.schema import TraceSession

__all__ = ["TPOT_REF_S", "TTFT_REF_S", "Delays", "Times", "reference_times", "trace_times"]

TPOT_REF_S = 0.2
"""Reference time per output token (Lachesis 3.2)."""
TTFT_REF_S = 1.0
"""Reference time to first token, charged once per observation (Lachesis 3.2, appendix B)."""
USER_DELAY_MEDIAN_S, USER_DELAY_SIGMA = 120.0, 1.0
"""The paper's user delay is log-normal with this median (Lachesis 5.2); it does not give sigma, which is assumed."""
TOOL_LATENCY_MEAN_S = 0.69
"""The paper's tool latency in the temporal regime is exponential with this mean (Lachesis figure 4)."""


@dataclass(frozen=True, slots=True)
class Delays:
    """Where tool latency and user delay come from.

    `modelled`: drawn as the paper draws them, from `seed`. Otherwise the trace's pauses, at most `idle_cap_s` each.
    """

    modelled: bool = False
    idle_cap_s: float = 1800.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Times:
    """When each request of a session started and ended, in seconds from the session's start."""

    starts_s: NDArray[np.float64]
    ends_s: NDArray[np.float64]

    @property
    def session_end_s(self) -> float:
        """When its last request had ended."""
        return float(self.ends_s.max())


def reference_times(structure: SessionStructure, delays: Delays, rng: np.random.Generator) -> Times:
    """The session on the reference clock. O(requests)."""
    requests = structure.session.requests
    times = Times(np.zeros(len(requests)), np.zeros(len(requests)))
    previous: dict[int, int] = {
        index: agent.indices[place - 1] for agent in structure.agents for place, index in enumerate(agent.indices) if place
    }
    for index, request in enumerate(requests):
        opens = structure.opens[index]
        if not delays.modelled:
            pause_s = min(request.gap_s, delays.idle_cap_s)
        elif opens is Opens.MESSAGE:
            pause_s = float(rng.lognormal(np.log(USER_DELAY_MEDIAN_S), USER_DELAY_SIGMA))
        elif opens is Opens.OBSERVATION and request.after == previous[index]:
            pause_s = float(rng.exponential(TOOL_LATENCY_MEAN_S))
        else:
            # A sub-agent starts, and its parent goes on, at once.
            pause_s = 0.0
        times.starts_s[index] = (times.ends_s[request.after] if request.after >= 0 else 0.0) + pause_s
        prefill_s = TTFT_REF_S if opens is Opens.OBSERVATION else 0.0
        times.ends_s[index] = times.starts_s[index] + prefill_s + TPOT_REF_S * request.output_tokens
    return times


def trace_times(session: TraceSession) -> Times:
    """The session as the trace has it. O(requests)."""
    times = Times(np.zeros(len(session.requests)), np.zeros(len(session.requests)))
    for index, request in enumerate(session.requests):
        times.starts_s[index] = (times.ends_s[request.after] if request.after >= 0 else 0.0) + request.gap_s
        times.ends_s[index] = times.starts_s[index] + request.service_s
    return times
