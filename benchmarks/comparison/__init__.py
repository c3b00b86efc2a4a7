# SPDX-License-Identifier: Apache-2.0
"""`lifetime` against stock vLLM, LMCache, vLLM's own offloading and its own simpler policies, with the same bytes of each memory.

    python -m benchmarks.comparison run        measure, and write benchmarks/results/DATE/
    python -m benchmarks.comparison table DIR  the table of such a folder, as markdown
    python -m benchmarks.comparison overhead   CPU time of the scheduler with and without the connector

See docs/benchmarks.md.
"""
