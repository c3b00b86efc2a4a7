# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from vllm_lifetime.patches import block_pool_class
from vllm_lifetime.patches.versions import UnsupportedVllmError

coordinator: Any = pytest.importorskip("vllm.v1.core.kv_cache_coordinator")
BlockPool = coordinator.BlockPool


class OurPool(BlockPool):  # type: ignore[misc, valid-type]
    """A pool of ours."""


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    yield
    coordinator.BlockPool = BlockPool


def build_cache_manager() -> Any:
    """Return a real KV cache manager, which builds its pool as in the scheduler."""
    torch = pytest.importorskip("torch")
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(
        kv_cache_config=config,
        max_model_len=64,
        max_in_flight_tokens=64,
        scheduler_block_size=16,
        hash_block_size=16,
    )


def test_only_the_next_pool_is_ours() -> None:
    assert type(build_cache_manager().block_pool) is BlockPool
    block_pool_class.use_for_next_pool(OurPool)
    assert type(build_cache_manager().block_pool) is OurPool
    assert coordinator.BlockPool is BlockPool
    assert type(build_cache_manager().block_pool) is BlockPool


def test_disarming_takes_the_choice_back() -> None:
    block_pool_class.use_for_next_pool(OurPool)
    block_pool_class.disarm()
    assert coordinator.BlockPool is BlockPool
    block_pool_class.disarm()
    assert coordinator.BlockPool is BlockPool


def test_the_latest_choice_counts() -> None:
    class OtherPool(BlockPool):  # type: ignore[misc, valid-type]
        pass

    block_pool_class.use_for_next_pool(OtherPool)
    block_pool_class.use_for_next_pool(OurPool)
    assert type(build_cache_manager().block_pool) is OurPool
    assert coordinator.BlockPool is BlockPool


def test_a_pool_that_fails_to_build_does_not_stay_chosen() -> None:
    class BrokenPool(BlockPool):  # type: ignore[misc, valid-type]
        def __init__(self, **_: Any) -> None:
            raise RuntimeError("no memory")

    block_pool_class.use_for_next_pool(BrokenPool)
    with pytest.raises(RuntimeError, match="no memory"):
        build_cache_manager()
    assert coordinator.BlockPool is BlockPool


def test_a_class_that_is_no_block_pool_is_refused() -> None:
    with pytest.raises(TypeError, match="no subclass"):
        block_pool_class.use_for_next_pool(dict)  # type: ignore[arg-type]
    assert coordinator.BlockPool is BlockPool


def test_a_pool_of_another_plugin_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(BlockPool):  # type: ignore[misc, valid-type]
        pass

    monkeypatch.setattr(coordinator, "BlockPool", Foreign)
    with pytest.raises(UnsupportedVllmError, match="kv_cache_coordinator"):
        block_pool_class.use_for_next_pool(OurPool)
    block_pool_class.disarm()
    assert coordinator.BlockPool is Foreign


def test_a_coordinator_that_builds_its_pool_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator.KVCacheCoordinator, "__init__", lambda self: None)
    with pytest.raises(UnsupportedVllmError, match="builds no BlockPool"):
        block_pool_class.use_for_next_pool(OurPool)
    assert coordinator.BlockPool is BlockPool


def test_an_argument_that_is_gone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool_class, "POOL_ARGUMENTS", ("num_gpu_blocks", "gone"))
    with pytest.raises(UnsupportedVllmError, match="no argument gone"):
        block_pool_class.use_for_next_pool(OurPool)
    assert coordinator.BlockPool is BlockPool
