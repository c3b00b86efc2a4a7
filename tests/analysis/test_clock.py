# SPDX-License-Identifier: Apache-2.0
"""Sessions on the reference clock of Eq. 1."""

import numpy as np
import pytest

from tests.analysis.analysis_testing import ask, delegating, stripping
from vllm_lifetime.analysis.clock import Delays, Times, reference_times, trace_times
from vllm_lifetime.analysis.structure import Opens, read_structure
from vllm_lifetime.traces.schema import TraceSession


def times_of(session: TraceSession, delays: Delays | None = None) -> Times:
    return reference_times(read_structure(session), delays or Delays(), np.random.default_rng(0))


def test_tokens_observations_and_pauses_are_charged_as_eq_1_says() -> None:
    times = times_of(stripping())
    # 5 tokens; then 5 s of tool, 1 s for the observation, 4 tokens; then 100 s of user, no prefill, 2 tokens.
    assert times.starts_s.tolist() == pytest.approx([0.0, 6.0, 107.8])
    assert times.ends_s.tolist() == pytest.approx([1.0, 7.8, 108.2])
    assert times.session_end_s == pytest.approx(108.2)


def test_a_long_pause_is_cut_and_the_traces_own_clock_is_not() -> None:
    assert times_of(stripping(), Delays(idle_cap_s=30.0)).starts_s[2] == pytest.approx(37.8)
    assert trace_times(stripping()).starts_s.tolist() == [0.0, 6.0, 107.0]


def test_sub_agents_that_run_side_by_side_take_the_longer_ones_time() -> None:
    def sub(name: str, out: int) -> object:
        return ask([1], out, 0, agent="w", agent_id=name, parent_agent_id="main")

    session = TraceSession("s", (ask([0], 5, -1), sub("a", 10), sub("b", 20), ask([0, 2], 5, 2)))  # type: ignore[arg-type]
    # The lead's second request waits for b: 1 s, 4 s, then its own 1 s of prefill and 1 s.
    assert times_of(session).ends_s.tolist() == pytest.approx([1.0, 3.0, 5.0, 7.0])


def test_modelled_delays_come_from_the_seed_and_not_from_the_trace() -> None:
    drawn = times_of(stripping(), Delays(modelled=True))
    assert drawn.starts_s.tolist() == times_of(stripping(), Delays(modelled=True, idle_cap_s=1.0)).starts_s.tolist()
    tool_s, user_s = drawn.starts_s[1] - drawn.ends_s[0], drawn.starts_s[2] - drawn.ends_s[1]
    rng = np.random.default_rng(0)
    assert (tool_s, user_s) == pytest.approx((rng.exponential(0.69), rng.lognormal(np.log(120.0), 1.0)))


def test_a_modelled_sub_agent_starts_and_returns_at_once() -> None:
    times = times_of(delegating(), Delays(modelled=True))
    assert (times.starts_s[1], times.starts_s[3]) == (times.ends_s[0], times.ends_s[2])
    assert times.starts_s[2] > times.ends_s[1]  # its tool takes time


def test_what_a_request_answers() -> None:
    assert read_structure(stripping()).opens == [Opens.AGENT, Opens.OBSERVATION, Opens.MESSAGE]
    structure = read_structure(delegating())
    assert structure.opens == [Opens.AGENT, Opens.AGENT, Opens.OBSERVATION, Opens.OBSERVATION]
    assert [(agent.role, agent.is_root, agent.has_children) for agent in structure.agents] == [
        ("lead", True, True),
        ("Explore", False, False),
    ]
