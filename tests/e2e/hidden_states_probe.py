# SPDX-License-Identifier: Apache-2.0
"""Runs the test model with or without hidden states and writes down what the scheduler side got.

    python hidden_states_probe.py MODEL OUT.json OPTIONS_JSON [TENSOR_PARALLEL_SIZE]

The scheduler runs in this process, so that what comes in can be seen; the worker is a process of its own, as in a server.
"""

import json
import sys
from pathlib import Path
from typing import Any

from e2e_workload import BLOCK_TOKENS, MAX_MODEL_LEN, POOL_BLOCKS, Prompt, random_tokens

SHORT = Prompt("short", random_tokens("hidden-short", 20), 3)
LONG = Prompt("long", random_tokens("hidden-long", 600), 3)
"""Three chunks of prefill."""
WHOLE_BLOCKS = Prompt("whole-blocks", random_tokens("hidden-whole", 4 * BLOCK_TOKENS), 3)
SCORED = Prompt("scored", random_tokens("hidden-scored", 2), 3)
"""With prompt logprobs, for which vLLM computes logits of one more token: as many rows as requests."""

GROWING = [Prompt(f"growing-{i}", random_tokens(f"hidden-growing-{i}", 110 + i), 32) for i in range(5)]
"""All fit when they start, and not when they have grown by a block: vLLM must preempt."""


def run(model: str, options: dict[str, Any], tensor_parallel_size: int) -> dict[str, Any]:
    """Generate, and return tokens, hits and vectors."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    from vllm_lifetime.connectors.lifetime.metadata import LifetimeWorkerMetadata
    from vllm_lifetime.connectors.lifetime.scheduler import LifetimeScheduler

    prompts: dict[str, list[int]] = {}
    vectors: list[tuple[str, list[float]]] = []
    counts = {"reports": 0, "preempted": 0}
    on_new_request = LifetimeScheduler.on_new_request
    build_connector_meta = LifetimeScheduler.build_connector_meta
    update_connector_output = LifetimeScheduler.update_connector_output

    def note_request(self: Any, request: Any) -> None:
        prompts[request.request_id] = list(request.prompt_token_ids)
        on_new_request(self, request)

    def note_preemptions(self: Any, scheduler_output: Any) -> Any:
        counts["preempted"] += len(scheduler_output.preempted_req_ids or ())
        return build_connector_meta(self, scheduler_output)

    def note_vectors(self: Any, output: Any) -> None:
        report = output.kv_connector_worker_meta
        if isinstance(report, LifetimeWorkerMetadata):
            counts["reports"] += 1
            vectors.extend((request_id, row.tolist()) for request_id, row in report.hidden_states.items())
        update_connector_output(self, output)

    LifetimeScheduler.on_new_request = note_request  # type: ignore[method-assign]
    LifetimeScheduler.build_connector_meta = note_preemptions  # type: ignore[method-assign]
    LifetimeScheduler.update_connector_output = note_vectors  # type: ignore[method-assign]

    llm = LLM(
        model=model,
        dtype="float32",
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=POOL_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
        enforce_eager=True,
        tensor_parallel_size=tensor_parallel_size,
        distributed_executor_backend="mp",
        kv_transfer_config=KVTransferConfig(
            kv_connector="lifetime", kv_role="kv_both", kv_connector_extra_config={"load_policy": "always", **options}
        ),
    )
    answers: dict[str, list[Any]] = {}

    def ask(name: str, *asked: Prompt, **more: Any) -> None:
        sampling = [SamplingParams(temperature=0, max_tokens=p.max_tokens, ignore_eos=True, **more) for p in asked]
        outputs = llm.generate([{"prompt_token_ids": list(p.tokens)} for p in asked], sampling, use_tqdm=False)
        answers[name] = [[list(output.outputs[0].token_ids), output.num_cached_tokens] for output in outputs]

    ask("short", SHORT)
    ask("chunked", LONG)
    ask("hit", LONG)
    ask("whole blocks", WHOLE_BLOCKS)
    ask("whole blocks hit", WHOLE_BLOCKS)
    ask("prompt logprobs", SCORED, prompt_logprobs=1)
    ask("preempted", *GROWING)
    ask("mixed", SHORT, LONG, WHOLE_BLOCKS)
    return {"answers": answers, "prompts": prompts, "vectors": vectors, **counts}


if __name__ == "__main__":
    model, out, options, *rest = sys.argv[1:]
    result = run(model, json.loads(options), int(rest[0]) if rest else 1)
    Path(out).write_text(json.dumps(result))
