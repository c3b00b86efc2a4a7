# SPDX-License-Identifier: Apache-2.0
"""Keeps every active run's rank in step with what is known of its workflows (PBKV section 4.2).

Per workflow: the agents it has invoked, a forecast of the next ones, what that makes each agent's cache worth (`scoring.py`), and
since when it pauses. Whatever changes one of these changes the ranks of that workflow's runs and of no others (`ranking.py`).

**An invocation is one LLM request**, as in the paper; a workflow's history is the order in which its requests started, over
parallel sub-agents, too. A coding agent that calls a tool a hundred times is thus a hundred invocations of the same agent: what
is forecast is that it goes on, which is what its cache's worth depends on. That others come after it is then seen only by
predictors that look far back; what keeps *their* cache in such a time is that it is of an active workflow.

Scheduler thread, one per engine; the simulator has its own. No IO, no locks. Nothing that a predictor does can break serving: if
it raises or is slow it is left alone for a while, and workflows without a forecast are ordered by recency.
"""

import heapq
import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from vllm_lifetime.agents import Reading
from vllm_lifetime.policy.audience import Succession, WorkflowKey, WorkflowState
from vllm_lifetime.policy.backoff import Backoff
from vllm_lifetime.policy.call_graph import CallGraph
from vllm_lifetime.policy.eviction import EvictionPolicy, ScoreKind, TimeUse
from vllm_lifetime.policy.inheritance import Inheritance
from vllm_lifetime.policy.ranking import Ranking
from vllm_lifetime.policy.scoring import agent_values, one_step_values
from vllm_lifetime.pool.access import AccessTable
from vllm_lifetime.pool.runs import Rank, Reader, Run
from vllm_lifetime.prediction.forecast import END, Forecast, TransitionPredictor
from vllm_lifetime.prediction.next_use import NextUseModel, PauseState
from vllm_lifetime.prediction.time_to_live import TimeToLive
from vllm_lifetime.segments import Segment
from vllm_lifetime.traces.schema import DEFAULT_AGENT

__all__ = ["MAX_WORKFLOWS", "Scorer"]

MAX_WORKFLOWS = 8192
"""Workflows remembered; the one not heard of for longest is forgotten, and its runs are ordered by recency."""

MAX_UPDATES = 16
"""Workflows re-ranked per `advance`; the rest wait for the next call."""

SLOW_PREDICTION_S = 0.05
"""Processor seconds. A prediction that takes longer is a failure: the scheduler waits for it."""

MAX_LOOKED_AT = 16
"""Runs of an agent that are looked at to learn whether the next one reads them."""

MIN_CHANGE = 0.02
"""Estimates that have changed by less, relatively, change no rank."""


class Scorer:
    """See the module.

    Args:
        access: whose runs it ranks; it listens to its changes (`on_access_change`). Or how to set one run's rank, where there are
            no groups: then a workflow's runs are ranked one by one, and changes of their readers count from its next event on.
        policy: what orders active runs; one with `needs_scorer`.
        predictor: says who is called next; if it has `observe(history)`, it is told each invocation, and each end as `END`.
        next_use: says when; not needed if the policy uses no time.
        clock: seconds, as `now` everywhere here; for calls that do not say when.
        inheritance: which agents read what others have read; learned if not given.
        call_graph: for steps to execution; learned if not given.
        time_to_live: for `pins_ttl`.
        slow_prediction_s: processor time that a prediction may take; infinite where time is simulated.

    """

    def __init__(
        self,
        access: AccessTable | Callable[[Run, Rank], None],
        policy: EvictionPolicy,
        predictor: TransitionPredictor | None = None,
        next_use: NextUseModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        inheritance: Inheritance | None = None,
        call_graph: CallGraph | None = None,
        time_to_live: TimeToLive | None = None,
        slow_prediction_s: float = SLOW_PREDICTION_S,
    ) -> None:
        self.policy = policy
        self.predictor = predictor
        self.next_use = next_use
        self._clock = clock
        self.inheritance = Inheritance() if inheritance is None else inheritance
        self.call_graph = CallGraph() if call_graph is None else call_graph
        self.time_to_live = time_to_live
        self._slow_prediction_s = slow_prediction_s
        self.horizon_s = policy.time_horizon_s
        """`EvictionPolicy.time_horizon_s`, or what `set_horizon` was told last."""
        orders_by_time = policy.uses_time is TimeUse.ORDER and next_use is not None
        self.ranking = Ranking(access, policy, self.inheritance, orders_by_time=orders_by_time)
        """What it makes of all this; requests without metadata are told to it alone."""
        self._adds_up = policy.scores is ScoreKind.LOOKAHEAD
        self._discounts = policy.uses_time is TimeUse.DISCOUNT
        self._workflows: OrderedDict[WorkflowKey, WorkflowState] = OrderedDict()
        self._due: list[tuple[float, int, WorkflowState]] = []
        self._order = itertools.count()
        self._backoff = Backoff()
        self.num_predictions = 0
        """Forecasts made."""
        self.num_prediction_failures = 0
        """Predictions that raised, or took longer than `slow_prediction_s`."""

    @property
    def num_updates(self) -> int:
        """Runs re-ranked, alone or with their audience."""
        return self.ranking.num_updates

    def __len__(self) -> int:
        """Workflows known."""
        return len(self._workflows)

    # ------------------------------------------------------------------ events

    def start_request(
        self,
        who: Reading | Reader,
        now: float | None = None,
        *,
        agent: str | None = None,
        hidden_state: NDArray[np.float32] | None = None,
    ) -> None:
        """An invocation: the workflow's history grows, and its forecast and its runs' ranks with it.

        `agent` is the role where `who` does not say it. O(log buckets) per audience of the workflow, and one prediction.
        """
        now = self._clock() if now is None else now
        key, role, readers = _resolve(who, agent)
        workflow = self._workflows.get(key)
        if workflow is None:
            workflow = self._new_workflow(key, now)
        self._workflows.move_to_end(key)
        if workflow.num_running == 0 and workflow.pause is not None:
            self._observe_gap(workflow, now)
        if workflow.history:
            self._note_succession(workflow, workflow.history[-1], role)
        workflow.history.append(role)
        self._observe_invocation(workflow.history)
        workflow.num_running += 1
        workflow.pause = None
        workflow.due_at = math.inf
        for reader in readers:
            self.ranking.register(workflow, reader, role)
        self._forecast(workflow, hidden_state, now)
        self._update_time(workflow, now)
        self.ranking.refresh(workflow)

    def observe_hidden_state(self, who: Reading | Reader, hidden_state: NDArray[np.float32], now: float | None = None) -> None:
        """The prompt of a running request has been computed: its last hidden state makes a better forecast."""
        workflow = self._workflows.get(_resolve(who, None)[0])
        if workflow is not None and workflow.num_running:
            self._forecast(workflow, hidden_state, self._clock() if now is None else now)
            self.ranking.refresh(workflow)

    def finish_request(
        self,
        who: Reading | Reader,
        now: float | None = None,
        finish_reason: str | None = None,
        tool: str | None = None,
        *,
        agent: str | None = None,
    ) -> None:
        """A request is over, however it ended; call it before its blocks are freed. The workflow pauses if it was its last one.

        What it has read and written gets its rank here. A request of an ended workflow changes nothing.
        """
        now = self._clock() if now is None else now
        key, role, readers = _resolve(who, agent)
        workflow = self._workflows.get(key)
        if workflow is None or not workflow.num_running or workflow.readers.keys().isdisjoint(readers):
            return
        self._learn_inheritance(workflow, role)
        workflow.num_running -= 1
        if workflow.num_running == 0:
            turn_is_over = who.agent.turn_is_over if isinstance(who, Reading | Segment) else None
            workflow.pause = PauseState(role, finish_reason, tool, turn_is_over)
            workflow.paused_at = now
            workflow.tool = tool
            is_tool_call = tool is not None or finish_reason == "tool_calls"
            if self.policy.pins_ttl and self.time_to_live is not None and is_tool_call:
                workflow.pinned_until = now + self.time_to_live.time_to_live_s(tool)
        self._update_time(workflow, now)
        self.ranking.refresh(workflow)

    def end_turn(self, who: Reading | Reader, now: float | None = None) -> None:
        """A turn of the agent is over: what the workflow waits for now is its user."""
        now = self._clock() if now is None else now
        workflow = self._workflows.get(_resolve(who, None)[0])
        if workflow is None or workflow.pause is None or workflow.pause.turn_is_over:
            return
        pause = workflow.pause
        if self.next_use is not None:
            self.next_use.observe_waiting(pause, max(0.0, now - workflow.paused_at))
        workflow.pause = PauseState(pause.agent, pause.finish_reason, pause.tool, True)
        self._update_time(workflow, now)
        self.ranking.refresh(workflow)

    def end_workflow(self, workflow_id: str, session: object = None, now: float | None = None) -> None:
        """The workflow is over, before or after its segments are closed: it counts for no run any more.

        `session` is `Session.key` of the lifecycle, where segments have one. Unknown workflows are ignored.
        """
        workflow = self._workflows.get((session, workflow_id))
        if workflow is None:
            return
        now = self._clock() if now is None else now
        if workflow.pause is not None and self.next_use is not None:
            self.next_use.observe_end(workflow.pause, max(0.0, now - workflow.paused_at))
        self._observe_invocation([*workflow.history, END])
        self._forget(workflow)

    def advance(self, now: float | None = None) -> None:
        """Once per step, before blocks are allocated: rank runs whose readers have changed, workflows whose waiting has moved
        their estimate, at most `MAX_UPDATES` of those that are due, and what is unnamed. O(1) if there are none."""
        now = self._clock() if now is None else now
        self.ranking.place_changed()
        due = self._due
        num_left = MAX_UPDATES
        while due and due[0][0] <= now and num_left:
            due_at, _, workflow = heapq.heappop(due)
            if workflow.due_at != due_at or self._workflows.get(workflow.key) is not workflow:
                continue
            num_left -= 1
            workflow.due_at = math.inf
            if self._update_time(workflow, now):
                self.ranking.refresh(workflow)
        self.ranking.rank_unnamed()

    def set_horizon(self, horizon_s: float, now: float) -> None:
        """Discount by `horizon_s` from now on (`Turnover`): waiting workflows are due to be ranked anew. O(workflows)."""
        self.horizon_s = horizon_s
        waiting = [workflow for workflow in self._workflows.values() if workflow.pause is not None]
        for workflow in waiting:
            workflow.due_at = now
        # One heap for all: a push for each would rebuild it many times.
        others = [entry for entry in self._due if entry[2].due_at == entry[0] and entry[2].readers]
        self._due = [(now, next(self._order), workflow) for workflow in waiting] + others
        heapq.heapify(self._due)

    # ------------------------------------------------------------------ looking

    def one_step_value(self, run: Run) -> float:
        """Value(c) (Eq. 1): the expected number of workflows whose next invocation reads `run`. As `Ranking.one_step_value`."""
        return self.ranking.one_step_value(run)

    def rank_of(self, run: Run) -> Rank:
        """The rank that an active run has by what is known now, from scratch; for tests and tools. O(readers)."""
        return self.ranking.rank_of(run)

    # ------------------------------------------------------------------ what is known of a workflow

    def _forecast(self, workflow: WorkflowState, hidden_state: NDArray[np.float32] | None, now: float) -> None:
        kind = self.policy.scores
        if kind is ScoreKind.STEPS_TO_EXECUTION:
            steps = self.call_graph.steps_from(workflow.history[-1])
            workflow.values = {agent: -float(count) for agent, count in steps.items()}
        elif kind is ScoreKind.NONE and not self.policy.prefetches:
            workflow.values = {}
        else:
            forecast = self._predict(workflow, hidden_state, now)
            if forecast is None:
                workflow.values, workflow.next_values = None, {}
            else:
                workflow.values = agent_values(forecast, self.policy.gamma, self.policy.horizon)
                workflow.next_values = one_step_values(forecast)

    def _predict(self, workflow: WorkflowState, hidden_state: NDArray[np.float32] | None, now: float) -> Forecast | None:
        """A forecast, or None if there is no predictor, or it has failed."""
        if self.predictor is None or not self._backoff.may_try(now):
            return None
        start = time.thread_time()  # of the processor: that others run meanwhile is not the predictor's doing
        try:
            forecast = self.predictor.predict(tuple(workflow.history), hidden_state)
            is_sound = bool(np.isfinite(forecast.probabilities).all())
        except Exception:
            is_sound = False
        is_sound = is_sound and time.thread_time() - start <= self._slow_prediction_s
        self._backoff.note(is_sound, now)
        self.num_predictions += 1
        if not is_sound:
            self.num_prediction_failures += 1
            return None
        return forecast

    def _observe_invocation(self, history: Iterable[str]) -> None:
        observe = getattr(self.predictor, "observe", None)
        if observe is None:
            return
        try:
            observe(tuple(history))
        except Exception:
            self.num_prediction_failures += 1

    def _observe_gap(self, workflow: WorkflowState, now: float) -> None:
        gap_s = max(0.0, now - workflow.paused_at)
        if self.next_use is not None and workflow.pause is not None:
            workflow.pace.observe(workflow.pause, gap_s, self.next_use.median_s(workflow.pause))
            self.next_use.observe(workflow.pause, gap_s)
        if self.time_to_live is not None and workflow.pinned_until > -math.inf:
            self.time_to_live.observe(workflow.tool, gap_s)
        workflow.pinned_until = -math.inf

    def _update_time(self, workflow: WorkflowState, now: float) -> bool:
        """When the workflow is expected back, from how long it has waited. Returns whether that changes its runs' ranks."""
        policy = self.policy
        if policy.pins_ttl:
            old, workflow.weight = workflow.weight, float(now < workflow.pinned_until)
            if now < workflow.pinned_until:
                self._look_again(workflow, workflow.pinned_until)
            return old != workflow.weight
        if policy.uses_time is TimeUse.NONE or self.next_use is None:
            return False
        if workflow.pause is None:
            workflow.weight, workflow.next_use_at = 1.0, now
            return True
        waited_s = max(0.0, now - workflow.paused_at)
        self._look_again(workflow, workflow.paused_at + self.next_use.next_refresh_s(waited_s))
        pace = workflow.pace.of(workflow.pause)
        if self._discounts:
            weight = self.next_use.reuse_discount(workflow.pause, waited_s, self.horizon_s, pace)
            if abs(weight - workflow.weight) <= MIN_CHANGE * workflow.weight:
                return False
            workflow.weight = weight
            return True
        remaining_s = self.next_use.expected_remaining_s(workflow.pause, waited_s, pace)
        if abs(now + remaining_s - workflow.next_use_at) <= MIN_CHANGE * remaining_s:
            return False
        workflow.next_use_at = now + remaining_s
        return True

    def _look_again(self, workflow: WorkflowState, at: float) -> None:
        workflow.due_at = at
        heapq.heappush(self._due, (at, next(self._order), workflow))
        if len(self._due) > 4 * len(self._workflows) + 64:
            self._due = [entry for entry in self._due if entry[2].due_at == entry[0] and entry[2].readers]
            heapq.heapify(self._due)

    def _note_succession(self, workflow: WorkflowState, previous: str, role: str) -> None:
        """`role` is invoked right after `previous`. O(runs of `previous`), at most `MAX_LOOKED_AT`."""
        self.call_graph.observe(previous, role)
        workflow.succession = None
        if previous == role or workflow.num_running or not (self._adds_up and self.inheritance.learns):
            return
        only = frozenset((previous,))
        runs = (run for reader, agent in workflow.readers.items() if agent == previous for run in reader.runs)
        some = itertools.islice(runs, MAX_LOOKED_AT)
        only_givers = [(run, run.start, run.end) for run in some if self.ranking.access_of(run).get(workflow) == only]
        if only_givers:
            workflow.succession = Succession(previous, role, only_givers)

    def _learn_inheritance(self, workflow: WorkflowState, role: str) -> None:
        """Whether the request that is over has read what until then only the agent before it had read."""
        succession, workflow.succession = workflow.succession, None
        if succession is None or succession.heir != role:
            return
        num_read = num_blocks = 0
        for run, start, end in succession.only_givers:
            num_blocks += end - start
            # A run that it read to the middle has been split there, and is now what it did not read.
            num_read += (end if role in self.ranking.access_of(run).get(workflow, ()) else min(run.start, end)) - start
        self.inheritance.observe(succession.giver, role, num_read / num_blocks)

    # ------------------------------------------------------------------ registry

    def _new_workflow(self, key: WorkflowKey, now: float) -> WorkflowState:
        workflow = self._workflows[key] = WorkflowState(key, now)
        while len(self._workflows) > MAX_WORKFLOWS:
            self._forget(next(iter(self._workflows.values())))
        return workflow

    def _forget(self, workflow: WorkflowState) -> None:
        del self._workflows[workflow.key]
        self.ranking.forget(workflow)


def _resolve(who: Reading | Reader, agent: str | None) -> tuple[WorkflowKey, str, tuple[Reader, ...]]:
    """Of which workflow, in which role, and as which readers somebody reads."""
    readers: tuple[Reader, ...]
    if isinstance(who, Reading):
        readers = (who.prompt,) if who.output is who.prompt else (who.prompt, who.output)
        segment = who.prompt
    else:
        readers = (who,)
        if not isinstance(who, Segment):
            return (None, who.workflow_id), _role(agent), readers
        segment = who
    lease = segment.agent.lease
    return (lease.session.key, segment.workflow_id), _role(agent or segment.agent.role), readers


def _role(name: str | None) -> str:
    return DEFAULT_AGENT if name is None or name == END else name
