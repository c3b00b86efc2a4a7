# SPDX-License-Identifier: Apache-2.0
"""The comparison without its servers: equal bytes, equal work, honest figures, and a table for whatever has become of a run."""

import contextlib
import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.comparison import __main__ as main
from benchmarks.comparison.figures import check, estimate, figures_of, ratio_to, targets
from benchmarks.comparison.measure import Result, bytes_written, measure, short_error, warm_up_plan
from benchmarks.comparison.overhead import overhead_table, read_steps, summarize_steps
from benchmarks.comparison.regimes import REGIMES, Work, hostile, uniform_reuse, work_of
from benchmarks.comparison.settings import Budget, ServerSettings
from benchmarks.comparison.systems import STAGING_BLOCKS, SYSTEMS, Site, System
from benchmarks.comparison.tables import markdown, summary
from benchmarks.server import ServerError, VllmServer, kv_block_bytes

BLOCK_BYTES = 1024


def result(system: str, repeat: int = 0, hit_rate: float = 0.3, latency_s: float = 10.0, **more: Any) -> Result:
    """A run of two requests."""
    summary = {
        "hit_rate": hit_rate,
        "workflow_latency_mean_s": latency_s,
        "workflow_latency_p50_s": latency_s,
        "workflow_latency_p99_s": latency_s,
        "ttft_mean_s": latency_s / 10,
        "ttft_p99_s": latency_s / 10,
        "tpot_mean_s": 0.01,
        "prompt_tokens_per_s": 1000 / latency_s,
        "disk_bytes_written": 0,
    }
    requests = {"a/0": [100, 30, 5, "abc", 0.1, 0.2], "a/1": [120, 30, 5, "def", 0.1, 0.2]}
    return Result(system, repeat, summary=summary, requests=requests, workflow_latency_s=[latency_s], **more)


# -- equal bytes ------------------------------------------------------------------------------------


@given(st.integers(64, 100_000), st.floats(0.02, 4), st.floats(0.02, 4))
def test_every_system_gets_the_same_bytes(blocks: int, host: float, disk: float) -> None:
    budget = Budget(blocks, BLOCK_BYTES, host, disk)
    assert abs(budget.host_bytes / budget.hbm_bytes - host) <= 0.5 / blocks + 1e-9
    assert abs(budget.disk_bytes / budget.hbm_bytes - disk) <= 0.5 / blocks + 1e-9


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of servers that would be started."""
    found: list[list[str]] = []

    def start(self: VllmServer) -> None:
        found.append(self.command())

    monkeypatch.setattr(VllmServer, "start", start)
    monkeypatch.setattr(VllmServer, "pid", 1)
    return found


@pytest.mark.parametrize("name", ["vllm", "offloading", "lru", "lifecycle", "hierarchical", "lifetime"])
def test_systems_are_started_alike(name: str, tmp_path: Path, commands: list[list[str]]) -> None:
    """The same options of the server, and what a connector takes of host memory and disk is what the budget says."""
    budget = Budget(800, BLOCK_BYTES, 0.125, 0.25)
    site = Site(tmp_path / "model", tmp_path, ServerSettings(), budget, "run")
    with SYSTEMS[name].start(site):
        assert (name == "vllm") or site.disk.is_dir()
    assert not site.disk.exists()
    [command] = commands
    common = ServerSettings().arguments(800)
    assert any(command[at : at + len(common)] == common for at in range(len(command)))
    if name == "vllm":
        assert "--kv-transfer-config" not in command
        return
    spec = json.loads(command[command.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    if name == "offloading":
        assert spec["cpu_bytes_to_use"] == budget.host_bytes
    else:
        assert spec["eviction_policy"] == name
        assert spec["host_bytes"] + spec["flash_staging_bytes"] == budget.host_bytes
        assert spec["flash_staging_bytes"] == STAGING_BLOCKS * BLOCK_BYTES
        assert spec["flash_bytes"] == budget.disk_bytes


def test_the_bytes_of_a_block_are_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 64}))
    assert kv_block_bytes(tmp_path, 32, "float32") == 32 * 3 * 2 * 64 * 2 * 4


def test_what_processes_write_is_counted(tmp_path: Path) -> None:
    """Of a process group that does not exist: nothing; of the own one: no less than before."""
    assert bytes_written([2**22 + 1]) == 0
    before = bytes_written([os.getpgrp()])
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
    written = bytes_written([os.getpgrp()]) - before
    assert written >= 1 << 20 or Path("/proc/self/mountinfo").read_text().count("tmpfs /tmp ")


# -- equal work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in REGIMES if name != "real"])
def test_the_work_of_a_regime_is_the_same_again(name: str) -> None:
    first, again = (work_of(REGIMES[name], workflows=3, seed=7, path=None, format="jsonl") for _ in range(2))
    assert first.plan.num_requests == again.plan.num_requests > 20
    one, other = first.plan.sessions[1], again.plan.sessions[1]
    assert (first.plan.prompt(one, one.requests[-1]) == again.plan.prompt(other, other.requests[-1])).all()
    assert first.working_set_tokens > 0
    first.plan.check_fits(ServerSettings().max_model_len)
    assert main._fewest_blocks(first, ServerSettings()) * 32 > 2 * first.plan.sessions[1].requests[-1].prompt_tokens


@pytest.mark.parametrize("name", [name for name in REGIMES if name != "real"])
def test_a_warm_up_longer_than_the_context_was_refused(name: str) -> None:
    """The context is as long as the work and the warm-up need, and HBM has room for it."""
    work = work_of(REGIMES[name], workflows=3, seed=0, path=None, format="jsonl")
    settings = main._settings_for(work, ServerSettings())
    work.plan.check_fits(settings.max_model_len)
    warm_up_plan(work).check_fits(settings.max_model_len)
    assert settings.max_model_len < ServerSettings().max_model_len and settings.max_model_len % settings.block_size_tokens == 0


def test_a_system_that_starts_but_takes_no_work_named_its_log(tmp_path: Path, commands: list[list[str]]) -> None:
    """The first line of a long log stood in the place of the reason."""
    work = work_of(REGIMES["uniform"], workflows=2, seed=0, path=None, format="jsonl")
    site = Site(tmp_path / "model", tmp_path, ServerSettings(), Budget(100, BLOCK_BYTES, 0.125, 0.25), "run")
    found = measure(SYSTEMS["vllm"], site, work, 0)  # nobody listens there
    assert found.error is not None and "http://" in found.error and commands


def test_nothing_measured_is_doubtful() -> None:
    assert check([], "vllm") == ["nothing was measured"]
    assert check([result("vllm", error="it broke")], "vllm")[-1] == "nothing was measured"


def test_hostile_work_is_the_same_requests_with_other_words() -> None:
    trace = uniform_reuse(2, 0)
    lied = hostile(trace, 0)
    for session, other in zip(trace.sessions, lied.sessions, strict=True):
        for request, lie in zip(session.requests, other.requests, strict=True):
            assert (request.blocks == lie.blocks).all() and request.output_tokens == lie.output_tokens
            assert lie.compacts and lie.ends_turn


def test_real_sessions_need_a_path() -> None:
    with pytest.raises(ValueError, match="--trace"):
        work_of(REGIMES["real"], workflows=3, seed=0, path=None, format="kv-cache-tester")


def test_equal_work_passes_the_check() -> None:
    assert check([result("vllm"), result("lifetime", hit_rate=0.6)], "vllm") == []


def test_other_tokens_fail_the_check() -> None:
    other = result("lifetime")
    other.requests["a/1"][3] = "xyz"
    assert check([result("vllm"), other], "vllm") == [
        "lifetime, repeat 1: the generated tokens of 1 of 2 requests differ from those of vllm"
    ]


def test_a_request_less_fails_the_check() -> None:
    other = result("lifetime")
    del other.requests["a/1"]
    assert "1 requests were sent to one of it and vllm only" in check([result("vllm"), other], "vllm")[0]
    shorter = result("lifetime")
    shorter.requests["a/1"][2] = 4
    assert "1 requests have other numbers of tokens" in check([result("vllm"), shorter], "vllm")[0]


def test_tokens_were_called_compared_without_stock_to_compare_with() -> None:
    told = check([result("lifetime", 0), result("lru", 1), result("vllm", 2), result("lifetime", 2)], "vllm")
    assert told == ["vllm has no figures of repeat 1, 2: the others' prompts and tokens were not compared with it there"]


def test_hit_rates_that_disagree_are_told() -> None:
    doubtful = result("lifetime", problems=["The hit rate of the answers is 3 %"])
    assert check([result("vllm"), doubtful], "vllm") == ["lifetime, repeat 1: The hit rate of the answers is 3 %"]


# -- figures ----------------------------------------------------------------------------------------


def test_the_interval_is_students() -> None:
    """Three values 1, 2, 3: the half width is 4.303 x 1 / sqrt(3)."""
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None and found.mean == 2.0
    assert found.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-4)
    single = estimate([5.0])
    assert single is not None and single.low is None
    assert estimate([]) is None


def test_the_ratio_is_paired_by_repeat() -> None:
    """A machine that is slower in the second repeat is slower for both: the ratio is exact, though each one's figures spread."""
    runs = [result("vllm", 0, latency_s=10), result("lifetime", 0, latency_s=5)]
    runs += [result("lifetime", 1, latency_s=50), result("vllm", 1, latency_s=100)]
    ratio = ratio_to(runs, "lifetime", "vllm", "workflow_latency_mean_s")
    assert ratio is not None
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx((0.5, 0.5, 0.5))
    assert ratio_to(runs, "lru", "vllm", "hit_rate") is None


def test_a_failed_run_has_no_figures() -> None:
    runs = [result("vllm"), result("lifetime", error="it broke"), result("vllm", 1), result("lifetime", 1, hit_rate=0.8)]
    found = figures_of(runs)["lifetime"]["hit_rate"]
    assert found is not None and (found.mean, found.repeats) == (0.8, 1)
    assert check(runs, "vllm") == ["lifetime, repeat 1: it broke"]


def test_targets_are_met_or_not() -> None:
    runs = [result("vllm", hit_rate=0.3, latency_s=10), result("lifetime", hit_rate=0.6, latency_s=9)]
    met = [target["met"] for target in targets(runs, REGIMES["dynamic"], "vllm", "lifetime")]
    assert met == [True, True, False, None, None]
    told = targets(runs, REGIMES["real"], "vllm", "lifetime")
    assert [target["target"] for target in told] == ["hit rate above LMCache", "mean workflow latency of LMCache above ours"]
    runs = [result("vllm", latency_s=10), result("lifetime", latency_s=10.2)]
    assert [target["met"] for target in targets(runs, REGIMES["fits"], "vllm", "lifetime")] == [True, True]
    runs = [result("vllm", latency_s=10), result("lifetime", latency_s=10.5)]
    assert [target["met"] for target in targets(runs, REGIMES["fits"], "vllm", "lifetime")] == [False, False]


@pytest.mark.parametrize(
    ("low", "high", "shown"), [(0.9, 1.1, "yes, within the noise"), (0.98, 1.1, "yes |"), (None, None, "yes |")]
)
def test_a_target_within_the_noise_was_called_met(low: float | None, high: float | None, shown: str) -> None:
    made = report([result("vllm"), result("lifetime")], {})
    ratio = {"mean": 1.0, "low": low, "high": high, "repeats": 3}
    made["targets"] = [{"target": "throughput", "least": 0.97, "ratio": ratio, "met": True}]
    assert shown in markdown(made)


def test_the_cause_of_an_error_was_not_told() -> None:
    """vLLM's log ends with an error that refers to the cause above; a warning may name an error that did not happen."""
    log = (
        "WARNING 11-30 [utils.py:255] This can cause errors like `OSError: too many`\n(EngineCore) ERROR [core.py:15]   raise\n"
        "(EngineCore pid=7) ERROR [core.py:1510] RuntimeError: only on CUDA\nRuntimeError: Engine core initialization failed."
    )
    assert short_error(log) == "RuntimeError: only on CUDA"
    assert short_error("no such thing\nmore") == "no such thing"
    assert short_error("") == "unknown"


# -- table ------------------------------------------------------------------------------------------


def report(runs: list[Result], missing: dict[str, str]) -> dict[str, Any]:
    """As the command writes it."""
    names = [*dict.fromkeys(run.system for run in runs), *missing]
    figures = {name: {k: v.as_json() if v else None for k, v in row.items()} for name, row in figures_of(runs).items()}
    ratio = ratio_to(runs, "lifetime", "vllm", "hit_rate")
    return {
        "title": "Dynamic", "base_title": "vLLM", "seed": 0, "repeats": 2,
        "systems": {name: SYSTEMS[name].title for name in names}, "missing": missing,
        "budget": {"hbm_bytes": 1 << 24, "hbm_blocks": 100, "host_bytes": 1 << 21, "disk_bytes": 1 << 21},
        "workload": {"sessions": 2, "concurrency": 2, "requests": 4, "prompt_tokens": 440, "output_tokens": 20},
        "figures": figures, "ratios": {"lifetime": {"hit_rate": ratio.as_json() if ratio else None}},
        "targets": targets(runs, REGIMES["dynamic"], "vllm", "lifetime"), "checks": check(runs, "vllm"),
        "versions": {"vllm": "0.32"}, "machine": {"cpus": 2, "processor": "x86_64", "system": "Linux"},
    }  # fmt: skip


def test_the_table_has_a_line_for_each_system() -> None:
    runs = [result(name, repeat, rate) for repeat in range(2) for name, rate in (("vllm", 0.3), ("lifetime", 0.6))]
    text = markdown(json.loads(json.dumps(report(runs, {"offloading": "ValueError: only on | CUDA"}))))
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert "30.0 ± 0.0 %" in rows["| vLLM"]
    assert "`ValueError: only on \\| CUDA`" in rows["| vLLM's offloading"]
    assert "| ours, `lifetime` | 2.00 x (2.00 - 2.00) | - | - |" in text
    assert "Checked: the same prompts" in text
    columns = {
        line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith(("| vLLM", "| system | token"))
    }
    assert len(columns) == 1


def test_the_summary_has_a_line_for_what_ran() -> None:
    runs = [result(name, 0, rate) for name, rate in (("vllm", 0.3), ("lifetime", 0.6))]
    lines = summary(json.loads(json.dumps(report(runs, {"offloading": "ValueError"})))).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| vLLM", "| ours, `lifetime`"]
    assert len({line.count("|") for line in lines}) == 1
    assert "60.0 %" in lines[3] and "2.00 x" in lines[3]


# -- overhead ---------------------------------------------------------------------------------------


def test_steps_are_read_and_added_up(tmp_path: Path) -> None:
    """Steps without tokens are those of an idle engine; a line that is cut is not yet written."""
    path = tmp_path / "times.txt"
    path.write_text("1.5 1000000 10 2\n2.5 3000000 4 4\n3.5 9000000 0 0\n4.5 12")
    steps = read_steps(path)
    assert [step.at_s for step in steps] == [1.5, 2.5]
    found = summarize_steps(steps, num_requests=8)
    assert (found["steps"], found["requests_mean"], found["cpu_mean_ms"]) == (2, 3.0, 2.0)
    rows = [{"system": "vllm", "concurrency": 1} | found, {"system": "lifetime", "concurrency": 1} | found]
    assert found["cpu_per_request_ms"] == 0.5 and summarize_steps([], 8) == {"steps": 0}
    rows[1]["cpu_mean_ms"] = 2.5
    assert "+0.500 ms" in overhead_table([*rows, {"system": "lifetime", "concurrency": 16, "steps": 0}])


# -- the command ------------------------------------------------------------------------------------


def test_each_repeat_begins_with_another_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does not start is tried once and told; what was measured is written: figures, table, plot and single runs."""
    order: list[tuple[str, int]] = []

    def fake(system: System, site: Site, work: Work, repeat: int) -> Result:
        order.append((system.name, repeat))
        if system.name == "offloading":
            return Result(system.name, repeat, error="ValueError: only on CUDA")
        return result(system.name, repeat, 0.3 if system.name == "vllm" else 0.6)

    monkeypatch.setattr(main, "measure", fake)
    work = work_of(REGIMES["uniform"], workflows=2, seed=0, path=None, format="jsonl")
    names = ["vllm", "offloading", "lifetime"]
    budget = Budget(100, BLOCK_BYTES, 0.125, 0.25)
    comparison = main.Comparison(REGIMES["dynamic"], work, ServerSettings(), budget, names, 0, tmp_path, tmp_path)
    comparison.run(3)
    assert order == [
        *(("vllm", 0), ("offloading", 0), ("lifetime", 0)),
        *(("lifetime", 1), ("vllm", 1)),
        *(("lifetime", 2), ("vllm", 2)),
    ]
    assert comparison.write() is False
    assert len(json.loads((tmp_path / "dynamic-runs.json").read_text())) == 6
    assert (tmp_path / "dynamic.png").stat().st_size > 10_000
    assert "does not run here: `ValueError: only on CUDA`" in (tmp_path / "dynamic.md").read_text()
    told = CliRunner().invoke(main.app, ["table", str(tmp_path)])
    assert told.exit_code == 0 and told.output.strip() == (tmp_path / "dynamic.md").read_text().strip()


def test_a_system_that_failed_in_a_later_repeat_was_left_out_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it measured before stays, and the failure is told; of one of ours that never ran, too."""

    def fake(system: System, site: Site, work: Work, repeat: int) -> Result:
        if system.name == "lru" or (system.name == "lifetime" and repeat == 1):
            return Result(system.name, repeat, error="it did not start")
        return result(system.name, repeat)

    monkeypatch.setattr(main, "measure", fake)
    work = work_of(REGIMES["uniform"], workflows=2, seed=0, path=None, format="jsonl")
    budget = Budget(100, BLOCK_BYTES, 0.125, 0.25)
    names = ["vllm", "lru", "lifetime"]
    comparison = main.Comparison(REGIMES["fits"], work, ServerSettings(), budget, names, 0, tmp_path, tmp_path)
    comparison.run(3)
    assert comparison.write() is True
    made = json.loads((tmp_path / "fits.json").read_text())
    assert made["checks"] == ["lru does not run here: it did not start", "lifetime, repeat 2: it did not start"]
    assert made["ratios"]["lifetime"]["hit_rate"]["repeats"] == 2 and made["missing"] == {"lru": "it did not start"}


def test_a_recording_with_small_blocks_was_too_long_for_every_system(tmp_path: Path) -> None:
    """Blocks of 16 tokens become 3, as others do: sessions that are then too long for the test model are not drawn."""
    lines: list[dict[str, Any]] = [{"format": "vllm-lifetime-trace", "version": 1, "name": "small", "block_size_tokens": 16}]
    for session, tokens in enumerate((1600, 56_000)):
        name = {"session_id": f"s{session}"}
        request = {"blocks": [[session * 10_000, tokens // 16]], "input_tokens": tokens, "output_tokens": 8, "service_s": 1.0}
        lines += [name | {"names_session": True}, *(name | request | {"after": n - 1, "gap_s": 0.0} for n in range(8))]
    path = tmp_path / "recording.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    work = work_of(REGIMES["real"], workflows=9, seed=0, path=path, format="jsonl")
    assert [session.trace.session_id for session in work.plan.sessions] == ["s0"] and work.pace.concurrency == 1
    work.plan.check_fits(ServerSettings.max_model_len)


def test_an_early_interrupt_overwrote_earlier_results(tmp_path: Path) -> None:
    work = work_of(REGIMES["uniform"], workflows=2, seed=0, path=None, format="jsonl")
    (tmp_path / "fits.json").write_text("from before")
    budget = Budget(100, BLOCK_BYTES, 0.125, 0.25)
    comparison = main.Comparison(REGIMES["fits"], work, ServerSettings(), budget, ["vllm"], 0, tmp_path, tmp_path)
    assert comparison.write() is True
    assert [path.name for path in tmp_path.iterdir()] == ["fits.json"] and (tmp_path / "fits.json").read_text() == "from before"


@pytest.mark.parametrize("text", ["[]", "{", '{"workload": 3}'])
def test_a_foreign_file_was_a_traceback(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.json").write_text("{}")
    told = CliRunner().invoke(main.app, ["table", str(tmp_path)])
    assert told.exit_code == 2 and "has no results" in told.output
    (tmp_path / "fits.json").write_text(text)
    told = CliRunner().invoke(main.app, ["table", str(tmp_path)])
    assert told.exit_code == 2 and "is no result of a comparison" in told.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--capacity", "inf"],
        ["run", "--host-share", "inf"],
        ["run", "--seed", "-1"],
        ["run", "--model-hidden", "65"],
        ["overhead", "--concurrency", "1,,3"],
        ["overhead", "--concurrency", "0"],
    ],
)
def test_a_number_without_meaning_was_a_traceback(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(main.app, arguments)
    assert told.exit_code == 2 and "Traceback" not in told.output and isinstance(told.exception, SystemExit)


def test_systems_take_turns_without_being_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is started once, in a folder of its own, and ended; one that does not start is left out. No turn repeats a prompt."""
    up: list[str] = []
    folders: set[Path] = set()
    turns: list[tuple[str, int, str]] = []
    prompts: set[bytes] = set()

    @contextlib.contextmanager
    def start(system: System, site: Site, work: Work) -> Iterator[Any]:
        if system.name == "offloading":
            raise ServerError("ValueError: only on CUDA")
        up.append(system.name)
        folders.add(site.disk)
        yield system.name
        up.remove(system.name)

    def turn(name: str, running: Any, work: Work, repeat: int) -> Result:
        assert running == name and up == ["vllm", "lifetime"]
        first = work.plan.sessions[0]
        turns.append((name, repeat, first.trace.session_id))
        prompts.add(work.plan.prompt(first, first.requests[0]).tobytes())
        return result(name, repeat, 0.3 if name == "vllm" else 0.6)

    monkeypatch.setattr(main, "started", start)
    monkeypatch.setattr(main, "measure_running", turn)
    work = work_of(REGIMES["uniform"], workflows=2, seed=0, path=None, format="jsonl")
    budget = Budget(100, BLOCK_BYTES, 0.125, 0.25)
    names = ["vllm", "offloading", "lifetime"]
    comparison = main.Comparison(REGIMES["fits"], work, ServerSettings(), budget, names, 0, tmp_path, tmp_path, in_turns=True)
    comparison.run(3)
    assert not up and len(folders) == 2 and len(prompts) == 3
    assert [(name, repeat) for name, repeat, _ in turns] == [
        *(("vllm", 0), ("lifetime", 0)),
        *(("lifetime", 1), ("vllm", 1)),
        *(("lifetime", 2), ("vllm", 2)),
    ]
    assert {session_id for _, _, session_id in turns} == {f"uniform-0-{turn}" for turn in range(3)}
    assert comparison.write() is False
    text = (tmp_path / "fits.md").read_text()
    assert "3, taking turns" in text and "does not run here: `ValueError: only on CUDA`" in text


def test_what_cannot_be_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    for arguments, message in ((["--regime", "none"], "there is no regime 'none'"), (["--regime", "real"], "needs --trace")):
        told = CliRunner().invoke(main.app, ["run", "--out", str(tmp_path), *arguments])
        assert told.exit_code == 2 and message in told.output
    assert CliRunner().invoke(main.app, ["table", str(tmp_path)]).exit_code == 2
