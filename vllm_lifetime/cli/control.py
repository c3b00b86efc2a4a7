# SPDX-License-Identifier: Apache-2.0
"""`vllm-lifetime control --engine URL ...`: the control API on its own, in front of several vLLM servers."""

from __future__ import annotations

import ipaddress
import logging
from typing import Annotated

import typer

from vllm_lifetime.cli.failure import fail

DEFAULT_PORT = 8090


def add_to(app: typer.Typer) -> None:
    """Register the command on `app`."""
    app.command("control")(control)


def control(
    engine: Annotated[
        list[str], typer.Option(metavar="URL", help="Root of a vLLM server with the lifetime connector; once for each server.")
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on. One that other machines reach takes VLLM_LIFETIME_TOKEN.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 lets the system choose.")] = DEFAULT_PORT,
    engine_token: Annotated[
        str | None,
        typer.Option(
            envvar="VLLM_LIFETIME_ENGINE_TOKEN",
            help="Token that the servers ask for. Better in the environment: a command line can be read by all.",
        ),
    ] = None,
    answer_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.01, max=60, help="Longest that an answer waits for a server.")
    ] = 1.0,
    request_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, max=600, help="Longest wait for a server before the same is sent again.")
    ] = 30.0,
    queue_size: Annotated[
        int, typer.Option(metavar="EVENTS", min=1, max=1_000_000, help="Most that wait for one server; more drop the oldest.")
    ] = 10_000,
    max_age: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=86_400, help="Events that have waited longer are dropped.")
    ] = 300.0,
    drain: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=600, help="How long a shutdown tries to deliver what waits.")
    ] = 10.0,
) -> None:
    """Serve the control API and pass each event on to every vLLM server named.

    A server that is down or slow gets its events later. With VLLM_LIFETIME_TOKEN set, callers need that token; without it,
    only clients of this machine are served.
    """
    import uvicorn

    from vllm_lifetime.control.fanout import build_fanout_app
    from vllm_lifetime.control.fanout_engine import EngineUrlError, FanoutOptions, normalize_engine_url
    from vllm_lifetime.control.settings import TOKEN_VARIABLE, ControlSettings

    try:
        urls = [normalize_engine_url(url) for url in engine]
    except EngineUrlError as error:
        raise typer.BadParameter(str(error), param_hint="--engine") from None
    if len(set(urls)) < len(urls):
        raise typer.BadParameter("the same server stands there twice, and would get each event twice", param_hint="--engine")
    settings = ControlSettings.from_environment()
    if not settings.tokens and not _is_this_machine(host):
        fail(
            f"--host {host} can be reached from other machines, and there is no token: set {TOKEN_VARIABLE}, "
            "or leave --host out to serve this machine only."
        )
    options = FanoutOptions(
        answer_timeout_s=answer_timeout, request_timeout_s=request_timeout, queue_size=queue_size, max_age_s=max_age
    )
    # To standard error. httpx would log every request at INFO.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("vllm_lifetime").setLevel(logging.INFO)
    app = build_fanout_app(urls, settings=settings, engine_token=engine_token or None, options=options, drain_s=drain)
    typer.echo(f"Events go to {', '.join(urls)}", err=True)
    uvicorn.run(app, host=host, port=port, access_log=False, timeout_graceful_shutdown=5)


def _is_this_machine(host: str) -> bool:
    """Tell whether only this machine can reach what listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
