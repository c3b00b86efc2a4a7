# SPDX-License-Identifier: Apache-2.0
"""Small made-up workflows, in the manner of a coder with a retry loop."""

import random
from collections.abc import Callable

import pytest

from vllm_lifetime.traces.workflows import AgentWorkflow

Maker = Callable[..., list[AgentWorkflow]]


@pytest.fixture
def make_workflows() -> Maker:
    def make(number: int = 60, seed: int = 0, retry: float = 0.5) -> list[AgentWorkflow]:
        rng = random.Random(seed)
        workflows = []
        for i in range(number):
            path = ["planner", "coder", "tester"]
            while rng.random() < retry and len(path) < 30:
                path += ["analyzer", "coder", "tester"]
            workflows.append(AgentWorkflow(f"task {i // 2}", (*path, "writer")))
        return workflows

    return make
