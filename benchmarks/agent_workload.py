# SPDX-License-Identifier: Apache-2.0
"""A deterministic multi-agent workload, and an offline replay of it at block granularity.

The shape follows PBKV's code-generation workload (section 6.1): agents with a large system prompt
of their own, workflows that walk a transition table with retry loops until it says END, and a
history private to the workflow that every call extends. A call's prompt is

    system prompt of the agent + task + (output + observation) of every earlier call

so two agents share nothing, two workflows share an agent's system prompt exactly, and an agent
that is called again in the same workflow shares all that it saw before.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

END = "END"
FIRST_TOKEN = 16  # below are the special tokens of any tokenizer we use
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Agent:
    """A role: its prompt, what a call costs, and who is called next with which probability."""

    name: str
    system_tokens: int
    output_tokens: int
    observation_tokens: tuple[int, int]  # of the tool that runs after the call, [low, high]
    tool_time_s: tuple[float, float]  # how long that tool runs, [low, high]
    successors: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Lane:
    """Workflows of one kind: as many at a time as `concurrency` says, an ended one is replaced."""

    name: str
    workflows: int
    concurrency: int
    start: str  # the agent of the first call
    task_tokens: tuple[int, int]  # how long the task is that starts the history, [low, high]


TEAM = (
    Agent("helper", 256, 12, (32, 64), (0.02, 0.05), ((END, 0.8), ("helper", 0.2))),
    Agent("planner", 512, 12, (32, 96), (0.02, 0.05), (("coder", 1.0),)),
    Agent("coder", 512, 12, (48, 96), (0.05, 0.1), (("tester", 0.9), ("reviewer", 0.1))),
    Agent("tester", 384, 12, (96, 192), (0.8, 1.6), (("coder", 0.8), ("reviewer", 0.2))),
    Agent("reviewer", 512, 12, (32, 64), (0.05, 0.1), ((END, 0.65), ("coder", 0.35))),
)
#: Long workflows that resolve issues, beside short questions about one document each.
LANES = (
    Lane("issue", 16, 8, "planner", (500, 900)),
    Lane("question", 36, 3, "helper", (600, 1200)),
)


@dataclass(frozen=True)
class WorkloadConfig:
    """What a workload is drawn from; the same config gives the same workload anywhere."""

    seed: int = 0
    vocab_size: int = 1024
    block_size: int = 32
    max_calls: int = 20
    team: tuple[Agent, ...] = TEAM
    lanes: tuple[Lane, ...] = LANES

    def agent(self, name: str) -> Agent:
        """The agent called `name`."""
        return next(a for a in self.team if a.name == name)

    @property
    def concurrency(self) -> int:
        """How many workflows run at a time."""
        return sum(lane.concurrency for lane in self.lanes)


@dataclass(frozen=True)
class Call:
    """One request of a workflow, without its prompt (that depends on what was generated)."""

    index: int
    agent: str
    max_tokens: int
    observation: Tokens
    tool_time_s: float


@dataclass(frozen=True)
class Workflow:
    """One task: what is asked, and the calls that will be made for it."""

    workflow_id: str
    lane: str
    task: Tokens
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Workload:
    """Every agent's system prompt and every workflow, a lane's in the order they start."""

    config: WorkloadConfig
    system_prompts: dict[str, Tokens]
    workflows: tuple[Workflow, ...]

    @property
    def calls(self) -> int:
        """How many requests the whole workload makes."""
        return sum(len(w.calls) for w in self.workflows)

    def in_lane(self, name: str) -> list[Workflow]:
        """The workflows of one lane."""
        return [w for w in self.workflows if w.lane == name]

    def describe(self) -> dict[str, object]:
        """The workload in a form that JSON can carry."""
        config = asdict(self.config)
        prompts = [len(p) for w in self.workflows for p in prompts_of(self, w)]
        return {
            **config,
            "concurrency": self.config.concurrency,
            "workflows": len(self.workflows),
            "requests": self.calls,
            "prompt_tokens": sum(prompts),
            "longest_prompt": max(prompts),
            "generated_tokens": sum(c.max_tokens for w in self.workflows for c in w.calls),
        }


class Conversation:
    """A workflow's history while it runs."""

    def __init__(self, workload: Workload, workflow: Workflow) -> None:
        self._system_prompts = workload.system_prompts
        self._history = list(workflow.task)

    def prompt(self, call: Call) -> list[int]:
        """The prompt of `call`, given what was recorded so far."""
        return [*self._system_prompts[call.agent], *self._history]

    def record(self, call: Call, generated: Sequence[int]) -> None:
        """Append what the model generated and what the tool then returned."""
        self._history += generated
        self._history += call.observation


def generate(config: WorkloadConfig) -> Workload:
    """Draw the workload of `config`."""
    workflows: list[Workflow] = []
    for lane in config.lanes:
        shape = random.Random(f"{config.seed}/{lane.name}/shape")
        for index in range(lane.workflows):
            workflow_id = f"{lane.name}-{config.seed}-{index:04d}"
            words = random.Random(f"{config.seed}/{workflow_id}")
            # Tasks that start with different tokens share an agent's system prompt and no more.
            first = _word(config, len(workflows))
            task = (first, *_words(config, words, shape.randint(*lane.task_tokens) - 1))
            calls = tuple(_walk(config, lane.start, shape, words))
            workflows.append(Workflow(workflow_id, lane.name, task, calls))
    prompts = {
        agent.name: (
            _word(config, i),
            *_words(config, random.Random(f"{config.seed}/{agent.name}"), agent.system_tokens - 1),
        )
        for i, agent in enumerate(config.team)
    }
    return Workload(config, prompts, tuple(workflows))


def _walk(config: WorkloadConfig, start: str, shape: random.Random, words: random.Random) -> Iterator[Call]:
    name = start
    for index in range(config.max_calls):
        agent = config.agent(name)
        observation = _words(config, words, shape.randint(*agent.observation_tokens))
        tool_time_s = round(shape.uniform(*agent.tool_time_s), 3)
        yield Call(index, name, agent.output_tokens, observation, tool_time_s)
        names, weights = zip(*agent.successors, strict=True)
        name = shape.choices(names, weights)[0]
        if name == END:
            return


def _word(config: WorkloadConfig, index: int) -> int:
    return FIRST_TOKEN + index % (config.vocab_size - FIRST_TOKEN)


def _words(config: WorkloadConfig, rng: random.Random, count: int) -> Tokens:
    return tuple(rng.randrange(FIRST_TOKEN, config.vocab_size) for _ in range(count))


def stand_in_output(config: WorkloadConfig, workflow: Workflow, call: Call) -> Tokens:
    """Tokens in the place of what a model would generate, for offline use."""
    rng = random.Random(f"{workflow.workflow_id}/{call.index}/output")
    return _words(config, rng, call.max_tokens)


def prompts_of(workload: Workload, workflow: Workflow) -> Iterator[list[int]]:
    """Every prompt of `workflow`, with stand-in outputs."""
    conversation = Conversation(workload, workflow)
    for call in workflow.calls:
        yield conversation.prompt(call)
        conversation.record(call, stand_in_output(workload.config, workflow, call))


# -- offline replay ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """A rough engine: continuous batching, chunked prefill, and what a step costs."""

    blocks: int
    max_seqs: int = 4
    max_batched_tokens: int = 2048
    step_s: float = 0.010
    prefill_token_s: float = 1 / 3500
    decode_token_s: float = 0.0015


@dataclass
class ReplayResult:
    """What a policy achieved."""

    policy: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    wall_s: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    workflow_s: list[float] = field(default_factory=list)
    live_blocks_peak: int = 0

    @property
    def hit_rate(self) -> float:
        """Cached share of all prompt tokens."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def ttft_mean_s(self) -> float:
        """Mean time to first token."""
        return sum(self.ttft_s) / len(self.ttft_s)

    @property
    def workflow_mean_s(self) -> float:
        """Mean workflow latency."""
        return sum(self.workflow_s) / len(self.workflow_s)


Victim = Callable[["_Pool"], int]


def _lru(pool: _Pool) -> int:
    return next(iter(pool.free))


def _lifecycle(pool: _Pool) -> int:
    """Empty blocks, then retired ones with the fewest readers, then least recently freed."""
    best, fewest = _lru(pool), 1 << 30
    if best not in pool.key_of:
        return best  # empty blocks stand first
    for block in pool.free:
        readers = pool.readers[pool.key_of[block]]
        if len(readers) < fewest and readers.isdisjoint(pool.active):
            best, fewest = block, len(readers)
            if fewest == 1:
                break
    return best


def _lookahead(pool: _Pool) -> int:
    """As `_lifecycle`; but of live blocks the one that is least likely to be read soon, then least recently freed."""
    block = _lifecycle(pool)
    if block not in pool.key_of or pool.readers[pool.key_of[block]].isdisjoint(pool.active):
        return block
    # `min` takes the first of equals.
    return min(pool.free, key=lambda block: pool.score(pool.key_of[block]))


POLICIES: dict[str, Victim] = {"lru": _lru, "lifecycle": _lifecycle, "lookahead": _lookahead}
HORIZON, GAMMA = 3, 0.7


def lookahead_values(config: WorkloadConfig, agent: str) -> dict[str, float]:
    """What each agent's blocks are worth to a workflow that has just called `agent`: PBKV's equation 2, with the transition table
    for a forecast, so as good as a forecast can be.
    """
    values: dict[str, float] = {}
    reached = {agent: 1.0}
    for step in range(HORIZON):
        after: dict[str, float] = {}
        for name, chance in reached.items():
            for successor, weight in config.agent(name).successors:
                if successor != END:
                    after[successor] = after.get(successor, 0.0) + chance * weight
        for name, chance in after.items():
            values[name] = values.get(name, 0.0) + GAMMA**step * chance
        reached = after
    return values


class _Pool:
    """Blocks with prefix hashes, as vLLM keeps them."""

    def __init__(self, blocks: int, victim: Victim) -> None:
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.references = [0] * blocks
        self.block_of: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.readers: dict[int, set[str]] = {}
        self.agents: dict[int, set[tuple[str, str]]] = {}
        self.active: set[str] = set()
        self.values: dict[str, dict[str, float]] = {}
        self._victim = victim

    def score(self, key: int) -> float:
        """What the block of `key` is worth, over the live workflows whose agents have read it."""
        return sum(self.values[w].get(agent, 0.0) for w, agent in self.agents[key] if w in self.active)

    def hits(self, keys: Iterable[int]) -> list[int]:
        found = []
        for key in keys:
            if key not in self.block_of:
                break
            found.append(self.block_of[key])
        return found

    def touch(self, blocks: Iterable[int], reader: str, agent: str) -> None:
        for block in blocks:
            self.references[block] += 1
            self.free.pop(block, None)
            self.readers[self.key_of[block]].add(reader)
            self.agents[self.key_of[block]].add((reader, agent))

    def allocate(self) -> int:
        if not self.free:
            raise RuntimeError("the running requests alone need more blocks; raise --blocks")
        block = self._victim(self)
        del self.free[block]
        key = self.key_of.pop(block, None)
        if key is not None:
            del self.block_of[key], self.readers[key], self.agents[key]
        self.references[block] = 1
        return block

    def fill(self, block: int, key: int, reader: str, agent: str) -> None:
        if key not in self.block_of:  # else a duplicate, which vLLM leaves unhashed
            self.block_of[key], self.key_of[block], self.readers[key] = block, key, {reader}
            self.agents[key] = {(reader, agent)}
        else:
            self.readers[key].add(reader)
            self.agents[key].add((reader, agent))

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None
                if block not in self.key_of:
                    self.free.move_to_end(block, last=False)


@dataclass
class _Request:
    workflow: Workflow
    call: Call
    arrived_s: float
    keys: list[int]
    prompt_tokens: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    generated: int = 0


def _keys(tokens: Sequence[int], size: int) -> list[int]:
    keys: list[int] = []
    parent = 0
    for start in range(0, len(tokens) - size + 1, size):
        parent = hash((parent, *tokens[start : start + size]))
        keys.append(parent)
    return keys


def replay(workload: Workload, engine: Engine, policy: str) -> ReplayResult:
    """Run `workload` closed loop against a simulated engine that evicts by `policy`.

    `policy` is one of `POLICIES`, or ``unbounded`` for a cache that never evicts.
    """
    size = workload.config.block_size
    unbounded = policy == "unbounded"
    blocks = 10**5 if unbounded else engine.blocks - 1  # vLLM keeps one block for itself
    pool = _Pool(blocks, _lru if unbounded else POLICIES[policy])
    result = ReplayResult(policy)
    conversations = {w.workflow_id: Conversation(workload, w) for w in workload.workflows}
    started_s: dict[str, float] = {}
    pending = {lane.name: iter(workload.in_lane(lane.name)) for lane in workload.config.lanes}
    arrivals: list[tuple[float, int, Workflow, Call]] = []
    tie = iter(range(10**9))
    waiting: list[_Request] = []
    running: list[_Request] = []
    now = 0.0

    def start_next(lane: str) -> None:
        workflow = next(pending[lane], None)
        if workflow is not None:
            started_s[workflow.workflow_id] = now
            pool.active.add(workflow.workflow_id)
            heapq.heappush(arrivals, (now, next(tie), workflow, workflow.calls[0]))

    def finish(request: _Request) -> None:
        pool.release(request.blocks)
        workflow, call = request.workflow, request.call
        done = now + call.tool_time_s
        conversations[workflow.workflow_id].record(call, stand_in_output(workload.config, workflow, call))
        if call.index + 1 < len(workflow.calls):
            heapq.heappush(arrivals, (done, next(tie), workflow, workflow.calls[call.index + 1]))
        else:  # the last tool's time is not waited for
            pool.active.discard(workflow.workflow_id)
            result.workflow_s.append(now - started_s[workflow.workflow_id])
            start_next(workflow.lane)

    def compute(request: _Request, tokens: int) -> None:
        reader = request.workflow.workflow_id
        for _ in range(-(-(request.computed + tokens) // size) - len(request.blocks)):
            request.blocks.append(pool.allocate())
        for i in range(request.computed // size, (request.computed + tokens) // size):
            pool.fill(request.blocks[i], request.keys[i], reader, request.call.agent)
        request.computed += tokens

    for lane in workload.config.lanes:
        for _ in range(lane.concurrency):
            start_next(lane.name)
    while arrivals or waiting or running:
        if not waiting and not running:
            now = max(now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= now:
            at, _, workflow, call = heapq.heappop(arrivals)
            prompt = conversations[workflow.workflow_id].prompt(call)
            output = stand_in_output(workload.config, workflow, call)
            keys = _keys([*prompt, *output], size)
            waiting.append(_Request(workflow, call, at, keys, len(prompt)))
        budget, decoding, prefilled = engine.max_batched_tokens, 0, 0
        for request in running:
            left = request.prompt_tokens - request.computed
            tokens = max(1, min(left, budget))
            decoding += left <= 0
            prefilled += tokens if left > 0 else 0
            budget -= tokens
            compute(request, tokens)
        while waiting and budget > 0 and len(running) < engine.max_seqs:
            request = waiting.pop(0)
            # the last token is always computed, for its logits
            hit = pool.hits(request.keys[: (request.prompt_tokens - 1) // size])
            pool.values[request.workflow.workflow_id] = lookahead_values(workload.config, request.call.agent)
            pool.touch(hit, request.workflow.workflow_id, request.call.agent)
            request.blocks, request.computed = list(hit), len(hit) * size
            result.prompt_tokens += request.prompt_tokens
            result.cached_tokens += request.computed
            tokens = min(request.prompt_tokens - request.computed, budget)
            budget -= tokens
            prefilled += tokens
            running.append(request)
            compute(request, tokens)
        now += engine.step_s + prefilled * engine.prefill_token_s + decoding * engine.decode_token_s
        live = sum(1 for readers in pool.readers.values() if readers & pool.active)
        result.live_blocks_peak = max(result.live_blocks_peak, live)
        for request in list(running):
            if request.computed >= request.prompt_tokens:
                request.generated += 1
                if request.generated == 1:
                    result.ttft_s.append(now - request.arrived_s)
                if request.generated == request.call.max_tokens:
                    running.remove(request)
                    finish(request)
    result.wall_s = now
    return result
