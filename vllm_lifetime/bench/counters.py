# SPDX-License-Identifier: Apache-2.0
"""The server's counters of `/metrics`, and how far they moved in a run."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Counters", "ServerCounts", "counts_between", "parse_counters"]

Counters: TypeAlias = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
"""(Sample name, sorted labels) -> value."""

_ENGINE_LABELS = frozenset({"engine", "model_name", "engine_index"})


@dataclass(frozen=True)
class ServerCounts:
    """How far the server's counters moved, added up over its engines. None: the server has no such counter."""

    prompt_tokens: int | None
    prefix_queries_tokens: int | None
    """Prompt tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int | None
    """Found in HBM."""
    external_hit_tokens: int | None
    """Loaded from below HBM."""
    preemptions: int | None
    hit_tokens_by_tier: Mapping[str, int]
    """`vllm:lifetime_hit_tokens`; a request that is preempted counts again."""
    flash_bytes_written: int | None
    lifetime: Mapping[str, float]
    """Every counter of `vllm:lifetime_` that moved."""

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens looked up that were found in HBM or below."""
        if not self.prefix_queries_tokens or self.prefix_hit_tokens is None:
            return None
        return (self.prefix_hit_tokens + (self.external_hit_tokens or 0)) / self.prefix_queries_tokens

    @property
    def went_back(self) -> bool:
        """Whether a counter is lower than before: the server was started anew in between, and none of this means anything."""
        numbers = (self.prompt_tokens, self.prefix_queries_tokens, self.prefix_hit_tokens, self.external_hit_tokens)
        return any((number or 0) < 0 for number in (*numbers, self.preemptions, *self.hit_tokens_by_tier.values()))

    def as_json(self) -> dict[str, Any]:
        """All of it, with the hit rate."""
        return {**asdict(self), "hit_rate": self.hit_rate}


def parse_counters(text: str) -> Counters | None:
    """Read Prometheus text. None: it is no such text, or has no sample of vLLM."""
    try:
        found = {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            if family.name.startswith("vllm:")
            for sample in family.samples
            if sample.name.endswith(("_total", "_sum", "_count")) and math.isfinite(sample.value)
        }
    except ValueError:
        return None
    return found or None


def counts_between(before: Counters, after: Counters) -> ServerCounts:
    """How far counters moved from `before` to `after`. One that is only in `after` began at 0."""
    moved: dict[str, dict[str, float]] = {}
    for (name, labels), value in after.items():
        shown = ",".join(f"{key}={label}" for key, label in labels if key not in _ENGINE_LABELS)
        of_name = moved.setdefault(name, {})
        of_name[shown] = of_name.get(shown, 0.0) + value - before.get((name, labels), 0.0)

    def total(name: str) -> int | None:
        return round(sum(moved[name].values())) if name in moved else None

    tiers = {
        shown.removeprefix("tier="): round(value) for shown, value in moved.get("vllm:lifetime_hit_tokens_total", {}).items()
    }
    # A labelled counter has no sample before the first byte; the connector has others from the start.
    has_connector = any(name.startswith("vllm:lifetime_") for name in moved)
    written = moved.get("vllm:lifetime_bytes_written_total", {} if has_connector else None)
    return ServerCounts(
        prompt_tokens=total("vllm:prompt_tokens_total"),
        prefix_queries_tokens=total("vllm:prefix_cache_queries_total"),
        prefix_hit_tokens=total("vllm:prefix_cache_hits_total"),
        external_hit_tokens=total("vllm:external_prefix_cache_hits_total"),
        preemptions=total("vllm:num_preemptions_total"),
        hit_tokens_by_tier=tiers,
        flash_bytes_written=round(written.get("tier=flash", 0.0)) if written is not None else None,
        lifetime={
            f"{name}{{{shown}}}" if shown else name: value
            for name, by_label in sorted(moved.items())
            if name.startswith("vllm:lifetime_")
            for shown, value in sorted(by_label.items())
            if value
        },
    )
