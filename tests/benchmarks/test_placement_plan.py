# SPDX-License-Identifier: Apache-2.0
"""Sizes of the servers, and the rank they start with, in the comparison of placement policies."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import placement
from benchmarks.placement_plan import Plan, Settings, kendall_taus, make_plan, train_rank
from benchmarks.placement_workload import WorkloadConfig, mean_live_blocks
from vllm_lifetime.flash import FlashGeometry
from vllm_lifetime.flash.mapped import mapped_slots

CONFIG = WorkloadConfig(sessions=18, concurrency=6)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(CONFIG, 2, Settings())


def test_memories_follow_from_what_is_alive(plan: Plan) -> None:
    live = [mean_live_blocks(workload, 32) for workload in plan.workloads]
    short_lived = sum(one["reasoning"] + one["worker"] + one["reviewer"] for one in live) / 2
    assert plan.short_lived_blocks == pytest.approx(short_lived)
    assert plan.flash_blocks == round(8 * short_lived)
    assert plan.hbm_blocks(0.5) == round(0.5 * short_lived)
    assert [workload.config.seed for workload in plan.workloads] == [0, 1]
    assert plan.num_rounds == len(plan.warm_up.rounds) + sum(len(workload.rounds) for workload in plan.workloads)


def test_warm_up_shares_no_session_with_the_seeds(plan: Plan) -> None:
    sessions = [{r.agent.session_id for one in w.rounds for r in one.requests} for w in (plan.warm_up, *plan.workloads)]
    assert [len(found) for found in sessions] == [12, 18, 18]
    assert len(set().union(*sessions)) == 48


def test_warm_up_that_leaves_blocks_unwritten_is_refused() -> None:
    with pytest.raises(ValueError, match="the warm-up writes"):
        make_plan(CONFIG, 1, Settings(flash_times=100.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sessions", "3"], "3 sessions are fewer than the 36 at a time"),
        (["--shares", "0.5,x"], "numbers, with commas between them"),
        (["--shares", "0"], "above 0"),
    ],
)
def test_arguments_that_make_no_sense_start_no_server(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "run_cells", lambda *_: pytest.fail("servers were started"))
    app = typer.Typer()
    app.command()(placement.main)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments, "--json", str(tmp_path / "out" / "placement.json")])
    assert result.exit_code == 2
    assert message in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("num_blocks", [1, 63, 64, 65, 3369])
def test_flash_file_holds_exactly_the_blocks(num_blocks: int) -> None:
    settings = Settings()
    geometry = FlashGeometry(
        model="m",
        dtype="float32",
        block_size_tokens=settings.block_size,
        num_layers=settings.model_layers,
        slot_bytes=settings.block_bytes,
        hash_algorithm="none",
        hash_seed="none",
    )
    assert mapped_slots(geometry, settings.flash_bytes(num_blocks)) == num_blocks


def test_trained_rank_orders_nearly_as_well_as_the_spawns_show(plan: Plan, tmp_path: Path) -> None:
    train_rank(tmp_path / "rank.npz", CONFIG.tau)
    taus = kendall_taus(plan, tmp_path / "rank.npz")
    for shown, rank in zip(taus["shown"], taus["rank"], strict=True):
        assert 0.35 < shown < 0.7
        assert shown - 0.12 < rank < 0.7
