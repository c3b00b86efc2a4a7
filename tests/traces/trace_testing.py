# SPDX-License-Identifier: Apache-2.0
"""Whether two traces are the same."""

import dataclasses

from vllm_lifetime.traces.schema import Trace, TraceRequest

__all__ = ["assert_same_traces"]


def assert_same_traces(one: Trace, other: Trace) -> None:
    """Compare two traces field by field; arrays do not compare as a whole."""
    assert (one.name, one.block_size_tokens) == (other.name, other.block_size_tokens)
    assert [_session(s) for s in one.sessions] == [_session(s) for s in other.sessions]


def _session(session: object) -> tuple[object, ...]:
    return tuple(
        tuple(_request(r) for r in value) if field == "requests" else value
        for field, value in ((f.name, getattr(session, f.name)) for f in dataclasses.fields(session))  # type: ignore[arg-type]
    )


def _request(request: TraceRequest) -> tuple[object, ...]:
    values = ((f.name, getattr(request, f.name)) for f in dataclasses.fields(request))
    return tuple(tuple(value.tolist()) if name == "blocks" else value for name, value in values)
