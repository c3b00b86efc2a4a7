# SPDX-License-Identifier: Apache-2.0
"""Adds `--kv-connector NAME` to vLLM, and makes a failed load recompute for our connector.

What: `EngineArgs.add_cli_args` gets one more option; `EngineArgs.from_cli_args` merges it into
`kv_transfer_config`; `EngineArgs.create_engine_config`, which every way of starting an engine goes
through (`vllm serve`, `LLM(...)`, headless), sets `kv_load_failure_policy="recompute"` for the safe
connector.

Why: a connector needs a JSON option with a role today, and vLLM's default policy, `fail`, answers a
request with HTTP 500 when a load fails although its tokens could be recomputed. vLLM has no hook for
an option of a plugin. Not an argparse action: `FlexibleArgumentParser` rewrites dotted options
(`--kv-transfer-config.key value`) to JSON behind all others, so that what an action stored is lost.

A `fail` written in `--kv-transfer-config` is kept. One that was given to `KVTransferConfig(...)` in
Python cannot be told from the default and becomes `recompute`.

Seams (vLLM 0.31 to 0.33): the three methods of `EngineArgs`, and three fields of `KVTransferConfig`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from vllm_lifetime.patches.versions import UnsupportedVllmError, require

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

__all__ = ["OPTION", "install"]

logger = logging.getLogger("vllm.lifetime")

OPTION = "--kv-connector"

_CONFIG_OPTION = "--kv-transfer-config"
_POLICY = "kv_load_failure_policy"
_POLICY_GIVEN = "_lifetime_failure_policy_given"
"""Attribute of a parsed `KVTransferConfig`: the user wrote the policy. Survives pickling."""


def install(safe_connector: str, ensure_usable: Callable[[KVTransferConfig], None]) -> None:
    """Add the option, once per process; engines with `safe_connector` recompute failed loads.

    `ensure_usable` is called before an engine with `safe_connector` is configured and may raise. On the command line what it
    raises ends the program with that one sentence instead of a traceback.
    Raises `UnsupportedVllmError` and changes nothing when vLLM does not look as expected.
    """
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    if getattr(EngineArgs.create_engine_config, "_lifetime", False):
        return
    _check_seams(EngineArgs, KVTransferConfig)
    add_cli_args = EngineArgs.add_cli_args
    from_cli_args = EngineArgs.from_cli_args.__func__  # type: ignore[attr-defined]
    create_engine_config = EngineArgs.create_engine_config

    @wraps(add_cli_args)
    def add_cli_args_with_option(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = add_cli_args(parser, *args, **kwargs)
        _add_option(parser)
        return parser

    @wraps(from_cli_args)
    def from_cli_args_with_option(cls: Any, args: argparse.Namespace, *more: Any, **kwargs: Any) -> Any:
        name = getattr(args, "kv_connector", None)
        if name is not None:
            # In place: vLLM hands the same arguments to its other API server processes, and
            # their configuration must carry the same engine id.
            args.kv_transfer_config = _choose_connector(getattr(args, "kv_transfer_config", None), name)
        config = getattr(args, "kv_transfer_config", None)
        if config is not None and config.kv_connector == safe_connector:
            try:
                ensure_usable(config)
            except (ValueError, UnsupportedVllmError) as error:
                raise SystemExit(f"vllm: error: {error}") from None
        return from_cli_args(cls, args, *more, **kwargs)

    @wraps(create_engine_config)
    def create_safe_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.kv_transfer_config
        if config is not None and config.kv_connector == safe_connector:
            ensure_usable(config)
            if self.kv_offloading_size is not None:
                # vLLM would replace the connector without a word.
                raise ValueError(f"--kv-offloading-size chooses another connector than {safe_connector}: give one.")
            _recompute_failed_loads(config)
        return create_engine_config(self, *args, **kwargs)

    create_safe_engine_config._lifetime = True  # type: ignore[attr-defined]
    EngineArgs.add_cli_args = staticmethod(add_cli_args_with_option)  # type: ignore[method-assign]
    EngineArgs.from_cli_args = classmethod(from_cli_args_with_option)  # type: ignore[method-assign, assignment]
    EngineArgs.create_engine_config = create_safe_engine_config  # type: ignore[method-assign]


def _check_seams(engine_args: Any, transfer_config: Any) -> None:
    """Raise `UnsupportedVllmError` unless both classes look as this patch expects."""
    methods = vars(engine_args)
    require(isinstance(methods.get("add_cli_args"), staticmethod), "EngineArgs.add_cli_args is no static method")
    require(isinstance(methods.get("from_cli_args"), classmethod), "EngineArgs.from_cli_args is no class method")
    require(callable(methods.get("create_engine_config")), "EngineArgs has no method create_engine_config")
    fields = {field.name for field in dataclasses.fields(engine_args)}
    for name in ("kv_transfer_config", "kv_offloading_size"):
        require(name in fields, f"EngineArgs has no field {name}")
    require("kv_connector" not in fields, f"EngineArgs has a field kv_connector: {OPTION} is taken")
    fields = {field.name for field in dataclasses.fields(transfer_config)}
    for name in ("kv_connector", "kv_role", _POLICY):
        require(name in fields, f"KVTransferConfig has no field {name}")


def _add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to `parser`; remember from then on whether a parsed config names the policy."""
    try:
        parser.add_argument(
            OPTION,
            metavar="NAME",
            default=None,
            help=f"KV connector to use, in both roles: short for {_CONFIG_OPTION}.kv_connector NAME "
            f"{_CONFIG_OPTION}.kv_role kv_both. Its options go in {_CONFIG_OPTION}.kv_connector_extra_config.",
        )
    except argparse.ArgumentError:
        logger.warning("%s is taken by another plugin; vllm-lifetime leaves it alone.", OPTION)
        return
    action = parser._option_string_actions.get(_CONFIG_OPTION)
    if action is not None and callable(action.type):
        action.type = _mark_given_policy(action.type)


def _mark_given_policy(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return `parse`, which reads a `KVTransferConfig`, with a mark on one that names the policy."""

    @wraps(parse)
    def parse_and_mark(text: str) -> Any:
        config = parse(text)
        if config is not None and f'"{_POLICY}"' in text:
            setattr(config, _POLICY_GIVEN, True)
        return config

    return parse_and_mark


def _choose_connector(config: KVTransferConfig | None, name: str) -> KVTransferConfig:
    """Return `config`, or a new one, with connector `name`. Raises `ValueError` if it has another."""
    if config is None:
        from vllm.config import KVTransferConfig

        return KVTransferConfig(kv_connector=name, kv_role="kv_both")
    if config.kv_connector not in (None, name):
        raise ValueError(
            f"{OPTION} {name} contradicts {_CONFIG_OPTION}, which names the connector {config.kv_connector}: "
            "give only one of them."
        )
    config.kv_connector = name
    config.kv_role = config.kv_role or "kv_both"
    return config


def _recompute_failed_loads(config: KVTransferConfig) -> None:
    """Set the policy `recompute`, unless the user wrote another on the command line."""
    if config.kv_load_failure_policy == "recompute" or getattr(config, _POLICY_GIVEN, False):
        return
    config.kv_load_failure_policy = "recompute"
    logger.info("%s=recompute: a KV load that fails is recomputed, the request goes on.", _POLICY)
