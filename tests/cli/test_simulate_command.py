# SPDX-License-Identifier: Apache-2.0
import json
from importlib import resources

import pytest
import typer
from typer.testing import CliRunner

from vllm_lifetime.cli import simulate

app = typer.Typer()
simulate.add_to(app)


@app.command()
def other() -> None:
    """Without a second command, typer would make the group the program."""


def run(*arguments: str):
    return CliRunner().invoke(app, ["simulate", "hbf", *arguments])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--policy", "lifo"), "unknown placement 'lifo'"),
        (("--config", "9/9"), "has no configuration '9/9'"),
        (("--model", "gpt"), "unknown model 'gpt'"),
        (("--slo", "fast"), "an SLO is tight or loose, or a number of milliseconds above 0"),
        (("--trace", "webshop"), "unknown trace 'webshop'"),
        (("--device", "none.toml"), "cannot read 'none.toml'"),
        (("--growth", "0"), "growth must be a number above 0"),
        (("--policy", ","), "got none"),
    ],
)
def test_what_cannot_be_simulated_is_said_in_a_sentence(tmp_path, arguments, sentence):
    result = run("--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert result.output.count("\n") == 1


def test_one_cell_of_a_device_of_ones_own_gives_rows_checks_and_plots(tmp_path):
    """The package's device with small stacks, so that its pool is full soon."""
    text = (resources.files("vllm_lifetime.simulate.hbf") / "data" / "rubin_hbf.toml").read_text("utf-8")
    device = tmp_path / "small.toml"
    device.write_text(text.replace("value = 512", "value = 40").replace("value = 36,", "value = 6,"))
    out = tmp_path / "new"
    chosen = {"config": "2/6", "model": "qwen3-235b-a22b", "trace": "bfcl", "policy": "hbm_first,lachesis", "slo": "15"}
    result = run(
        "--out", str(out), "--device", str(device), *(part for name, value in chosen.items() for part in (f"--{name}", value))
    )
    assert result.exit_code == 0, result.output
    rows = json.loads((out / "results.json").read_text())
    assert [row["policy"] for row in rows] == ["hbm_first", "lachesis"]
    first, lachesis = rows
    assert lachesis["lifetime_years"] > first["lifetime_years"] > 0
    assert first["sessions"] == lachesis["sessions"]
    assert all(row["tpot_p99_s"] < 0.02 and row["is_settled"] for row in rows)
    for row in rows:
        assert sum(share for tiers in row["write_share"].values() for share in tiers.values()) == pytest.approx(1.0)
    checks = json.loads((out / "checks.json").read_text())
    assert {"id", "what", "target", "value", "pass"} == set(checks[0])
    assert json.loads((out / "calibration.json").read_text())
    assert {path.name for path in out.iterdir()} >= {"lifetimes.png", "writes-0.png"}
    assert "lachesis" in result.output
