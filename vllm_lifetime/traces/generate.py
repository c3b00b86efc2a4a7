# SPDX-License-Identifier: Apache-2.0
"""Makes the three multi-agent workloads of PBKV section 6.1 up, from the parameters in `workloads.json`.

A prompt is a chain of pieces (`pieces.py`): the agent's global prefix (common to all workflows), the workflow's task, the outputs
of the upstream agents that it reads, in order, and an instruction of its own. So an agent that is invoked again finds what it
read before, and two agents share private cache only if they have the same global prefix and read the same.
"""

import zlib
from dataclasses import replace

import numpy as np

from vllm_lifetime.prediction.forecast import END
from vllm_lifetime.traces.pieces import Piece, PiecedPrompts
from vllm_lifetime.traces.schema import Trace, TraceRequest, TraceSession
from vllm_lifetime.traces.workload_spec import AgentSpec, WorkloadSpec, load_workload

__all__ = ["generate_workload"]

MAX_INVOCATIONS = 200
"""A workflow that has not ended by then ends; only a file of parameters that somebody changed comes near it."""


def generate_workload(name: str, workflows: int, seed: int = 0, spec: WorkloadSpec | None = None) -> Trace:
    """The workload `name` (see `WORKLOADS`) with `workflows` workflows, each a session that ends with it.

    The same name and seed give the same trace, and the first n workflows do not depend on how many follow. `spec`: parameters
    instead of the packaged ones. Raises ValueError for an unknown name or no workflows. O(blocks).
    """
    spec = spec or load_workload(name)
    if workflows < 1:
        raise ValueError(f"workflows must be at least 1, not {workflows}")
    prompts = PiecedPrompts(spec.block_size_tokens)
    sessions = tuple(_generate_workflow(spec, prompts, index, seed) for index in range(workflows))
    return Trace(spec.name, spec.block_size_tokens, sessions)


def _generate_workflow(spec: WorkloadSpec, prompts: PiecedPrompts, index: int, seed: int) -> TraceSession:
    random = np.random.default_rng([seed, zlib.crc32(spec.name.encode()), index])
    kind = _choose(spec.kinds, random)
    task: Piece = (("task", index), spec.task_tokens.draw(random))
    history: list[str] = []
    outputs: list[tuple[str, Piece]] = []
    requests: list[TraceRequest] = []
    gap_s = 0.0
    name = spec.first_agent
    while name != END and len(history) < MAX_INVOCATIONS:
        agent = spec.agents[name]
        pieces: list[Piece] = [(("prefix", agent.prefix), spec.prefixes[agent.prefix]), task]
        pieces += [piece for author, piece in outputs if agent.reads is None or author in agent.reads]
        pieces.append((("instruction", index, len(history)), agent.instruction_tokens.draw(random)))
        blocks, input_tokens = prompts.blocks(pieces)
        output_tokens = agent.output_tokens.draw(random)
        requests.append(
            TraceRequest(
                blocks=blocks,
                after=len(requests) - 1,
                gap_s=gap_s,
                service_s=spec.first_token_s + output_tokens * spec.output_token_s,
                input_tokens=input_tokens,
                output_tokens=output_tokens,
                agent=name,
                agent_id=name,
                finish_reason="tool_calls" if agent.tool else "stop",
                tool=agent.tool,
            )
        )
        observed_tokens = agent.observation_tokens.draw(random) if agent.observation_tokens else 0
        outputs.append((name, (("output", index, len(history)), output_tokens + observed_tokens)))
        gap_s = agent.gap_s.draw_s(random)
        history.append(name)
        name = _next_agent(agent, kind, history, random)
    requests[-1] = replace(requests[-1], finish_reason="stop", tool=None, ends_turn=True)
    return TraceSession(f"{spec.name}-{index}", tuple(requests))


def _next_agent(agent: AgentSpec, kind: str, history: list[str], random: np.random.Generator) -> str:
    for rule in agent.transitions:
        if rule.holds(kind, history):
            return _choose(rule.to, random)
    return END


def _choose(weights: dict[str, float], random: np.random.Generator) -> str:
    names = list(weights)
    return names[int(random.choice(len(names), p=list(weights.values())))]
