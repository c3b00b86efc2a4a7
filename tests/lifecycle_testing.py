# SPDX-License-Identifier: Apache-2.0
"""A lifecycle over real pools: requests read and write blocks of three tiers as the connector lets them."""

import hashlib
from typing import Any

from tests.pool.pool_testing import Content, Request, Tiers, key_of
from vllm_lifetime.agents import Reading
from vllm_lifetime.boundaries import Boundary, Outcome, RequestMetadata
from vllm_lifetime.lifecycle import Lifecycle
from vllm_lifetime.pool.access import Path
from vllm_lifetime.pool.runs import Reader

BLOCK_BYTES = 10
LEASE_S = 100.0
HASH_TOKENS = 16


def hashes_of(content: Content) -> list[bytes]:
    """Block hashes as vLLM has them: each covers all before it, and any eight bytes tell it apart."""
    return [hashlib.blake2b(key_of(content[: i + 1]), digest_size=32).digest() for i in range(len(content))]


class Served:
    """A request on its way: `prompt` and then `answer`, one number per block."""

    def __init__(self, reading: Reading | None, request: Request, num_prompt: int) -> None:
        self.reading = reading
        self.request = request
        self.num_prompt = num_prompt


class World:
    """A lifecycle with its pools and a clock."""

    def __init__(self, num_hbm: int = 64, num_host: int = 8, num_flash: int = 8) -> None:
        self.now = 1000.0
        self.tiers = Tiers(num_hbm, num_host, num_flash)
        self.ended: list[Reader] = []
        self.lifecycle = Lifecycle(
            self._end,
            BLOCK_BYTES,
            LEASE_S,
            hash_tokens=HASH_TOKENS,
            min_shared_tokens=2 * HASH_TOKENS,
            min_new_tokens=4 * HASH_TOKENS,
            clock=lambda: self.now,
        )
        self.count = 0

    def _end(self, reader: Reader) -> int:
        assert reader.is_live, "ended twice"
        self.ended.append(reader)
        return sum(self.tiers.table.end(reader))

    # ------------------------------------------------------------------ requests

    def start(self, prompt: Content, answer: Content = (), session: str | None = "s", **metadata: Any) -> Served:
        """A request arrives and hits what is in HBM; nothing is computed yet."""
        reading = self.lifecycle.start_request(session, RequestMetadata.model_validate(metadata), hashes_of(prompt))
        boundary = len(prompt)
        if reading is not None and reading.boundary_blocks is not None:
            boundary = min(boundary, reading.boundary_blocks)
        path = Path(None) if reading is None else Path(reading.prompt, reading.output, boundary)
        request = self.tiers.start(path, prompt + answer, max_hit=len(prompt))
        return Served(reading, request, len(prompt))

    def compute(self, served: Served, count: int = 1000) -> None:
        """So many more blocks get their hashes."""
        request = served.request
        self.tiers.grow(request, min(count, len(request.content) - len(request.blocks)))
        if served.reading is not None and len(request.blocks) >= served.num_prompt:
            self.lifecycle.has_read(served.reading)

    def finish(self, served: Served, *, is_aborted: bool = False) -> None:
        """The request is over: its blocks are given back after the lifecycle has heard of it."""
        if served.reading is not None:
            done = served.request.content[: len(served.request.blocks)]
            self.lifecycle.finish_request(served.reading, hashes_of(done), is_aborted=is_aborted)
        self.tiers.finish(served.request)

    def serve(self, prompt: Content, answer: Content = (), session: str | None = "s", **metadata: Any) -> Served:
        """A whole request."""
        served = self.start(prompt, answer, session, **metadata)
        self.compute(served)
        self.finish(served)
        return served

    # ------------------------------------------------------------------ events and views

    def event(self, kind: str, **fields: Any) -> Outcome:
        """One boundary, under a fresh message id unless it has one."""
        self.count += 1
        fields.setdefault("message_id", f"m{self.count}")
        fields.setdefault("session_id", "s")
        return self.lifecycle.apply(Boundary.model_validate({"kind": kind, **fields}))

    def retired(self) -> set[Content]:
        """The contents that lie in HBM and that no live segment reads."""
        found = set()
        for block in self.tiers.blocks:
            run = self.tiers.hbm.run_of[block.block_id]
            if block.block_hash is not None and run is not None and run.is_retired:
                found.add(tuple(block.block_hash))
        return found

    def classes(self, session: str = "s") -> dict[str, int]:
        """Live segments' blocks in HBM by class."""
        counts = self.lifecycle.segments.count_classes(3)[0]
        return {str(segment_class): count for segment_class, count in counts.items() if count}

    def segment_classes(self, session: str = "s") -> list[str]:
        """The classes of a session's live segments."""
        found = self.lifecycle.find_session(session)
        if found is None:
            return []
        return sorted(str(segment.segment_class) for agent in found.agents for segment in agent.segments)
