# SPDX-License-Identifier: Apache-2.0
"""Settings of the control API, from the environment and from the server that it is mounted on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr

__all__ = ["TOKEN_VARIABLE", "ControlSettings"]

TOKEN_VARIABLE = "VLLM_LIFETIME_TOKEN"
"""Environment variable that holds the control API's own token."""


class ControlSettings(BaseModel):
    """Who may use the control API, and how much of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: tuple[SecretStr, ...] = ()
    """Each of them opens the control API. Without any, it serves clients of this machine only."""

    events_per_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 5_000.0
    """Events taken per second by one API server, in the long run."""

    events_burst: Annotated[int, Field(ge=1)] = 10_000
    """Events taken at once after a pause."""

    @classmethod
    def from_environment(cls, api_keys: str | Iterable[str | None] = ()) -> ControlSettings:
        """Return the settings of a server that has these API keys.

        The token of `VLLM_LIFETIME_TOKEN` is the only one if it is set; otherwise each API key is a token.
        Empty ones are left out.
        """
        keys = [api_keys] if isinstance(api_keys, str) else api_keys  # never each character of one
        own = os.environ.get(TOKEN_VARIABLE, "").strip()
        return cls(tokens=tuple(SecretStr(token) for token in ([own] if own else keys) if token))
