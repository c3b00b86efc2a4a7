# SPDX-License-Identifier: Apache-2.0
"""What the servers of `benchmarks.placement` serve, how large their memories are, and the lifetime rank they start with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.placement_workload import (
    Workload,
    WorkloadConfig,
    generate,
    lifetime_rounds,
    mean_live_blocks,
    num_written_blocks,
)
from benchmarks.server import serve_arguments
from vllm_lifetime.flash import FlashGeometry
from vllm_lifetime.flash.mapped import mapped_file_bytes

__all__ = ["Plan", "Settings", "kendall_taus", "make_plan", "train_rank"]

WARM_UP_SEED = 1_000_003
WARM_UP_PART = 2 / 3
"""Sessions of the warm-up, over those of a seed."""

TRAINING_SEED = 2_000_003
TRAINING_SPAWNS = 2000
TYPICAL_ROUND_S = 0.2
"""Lifetimes of the sub-agents that the rank is trained on; only their order counts."""

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The worker runs in EngineCore's process, as is usual on a GPU. In one of its own, the CPU backend's default, it spins on a core
while it waits for the next step, which is most of the time with a model so small."""

SHORT_LIVED = ("reasoning", "worker", "reviewer")


@dataclass(frozen=True)
class Settings:
    """What all servers are started with."""

    model_layers: int = 1
    model_hidden: int = 128
    dtype: str = "float32"
    block_size: int = 32
    block_bytes: int = 16384
    """2 x layers x 1 KV head x 64 x 4 bytes x tokens."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_model_len: int = 2048
    flash_times: float = 8.0
    """Flash blocks over the short-lived blocks that are alive on average, the same for all: HBM is 3 to 9 % of the KV cache."""

    def server_args(self, num_blocks: int) -> list[str]:
        """The options of `vllm serve`."""
        shared = serve_arguments(
            dtype=self.dtype,
            block_size=self.block_size,
            blocks=num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        return [*shared, "--distributed-executor-backend", EXECUTOR]

    def server_env(self) -> dict[str, str]:
        """The environment of `vllm serve`: one thread, on any core, so that servers may run side by side."""
        return {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def flash_bytes(self, num_blocks: int) -> int:
        """The size of a flash file for so many blocks."""
        geometry = FlashGeometry(
            model="",
            dtype=self.dtype,
            block_size_tokens=self.block_size,
            num_layers=self.model_layers,
            slot_bytes=self.block_bytes,
            hash_algorithm="",
            hash_seed="",
        )
        return mapped_file_bytes(geometry, num_blocks)


@dataclass(frozen=True)
class Plan:
    """What every server serves, and how large its memories are."""

    settings: Settings
    warm_up: Workload
    workloads: tuple[Workload, ...]
    live_blocks: dict[str, float]
    """Alive on average, by class, over the seeds."""

    @property
    def short_lived_blocks(self) -> float:
        """Alive on average, of the classes that the policies would have in HBM."""
        return sum(self.live_blocks[name] for name in SHORT_LIVED)

    @property
    def flash_blocks(self) -> int:
        """Of every server."""
        return round(self.settings.flash_times * self.short_lived_blocks)

    def hbm_blocks(self, share: float) -> int:
        """Blocks that can be used; vLLM's null block is one more."""
        return max(1, round(share * self.short_lived_blocks))

    @property
    def num_rounds(self) -> int:
        """That one server serves."""
        return sum(len(one.rounds) for one in (self.warm_up, *self.workloads))


def make_plan(config: WorkloadConfig, seeds: int, settings: Settings) -> Plan:
    """The workloads of seeds 0 to `seeds - 1`, and of the warm-up.

    Raises ValueError: fewer sessions than there should be at a time, or too few for the warm-up to fill the memories.
    """
    if config.sessions < config.concurrency:
        raise ValueError(f"{config.sessions} sessions are fewer than the {config.concurrency} at a time")
    workloads = tuple(generate(replace(config, seed=seed)) for seed in range(seeds))
    each = [mean_live_blocks(workload, settings.block_size) for workload in workloads]
    live = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
    warm_up = generate(replace(config, seed=WARM_UP_SEED, sessions=math.ceil(WARM_UP_PART * config.sessions)), "warm-up")
    plan = Plan(settings, warm_up, workloads, live)
    written = num_written_blocks(warm_up, settings.block_size)
    most = round(plan.flash_blocks + plan.short_lived_blocks)
    if written < most:
        raise ValueError(f"the warm-up writes {written} blocks, of {most} that there may be: more sessions, or fewer at a time")
    return plan


def train_rank(path: Path, tau: float) -> None:
    """A lifetime rank, trained on spawns of another seed whose lifetimes are those of the workload's law. Raises OSError."""
    # Imported late: scikit-learn takes seconds.
    from vllm_lifetime.prediction.lifetime_rank import save_base
    from vllm_lifetime.prediction.rank_training import train_weights
    from vllm_lifetime.traces.generate_spawns import generate_spawns

    spawns = generate_spawns(TRAINING_SPAWNS, TRAINING_SEED, tau)
    samples = [replace(sample, lifetime_s=TYPICAL_ROUND_S * lifetime_rounds(sample)) for sample in spawns.samples]
    path.parent.mkdir(parents=True, exist_ok=True)
    save_base(path, train_weights(samples), {"workers": len(samples), "tau": tau})


def kendall_taus(plan: Plan, rank_path: Path) -> dict[str, list[float]]:
    """By seed, Kendall's tau with the lifetimes: of what the spawn records show, and of the rank that the server begins with."""
    from scipy.stats import kendalltau  # type: ignore[import-untyped]

    from vllm_lifetime.prediction.lifetime_rank import LifetimeRank, load_base

    rank = LifetimeRank(load_base(rank_path))
    taus: dict[str, list[float]] = {"shown": [], "rank": []}
    for workload in plan.workloads:
        rounds = [worker.rounds for worker in workload.workers]
        for name, scores in (
            ("shown", [worker.shown for worker in workload.workers]),
            ("rank", [rank.score(worker.sample.signal) for worker in workload.workers]),
        ):
            taus[name].append(round(float(kendalltau(scores, rounds).statistic), 3))
    return taus
