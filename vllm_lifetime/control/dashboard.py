# SPDX-License-Identifier: Apache-2.0
"""`GET /lifetime/v1/dashboard`: one page that shows what the other routes say.

The page holds no data, so anybody who reaches the server may load it; what it shows it asks the other routes for, with the token
that its reader types in. Ids come from whoever sends requests: the page's policy lets only its own script and style run, named by
their hashes, and lets them talk to this server only.

Runs in the API server, on its event loop.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter, Request, Response

from vllm_lifetime.control.errors import ControlRoute

__all__ = ["build_router", "content_security_policy"]


def build_router() -> APIRouter:
    """Return the route `/dashboard`, without a prefix and without authentication: see the module. Reads the page once."""
    page = files("vllm_lifetime.control").joinpath("dashboard.html").read_text(encoding="utf-8")
    body = page.encode()
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": content_security_policy(page),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "ETag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    router = APIRouter(route_class=ControlRoute, tags=["lifetime"])

    @router.get("/dashboard", summary="A page that shows tiers, sessions and boundaries as they change", response_class=Response)
    async def get_dashboard(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)

    return router


def content_security_policy(page: str) -> str:
    """Return the policy for `page`: its inline scripts and styles run, nothing else does, and only this server is talked to."""
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hashes(page, 'script')}",
            f"style-src {_hashes(page, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Browsers that know it refuse every way to turn text into markup or code.
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _hashes(page: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
