# SPDX-License-Identifier: Apache-2.0
"""For how much of its life a lead waits."""

import numpy as np
import pytest

from tests.analysis.analysis_testing import ask, delegating, stripping
from vllm_lifetime.analysis.clock import Delays, reference_times
from vllm_lifetime.analysis.structure import read_structure
from vllm_lifetime.analysis.waiting import Waiting, lead_waiting
from vllm_lifetime.traces.schema import TraceSession


def waiting(session: TraceSession) -> list[Waiting]:
    structure = read_structure(session)
    return lead_waiting(structure, reference_times(structure, Delays(), np.random.default_rng(0)))


def test_a_lead_waits_while_its_sub_agent_works() -> None:
    (found,) = waiting(delegating())
    # The sub-agent is under way from 1.5 s to 7 s of 8.2 s.
    assert found == pytest.approx((8.2, 5.5, 0.0))


def test_what_the_lead_does_meanwhile_and_the_users_pauses_do_not_count() -> None:
    def sub(after: int) -> object:
        return ask([90], 100, after, agent="w", agent_id=f"w{after}", parent_agent_id="main")

    requests = (
        ask([0], 5, -1),  # 0 to 1 s
        sub(0),  # 1 to 21 s
        ask([0, 1], 5, 0, ends_turn=True),  # 1 to 3 s, beside it
        ask([0, 1, 2], 5, 2, 30.0),  # 33 to 34 s
    )
    (found,) = waiting(TraceSession("s", requests))  # type: ignore[arg-type]
    assert found == pytest.approx((34.0, 21 - 3, 33 - 21))


def test_without_sub_agents_nobody_waits() -> None:
    assert waiting(stripping()) == []
