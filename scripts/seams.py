# SPDX-License-Identifier: Apache-2.0
"""The places in vLLM that this package stands on: data for `check_seams.py`, nothing else.

To add one, append a `Seam` to the group that uses it. `path` is relative to the package `vllm`; `name` is
`Class.member`, `Class` or `function`. Say what we do with it: what we `CALL` may take further optional
parameters without harm, what we `OVERRIDE` may not, because vLLM may pass them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Use(StrEnum):
    """What this package does with a seam."""

    CALL = "call"
    OVERRIDE = "override"
    REPLACE = "replace"
    READ = "read"


@dataclass(frozen=True)
class Seam:
    """One thing that must be there, and the shape it must have."""

    path: str
    name: str
    use: Use
    parameters: tuple[str, ...] | None = None
    """Parameter names without self or cls; None where the seam is no function or they do not matter."""
    kind: str = ""
    """`staticmethod`, `classmethod`, `property`, `async`, or empty for none of these."""
    pattern: str = ""
    """Regular expression that must match the file's text; `name` is then only a label."""
    without: str = ""
    """What this package does where the seam is missing or changed; empty: it cannot work there."""


_CONNECTOR = "distributed/kv_transfer/kv_connector/v1/base.py"
_POOL = "v1/core/block_pool.py"
_CACHE_UTILS = "v1/core/kv_cache_utils.py"
_OFFLOAD = "v1/kv_offload/base.py"


def _methods(path: str, owner: str, use: Use, table: dict[str, str], kind: str = "") -> list[Seam]:
    """Return seams for methods of one class, each with its parameters written `a, b, *c`."""
    return [Seam(path, f"{owner}.{name}", use, tuple(p for p in text.split(", ") if p), kind) for name, text in table.items()]


def _attributes(path: str, owner: str, *names: str) -> list[Seam]:
    """Return seams for fields, attributes and properties of one class that are read."""
    return [Seam(path, f"{owner}.{name}", Use.READ) for name in names]


_KVCONNECTOR_GROUP = [
    Seam(
        "distributed/kv_transfer/kv_connector/factory.py",
        "KVConnectorFactory.register_connector",
        Use.CALL,
        ("name", "module_path", "class_name"),
        "classmethod",
    ),
    *_methods(
        _CONNECTOR,
        "KVConnectorBase_V1",
        Use.OVERRIDE,
        {
            "__init__": "vllm_config, role, kv_cache_config",
            "bind_gpu_block_pool": "gpu_block_pool",
            "bind_kv_cache_manager": "kv_cache_manager",
            "get_num_new_matched_tokens": "request, num_computed_tokens",
            "update_state_after_alloc": "request, blocks, num_external_tokens",
            "build_connector_meta": "scheduler_output",
            "update_connector_output": "connector_output",
            "on_new_request": "request",
            "request_finished": "request, block_ids",
            "has_pending_push_work": "",
            "reset_cache": "",
            "take_events": "",
            "register_kv_caches": "kv_caches",
            "handle_preemptions": "kv_connector_metadata",
            "start_load_kv": "forward_context, **kwargs",
            "wait_for_layer_load": "layer_name",
            "save_kv_layer": "layer_name, kv_layer, attn_metadata, **kwargs",
            "wait_for_save": "",
            "get_finished": "finished_req_ids",
            "get_block_ids_with_load_errors": "",
            "build_connector_worker_meta": "",
            "get_kv_connector_stats": "",
            "get_handshake_metadata": "",
            "set_xfer_handshake_metadata": "metadata",
            "get_mem_pool_context": "",
            "shutdown": "",
        },
    ),
    *_methods(_CONNECTOR, "KVConnectorBase_V1", Use.OVERRIDE, {"requires_kv_delivery": ""}, "property"),
    *_methods(
        _CONNECTOR,
        "KVConnectorBase_V1",
        Use.OVERRIDE,
        {
            "build_kv_connector_stats": "data",
            "build_prom_metrics": "vllm_config, metric_types, labelnames, per_engine_labelvalues",
        },
        "classmethod",
    ),
    *_methods(
        _CONNECTOR,
        "SupportsHMA",
        Use.OVERRIDE,
        {"request_finished_all_groups": "request, block_ids"},
    ),
    *_methods(_CONNECTOR, "KVConnectorWorkerMetadata", Use.OVERRIDE, {"aggregate": "other"}),
    *[
        Seam("distributed/kv_transfer/kv_connector/v1/metrics.py", name, Use.OVERRIDE)
        for name in ("KVConnectorStats", "KVConnectorPromMetrics")
    ],
    *_attributes("v1/outputs.py", "KVConnectorOutput", "kv_connector_worker_meta", "invalid_block_ids"),
    *_attributes("v1/core/sched/output.py", "SchedulerOutput", "preempted_req_ids"),
    *_attributes(
        "v1/request.py",
        "Request",
        "kv_transfer_params",
        "session_id",
        "block_hashes",
        "num_computed_tokens",
    ),
    *_attributes(
        "config/kv_transfer.py",
        "KVTransferConfig",
        "kv_connector",
        "kv_role",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
    ),
]

_BLOCK_POOL_GROUP = [
    Seam(
        "v1/core/kv_cache_coordinator.py",
        "builds BlockPool by its module's global",
        Use.REPLACE,
        pattern=r"^from vllm\.v1\.core\.block_pool import BlockPool$"
        r"[\s\S]*^        self\.block_pool = BlockPool\($",
    ),
    Seam(
        _POOL,
        "BlockPool.__init__",
        Use.OVERRIDE,
        (
            "num_gpu_blocks",
            "enable_caching",
            "hash_block_size",
            "enable_kv_cache_events",
            "metrics_collector",
            "medium",
        ),
        without="our pool passes on whatever arguments it is given",
    ),
    *_methods(
        _POOL,
        "BlockPool",
        Use.OVERRIDE,
        {
            "get_new_blocks": "num_blocks",
            "touch": "blocks",
            "free_blocks": "ordered_blocks",
            "unpin_blocks": "blocks, on_reuse",
            "cache_full_blocks": "request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id, block_mask",
            "_maybe_evict_cached_block": "block",
            "evict_blocks": "block_ids",
            "reset_prefix_cache": "",
            "get_num_free_blocks": "",
        },
    ),
    *_methods(
        _POOL,
        "BlockPool",
        Use.CALL,
        {
            "get_cached_block": "block_hash, kv_cache_group_ids",
            "_notify_reuse": "blocks",
            "_insert_block_hash": "block_hash_with_group_id, block, num_tokens",
        },
    ),
    *_attributes(
        _POOL,
        "BlockPool",
        "free_block_queue",
        "null_block",
        "blocks",
        "cached_block_hash_to_block",
        "metrics_collector",
        "_reuse_watchers",
    ),
    Seam(_POOL, "BlockHashToBlockMap.get_one_block", Use.CALL, ("key",)),
    Seam(_CACHE_UTILS, "make_block_hash_with_group_id", Use.CALL, ("block_hash", "group_id")),
    *_methods(
        _CACHE_UTILS,
        "FreeKVCacheBlockQueue",
        Use.REPLACE,
        {
            "__init__": "blocks",
            "popleft": "",
            "popleft_n": "n",
            "remove": "block",
            "append": "block",
            "append_n": "blocks",
            "prepend_n": "blocks",
            "get_all_free_blocks": "",
            "iter_blocks_after": "cursor",
        },
    ),
    *_attributes(_CACHE_UTILS, "FreeKVCacheBlockQueue", "num_free_blocks"),
    Seam(
        _CACHE_UTILS,
        "KVCacheBlock is a dataclass with slots",
        Use.READ,
        pattern=r"^@dataclass\(slots=True\)\nclass KVCacheBlock:$",
    ),
    *_attributes(
        _CACHE_UTILS,
        "KVCacheBlock",
        "block_id",
        "ref_cnt",
        "_block_hash",
        "block_hash",
        "prev_free_block",
        "next_free_block",
        "is_null",
    ),
    Seam(_CACHE_UTILS, "init_none_hash", Use.CALL, ("hash_fn",)),
    Seam(_CACHE_UTILS, "resolve_none_hash_seed", Use.CALL, ("hash_fn",)),
    Seam(_CACHE_UTILS, "_NON_CRYPTO_HASH_FUNCTIONS", Use.READ),
    Seam("utils/hashing.py", "get_hash_fn_by_name", Use.CALL, ("hash_fn_name",)),
    Seam(_CACHE_UTILS, "get_none_hash_seed", Use.CALL, ()),
]

_COPIES_GROUP = [
    *_methods(
        _OFFLOAD,
        "OffloadingWorker",
        Use.OVERRIDE,
        {
            "submit_store": "job_id, src_spec, dst_spec",
            "get_finished": "",
            "wait": "job_ids",
            "shutdown": "",
        },
    ),
    Seam(
        _OFFLOAD,
        "OffloadingWorker.submit_load",
        Use.OVERRIDE,
        ("job_id", "src_spec", "dst_spec"),
        without="0.33's `expedited` is optional and only vLLM's own OffloadingConnector passes it",
    ),
    *_attributes(_OFFLOAD, "CanonicalKVCaches", "tensors", "group_data_refs"),
    *_attributes(_OFFLOAD, "CanonicalKVCacheTensor", "tensor", "page_size_bytes"),
    *_attributes(_OFFLOAD, "CanonicalKVCacheRef", "tensor_idx", "page_size_bytes"),
    Seam(
        _OFFLOAD,
        "GPULoadStoreSpec.__init__",
        Use.CALL,
        ("block_ids", "group_sizes", "block_indices"),
    ),
    *_attributes(_OFFLOAD, "TransferResult", "job_id", "success"),
    *_methods("v1/kv_offload/cpu/common.py", "CPULoadStoreSpec", Use.READ, {"chunk_ids": ""}, "property"),
    Seam(
        "v1/kv_offload/cpu/gpu_worker.py",
        "CPUOffloadingWorker.__init__",
        Use.CALL,
        ("kv_caches", "blocks_per_chunk", "num_cpu_chunks"),
    ),
    *_attributes("v1/kv_offload/cpu/gpu_worker.py", "CPUOffloadingWorker", "_load_handler"),
    *_attributes("v1/kv_offload/cpu/gpu_worker.py", "SingleDirectionOffloadingHandler", "src_tensors"),
    Seam(
        "distributed/kv_transfer/kv_connector/v1/offloading/worker.py",
        "OffloadingConnectorWorker.register_kv_caches",
        Use.CALL,
        ("kv_caches",),
    ),
    Seam(
        "distributed/kv_transfer/kv_connector/v1/offloading/worker.py",
        "OffloadingConnectorWorker._init_worker",
        Use.OVERRIDE,
        ("kv_caches",),
    ),
]

_CONTROL_GROUP = [
    Seam("plugins/__init__.py", "load_general_plugins", Use.READ, ()),
    Seam("engine/arg_utils.py", "EngineArgs.add_cli_args", Use.REPLACE, ("parser",), "staticmethod"),
    Seam("engine/arg_utils.py", "EngineArgs.from_cli_args", Use.REPLACE, ("args",), "classmethod"),
    Seam(
        "engine/arg_utils.py",
        "EngineArgs.create_engine_config",
        Use.REPLACE,
        ("usage_context", "headless"),
        without="the patch passes on whatever arguments it is given",
    ),
    *_attributes("engine/arg_utils.py", "EngineArgs", "kv_transfer_config", "kv_offloading_size"),
    Seam(
        "engine/arg_utils.py",
        "plugins load before the options are parsed",
        Use.READ,
        pattern=r"class AsyncEngineArgs[\s\S]*def add_cli_args\([\s\S]*load_general_plugins\(\)"
        r"[\s\S]*EngineArgs\.add_cli_args\(parser\)",
    ),
    Seam(
        "v1/engine/core.py",
        "EngineCore loads plugins, calls utilities by getattr",
        Use.READ,
        pattern=r"load_general_plugins\(\)[\s\S]*getattr\(self, method_name\)",
    ),
    Seam("v1/engine/core.py", "EngineCoreProc._handle_client_request", Use.READ, ("request_type", "request")),
    Seam("v1/core/sched/interface.py", "SchedulerInterface.get_kv_connector", Use.CALL, ()),
    Seam("v1/core/sched/scheduler.py", "Scheduler.get_kv_connector", Use.CALL, ()),
    Seam(
        "v1/engine/core_client.py",
        "AsyncMPClient.call_utility_async",
        Use.CALL,
        ("method", "*args"),
        "async",
    ),
    Seam(
        "v1/engine/core_client.py",
        "AsyncMPClient.call_utility_all_async",
        Use.CALL,
        ("method", "*args"),
        "async",
        without="the event goes to each of `core_engines` by `_call_utility_async`",
    ),
    Seam(
        "v1/engine/core_client.py",
        "AsyncMPClient._call_utility_async",
        Use.CALL,
        ("method", "*args", "engine"),
        "async",
    ),
    *_attributes("v1/engine/core_client.py", "MPClient", "core_engines"),
    *_attributes("v1/engine/async_llm.py", "AsyncLLM", "engine_core", "vllm_config"),
    Seam("plugins/__init__.py", "load_endpoint_plugins", Use.REPLACE, ("supported_tasks",)),
    Seam(
        "plugins/endpoint_plugins/interface.py",
        "attach_endpoint_plugins looks load_endpoint_plugins up at each call",
        Use.READ,
        pattern=r"^def attach_endpoint_plugins\([\s\S]*^    from vllm\.plugins import load_endpoint_plugins$"
        r"[\s\S]*plugin\.attach_router\(app\)",
    ),
    *_methods(
        "plugins/endpoint_plugins/interface.py",
        "EndpointPlugin",
        Use.OVERRIDE,
        {"attach_router": "app"},
    ),
    Seam(
        "plugins/endpoint_plugins/interface.py",
        "EndpointPlugin.init_state",
        Use.OVERRIDE,
        ("engine_client", "state", "args"),
        "async",
    ),
    Seam(
        "entrypoints/launchers/app.py",
        "build_app",
        Use.READ,
        ("args", "supported_tasks", "model_config"),
    ),
    Seam(
        "entrypoints/launchers/app.py",
        "build_app attaches endpoint plugins",
        Use.READ,
        pattern=r"attach_endpoint_plugins\(app, supported_tasks\)",
    ),
    Seam("entrypoints/cli/main.py", "main", Use.CALL, ()),
    Seam(
        "entrypoints/cli/main.py",
        "asks for the version of the distribution vllm",
        Use.READ,
        pattern=r'importlib\.metadata\.version\("vllm"\)',
    ),
]

_CHAT = "entrypoints/openai/chat_completion"
_RESPONSES = "entrypoints/openai/responses"
_ANTHROPIC = "entrypoints/anthropic"

_NAMING_GROUP = [
    Seam(
        "entrypoints/launchers/api_server/app_state.py",
        "endpoint plugins start when the handlers are there",
        Use.READ,
        pattern=r"await init_generate_state\([\s\S]*await init_endpoint_plugins_state\(engine_client, state, args\)",
    ),
    Seam(
        "entrypoints/generate/api_router.py",
        "the names of the handlers in app.state",
        Use.READ,
        pattern=r"state\.openai_serving_responses = [\s\S]*state\.openai_serving_chat = "
        r"[\s\S]*state\.anthropic_serving_messages = ",
    ),
    *[
        Seam(path, name, Use.REPLACE, ("request", "raw_request"), "async")
        for path, name in (
            (f"{_CHAT}/serving.py", "OpenAIServingChat.create_chat_completion"),
            (f"{_ANTHROPIC}/serving.py", "AnthropicServingMessages.create_messages"),
            (f"{_RESPONSES}/serving.py", "OpenAIServingResponses.create_responses"),
        )
    ],
    *_attributes(f"{_CHAT}/protocol.py", "ChatCompletionRequest", "messages", "session_id", "vllm_xargs", "kv_transfer_params"),
    *_attributes(
        f"{_RESPONSES}/protocol.py",
        "ResponsesRequest",
        "input",
        "previous_response_id",
        "previous_input_messages",
        "session_id",
        "vllm_xargs",
        "kv_transfer_params",
    ),
    *_attributes(
        f"{_ANTHROPIC}/protocol.py", "AnthropicMessagesRequest", "messages", "metadata", "vllm_xargs", "kv_transfer_params"
    ),
    *_attributes(f"{_ANTHROPIC}/protocol.py", "AnthropicMessage", "role", "content"),
    *_attributes(f"{_ANTHROPIC}/protocol.py", "AnthropicContentBlock", "type"),
    Seam(
        f"{_ANTHROPIC}/serving.py",
        "Anthropic's request hands both parameters on",
        Use.READ,
        pattern=r"kv_transfer_params=anthropic_request\.kv_transfer_params,"
        r"[\s\S]*vllm_xargs=anthropic_request\.vllm_xargs,",
    ),
    Seam(
        "entrypoints/generate/base/serving.py",
        "a session is looked for in session_id, X-Session-ID, vllm_xargs",
        Use.READ,
        pattern=r'^SESSION_ID_HEADER = "X-Session-ID"$[\s\S]*if request\.session_id:'
        r'[\s\S]*request\.vllm_xargs\.get\("session_id"\)',
    ),
    Seam(
        "entrypoints/serve/engine/protocol.py",
        "OpenAI's requests keep fields that vLLM does not know",
        Use.READ,
        pattern=r'^class OpenAIBaseModel\(BaseModel\):$[\s\S]*?^    model_config = ConfigDict\(extra="allow"\)$',
    ),
]

_V1_RUNNER = "v1/worker/gpu_model_runner.py"
_V2_RUNNER = "v1/worker/gpu/model_runner.py"
_WITHOUT_STATES = "hidden states are off, with a warning; the predictor does without them"

_HIDDEN_STATE_GROUP = [
    Seam(
        "v1/worker/gpu_worker.py",
        "the runner gets its KV cache right after the connector is built",
        Use.READ,
        pattern=r"^        ensure_kv_transfer_initialized\(self\.vllm_config, kv_cache_config\)$"
        r"[\s\S]*self\.model_runner\.initialize_kv_cache\($",
        without=_WITHOUT_STATES,
    ),
    *[
        Seam(
            path,
            "GPUModelRunner.initialize_kv_cache",
            Use.REPLACE,
            ("kv_cache_config", "is_profiling", "kv_cache_allocation_context"),
            without="the patch passes on whatever arguments it is given",
        )
        for path in (_V1_RUNNER, _V2_RUNNER)
    ],
    Seam(
        _V1_RUNNER,
        "GPUModelRunner.execute_model",
        Use.REPLACE,
        ("scheduler_output", "intermediate_tensors"),
        without="the patch passes on whatever arguments it is given",
    ),
    Seam(
        _V1_RUNNER,
        "logits are computed from the hidden states that execute_model leaves",
        Use.READ,
        pattern=r"sample_hidden_states = hidden_states\[logits_indices\]\n"
        r"\s+logits = self\.model\.compute_logits\(sample_hidden_states\)"
        r"[\s\S]*self\.execute_model_state = ExecuteModelState\([^)]*?hidden_states,",
        without=_WITHOUT_STATES,
    ),
    Seam(
        _V1_RUNNER,
        "query_start_loc.np, the step's first row of each request",
        Use.READ,
        pattern=r"self\.query_start_loc\.np\[1 : num_reqs \+ 1\] = cu_num_tokens",
        without=_WITHOUT_STATES,
    ),
    *[
        Seam(path, name, Use.READ, without=_WITHOUT_STATES)
        for path, names in (
            (_V1_RUNNER, ("ExecuteModelState.hidden_states",)),
            (
                "v1/worker/gpu_input_batch.py",
                (
                    "InputBatch.num_reqs",
                    "InputBatch.req_ids",
                    "InputBatch.num_computed_tokens_cpu",
                    "InputBatch.num_prompt_tokens",
                ),
            ),
            (
                "v1/worker/gpu/input_batch.py",
                (
                    "InputBatch.num_reqs",
                    "InputBatch.req_ids",
                    "InputBatch.idx_mapping_np",
                    "InputBatch.num_computed_prefill_tokens_np",
                    "InputBatch.query_start_loc_np",
                ),
            ),
            ("v1/worker/gpu/states.py", ("RequestState.prompt_len",)),
        )
        for name in names
    ],
    Seam(
        _V2_RUNNER,
        "GPUModelRunner.sample",
        Use.REPLACE,
        ("hidden_states", "input_batch", "grammar_output"),
        without=_WITHOUT_STATES,
    ),
]

_WITHOUT_DATASET = "`vllm bench serve` has no `agent_trace`; `vllm-lifetime bench` needs no seam"

_BENCH_GROUP = [
    Seam("benchmarks/datasets/datasets.py", "add_dataset_parser", Use.REPLACE, ("parser",), without=_WITHOUT_DATASET),
    Seam(
        "benchmarks/datasets/datasets.py",
        "get_samples",
        Use.REPLACE,
        ("args", "tokenizer", "multimodal_backends"),
        without=_WITHOUT_DATASET,
    ),
    Seam(
        "benchmarks/serve.py",
        "arguments are read after get_samples has seen them",
        Use.READ,
        pattern=r"input_requests = get_samples\(args, tokenizer\)[\s\S]*ignore_eos=args\.ignore_eos[\s\S]*"
        r"self_timed=args\.self_timed",
        without=_WITHOUT_DATASET,
    ),
    *[
        Seam("benchmarks/datasets/datasets.py", f"SampleRequest.{name}", Use.READ, without=_WITHOUT_DATASET)
        for name in ("prompt", "prompt_len", "expected_output_len", "request_id", "timestamp", "request_overrides")
    ],
]

GROUPS: dict[str, list[Seam]] = {
    "Connector": _KVCONNECTOR_GROUP,
    "Block pool": _BLOCK_POOL_GROUP,
    "Copies": _COPIES_GROUP,
    "Start and control": _CONTROL_GROUP,
    "Request naming": _NAMING_GROUP,
    "Hidden states": _HIDDEN_STATE_GROUP,
    "Bench": _BENCH_GROUP,
}
