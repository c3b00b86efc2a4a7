# SPDX-License-Identifier: Apache-2.0
"""Puts the name of a request among the headers and fields that its user gave it already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_lifetime.boundaries import METADATA_KEY

__all__ = ["add_name", "fill_body"]


def fill_body(name: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's body with `name`, the body fields of `client.request_fields`, in it: what the body says stands."""
    given = body.get("kv_transfer_params") or {}
    metadata = {**name.get("kv_transfer_params", {}).get(METADATA_KEY, {}), **given.get(METADATA_KEY, {})}
    return {**name, **body, "kv_transfer_params": {**given, METADATA_KEY: metadata}}


def add_name(
    name: Mapping[str, Any], extra_headers: Mapping[str, Any] | None, extra_body: Any
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the headers and body fields with `name` in them, which is what `client.request_fields` returns.

    The user's metadata goes before ours, field by field, but the session is ours: boundaries are about it. None if the
    user's fields are of a form that leaves no room, such as a body that is not an object.
    """
    body: Any = extra_body or {}
    params: Any = (body.get("kv_transfer_params") or {}) if isinstance(body, Mapping) else None
    given: Any = (params.get(METADATA_KEY) or {}) if isinstance(params, Mapping) else None
    if not isinstance(given, Mapping):
        return None
    fields = dict(name["extra_body"])
    metadata = {**fields.pop("kv_transfer_params", {}).get(METADATA_KEY, {}), **given}
    if metadata:
        fields["kv_transfer_params"] = {**params, METADATA_KEY: metadata}
    return {**(extra_headers or {}), **name["extra_headers"]}, {**body, **fields}
