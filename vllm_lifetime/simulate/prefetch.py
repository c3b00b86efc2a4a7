# SPDX-License-Identifier: Apache-2.0
"""Prefetch in replays: what an agent that is expected next has read comes up from host memory before it asks (PBKV section 4.3).

Simpler than in the server (`policy/prefetch.py`), as there is no link and no step here. Host memory is as large as HBM, the
paper's HICACHE_RATIO=1; whatever a request has read is written through to it, and it evicts the least recently used. Between two
events, `bandwidth_blocks_per_s` x the time between them may be copied (S_bw), into space that holds nothing or what is retired
(S_a). Candidates are the latest prompts of each agent of each workflow that waits, by the probability that the agent is invoked
next (Eq. 1 for what only that workflow reads), greedily. The aggressive variant (appendix E) may displace `rho` of the capacity
more per copy, lowest rank first. A hit counts, as in the paper, if the block is in HBM when the request arrives.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.agents import Reading
from vllm_lifetime.policy.eviction import EvictionPolicy
from vllm_lifetime.policy.scoring import one_step_values
from vllm_lifetime.simulate.cache import RunCache
from vllm_lifetime.simulate.engine import Engine
from vllm_lifetime.simulate.schedule import Event
from vllm_lifetime.simulate.scored import Models, ScoredPolicy
from vllm_lifetime.traces.schema import TraceRequest, TraceSession

__all__ = ["DEFAULT_BANDWIDTH_BLOCKS_PER_S", "PrefetchingPolicy"]

DEFAULT_BANDWIDTH_BLOCKS_PER_S = 1000.0
"""20 GB/s (PBKV section 6.1) in blocks of 64 tokens of Qwen3-32B (16.8 MB), in the nine of ten steps that only decode."""


@dataclass(slots=True)
class _Workflow:
    """What a workflow's agents have read last, and who was invoked."""

    history: list[str] = field(default_factory=list)
    prompts: dict[str, tuple[NDArray[np.int64], Reading]] = field(default_factory=dict)
    num_running: int = 0


class PrefetchingPolicy(ScoredPolicy):
    """`ScoredPolicy` with a host tier below. `rho` 0: conservative."""

    def __init__(
        self,
        policy: EvictionPolicy,
        models: Models,
        bandwidth_blocks_per_s: float = DEFAULT_BANDWIDTH_BLOCKS_PER_S,
        rho: float = 0.0,
    ) -> None:
        super().__init__(policy, models)
        self._bandwidth = bandwidth_blocks_per_s
        self._rho = rho

    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        self._engine = engine
        self._host = RunCache(engine.cache.capacity_blocks)
        self._workflows: dict[int, _Workflow] = {}
        self._copied_until = 0.0

    def start_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        # Before the request is known: what comes up now came up while the engine waited for it.
        self._prefetch(event.at_s)
        super().start_request(event, request, reading)
        workflow = self._workflows.setdefault(event.session, _Workflow())
        workflow.history.append(request.agent)
        workflow.num_running += 1

    def finish_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        self._prefetch(event.at_s)
        super().finish_request(event, request, reading)
        workflow = self._workflows[event.session]
        workflow.num_running -= 1
        workflow.prompts[request.agent] = (request.blocks, reading)
        self._host.start(request.blocks, None)
        self._host.finish(request.blocks)

    def end_session(self, event: Event, session: TraceSession, reading: Reading) -> None:
        super().end_session(event, session, reading)
        del self._workflows[event.session]

    def _prefetch(self, now: float) -> None:
        elapsed_s, self._copied_until = now - self._copied_until, now
        cache = self._engine.cache
        time_budget = int(elapsed_s * self._bandwidth)
        budget = min(time_budget, cache.num_reclaimable() + int(self._rho * cache.capacity_blocks))
        if budget <= 0:
            return
        candidates: list[tuple[float, NDArray[np.int64], Reading]] = []
        for workflow in self._workflows.values():
            if workflow.num_running or not workflow.history:
                continue
            for agent, value in one_step_values(self.models.predictor.predict(workflow.history)).items():
                if agent in workflow.prompts:
                    candidates.append((value, *workflow.prompts[agent]))
        candidates.sort(key=lambda candidate: -candidate[0])
        for _, path, reading in candidates:
            cached = cache.count_hits(path)
            end = min(self._host.count_hits(path), cached + budget)
            if end <= cached or not reading.prompt.is_live:
                continue
            cache.start(path[:end], reading.prompt, reading.output, reading.boundary_blocks)
            cache.finish(path[:end])
            budget -= end - cached
            if not budget:
                return
