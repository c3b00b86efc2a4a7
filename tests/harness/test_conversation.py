# SPDX-License-Identifier: Apache-2.0
"""A session as adapters report it: each opening and each end is told once."""

from __future__ import annotations

import threading

from harness_recorder import Recorder
from told import said

from vllm_lifetime.harness import LifetimeClient
from vllm_lifetime.harness.conversation import Conversation, Instance, clip_id

LEAD = Instance("lead", "lead-1")
WORKER = Instance("worker", "worker-1", "lead-1", is_spawned=True)
HELPER = Instance("helper", "helper-1", "worker-1", is_spawned=True)


def test_everything_is_told_once_and_what_is_open_ends_with_the_session(recorder: Recorder, client: LifetimeClient) -> None:
    conversation = Conversation(client)
    conversation.end()
    conversation.start()
    conversation.start()
    opened = [conversation.open(instance) for instance in (LEAD, WORKER, WORKER, HELPER, Instance("nobody", None))]
    assert opened == [True, True, False, True, False]
    assert conversation.find("worker-1") is WORKER
    conversation.end()
    conversation.end()
    assert conversation.find("lead-1") is None
    assert client.flush()
    assert said(recorder) == [
        "session_start",
        "subagent_spawn worker worker-1 of lead-1",
        "subagent_spawn helper helper-1 of worker-1",
        "subagent_return helper helper-1 of worker-1",
        "subagent_return worker worker-1 of lead-1",
        "workflow_end",
    ]


def test_sessions_own_agents_return_only_when_they_are_told_to(recorder: Recorder, client: LifetimeClient) -> None:
    conversation = Conversation(client)
    conversation.open(LEAD)
    conversation.open(WORKER)
    conversation.close(["lead-1", "worker-1", "unknown"])
    conversation.close(["lead-1", "worker-1"], also_unspawned=True)
    assert client.flush()
    assert said(recorder) == [
        "subagent_spawn worker worker-1 of lead-1",
        "subagent_return worker worker-1 of lead-1",
        "subagent_return lead lead-1",
    ]


def test_agent_is_opened_once_by_threads_that_race(recorder: Recorder, client: LifetimeClient) -> None:
    conversation = Conversation(client)
    barrier = threading.Barrier(8)

    def race() -> None:
        barrier.wait()
        conversation.start()
        conversation.open(WORKER)
        barrier.wait()
        conversation.close()
        conversation.end()

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.flush()
    assert recorder.kinds == ["session_start", "subagent_spawn", "subagent_return", "workflow_end"]


def test_names_of_a_request_are_those_of_the_conversation(client: LifetimeClient) -> None:
    fields = Conversation(client, "s", "w").request_fields(WORKER)
    names = {"workflow_id": "w", "agent": "worker", "agent_id": "worker-1", "parent_agent_id": "lead-1"}
    assert fields == {
        "extra_headers": {"X-Session-ID": "s"},
        "extra_body": {"kv_transfer_params": {"lifetime": names}},
    }


def test_id_that_is_too_long_keeps_what_tells_it_from_others() -> None:
    assert clip_id("x" * 300 + "#1") == "x" * 254 + "#1"
