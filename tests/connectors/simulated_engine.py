# SPDX-License-Identifier: Apache-2.0
"""A real vLLM scheduler and the real connector, both sides, around a model that checks every KV byte it reads.

The "model" keeps one number per token in the KV pages: a hash chain over the prefix. Each step it compares the whole prefix of
every scheduled request with the chain computed from its tokens, so that one wrong, stale or missing block shows at once, and the
token it samples depends on what it read. It runs thousands of engine steps per minute, which a real server does not.
"""

import random
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_lifetime.connectors.lifetime.connector import LifetimeConnector

BLOCK_SIZE = 16
LAYERS = ("layers.0", "layers.1")
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=8, dtype=torch.float32)
BLOCK_BYTES = SPEC.page_size_bytes * len(LAYERS)
_MASK = (1 << 61) - 1


class WrongKV(AssertionError):
    """A request read KV that is not its prefix's."""


def chain(tokens: list[int]) -> np.ndarray:
    """The hash chain of a token sequence, one int64 per position."""
    value = 1
    values = np.empty(len(tokens), dtype=np.int64)
    for i, token in enumerate(tokens):
        value = (value * 6364136223846793005 + token * 1442695040888963407 + i + 1) & _MASK
        values[i] = value
    return values


def prompt(seed: int, length: int = 320) -> list[int]:
    """Token ids that no other seed shares a prefix with."""
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def tiers(tmp_path: Path, host: int = 20, flash: int = 250, **options: Any) -> dict[str, Any]:
    """Options for so many host and flash blocks, loading whatever is found."""
    answer: dict[str, Any] = {"load_policy": "always", "flash_staging_bytes": 8 * BLOCK_BYTES, **options}
    if host:
        answer["host_bytes"] = host * BLOCK_BYTES
    if flash:
        answer |= {"flash_path": str(tmp_path / "flash.kv"), "flash_bytes": (flash + 8) * 4096}
    return answer


@dataclass
class Chain:
    """A growing chain, kept per request."""

    tokens: list[int] = field(default_factory=list)
    values: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def upto(self, tokens: list[int], count: int) -> np.ndarray:
        """The chain over the first `count` tokens."""
        if len(self.values) < count:
            self.values = chain(tokens[: max(count, len(tokens))])
        return self.values[:count]


def make_vllm_config(model: Path, num_blocks: int, options: dict[str, Any] | None, **arguments: Any) -> VllmConfig:
    """A configuration as `vllm serve` would make it; `options=None` is stock vLLM without a connector."""
    transfer = None
    if options is not None:
        transfer = KVTransferConfig(
            kv_connector="lifetime",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=options,
        )
    config = EngineArgs(
        model=str(model),
        block_size=BLOCK_SIZE,
        max_model_len=num_blocks * BLOCK_SIZE,
        num_gpu_blocks_override=num_blocks,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
        **{"max_num_batched_tokens": 256, "max_num_seqs": 8, **arguments},
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    return config


class SimulatedEngine:
    """One engine. `step()` is one EngineCore step."""

    def __init__(self, config: VllmConfig, num_blocks: int) -> None:
        self.config = config
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, hash_function)
        page = SPEC.page_size_bytes
        self.kv_cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=page * num_blocks * len(LAYERS),
                    layers=list(LAYERS),
                    layer_stride=page * num_blocks,
                    block_stride=page,
                )
            ],
            kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), SPEC)],
        )
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.worker: LifetimeConnector | None = None
        context = None
        if config.kv_transfer_config is not None:
            self.worker = LifetimeConnector(config, KVConnectorRole.WORKER, self.kv_cache_config)
            context = self.worker.get_mem_pool_context()
        with context or nullcontext():
            storage = torch.zeros(page * num_blocks * len(LAYERS), dtype=torch.int8)
        shape = (num_blocks, 2, BLOCK_SIZE, 16)
        parts = storage.view(torch.float32).view(len(LAYERS), *shape)
        self.kv = dict(zip(LAYERS, parts, strict=True))
        # [layer][block, position in block]: the first int64 of each token's share of the page.
        self._words = [t.view(torch.int64).numpy().reshape(num_blocks, BLOCK_SIZE, -1) for t in self.kv.values()]
        if self.worker is not None:
            self.worker.register_kv_caches(self.kv)
            report = self.worker.get_handshake_metadata()
            if report is not None:
                self.connector.set_xfer_handshake_metadata({0: report})
        self._chains: dict[str, Chain] = {}
        self.outputs: dict[str, list[int]] = {}
        self.cached_tokens: dict[str, int] = {}
        self.num_steps = 0
        self.stats: list[Any] = []

    @property
    def connector(self) -> LifetimeConnector:
        """The scheduler's connector."""
        connector = self.scheduler.connector
        assert isinstance(connector, LifetimeConnector)
        return connector

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int = 4,
        session_id: str | None = None,
        metadata: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Request:
        """A request arrives."""
        extra = {"kv_transfer_params": {"lifetime": metadata}} if metadata is not None else None
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra),
            pooling_params=None,
            block_hasher=self._hasher,
            session_id=session_id,
            **arguments,
        )
        self._chains[request_id] = Chain()
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client goes away."""
        self.scheduler.finish_requests([request_id], RequestStatus.FINISHED_ABORTED)

    def step(self) -> None:
        """Schedule, run, update."""
        self.num_steps += 1
        scheduler = self.scheduler
        output = scheduler.schedule()
        worker = self.worker
        metadata = output.kv_connector_metadata
        if worker is not None:
            assert metadata is not None
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
        sampled = [self._forward(request_id, count) for request_id, count in output.num_scheduled_tokens.items()]
        transfers = None
        if worker is not None:
            metadata_of_step = self._attention(output.num_scheduled_tokens)
            worker.start_load_kv(SimpleNamespace(attn_metadata=metadata_of_step))  # type: ignore[arg-type]
            worker.wait_for_save()
            sent, received = worker.get_finished(output.finished_req_ids)
            transfers = KVConnectorOutput(
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=worker.get_block_ids_with_load_errors(),
                kv_connector_worker_meta=worker.build_connector_worker_meta(),
            )
            worker.clear_connector_metadata()
            if not output.num_scheduled_tokens and transfers.is_empty():
                transfers = None
        request_ids = list(output.num_scheduled_tokens)
        answers = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=request_ids,
                req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
                sampled_token_ids=sampled,
                kv_connector_output=transfers,
            ),
        )
        for answer in answers.values():
            if answer.scheduler_stats is not None and answer.scheduler_stats.kv_connector_stats:
                self.stats.append(answer.scheduler_stats.kv_connector_stats)
            for one in answer.outputs:
                self.outputs.setdefault(one.request_id, []).extend(one.new_token_ids)

    def _attention(self, num_scheduled: dict[str, int]) -> Any:
        """What vLLM's attention backend is told of a step; None if it computes nothing."""
        if not num_scheduled:
            return None
        ends = [self.scheduler.requests[request_id].num_computed_tokens for request_id in num_scheduled]
        tables = [self.scheduler.kv_cache_manager.get_block_ids(request_id)[0] for request_id in num_scheduled]
        slots = [
            table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            for table, end, count in zip(tables, ends, num_scheduled.values(), strict=True)
            for position in range(end - count, end)
        ]
        width = max(map(len, tables))
        return SimpleNamespace(
            block_table=torch.tensor([[*table, *[0] * (width - len(table))] for table in tables]),
            seq_lens=torch.tensor(ends),
            slot_mapping=torch.tensor([*slots, -1]),
            num_actual_tokens=len(slots),
        )

    def _forward(self, request_id: str, count: int) -> list[int]:
        """Write the scheduled tokens' KV, then read and check the whole prefix, as attention would."""
        request = self.scheduler.requests[request_id]
        end = request.num_computed_tokens
        start = end - count
        self.cached_tokens.setdefault(request_id, start)
        expected = self._chains[request_id].upto(list(request.all_token_ids), end)
        blocks = np.array(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0], dtype=np.int64)
        positions = np.arange(end)
        where = blocks[positions // BLOCK_SIZE], positions % BLOCK_SIZE
        for layer, words in enumerate(self._words):
            words[where[0][start:], where[1][start:], 0] = expected[start:] + layer
            words[where[0][start:], where[1][start:], -1] = expected[start:] - layer
        for layer, words in enumerate(self._words):
            for column, sign in ((0, 1), (-1, -1)):
                read = words[where[0], where[1], column] - sign * layer
                if not np.array_equal(read, expected):
                    wrong = np.flatnonzero(read != expected)
                    raise WrongKV(
                        f"step {self.num_steps}, {request_id}, layer {layer}: positions {wrong[:8].tolist()} of {end} "
                        f"(computed now: from {start})"
                    )
        if end < request.num_tokens:
            return []
        return [int(expected[-1] % 997)]

    def run(self, limit: int = 10_000) -> None:
        """Step until no request is left; fails instead of hanging."""
        for _ in range(limit):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        waiting = {r: self.scheduler.requests[r].status.name for r in self.scheduler.requests}
        raise AssertionError(f"{limit} steps did not finish the requests: {waiting}")

    def settle(self, limit: int = 2000) -> None:
        """Step as an idle engine core would: until nothing wants another step."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.step()
            time.sleep(0.001)
        raise AssertionError("transfers did not end")

    def boundary(self, kind: str, message_id: str, **fields: Any) -> dict[str, Any]:
        """Post one event, as the control API would."""
        event = {"message_id": message_id, "kind": kind, **fields}
        answer = self.connector.lifetime_call("boundaries", {"events": [event]})
        outcome: dict[str, Any] = answer["outcomes"][0]
        return outcome

    def check_conservation(self) -> None:
        """In every tier: counts agree with a full walk; with no request, everything referenced has been given back."""
        side = self.connector._scheduler_side
        pool = self.scheduler.kv_cache_manager.block_pool
        lists = [(pool.free_list, [b for b in pool.blocks if not b.is_null])]
        lists += [(tier.free_list, tier.slots) for tier in (side.host, side.flash)]
        for free_list, blocks in lists:
            free = free_list.get_all_free_blocks()
            assert len(free) == free_list.num_free_blocks == len({b.block_id for b in free})
            held = [b for b in blocks if b.ref_cnt > 0]
            assert len(free) + len(held) == len(blocks)
            unhashed = sum(1 for b in free if b.block_hash is None)
            assert free_list.num_empty_blocks == unhashed
            retired = sum(1 for b in free if (r := free_list.run_of[b.block_id]) is not None and r.is_retired)
            assert free_list.num_retired_blocks == retired
        for usage in side.usage().values():
            assert usage.used + usage.free == usage.capacity

    def shutdown(self) -> None:
        """Close the worker's files and threads."""
        if self.worker is not None:
            self.worker.shutdown()


def serve(engine: SimulatedEngine, name: str, tokens: list[int], **arguments: Any) -> int:
    """Serve one request to its end; returns how many of its prompt tokens were not computed."""
    engine.add(name, tokens, **arguments)
    engine.run()
    return engine.cached_tokens[name]


def damage_every_slot(path: Path, num_slots: int = 250) -> None:
    """Flip a bit in every payload page of a flash file: the table and header lie before."""
    content = bytearray(path.read_bytes())
    for offset in range(len(content) - num_slots * 4096, len(content), 4096):
        content[offset + 64] ^= 4
    with path.open("r+b") as file:
        file.write(content)
