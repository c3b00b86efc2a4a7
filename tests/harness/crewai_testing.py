# SPDX-License-Identifier: Apache-2.0
"""What the tests of the CrewAI adapter share. Imported before CrewAI, so that it writes and sends nothing elsewhere."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from typing import Any

import pytest

# First of all: what follows must not change the environment of other frameworks' tests.
pytest.importorskip("crewai", reason="needs requirements/harness-crewai.txt")

os.environ["CREWAI_STORAGE_DIR"] = os.path.join(tempfile.gettempdir(), f"crewai-{os.getpid()}")  # made when written to
os.environ.update(
    CREWAI_DISABLE_TELEMETRY="true",
    CREWAI_TRACING_ENABLED="false",
    OTEL_SDK_DISABLED="true",
    # Where it writes when it is imported.
    XDG_CONFIG_HOME=os.environ["CREWAI_STORAGE_DIR"],
    XDG_DATA_HOME=os.environ["CREWAI_STORAGE_DIR"],
)

from crewai import LLM, Agent, Crew, Task
from crewai.events import crewai_event_bus
from harness_recorder import Answer, Recorder
from told import answer, asked, said

from vllm_lifetime.harness import LifetimeClient
from vllm_lifetime.harness.crewai import LifetimeInterceptor, LifetimeListener

FINAL_ANSWER = "I now know the final answer\nFinal Answer: done"

atexit.register(shutil.rmtree, os.environ["CREWAI_STORAGE_DIR"], ignore_errors=True)


class CrewAI:
    """A listener on a recorder, and what came of it."""

    def __init__(self, recorder: Recorder, client: LifetimeClient) -> None:
        self.recorder = recorder
        self.client = client
        self.listener = LifetimeListener(client)
        self.answer()

    def answer(self, *answers: Answer, delay_s: float = 0.0) -> None:
        """Let the model give these answers, then always the one that CrewAI takes for a final one."""
        answer(self.recorder, *answers, then=Answer(FINAL_ANSWER, delay_s=delay_s))

    def llm(self, **options: Any) -> LLM:
        options = {"interceptor": LifetimeInterceptor(), "max_retries": 0, **options}
        return LLM(model="hosted_vllm/model", base_url=self.recorder.v1, api_key="none", **options)

    def agent(self, role: str, **options: Any) -> Agent:
        return Agent(role=role, goal="answer", backstory="a test", **{"llm": self.llm(), **options})

    def crew(self, *roles: str, **options: Any) -> Crew:
        """A crew with a task for each role."""
        return self.crew_of([make_task(self.agent(role)) for role in roles], **options)

    def crew_of(self, tasks: list[Task], **options: Any) -> Crew:
        agents = [task.agent for task in tasks if task.agent is not None]
        return Crew(agents=agents, tasks=tasks, **options)

    def said(self, session_id: str | None = None) -> list[str]:
        crewai_event_bus.flush()
        assert self.client.flush()
        return said(self.recorder, session_id)

    def asked(self, session_id: str | None = None) -> list[str]:
        return asked(self.recorder, session_id)

    @property
    def sessions(self) -> list[str | None]:
        """The sessions, by their first event."""
        return list(dict.fromkeys(event.session_id for event in self.recorder.boundaries))


def make_task(agent: Agent | None, description: str = "say something", **options: Any) -> Task:
    return Task(description=description, expected_output="anything", agent=agent, **options)


def of_task(number: int, role: str) -> list[str]:
    return [f"subagent_spawn {role} id{number}", f"subagent_return {role} id{number}"]
