# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve --dataset-name agent_trace`, up to what is sent; sending is in tests/e2e/test_e2e_bench.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from vllm_lifetime.bench import agent_trace
from vllm_lifetime.bench.agent_trace import add_options, read_samples
from vllm_lifetime.patches import bench_dataset
from vllm_lifetime.patches.versions import UnsupportedVllmError
from vllm_lifetime.traces.jsonl import write_jsonl
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession

serve: Any = pytest.importorskip("vllm.benchmarks.serve")

NOBODY = "http://127.0.0.1:9"
"""Nobody answers here."""


@pytest.fixture(autouse=True)
def stock_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from vLLM without our plugin, as `vllm bench serve`."""
    for name in ("add_dataset_parser", "get_samples"):
        function = getattr(serve, name)
        monkeypatch.setattr(serve, name, getattr(function, "__wrapped__", function))
    monkeypatch.setattr(sys, "argv", ["vllm", "bench", "serve"])
    yield


@pytest.fixture
def trace_path(tmp_path: Path) -> Path:
    """Two sessions of two requests; the second is unnamed."""

    def request(blocks: list[int], after: int) -> TraceRequest:
        return TraceRequest(np.array(blocks), after, 1.0, 1.0, 16 * len(blocks) + 4, 5, agent="coder", agent_id="coder-1")

    sessions = [
        TraceSession(f"s-{number}", (request([1, own], -1), request([1, own, own + 1], 0)), names_session=number == 0)
        for number, own in enumerate((10, 20))
    ]
    path = tmp_path / "trace.jsonl"
    write_jsonl(Trace("two sessions", 16, sessions), path)
    return path


def install() -> None:
    bench_dataset.install("agent_trace", add_options, read_samples)


def parse(*argv: str) -> Any:
    """Return what `vllm bench serve` makes of `argv`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    return parser.parse_args(["--base-url", NOBODY, *argv])


def samples(path: Path, *argv: str) -> tuple[list[Any], Any]:
    """The requests, and the arguments afterwards."""
    install()
    args = parse("--dataset-name", "agent_trace", "--dataset-path", str(path), *argv)
    return serve.get_samples(args, None), args


def test_requests_lose_their_times_or_their_names(trace_path: Path) -> None:
    found, args = samples(trace_path, "--agent-trace-session-rate", "2")
    assert args.ignore_eos is True and args.self_timed is True
    assert [each.timestamp for each in found] == [0.0, 0.5, 2.0, 2.5]
    assert [(each.prompt_len, len(each.prompt), each.expected_output_len) for each in found] == [
        (36, 36, 5),
        (36, 36, 5),
        (52, 52, 5),
        (52, 52, 5),
    ]
    assert found[0].prompt[:16] == found[1].prompt[:16] and found[0].prompt[16:32] != found[1].prompt[16:32]
    assert found[0].prompt[:32] == found[2].prompt[:32]
    lifetime = {"agent": "coder", "agent_id": "coder-1"}
    name = {"session_id": "s-0", "kv_transfer_params": {"lifetime": lifetime}}
    assert [each.request_overrides for each in found] == [name, None, name, None]
    assert [each.request_id for each in found] == [f"{args.request_id_prefix}{number}" for number in range(4)]


def test_options_are_ignored(trace_path: Path) -> None:
    found, args = samples(
        trace_path,
        *("--agent-trace-sessions", "1", "--agent-trace-tokens-per-block", "8", "--agent-trace-no-metadata"),
        *("--agent-trace-time-scale", "0.5", "--num-prompts", "1", "--seed", "3", "--request-rate", "4"),
    )
    assert [(each.prompt_len, each.request_overrides) for each in found] == [(18, None)]
    assert args.self_timed is False, "a request rate that was asked for is not used"
    other, _ = samples(trace_path, "--seed", "4", "--agent-trace-tokens-per-block", "8", "--num-prompts", "1")
    assert found[0].prompt != other[0].prompt


def test_a_request_that_is_not_sent_was_too_long(trace_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is sent has 36 tokens and 5 more; the two after it 52. The advice names this tool's option."""
    monkeypatch.setattr(agent_trace, "_max_model_len", lambda args: 45)
    found, _ = samples(trace_path, "--num-prompts", "2")
    assert len(found) == 2
    with pytest.raises(SystemExit, match="--agent-trace-tokens-per-block 12"):
        samples(trace_path)


def test_the_first_model_s_context_was_taken_for_the_one_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cards = {"data": [{"id": "other", "max_model_len": 100_000}, {"id": "mine", "max_model_len": 50}]}
    asked: list[str] = []

    def get(url: str, **more: Any) -> httpx.Response:
        asked.append(url)
        return httpx.Response(200, json=cards)

    monkeypatch.setattr(agent_trace.httpx, "get", get)
    install()
    assert agent_trace._max_model_len(parse("--base-url", "http://server/", "--model", "mine")) == 50
    assert agent_trace._max_model_len(parse("--model", "folder", "--served-model-name", "mine")) == 50
    assert agent_trace._max_model_len(parse()) == 100_000
    assert agent_trace._max_model_len(parse("--model", "unknown")) is None
    assert asked[0] == "http://server/v1/models"


def test_other_datasets_are_touched() -> None:
    install()
    install()
    assert serve.get_samples.__wrapped__.__module__.startswith("vllm.")
    args = parse("--dataset-name", "random", "--num-prompts", "2")
    with pytest.raises(AssertionError, match="Tokenizer"):  # vLLM's own answer
        serve.get_samples(args, None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--backend", "openai-chat"], "must be vllm or openai, not openai-chat"),
        (["--agent-trace-tokens-per-block", "1", "--agent-trace-format", "mooncake"], "mooncake|field|line"),
        (["--dataset-path", "/nowhere/trace.jsonl"], "/nowhere/trace.jsonl"),
    ],
)
def test_what_cannot_be_is_a_traceback(trace_path: Path, argv: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=f"vllm bench serve: error: .*({message})"):
        samples(trace_path, *argv)


def test_no_trace_is_a_traceback() -> None:
    install()
    with pytest.raises(SystemExit, match="give --dataset-path"):
        serve.get_samples(parse("--dataset-name", "agent_trace"), None)


@pytest.mark.parametrize(
    "option",
    ["--agent-trace-session-rate=0", "--agent-trace-time-scale=-1", "--agent-trace-sessions=0", "--agent-trace-idle-cap-s=nan"],
)
def test_a_number_without_meaning_is_taken(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    with pytest.raises(SystemExit):
        parse("--dataset-name", "agent_trace", option)
    assert option.partition("=")[0] in capsys.readouterr().err


def test_a_server_imports_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "bench"])
    install()
    assert not hasattr(serve.get_samples, "_lifetime")


def test_a_changed_function_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_samples(tokenizer: Any) -> list[Any]:
        return []

    monkeypatch.setattr(serve, "get_samples", get_samples)
    with pytest.raises(UnsupportedVllmError, match="get_samples"):
        install()
    assert serve.get_samples is get_samples
