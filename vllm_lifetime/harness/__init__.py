# SPDX-License-Identifier: Apache-2.0
"""What a harness uses: a client for boundaries, the fields that name a request, and adapters, one module each.

Needs httpx and pydantic; no vLLM, no torch. An adapter's own library is imported by that adapter's module only.
"""

from vllm_lifetime.harness.client import AsyncLifetimeClient, LifetimeClient, request_fields
from vllm_lifetime.harness.outbox import ClientStats

__all__ = ["AsyncLifetimeClient", "ClientStats", "LifetimeClient", "request_fields"]
