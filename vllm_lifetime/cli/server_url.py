# SPDX-License-Identifier: Apache-2.0
"""The server that a command asks."""

__all__ = ["server_root"]


def server_root(url: str) -> str:
    """The root of a server, given it or the base URL of its OpenAI API, which ends in `/v1`."""
    return url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
