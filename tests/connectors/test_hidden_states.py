# SPDX-License-Identifier: Apache-2.0
"""From the worker's buffer through its report to the scheduler side."""

import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from vllm_lifetime.connectors.lifetime.hidden_states import HiddenStateTap
from vllm_lifetime.connectors.lifetime.metadata import LifetimeWorkerMetadata


class Copy:
    """A copy from a device that ends when it is told to."""

    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_taken_once_as_float32(dtype: torch.dtype) -> None:
    """Whatever the model computes in: float32 holds all of it."""
    tap = HiddenStateTap()
    rows = torch.tensor([[1.5, -2.0], [0.25, 70000.0 if dtype != torch.float16 else 8.0]], dtype=dtype)
    tap.offer(["a", "b"], rows)
    taken = tap.take()
    assert list(taken) == ["a", "b"]
    for row, expected in zip(taken.values(), rows.float().numpy(), strict=True):
        assert row.dtype == np.float32
        assert np.array_equal(row, expected)
    assert tap.take() == {}


def test_a_copy_under_way_is_not_waited_for() -> None:
    """Nor overtaken: what comes after it waits, too."""
    tap = HiddenStateTap()
    copy = Copy()
    tap.offer(["a"], torch.ones(1, 2))
    tap._waiting[0] = (*tap._waiting[0][:2], copy)  # type: ignore[assignment]
    tap.offer(["b"], torch.zeros(1, 2))
    assert tap.take() == {}
    copy.is_done = True
    assert list(tap.take()) == ["a", "b"]


def test_rows_that_nobody_takes_are_bounded() -> None:
    """The oldest go first."""
    tap = HiddenStateTap(max_rows=3)
    for i in range(10):
        tap.offer([f"r{i}"], torch.ones(1, 2))
    tap.offer(["x", "y"], torch.ones(2, 2))
    assert list(tap.take()) == ["r9", "x", "y"]
    tap.offer(["z"], torch.ones(1, 2))
    assert list(tap.take()) == ["z"]


def test_two_ranks_reports_merge() -> None:
    """One rank sends; the others' reports have none, whichever comes first."""
    row = np.arange(3, dtype=np.float32)
    for reports in ([{"a": row}, {}], [{}, {"a": row}]):
        first, second = (LifetimeWorkerMetadata(step=1, hidden_states=dict(rows)) for rows in reports)
        assert np.array_equal(first.aggregate(second).hidden_states["a"], row)


def test_a_row_travels_alone() -> None:
    """Of a batch's rows only the one reported is pickled."""
    tap = HiddenStateTap()
    tap.offer([f"r{i}" for i in range(64)], torch.ones(64, 1024))
    row = tap.take()["r0"]
    assert len(pickle.dumps(LifetimeWorkerMetadata(hidden_states={"r0": row}))) < 2 * row.nbytes


def test_what_happens_to_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """On one rank only."""
    tap = HiddenStateTap()
    with caplog.at_level(logging.INFO, "vllm.lifetime"):
        tap.on_attached(False)
        assert caplog.messages == []
        tap.on_attached(True)
        tap.on_refused("a reason")
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "a reason. The predictor" in caplog.messages[1]


def test_a_worker_without_the_option_has_no_buffer_and_replaces_nothing(make_engine: Any) -> None:
    """Off by default."""
    from vllm.v1.worker import gpu_model_runner

    before = gpu_model_runner.GPUModelRunner.initialize_kv_cache
    engine = make_engine(16, {})
    worker = engine.worker._worker
    assert worker.hidden_states is None
    assert gpu_model_runner.GPUModelRunner.initialize_kv_cache is before
