# SPDX-License-Identifier: Apache-2.0
"""The control API: `POST /lifetime/v1/boundaries` and `GET /lifetime/v1/tiers`."""

from vllm_lifetime.control.errors import ControlError, EngineUnavailable
from vllm_lifetime.control.routes import PREFIX, build_router
from vllm_lifetime.control.service import ControlService, EnginePort

__all__ = [
    "PREFIX",
    "ControlError",
    "ControlService",
    "EnginePort",
    "EngineUnavailable",
    "build_router",
]
