# SPDX-License-Identifier: Apache-2.0
"""The control API: everything under `/lifetime/v1` on vLLM's own port. docs/api.md shows each route.

Mount it on an app with `build_router`; `ControlService` reaches the engines through an `EnginePort`, and `ControlSettings`
say who may use it.
"""

from vllm_lifetime.control.errors import ControlError, EngineUnavailable
from vllm_lifetime.control.routes import PREFIX, build_router
from vllm_lifetime.control.service import ControlService, EnginePort
from vllm_lifetime.control.settings import ControlSettings

__all__ = [
    "PREFIX",
    "ControlError",
    "ControlService",
    "ControlSettings",
    "EnginePort",
    "EngineUnavailable",
    "build_router",
]
