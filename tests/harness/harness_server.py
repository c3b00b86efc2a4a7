# SPDX-License-Identifier: Apache-2.0
"""How the real server of the adapters' tests is started."""

__all__ = ["SERVER_ARGS", "SERVER_ENV", "SERVER_LOCK_VARIABLE", "SERVER_URL_VARIABLE"]

SERVER_URL_VARIABLE = "VLLM_LIFETIME_TEST_SERVER_URL"
"""Names a server that runs already."""

SERVER_LOCK_VARIABLE = "VLLM_LIFETIME_TEST_SERVER_LOCK"
"""Names a file. Who uses the server locks it, since others may use the same server and tests count what it counts."""

SERVER_ARGS = [
    *("--dtype", "float32"),
    *("--block-size", "32"),
    *("--num-gpu-blocks-override", "400"),
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "8"),
    *("--tool-call-parser", "hermes"),
    "--enable-auto-tool-choice",
    "--enable-prefix-caching",
    "--enforce-eager",
]
"""Options of `vllm serve`: room for the prompts of agent frameworks."""

SERVER_ENV = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Environment of the server."""
