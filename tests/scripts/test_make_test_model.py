# SPDX-License-Identifier: Apache-2.0
"""The test model: the same bytes every time, made once, and a tokenizer that loses nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from scripts.make_test_model import VOCABULARY, make_test_model

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one small layer."""
    return make_test_model(tmp_path_factory.mktemp("models") / "model", layers=1, hidden=128)


def hashes(folder: Path) -> dict[str, str]:
    """Hash every file of `folder`."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_two_makes_give_identical_files(model: Path, tmp_path: Path) -> None:
    again = make_test_model(tmp_path / "again", layers=1, hidden=128)
    assert hashes(again) == hashes(model)
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= hashes(model).keys()


def test_another_seed_gives_other_weights(model: Path, tmp_path: Path) -> None:
    other = make_test_model(tmp_path / "other", layers=1, hidden=128, seed=1)
    assert hashes(other)["model.safetensors"] != hashes(model)["model.safetensors"]
    assert hashes(other)["tokenizer.json"] == hashes(model)["tokenizer.json"]


def test_a_complete_model_is_left_alone(tmp_path: Path) -> None:
    folder = make_test_model(tmp_path / "parent" / "model", layers=1, hidden=128)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    make_test_model(folder, layers=1, hidden=128)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    (folder / "test-model.json").unlink()
    make_test_model(folder, layers=1, hidden=128)
    assert (folder / "model.safetensors").stat().st_mtime_ns != before
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="multiple of 128"):
        make_test_model(tmp_path / "model", hidden=200)
    assert not any(tmp_path.iterdir())


def test_tokenizer_and_chat_template(model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = 'Text, {"json": [1, 2]},\n\tünïcödé and 漢字 🙂'
    assert len(tokenizer) == VOCABULARY
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    call = {"function": {"name": "look", "arguments": {"at": "it"}}}
    shown = tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "seen"},
        ],
        tokenize=False,
        add_generation_prompt=True,
        tools=[{"type": "function", "function": {"name": "look"}}],
    )
    assert shown == (
        "<|im_start|>system\nTools:\n"
        '{"type": "function", "function": {"name": "look"}}<|im_end|>\n'
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nLook.<|im_end|>\n"
        "<|im_start|>assistant\n\n"
        '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nseen<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
