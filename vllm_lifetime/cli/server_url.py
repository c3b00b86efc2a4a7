# SPDX-License-Identifier: Apache-2.0
"""The server that a command asks."""

from vllm_lifetime.cli.failure import fail

__all__ = ["server_root"]


def server_root(url: str) -> str:
    """The root of a server, given it or the base URL of its OpenAI API, which ends in `/v1`. Ends the command if it is no URL."""
    from vllm_lifetime.harness.client import read_server_url

    try:
        return str(read_server_url(url)).rstrip("/")
    except ValueError as error:
        fail(f"--url: {error}")
