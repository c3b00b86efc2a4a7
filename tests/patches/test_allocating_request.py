# SPDX-License-Identifier: Apache-2.0
"""Whose blocks are being taken."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_lifetime.patches import allocating_request
from vllm_lifetime.patches.versions import UnsupportedVllmError


class Log:
    """Whom it was told of, and what was asked of the manager."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def begin_request(self, request: Any) -> None:
        self.calls.append(("begin", request))

    def end_request(self) -> None:
        self.calls.append("end")


class Manager:
    """Stands for `KVCacheManager`."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def allocate_slots(self, request: Any, num_new_tokens: int, *, fails: bool = False) -> int:
        self.log.calls.append(("allocate", num_new_tokens))
        if fails:
            raise ValueError("no blocks")
        return num_new_tokens + 1


def test_listener_is_told_around_each_call() -> None:
    """Also when it fails; other managers are left alone."""
    log = Log()
    manager, other = Manager(log), Manager(log)
    allocating_request.tell(manager, log)  # type: ignore[arg-type]
    assert manager.allocate_slots("a", 3) == 4
    with pytest.raises(ValueError, match="no blocks"):
        manager.allocate_slots("b", 5, fails=True)
    assert log.calls == [("begin", "a"), ("allocate", 3), "end", ("begin", "b"), ("allocate", 5), "end"]
    log.calls.clear()
    other.allocate_slots("c", 1)
    assert log.calls == [("allocate", 1)]


def test_vllm_has_the_seam() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    manager = object.__new__(KVCacheManager)
    allocating_request.tell(manager, Log())
    assert "allocate_slots" in vars(manager)


@pytest.mark.parametrize("attributes", [{}, {"allocate_slots": lambda tokens: tokens}])
def test_vllm_without_the_seam(attributes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedVllmError, match="allocate_slots"):
        allocating_request.tell(SimpleNamespace(**attributes), Log())  # type: ignore[arg-type]
