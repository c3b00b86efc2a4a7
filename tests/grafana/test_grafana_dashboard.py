# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard asks for nothing that is not there."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import Counter, Histogram

from vllm_lifetime.connectors.lifetime.stats import METRICS

DASHBOARD = Path(__file__).parents[2] / "grafana" / "vllm-lifetime.json"
ENGINE_LABELS = {"model_name", "engine"}
GRID_WIDTH = 24
BUILT_IN = {"__rate_interval": "5m", "__range": "30m"}
"""Variables that Grafana sets by itself, and a value for each."""


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def samples_of(name: str, is_counter: bool, is_histogram: bool, labels: set[str]) -> dict[str, set[str]]:
    """Names and labels under which Prometheus finds a metric's samples."""
    if is_counter:
        return {f"{name.removesuffix('_total')}_total": labels}
    if is_histogram:
        return {f"{name}_bucket": labels | {"le"}, f"{name}_count": labels, f"{name}_sum": labels}
    return {name: labels}


def own_samples() -> dict[str, set[str]]:
    """What `LifetimePromMetrics` exports."""
    found: dict[str, set[str]] = {}
    for metric in METRICS:
        labels = ENGINE_LABELS | set(metric.labels)
        found |= samples_of(f"vllm:lifetime_{metric.name}", metric.kind is Counter, metric.kind is Histogram, labels)
    return found


def vllm_samples() -> dict[str, set[str]]:
    """What vLLM exports, as the source of its loggers says: to ask it would take an engine."""
    spec = importlib.util.find_spec("vllm.v1.metrics.loggers")
    assert spec is not None and spec.origin is not None
    found: dict[str, set[str]] = {}
    for call in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        name = keywords.get("name")
        if not isinstance(name, ast.Constant) or not str(name.value).startswith("vllm:"):
            continue
        more = {node.value for node in ast.walk(keywords["labelnames"]) if isinstance(node, ast.Constant)}
        kind = call.func.attr
        found |= samples_of(str(name.value), "counter" in kind, "histogram" in kind, ENGINE_LABELS | {str(each) for each in more})
    return found


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    found = own_samples() | vllm_samples()
    # Some that must be there, or nothing below would prove anything.
    assert found["vllm:lifetime_tier_blocks"] == {*ENGINE_LABELS, "tier", "state"}
    assert found["vllm:time_to_first_token_seconds_bucket"] == {*ENGINE_LABELS, "le"}
    assert found["vllm:num_preemptions_total"] == ENGINE_LABELS
    return found


def expressions(dashboard: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Panel, expression and legend."""
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard["panels"]
        for target in panel.get("targets", [])
    ]


def substitute(text: str) -> str:
    """Put values in the place of Grafana's variables."""
    for name, value in BUILT_IN.items():
        text = text.replace(f"${name}", value)
    return re.sub(r"\$\{?(\w+)\}?", r"\1", text)


def walk(expression: Any) -> Iterator[Any]:
    """Every node of a PromQL expression."""
    yield expression
    for name in ("expr", "lhs", "rhs", "vector_selector", "param"):
        child = getattr(expression, name, None)
        if isinstance(child, promql_parser.Expr):
            yield from walk(child)
    for child in getattr(expression, "args", None) or []:
        yield from walk(child)


def label_lists(expression: Any) -> Iterator[list[str]]:
    """Labels that an expression groups by or leaves out."""
    for node in walk(expression):
        modifier = getattr(node, "modifier", None)
        for holder in (modifier, getattr(modifier, "matching", None)):
            labels = getattr(holder, "labels", None)
            if labels:
                yield list(labels)


def selectors(expression: Any) -> list[Any]:
    return [node for node in walk(expression) if isinstance(node, promql_parser.VectorSelector)]


def test_every_expression_is_promql_and_names_what_exists(dashboard: dict[str, Any], exported: dict[str, set[str]]) -> None:
    assert len(expressions(dashboard)) > 30
    for title, text, legend in expressions(dashboard):
        expression = promql_parser.parse(substitute(text))
        asked = selectors(expression)
        assert asked, title
        known: set[str] = set()
        for selector in asked:
            assert selector.name in exported, f"{title}: no metric {selector.name}"
            matched = {matcher.name for matcher in selector.matchers.matchers}
            assert matched <= exported[selector.name], (
                f"{title}: {selector.name} has no label {matched - exported[selector.name]}"
            )
            assert matched >= ENGINE_LABELS, f"{title}: {selector.name} is not limited to the chosen model and engine"
            known |= exported[selector.name]
        grouped = {label for labels in label_lists(expression) for label in labels}
        assert grouped <= known, f"{title}: groups by {grouped - known}"
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert shown <= grouped, f"{title}: its legend shows {shown - grouped}, which the expression drops"


def test_every_metric_of_ours_is_shown(dashboard: dict[str, Any]) -> None:
    text = " ".join(expression for _, expression, _ in expressions(dashboard))
    # The same count in blocks as `hit_tokens` has in tokens.
    unseen = {metric.name for metric in METRICS if f"vllm:lifetime_{metric.name}" not in text} - {"hit_blocks"}
    assert unseen == set()


def test_every_variable_is_defined(dashboard: dict[str, Any], exported: dict[str, set[str]]) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "engine"]
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    used = set(re.findall(r"\$\{?(\w+)\}?", json.dumps(dashboard)))
    assert used - {"__all"} == set(variables) | set(BUILT_IN)
    for name in ("model", "engine"):
        query = variables[name]["query"]["query"]
        metric, label = re.fullmatch(r"label_values\(([\w:]+)(?:\{.*\})?, (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in exported[metric]


def test_panels_are_of_one_datasource(dashboard: dict[str, Any]) -> None:
    wanted = {"type": "prometheus", "uid": "${datasource}"}
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == wanted, panel["title"]
        assert all(target["datasource"] == wanted for target in panel["targets"]), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(references) == len(set(references)), panel["title"]


def test_ids_are_unique_and_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: dict[tuple[int, int], str] = {}
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] >= 0 and place["w"] > 0 and place["x"] + place["w"] <= GRID_WIDTH, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sum(vllm:lifetime_nothing)", "vllm:lifetime_nothing"),
        ('sum(vllm:lifetime_sessions{tier="hbm"})', "tier"),
        ("sum by (nobody) (rate(vllm:lifetime_hit_tokens_total[5m]))", "nobody"),
        ("a / on(x) group_left() b", "x"),
    ],
)
def test_what_is_wrong_is_seen(text: str, message: str) -> None:
    """The walk over an expression reaches selectors, matchers and groupings wherever they stand."""
    expression = promql_parser.parse(text)
    named = [selector.name for selector in selectors(expression)]
    matched = [matcher.name for selector in selectors(expression) for matcher in selector.matchers.matchers]
    assert message in [*named, *matched, *(label for labels in label_lists(expression) for label in labels)]
