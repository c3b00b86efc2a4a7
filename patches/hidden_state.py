# SPDX-License-Identifier: Apache-2.0
"""Takes the post-norm hidden state of each prompt's last token from vLLM's model runner.

What: `attach_to_next_runner(sink)` waits for the model runner that gets its KV cache next, which is that of the worker whose
connector is being built. From then on `sink` gets one row for each prompt that ends in a step: the row that vLLM gives
`compute_logits` for the prompt's last token. An engine that does not ask is not touched.

Why: the semantic stream of PBKV (section 4.1, appendix B(iii)). vLLM has no hook for it: its `extract_hidden_states` stores all
tokens of chosen layers as if they were speculative decoding, and does not run on the CPU platform.

Which row: a prompt ends in the step in which the tokens computed reach its length exactly. That holds once for a prompt, in
whatever chunks it is computed and however much of it is cached (vLLM always computes the last token), and for no decoding
request: those are past it, also with drafts and with async scheduling. (A preempted request that is computed anew, with a chunk
that ends just there, gives the same row once more.) The step's own batch is read, in its order, once the model has been launched.

Why not by wrapping `compute_logits`: prompt logprobs, profiling and drafters call it too, and the V2 runner does not when it
shards the sampling over ranks. Seams (vLLM 0.31 to 0.33), methods replaced on the one runner, not on its class:

- V1 runner (`v1/worker/gpu_model_runner.py`, CPU too): `execute_model` leaves `execute_model_state.hidden_states`; `input_batch`
  and `query_start_loc` say whose rows they are. Run end to end on the CPU platform.
- V2 runner (`v1/worker/gpu/model_runner.py`): `sample(hidden_states, input_batch, grammar_output)`. Read, not run.
- `initialize_kv_cache` of either class, replaced until it is called once, right after the connector was built.

Only rank 0 of the last pipeline stage gives rows: with tensor parallelism every rank has the same. Pooling models and prefill
context parallelism are refused. Whatever is refused, or fails later, turns this off with one warning; the engine goes on.

Runs in the worker, on its main thread. Each step costs one comparison over the batch; nothing waits for the device.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from vllm_lifetime.patches.versions import UnsupportedVllmError, require

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["Sink", "attach_to_next_runner", "choose_rows", "disarm"]

_RUNNER_MODULES = ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner")
_V1_BATCH = ("num_reqs", "req_ids", "num_computed_tokens_cpu", "num_prompt_tokens")
_V2_BATCH = ("num_reqs", "req_ids", "idx_mapping_np", "num_computed_prefill_tokens_np", "query_start_loc_np")


class Sink(Protocol):
    """Who gets the rows."""

    def on_attached(self, is_sender: bool) -> None:
        """The runner is found; `is_sender` is False on a rank that another one speaks for."""
        ...

    def on_refused(self, reason: str) -> None:
        """There will be no rows (any more); `reason` is one sentence."""
        ...

    def offer(self, request_ids: list[str], rows: torch.Tensor) -> None:
        """`rows[i]` belongs to `request_ids[i]`: `[n, hidden size]` on the model's device, a copy, not yet computed perhaps."""
        ...


def choose_rows(num_computed: np.ndarray, starts: np.ndarray, num_prompt: np.ndarray) -> list[tuple[int, int]]:
    """Return `(position in the batch, row of its last token)` for the requests whose prompt ends in this step.

    `num_computed` and `num_prompt`, `[n]`: tokens computed before the step, and in the prompt. `starts`, `[n + 1]`: where each
    request's tokens begin in the step's batch. O(n).
    """
    is_last = num_computed + (starts[1:] - starts[:-1]) == num_prompt
    return [(i, int(starts[i + 1]) - 1) for i in is_last.nonzero()[0].tolist()]


# ---------------------------------------------------------------------- finding the runner


def attach_to_next_runner(sink: Sink) -> None:
    """Attach `sink` to the model runner whose KV cache this process sets up next. Never raises; tells `sink` what came of it."""
    disarm()
    found = False
    for name in _RUNNER_MODULES:
        # A runner that exists has been imported; the other kind is not worth importing.
        runner_class = getattr(sys.modules.get(name), "GPUModelRunner", None)
        initialize = vars(runner_class).get("initialize_kv_cache") if runner_class is not None else None
        if callable(initialize):
            runner_class.initialize_kv_cache = _attach_after(initialize, sink)  # type: ignore[union-attr]
            found = True
    if not found:
        sink.on_refused(str(UnsupportedVllmError("no GPUModelRunner with a method initialize_kv_cache is loaded")))


def disarm() -> None:
    """Give vLLM its own methods back. Does nothing when no sink waits."""
    for name in _RUNNER_MODULES:
        runner_class = getattr(sys.modules.get(name), "GPUModelRunner", None)
        original = getattr(getattr(runner_class, "initialize_kv_cache", None), "_lifetime_original", None)
        if original is not None:
            runner_class.initialize_kv_cache = original  # type: ignore[union-attr]


def _attach_after(initialize: Callable[..., None], sink: Sink) -> Callable[..., None]:
    """Return `initialize`, which attaches `sink` to the runner that it was called on."""

    @wraps(initialize)
    def initialize_and_attach(runner: Any, *args: Any, **kwargs: Any) -> None:
        disarm()
        initialize(runner, *args, **kwargs)
        try:
            _attach(runner, sink)
        except Exception as error:  # whatever an unknown vLLM looks like, it must start
            sink.on_refused(_one_sentence(error))

    initialize_and_attach._lifetime_original = initialize  # type: ignore[attr-defined]
    return initialize_and_attach


def _one_sentence(error: Exception) -> str:
    if isinstance(error, UnsupportedVllmError):
        return str(error)
    return str(UnsupportedVllmError(f"{type(error).__name__}: {error}"))


def _attach(runner: Any, sink: Sink) -> None:
    """Replace the method of `runner` that gives rows. Raises `UnsupportedVllmError` and changes nothing if it looks different."""
    if getattr(runner, "is_pooling_model", False):
        sink.on_refused("a pooling model has no prompt that ends in a next token")
        return
    if getattr(runner.parallel_config, "prefill_context_parallel_size", 1) > 1:
        sink.on_refused("prefill context parallelism spreads a prompt's rows over ranks")
        return
    v2_class = getattr(sys.modules.get(_RUNNER_MODULES[1]), "GPUModelRunner", None)
    is_v2 = v2_class is not None and isinstance(runner, v2_class)
    (_check_v2 if is_v2 else _check_v1)(runner)
    if not _is_first_of_last_stage():
        sink.on_attached(False)
        return
    name = "sample" if is_v2 else "execute_model"
    setattr(runner, name, (_tap_v2 if is_v2 else _tap_v1)(runner, getattr(runner, name), sink))
    sink.on_attached(True)


def _is_first_of_last_stage() -> bool:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return bool(get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0)


def _check_v1(runner: Any) -> None:
    state = getattr(sys.modules.get(_RUNNER_MODULES[0]), "ExecuteModelState", None)
    has_states = "hidden_states" in getattr(state, "_fields", ())
    require(has_states, "the V1 runner's ExecuteModelState has no field hidden_states")
    require(hasattr(runner, "execute_model_state"), "the V1 runner has no attribute execute_model_state")
    require(hasattr(getattr(runner, "query_start_loc", None), "np"), "the V1 runner has no array query_start_loc.np")
    for name in _V1_BATCH:
        require(hasattr(runner.input_batch, name), f"the V1 runner's input batch has no attribute {name}")


def _check_v2(runner: Any) -> None:
    parameters = list(inspect.signature(runner.sample).parameters)
    takes = parameters[:2] == ["hidden_states", "input_batch"]
    require(takes, "the V2 runner's sample does not take (hidden_states, input_batch)")
    require(hasattr(getattr(runner.req_states, "prompt_len", None), "np"), "the V2 runner has no array req_states.prompt_len.np")
    batch = getattr(sys.modules.get(_RUNNER_MODULES[1]), "InputBatch", None)
    for name in _V2_BATCH:
        require(name in getattr(batch, "__dataclass_fields__", {}), f"the V2 runner's InputBatch has no field {name}")


# ---------------------------------------------------------------------- each step


def _tap_v1(runner: Any, execute_model: Callable[..., Any], sink: Sink) -> Callable[..., Any]:
    """Return `execute_model`, after which the rows of prompts that ended are given away."""

    @wraps(execute_model)
    def execute_model_and_give(*args: Any, **kwargs: Any) -> Any:
        output = execute_model(*args, **kwargs)
        state = runner.execute_model_state
        if state is not None:
            try:
                batch, num_reqs = runner.input_batch, runner.input_batch.num_reqs
                chosen = choose_rows(
                    batch.num_computed_tokens_cpu[:num_reqs],
                    runner.query_start_loc.np[: num_reqs + 1],
                    batch.num_prompt_tokens[:num_reqs],
                )
                if chosen:
                    _give(sink, chosen, batch.req_ids, state.hidden_states)
            except Exception as error:  # the step's tokens must not be lost for this
                runner.execute_model = execute_model
                sink.on_refused(_one_sentence(error))
        return output

    return execute_model_and_give


def _tap_v2(runner: Any, sample: Callable[..., Any], sink: Sink) -> Callable[..., Any]:
    """Return `sample`, before which the rows of prompts that ended are given away."""

    @wraps(sample)
    def give_and_sample(hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            num_reqs = input_batch.num_reqs
            chosen = choose_rows(
                input_batch.num_computed_prefill_tokens_np[:num_reqs],
                input_batch.query_start_loc_np[: num_reqs + 1],
                runner.req_states.prompt_len.np[input_batch.idx_mapping_np[:num_reqs]],
            )
            if chosen:
                _give(sink, chosen, input_batch.req_ids, hidden_states)
        except Exception as error:  # the step's tokens must not be lost for this
            runner.sample = sample
            sink.on_refused(_one_sentence(error))
        return sample(hidden_states, input_batch, *args, **kwargs)

    return give_and_sample


def _give(sink: Sink, chosen: list[tuple[int, int]], request_ids: list[str], hidden_states: torch.Tensor) -> None:
    """Copy the chosen rows, on the stream that computes them, and hand them on."""
    import torch

    # One kernel for all rows, and no index that would have to travel to the device first.
    rows = torch.stack([hidden_states[row] for _, row in chosen])
    sink.offer([request_ids[i] for i, _ in chosen], rows)
