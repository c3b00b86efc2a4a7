# SPDX-License-Identifier: Apache-2.0
"""Adds a data set to `vllm bench serve`.

What: `add_dataset_parser` gets the name and its options, `get_samples` answers it; both as `vllm.benchmarks.serve` calls them.

Why: vLLM has no registry of data sets: the names are choices of one option, and the data sets branches of one function.

Where: in the process of `vllm bench` alone. Nothing is imported elsewhere.

Seams (vLLM 0.31 to 0.33): the two functions, `SampleRequest`, and that `ignore_eos` and `self_timed` are read from the arguments
after `get_samples`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm_lifetime.patches.versions import require

if TYPE_CHECKING:
    from vllm.benchmarks.datasets import SampleRequest

__all__ = ["OPTION", "install"]

OPTION = "--dataset-name"


def install(
    name: str,
    add_options: Callable[[argparse.ArgumentParser], None],
    read_samples: Callable[[argparse.Namespace, Callable[..., SampleRequest]], list[SampleRequest]],
) -> None:
    """Add the data set `name`, once per process, where this process is `vllm bench`.

    `read_samples` gets the arguments, which it may change, and vLLM's `SampleRequest`. A `ValueError` or `OSError` of its ends
    the program with that one sentence.

    Raises `UnsupportedVllmError` and changes nothing when vLLM does not look as expected.
    """
    if next((word for word in sys.argv[1:] if not word.startswith("-")), None) != "bench":
        return
    from vllm.benchmarks import serve

    if getattr(serve.get_samples, "_lifetime", False):
        return
    _check_seams(serve)
    add_dataset_parser, get_samples = serve.add_dataset_parser, serve.get_samples

    @wraps(add_dataset_parser)
    def add_dataset_parser_with_ours(parser: Any) -> None:
        add_dataset_parser(parser)
        action = parser._option_string_actions[OPTION]
        action.choices = [*(action.choices or ()), name]
        add_options(parser)

    @wraps(get_samples)
    def get_samples_with_ours(args: argparse.Namespace, *more: Any, **kwargs: Any) -> list[SampleRequest]:
        if args.dataset_name != name:
            return get_samples(args, *more, **kwargs)
        try:
            return read_samples(args, serve.SampleRequest)
        except (ValueError, OSError) as error:
            raise SystemExit(f"vllm bench serve: error: {error}") from None

    get_samples_with_ours._lifetime = True  # type: ignore[attr-defined]
    serve.add_dataset_parser = add_dataset_parser_with_ours
    serve.get_samples = get_samples_with_ours


def _check_seams(serve: Any) -> None:
    """Raise `UnsupportedVllmError` unless the module looks as this patch expects."""
    for name, parameters in (("add_dataset_parser", ["parser"]), ("get_samples", ["args", "tokenizer"])):
        function = getattr(serve, name, None)
        require(callable(function), f"vllm.benchmarks.serve has no {name}()")
        found = list(inspect.signature(function).parameters)  # type: ignore[arg-type]
        require(found[: len(parameters)] == parameters, f"{name}() has the parameters {', '.join(found)}")
    fields = {field.name for field in dataclasses.fields(serve.SampleRequest)}
    for name in ("prompt", "prompt_len", "expected_output_len", "request_id", "timestamp", "request_overrides"):
        require(name in fields, f"SampleRequest has no field {name}")
