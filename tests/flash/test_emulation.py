# SPDX-License-Identifier: Apache-2.0
"""The emulated device's time, against sums done by hand and over many steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_lifetime.flash.emulation import FlashEmulation, FlashTiming


def test_nothing_is_emulated_by_default() -> None:
    timing = FlashTiming()
    assert not timing.is_on
    emulation = FlashEmulation(timing)
    assert emulation.step(1000, 5000, 10**9) == 0.0
    assert emulation.pages_read == 2000


def test_read_takes_whole_pages_and_its_latency_once() -> None:
    emulation = FlashEmulation(FlashTiming(read_bytes_per_s=1e6, read_latency_s=0.25, page_bytes=4096))
    assert emulation.step(3, 4097, 0) == pytest.approx(0.25 + 6 * 4096 / 1e6)
    assert emulation.step(0, 4097, 10) == 0.0


@given(st.lists(st.integers(0, 20_000), max_size=30))
def test_small_writes_cost_what_one_large_write_costs(sizes: list[int]) -> None:
    """A page is programmed when it is full, however it was filled."""
    timing = FlashTiming(write_bytes_per_s=1e6, page_bytes=4096)
    emulation = FlashEmulation(timing)
    total_s = sum(emulation.step(0, 0, size) for size in sizes)
    assert total_s == pytest.approx(FlashEmulation(timing).step(0, 0, sum(sizes)))
    assert emulation.pages_programmed == sum(sizes) // 4096


@pytest.mark.parametrize(
    "bad", [{"read_bytes_per_s": -1}, {"write_bytes_per_s": float("inf")}, {"read_latency_s": 2}, {"page_bytes": 0}, {"x": 1}]
)
def test_device_that_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        FlashTiming.model_validate(bad)
