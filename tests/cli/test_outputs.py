# SPDX-License-Identifier: Apache-2.0
"""No command writes over what it reads, or finds out after its work that it cannot write."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vllm_lifetime.cli import app
from vllm_lifetime.cli.outputs import check_outputs


@pytest.mark.parametrize(
    "command",
    [
        "analyze TRACE --format codex --json TRACE",
        "rank train TRACE --format claude-code --out TRACE",
        "rank evaluate TRACE --format claude-code --json TRACE",
        "bench TRACE --format jsonl --base-url http://127.0.0.1:9 --json TRACE",
        "replay TRACE --format jsonl --json TRACE",
        "replay TRACE --format jsonl --plot TRACE",
        "predict train TRACE --format mapcoder --out TRACE",
        "predict evaluate TRACE --format mapcoder --json TRACE",
    ],
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_trace_is_not_overwritten_by_what_is_made_of_it(tmp_path: Path, command: str, is_link: bool) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}\n")
    output = trace
    if is_link:
        output = tmp_path / "link.jsonl"
        output.symlink_to(trace)
    first, _, rest = command.partition("TRACE")
    arguments = [*first.split(), str(trace), *rest.replace("TRACE", str(output)).split()]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "is read by this command and would be overwritten" in result.output
    assert trace.read_text() == "{}\n"


def test_what_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no folder .* to write a.json to"):
        check_outputs([None, tmp_path / "no" / "a.json"])
    with pytest.raises(ValueError, match="is a folder; give the name of a file"):
        check_outputs([tmp_path])
    check_outputs([tmp_path / "new.json", None], [None, tmp_path / "missing"])


def test_one_file_for_two_outputs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "a.json")
    for other in ("a.json", "link"):
        with pytest.raises(ValueError, match="is named for two outputs, of which one would overwrite the other"):
            check_outputs([tmp_path / "a.json", tmp_path / other])
    check_outputs([tmp_path / "a.json", tmp_path / "b.json"])
    check_outputs([Path("/dev/null"), Path("/dev/null")])


def test_a_folder_that_takes_no_file_is_found_out_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.json").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name == "old.json")
    with pytest.raises(ValueError, match=r"new.json' cannot be written, since its folder takes no new file"):
        check_outputs([tmp_path / "new.json"])
    check_outputs([tmp_path / "old.json"])
