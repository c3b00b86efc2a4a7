# SPDX-License-Identifier: Apache-2.0
"""The scheduler side gets the post-norm hidden state of each prompt's last token, compared with transformers' own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e_ahead import ahead
from e2e_client import SERVER_ENV
from e2e_servers import Servers

HERE = Path(__file__).parent
TIMEOUT_S = 300

Result = dict[str, Any]


def probe(model: Path, out: Path, options: dict[str, Any]) -> Result:
    """Run `hidden_states_probe.py` in a process of its own, and return what it wrote."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE)])
    env = {**os.environ, **SERVER_ENV, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / "hidden_states_probe.py"), str(model), str(out), json.dumps(options)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result: Result = json.loads(out.read_text())
    result["log"] = done.stdout + done.stderr
    return result


@ahead(num_starts=1)
def on(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run with hidden states."""
    return probe(servers.model, tmp_path_factory.mktemp("on") / "out.json", {"hidden_states": True})


@ahead(num_starts=1)
def off(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The run without."""
    return probe(servers.model, tmp_path_factory.mktemp("off") / "out.json", {})


def last_states(model: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """Transformers' post-norm hidden state of each prompt's last token."""
    import torch
    from transformers import AutoModel

    reference = AutoModel.from_pretrained(model, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [reference(input_ids=torch.tensor([tokens])).last_hidden_state[0, -1].numpy() for tokens in prompts]


def test_every_vector_is_that_of_its_prompts_last_token(on: Result, model: Path) -> None:
    """Short, in chunks, with a prefix hit, with prompt logprobs, preempted, together: one vector each, and the right one."""
    assert on["answers"]["hit"][0][1] > 0 and on["answers"]["whole blocks hit"][0][1] > 0
    assert on["preempted"] > 0
    received = [request_id for request_id, _ in on["vectors"]]
    assert len(received) == len(set(received)), "a prompt ends once"
    assert set(received) == set(on["prompts"])
    vectors = [np.array(vector) for _, vector in on["vectors"]]
    for vector, expected in zip(vectors, last_states(model, [on["prompts"][name] for name in received]), strict=True):
        assert vector.shape == expected.shape
        cosine = vector @ expected / (np.linalg.norm(vector) * np.linalg.norm(expected))
        assert cosine > 0.9999
        assert np.abs(vector - expected).max() < 1e-3 * np.abs(expected).max()


def test_the_vectors_differ_between_prompts(on: Result) -> None:
    """What the comparison above rests on."""
    distinct = {tuple(on["prompts"][request_id]): np.array(vector) for request_id, vector in on["vectors"]}
    units = np.array([vector / np.linalg.norm(vector) for vector in distinct.values()])
    assert len(units) > 5
    assert np.abs(units @ units.T - np.eye(len(units))).max() < 0.99


def test_tokens_are_the_same_with_and_without(on: Result, off: Result) -> None:
    """Nothing of the model's changes, nor of its cache hits."""
    assert on["answers"] == off["answers"]


def test_without_the_option_nothing_is_taken_or_sent(off: Result) -> None:
    """Off by default: reports come, none with a vector, and the runner was left alone."""
    assert off["reports"] > 0
    assert off["vectors"] == []
    assert "hidden states" not in off["log"]
