# SPDX-License-Identifier: Apache-2.0
"""The parameters of the made-up workloads, read from `workloads.json`. Each stands there with where it came from."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from vllm_lifetime.prediction.forecast import END

__all__ = ["WORKLOADS", "AgentSpec", "Lognormal", "Parameter", "Rule", "WorkloadSpec", "list_parameters", "load_workload"]

WORKLOADS = ("hover-langchain", "swebench-autogen", "financebench-crewai")
"""Names of the workloads, in the order of PBKV Table 1."""


class Lognormal(NamedTuple):
    """A length or a time that varies: log-normal with this median, never above `max`. `sigma` 0: always the median."""

    median: float
    sigma: float
    max: float

    def draw(self, random: np.random.Generator) -> int:
        """A number of tokens."""
        return round(self.draw_s(random))

    def draw_s(self, random: np.random.Generator) -> float:
        """A time in seconds."""
        return min(self.max, self.median * math.exp(self.sigma * float(random.standard_normal())))


@dataclass(frozen=True, slots=True)
class Rule:
    """Where a workflow goes from an agent, if the rule holds.

    It holds if the workflow is of kind `kind`, was at `came_from` before this agent, and has invoked each agent in `visits`
    at least so often. What is None or missing asks for nothing.
    """

    to: dict[str, float]
    kind: str | None
    came_from: str | None
    visits: Mapping[str, int]

    def holds(self, kind: str, history: Sequence[str]) -> bool:
        """Whether the rule holds for a workflow with that history, the present agent last."""
        if self.kind not in (None, kind):
            return False
        if self.came_from is not None and (len(history) < 2 or history[-2] != self.came_from):
            return False
        return all(history.count(agent) >= least for agent, least in self.visits.items())


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One agent. `reads`: the agents whose outputs its prompt has (None: all). Its first rule that holds says what follows."""

    prefix: str
    reads: frozenset[str] | None
    instruction_tokens: Lognormal
    output_tokens: Lognormal
    observation_tokens: Lognormal | None
    """What its tool returns: goes into the history with its output."""
    tool: str | None
    gap_s: Lognormal
    """From its end to the next agent's arrival."""
    transitions: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """One workload. `kinds`: what a workflow may turn out to be (no agent sees it), and how often."""

    name: str
    block_size_tokens: int
    concurrency: int
    capacity_blocks: int
    """HBM blocks: a little less than what so many workflows hold together (docs/traces.md)."""
    first_token_s: float
    output_token_s: float
    first_agent: str
    kinds: dict[str, float]
    task_tokens: Lognormal
    prefixes: Mapping[str, int]
    agents: Mapping[str, AgentSpec]


class Parameter(NamedTuple):
    """One parameter as the file has it, for tables."""

    workload: str
    path: str
    value: Any
    source: str


def load_workload(name: str) -> WorkloadSpec:
    """The packaged parameters of `name`. Raises ValueError for an unknown name."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known are {', '.join(WORKLOADS)}")
    return _parse(name, _values(_document()["workloads"][name]))


def list_parameters(name: str) -> Iterator[Parameter]:
    """Every parameter of workload `name`, with its source."""

    def walk(node: Any, path: str) -> Iterator[Parameter]:
        if "value" in node:
            yield Parameter(name, path, node["value"], node["source"])
        else:
            for key, child in node.items():
                yield from walk(child, f"{path}.{key}" if path else key)

    yield from walk(_document()["workloads"][name], "")


def _document() -> Any:
    return json.loads(resources.files("vllm_lifetime.traces").joinpath("workloads.json").read_text(encoding="utf-8"))


def _values(node: Any) -> Any:
    if "value" in node:
        return node["value"]
    return {key: _values(child) for key, child in node.items()}


def _parse(name: str, values: Any) -> WorkloadSpec:
    agents = {agent: _parse_agent(spec) for agent, spec in values["agents"].items()}
    for agent, spec in agents.items():
        for rule in spec.transitions:
            if not math.isclose(sum(rule.to.values()), 1.0) or not set(rule.to) <= {END, *agents}:
                raise ValueError(f"workloads.json, {name}, {agent}: transitions {rule.to} must name known agents and sum to 1")
    return WorkloadSpec(
        name=name,
        block_size_tokens=values["block_size_tokens"],
        concurrency=values["concurrency"],
        capacity_blocks=values["capacity_blocks"],
        first_token_s=values["first_token_s"],
        output_token_s=values["output_token_s"],
        first_agent=values["first_agent"],
        kinds=values["kinds"],
        task_tokens=Lognormal(*values["task_tokens"]),
        prefixes=values["prefixes"],
        agents=agents,
    )


def _parse_agent(values: Any) -> AgentSpec:
    reads, observation = values.get("reads"), values.get("observation_tokens")
    rules = tuple(
        Rule(rule["to"], rule.get("kind"), rule.get("came_from"), rule.get("visits", {})) for rule in values["transitions"]
    )
    return AgentSpec(
        prefix=values["prefix"],
        reads=None if reads is None else frozenset(reads),
        instruction_tokens=Lognormal(*values["instruction_tokens"]),
        output_tokens=Lognormal(*values["output_tokens"]),
        observation_tokens=None if observation is None else Lognormal(*observation),
        tool=values.get("tool"),
        gap_s=Lognormal(*values["gap_s"]),
        transitions=rules,
    )
