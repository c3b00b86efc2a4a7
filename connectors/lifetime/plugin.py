# SPDX-License-Identifier: Apache-2.0
"""Entry point of `vllm.general_plugins`: makes vLLM know the connector `lifetime`.

vLLM calls `register()` once in every process: API server, EngineCore and each worker. An engine that
does not use the connector `lifetime` behaves as if this package were not installed: the connector's
modules are imported when it is chosen, the block pool's class when its scheduler side is built.

On a vLLM whose seams look different, `register()` logs one warning and `ensure_supported()` raises,
for those who choose the connector.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_lifetime.patches import api_routes, bench_dataset, engine_core, kv_connector_option, request_naming
from vllm_lifetime.patches.versions import UnsupportedVllmError, require

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.config import KVTransferConfig

__all__ = ["CONNECTOR", "ensure_supported", "register", "show_log"]

logger = logging.getLogger("vllm.lifetime")

CONNECTOR = "lifetime"
"""Name of the connector in `--kv-connector` and `kv_transfer_config`."""

DATASET = "agent_trace"
"""Name of our data set in `vllm bench serve --dataset-name`."""

_unsupported: UnsupportedVllmError | None = None


def register() -> None:
    """Register the connector and install the patches that must be there before an engine is.

    Never raises; may be called again.
    """
    global _unsupported
    if _inspects_a_model():
        return
    try:
        _register_connector()
        kv_connector_option.install(CONNECTOR, _ensure_usable)
        engine_core.install()
        api_routes.install(CONNECTOR, _mount_control)
        _unsupported = None
    except Exception as error:  # whatever an unknown vLLM does to us, it must start
        if not isinstance(error, UnsupportedVllmError):
            error = UnsupportedVllmError(f"{type(error).__name__}: {error}")
        _unsupported = error
        logger.warning("%s The connector %r cannot be used.", _unsupported, CONNECTOR)
    try:
        bench_dataset.install(DATASET, _add_dataset_options, _read_dataset)
    except Exception as error:  # a benchmark needs no connector
        logger.warning("%s There is no %s %s.", error, bench_dataset.OPTION, DATASET)


def ensure_supported() -> None:
    """Raise `UnsupportedVllmError` if `register()` found that this vLLM lacks a seam."""
    if _unsupported is not None:
        raise _unsupported


def show_log() -> None:
    """Let what our modules log stand in vLLM's log, in its form. May be called again.

    vLLM sets up its own modules' loggers only.
    """
    ours, theirs = logging.getLogger("vllm_lifetime"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)


_CHECKED = "_lifetime_options_checked"
"""Attribute of a `KVTransferConfig` whose options have been checked on this machine: what they ask for may be taken since."""


def _ensure_usable(config: KVTransferConfig) -> None:
    """Raise unless this vLLM has our seams and `config` has options that this machine can provide.

    Raises `UnsupportedVllmError` or `OptionsError`.
    """
    from vllm_lifetime.connectors.lifetime.options import parse_options

    ensure_supported()
    parse_options(config.kv_connector_extra_config, check_machine=not getattr(config, _CHECKED, False))
    setattr(config, _CHECKED, True)


def _inspects_a_model() -> bool:
    """Tell whether this is the short-lived process in which vLLM inspects one model class.

    It has no engine, and would import the engine for nothing.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name == "vllm.model_executor.models.registry"


def _register_connector() -> None:
    """Make `kv_connector="lifetime"` mean our connector, which is imported when it is first used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    registry = getattr(KVConnectorFactory, "_registry", None)
    require(isinstance(registry, dict), "KVConnectorFactory has no registry")
    assert registry is not None
    if CONNECTOR not in registry:
        KVConnectorFactory.register_connector(CONNECTOR, "vllm_lifetime.connectors.lifetime.connector", "LifetimeConnector")


def _add_dataset_options(parser: argparse.ArgumentParser) -> None:
    from vllm_lifetime.bench.agent_trace import add_options

    add_options(parser)


def _read_dataset(args: argparse.Namespace, sample_request: Callable[..., SampleRequest]) -> list[SampleRequest]:
    from vllm_lifetime.bench.agent_trace import read_samples

    return read_samples(args, sample_request)


def _mount_control(app: FastAPI, engines: api_routes.EngineUtilities) -> None:
    """Mount the control API on vLLM's `app`, and let its requests name themselves."""
    from vllm_lifetime.boundaries import METADATA_KEY
    from vllm_lifetime.control import ControlService, ControlSettings, build_router, direct
    from vllm_lifetime.control.auth import Guard
    from vllm_lifetime.control.routes import BOUNDARIES_PATH
    from vllm_lifetime.control.service import SPACING_S

    show_log()
    try:
        request_naming.install(app.state, METADATA_KEY)
    except UnsupportedVllmError as error:
        logger.warning("%s Requests must name themselves.", error)
    settings = ControlSettings.from_environment(_api_keys(app))
    # Requests and events that come to different API servers cannot wait for one another.
    spacing_s = SPACING_S if engines.num_api_servers == 1 else 0.0
    service = ControlService(engines, settings=settings, spacing_s=spacing_s)
    app.include_router(build_router(lambda: service, settings))
    direct.mount(app, direct.build_endpoint(lambda: service, Guard(settings)), BOUNDARIES_PATH, service.hurry)
    direct.quiet_access_log(BOUNDARIES_PATH)


def _api_keys(app: FastAPI) -> list[str]:
    """The keys that vLLM itself asks for: `--api-key`, else the environment's."""
    given = getattr(getattr(app.state, "args", None), "api_key", None)
    keys = [given] if isinstance(given, str) else list(given or [os.environ.get("VLLM_API_KEY")])
    return [key for key in keys if key]
