# SPDX-License-Identifier: Apache-2.0
"""The ranks of active runs, by what is known of the workflows that read them (PBKV Eq. 2, section 4.2.3).

    rank(run) = (1, score, -expected next use)

where `score` adds up over the workflows that read the run, and within one over the set of agents that do: two segments of one
agent count once. Retired runs keep their rank, (0, ...), whatever the score: a score of zero is an estimate, an end is not. A run
that the harness wants out of the way stays where it is until it is read, and one that is kept by wish has at least the wish's
rank.

Runs that the same agents of the same workflows read form one **audience**, a group of the pool that is re-ranked as one: an
invocation costs as much as the workflow has audiences, not as much as it has runs.

What nobody has a score for, above all the blocks of requests without metadata, stands in the bucket `ACTIVE_RANK`, in order of
recency. As ranks go that is below everything that has a score, and traffic that says nothing of itself would lose its cache to
traffic that does. So `lifetime` **guards** it: as long as plain LRU over *all* requests would keep the first block of that bucket
(`shadow.py` knows), the bucket goes last; else first. What is unnamed is thus kept as long as stock vLLM would keep it, whatever
scores say, and those who name themselves share by score what LRU would have left them, and what was retired. This is the
allocation that Cao, Felten and Li ask of caches whose users choose their own victims ("Implementation and Performance of
Application-Controlled File Caching", OSDI 1994): who chooses nothing must not be worse off. No value of reuse is learned and
compared for it: scores count three invocations ahead, and a session that was left without a word looks alive. Runs that somebody
unnamed reads as well have no score, so that LRU keeps them, too; what is behind them and has one may outlive them for nothing.

Scheduler thread, or the simulator's. No IO, no locks.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from vllm_lifetime.policy.audience import Audience, AudienceKey, WorkflowState
from vllm_lifetime.policy.eviction import EvictionPolicy, ScoreKind
from vllm_lifetime.policy.inheritance import Inheritance
from vllm_lifetime.policy.retention import Retention
from vllm_lifetime.policy.scoring import workflow_score
from vllm_lifetime.policy.shadow import ShadowLru, sample_stride
from vllm_lifetime.pool.access import HBM_TIER, AccessTable
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import ACTIVE_RANK, DEMOTED_RANK, Rank, Reader, Run

__all__ = ["Ranking"]

LAST_RANK: Rank = (1, math.inf, 0.0)
"""Rank of what is unnamed as long as LRU would keep it."""

LOOK_AT = 8
"""Among so many times the stride's blocks one of the sample is looked for: it is missed once in 3,000 looks, then all stays."""

Hash = TypeVar("Hash", bound=bytes)


class Ranking:
    """See the module. `access`, `policy` and `inheritance` are the `Scorer`'s; `orders_by_time`: whether the times are known."""

    def __init__(
        self,
        access: AccessTable | Callable[[Run, Rank], None],
        policy: EvictionPolicy,
        inheritance: Inheritance,
        *,
        orders_by_time: bool,
    ) -> None:
        self._access: AccessTable | None = None
        self._set_rank: Callable[[Run, Rank], None] | None = None
        if isinstance(access, AccessTable):
            self._access = access
            access.on_access_change = self._note_access
        else:
            self._set_rank = access
        self._policy = policy
        self._inheritance = inheritance
        self._adds_up = policy.scores is ScoreKind.LOOKAHEAD
        self._orders_by_time = orders_by_time
        self._by_reader: dict[Reader, tuple[WorkflowState, frozenset[str]]] = {}
        self._audiences: dict[AudienceKey, Audience] = {}
        self._changed: dict[Run, None] = {}
        """Runs whose readers have changed since they were ranked."""
        self._guards_unnamed = self._access is not None and policy.guards_unnamed
        self._shadows: list[tuple[ShadowLru, TierFreeList[Any]]] = []
        """Each tier that has blocks, and what LRU would hold in it and those above; none before somebody was unnamed."""
        self._stride = 1
        self.num_updates = 0
        """Runs re-ranked, alone or with their audience."""

    # ------------------------------------------------------------------ requests without metadata

    def start_unnamed(self) -> None:
        """A request without metadata is about to use blocks. O(1)."""
        if not self._guards_unnamed or self._shadows:
            return
        assert self._access is not None
        free_lists = self._access.free_lists
        self._stride = sample_stride(len(free_lists[HBM_TIER].run_of))
        num_blocks = 0
        for free_list in free_lists:
            if free_list.run_of:
                # What falls out of the tiers above is kept in this one.
                num_blocks += len(free_list.run_of)
                self._shadows.append((ShadowLru(num_blocks, self._stride), free_list))

    @property
    def follows_use(self) -> bool:
        """Whether somebody was unnamed, so that it matters what LRU would hold."""
        return bool(self._shadows)

    def sample(self, hashes: Sequence[Hash]) -> Sequence[Hash]:
        """Of the hashes of a prompt's blocks, from its first one on, those that `use` wants. None before somebody is unnamed.

        By content, so that a block is in the sample in whatever prompt and place it is read. O(blocks).
        """
        stride = self._stride
        if not self.follows_use:
            return ()
        return hashes if stride == 1 else [key for key in hashes if key[0] % stride == 0]

    def use(self, keys: Sequence[bytes]) -> None:
        """A request, named or not, reads or gives back the blocks of which `keys` are the sample. O(1) per key."""
        for shadow, _ in self._shadows:
            shadow.use(keys)

    def rank_unnamed(self) -> None:
        """Once per step: whether what is unnamed goes first or last, in each tier. O(stride): a few microseconds."""
        for shadow, free_list in self._shadows:
            rank = LAST_RANK
            for block in itertools.islice(free_list.iter_common_blocks(), LOOK_AT * self._stride):
                key = block.block_hash
                if key is not None and key[0] % self._stride == 0:
                    # The first that is in the sample speaks for those before it.
                    rank = LAST_RANK if key in shadow else ACTIVE_RANK
                    break
                rank = free_list.common_rank
            if rank is not free_list.common_rank:
                free_list.set_common_rank(rank)

    # ------------------------------------------------------------------ looking

    def one_step_value(self, run: Run) -> float:
        """Value(c) (Eq. 1): the expected number of workflows whose next invocation reads `run`.

        O(workflows that read it), and O(1) for the next run of the same audience.
        """
        audience = run.group
        if not isinstance(audience, Audience):
            return self._next_value(self.access_of(run))
        value = audience.next_value
        if value is None:
            value = audience.next_value = self._next_value(audience.access)
        return value

    def rank_of(self, run: Run) -> Rank:
        """The rank that an active run has by what is known now, from scratch; for tests and tools. O(readers)."""
        access, floor = self._scored_access(run)
        audience = Audience(0, (frozenset(), None), access, floor)
        for workflow, agents in access.items():
            audience.set_term(workflow, self._term(workflow, agents))
        return self._rank_of(audience)

    # ------------------------------------------------------------------ ranks

    def _next_value(self, access: dict[WorkflowState, frozenset[str]]) -> float:
        value = 0.0
        for workflow, agents in access.items():
            if workflow.next_values:
                value += workflow_score(workflow.next_values, self._inheritance.access_set(agents))
        return value

    def access_of(self, run: Run) -> dict[WorkflowState, frozenset[str]]:
        """O_w(run) without inheritance, by workflow."""
        return self._look_at(run)[0]

    def _look_at(self, run: Run) -> tuple[dict[WorkflowState, frozenset[str]], Rank | None]:
        """O_w(run) without inheritance, by workflow; and the highest rank of those who keep it by wish, if somebody does.

        A wish of low priority does not lower what somebody reads of whom nothing is known.
        """
        access: dict[WorkflowState, frozenset[str]] = {}
        floor: Rank | None = None
        has_stranger = run.has_unknown_reader
        by_reader = self._by_reader
        for reader in run.readers:
            found = by_reader.get(reader)
            if found is not None:
                workflow, role = found
                roles = access.get(workflow)
                access[workflow] = role if roles is None else roles | role
            elif not isinstance(reader, Retention):
                has_stranger = True
            elif floor is None or floor < reader.rank:
                floor = reader.rank
        if floor is not None and has_stranger and floor < ACTIVE_RANK:
            floor = ACTIVE_RANK
        return access, floor

    def _scored_access(self, run: Run) -> tuple[dict[WorkflowState, frozenset[str]], Rank | None]:
        """As `_look_at`; but what somebody unnamed reads, too, has no score where that is to be as in LRU."""
        access, floor = self._look_at(run)
        return ({}, floor) if self._guards_unnamed and run.has_unknown_reader else (access, floor)

    def _term(self, workflow: WorkflowState, agents: frozenset[str]) -> float | None:
        """The workflow's part of the score of a run that `agents` have read; None if nothing is known."""
        values = workflow.values
        if values is None:
            return None
        if self._adds_up:
            return workflow.weight * workflow_score(values, self._inheritance.access_set(agents))
        if self._policy.scores is ScoreKind.STEPS_TO_EXECUTION:
            return max((values[agent] for agent in agents if agent in values), default=-math.inf)
        return workflow.weight

    def _rank_of(self, audience: Audience) -> Rank:
        terms = audience.terms
        floor = audience.floor
        if not terms:
            return ACTIVE_RANK if floor is None else floor
        score = audience.total if self._adds_up else max(terms.values())
        step = self._policy.score_step
        if step:
            score = round(score / step) * step
        rank = (1, score, -min(workflow.next_use_at for workflow in terms) if self._orders_by_time else 0.0)
        if floor is not None and floor > rank:
            return floor
        return ACTIVE_RANK if rank == ACTIVE_RANK else rank

    def register(self, workflow: WorkflowState, reader: Reader, role: str) -> None:
        """An agent of the role `role` of `workflow` reads as `reader` from now on. O(runs of the reader)."""
        if reader not in workflow.readers:
            workflow.readers[reader] = role
            self._by_reader[reader] = (workflow, frozenset((role,)))
            if self._access is not None:
                self._changed.update(dict.fromkeys(reader.runs))

    def forget(self, workflow: WorkflowState) -> None:
        """The workflow counts for nothing any more: what others read, too, is ranked without it. O(its runs)."""
        for reader in workflow.readers:
            self._by_reader.pop(reader, None)
        readers, workflow.readers = workflow.readers, {}
        if self._set_rank is not None:
            self._refresh_one_by_one(readers)
            return
        for audience in list(workflow.audiences):
            self._changed.update(dict.fromkeys(audience.runs))
            self._drop(audience)
        self.place_changed()

    def refresh(self, workflow: WorkflowState) -> None:
        """Re-rank what `workflow` reads: each of its audiences as one. O(log buckets) per audience."""
        dead = [reader for reader in workflow.readers if not reader.is_live]
        for reader in dead:
            del workflow.readers[reader]
            self._by_reader.pop(reader, None)
        if self._set_rank is not None:
            self._refresh_one_by_one(reader for reader in workflow.readers)
            return
        self.place_changed()
        for audience in list(workflow.audiences):
            if not audience.runs:
                self._drop(audience)
                continue
            audience.set_term(workflow, self._term(workflow, audience.access[workflow]))
            self._rank(audience)

    def _refresh_one_by_one(self, readers: Iterable[Reader]) -> None:
        """Re-rank what `readers` read, without groups. O(log runs) per run; runs with the same readers are looked at once."""
        ranks: dict[frozenset[Reader], Rank] = {}
        set_rank = self._set_rank
        assert set_rank is not None
        for reader in readers:
            for run in sorted(reader.runs, key=_by_start, reverse=True):
                if run.rank[0] == 0 or run.rank is DEMOTED_RANK:
                    continue
                key = frozenset(run.readers)
                rank = ranks.get(key)
                if rank is None:
                    rank = ranks[key] = self.rank_of(run)
                self.num_updates += 1
                set_rank(run, rank)

    def _rank(self, audience: Audience) -> None:
        assert self._access is not None
        self.num_updates += len(audience.runs)
        self._access.set_group_rank(audience, self._rank_of(audience))

    def _note_access(self, run: Run, reader: Reader | None) -> None:
        """`AccessTable.on_access_change`. O(1)."""
        group = run.group
        if reader is not None and isinstance(group, Audience):
            found = self._by_reader.get(reader)
            if found is not None:
                workflow, role = found
                roles = group.access.get(workflow)
                if roles is not None and role <= roles:
                    return
        self._changed[run] = None

    def place_changed(self) -> None:
        """Put the runs whose readers have changed into their audiences. O(readers) and O(log buckets) per run."""
        if not self._changed:
            return
        table = self._access
        assert table is not None
        changed, self._changed = self._changed, {}
        for run in changed:
            rank = run.rank
            if rank[0] == 0 or rank is DEMOTED_RANK or not any(run.num_blocks):
                continue
            self.num_updates += 1
            access, floor = self._scored_access(run)
            before = run.group
            audience = self._audience(access, floor) if access or floor is not None else None
            table.set_group(run, audience)
            if isinstance(before, Audience) and not before.runs:
                self._drop(before)

    def _audience(self, access: dict[WorkflowState, frozenset[str]], floor: Rank | None) -> Audience:
        """The audience of that access set, with its rank as it is now."""
        key = (frozenset(access.items()), floor)
        audience = self._audiences.get(key)
        if audience is None:
            assert self._access is not None
            audience = self._audiences[key] = Audience(self._access.num_tiers, key, access, floor)
            for workflow, agents in access.items():
                workflow.audiences[audience] = None
                audience.set_term(workflow, self._term(workflow, agents))
            self._access.set_group_rank(audience, self._rank_of(audience))
        return audience

    def _drop(self, audience: Audience) -> None:
        """Nobody reads what it stood for any more, or others do."""
        self._audiences.pop(audience.key, None)
        for workflow in audience.access:
            workflow.audiences.pop(audience, None)


def _by_start(run: Run) -> int:
    return run.start
