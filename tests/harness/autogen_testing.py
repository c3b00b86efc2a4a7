# SPDX-License-Identifier: Apache-2.0
"""What the tests of the AutoGen adapter share. Import it after `pytest.importorskip`."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from harness_recorder import Answer, Recorder
from told import answer, asked, said

from vllm_lifetime.harness import LifetimeClient
from vllm_lifetime.harness.autogen import LifetimeSession

MODEL_INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": False,
    "family": "unknown",
    "structured_output": False,
}


def make_model_client(url: str, **options: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model="model", base_url=f"{url}/v1", api_key="none", model_info=MODEL_INFO, max_retries=0, **options
    )


class AutoGen:
    """A session on a recorder, and what came of it."""

    def __init__(self, recorder: Recorder, client: LifetimeClient, session_id: str = "s", **options: Any) -> None:
        self.recorder = recorder
        self.client = client
        self.session = LifetimeSession(client, session_id, **options)
        self.model_client = self.session.model_client(make_model_client(recorder.url))
        self.answer()

    def answer(self, *answers: Answer, delay_s: float = 0.0) -> None:
        """Let the model give these answers, then always the same one."""
        answer(self.recorder, *answers, then=Answer("done", delay_s=delay_s))

    def agent(self, name: str, **options: Any) -> AssistantAgent:
        return AssistantAgent(name, self.model_client, description=name, **options)

    def said(self, session_id: str | None = None) -> list[str]:
        assert self.client.flush()
        return said(self.recorder, session_id)

    def asked(self, session_id: str | None = None) -> list[str]:
        return asked(self.recorder, session_id)
