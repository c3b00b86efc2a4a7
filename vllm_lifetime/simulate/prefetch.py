# SPDX-License-Identifier: Apache-2.0
"""Prefetch in replays: what an agent that is expected next has read comes up from host memory before it asks (PBKV section 4.3).

The rule is the server's: the same budget (`PrefetchBudget`, the aggressive variant of appendix E included), the same value (Eq. 1
by `Scorer.one_step_value`), greedily, from the front. `PrefetchPlanner` itself cannot be asked: it names blocks, in runs that
lie in several tiers, and a replay has neither, only how much of each prompt HBM and host memory hold. So the candidates here are
the latest prompts of the agents of each workflow, and not runs.

Host memory is as large as HBM, the paper's HICACHE_RATIO=1; whatever a request has read is written through to it, and it evicts
the least recently used. A decision is made when a request ends, and what it may copy is what the link carries in the time since
the last one. A hit counts, as in the paper, if the block is in HBM when the request starts.
"""

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.agents import Reading
from vllm_lifetime.policy.eviction import EvictionPolicy
from vllm_lifetime.policy.prefetch import PrefetchBudget, TransferRates
from vllm_lifetime.pool.runs import ACTIVE_RANK, Run
from vllm_lifetime.simulate.cache import RunCache
from vllm_lifetime.simulate.engine import Engine
from vllm_lifetime.simulate.schedule import Event
from vllm_lifetime.simulate.scored import Models, ScoredPolicy
from vllm_lifetime.traces.schema import TraceRequest, TraceSession

__all__ = ["DEFAULT_BANDWIDTH_BLOCKS_PER_S", "PrefetchingPolicy"]

DEFAULT_BANDWIDTH_BLOCKS_PER_S = 1000.0
"""20 GB/s (PBKV section 6.1) in blocks of 64 tokens of Qwen3-32B (16.8 MB), in the nine of ten steps that only decode."""


class _Candidate(Run):
    """The prompt that an agent has read last, as one run: it is not in the cache, it only has its readers.

    `unread_from`, `unread_to`: the blocks that were prefetched and that nobody has read yet.
    """

    __slots__ = ("path", "reading", "unread_from", "unread_to")

    def __init__(self, path: NDArray[np.int64], reading: Reading) -> None:
        super().__init__(0, len(path), 1)
        self.path = path
        self.reading = reading
        # Not by `add_reader`: the readers' own runs are those of the cache.
        self.readers = {reading.prompt, reading.output}
        self.unread_from = self.unread_to = 0


class PrefetchingPolicy(ScoredPolicy):
    """`ScoredPolicy` with a host tier below. `rho`: share of HBM that may be displaced; 0: conservative.

    A decision is O(agents of the running workflows), and O(runs of the prompt) for each that may come next.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        models: Models,
        bandwidth_blocks_per_s: float = DEFAULT_BANDWIDTH_BLOCKS_PER_S,
        rho: float = 0.0,
    ) -> None:
        super().__init__(policy, models)
        self._block_s = 1.0 / bandwidth_blocks_per_s
        self._rho = rho

    def begin(self, engine: Engine) -> None:
        super().begin(engine)
        self._cache = engine.cache
        self._host = RunCache(engine.cache.capacity_blocks)
        self._candidates: dict[int, dict[tuple[str, str | None], _Candidate]] = {}
        """By session, then agent."""
        self._copied_until_s = 0.0

    def finish_request(self, event: Event, request: TraceRequest, reading: Reading) -> None:
        # Before what this end tells is known: the copies were made while it ran.
        self._prefetch(event.at_s)
        super().finish_request(event, request, reading)
        agents = self._candidates.setdefault(event.session, {})
        agents[request.agent, request.agent_id] = _Candidate(request.blocks, reading)
        self._host.start(request.blocks, None)
        self._host.finish(request.blocks)

    def end_session(self, event: Event, session: TraceSession, reading: Reading) -> None:
        super().end_session(event, session, reading)
        self._candidates.pop(event.session, None)

    def _prefetch(self, now: float) -> None:
        rates = TransferRates()
        rates.observe_step(now - self._copied_until_s)
        self._copied_until_s = now
        cache = self._cache
        budget = PrefetchBudget.of(
            rates,
            num_empty=0,
            num_retired=cache.num_reclaimable(),
            num_reserved=0,
            capacity_blocks=cache.capacity_blocks,
            rho=self._rho,
            num_unread=self._num_unread() if self._rho else 0,
        )
        if budget.is_spent:
            return
        left = min(budget.blocks, int(budget.seconds / self._block_s))
        if self._rho:
            left = min(left, cache.capacity_blocks - cache.num_blocks + sum(run.num_free for run in cache.runs()))
        for candidate in self._ranked():
            if left <= 0:
                return
            num_cached = cache.count_hits(candidate.path)
            if num_cached < candidate.end:
                end = min(self._host.count_hits(candidate.path), num_cached + left)
                if end > num_cached:
                    self._fetch(candidate, num_cached, end)
                    left -= end - num_cached

    def _num_unread(self) -> int:
        """Blocks that were prefetched, that nobody has read, and that are still there."""
        return sum(
            max(0, min(candidate.unread_to, self._cache.count_hits(candidate.path)) - candidate.unread_from)
            for agents in self._candidates.values()
            for candidate in agents.values()
            if candidate.unread_to
        )

    def _ranked(self) -> list[_Candidate]:
        """What may be read next, the most likely first."""
        value_of = self._scorer.one_step_value
        valued = [(value_of(candidate), candidate) for agents in self._candidates.values() for candidate in agents.values()]
        ranked = [entry for entry in valued if entry[0] > 0.0]
        ranked.sort(key=lambda entry: -entry[0])
        return [candidate for _, candidate in ranked]

    def _fetch(self, candidate: _Candidate, start: int, end: int) -> None:
        """The blocks `[start, end)` come up; the ones before are there."""
        cache, reading = self._cache, candidate.reading
        path = candidate.path[:end]
        cache.start(path, reading.prompt, reading.output, reading.boundary_blocks)
        # In the server they have kept their rank in host memory.
        for reader in (reading.prompt, reading.output):
            for run in [run for run in reader.runs if run.rank == ACTIVE_RANK]:
                cache.set_rank(run, self._scorer.rank_of(run))
        cache.finish(path)
        if not candidate.unread_to:
            candidate.unread_from = start
        candidate.unread_to = end
