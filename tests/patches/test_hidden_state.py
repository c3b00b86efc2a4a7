# SPDX-License-Identifier: Apache-2.0
"""Row choice on runners that only keep books, of both kinds; the hidden state of a token says whose it is and where it stands."""

from __future__ import annotations

import random
import sys
import types
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_lifetime.patches import hidden_state

torch = pytest.importorskip("torch")


class Rows:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, list[float]]] = []
        self.attached: list[bool] = []
        self.refused: list[str] = []

    def on_attached(self, is_sender: bool) -> None:
        self.attached.append(is_sender)

    def on_refused(self, reason: str) -> None:
        self.refused.append(reason)

    def offer(self, request_ids: list[str], rows: Any) -> None:
        self.rows += zip(request_ids, rows.tolist(), strict=True)


class ExecuteModelState(NamedTuple):
    """As the V1 runner's."""

    hidden_states: Any
    sample_hidden_states: Any


@dataclass
class InputBatch:
    """As the V2 runner's."""

    num_reqs: int
    req_ids: list[str]
    idx_mapping_np: np.ndarray
    num_computed_prefill_tokens_np: np.ndarray
    query_start_loc_np: np.ndarray


@dataclass
class Req:
    """One request as its scheduler sees it."""

    name: str
    number: int
    prompt: int
    computed: int
    """Tokens whose KV is there; a prefix hit at first."""
    outputs: int = 0
    was_preempted: bool = False

    @property
    def prefill(self) -> int:
        return self.prompt + self.outputs


class Buffer:
    """As vLLM's `CpuGpuBuffer`."""

    def __init__(self, size: int) -> None:
        self.np = np.zeros(size, dtype=np.int32)


PAD = 7
"""Rows of a padded batch behind the real ones."""


def model_output(batch: list[tuple[Req, int]]) -> Any:
    """`[request number, position]` of every token of the step, then padding."""
    rows = [[req.number, req.computed + i] for req, count in batch for i in range(count)]
    return torch.tensor(rows + [[-1, -1]] * PAD, dtype=torch.float32)


def starts(batch: list[tuple[Req, int]]) -> list[int]:
    return [0, *np.cumsum([count for _, count in batch]).tolist()]


class FakeV1:
    """Keeps the books of the V1 runner: input_batch in batch order, computed tokens before the step."""

    is_pooling_model = False

    def __init__(self) -> None:
        self.parallel_config = types.SimpleNamespace(prefill_context_parallel_size=1)
        self.execute_model_state: ExecuteModelState | None = None
        self.query_start_loc = Buffer(65)
        self.input_batch = types.SimpleNamespace(
            num_reqs=0, req_ids=[], num_computed_tokens_cpu=np.zeros(64, np.int32), num_prompt_tokens=np.zeros(64, np.int32)
        )
        self.steps = 0

    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config

    def execute_model(self, batch: list[tuple[Req, int]]) -> None:
        self.steps += 1
        self.execute_model_state = None
        if not batch:
            return
        n, books = len(batch), self.input_batch
        books.num_reqs, books.req_ids = n, [req.name for req, _ in batch]
        books.num_computed_tokens_cpu[:n] = [req.computed for req, _ in batch]
        books.num_prompt_tokens[:n] = [req.prompt for req, _ in batch]
        self.query_start_loc.np[: n + 1] = starts(batch)
        self.query_start_loc.np[n + 1 :] = starts(batch)[-1]
        self.execute_model_state = ExecuteModelState(model_output(batch), None)

    step = property(lambda self: self.execute_model)


class FakeV2:
    """Keeps the books of the V2 runner: state by request slot, and a batch that maps to it."""

    is_pooling_model = False

    def __init__(self) -> None:
        self.parallel_config = types.SimpleNamespace(prefill_context_parallel_size=1)
        self.req_states = types.SimpleNamespace(prompt_len=Buffer(64))
        self.steps = 0

    def initialize_kv_cache(self, kv_cache_config: Any) -> None:
        self.kv_cache_config = kv_cache_config

    def sample(self, hidden_states: Any, input_batch: InputBatch, grammar_output: Any) -> str:
        self.steps += 1
        return "sampled"

    def step(self, batch: list[tuple[Req, int]]) -> None:
        if not batch:
            return
        slots = [63 - req.number for req, _ in batch]
        self.req_states.prompt_len.np[slots] = [req.prompt for req, _ in batch]
        books = InputBatch(
            len(batch),
            [req.name for req, _ in batch],
            np.array(slots),
            # vLLM caps it at the length of the prefill, prompt and outputs of a resumed request together.
            np.array([min(req.computed, req.prefill) for req, _ in batch], np.int32),
            np.array(starts(batch) + [starts(batch)[-1]] * 2),
        )
        assert self.sample(model_output(batch), books, None) == "sampled"


@pytest.fixture(autouse=True)
def runner_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both runners' modules, as if imported."""
    classes = {hidden_state._RUNNER_MODULES[0]: FakeV1, hidden_state._RUNNER_MODULES[1]: FakeV2}
    for name, fake in classes.items():
        module: Any = types.ModuleType(name)
        module.GPUModelRunner = fake
        module.ExecuteModelState, module.InputBatch = ExecuteModelState, InputBatch
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(hidden_state, "_is_first_of_last_stage", lambda: True)
    originals = {fake: fake.initialize_kv_cache for fake in (FakeV1, FakeV2)}
    yield
    hidden_state.disarm()
    for fake, original in originals.items():
        assert fake.initialize_kv_cache is original


both_runners = pytest.mark.parametrize("runner_class", [FakeV1, FakeV2])


def attach(runner: Any) -> Rows:
    """Attach as in a worker: the sink first, then the KV cache."""
    rows = Rows()
    hidden_state.attach_to_next_runner(rows)
    runner.initialize_kv_cache("config")
    assert runner.kv_cache_config == "config"
    return rows


@both_runners
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_requests=st.integers(1, 8), budget=st.integers(1, 40))
def test_each_prompt_gives_the_row_of_its_last_token(runner_class: Any, seed: int, num_requests: int, budget: int) -> None:
    """Chunks, prefix hits, drafts, preemption, another order in every step, steps without work."""
    rng = random.Random(seed)
    runner = runner_class()
    rows = attach(runner)
    requests = []
    for number in range(num_requests):
        prompt = rng.randint(1, 60)
        requests.append(Req(f"r{number}", number, prompt, computed=rng.choice([0, rng.randint(0, prompt - 1)])))
    ended: Counter[str] = Counter()
    for _ in range(60):
        for req in requests:
            if rng.random() < 0.05:
                req.computed, req.was_preempted = rng.choice([0, rng.randint(0, req.prefill - 1)]), True
        left, batch = budget, []
        for req in rng.sample(requests, rng.randint(0, len(requests))):
            wanted = req.prefill - req.computed
            if req.outputs and wanted == 1:
                wanted += rng.choice([0, 0, 3])  # drafts
            count = min(rng.randint(1, wanted), left)
            if count:
                batch.append((req, count))
                left -= count
        runner.step(batch)
        for req, count in batch:
            end = req.computed + count
            ended[req.name] += end == req.prompt
            accepted = rng.randint(0, max(0, end - req.prefill))
            if end >= req.prefill:
                end = req.prefill + accepted
                req.outputs += 1 + accepted
            req.computed = end
    by_name = {req.name: req for req in requests}
    for name, row in rows.rows:
        assert row == [by_name[name].number, by_name[name].prompt - 1]
    assert Counter(name for name, _ in rows.rows) == +ended
    for req in requests:
        if not req.was_preempted:
            assert ended[req.name] == (req.computed >= req.prompt)
    assert rows.refused == []


@both_runners
def test_the_row_is_a_copy(runner_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM writes the next step's states over this one's."""
    output = torch.tensor([[1.0, 2.0]])
    monkeypatch.setattr(sys.modules[__name__], "model_output", lambda batch: output)
    runner = runner_class()
    rows = attach(runner)
    kept = []
    rows.offer = lambda request_ids, tensor: kept.append(tensor)  # type: ignore[method-assign]
    runner.step([(Req("a", 0, 1, 0), 1)])
    output.fill_(9.0)
    assert kept[0].tolist() == [[1.0, 2.0]]


@both_runners
def test_only_the_next_runner_is_touched(runner_class: Any) -> None:
    """Those of engines that did not ask keep vLLM's own methods."""
    before, asked, after = runner_class(), runner_class(), runner_class()
    before.initialize_kv_cache("config")
    rows = attach(asked)
    after.initialize_kv_cache("config")
    for runner in (before, after):
        runner.step([(Req("a", 0, 1, 0), 1)])
        assert not {"sample", "execute_model"} & vars(runner).keys()
    assert rows.rows == []
    asked.step([(Req("b", 0, 1, 0), 1)])
    assert rows.rows == [("b", [0.0, 0.0])]
    assert rows.attached == [True]


@both_runners
def test_other_ranks_send_nothing(runner_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensor parallelism all have the same states; without the last stage there are none."""
    monkeypatch.setattr(hidden_state, "_is_first_of_last_stage", lambda: False)
    runner = runner_class()
    rows = attach(runner)
    runner.step([(Req("a", 0, 1, 0), 1)])
    assert (rows.attached, rows.refused, rows.rows) == ([False], [], [])


@both_runners
@pytest.mark.parametrize("change", ["pooling", "pcp", "seam"])
def test_what_cannot_work_is_refused(runner_class: Any, change: str) -> None:
    """In one sentence, and the runner works on."""
    runner = runner_class()
    if change == "pooling":
        runner.is_pooling_model = True
    elif change == "pcp":
        runner.parallel_config.prefill_context_parallel_size = 2
    elif runner_class is FakeV1:
        del runner.query_start_loc
    else:
        del runner.req_states.prompt_len
    rows = attach(runner)
    assert rows.attached == [] and len(rows.refused) == 1
    assert ("Supported versions: 0.31.x" in rows.refused[0]) == (change == "seam")
    assert not {"sample", "execute_model"} & vars(runner).keys()


@both_runners
def test_a_failure_turns_it_off_and_loses_no_step(runner_class: Any) -> None:
    """Once; the engine's tokens matter more."""
    runner = runner_class()
    rows = attach(runner)

    def fail(request_ids: list[str], tensor: Any) -> None:
        raise MemoryError("no pinned memory")

    rows.offer = fail  # type: ignore[method-assign]
    for _ in range(3):
        runner.step([(Req("a", 0, 1, 0), 1)])
    assert runner.steps == 3
    assert len(rows.refused) == 1 and "no pinned memory" in rows.refused[0]


def test_without_a_runner_the_sink_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another platform's runner, say."""
    for name in hidden_state._RUNNER_MODULES:
        monkeypatch.delitem(sys.modules, name)
    rows = Rows()
    hidden_state.attach_to_next_runner(rows)
    assert len(rows.refused) == 1 and "GPUModelRunner" in rows.refused[0]


def test_a_second_engine_in_the_process_asks_anew() -> None:
    """Asking twice before a runner comes leaves one question, and vLLM's method comes back."""
    first, runner = Rows(), FakeV1()
    hidden_state.attach_to_next_runner(first)
    second = attach(runner)
    assert first.attached == [] and second.attached == [True]
