# SPDX-License-Identifier: Apache-2.0
"""Decides who may use the control API.

Who it keeps out:

- without a valid token, everybody, once a token is configured;
- without a token configured, everybody but the clients of this machine. A client that came through a proxy is
  not one of them; a proxy on this machine that adds no header to say so cannot be told from one;
- in either case, pages of other origins in a browser on this machine: by their `Origin`, and, where no
  token protects, those that got their name pointed at this machine (DNS rebinding) by that name.

What it does not do: encrypt (use TLS), tell one token's holder from another's, or bound wrong guesses.

Runs in the API server, on its event loop, before the route.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

from fastapi import Request
from fastapi.openapi.models import HTTPBearer
from fastapi.security.base import SecurityBase
from starlette.types import Scope

from vllm_lifetime.control.errors import ForeignOrigin, Unauthorized
from vllm_lifetime.control.settings import TOKEN_VARIABLE, ControlSettings

__all__ = ["Guard", "is_same_origin", "is_this_machine"]

_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
"""Headers by which a proxy says that it passes a request on."""

_HOW_TO = f"set {TOKEN_VARIABLE} on the server, and send it as `Authorization: Bearer TOKEN`"


class Guard(SecurityBase):
    """FastAPI's dependency that lets a request pass or raises `Unauthorized` or `ForeignOrigin`."""

    def __init__(self, settings: ControlSettings) -> None:
        """Let those pass whom `settings` names."""
        # What FastAPI writes into the OpenAPI document.
        self.model = HTTPBearer(description=f"The value of {TOKEN_VARIABLE}, or else an API key of the server.")
        self.scheme_name = "bearer"
        self._digests = [_digest(token.get_secret_value().encode()) for token in settings.tokens]

    async def __call__(self, request: Request) -> None:
        """Raise `Unauthorized` or `ForeignOrigin` unless the request may pass."""
        self.check(request.scope)

    def check(self, scope: Scope) -> None:
        """Raise as a call does. `scope` is the request's ASGI scope."""
        authorization = origin = b""
        host: bytes | None = None
        forwarded = False
        for name, value in scope["headers"]:
            if name == b"authorization":
                authorization = value
            elif name == b"origin":
                origin = value
            elif name == b"host":
                host = value
            elif name in _FORWARDED:
                forwarded = True
        if origin and not is_same_origin(origin.decode("latin-1"), (host or b"").decode("latin-1")):
            raise ForeignOrigin("A page of another origin may not use this.")
        if self._digests:
            self._check_token(authorization)
        elif forwarded or not is_this_machine(scope.get("client"), scope.get("server")):
            raise Unauthorized(f"Without a token only clients of this machine are served: {_HOW_TO}.")
        elif host and not _is_local_name(host.decode("latin-1")):
            raise Unauthorized(f"Without a token this is served as localhost or by address, not by that name: or {_HOW_TO}.")

    def _check_token(self, authorization: bytes) -> None:
        scheme, _, token = authorization.partition(b" ")
        given = _digest(token.strip())
        # Every token is compared, and all of it: how long this takes says nothing about the tokens.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != b"bearer":
            raise Unauthorized("This needs a token, sent as `Authorization: Bearer TOKEN`.")
        if not any(matches):
            raise Unauthorized("The token is not valid here.")


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


@lru_cache(maxsize=256)
def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def is_this_machine(client: object, server: object) -> bool:
    """Tell whether an ASGI scope's `client` is a process of this machine, by the address of its socket.

    A unix socket has no client, and a `server` without a port. A server with a port but no client is a TCP connection that
    was gone before its address could be asked for.
    """
    if client is None:
        return isinstance(server, list | tuple) and len(server) == 2 and server[1] is None
    return isinstance(client, list | tuple) and len(client) == 2 and _is_loopback(str(client[0]))


def is_same_origin(origin: str, host: str) -> bool:
    """Tell whether the page of `origin` (a header's value) came from the server that was asked for as `host`.

    The scheme is not compared: behind a proxy that speaks TLS the server does not know it.
    """
    try:
        page = urlsplit(origin)
        asked = urlsplit(f"//{host}")
        default = {"http": 80, "https": 443}.get(page.scheme)
        return (
            default is not None
            and bool(page.hostname)
            and page.hostname == asked.hostname
            and (page.port or default) == (asked.port or default)
        )
    except ValueError:
        return False


@lru_cache(maxsize=64)
def _is_local_name(host: str) -> bool:
    """Tell whether the name a client asked for cannot be one that a stranger points at this machine.

    That is an address, `localhost`, or a name without a dot, which nobody else can register.
    """
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
