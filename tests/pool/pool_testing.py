# SPDX-License-Identifier: Apache-2.0
"""HBM as vLLM's pool keeps it, and two tiers of slots below it, around the `AccessTable` that is tested."""

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_lifetime.pool.access import AccessTable, Path
from vllm_lifetime.pool.free_list import TierFreeList
from vllm_lifetime.pool.runs import Reader, Run
from vllm_lifetime.pool.tiers import Slot, SlotTier

HBM, HOST, FLASH = range(3)
MAX_BLOCKS = 6

Content = tuple[int, ...]
"""A prefix as the choices made on the way to it; contents that begin alike share blocks."""


class CountingReader(Reader):
    """Knows how often it was told that nothing of it is left."""

    __slots__ = ("name", "num_times_gone")

    def __init__(self, workflow_id: str, name: str = "") -> None:
        super().__init__(workflow_id)
        self.name = name
        self.num_times_gone = 0

    def on_last_run_gone(self) -> None:
        assert not self.runs
        self.num_times_gone += 1

    def __repr__(self) -> str:
        return f"{self.name}@{self.workflow_id}{'' if self.is_live else ' (ended)'}"


class BareBlock:
    """What `FreeBlock` asks for, and no more."""

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.prev_free_block: object = None
        self.next_free_block: object = None
        self.block_hash_num_tokens: int | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, depth={self.block_hash_num_tokens})"


class Block(Slot):
    """A slot will do for an HBM block: same fields."""


def key_of(content: Content) -> bytes:
    return bytes(content)


class Request:
    """Blocks of one content, as far as it has come."""

    def __init__(self, path: Path, content: Content) -> None:
        self.path = path
        self.content = content
        self.blocks: list[Block] = []


class Tiers:
    """HBM as vLLM's pool keeps it, two tiers of slots, and the table that is tested."""

    def __init__(self, num_hbm: int, num_host: int, num_flash: int) -> None:
        self.blocks = [Block(i) for i in range(num_hbm)]
        self.hbm: TierFreeList[Block] = TierFreeList(self.blocks, HBM)
        self.by_hash: dict[bytes, list[Block]] = {}
        self.host = SlotTier("host", HOST, num_host)
        self.flash = SlotTier("flash", FLASH, num_flash)
        self.below = (self.host, self.flash)
        free_lists: list[TierFreeList[Any]] = [self.hbm, self.host.free_list, self.flash.free_list]
        self.free_lists = free_lists
        self.table = AccessTable(free_lists, self.copies_of, self.twin_of)

    def copies_of(self, block_hash: bytes) -> list[tuple[int, Slot]]:
        assert block_hash is not None
        slots = [(tier.tier, tier.get(block_hash)) for tier in self.below]
        return [(tier, slot) for tier, slot in slots if slot is not None]

    def twin_of(self, block: Block) -> Block | None:
        if block.block_hash is None:
            return None
        first = self.by_hash[block.block_hash][0]
        return None if first is block else first

    def drop_hash(self, block: Block) -> None:
        """As vLLM evicts; of a block that is free or held."""
        if block.block_hash is not None:
            self.hbm.forget_hash(block)
            same = self.by_hash[block.block_hash]
            same.remove(block)
            if not same:
                del self.by_hash[block.block_hash]
            block.block_hash = block.block_hash_num_tokens = None

    def allocate(self, count: int) -> list[Block]:
        blocks = self.hbm.popleft_n(count)
        for block in blocks:
            self.drop_hash(block)
            block.ref_cnt = 1
        return blocks

    def start(self, reader: Reader | Path | None, content: Content, max_hit: int = MAX_BLOCKS) -> Request:
        """A request arrives and hits what HBM has of it, up to `max_hit` blocks."""
        request = Request(reader if isinstance(reader, Path) else Path(reader), content)
        for length in range(1, min(max_hit, len(content)) + 1):
            same = self.by_hash.get(key_of(content[:length]))
            if same is None:
                break
            request.blocks.append(same[0])
        for block in request.blocks:
            if block.ref_cnt == 0:
                self.hbm.remove(block)
            block.ref_cnt += 1
        self.table.read(request.path, request.blocks, len(request.blocks))
        return request

    def grow(self, request: Request, count: int) -> list[Block]:
        """The request computes, or has loaded, `count` more blocks."""
        start = len(request.blocks)
        new = self.allocate(min(count, len(request.content) - start))
        request.blocks += new
        for index, block in enumerate(new, start):
            block.block_hash = key_of(request.content[: index + 1])
            block.block_hash_num_tokens = 16 * (index + 1)
            self.by_hash.setdefault(block.block_hash, []).append(block)
        self.table.read(request.path, request.blocks, start)
        self.table.write(request.path, request.blocks, len(request.blocks))
        return new

    def finish(self, request: Request) -> None:
        hashed: list[Block] = []
        empty: list[Block] = []
        for block in reversed(request.blocks):
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (empty if block.block_hash is None else hashed).append(block)
        self.hbm.prepend_n(empty)
        self.hbm.append_n(hashed)

    def copy_down(self, target: SlotTier, source: Block | Slot) -> Slot | None:
        """HBM to host or flash, or host to flash. None if there was no room or it is there already."""
        assert source.block_hash is not None
        if source.block_hash in target:
            return None
        run = self.hbm.run_of[source.block_id] if isinstance(source, Block) else self.host.run_of(source)
        block_hash, num_tokens = source.block_hash, source.block_hash_num_tokens or 0
        is_slot = not isinstance(source, Block)
        if is_slot:
            self.host.hold([source])
        slots = target.allocate(1)
        if slots:
            assert target.publish(slots[0], block_hash, num_tokens, run)
        if is_slot:
            self.host.release([source])
        return slots[0] if slots else None

    def run(self, reader: Reader | Path | None, content: Content, max_hit: int = MAX_BLOCKS) -> list[Block]:
        """A whole request, from arrival to end. Its blocks."""
        request = self.start(reader, content, max_hit)
        self.grow(request, len(content))
        self.finish(request)
        return request.blocks

    def members(self) -> Iterator[tuple[int, Block | Slot, Run]]:
        """Every block of every tier that is in a run."""
        everything: list[Sequence[Slot]] = [self.blocks, self.host.slots, self.flash.slots]
        for tier, (blocks, free_list) in enumerate(zip(everything, self.free_lists, strict=True)):
            for block in blocks:
                run = free_list.run_of[block.block_id]
                if run is not None:
                    yield tier, block, run
