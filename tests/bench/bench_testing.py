# SPDX-License-Identifier: Apache-2.0
"""Small traces, and a run on a scripted server."""

from typing import Any

import numpy as np
from scripted_server import ScriptedServer

from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.plan import make_plan
from vllm_lifetime.bench.run import Outcome, run_bench
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

__all__ = ["BLOCK", "chain", "make_request", "make_trace", "run_on"]

BLOCK = 4


def make_request(blocks: list[int], after: int = -1, **more: Any) -> TraceRequest:
    """A request of so many blocks and two tokens more that writes three tokens."""
    values: dict[str, Any] = {"gap_s": 0.0, "service_s": 1.0, "input_tokens": len(blocks) * BLOCK + 2, "output_tokens": 3}
    return TraceRequest(np.array(blocks, np.int64), after, **(values | more))


def chain(name: str, first: int, length: int = 3, **more: Any) -> TraceSession:
    """A session of requests that each add a block."""
    requests = tuple(make_request(list(range(first, first + n + 1)), n - 1) for n in range(length))
    return TraceSession(name, requests, **more)


def make_trace(*sessions: TraceSession) -> Trace:
    """A trace of `sessions`."""
    return Trace("made up", BLOCK, sessions)


def run_on(server: ScriptedServer, trace: Trace, pace: Pace | None = None, **more: Any) -> Outcome:
    """Replay a trace on a scripted server."""
    options: dict[str, Any] = {"model": None, "names_requests": True, "boundaries": "auto", "request_timeout_s": 10.0}
    outcome, was_interrupted = run_bench(make_plan(trace), server.url, pace or Pace(), **(options | more))
    assert not was_interrupted
    return outcome
