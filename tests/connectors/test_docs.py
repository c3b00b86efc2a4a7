# SPDX-License-Identifier: Apache-2.0
"""The documentation names every option and every metric, and none that is gone."""

import re
from pathlib import Path

from prometheus_client import Counter

from vllm_lifetime.connectors.lifetime.options import LifetimeOptions
from vllm_lifetime.connectors.lifetime.stats import METRICS

DOCS = Path(__file__).parents[2] / "docs"


def first_cells(page: str) -> set[str]:
    """What stands in backticks in the first column of a page's tables."""
    return set(re.findall(r"^\| `([^`]+)` \|", (DOCS / page).read_text(), re.MULTILINE))


def test_every_option_is_documented() -> None:
    """docs/options.md against the model."""
    assert first_cells("options.md") == set(LifetimeOptions.model_fields)


def test_every_metric_is_documented() -> None:
    """docs/metrics.md against the table of metrics."""
    names = {f"vllm:lifetime_{metric.name}{'_total' if metric.kind is Counter else ''}" for metric in METRICS}
    assert first_cells("metrics.md") == names
