# SPDX-License-Identifier: Apache-2.0
"""The data set `agent_trace` of `vllm bench serve`: single requests with the times and names of a trace.

In the process of that tool, before it sends anything. Imports no vLLM: its `SampleRequest` is handed in.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any, TypeVar

import httpx
import numpy as np

from vllm_lifetime.bench.boundaries import name_request
from vllm_lifetime.bench.driver import Pace
from vllm_lifetime.bench.open_loop import arrivals
from vllm_lifetime.bench.plan import make_plan
from vllm_lifetime.bench.tokens import VOCABULARY_SIZE
from vllm_lifetime.traces.read import TRACE_FORMATS, read_trace

__all__ = ["add_options", "read_samples"]

Sample = TypeVar("Sample")

_TOKENS = np.array(range(VOCABULARY_SIZE), dtype=object)
"""One object for each token id: all prompts are held at the same time."""

BACKENDS = ("vllm", "openai")
"""Those that send token ids to `/v1/completions`."""


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is below 0, or no number")
    return value


def _whole(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the data set's options to those of `vllm bench serve`."""
    group = parser.add_argument_group(
        "agent_trace dataset options", "A trace of agents (--dataset-path), each request sent when it came in the trace."
    )
    group.add_argument("--agent-trace-format", choices=sorted(TRACE_FORMATS), default="jsonl", help="Format of the trace.")
    group.add_argument("--agent-trace-sessions", type=_whole, default=None, help="Use the first so many sessions only.")
    group.add_argument(
        "--agent-trace-tokens-per-block",
        type=_whole,
        default=None,
        help="Tokens that a block becomes, to scale prompts and outputs; default: as in the trace.",
    )
    group.add_argument(
        "--agent-trace-time-scale", type=_not_negative, default=1.0, help="Times of the trace are multiplied by this."
    )
    group.add_argument(
        "--agent-trace-idle-cap-s", type=_not_negative, default=1800.0, help="Longer pauses of the trace are cut to this first."
    )
    group.add_argument(
        "--agent-trace-session-rate",
        type=_positive,
        default=1.0,
        help="Sessions per second that begin, where the trace does not say when.",
    )
    group.add_argument("--agent-trace-no-metadata", action="store_true", help="Requests do not say whose they are.")


def read_samples(args: argparse.Namespace, sample_request: Callable[..., Sample]) -> list[Sample]:
    """The first `--num-prompts` requests of the trace, with their times.

    Sets `args.ignore_eos` and `args.self_timed`, which the tool reads later.

    Raises:
        ValueError: an option that cannot be, or a trace that is not one.
        OSError: the trace cannot be read.

    """
    if args.dataset_path is None:
        raise ValueError("--dataset-name agent_trace needs a trace: give --dataset-path")
    if args.backend not in BACKENDS:
        raise ValueError(f"agent_trace sends token ids: --backend must be {' or '.join(BACKENDS)}, not {args.backend}")
    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts must be at least 1, not {args.num_prompts}")
    plan = make_plan(
        read_trace(args.dataset_path, args.agent_trace_format),
        tokens_per_block=args.agent_trace_tokens_per_block,
        num_sessions=args.agent_trace_sessions,
        seed=args.seed,
    )
    pace = Pace(time_scale=args.agent_trace_time_scale, idle_cap_s=args.agent_trace_idle_cap_s)
    timed = arrivals(plan, pace, args.agent_trace_session_rate)[: args.num_prompts]
    sent = [(each.session, each.request) for each in timed]
    plan.check_fits(_max_model_len(args), sent, option="--agent-trace-tokens-per-block")
    # The output's length is the trace's. A request rate that was asked for goes before the trace's times.
    args.ignore_eos = True
    args.self_timed = args.request_rate == float("inf")
    samples = []
    for number, each in enumerate(timed):
        name: dict[str, Any] | None = None
        if each.session.trace.names_session and not args.agent_trace_no_metadata:
            # Headers are the same for all requests of a run, so the session goes into the body.
            name = {"session_id": each.session.trace.session_id} | name_request(each.session, each.request)[1]
        samples.append(
            sample_request(
                prompt=_TOKENS[plan.prompt(each.session, each.request)].tolist(),
                prompt_len=each.request.prompt_tokens,
                expected_output_len=each.request.output_tokens,
                request_id=f"{args.request_id_prefix}{number}",
                timestamp=each.at_s,
                request_overrides=name,
            )
        )
    return samples


def _max_model_len(args: argparse.Namespace) -> int | None:
    """What the server says that it takes; None where it does not say. Whether it can be reached is for vLLM to find out."""
    key = os.environ.get("OPENAI_API_KEY")
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    try:
        answer = httpx.get(
            f"{base_url}/v1/models",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=not args.insecure,
            timeout=10.0,
        )
        cards = {card["id"]: card["max_model_len"] for card in reversed(answer.json()["data"])}
        name = args.served_model_name or args.model or answer.json()["data"][0]["id"]
        length = cards[name]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        return None
    return length if isinstance(length, int) else None
